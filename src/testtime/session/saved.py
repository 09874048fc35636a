"""A session in a file: everything needed to go on bit for bit. What is read is checked, down to the last tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from testtime import files, registry
from testtime.steppers import aligned
from testtime.types import MOST_VIEWS, Encoder, FeatureError, SettingError, StateError, Task, Variations, ViewPlan

if TYPE_CHECKING:
    from testtime.session.session import Session

FORMAT = "testtime.session"
VERSION = "1"
COUNTS = 2**53  # what is counted is less; up to there a float is exact too

T = TypeVar("T")


def write(path: str | Path, session: Session, infinite: Collection[str], extra: dict[str, str]) -> Path:
    """Write a session, atomically; a state that cannot be gone on from is refused, and the file left as it was.

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
    state = dict(_named("state", session.state))
    for name, tensor in state.items():
        if wrong := _wrong(tensor, name in infinite):
            raise StateError(f"'{name}' {wrong}, so the state cannot be used; it was not written to {path}.")
    return files.write_tensors(path, {"task.text": task.text} | state, extra | metadata)


def infinite_parts(state: Any) -> set[str]:
    """The names of a state's tensors that hold infinity. Of one that begins, these are the ones that ever may."""
    return {name for name, part in _named("state", state) if part.isinf().any()}


class Saved:
    """A saved session, its metadata read; what is missing or damaged is named."""

    def __init__(self, path: str | Path, device: torch.device | str) -> None:
        self.path, self._device = path, device
        self._file = files.open_tensors(path, StateError)
        self._metadata: dict[str, str] = dict(self._file.metadata() or {})
        if self._metadata.get("format") != FORMAT:
            raise StateError(f"{path} is not a saved session (no '{FORMAT}' in its metadata).")
        if (version := self._metadata.get("version")) != VERSION:
            raise StateError(
                f"{path} has format version {version}, this program reads {VERSION}. "
                "Use the version of testtime that wrote it, or start the session anew."
            )
        name, settings = self._fact("method", str), self._fact("settings", _json(dict))
        classnames, encoder = self._fact("classnames", _names), self._fact("encoder", str)
        scale = self._fact("scale", float)
        views, augmix = self._fact("views", _whole(1, MOST_VIEWS + 1)), self._fact("augmix", _json(bool))
        self.plan = ViewPlan(views, augmix, self._fact("seed", _whole(0, 2**64)))
        self.count = self._fact("count", _whole(0, COUNTS))
        self._metadata.setdefault("position", str(self.count))  # files of before there was one have no gaps
        self.position = self._fact("position", _whole(0, COUNTS))
        if "task.text" not in self._file.keys():
            raise StateError(f"{path} lacks 'task.text'; it is damaged.")
        text = aligned(self._file.get_tensor("task.text").to(device))
        try:
            self.task = Task(text, classnames, scale, encoder)
            self.method = registry.make_method(name, None, settings)
        except (FeatureError, SettingError, OverflowError) as error:
            raise StateError(f"{path} is damaged: {error}") from None

    def _fact(self, key: str, read: Callable[[str], T]) -> T:
        """An entry of the metadata, read."""
        try:
            return read(self._metadata[key])
        except (ValueError, TypeError, KeyError, StateError):
            text = self._metadata.get(key)
            shown = text if text is None or len(text) <= 60 else text[:60] + "..."
            raise StateError(f"{self.path} is damaged: its metadata '{key}' is {shown!r}.") from None

    def fit(self, task: Task | None, encoder: Encoder | None, variations: Variations | None) -> Task:
        """The task to go on with; a task, an encoder or variations other than it was made with are refused."""
        if encoder is not None and encoder.name != self.task.encoder:
            raise StateError(f"{self.path} was made with encoder '{self.task.encoder}', not '{encoder.name}'.")
        if task is not None:
            self._check_task(task)
        now = replace(self.plan, variations=variations).metadata().get("variations")
        before = self._metadata.get("variations")
        if encoder is not None and before != now:
            raise StateError(f"{self.path} was made with variations {before}, not {now}; give the same.")
        return self.task if task is None else replace(self.task, context=task.context)

    def _check_task(self, given: Task) -> None:
        """Refuse a task other than the one in the file, saying what differs first."""
        path, saved = self.path, self.task
        if saved.classnames != given.classnames:
            pairs = zip(saved.classnames, given.classnames, strict=False)
            first = next((f"'{a}' there, '{b}' here" for a, b in pairs if a != b), "one list is longer")
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
            raise StateError(f"{path} was made with other text prototypes or another logit scale: same prompts needed.")

    def state(self, fresh: Any) -> Any:
        """The state in the file, of the shape of `fresh`, which is the one before the first image."""
        state, infinite = self._filled("state", fresh), infinite_parts(fresh)
        for name, tensor in _named("state", state):
            if wrong := _wrong(tensor, name in infinite):
                raise StateError(f"{self.path} is damaged: '{name}' {wrong}. Go on from another state, or start anew.")
        return state

    def _filled(self, name: str, fresh: Any) -> Any:
        """A state, or part of one, of the shape of `fresh` with the tensors of the file."""
        if not isinstance(fresh, Tensor):
            return type(fresh)(*(self._filled(f"{name}.{field}", part) for field, part in fresh._asdict().items()))
        if name not in self._file.keys():
            raise StateError(f"{self.path} lacks '{name}'; it was written by another version, or is damaged.")
        stored = aligned(self._file.get_tensor(name).to(self._device))
        if stored.shape != fresh.shape or stored.dtype != fresh.dtype:
            raise StateError(
                f"{self.path}: '{name}' is {stored.dtype} {tuple(stored.shape)}, "
                f"where this task needs {fresh.dtype} {tuple(fresh.shape)}."
            )
        return stored


def _json(kind: type[T]) -> Callable[[str], T]:
    return lambda text: files.parse_json(text, "it", StateError, kind)


def _whole(least: int, end: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not least <= (number := int(text)) < end:
            raise ValueError
        return number

    return read


def _names(text: str) -> tuple[str, ...]:
    names = _json(list)(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError
    return tuple(names)


def _named(prefix: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state under dotted names."""
    if isinstance(state, Tensor):
        yield prefix, state
        return
    for field, part in state._asdict().items():
        yield from _named(f"{prefix}.{field}", part)


def _wrong(tensor: Tensor, infinite: bool) -> str:
    """What no method leaves in a tensor of its state; infinity is right only where the state begins with some."""
    if not tensor.is_floating_point():
        return "" if ((tensor >= 0) & (tensor < COUNTS)).all() else "holds what is no count"
    if tensor.isfinite().all():
        return ""
    if tensor.isnan().any():
        return "holds NaN"
    return "" if infinite and not tensor.isneginf().any() else "holds infinity"
