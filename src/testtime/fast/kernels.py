"""Loops over prototypes that touch memory once, compiled by numba. Arrays in, arrays filled.

Rows are independent and worked off one after the other, so a row's numbers do not depend on what is beside it.
The first call in a new environment compiles for a few seconds; the result is kept on disk.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy")
def nudge(
    start: Array,
    direction: Array,
    pull: Array,
    pulled: Array,
    weight: Array,
    feature: Array,
    soft: Array,
    lr: Array,
    probe: Array,
    moved: Array,
    length: Array,
    dot: Array,
) -> None:
    """See `dpe.nudge`. `pulled` (S,) says where there is a pull; `moved` of one row is scratch, not an answer."""
    settings, classes, dim = start.shape
    keep = moved.shape[1] == classes
    for s in range(settings):
        rate, f, probed = lr[s], feature[s], probe[s]
        for c in range(classes):
            at, begin, out = direction[s, c], start[s, c], moved[s, c if keep else 0]
            w, along = weight[s, c], start.dtype.type(0)
            if pulled[s]:
                for d in range(dim):
                    out[d] = pull[s, c, d] + w * f[d]
                    along += out[d] * at[d]
            else:
                for d in range(dim):
                    out[d] = w * f[d]
                    along += out[d] * at[d]
            eps, square, product = soft[s, c], start.dtype.type(0), start.dtype.type(0)
            for d in range(dim):
                slope = out[d] - along * at[d]
                out[d] = begin[d] - rate * slope / (abs(slope) + eps)
                square += out[d] * out[d]
                product += out[d] * probed[d]
            length[s, c] = math.sqrt(square)
            dot[s, c] = product


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy")
def evolve(text: Array, at: Array, length: Array, moved: Array, moved_length: Array, share: float) -> None:
    """See `dpe.evolve`."""
    classes, dim = text.shape
    amount = text.dtype.type(share)
    for c in range(classes):
        row, over, square = text[c], 1 / moved_length[c], text.dtype.type(0)
        for d in range(dim):
            row[d] += amount * (moved[c, d] * over - row[d])
            square += row[d] * row[d]
        norm = math.sqrt(square)
        length[c] = norm
        for d in range(dim):
            at[c, d] = row[d] / norm
