"""Choosing a device."""

from __future__ import annotations

import torch

from testtime.types import MissingPart, SettingError


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name; "auto" is the first GPU, or the CPU if there is none.

    >>> find_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"Unknown device '{name}'. Use cpu, cuda, cuda:1 or auto.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingPart(f"Device '{device}': torch sees {torch.cuda.device_count()} GPUs here. Use --device cpu.")
    return device
