"""The order of a stream."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.types import InputError


def shuffled(count: int, seed: int) -> Tensor:
    """The indices 0 to count - 1 in an order that depends on the seed alone: (count,)."""
    if not 0 <= seed < 2**64:
        raise InputError(f"Seed {seed}: must be from 0 to 2**64 - 1.")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
