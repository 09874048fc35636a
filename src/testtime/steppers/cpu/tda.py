"""TDA on the CPU without copies: caches are updated one row at a time and queried slot by slot.

Optimisations over `methods.tda`, which reads like the paper:

- a cache that accepts an image changes one row, in place;
- the classes that a negative item lowers are listed when it is added. Each has a probability above `neg_mask_lower`, so
  there are few of them, and a query does not read C numbers for each of the C x M items;
- empty slots are skipped.

Image features use the same operations as there, once for all settings, so states are the same bit for bit.
S settings side by side, C classes, M slots, D features, L classes in a list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.methods.tda import TDA, State
from testtime.steppers.cpu import loops
from testtime.steppers.cpu.loops import Array, ByImage, Real, cast, compiled, dot, filled, push, to_array, to_tensor
from testtime.types import Task


class Negative(NamedTuple):
    """The negative cache: what images are not."""

    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    probs: Array  # (C, M, C)
    possible: Array  # (C, M, L) the classes that an item lowers
    lengths: Array  # (C, M) how many there are


class Stepper(ByImage):
    """S runs of TDA over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[TDA], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        real = task.text.numpy().dtype.type
        pairs = ("pos_alpha", "pos_beta"), ("neg_alpha", "neg_beta"), ("neg_mask_lower", "neg_mask_upper")
        self.numbers = [[[cast(getattr(method, name), real) for name in pair] for pair in pairs] for method in methods]
        self.restore(states)

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, list[bool]]:
        task = self.task
        # 1. the image as the mean of its confident views
        feature, view_logits = ops.confident_mean(views, task.zero_shot(views), self.methods[0].selection)
        frozen = task.zero_shot(feature)
        prob = view_logits.softmax(1).mean(0)
        label, entropy = int(frozen.argmax()), torch.special.entr(prob).sum()
        normalised = entropy / math.log2(task.classes)
        moderate = [(m.neg_entropy_lower < normalised) & (normalised < m.neg_entropy_upper) for m in self.methods]
        prices = [torch.where(each, entropy, torch.inf).numpy()[()] for each in moderate]  # infinite: never accepted
        logits = frozen.repeat(len(self.methods), 1)
        offer = label, feature.numpy()

        # caches change from here on, and nothing can fail midway
        learned = []
        for s, row in enumerate(logits.numpy()):
            changing = (*self.positive[s], *self.negative[s]) if peeking else ()
            with loops.rows_restored(changing, label):
                # 2. offer it to its class's positive cache, and if it is moderately uncertain to the negative one
                raising, lowering, bounds = self.numbers[s]
                taken = push(*self.positive[s], *offer, entropy.numpy()[()]) >= 0
                learned.append(push_negative(self.negative[s], *offer, prices[s], prob.numpy(), *bounds) or taken)
                # 3. zero-shot logits, raised by the positive cache and lowered by the negative one
                add(*self.positive[s], offer[1], *raising, row)
                subtract(self.negative[s], offer[1], *lowering, row)
        return logits, learned

    def snapshot(self) -> list[State]:
        return [
            State(Bank(*map(to_tensor, positive)), Bank(*map(to_tensor, negative[:2])), to_tensor(negative.probs))
            for positive, negative in zip(self.positive, self.negative, strict=True)
        ]

    def restore(self, states: Sequence[State]) -> None:
        self.positive = [[*map(to_array, state.positive)] for state in states]  # keys (C, M, D), cost (C, M)
        self.negative = [_negative(state, *bounds) for state, (*_, bounds) in zip(states, self.numbers, strict=True)]


def _negative(state: State, lower: Real, upper: Real) -> Negative:
    """A negative cache with the lists of classes that its items lower."""
    probs = to_array(state.negative_prob)
    classes, slots, _ = probs.shape
    lengths = ((lower < probs) & (probs < upper)).sum(2)
    # at most 1 / lower classes can be above `lower`, up to the rounding of their sum
    longest = min(classes, int(1.01 / lower) + 1) if lower > 0 else classes
    possible = np.zeros((classes, slots, lengths.max(initial=longest)), np.int32)  # a saved state may contain anything
    for item in np.ndindex(classes, slots):
        list_possible(probs[item], lower, upper, possible[item])
    keys, cost = map(to_array, state.negative)
    return Negative(keys, cost, probs, possible, lengths)


@compiled
def list_possible(prob: Array, lower: float, upper: float, possible: Array) -> int:
    """Fill `possible` (L,) with the classes whose probability (C,) lies between the bounds; returns their number."""
    count = 0
    for c in range(len(prob)):
        if lower < prob[c] and prob[c] < upper:
            possible[count] = c
            count += 1
    return count


@compiled
def push_negative(
    cache: Negative, label: int, feature: Array, price: float, prob: Array, lower: float, upper: float
) -> bool:
    """`push` for a negative cache, whose items also store probabilities (C,) and the classes between the bounds."""
    slot = push(cache.keys, cache.cost, label, feature, price)
    if slot >= 0:
        loops.shift_from(cache.probs[label], slot)
        loops.shift_from(cache.possible[label], slot)
        loops.shift_from(cache.lengths[label], slot)
        cache.probs[label, slot] = prob
        cache.lengths[label, slot] = list_possible(prob, lower, upper, cache.possible[label, slot])
    return slot >= 0


@compiled
def add(keys: Array, cost: Array, feature: Array, alpha: float, beta: float, logits: Array) -> None:
    """Raise the logit (C,) of each class by its items' affinity to the feature (D,)."""
    one = feature.dtype.type(1)
    for c in range(len(cost)):
        for m in range(filled(cost[c])):
            logits[c] += alpha * math.exp(beta * (dot(keys[c, m], feature) - one))


@compiled
def subtract(cache: Negative, feature: Array, alpha: float, beta: float, logits: Array) -> None:
    """Lower the logits (C,) of the classes that each item considers possible, by its affinity to the feature (D,)."""
    keys, cost, possible, lengths = cache.keys, cache.cost, cache.possible, cache.lengths
    one = feature.dtype.type(1)
    for c in range(len(cost)):
        for m in range(filled(cost[c])):
            weight = alpha * math.exp(beta * (dot(keys[c, m], feature) - one))
            for k in range(lengths[c, m]):
                logits[possible[c, m, k]] -= weight
