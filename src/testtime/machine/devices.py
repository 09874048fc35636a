"""Choosing a device."""

from __future__ import annotations

import torch

from testtime.types import MissingPart, SettingError


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name; "auto" is the first GPU, NVIDIA's (cuda) or Apple's (mps), or the CPU.

    >>> find_device("cpu")
    device(type='cpu')
    """
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if counts["mps"] else "cpu")
    here = ", ".join(
        [kind for kind, count in counts.items() if count] + [f"cuda:{number}" for number in range(1, counts["cuda"])]
    )
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or str(device) != str(name):  # torch takes cuda:256 for cuda:0
        raise SettingError(f"Unknown device '{name}'. Usable here: {here}; or auto.")
    if device.type not in counts:
        raise SettingError(f"Device '{device}' is not supported. Usable here: {here}; or auto.")
    if (device.index or 0) >= counts[device.type]:
        raise MissingPart(f"Device '{device}' is not available to torch. Usable here: {here}; or auto.")
    return device


def step_device(device: torch.device) -> torch.device:
    """Where methods run beside an encoder on `device`: there too, but for an Apple GPU, on the CPU.

    Apple's GPUs have no float64, in which several methods compute, and steps are many small operations, for which there
    are compiled loops on a CPU.
    """
    return torch.device("cpu") if device.type == "mps" else device
