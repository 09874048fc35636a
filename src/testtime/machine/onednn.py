"""oneDNN's matrix product for a CPU.

In float32 torch's own are MKL's, which take twice as long on AMD's processors; in half precision they are oneDNN's too.
"""

from __future__ import annotations

from typing import Any

import torch


def gemm() -> Any:
    """`gemm(x, weight, bias, "none", [], "")` is x weight.T + bias, and `gemm.binary(x, sum, weight, bias, "add")`
    also adds a matrix; None where torch has no oneDNN."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
