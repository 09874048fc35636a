"""The two kernels of `testtime.encoding.vit`, in Triton: what lies between the products of a vision transformer."""

# Triton reads the annotations of kernels itself, and knows but its own
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_norm(x, offset, weight, bias, out, stride, width, eps, WIDTH: tl.constexpr):
    """LayerNorm of one row of x (N, width) plus an offset (width,), summed in float32; rows of x lie `stride` apart."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(offset + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / width
    apart = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / width + eps)
    value = apart * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, count, QUICK: tl.constexpr, BLOCK: tl.constexpr):
    """GELU of every number of x, in place; QUICK: x sigmoid(1.702 x), as OpenAI trained."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if QUICK:
        value = value / (1 + tl.exp(-1.702 * value))
    else:
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    tl.store(x + place, value.to(x.dtype.element_ty), mask=inside)
