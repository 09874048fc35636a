"""The conditions of every number on a page, besides the stream: encoder, versions, machine."""

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
    """Conditions for the end of a page, in order; `more` comes after the encoder, the command last."""
    known = {
        "Encoder": task.encoder or "unknown",
        **more,
        "Versions": versions(),
        "Machine": machine(task.text.device),
        "Command": command,
    }
    return {key: value for key, value in known.items() if value}


def versions() -> str:
    """Versions of testtime and of what its numbers depend on; scikit-learn, for the map, if it is installed."""
    known = {"testtime": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    with suppress(PackageNotFoundError):
        known["scikit-learn"] = version("scikit-learn")
    return ", ".join(f"{name} {number}" for name, number in known.items())


def machine(device: torch.device) -> str:
    """The CPU, the threads used of it, and the GPU if one is used."""
    cpu = f"{_cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    return f"{torch.cuda.get_device_name(device)}; {cpu}" if device.type == "cuda" else cpu


def _cpu_name() -> str:
    """The CPU's name if the system reports it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
