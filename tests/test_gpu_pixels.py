"""Triton's kernels, run by its interpreter on the CPU, make Pillow's views."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Triton decides whether to interpret when it is imported, so this runs in its own process
PROGRAM = """
import json, sys
import numpy as np, torch
from PIL import Image
sys.path.insert(0, sys.argv[1])
from test_gpu_views import AMOUNTS, photo, raw
from testtime.images import views as plain
from testtime.images import gpu_pixels as pixels, gpu_views as fast
from testtime.images.draw import NAMES, NOTHING, Mixes, draw
from testtime.images.views import OPERATIONS

found = {}
preprocess = raw(16, 18)
images = [photo(40, 30), photo(21, 19, 1)]
loaded = [fast.as_pixels(image) for image in images]
for augmix in (False, True):
    sampled = [draw(image.size, 3, 16, seed=2, index=i, augmix=augmix) for i, image in enumerate(images)]
    made = fast.grey_views(loaded, sampled, preprocess, kernels=True)
    expected = torch.stack([plain.views(image, 3, preprocess, seed=2, index=i, augmix=augmix)
                            for i, image in enumerate(images)]) * 255
    found["AugMix" if augmix else "crops"] = (made - expected).abs().mean((2, 3, 4)).flatten().tolist()

sampled = [draw(image.size, 3, 16, seed=2, index=i) for i, image in enumerate(images)]
together = fast.grey_views(loaded, sampled, preprocess, kernels=True)
pixels.BUDGET, fast.LONGEST = 1, 39  # one after another, and the first by Pillow
apart = fast.grey_views(loaded, sampled, preprocess, kernels=True)
found["apart"] = (together - apart).abs().mean((1, 2, 3, 4)).tolist()

amounts = [(name, amount) for name in NAMES for amount in AMOUNTS.get(name, (0,))]
count = len(amounts)
operations = np.full((count, 3, 3), NOTHING)
operations[:, 0, 0] = [NAMES.index(name) for name, _ in amounts]
values = np.zeros((count, 3, 3))
values[:, 0, 0] = [amount for _, amount in amounts]
only = Mixes(operations, values, np.tile([1.0, 0.0, 0.0], (count, 1)), np.zeros(count))
image = photo(24, 24)
grey = fast.as_pixels(image).permute(2, 0, 1).float().repeat(1, count + 1, 1, 1, 1)
pixels.mix(grey, [only])
for row, (name, amount) in enumerate(amounts, start=1):
    wanted = np.asarray(OPERATIONS[name](image, amount)).astype(float)
    found[f"{name} {amount}"] = [np.abs(grey[0, row].permute(1, 2, 0).numpy() - wanted).mean()]
found["untouched"] = [float((grey[0, 0].permute(1, 2, 0) - fast.as_pixels(image)).abs().max())]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def differences() -> dict[str, list[float]]:
    """Mean absolute differences from Pillow in grey levels, by what was compared."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_crops_are_pillows(differences: dict[str, list[float]]) -> None:
    # where Pillow resizes the columns first, it rounds something else in between
    assert sorted(differences["crops"])[3] == 0 and max(differences["crops"]) < 0.3


def test_augmix_is_pillows(differences: dict[str, list[float]]) -> None:
    assert max(differences["AugMix"]) < 0.3


def test_images_are_the_same_together_and_one_by_one(differences: dict[str, list[float]]) -> None:
    assert differences["apart"][1] == 0 and differences["apart"][0] < 0.3


def test_each_operation_is_pillows(differences: dict[str, list[float]]) -> None:
    measured = {name: values[0] for name, values in differences.items() if len(values) == 1}
    assert len(measured) > 15 and max(measured.values()) < 0.05, measured
    assert measured["untouched"] == 0
    assert all(measured[name] == 0 for name in ("autocontrast 0", "equalize 0", "posterize 4", "translate_x 7"))
