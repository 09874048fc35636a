"""A bank: for every class, the K features of lowest cost so far, in tensors of fixed shape.

Rows are sorted by cost, lowest first; empty slots come last, with infinite cost and zero features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from testtime.ops import NEGLIGIBLE


class Bank(NamedTuple):
    keys: Tensor  # (C, K, D); an empty slot is zero
    cost: Tensor  # (C, K), ascending; inf marks an empty slot


def empty(like: Tensor, slots: int) -> Bank:
    """An empty bank for prototypes `like` (C, D)."""
    classes, dim = like.shape
    return Bank(like.new_zeros(classes, slots, dim), like.new_full((classes, slots), torch.inf))


def push(bank: Bank, label: Tensor, feature: Tensor, cost: Tensor, in_place: bool = False) -> Bank:
    """The bank after offering it one feature (D,) of cost () for class `label` ().

    The feature takes a free slot, or replaces the worst of the row if its cost is strictly lower; among equal costs
    the older comes first. The given bank does not change, unless `in_place` overwrites it.

    >>> bank = empty(torch.zeros(2, 3), slots=2)
    >>> for cost in (3.0, 1.0, 2.0, 9.0):
    ...     bank = push(bank, torch.tensor(1), torch.full((3,), cost), torch.tensor(cost))
    >>> bank.cost.tolist()
    [[inf, inf], [1.0, 2.0]]
    """
    slots = bank.cost.shape[1]
    cost = cost.masked_fill(cost.abs() < NEGLIGIBLE, 0)  # a tie, and not a denormal
    if slots == 0 or (cost.is_cpu and not cost < bank.cost[label, -1]):
        return bank  # on the CPU reading a number is free, and a rejected feature then copies nothing
    index = label.reshape(1)  # index by a vector: a scalar index would be read back from the GPU
    # the new feature comes last, so a stable sort puts it after its equals; then the last one drops out
    costs, order = torch.cat([bank.cost[index][0], cost.reshape(1)]).sort(stable=True)
    row = torch.cat([bank.keys[index][0], feature[None]])[order[:slots]]
    put = Tensor.index_copy_ if in_place else Tensor.index_copy
    return Bank(put(bank.keys, 0, index, row[None]), put(bank.cost, 0, index, costs[None, :slots]))


def filled(bank: Bank) -> Tensor:
    """Whether each class has at least one feature: (C,) bool."""
    if bank.cost.shape[1] == 0:
        return torch.zeros(len(bank.cost), dtype=torch.bool, device=bank.cost.device)
    return bank.cost[:, 0].isfinite()


def row_mean(bank: Bank, label: Tensor) -> Tensor:
    """The mean feature of one class, not normalised: (D,); zero if the class has none."""
    index = label.reshape(1)
    return bank.keys[index][0].sum(0) / bank.cost[index].isfinite().sum().clamp_min(1)


def prototypes(bank: Bank) -> Tensor:
    """Each class's mean feature, not normalised: (C, D); zero if a class has none."""
    count = bank.cost.isfinite().sum(1, keepdim=True).clamp_min(1)
    return bank.keys.sum(1) / count
