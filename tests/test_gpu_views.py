"""What reaches the GPU: pixels that are checked, and Triton only where it works."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from testtime.images import gpu_views
from testtime.machine import capture
from testtime.types import InputError, Preprocess

CPU = torch.device("cpu")


@pytest.mark.parametrize("wrong", ["path", torch.zeros(3, 4, 4), torch.zeros(0, 4, 3, dtype=torch.uint8)])
def test_anything_but_an_image_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="Expected|must be"):
        gpu_views.as_pixels(wrong)  # type: ignore[arg-type]


def test_empty_image_is_refused() -> None:
    with pytest.raises(InputError, match="is empty"):
        gpu_views.as_pixels(Image.new("RGB", (0, 5)))


def test_pixels_are_those_of_the_image() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for given in (Image.fromarray(pixels), pixels, torch.from_numpy(pixels)):
        assert np.array_equal(gpu_views.as_pixels(given).numpy(), pixels)


@pytest.mark.parametrize("augmix", [False, True])
def test_triton_is_tried_once_with_the_kernels_that_the_views_need(
    augmix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(gpu_views, "grey_views", lambda *given: tried.append(given))
    preprocess = Preprocess(size=17, resize=17)
    assert gpu_views.works(CPU, preprocess, augmix) and gpu_views.works(CPU, preprocess, augmix)
    ((_, (drawn,), used),) = tried
    assert used == preprocess and len(drawn) == 1 and (drawn.mixes is not None) == augmix


def test_without_triton_there_is_one_warning_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    capture._warned.clear()
    monkeypatch.setattr(gpu_views, "grey_views", broken)
    with pytest.warns(RuntimeWarning) as caught:
        found = [gpu_views.works(CPU, Preprocess(size=size, resize=18), False) for size in (18, 18, 19)]
    assert found == [False] * 3
    assert [str(warning.message) for warning in caught] == [
        "Triton cannot make the views; Pillow makes them on the CPU, more slowly "
        "(RuntimeError: Failed to find C compiler.)."
    ]


def test_full_memory_is_no_reason_to_give_up_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_views, "grey_views", full)
    with pytest.raises(torch.OutOfMemoryError):
        gpu_views.works(CPU, Preprocess(size=20, resize=20), False)
