"""Loops over rows as SIMD instructions, with a fixed order of summation.

A compiler vectorises a sum only if it may reorder it (`fastmath`), and then copies of one function, compiled in
different callers, differ in the last bit. So the order is written out here: `ACCUMULATORS` vectors of partial sums side
by side, then the sum of these, then the remaining elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing import Context, Signature

ACCUMULATORS = 4  # vectors of partial sums side by side, enough to hide the latency of an addition


def _binary(name: str) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda one, other: Lanes(one.builder, getattr(one.builder, name)(one.value, other.value))


class Lanes:
    """A scalar or vector in a loop under construction: every operation on it emits an instruction."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    __add__, __sub__, __mul__, __truediv__ = map(_binary, ("fadd", "fsub", "fmul", "fdiv"))

    def __abs__(self) -> Lanes:
        return self._call("fabs")

    def fma(self, by: Lanes, plus: Lanes) -> Lanes:
        """self * by + plus, rounded once."""
        return self._call("fma", by, plus)

    def double(self) -> Lanes:
        """In double precision."""
        kind = _vector_type(ir.DoubleType(), getattr(self.value.type, "count", 1))
        return self if kind == self.value.type else Lanes(self.builder, self.builder.fpext(self.value, kind))

    def _call(self, name: str, *others: Lanes) -> Lanes:
        kind, values = self.value.type, [self.value, *(other.value for other in others)]
        count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        bits = 32 if ir.FloatType() in (kind, getattr(kind, "element", kind)) else 64
        signature = ir.FunctionType(kind, [kind] * len(values))
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.{name}.{count}f{bits}")
        return Lanes(self.builder, self.builder.call(function, values))


Build: TypeAlias = "Callable[[BaseContext, ir.IRBuilder, Signature, Sequence[ir.Value]], ir.Value]"
Emitted: TypeAlias = tuple[Lanes | None, Sequence[Lanes]]  # what the last row holds, and the sums
Body: TypeAlias = Callable[[Sequence[Lanes], Sequence[Lanes], Sequence[Lanes]], Emitted]


def row_loop(sums: int, double: bool = False) -> Callable[[Body], Callable[..., Any]]:
    """Turn the body of a loop into a function for compiled code, `(addresses, count, numbers) -> sums`.

    The body is `body(rows, numbers, sums)`, all of them lanes: the rows' elements at one index, the numbers, and the
    sums so far. It returns what to store in the last row, or None, and the updated sums. Sums are in `double`, or in
    the precision of the numbers.
    """

    def decorate(body: Body) -> Callable[..., Any]:
        @intrinsic
        def loop(
            typingctx: Context, addresses: types.Type, count: types.Type, numbers: types.Type
        ) -> tuple[Signature, Build]:
            result = types.float64 if double else numbers.dtype

            def build(
                context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
            ) -> ir.Value:
                real, kind = context.get_value_type(numbers.dtype), context.get_value_type(result)
                addresses, numbers_given = (cgutils.unpack_tuple(builder, arguments[index]) for index in (0, 2))
                starts = [builder.inttoptr(address, real.as_pointer()) for address in addresses]

                def emit(index: ir.Value, width: int, slots: Sequence[ir.Value]) -> None:
                    """Emit the body for the lanes at an index, with its sums in these stack slots."""
                    pointer = _vector_type(real, width).as_pointer()
                    rows = [builder.bitcast(builder.gep(start, [index]), pointer) for start in starts]
                    stored, after = body(
                        [Lanes(builder, builder.load(row, align=4)) for row in rows],
                        [Lanes(builder, _broadcast(builder, value, width)) for value in numbers_given],
                        [Lanes(builder, builder.load(slot)) for slot in slots],
                    )
                    if stored is not None:
                        builder.store(stored.value, rows[-1], align=4)
                    for slot, lanes in zip(slots, after, strict=True):
                        builder.store(lanes.value, slot)

                length, width = arguments[1], 8 if kind == ir.FloatType() else 4
                zero = ir.Constant(_vector_type(kind, width), [0.0] * width)
                accumulators = [
                    [cgutils.alloca_once_value(builder, zero) for _ in range(sums)] for _ in range(ACCUMULATORS)
                ]
                block = ir.Constant(length.type, ACCUMULATORS * width)
                blocks = builder.sdiv(length, block)
                with cgutils.for_range(builder, blocks) as each:
                    base = builder.mul(each.index, block)
                    for number, slots in enumerate(accumulators):
                        emit(builder.add(base, ir.Constant(length.type, number * width)), width, slots)
                summed = (
                    _horizontal_sum(builder, [*map(builder.load, slots)]) for slots in zip(*accumulators, strict=True)
                )
                totals = [cgutils.alloca_once_value(builder, total) for total in summed]
                rest = cgutils.for_range_slice(builder, builder.mul(blocks, block), length, ir.Constant(length.type, 1))
                with rest as (index, _):
                    emit(index, 1, totals)
                return context.make_tuple(builder, signature.return_type, [*map(builder.load, totals)])

            return types.UniTuple(result, sums)(addresses, count, numbers), build

        return loop

    return decorate


@intrinsic
def fma(typingctx: Context, a: types.Type, b: types.Type, c: types.Type) -> tuple[Signature, Build]:
    """a * b + c, rounded once."""

    def build(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        return builder.fma(*arguments)

    return a(a, a, a), build


def _vector_type(real: ir.Type, count: int) -> ir.Type:
    """The type of a vector of `count` numbers, or of one."""
    return ir.VectorType(real, count) if count > 1 else real


def _lane_indices(*lanes: int) -> ir.Constant:
    """Lane indices for a shuffle."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def _broadcast(builder: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """A number broadcast to `count` lanes."""
    if count == 1:
        return value
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, ir.IntType(32)(0)), undefined, _lane_indices(*[0] * count)
    )


def _horizontal_sum(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sum of all lanes of vectors: pairs of vectors, then halves of the remaining one."""
    while len(vectors) > 1:
        vectors = [builder.fadd(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    (total,), half = vectors, vectors[0].type.count // 2
    while half:
        low, high = (_lane_indices(*range(start, start + half)) for start in (0, half))
        total = builder.fadd(builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high))
        half //= 2
    return builder.extract_element(total, ir.IntType(32)(0))
