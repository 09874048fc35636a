"""The state before the first image, refused if it does not fit in memory."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from testtime.methods.base import leaves
from testtime.types import Method, SettingError, Task


def initial_state(method: Method, task: Task) -> Any:
    """The state before the first image; one that does not fit in memory is refused before it is allocated."""
    shapes = copy.copy(task)
    object.__setattr__(shapes, "text", task.text.to("meta"))
    with torch.inference_mode(False):
        try:
            size = sum(leaf.nbytes for leaf in leaves(method.init(shapes)))
        except (NotImplementedError, RuntimeError):
            size = 0  # a method that reads tensor values fails only when the state is made
        if size > (available := _total_memory(task.text.device)):
            raise SettingError(
                f"Method '{method.name}' would need {size / 1e9:,.0f} GB for {task.classes:,} classes, but there are "
                f"only {available / 1e9:,.0f}; use smaller queues, caches or memories."
            )
        return method.init(task)


def _total_memory(device: torch.device) -> int:
    """Total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
