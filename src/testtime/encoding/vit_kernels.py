"""The two Triton kernels of `testtime.encoding.vit`: what a vision transformer computes between its GEMMs."""

# Triton parses the annotations of kernels itself, and accepts only its own
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, nn

LARGEST = tl.constexpr(448.0)  # largest float8_e4m3fn


@triton.jit
def _write(value, row, column, inside, width, out, scales, FLOAT8: tl.constexpr):
    """Write one row; with FLOAT8, divided by its own scale, so that its largest value becomes the largest float8."""
    if FLOAT8:
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
        tl.store(scales + row, scale)
        value = value / scale
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(
    x, offset, weight, bias, out, scales, stride, width, eps, WIDTH: tl.constexpr, FLOAT8: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(offset + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    value = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    _write(value, row, column, inside, width, out, scales, FLOAT8)


@triton.jit
def _activate(x, out, scales, width, QUICK: tl.constexpr, WIDTH: tl.constexpr, FLOAT8: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if QUICK:
        value = value / (1 + tl.exp(-1.702 * value))
    else:
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    _write(value, row, column, inside, width, out, scales, FLOAT8)


def normalise(x: Tensor, offset: Tensor, norm: nn.LayerNorm, out: Tensor, scales: Tensor | None = None) -> None:
    """LayerNorm of the rows of x (N, W) plus an offset (W,), summed in float32; with `scales`, out in 8 bits."""
    options = {"WIDTH": triton.next_power_of_2(x.shape[1]), "FLOAT8": scales is not None, "num_warps": 4}
    sizes = x.stride(0), x.shape[1], norm.eps
    _layer_norm[(len(x),)](x, offset, norm.weight, norm.bias, out, out if scales is None else scales, *sizes, **options)


def activate(x: Tensor, quick: bool, out: Tensor, scales: Tensor | None = None) -> None:
    """GELU of the rows of x (N, W); quick: x sigmoid(1.702 x), as OpenAI trained; with `scales`, out in 8 bits."""
    options = {"QUICK": quick, "WIDTH": triton.next_power_of_2(x.shape[1]), "FLOAT8": scales is not None}
    _activate[(len(x),)](x, out, out if scales is None else scales, x.shape[1], **options, num_warps=8)
