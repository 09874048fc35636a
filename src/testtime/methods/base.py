"""Shared by all methods. A custom method may inherit from `Base`, or just have the same functions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_origin

import torch
from torch import Tensor

from testtime.display import line
from testtime.errors import InputError
from testtime.registry import kinds
from testtime.registry import require as require
from testtime.types import Task

Nested: TypeAlias = "Tensor | Sequence[Nested]"  # a state: tensors in nested NamedTuples; or several states

# what a method may take for granted that a stream does not promise
ASSUMPTIONS = {
    "stream length": "how many images will come",
    "batch": "a batch of images, read before the first of them is answered",
    "class balance": "that all classes are about equally frequent",
    "views": "several views of each image",
    "LLM texts": "class descriptions by a language model, with which its published figures were made",
}

LARGEST = 2**31  # for integer settings, so that sizes computed from them do not overflow


@dataclass(frozen=True)
class Base:
    """A frozen dataclass of plain settings; subclasses add `init` and `step`.

    Its `repr` has only the settings that differ from the defaults, or from the nearest preset.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `testtime list methods`
    presets: ClassVar[tuple[str, ...]] = ()  # class methods that return a configured instance
    source: ClassVar[str] = "Not published"  # authors, title, venue
    adapts: ClassVar[str] = "nothing"  # text, visual, both, views, or nothing
    remembers: ClassVar[bool] = False  # whether later images are affected by earlier ones
    gradients: ClassVar[str] = "none"  # none, closed form, or autograd
    needs_tower: ClassVar[bool] = False  # whether gradients pass through the text tower
    assumes: ClassVar[tuple[str, ...]] = ()  # of ASSUMPTIONS, with the default settings

    def __init_subclass__(cls) -> None:
        if "__repr__" not in vars(cls):
            cls.__repr__ = Base.__repr__  # type: ignore[method-assign]  # else `dataclass` writes one of every setting

    def __repr__(self) -> str:
        cls = type(self)
        starts = {cls.__name__: {entry.name: entry.default for entry in fields(self)}}
        starts |= {f"{cls.__name__}.{name}": vars(getattr(cls, name)()) for name in self.presets}
        changed = {
            start: [f"{key}={value!r}" for key, value in vars(self).items() if value != settings[key]]
            for start, settings in starts.items()
        }
        nearest = min(changed, key=lambda start: len(changed[start]))
        return f"{nearest}({line(', '.join(changed[nearest]), 80)})"

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal:
                allowed = " or ".join(repr(choice) for choice in get_args(kind))
                require(value in get_args(kind), name, value, f"must be {allowed}")
            elif kind is int:
                require(
                    isinstance(value, int) and not isinstance(value, bool),
                    name,
                    value,
                    "must be a whole number",
                )
                require(abs(value) < LARGEST, name, value, f"must be below {LARGEST:,}")
            elif kind is float:
                plain = isinstance(value, int | float) and not isinstance(value, bool)
                require(plain and abs(value) <= sys.float_info.max, name, value, "must be a finite number")

    @property
    def reads_ahead(self) -> int:
        """How many images are read before the first of them is answered."""
        return 1

    @property
    def capturable(self) -> bool:
        """Whether steps on a GPU can be captured in a graph: not if one waits for the GPU, as `eigh` does."""
        return not self.needs_tower

    def init(self, task: Task) -> Any:
        """The state before the first image."""
        raise NotImplementedError

    def step(self, task: Task, state: Any, views: Tensor) -> tuple[Tensor, Any]:
        """Logits (C,) and the next state for one image's unit views (V, D)."""
        raise NotImplementedError

    def columns(self, task: Task) -> int:
        """How many scores an image has."""
        return task.classes

    def scan(self, task: Task, state: Any, stream: Tensor) -> tuple[Tensor, Any]:
        """Logits (N, C) and the state after N images (N, V, D), one step at a time."""
        logits, own = stream.new_empty(len(stream), self.columns(task)), overwrites(self)
        state = copied(state) if own else state
        for row, views in enumerate(stream):
            logits[row], state = advance(self, task, state, views)[:2] if own else self.step(task, state, views)
        return logits, state

    def learned(self, before: Any, after: Any) -> Tensor:
        """Whether anything in the state changed: () bool."""
        return differ(before, after)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Scores as a distribution: the softmax, unless a method's scores are something else."""
        return logits.softmax(-1)

    def check(self, task: Task) -> None:
        """Requires nothing of the task beyond its prototypes."""


def need_single(methods: Iterable[object], what: str) -> None:
    """Refuse methods that read ahead, where `what` cannot say so beside their answers."""
    if ahead := max(map(batch_of, methods), default=1) - 1:
        raise InputError(f"{what} is for methods that answer one image at a time; use batch=1, not {ahead + 1}.")


def at_least(least: int, method: object, *names: str) -> None:
    """Refuse settings that are below `least`."""
    for name in names:
        require(getattr(method, name) >= least, name, getattr(method, name), f"must be {least} or more")


def check_ranges(method: object, *names: str) -> None:
    """Refuse a lower bound that exceeds its upper one."""
    for name in names:
        lower, upper = getattr(method, f"{name}_lower"), getattr(method, f"{name}_upper")
        require(lower <= upper, f"{name}_lower", lower, f"must not exceed {name}_upper={upper!r}")


def check_adamw(method: Any) -> None:
    """Refuse settings that AdamW cannot have."""
    at_least(0, method, "steps", "adamw_weight_decay")
    require(method.adamw_eps > 0, "adamw_eps", method.adamw_eps, "must be above 0")
    betas_fit = len(method.adamw_betas) == 2 and all(0 <= beta < 1 for beta in method.adamw_betas)
    require(betas_fit, "adamw_betas", method.adamw_betas, "must be two numbers in [0, 1)")


def batch_of(method: object) -> int:
    """How many images a method reads before it answers the first of them; 1 unless it says otherwise.

    Above 1 only `scan` runs it, in whole batches; a shorter one ends the stream. What shows its answers says so.
    """
    return int(getattr(method, "reads_ahead", 1))


def advance(method: Any, task: Task, state: Any, views: Tensor) -> tuple[Tensor, Any, Tensor | bool]:
    """Logits and the next state of a `step`, and whether it learned; `state` may be overwritten (`overwrites`).

    A method with a large state may have a function `step_in_place`, which returns the same three and copies less.
    """
    if overwrites(method):
        return method.step_in_place(task, state, views)
    logits, after = method.step(task, state, views)
    return logits, after, method.learned(state, after)


def overwrites(method: Any) -> bool:
    """Whether `advance` overwrites the state that it is given.

    Not where a class has a `step` of its own, and inherits a `step_in_place` that does something else.
    """
    defining = (kind for kind in type(method).__mro__ if vars(kind).keys() & {"step", "step_in_place"})
    return "step_in_place" in vars(next(defining, object))


def leaves(state: Nested) -> list[Tensor]:
    """The tensors of a state in order, with nested NamedTuples flattened."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in state for leaf in leaves(part)]


def copied(state: Any) -> Any:
    """A deep copy of a state."""
    if isinstance(state, Tensor):
        return state.clone()
    parts = map(copied, state)
    return tuple(parts) if type(state) is tuple else type(state)(*parts)


def differ(before: Nested, after: Nested) -> Tensor:
    """Whether two states, or parts of states, differ in any number: () bool, on their device, not read back."""
    pairs = zip(leaves(before), leaves(after), strict=True)
    changed = [(old != new).any() for old, new in pairs if old is not new]
    return torch.stack(changed).any() if changed else torch.zeros((), dtype=torch.bool)
