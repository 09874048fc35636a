"""Loops over rows as vector instructions, with sums in a stated order.

A compiler makes vector instructions of a sum only where it may take it in its own order (`fastmath`), and then copies
of one function, compiled in different callers, differ in the last bit. So here they are written out: `SUMS` vectors of
sums side by side, then these, then what is left over, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

SUMS = 4  # vectors of sums side by side, as many as hide what an addition takes


def _binary(name: str) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda one, other: Lanes(one.builder, getattr(one.builder, name)(one.value, other.value))


class Lanes:
    """A number, or a vector of them, in a loop that is being built: what is done to it becomes an instruction."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    __add__, __sub__, __mul__, __truediv__ = map(_binary, ("fadd", "fsub", "fmul", "fdiv"))

    def __abs__(self) -> Lanes:
        return self._call("fabs")

    def fma(self, by: Lanes, plus: Lanes) -> Lanes:
        """self * by + plus, rounded once."""
        return self._call("fma", by, plus)

    def double(self) -> Lanes:
        """In double precision."""
        kind = _lanes(ir.DoubleType(), getattr(self.value.type, "count", 1))
        return self if kind == self.value.type else Lanes(self.builder, self.builder.fpext(self.value, kind))

    def _call(self, name: str, *others: Lanes) -> Lanes:
        kind, values = self.value.type, [self.value, *(other.value for other in others)]
        count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        digits = 32 if ir.FloatType() in (kind, getattr(kind, "element", kind)) else 64
        fast = ir.FunctionType(kind, [kind] * len(values))
        function = cgutils.get_or_insert_function(self.builder.module, fast, f"llvm.{name}.{count}f{digits}")
        return Lanes(self.builder, self.builder.call(function, values))


def row_loop(sums: int, double: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled loops, `(addresses, count, numbers) -> sums`, of what it does at one place.

    That is `body(rows, numbers, sums)`, all of them lanes: what the rows hold there, the numbers, and the sums so far.
    It returns what the last row shall hold, or None, and these sums with more added. Sums are in `double`, or in the
    precision of the numbers.
    """

    def made(body: Callable[..., Any]) -> Any:
        @intrinsic
        def loop(typingctx: Any, addresses: Any, count: Any, numbers: Any) -> Any:
            result = types.float64 if double else numbers.dtype

            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                real, kind = context.get_value_type(numbers.dtype), context.get_value_type(result)
                addresses, numbers_given = (cgutils.unpack_tuple(builder, arguments[place]) for place in (0, 2))
                starts = [builder.inttoptr(address, real.as_pointer()) for address in addresses]

                def at(index: Any, width: int, places: list[Any]) -> None:
                    """Do what is done to the lanes at an index, and to sums that lie at some places."""
                    pointer = _lanes(real, width).as_pointer()
                    rows = [builder.bitcast(builder.gep(start, [index]), pointer) for start in starts]
                    stored, after = body(
                        [Lanes(builder, builder.load(row, align=4)) for row in rows],
                        [Lanes(builder, _repeated(builder, value, width)) for value in numbers_given],
                        [Lanes(builder, builder.load(place)) for place in places],
                    )
                    if stored is not None:
                        builder.store(stored.value, rows[-1], align=4)
                    for place, lanes in zip(places, after, strict=True):
                        builder.store(lanes.value, place)

                length, width = arguments[1], 8 if kind == ir.FloatType() else 4
                zero = ir.Constant(_lanes(kind, width), [0.0] * width)
                places = [[cgutils.alloca_once_value(builder, zero) for _ in range(sums)] for _ in range(SUMS)]
                block = ir.Constant(length.type, SUMS * width)
                blocks = builder.sdiv(length, block)
                with cgutils.for_range(builder, blocks) as each:
                    base = builder.mul(each.index, block)
                    for side, some in enumerate(places):
                        at(builder.add(base, ir.Constant(length.type, side * width)), width, some)
                folded = (_folded(builder, [*map(builder.load, some)]) for some in zip(*places, strict=True))
                totals = [cgutils.alloca_once_value(builder, total) for total in folded]
                rest = cgutils.for_range_slice(builder, builder.mul(blocks, block), length, ir.Constant(length.type, 1))
                with rest as (index, _):
                    at(index, 1, totals)
                return context.make_tuple(builder, signature.return_type, [*map(builder.load, totals)])

            return types.UniTuple(result, sums)(addresses, count, numbers), build

        return loop

    return made


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, a, a), build


def _lanes(real: Any, count: int) -> Any:
    """The type of `count` numbers side by side."""
    return ir.VectorType(real, count) if count > 1 else real


def _places(*lanes: int) -> ir.Constant:
    """Numbers of lanes."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def _repeated(builder: Any, value: Any, count: int) -> Any:
    """A number in every one of `count` lanes."""
    if count == 1:
        return value
    none = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(none, value, ir.IntType(32)(0)), none, _places(*[0] * count))


def _folded(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all lanes of vectors: of every two of them, then of each half of what is left and the other."""
    while len(vectors) > 1:
        vectors = [builder.fadd(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    (whole,), half = vectors, vectors[0].type.count // 2
    while half:
        low, high = (_places(*range(start, start + half)) for start in (0, half))
        whole = builder.fadd(builder.shuffle_vector(whole, whole, low), builder.shuffle_vector(whole, whole, high))
        half //= 2
    return builder.extract_element(whole, ir.IntType(32)(0))
