"""Products in half-precision parts are those of float32, and DPE with them answers the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import testtime as tt
from testtime import ops
from testtime.fast.products import SplitDPE, product, split
from testtime.methods.dpe import DPE
from testtime.types import Task


def rows(count: int, dim: int, seed: int) -> Tensor:
    return ops.unit(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("transposed", ["neither", "left", "right"])
def test_product_is_as_exact_as_float32(transposed: str) -> None:
    a, b = rows(96, 80, 0), rows(80, 64, 1)
    a = a.T.contiguous().T if transposed == "left" else a
    b = b.T.contiguous().T if transposed == "right" else b
    exact = a.double() @ b.double()
    assert (product(a, b) - exact).abs().max() < 4e-7
    assert (a.half().float() @ b.half().float() - exact).abs().max() > 1e-5  # what the parts are for


def test_product_goes_through_the_compiler_in_one_piece() -> None:
    a, b = rows(24, 16, 0), rows(16, 8, 1)
    compiled = torch.compile(product, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(a, b), a @ b, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"steps": 2}, {"align_both": True}])
def test_answers_are_those_of_plain_products(settings: dict) -> None:
    # classes near one another, so that the alignment has something to pull at
    classes, dim = 64, 32
    own, gap = rows(classes, dim, 0), rows(1, dim, 1)
    task = Task(ops.unit(1.5 * rows(1, dim, 2) + own), tuple(map(str, range(classes))))
    stream = torch.stack([ops.unit(1.5 * gap + own[n] + 0.5 * rows(8, dim, 9 + n)) for n in range(30)])
    plain, parts = DPE(**settings), SplitDPE(**settings)
    expected, reached = plain.scan(task, plain.init(task), stream)
    logits, state = parts.scan(task, parts.init(task), stream)
    assert 0 < (logits - expected).abs().max() < 1e-3
    assert (state.text - reached.text).abs().max() < 1e-5


def test_only_large_alignments_in_float32_are_split() -> None:
    def task(classes: int, dim: int = 16, dtype: torch.dtype = torch.float32) -> Task:
        return Task(rows(classes, dim, 0).to(dtype), tuple(map(str, range(classes))))

    method = DPE(alpha=3.0)
    chosen = split(method, task(512))
    assert isinstance(chosen, SplitDPE) and chosen.alpha == 3.0
    for other in (task(504), task(514), task(512, 12), task(512, dtype=torch.float64)):
        assert split(method, other) is method
    for without in (DPE(queue=0), DPE(align_weight=0.0), DPE(steps=0), tt.make_method("tda")):
        assert split(without, task(512)) is without
