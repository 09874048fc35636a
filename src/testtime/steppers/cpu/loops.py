"""What the compiled loops share: how they are compiled, arithmetic, and the parts of a sorted row.

Loops take arrays and fill arrays. Rows are worked off one after the other, so the numbers of a class do not depend on
its neighbours. The first call in a new environment compiles for some seconds; the result is kept on disk.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import config, get_num_threads, njit, set_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from testtime.capture import warn_once
from testtime.ops import NOTHING
from testtime.steppers import ALIGNMENT, example, laid
from testtime.types import Task

Array = NDArray[Any]

SUMS = 4  # vectors of sums side by side, as many as hide what an addition takes
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


def aligned(*shape: int, dtype: Any) -> Array:
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
    array = aligned(*numbers.shape, dtype=numbers.dtype)
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
        logits, learned = self._step(laid(views), False)
        return logits, torch.tensor(learned)

    def scan(self, stream: Tensor) -> Tensor:
        return torch.stack([self.step(views)[0] for views in stream], 1)

    def peek(self, views: Tensor) -> Tensor:
        return self._step(laid(views), True)[0]

    def warm_up(self, views: int) -> None:
        self.peek(example(self.task, views))

    def _step(self, views: Tensor, looks: bool) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) and which runs learned; where it only `looks`, the state is left as it was."""
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


class Lanes:
    """A number, or a vector of them side by side, while a loop is built: what is done to it becomes instructions."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def __add__(self, other: Lanes) -> Lanes:
        return Lanes(self.builder, self.builder.fadd(self.value, other.value))

    def __sub__(self, other: Lanes) -> Lanes:
        return Lanes(self.builder, self.builder.fsub(self.value, other.value))

    def __mul__(self, other: Lanes) -> Lanes:
        return Lanes(self.builder, self.builder.fmul(self.value, other.value))

    def __truediv__(self, other: Lanes) -> Lanes:
        return Lanes(self.builder, self.builder.fdiv(self.value, other.value))

    def __abs__(self) -> Lanes:
        return self._call("fabs")

    def fma(self, by: Lanes, plus: Lanes) -> Lanes:
        """self * by + plus, rounded once."""
        return self._call("fma", by, plus)

    def double(self) -> Lanes:
        """In double precision."""
        kind = _lanes(ir.DoubleType(), getattr(self.value.type, "count", 1))
        return self if kind == self.value.type else Lanes(self.builder, self.builder.fpext(self.value, kind))

    def _call(self, name: str, *others: Lanes) -> Lanes:
        kind, values = self.value.type, [self.value, *(other.value for other in others)]
        count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        digits = 32 if ir.FloatType() in (kind, getattr(kind, "element", kind)) else 64
        form = ir.FunctionType(kind, [kind] * len(values))
        function = cgutils.get_or_insert_function(self.builder.module, form, f"llvm.{name}.{count}f{digits}")
        return Lanes(self.builder, self.builder.call(function, values))


def _lanes(real: Any, count: int) -> Any:
    """The type of `count` numbers side by side."""
    return ir.VectorType(real, count) if count > 1 else real


class Place(NamedTuple):
    """Where the lanes of a row lie that a loop is at."""

    builder: Any
    pointer: Any

    def load(self) -> Lanes:
        """What lies there."""
        return Lanes(self.builder, self.builder.load(self.pointer, align=4))

    def store(self, lanes: Lanes) -> None:
        """Put it there."""
        self.builder.store(lanes.value, self.pointer, align=4)


def row_loop(sums: int, double: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled loops, `(addresses, count, numbers) -> sums`, of what it does at one place.

    That is `body(rows, numbers, sums)`, given places, lanes and the sums so far, as lanes; it returns these sums with
    more added. They are in `double`, or in the precision of the numbers. What it says becomes vector instructions
    as it stands, since a compiler may make such of a sum only by taking it in its own order: `SUMS` vectors side by
    side, then these, then what is left over.
    """

    def made(body: Callable[..., Any]) -> Any:
        @intrinsic
        def loop(typingctx: Any, addresses: Any, count: Any, numbers: Any) -> Any:
            result = types.float64 if double else numbers.dtype

            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                length, real = arguments[1], context.get_value_type(numbers.dtype)
                starts = [
                    builder.inttoptr(address, real.as_pointer())
                    for address in cgutils.unpack_tuple(builder, arguments[0])
                ]
                scalars = cgutils.unpack_tuple(builder, arguments[2])
                kind = context.get_value_type(result)
                width = 8 if kind == ir.FloatType() else 4

                def at(index: Any, count: int, before: list[Any]) -> list[Any]:
                    """The sums after the lanes at an index."""
                    pointers = (builder.gep(start, [index]) for start in starts)
                    pointers = (builder.bitcast(place, _lanes(real, count).as_pointer()) for place in pointers)
                    rows = [Place(builder, place) for place in pointers]
                    values = [Lanes(builder, _repeated(builder, value, count)) for value in scalars]
                    return [after.value for after in body(rows, values, [Lanes(builder, value) for value in before])]

                zero = ir.Constant(_lanes(kind, width), [0.0] * width)
                places = [[cgutils.alloca_once_value(builder, zero) for _ in range(sums)] for _ in range(SUMS)]
                block = ir.Constant(length.type, SUMS * width)
                blocks = builder.sdiv(length, block)
                with cgutils.for_range(builder, blocks) as each:
                    base = builder.mul(each.index, block)
                    for side, kept in enumerate(places):
                        index = builder.add(base, ir.Constant(length.type, side * width))
                        for place, value in zip(kept, at(index, width, [*map(builder.load, kept)]), strict=True):
                            builder.store(value, place)
                totals = [
                    cgutils.alloca_once_value(builder, _folded(builder, [*map(builder.load, column)]))
                    for column in zip(*places, strict=True)
                ]
                rest = cgutils.for_range_slice(builder, builder.mul(blocks, block), length, ir.Constant(length.type, 1))
                with rest as (index, _):
                    for place, value in zip(totals, at(index, 1, [*map(builder.load, totals)]), strict=True):
                        builder.store(value, place)
                return context.make_tuple(builder, signature.return_type, [*map(builder.load, totals)])

            return types.UniTuple(result, sums)(addresses, count, numbers), build

        return loop

    return made


