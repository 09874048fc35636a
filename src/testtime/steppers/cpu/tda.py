"""TDA on the CPU without copies: caches that change a row at a time, asked slot by slot.

What it does beyond `methods.tda`, which reads like the paper:

- a cache that takes an image in changes one row, in place;
- the classes that a negative item speaks on are listed when it is taken in. They are few, as each has more than
  `neg_mask_lower` of a probability of one, so asking does not go through C numbers for each of the C x M items;
- empty slots are not looked at.

An image is described by the same operations as there, once for all settings, so states are the same bit for bit.
S settings side by side, C classes, M slots, D features, L classes in a list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.methods.tda import TDA, State
from testtime.steppers.cpu.loops import (
    Array,
    ByImage,
    compiled,
    copied,
    dot,
    filled,
    owned,
    push,
    rank,
    rounded,
    settled,
    shift_from,
    unchanged,
)
from testtime.types import Task


class Positive(NamedTuple):
    """A cache of what images are."""

    keys: Array  # (C, M, D)
    cost: Array  # (C, M)


class Negative(NamedTuple):
    """A cache of what images are not."""

    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    probs: Array  # (C, M, C)
    possible: Array  # (C, M, L) the classes that an item lowers
    lengths: Array  # (C, M) how many those are


class Numbers(NamedTuple):
    """A method's settings in the precision of the task."""

    pos_alpha: Any
    pos_beta: Any
    neg_alpha: Any
    neg_beta: Any
    neg_mask_lower: Any
    neg_mask_upper: Any


class Stepper(ByImage):
    """S runs of TDA over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[TDA], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        real = task.text.numpy().dtype.type
        self.numbers = [
            Numbers(*(rounded(getattr(method, name), real) for name in Numbers._fields)) for method in methods
        ]
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

        # from here on caches change, and nothing can fail half way
        learned = []
        for s, row in enumerate(logits.numpy()):
            changing = (*self.positive[s], *self.negative[s]) if peeking else ()
            with unchanged(changing, label):
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
            State(Bank(*map(copied, positive)), Bank(*map(copied, negative[:2])), copied(negative.probs))
            for positive, negative in zip(self.positive, self.negative, strict=True)
        ]

    def restore(self, states: Sequence[State]) -> None:
        self.positive = [Positive(*map(owned, state.positive)) for state in states]
        self.negative = [_negative(*pair) for pair in zip(states, self.numbers, strict=True)]


def _negative(state: State, numbers: Numbers) -> Negative:
    """A negative cache with the lists of classes that its items lower."""
    lower, upper = numbers.neg_mask_lower, numbers.neg_mask_upper
    probs = owned(state.negative_prob)
    classes, slots, _ = probs.shape
    lengths = ((lower < probs) & (probs < upper)).sum(2)
    # fewer than 1 / lower classes can have more than that, but for the rounding of their sum
    most = min(classes, int(1.01 / lower) + 1) if lower > 0 else classes
    possible = np.zeros((classes, slots, lengths.max(initial=most)), np.int32)  # a saved state may hold anything
    list_all(probs, lower, upper, possible)
    keys, cost = map(owned, state.negative)
    return Negative(keys, cost, probs, possible, lengths)


@compiled
def list_possible(prob: Array, lower: float, upper: float, possible: Array) -> int:
    """Fill `possible` (L,) with the classes whose probability (C,) lies between the bounds; how many there are."""
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
    """`push` for a negative cache, whose items also hold probabilities (C,) and list the classes between the bounds."""
    price = settled(price)
    place = rank(cache.cost[label], price)
    if place >= 0:
        shift_from(cache.cost[label], place)
        shift_from(cache.keys[label], place)
        shift_from(cache.probs[label], place)
        shift_from(cache.possible[label], place)
        shift_from(cache.lengths[label], place)
        cache.cost[label, place], cache.keys[label, place], cache.probs[label, place] = price, feature, prob
        cache.lengths[label, place] = list_possible(prob, lower, upper, cache.possible[label, place])
    return place >= 0


@compiled
def add(keys: Array, cost: Array, feature: Array, alpha: float, beta: float, logits: Array) -> None:
    """Raise the logit (C,) of each class by its items' affinity to the feature (D,)."""
    one = feature.dtype.type(1)
    for c in range(len(cost)):
        for m in range(filled(cost[c])):
            logits[c] += alpha * math.exp(beta * (dot(keys[c, m], feature) - one))


@compiled
def subtract(cache: Negative, feature: Array, alpha: float, beta: float, logits: Array) -> None:
    """Lower the logits (C,) of the classes that each item held possible, by its affinity to the feature (D,)."""
    keys, cost, possible, lengths = cache.keys, cache.cost, cache.possible, cache.lengths
    one = feature.dtype.type(1)
    for c in range(len(cost)):
        for m in range(filled(cost[c])):
            weight = alpha * math.exp(beta * (dot(keys[c, m], feature) - one))
            for k in range(lengths[c, m]):
                logits[possible[c, m, k]] -= weight
