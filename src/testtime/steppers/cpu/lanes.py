"""Loops over rows as SIMD instructions, with a fixed order of summation.

A compiler vectorises a sum only if it may reorder it (`fastmath`), and then copies of one function, compiled in
different callers, differ in the last bit. So the order is written out here: several vectors of partial sums side by
side, then the remaining whole vectors, then the sum of all lanes, then the remaining elements one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDE = bool(binding.get_host_cpu_features().get("avx512f"))  # vectors twice as long, and twice as many registers
VECTOR = 64 if WIDE else 32  # bytes
ACCUMULATORS = 2 if WIDE else 4  # vectors of partial sums side by side, enough to hide the latency of an addition
LOWEST = -1e30  # stands for minus infinity

# ln 2 in two parts, the first with so few bits that an integer times it is exact
LN2 = {32: (0.693359375, -2.12194440054690583e-4), 64: (0.693145751953125, 1.42860682030941723212e-6)}
MANTISSA_BITS = {32: 23, 64: 52}


def _binary(name: str) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda one, other: Lanes(one.builder, getattr(one.builder, name)(one.value, other.value))


class Lanes:
    """A scalar or vector in a loop under construction: every operation on it emits an instruction."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value
        self.count = getattr(value.type, "count", 1)
        self.size = 32 if getattr(value.type, "element", value.type) == ir.FloatType() else 64  # bits of a lane

    __add__, __sub__, __mul__, __truediv__ = map(_binary, ("fadd", "fsub", "fmul", "fdiv"))

    def __abs__(self) -> Lanes:
        return self._call("fabs")

    def fma(self, by: Lanes, plus: Lanes) -> Lanes:
        """self * by + plus, rounded once."""
        return self._call("fma", by, plus)

    def max(self, other: Lanes) -> Lanes:
        """The larger of two numbers; undefined for NaN."""
        return self._where(">", other, self, other)

    def double(self) -> Lanes:
        """In double precision."""
        kind = vector_type(ir.DoubleType(), self.count)
        return self if self.size == 64 else Lanes(self.builder, self.builder.fpext(self.value, kind))

    def exp(self) -> Lanes:
        """e to the power of x <= 80, to the last two digits; 0 where that is far below rounding error next to 1.

        numba's own is scalar. And denormals, which results below rounding error can be, would slow down products
        thirty times.
        """
        # 2**n times a polynomial in the remainder
        terms, lowest = (7, -64.0) if self.size == 32 else (13, -600.0)
        n = self.fma(self._number(1 / math.log(2)), self._number(0.5))._call("floor")
        high, low = (self._number(-part) for part in LN2[self.size])
        rest, total = n.fma(low, n.fma(high, self)), self._number(1 / math.factorial(terms))
        for k in range(terms - 1, -1, -1):
            total = total.fma(rest, self._number(1 / math.factorial(k)))
        one, builder = self._number(1.0)._bits(), self.builder
        shifted = builder.shl(builder.fptosi(n.value, one.type), self._integer(MANTISSA_BITS[self.size]))
        power = total * self._from_bits(builder.add(shifted, one))
        least = self._number(lowest)
        return self._where(">", least, power, self._where("<=", least, self._number(0.0), self))  # NaN stays NaN

    def log(self) -> Lanes:
        """The natural logarithm, to the last two digits; finite for 0 and denormals."""
        # x = m 2**n with m between the roots of 1/2 and 2; log m = 2 atanh s with s = (m - 1) / (m + 1)
        bits, builder, one = self._bits(), self.builder, self._number(1.0)
        middle, mantissa = self._number(math.sqrt(0.5))._bits(), self._integer(MANTISSA_BITS[self.size])
        exponent = builder.ashr(builder.sub(bits, middle), mantissa)
        m = self._from_bits(builder.sub(bits, builder.shl(exponent, mantissa)))
        n, s = Lanes(builder, builder.sitofp(exponent, self.value.type)), (m - one) / (m + one)
        first, square = (11 if self.size == 32 else 23), s * s
        total = self._number(2 / first)
        for k in range(first - 2, 0, -2):
            total = total.fma(square, self._number(2 / k))
        high, low = map(self._number, LN2[self.size])
        return n.fma(high, n.fma(low, total * s))

    def _call(self, name: str, *others: Lanes) -> Lanes:
        kind, values = self.value.type, [self.value, *(other.value for other in others)]
        count = f"v{self.count}" if self.count > 1 else ""
        signature = ir.FunctionType(kind, [kind] * len(values))
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.{name}.{count}f{self.size}")
        return Lanes(self.builder, self.builder.call(function, values))

    def _where(self, comparison: str, than: Lanes, yes: Lanes, no: Lanes) -> Lanes:
        """`yes` where self compares so with another, else `no`."""
        holds = self.builder.fcmp_ordered(comparison, self.value, than.value)
        return Lanes(self.builder, self.builder.select(holds, yes.value, no.value))

    def _number(self, number: float) -> Lanes:
        """A number of this type in every lane."""
        rounded = float(np.float32(number)) if self.size == 32 else number
        return Lanes(self.builder, _constant(self.value.type, rounded))

    def _integer(self, number: int) -> ir.Constant:
        """An integer of this size in every lane."""
        return _constant(vector_type(ir.IntType(self.size), self.count), number)

    def _bits(self) -> ir.Value:
        """The bits of the numbers, as integers."""
        return self.builder.bitcast(self.value, self._integer(0).type)

    def _from_bits(self, bits: ir.Value) -> Lanes:
        """The numbers of this type with these bits."""
        return Lanes(self.builder, self.builder.bitcast(bits, self.value.type))


