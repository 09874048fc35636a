"""Encoding into a store: once, in shards, resumed where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from tolerances import assert_close

import testtime as tt
from testtime import Features
from testtime.encoding import encode as encoding
from testtime.encoding.stream import ROWS, stream
from testtime.types import InputError, ViewPlan

PLAN = ViewPlan(3, seed=3)


@pytest.fixture(scope="module")
def encoder():
    return tt.load_encoder("tiny")


@pytest.fixture(scope="module")
def task(encoder):
    return tt.build_task(encoder, ["cat", "dog"], templates=["a photo of a {}."])


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    """Seven files; the third is not an image."""
    made = [tmp_path / f"{n}.png" for n in range(7)]
    for number, path in enumerate(made):
        Image.effect_noise((40, 30), 50 + number).convert("RGB").save(path)
    made[2].write_text("no image")
    return made


@pytest.fixture
def sizes(monkeypatch, encoder) -> list[int]:
    """How many views each pass of the tiny encoder took."""
    seen: list[int] = []
    kind = type(encoder)
    whole = kind.encode_images
    monkeypatch.setattr(kind, "encode_images", lambda self, pixels: seen.append(len(pixels)) or whole(self, pixels))
    return seen


@pytest.mark.parametrize("views", [1, 5, 20])
def test_the_encoder_gets_few_views_at_a_time_however_many_there_are(sizes, encoder, task, paths, tmp_path, views):
    encoding.encode(encoder, task, paths, tmp_path / "f", ViewPlan(views), on_skip=lambda line: None)
    assert max(sizes) <= ROWS and sum(sizes) == 6 * views


def test_progress_counts_every_image_readable_or_not(encoder, task, paths, tmp_path):
    counts: list[int] = []
    encoding.encode(encoder, task, paths, tmp_path / "f", PLAN, on_skip=lambda line: None, progress=counts.append)
    assert counts == [1, 2, 3, 4, 5, 6, 7]


def test_a_store_holds_the_features_of_the_images_that_can_be_read(encoder, task, paths, tmp_path):
    skipped: list[str] = []
    labels = [0, 1, 0, 1, 1, 0, 0]
    count = encoding.encode(
        encoder, task, paths, tmp_path / "f", PLAN, labels=labels, dtype=torch.float32, on_skip=skipped.append
    )
    store = Features(tmp_path / "f")
    assert count == len(store) == 6 and len(skipped) == 1 and "2.png" in skipped[0]
    assert store.labels.tolist() == [0, 1, 1, 1, 0, 0]
    assert store.images == tuple(str(path) for n, path in enumerate(paths) if n != 2)
    entries = [entry.features for entry in stream(encoder, paths, PLAN) if entry.features is not None]
    assert_close(store.read(0, 6), torch.stack(entries), "arithmetic")


def test_an_unreadable_image_is_raised_without_on_skip(encoder, task, paths, tmp_path):
    with pytest.raises(InputError, match="2.png"):
        encoding.encode(encoder, task, paths, tmp_path / "f", PLAN)
    assert not (tmp_path / "f").exists()


def test_nothing_is_written_if_no_image_can_be_read(encoder, task, tmp_path):
    with pytest.raises(InputError, match="None of the 2 images could be read"):
        encoding.encode(encoder, task, [tmp_path / "a", tmp_path / "b"], tmp_path / "f", on_skip=lambda line: None)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("shard", [1, 2, 3, 7, 9])
def test_shards_equal_a_single_file_bitwise(encoder, task, paths, tmp_path, shard):
    for name, size in (("one", None), ("many", shard)):
        encoding.encode(
            encoder, task, paths, tmp_path / name, PLAN, dtype=torch.float32, shard=size, on_skip=lambda line: None
        )
    one, many = Features(tmp_path / "one"), Features(tmp_path / "many")
    assert torch.equal(one.read(0, 6), many.read(0, 6)) and one.images == many.images


@pytest.mark.parametrize("lost", [(0,), (1, 2), (0, 1, 2, 3)])
def test_only_missing_shards_are_encoded_and_to_the_same_bytes(encoder, task, paths, tmp_path, sizes, lost) -> None:
    counts: list[int] = []

    def encode() -> int:
        return encoding.encode(
            encoder, task, paths, tmp_path / "f", PLAN,
            shard=2, resume=True, on_skip=lambda line: None, progress=counts.append,
        )  # fmt: skip

    assert encode() == 6
    shards = sorted((tmp_path / "f").glob("features-*"))
    before = [shard.read_bytes() for shard in shards]
    for number in lost:
        shards[number].unlink()
    sizes.clear(), counts.clear()
    assert encode() == 6
    assert [shard.read_bytes() for shard in shards] == before
    images = sum(2 if number in (0, 2) else 1 for number in lost)  # the third of seven is not an image
    assert sum(sizes) == 3 * images and counts[-1] == 7
    sizes.clear()
    assert encode() == 6 and sizes == []


def test_shards_of_another_plan_are_refused(encoder, task, paths, tmp_path):
    options = dict(shard=2, resume=True, on_skip=lambda line: None)
    encoding.encode(encoder, task, paths, tmp_path / "f", PLAN, **options)
    for plan in (ViewPlan(3, seed=4), ViewPlan(3, True, 3), ViewPlan(2, seed=3)):
        with pytest.raises(InputError, match="other settings, classes or prompts"):
            encoding.encode(encoder, task, paths, tmp_path / "f", plan, **options)
    with pytest.raises(InputError, match="shard=0"):
        encoding.encode(encoder, task, paths, tmp_path / "f", PLAN, shard=0)
