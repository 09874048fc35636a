"""What every method promises, as checks that anyone can run on theirs.

    from testtime.checks import check_method
    check_method(MyMethod())

Each check takes a method, a task and a stream of views (N, V, D), and raises `CheckFailed` naming the promise.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime import registry
from testtime.methods.base import leaves
from testtime.session.session import Session
from testtime.steppers import open_stepper
from testtime.synthetic import toy
from testtime.types import FeatureError, Task

# how far logits may move when the same sum is taken in another order
ORDER_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-8}


class CheckFailed(AssertionError):
    """A promise that a method does not keep."""


def _expect(kept: bool, promise: str) -> None:
    if not kept:
        raise CheckFailed(promise)


def finite_logits(method: Any, task: Task, stream: Tensor) -> None:
    """Logits are finite and of shape (C,) for one view, two views and many."""
    for views in {1, 2, stream.shape[1]}:
        with torch.inference_mode():
            logits = open_stepper(task, [method]).scan(stream[:, :views])[0]
        _expect(logits.shape == (len(stream), task.classes), f"logits of {views} views have shape (N, C)")
        _expect(bool(torch.isfinite(logits).all()), f"logits of {views} views are finite")


def pure_steps(method: Any, task: Task, stream: Tensor) -> None:
    """A step leaves the state and the views it was given alone, and gives the same answer twice."""
    state = Session(task, method)
    state.scan(stream[: len(stream) // 2])
    before, views = state.state, stream[-1]
    kept, kept_views = [leaf.clone() for leaf in leaves(before)], views.clone()
    first, after = method.step(task, before, views)
    _expect(torch.equal(views, kept_views), "a step leaves its views alone")
    _expect(all(map(torch.equal, leaves(before), kept)), "a step leaves the old state alone")
    second, again = method.step(task, before, views)
    _expect(torch.equal(first, second), "the same step gives the same logits")
    _expect(all(map(torch.equal, leaves(after), leaves(again))), "the same step gives the same state")


def exact_resume(method: Any, task: Task, stream: Tensor) -> None:
    """Saved in the middle and loaded, a session goes on bit for bit."""
    whole = Session(task, method).scan(stream)
    half = len(stream) // 2
    with tempfile.TemporaryDirectory() as folder:
        session = Session(task, method)
        first = session.scan(stream[:half])
        loaded = Session.load(session.save(Path(folder) / "half.safetensors"), task)
    _expect(loaded.count == half, "a loaded session knows how many images it has seen")
    _expect(torch.equal(torch.cat([first, loaded.scan(stream[half:])]), whole), "a resumed stream is bit for bit")


def fixed_state(method: Any, task: Task, stream: Tensor) -> None:
    """The state keeps its shapes and types, however long the stream."""
    session = Session(task, method)
    at_first = [(leaf.shape, leaf.dtype) for leaf in leaves(session.state)]
    for views in stream:
        session.step(views)
        now = [(leaf.shape, leaf.dtype) for leaf in leaves(session.state)]
        _expect(now == at_first, f"the state keeps its shapes and types; after {session.count} images: {now}")


def plain_settings(method: Any, task: Task, stream: Tensor) -> None:
    """Settings survive JSON, and cannot be changed in place."""
    text = json.dumps(registry.settings_of(method))
    again = {key: registry.read_setting(type(method), key, value) for key, value in json.loads(text).items()}
    _expect(type(method)(**again) == method, "a method made from its settings as JSON equals itself")
    _expect(type(method).__dataclass_params__.frozen, "a method is a frozen dataclass")
    _expect(
        hash(method) == hash(type(method)(**again)),
        f"settings {[f.name for f in fields(method)]} are hashable",
    )


def class_order_irrelevant(method: Any, task: Task, stream: Tensor) -> None:
    """Classes in another order give the same logits in that order."""
    if task.context is not None:
        return  # a text tower has its own class order, which a permuted task cannot change
    order = torch.randperm(task.classes, generator=torch.Generator().manual_seed(0))
    shuffled = replace(task, text=task.text[order], classnames=tuple(task.classnames[i] for i in order.tolist()))
    one, other = Session(task, method).scan(stream), Session(shuffled, method).scan(stream)
    gap = float((one[:, order] - other).abs().max())
    _expect(gap <= ORDER_TOLERANCE[task.text.dtype], f"class order is irrelevant; logits differ by {gap:.1e}")


def bad_features_refused(method: Any, task: Task, stream: Tensor) -> None:
    """NaN, infinite, zero and wrongly shaped features are refused, and nothing changes."""
    session = Session(task, method)
    session.scan(stream[:5])
    kept, count = [leaf.clone() for leaf in leaves(session.state)], session.count
    broken = {name: stream[5].clone() for name in ("NaN", "infinity", "zeros")}
    broken["NaN"][0, 0], broken["infinity"][-1, 1], broken["zeros"][0] = torch.nan, torch.inf, 0
    broken["a wrong dimension"] = stream[5][:, :-1]
    broken["no views"] = stream[5][:0]
    for name, views in broken.items():
        for attempt in (session.step, session.predict, lambda v: session.scan(v[None])):
            with _refused(name):
                attempt(views)
            same = all(map(torch.equal, leaves(session.state), kept)) and session.count == count
            _expect(same, f"refusing {name} changes nothing")


@contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except FeatureError:
        return
    raise CheckFailed(f"features with {name} are refused")


def scan_is_steps(method: Any, task: Task, stream: Tensor) -> None:
    """`scan` over a chunk gives what single steps give."""
    together, one = Session(task, method), Session(task, method)
    logits = together.scan(stream)
    singles = torch.stack([one.step(views).logits for views in stream])
    gap = float((logits - singles).abs().max())
    _expect(gap <= ORDER_TOLERANCE[task.text.dtype], f"scan equals single steps; logits differ by {gap:.1e}")


METHOD_CHECKS: tuple[Callable[[Any, Task, Tensor], None], ...] = (
    finite_logits,
    pure_steps,
    exact_resume,
    fixed_state,
    plain_settings,
    class_order_irrelevant,
    bad_features_refused,
    scan_is_steps,
)


def check_method(method: Any, task: Task | None = None, stream: Tensor | None = None) -> None:
    """Hold a method to every promise; quiet when all are kept."""
    if task is None or stream is None:
        task, stream, _ = toy(images=24, views=12)
    for check in METHOD_CHECKS:
        check(method, task, stream)
