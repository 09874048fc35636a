"""DMN-ZS on the CPU without copies: a memory that changes a slot at a time, read once for each image.

What it does beyond `methods.dmn`, which reads like the paper:

- a memory that takes an image in changes one slot, in place;
- a class's vector is made and used while its memories are in a cache, so the memory, 100 MB at 1000 classes, is read
  once and no other array of its size is written;
- empty slots, which are zero and weigh nothing, are not looked at.

Views vote by the same operations as there, once for all settings, so states are the same bit for bit.
S settings side by side, C classes, M slots, D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from testtime.methods.dmn import DMN, State
from testtime.steppers.cpu.loops import Array, ByImage, compiled, copied, dot, owned, rounded, unchanged
from testtime.types import Task


class Stepper(ByImage):
    """S runs of DMN-ZS over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[DMN], states: Sequence[State]) -> None:
        self.task, self.methods, self.text = task, methods, task.text.numpy()
        self.remembers = any(method.memory_size for method in methods)
        self.restore(states)

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, list[bool]]:
        task, clean = self.task, views[0].numpy()
        cosine = task.text @ views[0]
        label, entropy = 0, cosine.new_tensor(math.inf)  # what no memory takes
        if self.remembers:
            vote = self.methods[0].vote(task, views)
            label, entropy = int(vote.argmax()), -(vote * (vote + 1e-8).log()).sum()
        text_prob = (task.scale * cosine).softmax(0)
        logits = text_prob.new_empty(len(self.methods), task.classes)
        learned = []
        for method, memory, row in zip(self.methods, self.memories, logits.numpy(), strict=True):
            with unchanged(memory if peeking else (), label):
                # 1. the memory keeps the clean view; nothing before this line changes it
                learned.append(remember(*memory, label, clean, entropy.numpy()[()]))
                # 2. the class vectors that this image reads from it
                features, _, used = memory
                numbers = (rounded(number, row.dtype.type) for number in (method.beta, task.scale))
                read(features, used, self.text, clean, cosine.numpy(), *numbers, row)
        # 3. both classifiers
        scores = [
            method.fusion_text * text_prob + method.fusion_memory * row.softmax(0)
            for method, row in zip(self.methods, logits, strict=True)
        ]
        return torch.stack(scores), learned

    def snapshot(self) -> list[State]:
        return [State(copied(features), copied(entropy)) for features, entropy, _ in self.memories]

    def restore(self, states: Sequence[State]) -> None:
        pairs = [(owned(state.features), owned(state.entropy)) for state in states]  # (C, M, D), (C, M)
        self.memories = [(features, entropy, _used(entropy)) for features, entropy in pairs]


def _used(entropy: Array) -> Array:
    """How many slots of each class may hold something: up to the last that is not infinitely uncertain."""
    return (np.isfinite(entropy) * np.arange(1, entropy.shape[1] + 1)).max(1, initial=0)


@compiled
def remember(features: Array, entropy: Array, used: Array, label: int, clean: Array, price: float) -> bool:
    """Offer a class's memory one feature (D,): it replaces the first of the most uncertain, if that is worse."""
    slots, slot = entropy.shape[1], 0
    for m in range(slots):
        if entropy[label, m] > entropy[label, slot]:
            slot = m
    taken = slots > 0 and price < entropy[label, slot]
    if taken:
        features[label, slot] = clean
        entropy[label, slot] = price
        used[label] = max(used[label], slot + 1)
    return taken


@compiled
def read(
    features: Array, used: Array, text: Array, clean: Array, cosine: Array, beta: float, scale: float, logits: Array
) -> None:
    """Logits (C,) of the clean view by the vectors that it reads: keys weighed by their affinity to it."""
    classes, _, dim = features.shape
    vector, one = np.empty(dim, features.dtype), features.dtype.type(1)
    for c in range(classes):
        weight = math.exp(beta * (cosine[c] - one))
        for d in range(dim):
            vector[d] = weight * text[c, d]
        for m in range(used[c]):
            key = features[c, m]
            weight = math.exp(beta * (dot(key, clean) - one))
            for d in range(dim):
                vector[d] += weight * key[d]
        length = math.sqrt(dot(vector, vector))
        logits[c] = scale * dot(vector, clean) / max(length, 1e-12)
