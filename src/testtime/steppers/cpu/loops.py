"""Shared by the compiled loops: compiler options, arithmetic, and operations on sorted rows.

Loops take arrays and fill arrays. Rows are processed one after another, so the results for a class do not depend on its
neighbours. The first call in a new environment compiles for some seconds; the result is cached on disk.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numba import config, get_num_threads, njit, set_num_threads
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from testtime.machine.capture import warn_once
from testtime.ops import NEGLIGIBLE
from testtime.steppers import ALIGNMENT, aligned, dummy_views, one_by_one
from testtime.steppers.cpu.lanes import LOWEST, Emitted, Lanes, row_loop
from testtime.types import Task

Array = NDArray[Any]
Real: TypeAlias = np.float32 | np.float64
Precision = TypeVar("Precision", np.float32, np.float64)

CACHE_LINE = ALIGNMENT  # bytes

# Every operation is rounded in the order written: no `fastmath`. A function is compiled more than once, into each of
# its callers, and which copy runs depends on what the process has loaded before. With reordered sums these copies
# differ in the last bit, and so did a run with freshly compiled loops from one with cached loops. Hot code is written
# so that it can be vectorised without reordering.
OPTIONS: dict[str, bool | str] = {"cache": True, "nogil": True, "error_model": "numpy"}
try:
    njit(**OPTIONS)(lambda: None)  # numba looks for a cache folder now, and compiles nothing yet
except RuntimeError:
    # no fallback to a temporary folder: others may have written files there, and numba would run them
    OPTIONS["cache"] = False
    warn_once(
        "Compiled loops cannot be kept on disk, and are compiled again in every process, for about a minute. "
        "Set NUMBA_CACHE_DIR to a writable folder of your own."
    )
compiled = njit(**OPTIONS)
# multithreaded, but only loops over prange
OTHER_PASSES = ("comprehension", "fusion", "inplace_binop", "numpy", "reduction", "setitem", "stencil")
parallel = njit(**OPTIONS, parallel={"prange": True} | dict.fromkeys(OTHER_PASSES, False))

# start numba's threads now: that sets the number of OpenMP threads, which torch shares, so it is set back
_torch_threads = torch.get_num_threads()
get_num_threads()
torch.set_num_threads(_torch_threads)

try:
    import_module("numba.np.ufunc.omppool")  # OpenMP's thread pool may be used by several threads at once

    _pool_lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
except ImportError:  # numba's own pool may not
    _pool_lock = threading.Lock()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block, parallel loops use up to `count` threads."""
    if count == 1:  # the pool is not used
        yield
        return
    before = get_num_threads()
    with _pool_lock:
        set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))
        try:
            yield
        finally:
            set_num_threads(before)


