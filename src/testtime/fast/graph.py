"""Scans in captured graphs: many steps of a method in one launch.

A step is a few dozen small kernels, which a GPU finishes sooner than Python can ask for them. Here the step is
compiled, several steps in a row are captured, and a stream is replayed through the graph: inputs, state and
logits stay at fixed places in memory. DPE's steps, of one run or of several side by side, are kernels of their own
(`testtime.fast.fused`) where they fit.
On the CPU the same steps run in a plain loop.

The plain twin is a method's own `scan`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from testtime.fast import abreast, fused
from testtime.fast.capture import capture, compiled, exact_products, reason, warn_once
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE
from testtime.types import FeatureError, Method, Task

STEPS = 32  # to a graph: launching it costs about what one kernel does
KEPT = 4  # runners that `scan` keeps for the next call
PATIENCE = 20_000  # images of a stream before a session compiles: it takes many seconds, and saves 0.3 ms a step

_runners: OrderedDict[tuple[object, ...], Runner] = OrderedDict()


def scan(method: Method, task: Task, state: Any, stream: Tensor, *, compile: bool | None = None) -> tuple[Tensor, Any]:
    """Logits (N, C) and the state after N images (N, V, D); what is given is left as it was.

    Graphs are captured at the first call for a method and a shape, and kept for the next. `compile` as for `Runner`.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> method = tt.make_method("dpe")
    >>> logits, state = scan(method, task, method.init(task), stream)
    >>> logits.shape
    torch.Size([160, 8])
    """
    if len(stream) == 0 or getattr(method, "needs_tower", False):
        return method.scan(task, state, stream)  # gradients through a text tower are nothing for a graph
    runner = runner_for(method, task, stream.shape[1], compile)
    runner.load(task, state)
    logits = runner.run(stream)
    return logits, runner.state()


def runner_for(method: Method, task: Task, views: int, compile: bool | None = None) -> Runner:
    """The runner kept for this method and this shape, or a new one."""
    shape = (method, tuple(task.text.shape), task.text.dtype, task.text.device, task.scale, views)
    key: tuple[object, ...] = (*shape, "kernels")  # one that has them serves whoever asks
    if key not in _runners:
        key = (*shape, compile)
    if key not in _runners:
        runner = Runner(method, task, views, compile=compile)
        if runner.has_kernels:
            key = (*shape, "kernels")
        _runners[key] = runner
    _runners.move_to_end(key)
    while len(_runners) > KEPT:
        _runners.popitem(last=False)
    return _runners[key]


class Runner:
    """A method's steps for tasks of one shape, with the state at a fixed place: `load`, `run`, `state`.

    `compile` and `graphs` default to whether the task is on a GPU, and so does `kernels`: whether a method with
    kernels of its own takes them, in place of what is compiled. What cannot be compiled or captured runs without, and
    a warning says so once. One runner is for one thread.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        views: int,
        *,
        steps: int = STEPS,
        compile: bool | None = None,
        graphs: bool | None = None,
        kernels: bool | None = None,
    ) -> None:
        on_gpu = task.text.is_cuda
        self.method = method
        self._stepping = method
        self.sizes = (steps, 1) if steps > 1 else (1,)
        self._compile = on_gpu if compile is None else compile
        self._graphs = on_gpu if graphs is None else graphs
        if on_gpu and self._compile:
            from testtime.fast.products import split

            self._stepping = split(method, task)
        self._captured: dict[int, Callable[[], object]] = {}
        with torch.inference_mode(False), torch.no_grad():
            self.task = replace(task, text=task.text.clone(), context=None)
            self._state = _copied(method.init(self.task))
            self._views = self.task.text[:1].expand(steps, views, task.dim).clone()
            self._fused: fused.Fused | None = None
            runs: Any = method.methods if isinstance(method, abreast.Abreast) else (method,)
            if (on_gpu if kernels is None else kernels) and fused.fits(runs, task, views):
                answer = (len(runs), task.classes) if isinstance(method, abreast.Abreast) else (task.classes,)
                self._logits = self.task.text.new_zeros(steps, *answer)
                self._try_fused(runs, views)
            if self._fused is None:  # (C,), or what it has for one
                example = method.step(self.task, _copied(self._state), self._views[0])[0]
                self._logits = example.new_zeros(steps, *example.shape)
        self._step: Callable[..., Tensor] = compiled(_step) if self._compile else _step

    @property
    def has_kernels(self) -> bool:
        """Whether its steps are the method's own kernels."""
        return self._fused is not None

    def load(self, task: Task, state: Any) -> None:
        """Go on from this state, which is copied."""
        self.task.text.copy_(task.text)
        self._overwrite(state)

    def state(self) -> Any:
        """The state reached, as a copy of its own."""
        return _copied(self._state)

    def run(self, stream: Tensor) -> Tensor:
        """Logits (N, C) of the next N images (N, V, D)."""
        if stream.shape[1:] != self._views.shape[1:]:
            wanted = tuple(self._views.shape[1:])
            raise FeatureError(f"This runner takes features (N, {wanted[0]}, {wanted[1]}); got {tuple(stream.shape)}.")
        logits = self._logits.new_empty(len(stream), *self._logits.shape[1:])
        start = 0
        for size in self.sizes:
            while len(stream) - start >= size:
                self._launcher(size)  # its first call warms up, and so writes to the buffers
                part = slice(start, start + size)
                self._views[:size].copy_(stream[part], non_blocking=True)
                with torch.no_grad():
                    self._captured[size]()
                logits[part].copy_(self._logits[:size])
                start += size
        return logits

    def _launcher(self, size: int) -> None:
        """See that there is a way to launch `size` steps; the state is as it was afterwards."""
        if size in self._captured:
            return
        before = _copied(self._state)
        with torch.inference_mode(False), torch.no_grad(), exact_products():
            if self._compile and not self._captured and self._fused is None:
                self._try_compiled()
            self._captured[size] = self._graph(size) if self._graphs else lambda: self._steps(size)
        self._overwrite(before)

    def _overwrite(self, state: Any) -> None:
        for place, value in zip(leaves(self._state), leaves(state), strict=True):
            place.copy_(value)
        if self._fused is not None:
            self._fused.refresh()

    def _try_fused(self, runs: Sequence[DPE], views: int) -> None:
        """Take the kernels for these runs, if they can be launched; the state is as it was afterwards."""
        before = _copied(self._state)
        state = self._state if isinstance(self._state, abreast.State) else abreast.alone(self._state)
        try:
            steps = fused.Fused(runs, self.task, state, views)
            steps.step(self._views[0], self._logits[0])  # compiles them
            self._fused = steps
        except Exception as error:  # as for `_try_compiled`, and there may be no room for their buffers
            warn_once(f"The kernels of '{self.method.name}' cannot be launched, and it runs slower ({reason(error)}).")
        self._overwrite(before)

    def _try_compiled(self) -> None:
        try:
            self._steps(1)
        except Exception as error:  # a compiler fails in its own ways, and they have no common root
            if self._stepping is not self.method:  # perhaps it was the products
                self._stepping, self._step = self.method, compiled(_step)
                return self._try_compiled()
            warn_once(f"The step of '{self.method.name}' cannot be compiled, and runs slower ({reason(error)}).")
            self._step = _step

    def _graph(self, size: int) -> Callable[[], object]:
        try:
            return capture(lambda: self._steps(size)).replay
        except Exception as error:
            warn_once(f"Steps of '{self.method.name}' cannot be captured, and run one by one ({reason(error)}).")
            self._graphs = False
            return lambda: self._steps(size)

    def _steps(self, size: int) -> None:
        if self._fused is not None:
            for views, logits in zip(self._views[:size], self._logits[:size], strict=True):
                self._fused.step(views, logits)
            return
        rows = [self._step(self._stepping, self.task, self._state, self._views[row]) for row in range(size)]
        torch.stack(rows, out=self._logits[:size])


def _step(method: Method, task: Task, state: Any, views: Tensor) -> Tensor:
    """Logits (C,) of one image's views (V, D); `state` is overwritten with the next."""
    logits, after = method.step(task, state, views)
    for place, value in zip(leaves(state), leaves(after), strict=True):
        if value is not place:
            place.copy_(value)
    return logits


def _copied(state: Any) -> Any:
    """A state with tensors of its own."""
    if isinstance(state, Tensor):
        return state.clone()
    return type(state)(*(_copied(part) for part in state))
