"""DLAE: DPE with logits damped by how often a class was predicted, doubt, and ageing queues.

"DLAE", CVPR 2026; the paper's title and authors were not available.

DPE's prototypes evolve as before. But the logits of a class are scaled down with the share of images predicted to be of
it, the more so the less confident the image is compared with earlier ones of its class. An image whose label changes by
that is in doubt, and enters its queue at a discount; features that the evolved text likes less than the prompt did grow
older, and are replaced sooner.

This follows the released code (whynotcooper/dlae 253163b), with its settings for ImageNet as the defaults. Its damping
multiplies logits, so it presumes positive cosines, as CLIP's are. Both residuals learn at `lr_text`; its `lr_image` is
never read. Departures: selection keeps at least one view, where the released code keeps none of fewer than ten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from testtime import bank as banks
from testtime import ops
from testtime.methods.base import at_least
from testtime.methods.evolving import Evolving, over_bits
from testtime.types import Task

Put: TypeAlias = Callable[[Tensor, int, Tensor, Tensor], Tensor]  # index_copy, in place or not
SUMMED = 3  # features of a queue that its visual prototype sums, as released, however many it holds


class State(NamedTuple):
    text: Tensor  # (C, D) evolved text prototypes, normalised when used
    updates: Tensor  # () int64, images that the text prototypes have learned from
    queue: banks.Bank  # (C, M, D) features and (C, M) entropies in nats; sorted only by an offer to a full row
    visual: Tensor  # (C, D) visual prototypes, zero where a queue is empty
    time: Tensor  # (C, M) int64, image at which a queued feature came or last aged
    predicted: Tensor  # (C,) how many images were predicted to be of each class, plus one
    confidence: Tensor  # (C,) mean probability of the class over these images, 0 before the first
    images: Tensor  # () int64, images so far


class Look(NamedTuple):
    """What an image looks like to text prototypes, after damping."""

    feature: Tensor  # (D,), mean of the confident views, not renormalised
    logits: Tensor  # (C,), their mean damped logits
    prob: Tensor  # (C,), mean of their softmax
    label: Tensor  # (1,)
    first: Tensor  # (1,), the label without damping
    scale: Tensor  # (C,), of the logits of each class


@dataclass(frozen=True)
class DLAE(Evolving):
    """DPE with damped logits, doubt and ageing; each is switched off by its own setting of 0.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> logits, state = DLAE().scan(task, DLAE().init(task), stream)
    >>> int(state.predicted.sum()) == len(stream) + task.classes
    True
    """

    name: ClassVar[str] = "dlae"
    summary: ClassVar[str] = "DPE with logits damped where a class is predicted often, and queues that age"
    source: ClassVar[str] = "DLAE, CVPR 2026; released code whynotcooper/dlae 253163b"
    adapts: ClassVar[str] = "both"
    remembers: ClassVar[bool] = True
    gradients: ClassVar[str] = "closed form"
    assumes: ClassVar[tuple[str, ...]] = ("class balance", "LLM texts")

    adjustment: float = 0.8  # a, how strongly the logits of frequent classes are damped
    doubt_discount: float = 0.001  # a1, of the entropy of an image whose label the damping changes
    ageing: float = 0.0  # e, rate at which the entropy of an aged feature grows, per image

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "adjustment", "doubt_discount", "ageing")

    def init(self, task: Task) -> State:
        time = torch.zeros(task.classes, self.queue, dtype=torch.int64, device=task.text.device)
        ones = task.text.new_ones(task.classes)
        return State(*self._start(task), time, ones, torch.zeros_like(ones), time.new_zeros(()))

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        return self._step(task, state, views, Tensor.index_copy)

    def step_in_place(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State, Tensor]:
        """As `step`, and that it learned; the queues are overwritten: they are large."""
        logits, after = self._step(task, state, views, Tensor.index_copy_)
        return logits, after, self.learned(state, after)

    def _step(self, task: Task, state: State, views: Tensor, put: Put) -> tuple[Tensor, State]:
        # 1. the image as the evolved text sees it; doubt where the damping changes its label
        text = ops.prototypes(state.text)
        seen = self._look(task, views, text.direction, state.predicted, state.confidence)
        similarity = (text.direction[seen.label] * text.direction[seen.first]).sum()
        discount = torch.where(seen.label == seen.first, 0.0, self.doubt_discount)[0]
        cost = torch.special.entr(seen.prob).sum() * (-discount * similarity).exp()

        # 2. its class was predicted once more, with this confidence
        predicted = state.predicted.index_add(0, seen.label, torch.ones_like(cost)[None])
        held = state.confidence[seen.label]
        confidence = state.confidence.index_copy(
            0, seen.label, held + (seen.prob[seen.label] - held) / (predicted[seen.label] - 1)
        )

        # 3. evolve the visual prototypes
        queue, time, visual = self._enqueue(task, state, seen, text.direction, cost, put)
        filled = banks.filled(queue).to(visual)  # (C,) of 0 and 1

        # 4. prototype residual learning, as DPE; the damping is a constant of it
        objective = self._objective(seen.scale, self.alpha)
        adams = self._adam(self.lr_text), self._adam(self.lr_text)
        adapted_text, adapted_visual = ops.learn(
            seen.feature[None], state.text, text, visual, filled, filled, objective, adams, self.steps
        )

        # 5. predict with both sets, damped by the counts that include this image
        rows = views if self.multi_view_prediction else views[:1]
        again = self._look(task, rows, adapted_text, predicted, confidence)
        logits = again.logits + filled * ops.affinity(adapted_visual @ again.feature, self.alpha, self.beta)

        # 6. evolve the text prototypes with images that are confident enough
        accepted = over_bits(ops.entropy(logits), task.classes) < self.entropy_threshold
        evolved, updates = self._average(state.text, state.updates, adapted_text, accepted)
        return logits, State(evolved, updates, queue, visual, time, predicted, confidence, state.images + 1)

    def learned(self, before: State, after: State) -> Tensor:
        """Every image counts in the damping."""
        return after.images > before.images

    def _look(self, task: Task, views: Tensor, text: Tensor, predicted: Tensor, confidence: Tensor) -> Look:
        """An image (V, D) as unit text prototypes (C, D) see it."""
        logits = task.scale * (views @ text.T)  # (V, C)
        kept = logits[ops.confident(logits, self.selection)]
        first = kept.mean(0).argmax().reshape(1)
        surprise = 1 - (kept.softmax(1).mean(0)[first] - confidence[first])
        damping = (-self.adjustment * surprise * predicted / predicted.sum()).exp()  # (C,)
        damped = logits * damping
        feature, kept = ops.confident_mean(views, damped, self.selection)
        mean = kept.mean(0)
        return Look(feature, mean, kept.softmax(1).mean(0), mean.argmax().reshape(1), first, task.scale * damping)

    def _enqueue(
        self, task: Task, state: State, seen: Look, text: Tensor, cost: Tensor, put: Put
    ) -> tuple[banks.Bank, Tensor, Tensor]:
        """Queues, times and visual prototypes after offering them the image: a single row changes."""
        label = seen.label
        keys, costs, time = state.queue.keys[label][0], state.queue.cost[label][0], state.time[label][0]
        place = torch.arange(self.queue, device=costs.device)
        held = costs.isfinite().sum()
        full = held == self.queue
        # features of a full row that the evolved text likes less than the prompt did grow older
        aged = full & (keys @ text[label][0] < keys @ task.text[label][0])  # (M,)
        age = (state.images - time).to(costs)
        costs = torch.where(aged, costs * (self.ageing * age).exp(), costs)
        time = torch.where(aged, state.images, time)
        keys, costs, time = _ordered(full, keys, costs, time)
        # then the image takes the place of the worst if it is better, or the first free slot
        taken = torch.where(full, (place == self.queue - 1) & (cost < costs), place == held)
        keys = torch.where(taken[:, None], seen.feature, keys)
        costs, time = torch.where(taken, cost, costs), torch.where(taken, state.images, time)
        keys, costs, time = _ordered(full, keys, costs, time)
        mean = keys[:SUMMED].sum(0) / costs.isfinite().sum().clamp_min(1)
        queue = banks.Bank(put(state.queue.keys, 0, label, keys[None]), put(state.queue.cost, 0, label, costs[None]))
        return queue, put(state.time, 0, label, time[None]), put(state.visual, 0, label, mean[None])


def _ordered(full: Tensor, keys: Tensor, costs: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row sorted by cost, lowest first; as it was unless it is full, as released."""
    place = torch.arange(len(costs), device=costs.device)
    order = torch.where(full, costs.argsort(stable=True), place)
    return keys[order], costs[order], time[order]