def zeros_aligned(*shape: int, dtype: DTypeLike) -> Array:
    """An array of zeros aligned to a cache line: vectors that straddle two lines are slower to load."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def cast(value: float, real: type[Precision]) -> Precision:
    """A number in another precision, infinite if it is too large, as in torch: it then shows in the logits."""
    with np.errstate(over="ignore"):
        return real(value)


def to_array(tensor: Tensor) -> Array:
    """A writable, aligned copy of a tensor as an array."""
    numbers = tensor.detach().numpy()
    array = zeros_aligned(*numbers.shape, dtype=numbers.dtype)
    array[...] = numbers
    return array


def to_tensor(array: Array) -> Tensor:
    """A copy of an array as a tensor."""
    return torch.from_numpy(array).clone()


@contextlib.contextmanager
def rows_restored(arrays: Iterable[Array], row: int) -> Iterator[None]:
    """Restore a row of each array after the block."""
    before = [(array, array[row].copy()) for array in arrays]
    yield
    for array, kept in before:
        array[row] = kept


class ByImage:
    """Base class of steppers that process a stream image by image; subclasses define `_step`."""

    task: Task

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        logits, learned = self._step(aligned(views), False)
        return logits, torch.as_tensor(learned)

    def steps(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return one_by_one(self.step, stream)

    def scan(self, stream: Tensor) -> Tensor:
        return self.steps(stream)[0]

    def peek(self, views: Tensor) -> Tensor:
        return self._step(aligned(views), True)[0]

    def peeks(self, stream: Tensor) -> Tensor:
        return torch.stack([self.peek(views) for views in stream], 1)

    def warm_up(self, views: int) -> None:
        self.peek(dummy_views(self.task, views))

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, list[bool] | Tensor]:
        """Logits (S, C) and which runs learned; with `peeking`, the state does not change."""
        raise NotImplementedError


@compiled
def row_at(rows: Array, index: int) -> np.intp:
    """The address of a row of a matrix; of a vector, with index 0.

    Loops take whole matrices: slicing a row updates a reference count, which costs as much as processing the row.
    """
    return np.intp(rows.ctypes.data) + index * rows.strides[0]


@row_loop(sums=1)
def dot_at(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """The dot product of two rows."""
    return None, (rows[0].fma(rows[1], sums[0]),)


@compiled
def dot(one: Array, other: Array) -> Real:
    """The dot product of two vectors; non-contiguous ones are rejected at compile time."""
    rows = row_at(one.reshape(1, -1), 0), row_at(other.reshape(1, -1), 0)
    return dot_at(rows, len(one), (one.dtype.type(0),))[0]


@compiled
def length_of(square: Real) -> float:
    """A length from its square; 1 for a zero row."""
    return math.sqrt(square) if square > 0 else 1.0


@compiled
def length_at(rows: Array, index: int) -> float:
    """The length of a row of a matrix; 1 for a zero row."""
    row = row_at(rows, index)
    return length_of(dot_at((row, row), rows.shape[1], (rows.dtype.type(0),))[0])


@row_loop(sums=1, start=LOWEST, combine=Lanes.max)
def scaled(rows: Sequence[Lanes], numbers: Sequence[Lanes], tops: Sequence[Lanes]) -> Emitted:
    """A row times another and a number, plus a third row; the largest number."""
    (row, by, plus, _), (factor,) = rows, numbers
    value = row.fma(by * factor, plus)
    return value, (tops[0].max(value),)


@row_loop(sums=2, double=True)
def softmax_sums(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """exp(a row - top); its sum, and that of exp(a row - top) (a row - top).

    In double: if one class has nearly all the probability, the entropy is a small difference.
    """
    below = rows[0] - numbers[0]
    prob = below.exp()
    return prob, (sums[0] + prob.double(), sums[1] + (prob * below).double())


@compiled
def softmax_entropy(logits: Array, prob: Array) -> tuple[Real, float, float]:
    """The largest logit (C,), the sum of exp(logit - largest), and the entropy of the softmax in nats.

    `prob` (C,) is a scratch buffer.
    """
    top = logits.max()
    total, weighted = softmax_sums((row_at(logits, 0), row_at(prob, 0)), len(logits), (top,))
    return top, total, math.log(total) - weighted / total


@compiled
def flush_negligible(price: float) -> float:
    """The price, or 0 if it is negligible."""
    return price * 0 if abs(price) < NEGLIGIBLE else price


@compiled
def insertion_slot(costs: Array, price: float) -> int:
    """Where to insert a price in a sorted row (M,): after its equals; -1 if not below the last, which drops out."""
    slot = len(costs) - 1
    if slot < 0 or not price < costs[slot]:
        return -1
    while slot > 0 and price < costs[slot - 1]:
        slot -= 1
    return slot


@compiled
def shift_from(rows: Array, slot: int) -> None:
    """Shift the rows (M, ...) from a slot on by one; the last drops out."""
    for m in range(len(rows) - 1, slot, -1):
        rows[m] = rows[m - 1]


@compiled
def push(keys: Array, cost: Array, label: int, feature: Array, price: float) -> int:
    """Offer one feature (D,) to a bank's row, like `bank.push`; the slot that it was given, or -1."""
    price = flush_negligible(price)
    slot = insertion_slot(cost[label], price)
    if slot >= 0:
        shift_from(cost[label], slot)
        shift_from(keys[label], slot)
        cost[label, slot], keys[label, slot] = price, feature
    return slot


@compiled
def filled(costs: Array) -> int:
    """How many slots of a row (M,) are in use: they come first, and an empty slot has infinite cost."""
    count = 0
    while count < len(costs) and costs[count] < np.inf:
        count += 1
    return count