Build: TypeAlias = Callable[[Any, ir.IRBuilder, Any, Sequence[ir.Value]], ir.Value]  # what an intrinsic emits
Emitted: TypeAlias = tuple[Lanes | None, Sequence[Lanes]]  # what the last row holds, and the sums
Body: TypeAlias = Callable[[Sequence[Lanes], Sequence[Lanes], Sequence[Lanes]], Emitted]


def _of_one_number(operation: Callable[[Lanes], Lanes]) -> Callable[..., Any]:
    """An operation on lanes as a function of one number, for compiled code."""

    @intrinsic
    def function(typingctx: Any, x: Any) -> tuple[Any, Build]:
        def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
            return operation(Lanes(builder, arguments[0])).value

        return x(x), build

    return function


exp, log = _of_one_number(Lanes.exp), _of_one_number(Lanes.log)


def row_loop(
    sums: int,
    double: bool = False,
    accumulators: int = ACCUMULATORS,
    start: float = 0.0,
    combine: Callable[[Lanes, Lanes], Lanes] = Lanes.__add__,
) -> Callable[[Body], Callable[..., Any]]:
    """Turn the body of a loop into a function for compiled code, `(addresses, count, numbers) -> sums`.

    The body is `body(rows, numbers, sums)`, all of them lanes: the rows' elements at one index, the numbers, and the
    sums so far. It returns what to store in the last row, or None, and the updated sums. Sums are in `double`, or in
    the precision of the numbers; a sum has several accumulators, which begin at `start` and which `combine` merges.
    """

    def decorate(body: Body) -> Callable[..., Any]:
        @intrinsic
        def loop(typingctx: Any, addresses: Any, count: Any, numbers: Any) -> tuple[Any, Build]:
            result = types.float64 if double else numbers.dtype

            def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
                real, kind = context.get_value_type(numbers.dtype), context.get_value_type(result)
                addresses, numbers_given = (cgutils.unpack_tuple(builder, arguments[index]) for index in (0, 2))
                starts = [builder.inttoptr(address, real.as_pointer()) for address in addresses]

                def emit(index: ir.Value, width: int, slots: Sequence[ir.Value]) -> None:
                    """Emit the body for the lanes at an index, with its sums in these stack slots."""
                    pointer = vector_type(real, width).as_pointer()
                    rows = [builder.bitcast(builder.gep(start, [index]), pointer) for start in starts]
                    stored, after = body(
                        [Lanes(builder, builder.load(row, align=4)) for row in rows],
                        [Lanes(builder, broadcast(builder, value, width)) for value in numbers_given],
                        [Lanes(builder, builder.load(slot)) for slot in slots],
                    )
                    if stored is not None:
                        builder.store(stored.value, rows[-1], align=4)
                    for slot, lanes in zip(slots, after, strict=True):
                        builder.store(lanes.value, slot)

                length, width = arguments[1], VECTOR // (numbers.dtype.bitwidth // 8)
                first, done = _constant(vector_type(kind, width), start), ir.Constant(length.type, 0)
                slots = [cgutils.alloca_once_value(builder, first) for _ in range(accumulators * sums)]
                partial = [slots[k * sums : (k + 1) * sums] for k in range(accumulators)]
                for together in (partial, partial[:1]):  # all accumulators, then one for the remaining vectors
                    block = ir.Constant(length.type, len(together) * width)
                    stop = builder.mul(builder.sdiv(length, block), block)
                    with cgutils.for_range_slice(builder, done, stop, block) as (index, _):
                        for number, slots in enumerate(together):
                            emit(builder.add(index, ir.Constant(length.type, number * width)), width, slots)
                    done = stop
                merged = [Lanes(builder, builder.load(slot)) for slot in partial[0]]
                for slots in partial[1:]:
                    pairs = zip(merged, slots, strict=True)
                    merged = [combine(one, Lanes(builder, builder.load(slot))) for one, slot in pairs]
                across = _across_lanes(merged, combine) if merged else []
                totals = [cgutils.alloca_once_value(builder, total) for total in across]
                with cgutils.for_range_slice(builder, done, length, ir.Constant(length.type, 1)) as (index, _):
                    emit(index, 1, totals)
                return context.make_tuple(builder, signature.return_type, [*map(builder.load, totals)])

            return types.UniTuple(result, sums)(addresses, count, numbers), build

        return loop

    return decorate


