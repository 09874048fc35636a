"""Views: the clean one is torchvision's, the others depend on (seed, index, row) alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sampled import ViewParameters, entries
from torchvision import transforms
from torchvision.transforms import functional

from testtime.images.draw import NAMES, draw
from testtime.images.views import OPERATIONS, _affine, _augmix, _crop, clean, views
from testtime.types import InputError, Preprocess

DATA = Path(__file__).parents[2] / "shared" / "data"
SMALL = Preprocess(size=32, resize=32)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with noise on top, so that filters have both to work on."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    slope = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    return Image.fromarray(((noise + 2 * slope) / 3).astype(np.uint8))


def sample_views(extent: tuple[int, int], count: int, size: int, **options: Any) -> list[ViewParameters]:
    """The parameters of `views` for an image of `extent`: count - 1 entries, from row 1 on."""
    return entries(draw(extent, count, size, **options))


def torchvision_clean(image: Image.Image, preprocess: Preprocess) -> torch.Tensor:
    filter = transforms.InterpolationMode(preprocess.interpolation)
    side = preprocess.resize
    return transforms.Compose(
        [
            transforms.Resize(side if preprocess.mode == "shortest" else (side, side), filter, antialias=True),
            transforms.CenterCrop(preprocess.size),
            transforms.ToTensor(),
            transforms.Normalize(preprocess.mean, preprocess.std),
        ]
    )(image)


@pytest.mark.parametrize("extent", [(1, 1), (1, 7), (32, 32), (33, 47), (100, 32), (301, 200), (31, 403), (640, 75)])
@pytest.mark.parametrize(
    "preprocess",
    [
        SMALL,
        Preprocess(size=32, resize=37),
        Preprocess(size=32, resize=32, mode="squash"),
        Preprocess(size=32, resize=40, mode="squash", interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1)),
        Preprocess(size=33, resize=20),
    ],
)
def test_clean_view_equals_torchvision(extent: tuple[int, int], preprocess: Preprocess) -> None:
    image = photo(*extent)
    result = clean(image, preprocess)
    assert result.shape == (3, preprocess.size, preprocess.size) and result.dtype == torch.float32
    assert torch.equal(result, torchvision_clean(image, preprocess))


@pytest.mark.parametrize("extent", [(1, 40), (3, 200), (200, 3), (7, 300), (301, 7)])
@pytest.mark.parametrize("size, resize", [(32, 32), (16, 24), (40, 32)])
# Pillow may choose another order of its two passes, and bicubic overshoot is clipped in between
@pytest.mark.parametrize("interpolation, levels", [("bilinear", 1), ("bicubic", 16)])
def test_long_strip_agrees_with_torchvision_to_a_few_grey_levels(
    extent: tuple[int, int], size: int, resize: int, interpolation: str, levels: int
) -> None:
    preprocess = Preprocess(size=size, resize=resize, interpolation=interpolation, mean=(0,) * 3, std=(1,) * 3)
    difference = clean(photo(*extent), preprocess) - torchvision_clean(photo(*extent), preprocess)
    assert difference.abs().max() * 255 < levels + 0.01
    assert difference.abs().mean() * 255 < 0.5


def test_one_pixel_wide_image_needs_little_memory() -> None:
    image = Image.new("RGB", (1, 1_000_000), "white")  # torchvision would ask for 150 GB
    assert views(image, 3, Preprocess(), seed=0, index=0).shape == (3, 3, 224, 224)


def test_clean_view_of_a_photograph_equals_torchvision() -> None:
    path = next(iter(sorted(DATA.glob("pacs/photo/*/*.jpg"))), None)
    if path is None:
        pytest.skip(f"no photographs under {DATA}")
    with Image.open(path) as file:
        image = file.convert("RGB")
    assert torch.equal(clean(image, Preprocess()), torchvision_clean(image, Preprocess()))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1"])
def test_image_of_another_mode_is_converted_to_rgb(mode: str) -> None:
    image = photo(50, 40).convert(mode)
    assert torch.equal(clean(image, SMALL), clean(image.convert("RGB"), SMALL))


def test_row_zero_is_the_clean_view_and_the_rest_are_not() -> None:
    image = photo(60, 45)
    rows = views(image, 5, SMALL, seed=1, index=2)
    assert rows.shape == (5, 3, 32, 32) and rows.dtype == torch.float32
    assert torch.equal(rows[0], clean(image, SMALL))
    assert len({row.numpy().tobytes() for row in rows}) == 5


@pytest.mark.parametrize("augmix", [False, True])
def test_view_three_is_the_same_among_eight_and_sixty_four(augmix: bool) -> None:
    image = photo(60, 45)
    few = views(image, 8, SMALL, seed=1, index=2, augmix=augmix)
    many = views(image, 64, SMALL, seed=1, index=2, augmix=augmix)
    assert torch.equal(few, many[:8])


def test_views_depend_on_seed_and_index_and_not_on_which_is_which() -> None:
    def crops(seed: int, index: int) -> tuple:
        return tuple(sample_views((640, 480), 4, 32, seed=seed, index=index))

    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (2**64 - 1, 0), (0, 2**64 - 1)]
    assert len({crops(*key) for key in keys}) == len(keys)
    assert crops(1, 2) == crops(1, 2)


def test_drawn_crop_does_not_change() -> None:
    # stored features were made with these: a change here makes every feature file stale
    first, second = sample_views((500, 375), 3, 224, seed=1, index=4711, augmix=True)
    assert first.crop == (1, 118, 370, 367, True)
    assert second.crop == (60, 216, 282, 261, True)
    assert second.augmix.chains == (
        (("posterize", 4), ("autocontrast", 0)),
        (("autocontrast", 0),),
        (("posterize", 4), ("rotate", 1)),
    )
    assert first.augmix.keep == pytest.approx(0.394563681923053, abs=1e-12)


def test_global_random_numbers_are_left_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    views(photo(40, 40), 4, SMALL, seed=0, index=0, augmix=True)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


def test_augmix_leaves_the_crops_as_they_are() -> None:
    plain = sample_views((640, 480), 20, 224, seed=3, index=5)
    mixed = sample_views((640, 480), 20, 224, seed=3, index=5, augmix=True)
    assert [view.crop for view in plain] == [view.crop for view in mixed]


@pytest.mark.parametrize("extent", [(60, 45), (300, 200), (20, 20), (1, 1)])
def test_crop_equals_torchvision_on_the_same_box(extent: tuple[int, int]) -> None:
    image = photo(*extent)
    for view in sample_views(extent, 30, 32, seed=0, index=0):
        top, left, height, width, flip = view.crop
        expected = functional.resized_crop(image, top, left, height, width, [32, 32])
        expected = functional.hflip(expected) if flip else expected
        assert np.array_equal(np.array(_crop(image, view.crop, 32)), np.array(expected))


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 1.0)])
def test_crops_are_distributed_as_torchvision_draws_them(
    scale: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testtime.images.draw.SCALE", scale)
    width, height, count = 500, 375, 3000
    ours = np.array([view.crop for view in sample_views((width, height), count + 1, 224, seed=0, index=0)])
    image = torch.empty(3, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        crop = transforms.RandomResizedCrop
        theirs = np.array([crop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(count)])
    assert abs(ours[:, 4].mean() - 0.5) < 0.04
    for column in range(4):  # two-sample Kolmogorov-Smirnov; 0.05 is p = 0.001 for 3,000 against 3,000
        assert ks_distance(ours[:, column], theirs[:, column]) < 0.05
    assert ks_distance(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < 0.05  # area
    assert ks_distance(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2]) < 0.05  # ratio


def ks_distance(a: np.ndarray, b: np.ndarray) -> float:
    points = np.concatenate([a, b])
    shares = (np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (a, b))
    return float(np.abs(np.subtract(*shares)).max())


@pytest.mark.parametrize("extent", [(10, 1000), (1000, 10), (1, 100), (100, 1)])
def test_image_too_long_for_any_crop_gives_torchvisions_central_one(
    extent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testtime.images.draw.SCALE", (0.9, 1.0))
    image = torch.empty(3, extent[1], extent[0])
    with torch.random.fork_rng():
        expected = transforms.RandomResizedCrop.get_params(image, [0.9, 1.0], [3 / 4, 4 / 3])
    for view in sample_views(extent, 5, 32, seed=0, index=0):
        assert tuple(view.crop[:4]) == tuple(expected)


@pytest.mark.parametrize("extent", [(1, 1), (1, 2), (2, 3), (7, 5), (640, 480), (9, 4000)])
def test_crop_lies_inside_the_image(extent: tuple[int, int]) -> None:
    for top, left, height, width, _ in (v.crop for v in sample_views(extent, 200, 32, seed=9, index=9)):
        assert top >= 0 and left >= 0 and height >= 1 and width >= 1
        assert left + width <= extent[0] and top + height <= extent[1]


def test_augmix_draws_what_its_paper_says() -> None:
    plans = [view.augmix for view in sample_views((500, 375), 2001, 224, seed=0, index=0, augmix=True)]
    weights = np.array([plan.weights for plan in plans])
    assert np.allclose(weights.sum(1), 1) and weights.min() >= 0
    # Dirichlet(1, 1, 1): mean 1/3, variance 1/18; Beta(1, 1): uniform
    assert np.allclose(weights.mean(0), 1 / 3, atol=0.02) and np.allclose(weights.var(0), 1 / 18, atol=0.006)
    assert ks_distance(np.array([plan.keep for plan in plans]), np.linspace(0, 1, 2000)) < 0.06
    chains = [chain for plan in plans for chain in plan.chains]
    assert all(len(plan.chains) == 3 for plan in plans)
    assert {length: round(n / 6000, 1) for length, n in Counter(map(len, chains)).items()} == {
        1: 0.3,
        2: 0.3,
        3: 0.3,
    }
    steps = [step for chain in chains for step in chain]
    assert all(abs(n / len(steps) - 1 / 9) < 0.02 for n in Counter(step.name for step in steps).values())
    amounts = {name: {step.amount for step in steps if step.name == name} for name in OPERATIONS}
    assert amounts["posterize"] == {4} and amounts["autocontrast"] == amounts["equalize"] == {0}
    assert amounts["rotate"] == {-2, -1, 0, 1, 2}
    assert amounts["solarize"] == set(range(256 - 25, 256 - 1))
    assert amounts["translate_x"] == amounts["translate_y"] == set(range(-7, 8))
    for shear in (amounts["shear_x"], amounts["shear_y"]):
        assert -0.03 < min(shear) < -0.027 and 0.027 < max(shear) < 0.03
        assert 0.003 <= min(map(abs, shear)) < 0.004


def test_augmix_equals_mixing_normalised_tensors() -> None:
    image, preprocess = photo(60, 45), SMALL
    rows = views(image, 9, preprocess, seed=4, index=1, augmix=True)
    normalise = transforms.Normalize(preprocess.mean, preprocess.std)
    for row, view in zip(rows[1:], sample_views(image.size, 9, 32, seed=4, index=1, augmix=True), strict=True):
        original = _crop(image, view.crop, 32)
        mixed = torch.zeros(3, 32, 32)
        for weight, chain in zip(view.augmix.weights, view.augmix.chains, strict=True):
            changed = original
            for name, amount in chain:
                changed = OPERATIONS[name](changed, amount)
            mixed += weight * normalise(functional.to_tensor(changed))
        keep = view.augmix.keep
        expected = keep * normalise(functional.to_tensor(original)) + (1 - keep) * mixed
        assert torch.allclose(row, expected, atol=1e-5)


def test_augmix_that_keeps_everything_is_the_crop() -> None:
    view = photo(32, 32)
    mixes = replace(draw((60, 45), 2, 32, seed=0, index=0, augmix=True).mixes, keep=np.ones(1))
    assert np.array_equal(_augmix(view, mixes, 0), np.array(view))


def test_operations_move_the_image_and_fill_with_black() -> None:
    white = Image.new("RGB", (8, 8), "white")
    moved = np.array(OPERATIONS["translate_x"](white, 2))[..., 0]
    assert (moved[:, :6] == 255).all() and (moved[:, 6:] == 0).all()
    moved = np.array(OPERATIONS["translate_y"](white, -3))[..., 0]
    assert (moved[:3] == 0).all() and (moved[3:] == 255).all()
    for pixels in range(-3, 4):
        for name, matrix in (
            ("translate_x", (1, 0, pixels, 0, 1, 0)),
            ("translate_y", (1, 0, 0, 0, 1, pixels)),
        ):
            moved = OPERATIONS[name](photo(8, 8), pixels)
            assert np.array_equal(np.array(moved), np.array(_affine(photo(8, 8), matrix)))
    assert np.array_equal(np.array(OPERATIONS["posterize"](photo(8, 8), 4)), np.array(photo(8, 8)) & 0xF0)
    assert (np.array(OPERATIONS["solarize"](white, 250)) == 0).all()
    assert tuple(OPERATIONS) == NAMES and len(NAMES) == 9


@pytest.mark.parametrize("augmix", [False, True])
def test_one_pixel_gives_views_of_its_colour(augmix: bool) -> None:
    rows = views(Image.new("RGB", (1, 1), (200, 100, 50)), 4, SMALL, seed=0, index=0, augmix=augmix)
    assert rows.shape == (4, 3, 32, 32) and rows.isfinite().all()
    assert (rows[0] == rows[0, :, :1, :1]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"count": -3},
        {"seed": -1},
        {"seed": 2**64},
        {"index": -1},
        {"image": np.zeros((4, 4, 3))},
        {"image": Image.new("RGB", (0, 3))},
    ],
)
def test_bad_argument_is_an_input_error(wrong: dict) -> None:
    right = {"image": photo(8, 8), "count": 2, "preprocess": SMALL, "seed": 0, "index": 0}
    with pytest.raises(InputError):
        views(**(right | wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"resize": -1},
        {"mode": "longest"},
        {"interpolation": "nearest"},
        {"std": (1, 1, 0)},
        {"mean": (0,)},
    ],
)
def test_bad_preprocess_is_an_input_error(wrong: dict) -> None:
    with pytest.raises(InputError):
        Preprocess(**wrong)
