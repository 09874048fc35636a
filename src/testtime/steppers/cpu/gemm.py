"""Products of matrices in compiled loops: torch's own, called by address.

A library call from Python would cost as much as a small product does. Matrices lie row by row, in single or double
precision. A product keeps to the thread that asks for it, and threads may each ask for a piece: a library's own threads
and those of the loops, in turns, would wait for one another busily, each on the other's core.
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
own_threads = types.ExternalFunction(f"testtime_{OWN_THREADS}", types.int32(types.int32))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While inside, products keep to the calling thread, where they can be told to."""
    if _tell is None:
        yield
        return
    before = _tell(1)
    try:
        yield
    finally:
        _tell(before)


N, T = 78, 84  # as letters


@compiled
def _gap(a: Array) -> int:
    """How far apart the rows of a matrix begin."""
    return a.strides[0] // a.itemsize


@compiled
def product(first: int, second: int, a: Array, b: Array, out: Array) -> None:
    """a @ b, (M, K) and (K, N) -> (M, N), each transposed where its letter is T."""
    inner = len(a) if first == T else a.shape[1]
    sizes = np.array([out.shape[1], out.shape[0], inner, _gap(b), _gap(a), _gap(out)], np.int32)
    letters, numbers = np.array([second, first], np.uint8), np.array([1, 0], out.dtype)
    # it sees columns before rows, and so b.T a.T for a b
    letters_and_sizes = letters.ctypes, letters[1:].ctypes, sizes.ctypes, sizes[1:].ctypes, sizes[2:].ctypes
    factors = numbers.ctypes, b.ctypes, sizes[3:].ctypes, a.ctypes, sizes[4:].ctypes
    arguments = letters_and_sizes + factors + (numbers[1:].ctypes, out.ctypes, sizes[5:].ctypes)
    if out.itemsize == 4:
        _SINGLE(*arguments)
    else:
        _DOUBLE(*arguments)
