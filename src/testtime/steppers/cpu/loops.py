"""What the compiled loops share: how they are compiled, arithmetic, and the parts of a sorted row.

Loops take arrays and fill arrays. Rows are worked off one after the other, so the numbers of a class do not depend on
its neighbours. The first call in a new environment compiles for some seconds; the result is kept on disk.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numba import config, get_num_threads, njit, set_num_threads, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from testtime.machine.capture import warn_once
from testtime.ops import NOTHING
from testtime.steppers import ALIGNMENT, aligned, example
from testtime.steppers.cpu.lanes import fma, row_loop
from testtime.types import Task

Array = NDArray[Any]

LINE = ALIGNMENT  # bytes of a cache line

# Every operation rounds for itself, in the order that is written: no `fastmath`. A function is compiled more than once,
# inside whoever calls it, and which of these copies runs depends on what a process has loaded before. Copies whose sums
# a compiler may take in its own order differ in the last bit; so did a run whose loops were just compiled from one that
# found them on disk. What must be quick is written so that it can become vector instructions as it stands.
OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
try:
    njit(**OPTIONS)(lambda: None)  # numba looks for a place now, and compiles nothing yet
except RuntimeError:
    # not in a temporary folder instead: what lies there others may have written, and numba would run it
    OPTIONS["cache"] = False
    warn_once(
        "Compiled loops cannot be kept on disk, and are compiled anew in every process, for about a minute. "
        "Set NUMBA_CACHE_DIR to a folder of yours that can be written."
    )
compiled = njit(**OPTIONS)
# over threads, and only where it says prange
ELSE = ("comprehension", "fusion", "inplace_binop", "numpy", "reduction", "setitem", "stencil")
spread = njit(**OPTIONS, parallel={"prange": True} | dict.fromkeys(ELSE, False))

# numba's threads start here, because they tell OpenMP how many there are, and that is torch's number too
_torch_threads = torch.get_num_threads()
get_num_threads()
torch.set_num_threads(_torch_threads)

try:
    import_module("numba.np.ufunc.omppool")  # OpenMP's threads may be asked for by several at once

    _turn: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
except ImportError:  # numba's own may not
    _turn = threading.Lock()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let loops that are called from here spread their work over `count` threads, as far as there are so many."""
    if count == 1:  # nothing is asked of the pool
        yield
        return
    before = get_num_threads()
    with _turn:
        set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))
        try:
            yield
        finally:
            set_num_threads(before)


