"""What every encoder refuses before it computes anything."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from testtime.types import InputError


def check_pixels(pixels: Tensor) -> None:
    """Refuse what is not a batch of preprocessed images (B, 3, H, W)."""
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InputError(f"Images must be (B, 3, H, W); got {tuple(pixels.shape)}.")


def check_texts(texts: Sequence[str]) -> None:
    """Refuse a string where a list of them is meant: it would be read letter by letter."""
    if isinstance(texts, str):
        raise InputError(f"Expected a list of texts; got one string. Write [{texts!r}].")
