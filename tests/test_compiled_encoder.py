"""The fast encoder gives the plain one's features, and goes on where memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from testtime import load_encoder
from testtime.fast import capture as capturing
from testtime.fast import encoder as fast
from testtime.fast.encoder import FastEncoder, halving
from testtime.fast.views import normalise
from testtime.types import Encoder, InputError

PLAIN = load_encoder("tiny")


@pytest.fixture(autouse=True)
def forget() -> None:
    capturing._said.clear()


def pixels(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Replays:
    """Stands in for a captured graph: runs what it was given."""

    def __init__(self, launch: Any) -> None:
        launch()
        self.replay = launch


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FastEncoder:
    """A fast encoder that takes the way through fixed blocks, without a GPU."""
    monkeypatch.setattr(fast, "capture", Replays)
    return FastEncoder(PLAIN, rows=128, compile=False, graphs=True)


def test_it_is_an_encoder() -> None:
    assert isinstance(FastEncoder(PLAIN), Encoder)


@pytest.mark.parametrize("count", [0, 1, 70])
def test_features_are_the_plain_ones(count: int) -> None:
    assert torch.equal(FastEncoder(PLAIN).encode_images(pixels(count)), PLAIN.encode_images(pixels(count)))


@pytest.mark.parametrize("count", [1, 5, 8, 64, 70, 300])
def test_blocks_of_fixed_size_give_the_same(count: int, graphs: FastEncoder) -> None:
    features = graphs.encode_images(pixels(count))
    torch.testing.assert_close(features, PLAIN.encode_images(pixels(count)), atol=1e-5, rtol=0)
    assert set(graphs._blocks) <= {1, 8, 64, 128}


def test_grey_levels_are_normalised_on_the_way(graphs: FastEncoder) -> None:
    grey = torch.randint(0, 256, (9, 3, 32, 32)).float()
    expected = PLAIN.encode_images(normalise(grey, PLAIN.preprocess, torch.float32))
    for encoder in (FastEncoder(PLAIN), graphs):
        torch.testing.assert_close(encoder.encode_grey(grey), expected, atol=1e-5, rtol=0)
    # and the next call may bring pixels of the other kind
    torch.testing.assert_close(graphs.encode_images(pixels(9)), PLAIN.encode_images(pixels(9)), atol=1e-5, rtol=0)


def test_texts_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"a photo of {number} cats" for number in range(7)]
    monkeypatch.setattr(fast, "TEXTS", 3)
    torch.testing.assert_close(FastEncoder(PLAIN).encode_texts(texts), PLAIN.encode_texts(texts), atol=1e-6, rtol=0)
    assert FastEncoder(PLAIN).encode_texts([]).shape == (0, 32)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="must be"):
        FastEncoder(PLAIN).encode_images(torch.zeros(3, 32, 32))
    with pytest.raises(InputError, match="list of texts"):
        FastEncoder(PLAIN).encode_texts("cat")


class Cramped:
    """A model with memory for so many rows and no more."""

    def __init__(self, room: int) -> None:
        self.room, self.calls = room, []
        self.visual = PLAIN.model.visual

    def encode_image(self, rows: Tensor) -> Tensor:
        self.calls.append(len(rows))
        if len(rows) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.model.encode_image(rows)


@pytest.mark.parametrize("blocks", [False, True])
def test_memory_that_runs_out_halves_the_batch(
    blocks: bool, graphs: FastEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = graphs if blocks else FastEncoder(PLAIN, rows=128)
    encoder.model = cramped = Cramped(room=40)
    with pytest.warns(RuntimeWarning, match="ran out at 128 images at a time; going on with 32"):
        features = encoder.encode_images(pixels(150))
    torch.testing.assert_close(features, PLAIN.encode_images(pixels(150)), atol=1e-5, rtol=0)
    assert cramped.calls[0] == 128 and max(cramped.calls[3:]) <= 32
    cramped.calls.clear()
    encoder.encode_images(pixels(150))
    assert max(cramped.calls) == 32  # it is remembered


def test_one_image_that_does_not_fit_is_an_error() -> None:
    encoder = FastEncoder(PLAIN)
    encoder.model = Cramped(room=0)
    with pytest.raises(torch.OutOfMemoryError):
        encoder.encode_images(pixels(4))


def test_halving_goes_on_where_it_stopped() -> None:
    done: list[tuple[int, int]] = []

    def work(start: int, stop: int, most: int) -> Tensor:
        if stop - start > (8 if start < 8 else 2):
            raise torch.OutOfMemoryError
        done.append((start, stop))
        return torch.arange(start, stop)

    result, most = halving(work, 13, 8)
    assert result.tolist() == list(range(13)) and most == 2
    assert done == [(0, 8), (8, 10), (10, 12), (12, 13)]


def test_tower_that_cannot_be_compiled_or_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no kernel for that")

    monkeypatch.setattr(fast, "compiled", lambda function: broken)
    monkeypatch.setattr(fast, "capture", broken)
    encoder = FastEncoder(PLAIN, compile=True, graphs=True)
    with pytest.warns(RuntimeWarning) as said:
        features = encoder.encode_images(pixels(3))
    torch.testing.assert_close(features, PLAIN.encode_images(pixels(3)), atol=1e-5, rtol=0)
    assert sorted(str(w.message).split(",")[0] for w in said) == [
        "Encoder 'tiny' cannot be captured",
        "Encoder 'tiny' cannot be compiled",
    ]
