"""What the compiled loops of fast twins have in common: how they are compiled, and the parts of a sorted row.

Loops take arrays and fill arrays. Rows are worked off one after the other, so the numbers of a class do not depend on
its neighbours. The first call in a new environment compiles for some seconds; the result is kept on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# sums may be taken in any order, for vector instructions; NaN and infinity keep their meaning
compiled = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy")


def owned(tensor: Tensor) -> Array:
    """The numbers of a tensor in an array of their own, which may be written to."""
    return tensor.detach().contiguous().numpy().copy()


@compiled
def dot(one: Array, other: Array) -> Any:
    """The product of two vectors (D,)."""
    total = one.dtype.type(0)
    for d in range(len(one)):
        total += one[d] * other[d]
    return total


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
def filled(costs: Array) -> int:
    """How many slots of a row (M,) are in use: they come first, and an empty one costs infinity."""
    count = 0
    while count < len(costs) and costs[count] < np.inf:
        count += 1
    return count