def empty_aligned(*shape: int, dtype: Any) -> Array:
    """An array to fill that begins where a line of the cache does: products of some sizes are half as quick again."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def rounded(value: float, real: Any) -> Any:
    """A number in a precision, infinite where it is too large, as torch has it: answers then say so."""
    with np.errstate(over="ignore"):
        return real(value)


def owned(tensor: Tensor) -> Array:
    """The numbers of a tensor in an array of their own, which may be written to."""
    numbers = tensor.detach().numpy()
    array = empty_aligned(*numbers.shape, dtype=numbers.dtype)
    array[...] = numbers
    return array


def copied(array: Array) -> Tensor:
    """A tensor of its own with the numbers of an array."""
    return torch.from_numpy(array).clone()


@contextlib.contextmanager
def unchanged(arrays: Iterable[Array], row: int) -> Iterator[None]:
    """Put a row of each array back to what it was, once the block has ended."""
    before = [(array, array[row].copy()) for array in arrays]
    yield
    for array, kept in before:
        array[row] = kept


class ByImage:
    """What steppers share that go through a stream image by image: subclasses have `_step`."""

    task: Task

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        logits, learned = self._step(aligned(views), False)
        return logits, torch.as_tensor(learned)

    def scan(self, stream: Tensor) -> Tensor:
        return torch.stack([self.step(views)[0] for views in stream], 1)

    def peek(self, views: Tensor) -> Tensor:
        return self._step(aligned(views), True)[0]

    def warm_up(self, views: int) -> None:
        self.peek(example(self.task, views))

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, list[bool] | Tensor]:
        """Logits (S, C) and which runs learned; where it only `peeking`, the state is left as it was."""
        raise NotImplementedError


def _layout(kind: Any) -> tuple[bool, Any, Any, Any]:
    """Of a kind of number: whether it is single, its type, that of whole numbers as long, how many digits it has."""
    single = kind == types.float32
    real, whole = (np.float32, np.int32) if single else (np.float64, np.int64)
    return single, real, whole, whole(23 if single else 52)


def _ln2(real: Any) -> tuple[Any, Any]:
    """ln 2 in two parts, the first of so few digits that a whole number times it is exact."""
    single = real is np.float32
    high = 0.693359375 if single else 0.693145751953125
    return real(high), real(-2.12194440054690583e-4 if single else 1.42860682030941723212e-6)


def exp(x: float) -> float:
    """e to the power of x <= 80, to the last two digits; 0 where that is far below rounding beside 1.

    numba's own is made number by number; this becomes vector instructions. And what is below rounding would slow the
    products that it goes into thirty times, where it is so small that it has fewer digits.
    """
    raise NotImplementedError("for compiled loops")


@overload(exp, jit_options={"error_model": "numpy"})
def _exp(x: Any) -> Any:
    # 2**n times a polynomial in what is left
    single, real, whole, digits = _layout(x)
    high, low = _ln2(real)
    lowest = real(-64.0 if single else -600.0)
    bias = whole(127 if single else 1023)
    per_two = real(1 / math.log(2))
    series = tuple(real(1 / math.factorial(k)) for k in range(7 if single else 13, -1, -1))

    def of(x: Any) -> Any:
        n = np.floor(fma(x, per_two, real(0.5)))
        r = fma(n, -low, fma(n, -high, x))
        p = series[0]
        for k in range(1, len(series)):
            p = fma(p, r, series[k])
        power = whole((whole(n) + bias) << digits).view(real)
        return p * power if x > lowest else (real(0) if x <= lowest else x)

    return of


def log(x: float) -> float:
    """The natural logarithm of x, to the last two digits; that of 0, and of numbers with fewer digits, is finite.

    As for `exp`, vector instructions, where numba's own is made number by number.
    """
    raise NotImplementedError("for compiled loops")


@overload(log, jit_options={"error_model": "numpy"})
def _log(x: Any) -> Any:
    # x = m 2**n with m between the roots of 1/2 and 2; log m = 2 atanh s with s = (m - 1) / (m + 1)
    single, real, whole, digits = _layout(x)
    high, low = _ln2(real)
    middle = np.array(math.sqrt(0.5), real).view(whole)[()]
    series = tuple(real(2 / k) for k in range(11 if single else 23, 0, -2))

    def of(x: Any) -> Any:
        bits = real(x).view(whole)
        n = (bits - middle) >> digits
        m = whole(bits - (n << digits)).view(real)
        s = (m - real(1)) / (m + real(1))
        square, p = s * s, series[0]
        for k in range(1, len(series)):
            p = fma(p, square, series[k])
        return fma(real(n), high, fma(real(n), low, p * s))

    return of


def largest(row: Array) -> Any:
    """The largest number of a row; what it is with a NaN among them is not said."""
    raise NotImplementedError("for compiled loops")


@overload(largest)
def _largest(row: Any) -> Any:
    # as integers of the same order: of them a loop becomes vector instructions, of floats it does not
    single, real, whole, _ = _layout(row.dtype)
    sign, rest = (whole(31), whole(2**31 - 1)) if single else (whole(63), whole(2**63 - 1))

    def of(row: Any) -> Any:
        bits, top = row.view(whole), whole(-1) - rest
        for c in range(len(bits)):
            number = bits[c]
            top = max(top, number ^ ((number >> sign) & rest))
        return whole(top ^ ((top >> sign) & rest)).view(real)

    return of


@row_loop(sums=1)
def _dot(rows: Any, numbers: Any, sums: Any) -> Any:
    return None, (rows[0].fma(rows[1], sums[0]),)


@compiled
def row_at(rows: Array, place: int) -> Any:
    """The address of a row of a matrix; of a vector, with place 0.

    Loops take matrices whole: a row of its own would be counted in and out of use, which costs as much as the row does.
    """
    return np.intp(rows.ctypes.data) + place * rows.strides[0]


@compiled
def dot_at(one: int, other: int, count: int, like: Any) -> Any:
    """The product of two vectors of `count` numbers at two addresses, in the precision of `like`."""
    return _dot((one, other), count, (like,))[0]


@compiled
def dot(one: Array, other: Array) -> Any:
    """The product of two vectors; what lies scattered is refused when it is compiled."""
    return dot_at(row_at(one.reshape(1, -1), 0), row_at(other.reshape(1, -1), 0), len(one), one.dtype.type(0))


@compiled
def length_of(square: Any) -> float:
    """A length by its square; 1 for a zero row."""
    return math.sqrt(square) if square > 0 else 1.0


@compiled
def length_at(rows: Array, place: int) -> float:
    """The length of a row of a matrix; 1 for a zero row."""
    row = row_at(rows, place)
    return length_of(dot_at(row, row, rows.shape[1], rows.dtype.type(0)))


@compiled
def lengths(rows: Array) -> Array:
    """The lengths (C,) of the rows of a matrix; 1 for a zero row."""
    found = np.empty(len(rows), rows.dtype)
    for c in range(len(rows)):
        found[c] = length_at(rows, c)
    return found


@row_loop(sums=2, double=True)
def _weighed(rows: Any, numbers: Any, sums: Any) -> Any:
    (chance, value), (top,) = rows, numbers
    return None, (sums[0] + chance.double(), sums[1] + (chance * (value - top)).double())


@compiled
def weighed(chances: Array, values: Array, top: Any) -> tuple[float, float]:
    """The sum of chances (C,), and that of chances times values less `top`; both in double.

    Where one class has nearly all, an entropy is a small difference.
    """
    return _weighed((row_at(chances, 0), row_at(values, 0)), len(chances), (top,))


@compiled
def softmax_entropy(logits: Array, chance: Array) -> tuple[Any, float, float]:
    """The largest logit (C,), the sum of exponentials under it, and the entropy of the softmax in nats.

    `chance` (C,) is a scratch buffer.
    """
    top = largest(logits)
    for c in range(len(logits)):
        chance[c] = exp(logits[c] - top)
    whole, weighted = weighed(chance, logits, top)
    return top, whole, math.log(whole) - weighted / whole


@compiled
def settled(price: float) -> float:
    """A price, or 0 for what is next to nothing."""
    return price * 0 if abs(price) < NOTHING else price


@compiled
def rank(costs: Array, price: float) -> int:
    """Where a price belongs in a sorted row (M,): behind its equals; -1 if not below the last, which falls out."""
    place = len(costs) - 1
    if place < 0 or not price < costs[place]:
        return -1
    while place > 0 and price < costs[place - 1]:
        place -= 1
    return place


@compiled
def shift_from(rows: Array, place: int) -> None:
    """Move the rows (M, ...) from a place on one further; the last falls out."""
    for m in range(len(rows) - 1, place, -1):
        rows[m] = rows[m - 1]


@compiled
def push(keys: Array, cost: Array, label: int, feature: Array, price: float) -> bool:
    """Offer a bank's row one feature (D,), as `bank.push` does; whether it was taken."""
    price = settled(price)
    place = rank(cost[label], price)
    if place >= 0:
        shift_from(cost[label], place)
        shift_from(keys[label], place)
        cost[label, place], keys[label, place] = price, feature
    return place >= 0


@compiled
def filled(costs: Array) -> int:
    """How many slots of a row (M,) are in use: they come first, and an empty one costs infinity."""
    count = 0
    while count < len(costs) and costs[count] < np.inf:
        count += 1
    return count
