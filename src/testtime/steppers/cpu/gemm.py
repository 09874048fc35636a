"""Products of matrices in compiled loops: torch's own, called by address.

A library call from Python would cost as much as a small product does. Matrices lie row by row, in single or double
precision. A product is spread over the threads of the loops, or keeps to one: threads of two kinds in turns would wait
for one another busily, each on the other's core.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import prange, types
from numba.extending import overload

from testtime.steppers.cpu.loops import Array, compiled, spread

PRODUCTS = "sgemm_", "dgemm_"
OWN_THREADS = "MKL_Set_Num_Threads_Local"  # how many the library takes for calls of this thread; gives those before


def reach(folder: Path, names: tuple[str, ...]) -> bool:
    """Give compiled loops functions of the torch in a folder; whether they are there to call."""
    try:
        library = _library(folder)
        for name in names:
            place = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(f"testtime_{name}", place)
    except (OSError, AttributeError, StopIteration):
        return False
    return True


def _library(folder: Path) -> ctypes.CDLL:
    """The library of the torch in a folder that has the products."""
    return ctypes.CDLL(str(next(folder.glob("lib/*torch_cpu.*"))))


_TORCH = Path(torch.__file__).parent
REACHED = reach(_TORCH, PRODUCTS)
SPREADS = REACHED and reach(_TORCH, (OWN_THREADS,))  # whether products can be told to keep to a thread
_tell = getattr(_library(_TORCH), OWN_THREADS) if SPREADS else None
if not SPREADS:  # nothing calls it then, but without it no loop that might is loaded
    llvmlite.binding.add_symbol(
        f"testtime_{OWN_THREADS}", ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    )
# letters that say whether a matrix is transposed, sizes, a factor, a matrix and its rows' length, ...: all by address
_FORM = types.void(*[types.voidptr] * 13)
_SINGLE, _DOUBLE = (types.ExternalFunction(f"testtime_{name}", _FORM) for name in PRODUCTS)
_own_threads = types.ExternalFunction(f"testtime_{OWN_THREADS}", types.int32(types.int32))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While inside, products that are not spread keep to the calling thread, where they can be told to."""
    if _tell is None:
        yield
        return
    before = _tell(1)
    try:
        yield
    finally:
        _tell(before)


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
def _gap(a: Array) -> int:
    """How far apart the rows of a matrix begin."""
    return a.strides[0] // a.itemsize


@compiled
def _multiplied(first: int, second: int, a: Array, b: Array, inner: int, out: Array) -> None:
    sizes = np.array([out.shape[1], out.shape[0], inner, _gap(b), _gap(a), _gap(out)], np.int32)
    multiply(np.array([second, first], np.uint8), sizes, np.array([1, 0], out.dtype), a, b, out)


@spread
def _spread(first: int, second: int, a: Array, b: Array, out: Array, threads: int) -> None:
    """Each thread has some rows of the product; or, of one with rows of b, some columns: it reads but its own rows."""
    size = out.shape[1] if second == T else out.shape[0]
    for piece in prange(threads):
        start, stop = size * piece // threads, size * (piece + 1) // threads
        before = _own_threads(1)
        if second == T:
            _multiplied(first, second, a, b[start:stop], a.shape[1], out[:, start:stop])
        elif first == T:
            _multiplied(first, second, a[:, start:stop], b, len(a), out[start:stop])
        else:
            _multiplied(first, second, a[start:stop], b, a.shape[1], out[start:stop])
        _own_threads(before)


def _product(first: int, second: int, a: Array, b: Array, out: Array, threads: int | None) -> None:
    raise NotImplementedError("for compiled loops")


@overload(_product)
def _chosen(first: Any, second: Any, a: Any, b: Any, out: Any, threads: Any) -> Any:
    def alone(first: Any, second: Any, a: Any, b: Any, out: Any, threads: Any) -> None:
        _multiplied(first, second, a, b, len(a) if first == T else a.shape[1], out)

    def together(first: Any, second: Any, a: Any, b: Any, out: Any, threads: Any) -> None:
        _spread(first, second, a, b, out, threads)

    return alone if threads == types.none else together


@compiled
def across(a: Array, b: Array, out: Array, threads: int | None) -> None:
    """a (M, K) @ b.T (K, N) -> (M, N)."""
    _product(N, T, a, b, out, threads)


@compiled
def product(a: Array, b: Array, out: Array, threads: int | None) -> None:
    """a (M, K) @ b (K, N) -> (M, N)."""
    _product(N, N, a, b, out, threads)


@compiled
def product_of_transposed(a: Array, b: Array, out: Array, threads: int | None) -> None:
    """a.T (M, K) @ b (K, N) -> (M, N), for a (K, M)."""
    _product(T, N, a, b, out, threads)
