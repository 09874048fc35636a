"""What the guard remembers of a stream, in tensors of fixed shape, saved with the session."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from testtime.guard.course import Course
from testtime.guard.settings import Guard
from testtime.methods.base import Nested
from testtime.methods.base import copied as copied
from testtime.types import Task

DISPUTES = 1024  # recent images whose answers differ, for which a late label is informative


class Nothing(NamedTuple):
    """No snapshots."""


class Kept(NamedTuple):
    """Two snapshots of the method's state, for a fresh start after drift."""

    older: Nested
    newer: Nested


class Memory(NamedTuple):
    keys: Tensor  # (C, M, D) the referee's features, by their frozen label; an empty slot is zero
    cost: Tensor  # (C, M) float64, on the CPU: their frozen entropies in nats; inf marks an empty slot
    recent: Tensor  # (R, D) features of recent images; the next one overwrites row `cursor`
    cursor: Tensor  # () int64, on the CPU, as is all that follows
    taught: Tensor  # (C,) int64, images that each class has taught in this period
    disputed: Tensor  # (DISPUTES, 3) int64: index + 1 of an image, adapted class, frozen class; 0 marks an empty row
    disputes: Tensor  # () int64, images disputed so far
    course: Tensor  # float64, the running numbers
    kept: Nothing | Kept


def fresh_memory(guard: Guard, task: Task, state: Nested) -> Memory:
    """The memory before the first image; `state` is the method's."""
    count = torch.zeros((), dtype=torch.int64)
    return Memory(
        keys=task.text.new_zeros(task.classes, guard.slots, task.dim),
        cost=torch.full((task.classes, guard.slots), torch.inf, dtype=torch.float64),
        recent=task.text.new_zeros(guard.recent, task.dim),
        cursor=count,
        taught=torch.zeros(task.classes, dtype=torch.int64),
        disputed=torch.zeros(DISPUTES, 3, dtype=torch.int64),
        disputes=count.clone(),
        course=Course().tensor(),
        kept=Kept(copied(state), copied(state)) if guard.drift == "restart" else Nothing(),
    )
