"""Triton's kernels, run by its interpreter on the CPU, make Pillow's views.

Differences are mean absolute ones of each view, in grey levels. Where Pillow resizes the columns first, it rounds
something else in between.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Triton decides whether to interpret when it is imported, so this runs in its own process
PROGRAM = """
import json
import numpy as np, torch
from PIL import Image
from testtime.images import views as plain
from testtime.images import gpu_pixels as pixels
from testtime.images.draw import NAMES, NOTHING, Mixes, draw
from testtime.images.gpu_views import as_pixels, grey_views
from testtime.images.views import OPERATIONS
from testtime.types import Preprocess

AMOUNTS = {
    "posterize": (4,),
    "rotate": (3, 1, 0, -2),
    "solarize": (250, 231),
    "shear_x": (0.03, -0.003),
    "shear_y": (0.003, -0.03),
    "translate_x": (7, -1),
    "translate_y": (2, -7),
}


def photo(width, height, seed=0):  # smooth shapes with some noise on them, as photographs have
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return Image.fromarray((smooth + random.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8))


def raw(size, resize, **settings):  # leaves pixels between 0 and 1
    return Preprocess(size=size, resize=resize, mean=(0, 0, 0), std=(1, 1, 1), **settings)


def made(images, count, preprocess, **options):
    drawn = [draw(image.size, count, preprocess.size, seed=2, index=i, **options) for i, image in enumerate(images)]
    return grey_views([as_pixels(image) for image in images], drawn, preprocess)


def by_pillow(images, count, preprocess, **options):
    indexed = enumerate(images)
    return 255 * torch.stack([plain.views(im, count, preprocess, seed=2, index=i, **options) for i, im in indexed])


def apart(first, second):
    return (first - second).abs().mean((2, 3, 4)).flatten().tolist()


found = {}
images = [photo(40, 30), photo(21, 19, 1)]
for augmix in (False, True):
    given = images, 3, raw(16, 18)
    found["AugMix" if augmix else "crops"] = apart(made(*given, augmix=augmix), by_pillow(*given, augmix=augmix))
extents = [(1, 1), (1, 9), (40, 60), (90, 60), (33, 170)]
for interpolation in ("bicubic", "bilinear"):
    given = [photo(*extent) for extent in extents], 4, raw(16, 16, interpolation=interpolation)
    found[f"many {interpolation}"] = apart(made(*given), by_pillow(*given))
for name, preprocess in {
    "larger": raw(12, 16),
    "padded": raw(16, 12),
    "odd": raw(13, 8),
    "squashed": raw(12, 15, mode="squash"),
}.items():
    given = [photo(50, 33), photo(16, 75), photo(8, 8)], 1, preprocess
    found[f"clean {name}"] = apart(made(*given), by_pillow(*given))

together = made(images, 3, raw(16, 18), augmix=True)
drawn = [draw(image.size, 3, 16, seed=2, index=i, augmix=True) for i, image in enumerate(images)]
alone = [grey_views([as_pixels(image)], [rows], raw(16, 18)) for image, rows in zip(images, drawn)]
found["one by one"] = apart(together, torch.cat(alone))


def operated(grey, chosen):  # each view but the first after one operation
    operations, values = np.full((len(chosen), 3, 3), NOTHING), np.zeros((len(chosen), 3, 3))
    operations[:, 0, 0] = [NAMES.index(name) for name, _ in chosen]
    values[:, 0, 0] = [amount for _, amount in chosen]
    shares = np.tile([1.0, 0.0, 0.0], (len(chosen), 1))
    pixels.mix(grey, [Mixes(operations, values, shares, np.zeros(len(chosen)))])
    return grey[0].permute(0, 2, 3, 1)


amounts = [(name, amount) for name in NAMES for amount in AMOUNTS.get(name, (0,))]
image = photo(24, 24)
grey = operated(as_pixels(image).permute(2, 0, 1).float().repeat(1, len(amounts) + 1, 1, 1, 1), amounts)
for row, (name, amount) in zip(grey[1:], amounts):
    wanted = np.asarray(OPERATIONS[name](image, amount)).astype(float)
    found[f"{name} {amount}"] = [np.abs(row.numpy() - wanted).mean()]
found["untouched"] = [float((grey[0] - as_pixels(image)).abs().max())]
for colours in ([0], [255], [7, 8], [0, 100, 255]):
    few = np.random.default_rng(0).choice(colours, (16, 16, 3)).astype(np.uint8)
    levels = torch.from_numpy(few).permute(2, 0, 1).float().repeat(1, 3, 1, 1, 1)
    chosen = [("autocontrast", 0), ("equalize", 0)]
    for row, (name, _) in zip(operated(levels, chosen)[1:], chosen):
        wanted = np.asarray(OPERATIONS[name](Image.fromarray(few), 0)).astype(float)
        found[f"few levels, {name} {colours}"] = [np.abs(row.numpy() - wanted).max()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def differences() -> dict[str, list[float]]:
    """Differences from Pillow, by what was compared."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_crops_are_pillows(differences: dict[str, list[float]]) -> None:
    assert sorted(differences["crops"])[3] == 0 and max(differences["crops"]) < 0.3


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crops_of_many_shapes_are_pillows(differences: dict[str, list[float]], interpolation: str) -> None:
    found = sorted(differences[f"many {interpolation}"])
    assert len(found) == 20 and found[9] == 0 and found[-1] < 0.3


@pytest.mark.parametrize("name", ["larger", "padded", "odd", "squashed"])
def test_clean_view_is_pillows(differences: dict[str, list[float]], name: str) -> None:
    assert len(differences[f"clean {name}"]) == 3 and max(differences[f"clean {name}"]) < 0.3


def test_augmix_is_pillows(differences: dict[str, list[float]]) -> None:
    assert max(differences["AugMix"]) < 0.3


def test_images_are_the_same_together_and_one_by_one(differences: dict[str, list[float]]) -> None:
    assert differences["one by one"] == [0] * 6


def test_each_operation_is_pillows(differences: dict[str, list[float]]) -> None:
    measured = {name: values[0] for name, values in differences.items() if len(values) == 1}
    assert len(measured) > 23 and max(measured.values()) < 0.05, measured
    assert measured["untouched"] == 0
    assert all(measured[name] == 0 for name in ("autocontrast 0", "equalize 0", "posterize 4", "translate_x 7"))


def test_image_of_few_levels_has_pillows_tables(differences: dict[str, list[float]]) -> None:
    few = [values for name, values in differences.items() if name.startswith("few levels")]
    assert few == [[0]] * 8
