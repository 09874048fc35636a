"""Views by matrix products are Pillow's up to rounding. Differences are mean absolute ones, in grey levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sampled import Operation
from torch import Tensor

from testtime.images import gpu_views as fast
from testtime.images import views as plain
from testtime.images.draw import NAMES, NOTHING, STEPS, Mixes, draw
from testtime.images.views import OPERATIONS
from testtime.types import InputError, Preprocess

LEVEL = 1 / 255
AMOUNTS = {
    "posterize": (4,),
    "rotate": (3, 1, 0, -2),
    "solarize": (250, 231),
    "shear_x": (0.03, -0.003),
    "shear_y": (0.003, -0.03),
    "translate_x": (7, -1),
    "translate_y": (2, -7),
}


def raw(size: int = 48, resize: int = 48, **settings: object) -> Preprocess:
    """A preprocess that leaves pixels between 0 and 1."""
    return Preprocess(size=size, resize=resize, mean=(0, 0, 0), std=(1, 1, 1), **settings)  # type: ignore[arg-type]


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes with some noise on them, as photographs have."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return Image.fromarray((smooth + random.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8))


def views(
    image: Image.Image, count: int, preprocess: Preprocess, dtype: torch.dtype = torch.float32, **plan: int
) -> Tensor:
    """The clean view and `count - 1` random ones, as `plain.views` gives them."""
    sampled = draw(image.size, count, preprocess.size, **plan)
    return fast.normalise(fast.grey_views([fast.as_pixels(image)], [sampled], preprocess)[0], preprocess, dtype)


def operate(images: Tensor, operations: dict[int, Operation]) -> None:
    """Apply one operation to each of some images, in place."""
    codes, amounts = np.full((len(images), 1, STEPS), NOTHING), np.zeros((len(images), 1, STEPS))
    for row, (name, amount) in operations.items():
        codes[row, 0, 0], amounts[row, 0, 0] = NAMES.index(name), amount
    chains = Mixes(codes, amounts, np.ones((len(images), 1)), np.zeros(len(images)))
    fast.operate(images, fast.plan_steps([chains], images.shape[-1])[0][0])


def levels(first: Tensor, second: Tensor) -> Tensor:
    """Mean absolute difference of each view, in grey levels."""
    return (first - second).abs().flatten(1).mean(1) / LEVEL


@pytest.mark.parametrize("extent", [(1, 1), (1, 9), (40, 60), (300, 200), (33, 470), (500, 375)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crops_are_pillows(extent: tuple[int, int], interpolation: str) -> None:
    image, preprocess = photo(*extent), raw(interpolation=interpolation)
    expected = plain.views(image, 16, preprocess, seed=1, index=2)
    difference = levels(views(image, 16, preprocess, seed=1, index=2), expected)
    assert difference.max() < 0.1


@pytest.mark.parametrize(
    "preprocess",
    [raw(32, 40), raw(40, 32), raw(33, 20), raw(32, 37, mode="squash"), Preprocess(size=32, resize=32)],
)
def test_clean_view_is_pillows(preprocess: Preprocess) -> None:
    for extent in ((200, 131), (64, 300), (20, 20)):
        image = photo(*extent)
        ours, theirs = views(image, 1, preprocess, seed=0, index=0), plain.clean(image, preprocess)[None]
        # for tall images Pillow resizes the columns first, and rounds in between
        assert levels(ours, theirs).max() * min(preprocess.std) < (0.1 if extent != (64, 300) else 0.3)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_pillows(name: str) -> None:
    for seed, amount in enumerate(AMOUNTS.get(name, (0,) * 4)):
        image = photo(48, 48, seed)
        expected = np.asarray(OPERATIONS[name](image, amount)).astype(float)
        images = fast.as_pixels(image).permute(2, 0, 1)[None].repeat(3, 1, 1, 1)
        operate(images, {1: Operation(name, amount)})
        assert np.abs(images[1].permute(1, 2, 0).numpy() - expected).mean() < 0.05
        untouched = fast.as_pixels(image).permute(2, 0, 1)
        assert torch.equal(images[0], untouched) and torch.equal(images[2], untouched)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
@pytest.mark.parametrize("colours", [[0], [255], [7, 8], [0, 100, 255]])
def test_image_of_few_levels_has_pillows_tables(name: str, colours: list[int]) -> None:
    pixels = np.random.default_rng(0).choice(colours, (32, 32, 3)).astype(np.uint8)
    expected = np.asarray(OPERATIONS[name](Image.fromarray(pixels), 0))
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].clone()
    operate(images, {0: Operation(name, 0)})
    assert np.array_equal(images[0].permute(1, 2, 0).numpy(), expected)


def test_all_operations_at_once_are_those_alone() -> None:
    image = photo(40, 40)
    pixels = fast.as_pixels(image).permute(2, 0, 1)
    chosen = {row: Operation(name, AMOUNTS.get(name, (0,))[0]) for row, name in enumerate(reversed(OPERATIONS))}
    together = pixels.repeat(len(chosen), 1, 1, 1)
    operate(together, chosen)
    for row, operation in chosen.items():
        alone = pixels[None].clone()
        operate(alone, {0: operation})
        assert torch.equal(alone[0], together[row])


def test_augmix_views_are_pillows() -> None:
    for index, extent in enumerate([(300, 200), (120, 160)]):
        image = photo(*extent, seed=index)
        expected = plain.views(image, 40, raw(), seed=3, index=index, augmix=True)
        difference = levels(views(image, 40, raw(), seed=3, index=index, augmix=True), expected)
        assert difference.mean() < 0.1 and difference.max() < 1


@pytest.mark.parametrize("augmix", [False, True])
@pytest.mark.parametrize("precision, most", [(torch.float16, 0.5), (torch.bfloat16, 3)])
def test_lower_precision_stays_within_a_level(augmix: bool, precision: torch.dtype, most: float) -> None:
    image = photo(300, 200)
    sampled = draw(image.size, 12, 48, seed=3, index=1, augmix=augmix)
    grey = fast.grey_views([fast.as_pixels(image)], [sampled], raw(), precision=precision)[0]
    assert grey.dtype == precision
    expected = plain.views(image, 12, raw(), seed=3, index=1, augmix=augmix)
    difference = levels(fast.normalise(grey, raw(), torch.float32), expected)
    assert difference.mean() < 1 and difference.max() < most


def test_images_of_several_sizes_are_those_alone() -> None:
    images = [photo(90, 70), photo(64, 128, 1), photo(31, 33, 2)]
    sampled = [draw(image.size, 6, 48, seed=0, index=i, augmix=True) for i, image in enumerate(images)]
    together = fast.grey_views([fast.as_pixels(image) for image in images], sampled, raw())
    for row, image in enumerate(images):
        alone = fast.grey_views([fast.as_pixels(image)], [sampled[row]], raw())[0]
        assert (together[row] - alone).abs().mean() < 0.01


def test_long_strip_goes_through_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    image, short = photo(20, 400), photo(90, 70)
    sampled = [draw(each.size, 5, 48, seed=0, index=0) for each in (short, image)]
    whole = fast.grey_views([fast.as_pixels(each) for each in (short, image)], sampled, raw())
    monkeypatch.setattr(fast, "LONGEST", 300)
    strip = fast.grey_views([fast.as_pixels(each) for each in (short, image)], sampled, raw())
    assert (whole - strip).abs().mean() < 0.1
    expected = plain.views(image, 5, raw(), seed=0, index=0)
    assert torch.allclose(strip[1] / 255, expected)
    assert views(image, 5, raw(), seed=0, index=0).shape == (5, 3, 48, 48)  # with nothing else in the batch


def test_pixels_come_in_the_models_dtype_and_normalised() -> None:
    image, preprocess = photo(60, 50), Preprocess(size=32, resize=32)
    ours = views(image, 3, preprocess, seed=0, index=0, dtype=torch.bfloat16)
    theirs = plain.views(image, 3, preprocess, seed=0, index=0)
    assert ours.dtype == torch.bfloat16
    assert torch.allclose(ours.float(), theirs, atol=0.03)


@pytest.mark.parametrize("wrong", ["path", torch.zeros(3, 4, 4), torch.zeros(0, 4, 3, dtype=torch.uint8)])
def test_anything_but_an_image_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="Expected|must be"):
        fast.as_pixels(wrong)  # type: ignore[arg-type]


def test_empty_image_is_refused() -> None:
    with pytest.raises(InputError, match="is empty"):
        fast.as_pixels(Image.new("RGB", (0, 5)))
