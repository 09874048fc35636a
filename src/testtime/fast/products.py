"""Products of float32 on tensor cores that take half precision, and DPE with the products of its alignment so.

A number is the sum of two of half precision, but for 2**-21 of it. So a product of matrices is that of three
pairs of parts, the pair of small ones left out, which is one product of matrices three times as long; it is
summed in float32. Entries must be at most 65,504; those below 2**-14 lose digits, which is meant for rows of
length 1 and for chances. The plain twin is `torch.mm`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.dpe import DPE
from testtime.types import Task

FEWEST = 512  # classes from which it is worth the splitting
DIGITS = -(1 << 13)  # sign, exponent and the first 10 of the 23 digits of a float32
ALIGNED = 8  # what sides must be multiples of for tensor cores


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (M, K) and (K, N) -> (M, N) float32, to about 2**-20."""
    (a_large, a_small), (b_large, b_small) = _parts(a), _parts(b)
    return _wide(_joined((a_large, a_large, a_small), 1), _joined((b_large, b_small, b_large), 0))


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two of half precision that add up to x."""
    # The digits that half precision has are cut out by hand: a compiler may take a conversion there and back for
    # nothing, and the small part would be zero.
    large = (x.view(torch.int32) & DIGITS).view(torch.float32)
    return large.to(torch.float16), (x - large).to(torch.float16)


def _joined(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    """Parts one after another along `dim`, transposed in memory if they are."""
    if parts[0].is_contiguous():
        return torch.cat(parts, dim)
    return torch.cat([part.T for part in parts], 1 - dim).T


# an operator of its own: torch.compile leaves it alone, and so to cuBLAS
@torch.library.custom_op("testtime::wide_product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def _wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of half precision, summed and returned in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@_wide.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


@dataclass(frozen=True)
class SplitDPE(DPE):
    """DPE with the three products of its alignment in half-precision parts."""

    def _product(self) -> ops.Product:
        return product


def split(method: Any, task: Task) -> Any:
    """The method with products in parts, where it has such and they are large enough; else the method itself."""
    fits = (
        type(method) is DPE
        and bool(method.queue and method.align_weight and method.steps)
        and task.text.dtype == torch.float32
        and task.classes >= FEWEST
        and task.classes % ALIGNED == 0
        and task.dim % ALIGNED == 0
    )
    if not fits:
        return method
    return SplitDPE(**{field.name: getattr(method, field.name) for field in fields(method)})
