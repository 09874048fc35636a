"""The kernels of our vision transformer, run by Triton's interpreter on the CPU, compute what torch does."""

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
import open_clip, torch
from torch.nn.functional import cosine_similarity
from testtime.encoding import vit, vit_kernels
from testtime.encoding.encoders.tiny import TEXT

torch.manual_seed(0)
found = {}
for quick in (False, True):
    vision = dict(image_size=16, patch_size=8, width=48, layers=2, head_width=16)
    model = open_clip.CLIP(24, vision, dict(TEXT, layers=1), quick_gelu=quick).eval().requires_grad_(False)
    for parameter in model.visual.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape))
    pixels = torch.randn(2, 3, 16, 16)
    for float8, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        tower = vit.from_open_clip(model.to(dtype).visual, float8)
        plain = tower(pixels.to(dtype)).float()
        tower.kernels = vit_kernels
        ours = tower(pixels.to(dtype)).float()
        apart, alike = (ours - plain).abs().max(), cosine_similarity(ours, plain).min()
        found[f"{dtype} {quick}"] = [float(apart), float(alike)]
print(json.dumps(found))
"""


def test_towers_with_kernels_are_those_of_torch() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for quick in (False, True):
        assert found[f"torch.float32 {quick}"][0] < 1e-5
        assert 0.999 < found[f"torch.bfloat16 {quick}"][1]  # rows that round to another float8
