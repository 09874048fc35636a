"""What every number of a page depends on, besides the stream: encoder, versions, machine."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from testtime import __version__
from testtime.types import Task


def conditions(task: Task, command: str = "", **more: str) -> dict[str, str]:
    """Facts for the foot of a page, in order; `more` comes after the encoder, the command last."""
    known = {
        "Encoder": task.encoder or "not said",
        **more,
        "Versions": versions(),
        "Machine": machine(task.text.device),
        "Command": command,
    }
    return {key: value for key, value in known.items() if value}


def versions() -> str:
    """Those of the program and of what its numbers depend on; scikit-learn where it is installed, for the map."""
    known = {"testtime": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    with suppress(PackageNotFoundError):
        known["scikit-learn"] = version("scikit-learn")
    return ", ".join(f"{name} {number}" for name, number in known.items())


def machine(device: torch.device) -> str:
    """The processor, how much of it is used, and the GPU where one computes."""
    words = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    return f"{torch.cuda.get_device_name(device)}; {words}" if device.type == "cuda" else words


def _processor() -> str:
    """The processor's name where the system tells it, else its kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
