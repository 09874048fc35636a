"""GEMM for compiled loops: torch's own BLAS, called by address.

A call through Python would cost as much as a small product. Matrices are row-major, in single or double precision. A
product runs on the calling thread, and several threads may each compute a part: if the library's threads and those of
the loops took turns, they would busy-wait for one another, each on the other's core.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding
import numpy as np
import torch
from numba import types

from testtime.steppers.cpu.loops import Array, compiled

PRODUCTS = "sgemm_", "dgemm_"
SET_THREADS = (
    "MKL_Set_Num_Threads_Local"  # sets how many threads calls from this thread use; returns the previous number
)


def bind(folder: Path, names: tuple[str, ...]) -> bool:
    """Make functions of the torch installed in a folder available to compiled loops; whether all were found."""
    try:
        library = _library(folder)
        for name in names:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(f"testtime_{name}", address)
    except (OSError, AttributeError, StopIteration):
        return False
    return True


def _library(folder: Path) -> ctypes.CDLL:
    """The library with the GEMM functions of the torch in a folder."""
    return ctypes.CDLL(str(next(folder.glob("lib/*torch_cpu.*"))))


_TORCH = Path(torch.__file__).parent
AVAILABLE = bind(_TORCH, PRODUCTS)
CAN_LIMIT_THREADS = AVAILABLE and bind(_TORCH, (SET_THREADS,))  # whether products can be limited to one thread
_set_threads = getattr(_library(_TORCH), SET_THREADS) if CAN_LIMIT_THREADS else None
if not CAN_LIMIT_THREADS:  # never called then, but loops that refer to it fail to load without the symbol
    llvmlite.binding.add_symbol(
        f"testtime_{SET_THREADS}", ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    )
# transposition letters, sizes, a factor, a matrix and its leading dimension, ...: all by address
_SIGNATURE = types.void(*[types.voidptr] * 13)
_SINGLE, _DOUBLE = (types.ExternalFunction(f"testtime_{name}", _SIGNATURE) for name in PRODUCTS)
set_threads = types.ExternalFunction(f"testtime_{SET_THREADS}", types.int32(types.int32))


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Within the block, products run on the calling thread, if the library can be told to."""
    if _set_threads is None:
        yield
        return
    before = _set_threads(1)
    try:
        yield
    finally:
        _set_threads(before)


N, T = ord("N"), ord("T")  # not transposed, transposed


@compiled
def _leading_dimension(a: Array) -> int:
    """The leading dimension of a row-major matrix: its row stride in elements."""
    return a.strides[0] // a.itemsize


@compiled
def matmul(first: int, second: int, a: Array, b: Array, out: Array) -> None:
    """out = a @ b, (M, K) and (K, N) -> (M, N); a factor whose letter is T is transposed first."""
    inner = len(a) if first == T else a.shape[1]
    sizes = np.array(
        [out.shape[1], out.shape[0], inner, _leading_dimension(b), _leading_dimension(a), _leading_dimension(out)],
        np.int32,
    )
    letters, numbers = np.array([second, first], np.uint8), np.array([1, 0], out.dtype)
    # BLAS is column-major: it sees the transposes, and computes b.T a.T
    letters_and_sizes = letters.ctypes, letters[1:].ctypes, sizes.ctypes, sizes[1:].ctypes, sizes[2:].ctypes
    factors = numbers.ctypes, b.ctypes, sizes[3:].ctypes, a.ctypes, sizes[4:].ctypes
    arguments = letters_and_sizes + factors + (numbers[1:].ctypes, out.ctypes, sizes[5:].ctypes)
    if out.itemsize == 4:
        _SINGLE(*arguments)
    else:
        _DOUBLE(*arguments)
