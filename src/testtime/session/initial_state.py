"""The state before the first image, refused where there is no room for it."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from testtime.methods.base import leaves
from testtime.types import Method, SettingError, Task


def initial_state(method: Method, task: Task) -> Any:
    """The state before the first image; one that would fill the memory is refused before it is made."""
    shapes = copy.copy(task)
    object.__setattr__(shapes, "text", task.text.to("meta"))
    with torch.inference_mode(False):
        try:
            size = sum(leaf.nbytes for leaf in leaves(method.init(shapes)))
        except (NotImplementedError, RuntimeError):
            size = 0  # a method that looks at its numbers shows when it is made
        if size > (most := _memory(task.text.device)):
            raise SettingError(
                f"Method '{method.name}' would keep {size / 1e9:,.0f} GB for {task.classes:,} classes, and there are "
                f"{most / 1e9:,.0f}; give it smaller queues, caches or memories."
            )
        return method.init(task)


def _memory(device: torch.device) -> int:
    """Bytes that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
