"""Matrix products for compiled loops, on the calling thread and with a fixed order of summation.

A number of a product is summed in the same order in whichever tile it is computed. So results depend neither on how
matrices lie in memory nor on how their rows are split over threads, as they may with a library's GEMM. Rows are read
where they are, without being packed first: for matrices of prototypes that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from testtime.steppers.cpu.lanes import VECTOR, WIDE, Build, Emitted, Lanes, broadcast, row_loop, vector_type
from testtime.steppers.cpu.loops import Array, compiled, row_at

ROWS, COLUMNS = 4, 4 if WIDE else 3  # of a tile, whose sums are in registers: as many as there are beside the operands
ROWS_IN_CACHE = 120  # of the second factor of `dot_rows`


@compiled
def _four(rows: Array, first: int) -> tuple[np.intp, np.intp, np.intp, np.intp]:
    """The addresses of four rows of a matrix; after the last it is repeated, for the same result again."""
    last = len(rows) - 1
    second, third, fourth = min(first + 1, last), min(first + 2, last), min(first + 3, last)
    return row_at(rows, first), row_at(rows, second), row_at(rows, third), row_at(rows, fourth)


@row_loop(sums=ROWS * COLUMNS, accumulators=1)
def _dots(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """Dot products of each of the first ROWS rows with each of the others."""
    pairs = [(row, column) for row in rows[:ROWS] for column in rows[ROWS:]]
    return None, [row.fma(column, total) for (row, column), total in zip(pairs, sums, strict=True)]


@compiled
def dot_rows(a: Array, b: Array, out: Array) -> None:
    """out = a @ b.T for contiguous rows, (M, K) and (N, K) -> (M, N); `out` may have more columns."""
    zero = out.dtype.type(0)
    for first in range(0, len(b), ROWS_IN_CACHE):
        for i in range(0, len(a), ROWS):
            rows = _four(a, i)
            for j in range(first, min(first + ROWS_IN_CACHE, len(b)), COLUMNS):
                sums = _dots(rows + _four(b, j)[:COLUMNS], a.shape[1], (zero,))
                for r in range(ROWS):
                    for c in range(COLUMNS):
                        out[min(i + r, len(a) - 1), min(j + c, len(b) - 1)] = sums[r * COLUMNS + c]


@intrinsic
def _fill_tile(
    typingctx: Any, weights: Any, step: Any, column: Any, stride: Any, count: Any, outs: Any, zero: Any
) -> tuple[Any, Build]:
    """Fill COLUMNS vectors of four rows of a product.

    Arguments are addresses and distances in bytes: of four rows of weights, from a weight to the next, of the first row
    at the tile's first column, from a row to the next, how many there are, and of the result at that column.
    """

    def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        weights, step, column, stride, count, outs, zero = arguments
        lanes = VECTOR // (signature.args[-1].bitwidth // 8)

        def at(address: ir.Value, index: int, of: ir.Type) -> ir.Value:
            return builder.gep(builder.inttoptr(address, of.as_pointer()), [ir.IntType(32)(index)])

        start, kind = broadcast(builder, zero, lanes), vector_type(zero.type, lanes)
        sums = [[cgutils.alloca_once_value(builder, start) for _ in range(COLUMNS)] for _ in range(ROWS)]
        with cgutils.for_range(builder, count) as loop:
            row = builder.add(column, builder.mul(loop.index, stride))
            values = [Lanes(builder, builder.load(at(row, v, kind), align=4)) for v in range(COLUMNS)]
            for address, slots in zip(cgutils.unpack_tuple(builder, weights), sums, strict=True):
                weight = builder.load(at(builder.add(address, builder.mul(loop.index, step)), 0, zero.type))
                by = Lanes(builder, broadcast(builder, weight, lanes))
                for slot, value in zip(slots, values, strict=True):
                    builder.store(by.fma(value, Lanes(builder, builder.load(slot))).value, slot)
        for address, slots in zip(cgutils.unpack_tuple(builder, outs), sums, strict=True):
            for v, slot in enumerate(slots):
                builder.store(builder.load(slot), at(address, v, kind), align=4)
        return context.get_dummy_value()

    return types.void(weights, step, column, stride, count, outs, zero), build


@compiled
def combine_rows(weights: Array, rows: Array, out: Array) -> None:
    """out = weights @ rows for contiguous rows, (M, K) and (K, N) -> (M, N); weights may be transposed."""
    zero, size, columns, width = out.dtype.type(0), out.itemsize, out.shape[1], COLUMNS * VECTOR // out.itemsize
    if columns < width:  # of a tile
        for i in range(len(out)):
            out[i] = 0
            for k in range(len(rows)):
                for j in range(columns):
                    out[i, j] += weights[i, k] * rows[k, j]
        return
    for j in range(0, columns, width):
        offset = min(j, columns - width) * size  # the last tile overlaps with the one before
        first = row_at(rows, 0) + offset
        for i in range(0, len(out), ROWS):
            a, b, c, d = _four(out, i)
            outs = a + offset, b + offset, c + offset, d + offset
            _fill_tile(_four(weights, i), weights.strides[1], first, rows.strides[0], len(rows), outs, zero)
