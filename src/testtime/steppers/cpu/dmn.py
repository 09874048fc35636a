"""DMN-ZS on the CPU without copies: the memory is updated one slot at a time and read once per image.

Optimisations over `methods.dmn`, which reads like the paper:

- a memory that accepts an image changes one slot, in place;
- a class's vector is computed and used while its memories are in the cache, so the memory, 100 MB at 1000 classes, is
  read once and no other array of its size is written;
- empty slots, which are zero and contribute nothing, are skipped.

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
from testtime.steppers.cpu.loops import Array, ByImage, cast, compiled, dot, rows_restored, to_array, to_tensor
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
        label, entropy = 0, cosine.new_tensor(math.inf)  # never accepted by a memory
        if self.remembers:
            vote = self.methods[0].vote(task, views)
            label, entropy = int(vote.argmax()), -(vote * (vote + 1e-8).log()).sum()
        text_prob = (task.scale * cosine).softmax(0)
        logits = text_prob.new_empty(len(self.methods), task.classes)
        learned = []
        for method, memory, row in zip(self.methods, self.memories, logits.numpy(), strict=True):
            with rows_restored(memory if peeking else (), label):
                # 1. the memory keeps the clean view; nothing before this line changes it
                learned.append(remember(*memory, label, clean, entropy.numpy()[()]))
                # 2. the class vectors that this image reads from the memory
                features, _, used = memory
                numbers = (cast(number, row.dtype.type) for number in (method.beta, task.scale))
                read(features, used, self.text, clean, cosine.numpy(), *numbers, row)
        # 3. both classifiers
        scores = [
            method.fusion_text * text_prob + method.fusion_memory * row.softmax(0)
            for method, row in zip(self.methods, logits, strict=True)
        ]
        return torch.stack(scores), learned

    def snapshot(self) -> list[State]:
        return [State(to_tensor(features), to_tensor(entropy)) for features, entropy, _ in self.memories]

    def restore(self, states: Sequence[State]) -> None:
        pairs = [(to_array(state.features), to_array(state.entropy)) for state in states]  # (C, M, D), (C, M)
        self.memories = [(features, entropy, _used(entropy)) for features, entropy in pairs]


def _used(entropy: Array) -> Array:
    """How many slots of each class may be in use: up to the last with finite entropy."""
    return (np.isfinite(entropy) * np.arange(1, entropy.shape[1] + 1)).max(1, initial=0)


@compiled
def remember(features: Array, entropy: Array, used: Array, label: int, clean: Array, price: float) -> bool:
    """Offer one feature (D,) to a class's memory: it replaces the first of the most uncertain if it is more certain."""
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
    """Fill the logits (C,) of the clean view from the class vectors it reads: keys weighted by their affinity to it."""
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
