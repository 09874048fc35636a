"""TDA on the CPU without copies: caches are updated one row at a time and queried slot by slot.

Optimisations over `methods.tda`, which reads like the paper:

- a cache that accepts an image changes one row, in slot;
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
from testtime.steppers.cpu.loops import (
    Array,
    ByImage,
    Real,
    cast,
    compiled,
    dot,
    filled,
    flush_negligible,
    insertion_slot,
    push,
    rows_restored,
    shift_from,
    to_array,
    to_tensor,
)
from testtime.types import Task


class Positive(NamedTuple):
    """The positive cache: what images are."""

    keys: Array  # (C, M, D)
    cost: Array  # (C, M)


class Negative(NamedTuple):
    """The negative cache: what images are not."""

    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    probs: Array  # (C, M, C)
    possible: Array  # (C, M, L) the classes that an item lowers
    lengths: Array  # (C, M) how many there are


class Numbers(NamedTuple):
    """A method's settings in the task's precision."""

    pos_alpha: Real
    pos_beta: Real
    neg_alpha: Real
    neg_beta: Real
    neg_mask_lower: Real
    neg_mask_upper: Real


class Stepper(ByImage):
    """S runs of TDA over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[TDA], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        real = task.text.numpy().dtype.type
        self.numbers = [Numbers(*(cast(getattr(method, name), real) for name in Numbers._fields)) for method in methods]
        self.restore(states)

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, list[bool]]:
        task = self.task
        # 1. the image as the mean of its confident views
        feature, view_logits = ops.confident_mean(views, task.zero_shot(views), self.methods[0].selection)
        frozen = task.zero_shot(feature)
        prob = view_logits.softmax(1).mean(0)
        label, entropy = int(frozen.argmax()), torch.special.entr(prob).sum()
        normalised = entropy / math.log2(task.classes)
        moderate = [bool((m.neg_entropy_lower < normalised) & (normalised < m.neg_entropy_upper)) for m in self.methods]
        logits = frozen.repeat(len(self.methods), 1)
        offer = label, feature.numpy(), entropy.numpy()[()], prob.numpy()

        # caches change from here on, and nothing can fail midway
        learned = []
        for s, row in enumerate(logits.numpy()):
            changing = (*self.positive[s], *self.negative[s]) if peeking else ()
            with rows_restored(changing, label):
                # 2. offer it to its class's positive cache, and if it is moderately uncertain to the negative one
                numbers = self.numbers[s]
                taken = push(*self.positive[s], *offer[:3])
                if moderate[s]:
                    taken |= push_negative(self.negative[s], *offer, numbers.neg_mask_lower, numbers.neg_mask_upper)
                learned.append(taken)
                # 3. zero-shot logits, raised by the positive cache and lowered by the negative one
                add(*self.positive[s], offer[1], numbers.pos_alpha, numbers.pos_beta, row)
                subtract(self.negative[s], offer[1], numbers.neg_alpha, numbers.neg_beta, row)
        return logits, learned

    def snapshot(self) -> list[State]:
        return [
            State(Bank(*map(to_tensor, positive)), Bank(*map(to_tensor, negative[:2])), to_tensor(negative.probs))
            for positive, negative in zip(self.positive, self.negative, strict=True)
        ]

    def restore(self, states: Sequence[State]) -> None:
        self.positive = [Positive(*map(to_array, state.positive)) for state in states]
        self.negative = [_negative(*pair) for pair in zip(states, self.numbers, strict=True)]


def _negative(state: State, numbers: Numbers) -> Negative:
    """A negative cache with the lists of classes that its items lower."""
    lower, upper = numbers.neg_mask_lower, numbers.neg_mask_upper
    probs = to_array(state.negative_prob)
    classes, slots, _ = probs.shape
    lengths = ((lower < probs) & (probs < upper)).sum(2)
    # at most 1 / lower classes can be above `lower`, up to the rounding of their sum
    longest = min(classes, int(1.01 / lower) + 1) if lower > 0 else classes
    possible = np.zeros((classes, slots, lengths.max(initial=longest)), np.int32)  # a saved state may contain anything
    list_all(probs, lower, upper, possible)
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
def list_all(probs: Array, lower: float, upper: float, possible: Array) -> None:
    """`list_possible` for every item (C, M) of a cache."""
    for c in range(probs.shape[0]):
        for m in range(probs.shape[1]):
            list_possible(probs[c, m], lower, upper, possible[c, m])


@compiled
def push_negative(
    cache: Negative, label: int, feature: Array, price: float, prob: Array, lower: float, upper: float
) -> bool:
    """`push` for a negative cache, whose items also store probabilities (C,) and the classes between the bounds."""
    price = flush_negligible(price)
    slot = insertion_slot(cache.cost[label], price)
    if slot >= 0:
        shift_from(cache.cost[label], slot)
        shift_from(cache.keys[label], slot)
        shift_from(cache.probs[label], slot)
        shift_from(cache.possible[label], slot)
        shift_from(cache.lengths[label], slot)
        cache.cost[label, slot], cache.keys[label, slot], cache.probs[label, slot] = price, feature, prob
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
