"""A tiny CLIP with random weights for tests: both towers, the real tokenizer, made in under a second."""

from __future__ import annotations

import math

import torch

from testtime.encoding.encoders.open_clip import PRECISIONS, OpenClip, lower, make_preprocess
from testtime.machine.lean_open_clip import open_clip
from testtime.types import SettingError

VISION = dict(image_size=32, patch_size=8, width=64, layers=2, head_width=32)
TEXT = dict(context_length=77, vocab_size=49408, width=64, heads=2, layers=2)


def tiny(
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    dim: int = 32,
    size: int = 32,
) -> OpenClip:
    """A CLIP of D = `dim` for images of side `size` (a multiple of 8); the same `seed`, the same weights.

    The global random state is left alone.
    """
    precision = PRECISIONS[dtype]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = open_clip.CLIP(
            dim, VISION | {"image_size": size}, dict(TEXT), cast_dtype=open_clip.get_cast_dtype(precision)
        )
    with torch.no_grad():
        model.logit_scale.fill_(math.log(100))  # the value that CLIP training converges to
    return OpenClip(
        "tiny" if seed == 0 else f"tiny:{seed}",
        lower(model, precision),
        open_clip.SimpleTokenizer(context_length=TEXT["context_length"]),
        make_preprocess(vars(open_clip.transform.PreprocessCfg(size=size))),
        torch.device(device),
        dtype,
    )


def load(spec: str, device: torch.device, dtype: torch.dtype) -> OpenClip:
    """The tiny encoder of "" or "SEED"."""
    if spec and not spec.isdecimal():
        raise SettingError(f"'tiny:{spec}': expected a whole number as the seed, as in tiny:3.")
    return tiny(int(spec or 0), device, dtype)
