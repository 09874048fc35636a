"""The pipeline gives the plain loop's features and answers, in order, and errors in their turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import testtime as tt
from testtime import load_encoder
from testtime.encode import encode_views
from testtime.fast import pipeline
from testtime.fast.encoder import FastEncoder
from testtime.fast.graph import Runner
from testtime.images import read_image
from testtime.types import ImageError, InputError

PLAIN = load_encoder("tiny")
FAST = FastEncoder(PLAIN)


def photo(seed: int, width: int = 60, height: int = 44) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(9):
        photo(number, 50 + 7 * number).save(folder / f"{number}.jpg", quality=95)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def expected(paths: list[Path]) -> torch.Tensor:
    images = [read_image(path) for path in paths]
    return encode_views(PLAIN, images, range(3, 12), views=5, seed=7, augmix=True)


@pytest.mark.parametrize("batch", [1, 4, 20])
def test_plain_encoder_gives_exactly_the_plain_features(paths: list[Path], expected: Any, batch: int) -> None:
    found = list(pipeline.stream(PLAIN, paths, views=5, seed=7, augmix=True, batch=batch, first=3))
    assert [entry.index for entry in found] == list(range(3, 12))
    assert [entry.source for entry in found] == paths
    torch.testing.assert_close(torch.stack([e.features for e in found]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("decode", ["pillow", "torchvision"])
def test_fast_encoder_gives_the_same_up_to_rounding(paths: list[Path], expected: Any, decode: Any) -> None:
    found = list(pipeline.stream(FAST, paths, views=5, seed=7, augmix=True, batch=4, first=3, decode=decode))
    features = torch.stack([entry.features for entry in found])
    assert features.shape == expected.shape
    assert (features * expected).sum(-1).min() > 0.999


class Member:
    """An image in an archive."""

    def __init__(self, path: Path) -> None:
        self.read_bytes = path.read_bytes


def test_images_come_as_files_members_pillow_images_or_pixels(paths: list[Path]) -> None:
    image = read_image(paths[0])
    pixels = torch.from_numpy(np.array(image))
    for encoder in (PLAIN, FAST):
        # all at index 0: what differs is how they are given
        kinds = (paths[0], str(paths[0]), Member(paths[0]), image, pixels)
        rows = [next(pipeline.stream(encoder, [given], views=3)).features for given in kinds]
        assert all(torch.equal(rows[0], other) for other in rows[1:])
    member = next(pipeline.stream(FAST, [Member(paths[0])], views=3, decode="torchvision"))
    assert (member.features * rows[0]).sum(-1).min() > 0.999


@pytest.mark.parametrize("decode", ["pillow", "torchvision"])
@pytest.mark.parametrize("batch", [1, 3])
def test_bad_image_is_reported_in_its_turn(paths: list[Path], tmp_path: Path, decode: Any, batch: int) -> None:
    cut, text = tmp_path / "cut.jpg", tmp_path / "text.jpg"
    content = paths[0].read_bytes()
    cut.write_bytes(content[:300])
    text.write_text("no image")
    given = [paths[0], cut, text, tmp_path / "missing.jpg", paths[1]]
    found = list(pipeline.stream(FAST, given, views=2, batch=batch, decode=decode))
    assert [entry.error is None for entry in found] == [True, False, False, False, True]
    assert [entry.features is None for entry in found] == [False, True, True, True, False]
    for entry, name in zip(found[1:4], ("cut", "text", "missing"), strict=True):
        assert isinstance(entry.error, ImageError) and f"{name}.jpg" in str(entry.error)
    # what follows is seeded by its own index, whatever happened before
    alone = next(pipeline.stream(FAST, [paths[1]], views=2, first=4, decode=decode))
    torch.testing.assert_close(found[4].features, alone.features, atol=1e-5, rtol=0)


def test_all_images_bad_gives_only_errors(tmp_path: Path) -> None:
    for encoder in (PLAIN, FAST):
        found = list(pipeline.stream(encoder, [tmp_path / "a.jpg", tmp_path / "b.jpg"]))
        assert len(found) == 2 and all(entry.error for entry in found)


def test_turned_photograph_is_turned_back(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[pipeline.EXIF_ORIENTATION] = 6
    photo(1, 90, 40).save(tmp_path / "turned.jpg", exif=exif)
    rows = [
        next(pipeline.stream(FAST, [tmp_path / "turned.jpg"], decode=decode)).features
        for decode in ("pillow", "torchvision")
    ]
    assert torch.equal(*rows)  # not decoded by what knows nothing of orientation


@pytest.mark.parametrize("encoder", [PLAIN, FAST])
def test_answers_are_those_of_the_plain_loop(encoder: Any, paths: list[Path], tmp_path: Path) -> None:
    task = tt.build_task(PLAIN, ["cat", "dog", "fox"])
    method = tt.make_method("dpe")
    given = [*paths[:5], tmp_path / "missing.jpg", *paths[5:]]
    runner = Runner(method, task, 6, steps=2)
    found = list(pipeline.classify(runner, encoder, given, views=6, batch=2))
    features = [entry.features for entry in pipeline.stream(encoder, given, views=6) if entry.features is not None]
    expected, state = method.scan(task, method.init(task), torch.stack(features))
    assert [answer.index for answer in found] == list(range(10)) and isinstance(found[5].error, ImageError)
    logits = torch.stack([answer.logits for answer in found if answer.logits is not None])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    assert int(runner.state().updates) == int(state.updates)


def test_only_as_many_images_are_taken_as_are_worked_on(paths: list[Path]) -> None:
    taken = []

    def endless() -> Iterator[Path]:
        for number in range(10_000):
            taken.append(number)
            yield paths[number % len(paths)]

    source = pipeline.stream(FAST, endless(), batch=2)
    next(source)
    source.close()
    assert len(taken) <= 2 * (2 * pipeline.AHEAD + 2)


def test_images_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(path: Path) -> Image.Image:
        time.sleep(0.1)
        return photo(0)

    monkeypatch.setattr(pipeline, "read_image", slow)
    start = time.perf_counter()
    assert len(list(pipeline.stream(FAST, [Path("x")] * 16, batch=8, workers=8))) == 16
    assert time.perf_counter() - start < 1.2  # 1.6 one after another


def test_unexpected_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Image.Image:
        raise KeyError("a bug")

    monkeypatch.setattr(pipeline, "read_image", broken)
    with pytest.raises(KeyError, match="a bug"):
        list(pipeline.stream(FAST, [Path("x")]))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="batch=0"):
        next(pipeline.stream(PLAIN, [], batch=0))
    with pytest.raises(InputError, match="decode='fast'"):
        next(pipeline.stream(PLAIN, [], decode="fast"))  # type: ignore[arg-type]


@pytest.mark.parametrize("encoder", [PLAIN, FAST])
def test_without_gaps_a_session_goes_on_as_in_its_own_loop(encoder: Any, paths: list[Path], tmp_path: Path) -> None:
    task = tt.build_task(PLAIN, ["cat", "dog", "fox"])
    given = [tmp_path / "first.jpg", paths[0], paths[1], tmp_path / "missing.jpg", *paths[2:]]
    plain = tt.Session(task, "dpe", encoder=PLAIN, views=4, seed=5)
    expected = list(plain.run(given, batch=3, on_error=lambda *_: None))
    session = tt.Session(task, "dpe", encoder=encoder, views=4, seed=5)
    entries = list(pipeline.stream(encoder, given, views=4, seed=5, batch=3, gaps=False))
    good = [entry for entry in entries if entry.features is not None]
    assert [entry.index for entry in good] == list(range(9)) and len(entries) == 11
    close = 1e-3 if encoder is PLAIN else 2.0  # grey levels that round the other way move the tiny encoder
    for entry, (source, prediction) in zip(good, expected, strict=True):
        assert entry.source == source
        assert (session.step(entry.features).logits - prediction.logits).abs().max() < close


def test_a_session_that_reads_ahead_gives_its_own_loop_s_answers(paths, tmp_path, monkeypatch) -> None:
    task = tt.build_task(PLAIN, ["cat", "dog", "fox"])
    given = [tmp_path / "first.jpg", *paths[:3], tmp_path / "missing.jpg", *paths[3:]]

    def run(session: tt.Session) -> tuple[list[Any], list[Path]]:
        bad: list[Path] = []
        return list(session.run(given, batch=3, on_error=lambda source, _: bad.append(source))), bad

    expected, missing = run(tt.Session(task, "dpe", encoder=PLAIN, views=4, seed=5))
    monkeypatch.setattr(tt.Session, "_overlaps", lambda self: True)
    session = tt.Session(task, "dpe", encoder=PLAIN, views=4, seed=5)
    answers, bad = run(session)
    assert bad == missing and session.count == 9
    for (source, ours), (same, plain) in zip(answers, expected, strict=True):
        assert source == same
        assert (ours.logits - plain.logits).abs().max() < 2.0  # grey levels that round the other way
    with pytest.raises(ImageError, match="first.jpg"):
        next(tt.Session(task, "dpe", encoder=PLAIN).run(given))
    features = torch.randn(3, task.dim)
    assert len(list(tt.Session(task, "dpe", encoder=PLAIN).run(features))) == 3