def vector_type(kind: ir.Type, count: int) -> ir.Type:
    """The type of a vector of `count` numbers, or of one."""
    return ir.VectorType(kind, count) if count > 1 else kind


def _constant(kind: ir.Type, number: float) -> ir.Constant:
    """A number in every lane of a type."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def broadcast(builder: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """A number broadcast to `count` lanes."""
    if count == 1:
        return value
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return _shuffled(builder, builder.insert_element(undefined, value, ir.IntType(32)(0)), undefined, [0] * count)


def _shuffled(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Some lanes of two vectors; those of the second are numbered after those of the first."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _across_lanes(vectors: Sequence[Lanes], combine: Callable[[Lanes, Lanes], Lanes]) -> list[ir.Value]:
    """The lanes of each vector combined into one number: halves with halves, of two vectors at a time."""
    builder, parts, length = vectors[0].builder, vectors, vectors[0].count
    while length > 1:  # how many lanes of a vector are left; a part holds those of several, one after another
        half, alone = length // 2, len(parts) == 1
        pairs = [(parts[k], parts[min(k + 1, len(parts) - 1)]) for k in range(0, len(parts), 2)]  # may repeat the last
        parts = []
        for one, other in pairs:
            starts = range(0, one.count if alone else 2 * one.count, length)
            halves = ([start + offset + lane for start in starts for lane in range(half)] for offset in (0, half))
            lower, upper = (Lanes(builder, _shuffled(builder, one.value, other.value, lanes)) for lanes in halves)
            parts.append(combine(lower, upper))
        length = half
    values = [builder.extract_element(part.value, ir.IntType(32)(k)) for part in parts for k in range(part.count)]
    return values[: len(vectors)]
