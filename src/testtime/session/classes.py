"""Other classes for a session that goes on: what was learned of the classes that stay is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from testtime.guard.memory import Memory
from testtime.session.session import Session
from testtime.types import InputError, Task


def with_classes(session: Session, task: Task) -> Session:
    """A session of `task` that continues from `session`, of other classes; they are matched by name.

    A class that stays keeps its part of the memory, a new one starts as in a fresh session. Prototypes of classes that
    stay must be the same in both tasks.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> session = tt.Session(task, "dpe")
    >>> _ = session.scan(stream)
    >>> fewer = with_classes(session, tt.Task(task.text[:5], task.classnames[:5], task.scale))
    >>> fewer.task.classes, torch.equal(fewer.state.queue.keys, session.state.queue.keys[:5])
    (5, True)
    """
    old = session.task
    places = {name: place for place, name in enumerate(old.classnames)}
    if len(places) != old.classes or len(set(task.classnames)) != task.classes:
        raise InputError("Classes can be added and removed only where every class has its own name.")
    pairs = [(place, places[name]) for place, name in enumerate(task.classnames) if name in places]
    new_rows, old_rows = [new for new, _ in pairs], [was for _, was in pairs]
    if not torch.equal(task.text[new_rows], old.text[old_rows]):
        raise InputError("The text prototypes of classes that stay must not change; use the same prompts.")
    plan = session.plan
    changed = Session(
        task, session.method, encoder=session.encoder, views=plan.count, augmix=plan.augmix, seed=plan.seed,
        variations=plan.variations, reference=session.reference, guard=session.guard,
    )  # fmt: skip
    one_more = Session(_one_more(old), session.method, guard=session.guard)  # its shapes tell which axes are classes
    fresh = Session(old, session.method, guard=session.guard)

    def moved(start: Any, was: Any, small: Any, large: Any) -> Any:
        if isinstance(was, Tensor):
            return _moved(start, was, small, large, new_rows, old_rows)
        return type(was)(*(moved(*parts) for parts in zip(start, was, small, large, strict=True)))

    memory = session.guard_memory
    if memory is not None:
        guarded = moved(changed.guard_memory, memory, fresh.guard_memory, one_more.guard_memory)
        changed.guard_memory = guarded._replace(disputed=_renamed(memory, dict(zip(old_rows, new_rows, strict=True))))
    changed.state = moved(changed.state, session.state, fresh.state, one_more.state)
    changed.calibration = session.calibration.copy()
    changed.count, changed.position = session.count, session.position
    return changed


def _one_more(task: Task) -> Task:
    """The task with one more class."""
    text = torch.cat([task.text, task.text[:1]])
    return Task(text, (*task.classnames, ""), task.scale, task.encoder, task.context)


def _moved(
    start: Tensor, was: Tensor, small: Tensor, large: Tensor, new_rows: Sequence[int], old_rows: Sequence[int]
) -> Tensor:
    """A tensor of a state for the new classes: `start`, with the old values of the classes that stay."""
    axes = [axis for axis, size in enumerate(small.shape) if large.shape[axis] != size]
    if not axes:  # the same for any number of classes
        return was.clone()
    values = was
    for axis in axes:
        values = values.index_select(axis, torch.tensor(old_rows, dtype=torch.long, device=was.device))
    result = start.clone()
    places = [
        torch.tensor(new_rows if axis in axes else range(size), dtype=torch.long, device=was.device)
        for axis, size in enumerate(start.shape)
    ]
    result[torch.meshgrid(*places, indexing="ij")] = values
    return result


def _renamed(memory: Memory, places: dict[int, int]) -> Tensor:
    """The disputed images with their classes' new numbers; those of a class that is gone are forgotten."""
    rows = [
        [index, places[adapted], places[frozen]] if adapted in places and frozen in places else [0, 0, 0]
        for index, adapted, frozen in memory.disputed.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64)
