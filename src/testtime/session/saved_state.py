"""Saved sessions: everything needed to resume bit for bit. Whatever is read is checked, down to the last tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from testtime import files, registry
from testtime.calibration import Calibration
from testtime.guard.settings import Guard
from testtime.steppers import aligned
from testtime.types import (
    MAX_VIEWS,
    Encoder,
    FeatureError,
    SettingError,
    StateError,
    Task,
    Variations,
    ViewPlan,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from testtime.session.session import Session

FORMAT = "testtime.session"
VERSION = "1"
COUNT_LIMIT = 2**53  # counts are below it; up to here a float is exact too

T = TypeVar("T")


def write(path: str | Path, session: Session, infinite: Collection[str], extra: dict[str, str]) -> Path:
    """Write a session atomically; a state that cannot be resumed is refused, and the file left as it was.

    `infinite` names the tensors that may hold infinity.
    """
    task, plan = session.task, session.plan
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "method": session.method.name,
        "settings": json.dumps(registry.settings_of(session.method)),
        "classnames": json.dumps(task.classnames),
        "encoder": task.encoder,
        "scale": repr(task.scale),
        "views": str(plan.count),
        "augmix": json.dumps(plan.augmix),
        "seed": str(plan.seed),
        "count": str(session.count),
        "position": str(session.position),
    } | plan.metadata()
    if session.guard is not None:
        metadata["guard"] = json.dumps(registry.settings_of(session.guard))
    state = dict(_named_tensors("state", session.state)) | dict(_named_tensors("guard", session.guard_memory))
    for name, tensor in state.items():
        if problem := _invalid_values(tensor, name in infinite):
            raise StateError(f"'{name}' {problem}, so the state cannot be used; it was not written to {path}.")
    shared = {"task.text": task.text, "calibration": session.calibration.sums}
    return files.write_tensors(path, shared | state, extra | metadata)


def infinite_parts(state: Any, prefix: str = "state") -> set[str]:
    """The names of a state's tensors that hold infinity. In an initial state, these are the only ones that ever may."""
    return {name for name, part in _named_tensors(prefix, state) if part.isinf().any()}