def _repeated(builder: Any, value: Any, count: int) -> Any:
    """A number in every one of `count` lanes."""
    if count == 1:
        return value
    places, kind = ir.IntType(32), ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(places, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(places, count), [0] * count))


def _folded(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all lanes of vectors: of every two of them, then of each half and the other."""
    while len(vectors) > 1:
        vectors = [builder.fadd(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    (whole,), places = vectors, ir.IntType(32)
    half = whole.type.count // 2
    while half:
        kind = ir.VectorType(places, half)
        low, high = (
            builder.shuffle_vector(whole, whole, ir.Constant(kind, [*range(start, start + half)]))
            for start in (0, half)
        )
        whole, half = builder.fadd(low, high), half // 2
    return builder.extract_element(whole, ir.Constant(places, 0))


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, a, a), build


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
    one, other = rows
    return (one.load().fma(other.load(), sums[0]),)


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
def dot_rows(one: Array, i: int, other: Array, j: int) -> Any:
    """The product of a row of one matrix with a row of another."""
    return dot_at(row_at(one, i), row_at(other, j), one.shape[1], one.dtype.type(0))


@compiled
def dot(one: Array, other: Array) -> Any:
    """The product of two vectors."""
    return dot_rows(one.reshape(1, -1), 0, other.reshape(1, -1), 0)


@compiled
def length_of(square: Any) -> float:
    """A length by its square; 1 for a zero row."""
    return math.sqrt(square) if square > 0 else 1.0


@compiled
def length_at(rows: Array, place: int) -> float:
    """The length of a row of a matrix; 1 for a zero row."""
    return length_of(dot_rows(rows, place, rows, place))


@row_loop(sums=2, double=True)
def _weighed(rows: Any, numbers: Any, sums: Any) -> Any:
    (chance, value), (top,) = (row.load() for row in rows), numbers
    return sums[0] + chance.double(), sums[1] + (chance * (value - top)).double()


@compiled
def weighed(chances: Array, values: Array, top: Any) -> tuple[float, float]:
    """The sum of chances (C,), and that of chances times values less `top`; both in double.

    Where one class has nearly all, an entropy is a small difference.
    """
    return _weighed((row_at(chances, 0), row_at(values, 0)), len(chances), (top,))


@compiled
def spike(logits: Array, chance: Array) -> tuple[Any, float, float]:
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
def make_room(rows: Array, place: int) -> None:
    """Move the rows (M, ...) from a place on one further; the last falls out."""
    for m in range(len(rows) - 1, place, -1):
        rows[m] = rows[m - 1]


@compiled
def push(keys: Array, cost: Array, label: int, feature: Array, price: float) -> bool:
    """Offer a bank's row one feature (D,), as `bank.push` does; whether it was taken."""
    price = settled(price)
    place = rank(cost[label], price)
    if place >= 0:
        make_room(cost[label], place)
        make_room(keys[label], place)
        cost[label, place], keys[label, place] = price, feature
    return place >= 0


@compiled
def filled(costs: Array) -> int:
    """How many slots of a row (M,) are in use: they come first, and an empty one costs infinity."""
    count = 0
    while count < len(costs) and costs[count] < np.inf:
        count += 1
    return count
