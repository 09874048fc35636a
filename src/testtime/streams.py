"""Orders of a stream."""

from __future__ import annotations

import torch
from torch import Tensor


def shuffled(count: int, seed: int) -> Tensor:
    """The places 0 to count - 1 in an order that depends on the seed alone: (count,)."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