class NamedVariations:
    """Variations of which only the name is known: a session that makes no views is saved again with it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, image: Image, count: int, seed: int) -> list[Image]:
        raise StateError(f"Images need the variations '{self.name}'; load the session with variations=.")


class Saved:
    """A saved session and its metadata; errors name what is missing or damaged."""

    def __init__(self, path: str | Path, device: torch.device | str) -> None:
        self.path, self._device = path, device
        self._file = files.open_tensors(path, StateError)
        self._metadata: dict[str, str] = dict(self._file.metadata() or {})
        if self._metadata.get("format") != FORMAT:
            raise StateError(f"{path} is not a saved session (no '{FORMAT}' in its metadata).")
        if (version := self._metadata.get("version")) != VERSION:
            raise StateError(
                f"{path} has format version {version}, this program reads {VERSION}. "
                "Use the version of testtime that wrote it, or start a new session."
            )
        name, settings = self._entry("method", str), self._entry("settings", _json(dict))
        classnames, encoder = self._entry("classnames", _names), self._entry("encoder", str)
        scale = self._entry("scale", float)
        views, augmix = self._entry("views", _integer(1, MAX_VIEWS + 1)), self._entry("augmix", _json(bool))
        variations = NamedVariations(self._metadata["variations"]) if "variations" in self._metadata else None
        self.plan = ViewPlan(views, augmix, self._entry("seed", _integer(0, 2**64)), variations)
        self.count = self._entry("count", _integer(0, COUNT_LIMIT))
        self._metadata.setdefault("position", str(self.count))  # older files lack it, and have no gaps
        self.position = self._entry("position", _integer(0, COUNT_LIMIT))
        if "task.text" not in self._file.keys():
            raise StateError(f"{path} lacks 'task.text'; it is damaged.")
        text = aligned(self._file.get_tensor("task.text").to(device))
        try:
            self.task = Task(text, classnames, scale, encoder)
            self.method = registry.make_method(name, None, settings)
            self.guard = Guard(**self._entry("guard", _json(dict))) if "guard" in self._metadata else None
        except (FeatureError, SettingError, OverflowError, TypeError) as error:
            raise StateError(f"{path} is damaged: {error}") from None

    def _entry(self, key: str, read: Callable[[str], T]) -> T:
        """A parsed entry of the metadata."""
        try:
            return read(self._metadata[key])
        except (ValueError, TypeError, KeyError, StateError):
            text = self._metadata.get(key)
            shown = text if text is None or len(text) <= 60 else text[:60] + "..."
            raise StateError(f"{self.path} is damaged: its metadata '{key}' is {shown!r}.") from None

    def fit(self, task: Task | None, encoder: Encoder | None, variations: Variations | None) -> Task:
        """The task to resume with; a task, an encoder or variations other than the original are refused."""
        if encoder is not None and encoder.name != self.task.encoder:
            raise StateError(f"{self.path} was made with encoder '{self.task.encoder}', not '{encoder.name}'.")
        if task is not None:
            self._check_task(task)
        now = replace(self.plan, variations=variations).metadata().get("variations")
        before = self._metadata.get("variations")
        if encoder is not None and before != now:
            raise StateError(f"{self.path} was made with variations {before}, not {now}; use the same.")
        return self.task if task is None else replace(self.task, context=task.context)

    def _check_task(self, given: Task) -> None:
        """Refuse a task other than the one in the file, naming the first difference."""
        path, saved = self.path, self.task
        if saved.classnames != given.classnames:
            pairs = zip(saved.classnames, given.classnames, strict=False)
            first = next((f"'{a}' saved, '{b}' given" for a, b in pairs if a != b), "one list is longer")
            raise StateError(
                f"{path} holds {saved.classes} classes, this task has {given.classes}, and they differ ({first}). "
                "Give the same class list in the same order, or start without the file."
            )
        if saved.dim != given.dim:
            raise StateError(f"{path} has features of {saved.dim} dimensions, this task of {given.dim}.")
        if saved.encoder != given.encoder:
            raise StateError(f"{path} was made with encoder '{saved.encoder}', this task with '{given.encoder}'.")
        here = given.text.to(saved.text).cpu()
        if saved.scale != given.scale or not torch.allclose(saved.text.cpu(), here, atol=1e-4):
            raise StateError(
                f"{path} was made with other text prototypes or another logit scale; use the same prompts."
            )

    def state(self, fresh: Any, name: str = "state") -> Any:
        """The state in the file, shaped like `fresh`, the state before the first image; or the memory of the guard."""
        if fresh is None:
            return None
        state, infinite = self._filled(name, fresh), infinite_parts(fresh, name)
        for part, tensor in _named_tensors(name, state):
            if problem := _invalid_values(tensor, part in infinite):
                raise StateError(
                    f"{self.path} is damaged: '{part}' {problem}. Resume from another state, or start again."
                )
        return state

    @property
    def calibration(self) -> Calibration:
        """That of the stream; older files lack it, and it starts again."""
        fresh = Calibration()
        if "calibration" not in self._file.keys():
            return fresh
        sums = self._filled("calibration", fresh.sums)
        if not ((sums >= 0) & sums.isfinite()).all():
            raise StateError(f"{self.path} is damaged: 'calibration' holds values that are no sums of confidences.")
        return Calibration(sums)

    def _filled(self, name: str, fresh: Any) -> Any:
        """A state, or part of one, shaped like `fresh`, with the tensors of the file."""
        if not isinstance(fresh, Tensor):
            return type(fresh)(*(self._filled(f"{name}.{field}", part) for field, part in fresh._asdict().items()))
        if name not in self._file.keys():
            raise StateError(f"{self.path} lacks '{name}'; it was written by another version, or is damaged.")
        stored = aligned(self._file.get_tensor(name).to(fresh.device))
        if stored.shape != fresh.shape or stored.dtype != fresh.dtype:
            raise StateError(
                f"{self.path}: '{name}' is {stored.dtype} {tuple(stored.shape)}, "
                f"where this task needs {fresh.dtype} {tuple(fresh.shape)}."
            )
        return stored


def _json(kind: type[T]) -> Callable[[str], T]:
    return lambda text: files.parse_json(text, "it", StateError, kind)


def _integer(start: int, end: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not start <= (number := int(text)) < end:
            raise ValueError
        return number

    return read


def _names(text: str) -> tuple[str, ...]:
    names = _json(list)(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError
    return tuple(names)


def _named_tensors(prefix: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state under dotted names; none if there is no state."""
    if state is None:
        return
    if isinstance(state, Tensor):
        yield prefix, state
        return
    for field, part in state._asdict().items():
        yield from _named_tensors(f"{prefix}.{field}", part)


def _invalid_values(tensor: Tensor, infinite: bool) -> str:
    """What is wrong with a tensor of a state, if anything; infinity is valid only where the initial state has some."""
    if not tensor.is_floating_point():
        return "" if ((tensor >= 0) & (tensor < COUNT_LIMIT)).all() else "holds values that are not counts"
    if tensor.isfinite().all():
        return ""
    if tensor.isnan().any():
        return "holds NaN"
    return "" if infinite and not tensor.isneginf().any() else "holds infinity"
