"""How many views go through an encoder together."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import testtime as tt
from testtime import encode as encoding


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """How many views each pass of the tiny encoder took."""
    seen: list[int] = []
    kind = type(tt.load_encoder("tiny"))
    whole = kind.encode_images
    monkeypatch.setattr(kind, "encode_images", lambda self, pixels: seen.append(len(pixels)) or whole(self, pixels))
    return seen


@pytest.mark.parametrize("views", [1, 5, 12])
def test_memory_is_bounded_however_many_images_and_views_there_are(sizes, monkeypatch, views) -> None:
    encoder = tt.load_encoder("tiny")
    images = [Image.effect_noise((40, 30), 50 + n).convert("RGB") for n in range(7)]

    def encoded():
        return encoding.encode_views(encoder, images, range(7), views=views, seed=3, augmix=False)

    expected = encoded()
    sizes.clear()
    monkeypatch.setattr(encoding, "AT_ONCE", 10)
    features = encoded()
    assert max(sizes) <= 10 and sum(sizes) == 7 * views
    assert features.shape[:2] == (7, views)
    torch.testing.assert_close(features, expected)


def test_progress_is_told_more_often_where_images_have_many_views(sizes, tmp_path) -> None:
    encoder = tt.load_encoder("tiny")
    task = tt.build_task(encoder, ["cat", "dog"], templates=["a photo of a {}."])
    paths = [tmp_path / f"{n}.png" for n in range(5)]
    for path in paths:
        Image.new("RGB", (20, 20), "teal").save(path)
    told: list[int] = []
    encoding.encode(encoder, task, paths, tmp_path / "f.safetensors", views=encoding.AT_ONCE // 2, progress=told.append)
    assert told == [2, 4, 5]
