"""Encoding into a store: once, in shards, gone on with where it was stopped."""

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
    """Seven images, of which the third is none."""
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
def test_few_views_pass_the_encoder_together_however_many_there_are(sizes, encoder, task, paths, tmp_path, views):
    encoding.encode(encoder, task, paths, tmp_path / "f", ViewPlan(views), on_skip=lambda line: None)
    assert max(sizes) <= ROWS and sum(sizes) == 6 * views


def test_progress_is_told_of_every_image_readable_or_not(encoder, task, paths, tmp_path):
    told: list[int] = []
    encoding.encode(encoder, task, paths, tmp_path / "f", PLAN, on_skip=lambda line: None, progress=told.append)
    assert told == [1, 2, 3, 4, 5, 6, 7]


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


def test_an_unreadable_image_is_raised_where_nobody_asks_to_skip_it(encoder, task, paths, tmp_path):
    with pytest.raises(InputError, match="2.png"):
        encoding.encode(encoder, task, paths, tmp_path / "f", PLAN)
    assert not (tmp_path / "f").exists()


def test_nothing_is_written_where_no_image_can_be_read(encoder, task, tmp_path):
    with pytest.raises(InputError, match="None of the 2 images could be read"):
        encoding.encode(encoder, task, [tmp_path / "a", tmp_path / "b"], tmp_path / "f", on_skip=lambda line: None)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("shard", [1, 2, 3, 7, 9])
def test_shards_hold_the_features_of_one_file_to_the_last_bit(encoder, task, paths, tmp_path, shard):
    for place, size in (("one", None), ("many", shard)):
        encoding.encode(
            encoder, task, paths, tmp_path / place, PLAN, dtype=torch.float32, shard=size, on_skip=lambda line: None
        )
    one, many = Features(tmp_path / "one"), Features(tmp_path / "many")
    assert torch.equal(one.read(0, 6), many.read(0, 6)) and one.images == many.images


@pytest.mark.parametrize("lost", [(0,), (1, 2), (0, 1, 2, 3)])
def test_only_shards_that_are_missing_are_encoded_and_to_the_same_bytes(
    encoder, task, paths, tmp_path, sizes, lost
) -> None:
    told: list[int] = []

    def encode() -> int:
        return encoding.encode(
            encoder, task, paths, tmp_path / "f", PLAN,
            shard=2, resume=True, on_skip=lambda line: None, progress=told.append,
        )  # fmt: skip

    assert encode() == 6
    shards = sorted((tmp_path / "f").glob("features-*"))
    before = [shard.read_bytes() for shard in shards]
    for number in lost:
        shards[number].unlink()
    sizes.clear(), told.clear()
    assert encode() == 6
    assert [shard.read_bytes() for shard in shards] == before
    images = sum(2 if number in (0, 2) else 1 for number in lost)  # the third of seven is none
    assert sum(sizes) == 3 * images and told[-1] == 7
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
