"""Arithmetic for compiled loops that becomes vector instructions, and products of small matrices.

numba has none of its own that does: its `exp` and `max` are made number by number, and its products go through Python's
libraries. The first call in a new environment compiles for some seconds; the result is kept on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import config, get_num_threads, njit, prange, set_num_threads, types
from numba.extending import overload
from numpy.typing import NDArray

Array = NDArray[Any]

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
# sums may be taken in any order, for vector instructions; NaN and infinity keep their meaning
LOOSE = {"reassoc", "contract", "arcp", "nsz"}
compiled = njit(**OPTIONS, fastmath=LOOSE)
# over threads, and only where it says prange
ELSE = ("comprehension", "fusion", "inplace_binop", "numpy", "reduction", "setitem", "stencil")
spread = njit(**OPTIONS, fastmath=LOOSE, parallel={"prange": True} | dict.fromkeys(ELSE, False))

BLOCK = 16  # rows that a thread works off at a time

try:
    from numba.np.ufunc import omppool  # noqa: F401  # OpenMP's threads may be asked for by several at once

    _turn: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
except ImportError:  # numba's own may not
    _turn = threading.Lock()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let loops that are called from here spread their work over `count` threads, as far as there are so many."""
    before = get_num_threads()
    with _turn:
        set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))
        try:
            yield
        finally:
            set_num_threads(before)


def exp(x: float) -> float:
    """e to the power of x <= 80, to the last two digits; 0 where that is far below rounding beside 1."""
    raise NotImplementedError("for compiled loops")


@overload(exp, jit_options={"fastmath": {"contract"}, "error_model": "numpy"})
def _exp(x: Any) -> Any:
    # 2**n times a polynomial in what is left
    single = x == types.float32
    real, whole = (np.float32, np.int32) if single else (np.float64, np.int64)
    lowest = real(-64.0 if single else -600.0)
    # ln 2 in two parts, the first of so few digits that n times it is exact
    high = real(0.693359375 if single else 0.693145751953125)
    low = real(-2.12194440054690583e-4 if single else 1.42860682030941723212e-6)
    bias, digits = (whole(127), whole(23)) if single else (whole(1023), whole(52))
    per_two = real(1 / math.log(2))
    series = tuple(real(1 / math.factorial(k)) for k in range(7 if single else 13, -1, -1))

    def of(x: Any) -> Any:
        n = np.floor(x * per_two + real(0.5))
        r = (x - n * high) - n * low
        p = series[0]
        for k in range(1, len(series)):
            p = p * r + series[k]
        power = whole((whole(n) + bias) << digits).view(real)
        return p * power if x > lowest else (real(0) if x <= lowest else x)

    return of


def largest(row: Array) -> Any:
    """The largest number of a row; what it is with a NaN among them is not said."""
    raise NotImplementedError("for compiled loops")


@overload(largest)
def _largest(row: Any) -> Any:
    # as integers of the same order: of them a loop becomes vector instructions, of floats it does not
    single = row.dtype == types.float32
    real, whole = (np.float32, np.int32) if single else (np.float64, np.int64)
    sign, rest = (whole(31), whole(2**31 - 1)) if single else (whole(63), whole(2**63 - 1))

    def of(row: Any) -> Any:
        bits, top = row.view(whole), whole(-1) - rest
        for c in range(len(bits)):
            number = bits[c]
            top = max(top, number ^ ((number >> sign) & rest))
        return whole(top ^ ((top >> sign) & rest)).view(real)

    return of


@compiled
def dot(one: Array, other: Array) -> Any:
    """The product of two vectors."""
    total = one.dtype.type(0)
    for d in range(len(one)):
        total += one[d] * other[d]
    return total


@compiled
def length_of(row: Array) -> Any:
    """The length of a row; 1 for a zero row."""
    square = dot(row, row)
    return row.dtype.type(math.sqrt(square)) if square > 0 else row.dtype.type(1)


@compiled
def spike(logits: Array, zero: Any) -> tuple[Any, Any, Any]:
    """The largest logit (C,), the sum of exponentials under it, and the entropy of the softmax in nats.

    Sums are taken in the precision of `zero`: where one class has nearly all, the entropy is a small difference.
    """
    top = largest(logits)
    total, weighted = zero, zero
    for c in range(len(logits)):
        chance = exp(logits[c] - top)
        total += chance
        weighted += chance * (logits[c] - top)
    return top, total, math.log(total) - weighted / total


def reach() -> bool:
    """Give compiled loops torch's own product of matrices, under the names by which they call it; whether it is there."""
    try:
        library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/*torch_cpu.*"))))
        for name in ("sgemm_", "dgemm_"):
            place = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(f"testtime_{name}", place)
    except (OSError, AttributeError, StopIteration):
        return False
    return True


REACHED = reach()
# letters that say whether a matrix is transposed, sizes, a factor, a matrix and its rows' length, ...: all by address
_FORM = types.void(*[types.voidptr] * 13)
_SINGLE, _DOUBLE = (types.ExternalFunction(f"testtime_{name}", _FORM) for name in ("sgemm_", "dgemm_"))


def multiply(letters: Array, sizes: Array, numbers: Array, a: Array, b: Array, out: Array) -> None:
    """b a, as columns before rows see it: a b, as rows before columns do."""
    raise NotImplementedError("for compiled loops")


@overload(multiply)
def _multiply(letters: Any, sizes: Any, numbers: Any, a: Any, b: Any, out: Any) -> Any:
    gemm = _SINGLE if out.dtype == types.float32 else _DOUBLE

    def of(letters: Any, sizes: Any, numbers: Any, a: Any, b: Any, out: Any) -> None:
        gemm(
            letters.ctypes,
            letters[1:].ctypes,
            sizes.ctypes,
            sizes[1:].ctypes,
            sizes[2:].ctypes,
            numbers.ctypes,
            b.ctypes,
            sizes[3:].ctypes,
            a.ctypes,
            sizes[4:].ctypes,
            numbers[1:].ctypes,
            out.ctypes,
            sizes[5:].ctypes,
        )

    return of


N, T = 78, 84  # as letters


@compiled
def across(a: Array, b: Array, out: Array) -> None:
    """a (M, K) @ b.T (K, N) -> (M, N)."""
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[0]
    sizes = np.array([columns, rows, inner, inner, inner, columns], np.int32)
    multiply(np.array([T, N], np.uint8), sizes, np.array([1, 0], out.dtype), a, b, out)


@compiled
def product(a: Array, b: Array, out: Array) -> None:
    """a (M, K) @ b (K, N) -> (M, N)."""
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    sizes = np.array([columns, rows, inner, columns, inner, columns], np.int32)
    multiply(np.array([N, N], np.uint8), sizes, np.array([1, 0], out.dtype), a, b, out)


@compiled
def product_of_transposed(a: Array, b: Array, out: Array) -> None:
    """a.T (M, K) @ b (K, N) -> (M, N), for a (K, M)."""
    inner, rows, columns = a.shape[0], a.shape[1], b.shape[1]
    sizes = np.array([columns, rows, inner, columns, rows, columns], np.int32)
    multiply(np.array([N, T], np.uint8), sizes, np.array([1, 0], out.dtype), a, b, out)
