"""Products of matrices in compiled loops: torch's own, called by address.

A library call from Python would cost as much as a small product does. Matrices lie row by row, in single or double
precision; as many threads work on them as torch has been given.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import types
from numba.extending import overload

from testtime.fast.loops import Array, compiled


def reach(folder: Path) -> bool:
    """Give compiled loops the product of matrices of the torch in a folder; whether there is one to call."""
    try:
        library = ctypes.CDLL(str(next(folder.glob("lib/*torch_cpu.*"))))
        for name in ("sgemm_", "dgemm_"):
            place = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(f"testtime_{name}", place)
    except (OSError, AttributeError, StopIteration):
        return False
    return True


REACHED = reach(Path(torch.__file__).parent)
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
