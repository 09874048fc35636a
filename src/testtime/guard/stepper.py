"""The guard around a stepper: which images the method may learn from, and which of its answers are given.

For every image, in this order:

1. The gate. The frozen classifier looks at the image. A copy of a recent image, an image that is untypical for every
   class, one whose views disagree, and one of a class that has used up its budget teach the method nothing: the stepper
   only peeks.
2. The referee. It remembers, for each class, the features that the frozen classifier was surest of; the method has no
   part in it. Where the adapted and the frozen answer differ, it supports the adapted one if the image is closer to
   that class's features, or if it knows none of them. Without its support the frozen answer is given.
3. The judge. As the referee supports fewer of the adapted answers, they are blended with the frozen ones. Late labels,
   where there are any, decide instead once they have proven something.

Decisions are made on the CPU, from a few numbers for each image, and the method's state is never copied. On a CPU
images are processed one by one, so that every product has the same shape wherever a stream is split; on a GPU in
chunks, in which the order of an image's additions may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.guard.course import Course
from testtime.guard.memory import DISPUTES, Kept, Memory, copied
from testtime.guard.settings import Guard
from testtime.methods.base import Base, Nested
from testtime.steppers import Stepper, aligned
from testtime.types import UNKNOWN, Decision, Method, Task, log_of

CHUNK = 256  # images that are processed together on a GPU
VIEWS = 8  # views that are asked whether they agree
COPY = "near-duplicate"
KEEP_EVERY = 200  # images between two snapshots for a fresh start


class Frozen(NamedTuple):
    """What the frozen classifier says of N images; lists are on the CPU."""

    features: Tensor  # (N, D)
    logits: Tensor  # (N, C)
    labels: list[int]
    tops: list[float]  # the largest logit
    confidences: list[float]
    entropies: list[float]  # in nats
    agreements: list[float]  # share of the views with the image's label
    nearest: list[float]  # the largest cosine to a recent image
    copies: list[list[float]]  # (N, N) 1 where two images of the chunk are the same; empty for a single image


class Admission(NamedTuple):
    """What the gate says of N images."""

    refused: list[str]  # why each may not teach the method; empty if it may
    foreign: list[bool]  # whether it is untypical for every class
    alarms: list[bool]  # whether it completes the evidence of drift
    writes: list[tuple[int, int] | None]  # class and slot in which the referee remembers it


class Guarded:
    """One guarded run; see `steppers.Stepper`. `decisions` are those of the last call."""

    def __init__(self, task: Task, method: Method, guard: Guard, stepper: Stepper, memory: Memory) -> None:
        self.task, self.method, self.guard, self.stepper = task, method, guard, stepper
        self.index = 0  # position in the input of the next image
        self.decisions: list[Decision] = []
        self.memory = memory  # copied, since steps work in place

    @property
    def memory(self) -> Memory:
        """A copy of what the guard remembers."""
        cost = torch.tensor(self._costs, dtype=torch.float64)
        taught, course = torch.tensor(self._taught), self.course.tensor()
        return copied(self._memory._replace(cost=cost, taught=taught, course=course))

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory: Memory = copied(memory)
        # plain numbers, since reading single ones from a tensor takes longer than everything that is done with them
        self.course = Course.of(memory.course)
        self._costs: list[list[float]] = memory.cost.tolist()
        self._taught: list[int] = memory.taught.tolist()
        self._filled: list[list[bool]] = memory.cost.isfinite().tolist()  # slots whose feature is in `keys` already

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        return self._advance(views[None])

    def steps(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        size, decisions, found = 1 if stream.is_cpu else CHUNK, list[Decision](), []
        for part in stream.split(size):
            found.append(self._advance(part))
            decisions += self.decisions
            self.index += len(part)
        self.decisions = decisions
        logits, learned = map(torch.cat, zip(*found, strict=True))
        return logits[None], learned[None]

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream):
            self.decisions = []
            return self.stepper.scan(stream)[..., : self.task.classes]
        return self.steps(stream)[0]

    def peek(self, views: Tensor) -> Tensor:
        frozen, adapted = self._frozen(views[None]), self._logits(self.stepper.peek(views))
        unseen = Admission(["not asked to learn"], [self._is_foreign(frozen.tops[0])], [False], [None])
        logits, self.decisions = self._answers(adapted, frozen, unseen, self.course.copy())
        return logits

    def peeks(self, stream: Tensor) -> Tensor:
        found = [(self.peek(views), self.decisions) for views in stream]
        self.decisions = [decision for _, decisions in found for decision in decisions]
        return torch.stack([logits for logits, _ in found], 1)

    def warm_up(self, views: int) -> None:
        self.stepper.warm_up(views)

    def snapshot(self) -> Sequence[Nested]:
        return self.stepper.snapshot()

    def restore(self, states: Sequence[Nested]) -> None:
        self.stepper.restore(states)

    def label(self, index: int, label: int) -> bool:
        """Take the late label of the image at this position in the input; whether it was one to learn from.

        Only images whose adapted and frozen answers differ say anything on which is better, so only those are kept,
        the last `DISPUTES` of them. Each counts once.
        """
        rows = (self._memory.disputed[:, 0] == index + 1).nonzero()
        for row in rows[:, 0].tolist():
            _, adapted, frozen = self._memory.disputed[row].tolist()
            self.course.label(adapted == label, frozen == label)
            self._memory.disputed[row] = 0
        return bool(len(rows))

    def _advance(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Answers (N, C) to N images (N, V, D), and whether the method learned from each: (N,) bool."""
        frozen = self._frozen(stream)
        gate = self._admit(frozen)
        adapted, learned = self._step(stream, gate.refused)
        logits, self.decisions = self._answers(self._logits(adapted), frozen, gate, self.course)
        self._remember(frozen, gate)
        return logits, learned

    def _step(self, stream: Tensor, refused: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The method's scores of N images, learning from those that are not refused, and whether it learned."""
        rows, learned = list[Tensor](), list[Tensor]()
        for stop, group in groupby(range(len(stream)), key=lambda image: bool(refused[image])):
            images = list(group)
            if stop:
                rows.append(self.stepper.peeks(stream[images[0] : images[-1] + 1])[0])
                learned.append(torch.zeros(len(images), dtype=torch.bool, device=stream.device))
            else:
                scores, found = self.stepper.steps(stream[images[0] : images[-1] + 1])
                rows.append(scores[0])
                learned.append(found[0].to(stream.device))
        return torch.cat(rows), torch.cat(learned)

    def _logits(self, scores: Tensor) -> Tensor:
        """The method's scores (N, ...) as logits: their softmax is its distribution."""
        if getattr(type(self.method), "probabilities", None) is Base.probabilities:
            return scores
        return log_of(self.method.probabilities(scores))

    def _frozen(self, stream: Tensor) -> Frozen:
        features = aligned(stream[:, 0])
        logits = self.task.zero_shot(features)
        top, label = logits.max(1)
        log_p = logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        agreement = torch.ones_like(top)
        if stream.shape[1] > 1 and self.guard.view_agreement:
            views = aligned(stream[:, :VIEWS])
            agreement = (self.task.zero_shot(views).argmax(-1) == label[:, None]).to(top).mean(1)
        nearest = (self._memory.recent @ features.T).amax(0)
        columns = torch.stack([top, log_p.amax(1).exp(), entropy, agreement, nearest, label.to(top)])
        if len(features) > 1:
            columns = torch.cat([columns, (features @ features.T > self.guard.duplicate).to(top)])
        # one read from a GPU
        tops, confidences, entropies, agreements, near, labels, *copies = columns.cpu().tolist()
        found = tops, confidences, entropies, agreements, near, copies
        return Frozen(features, logits, [int(label) for label in labels], *found)

    def _admit(self, frozen: Frozen) -> Admission:
        """The gate: one image after another, by the frozen classifier alone."""
        guard, course = self.guard, self.course
        gate = Admission([], [], [], [])
        for image, (label, top) in enumerate(zip(frozen.labels, frozen.tops, strict=True)):
            if course.period >= guard.period:
                course.period = 0.0
                self._taught = [0] * len(self._taught)
            course.period += 1
            copy = frozen.nearest[image] > guard.duplicate or self._copied_within(frozen, image, gate.refused)
            gate.foreign.append(self._is_foreign(top))
            if copy:
                reason = COPY
            elif gate.foreign[-1]:
                reason = "foreign"
            elif frozen.agreements[image] < guard.view_agreement:
                reason = "views disagree"
            elif guard.budget and self._taught[label] >= guard.budget:
                reason = "class over budget"
            else:
                reason = ""
                self._taught[label] += 1
            gate.refused.append(reason)
            gate.writes.append(None if copy else self._slot(label, frozen.entropies[image]))
            gate.alarms.append(not copy and guard.drift != "ignore" and course.drifted(top))
            if not copy:
                course.see(top)
        return gate

    def _is_foreign(self, top: float) -> bool:
        return bool(self.guard.foreign) and self.course.untypical(top, self.guard.foreign)

    def _copied_within(self, frozen: Frozen, image: int, refused: Sequence[str]) -> bool:
        """Whether an earlier image of the chunk, itself no copy, is the same."""
        row = frozen.copies[image] if frozen.copies else ()
        return any(same and reason != COPY for same, reason in zip(row, refused, strict=False))  # of those before it

    def _slot(self, label: int, entropy: float) -> tuple[int, int] | None:
        """The referee's slot for a feature: a free one, or that of the highest entropy if it is higher."""
        costs = self._costs[label]
        slot = costs.index(max(costs))  # the first, if several are free
        if not entropy < costs[slot]:
            return None
        costs[slot] = entropy
        return label, slot

    def _answers(
        self, adapted: Tensor, frozen: Frozen, gate: Admission, course: Course
    ) -> tuple[Tensor, list[Decision]]:
        """The answers (N, C) to give in place of the method's (N, C), and the decisions; moves `course` on."""
        guard, weights, decisions, proven = self.guard, [], [], course.proven
        finite = adapted.isfinite().all(1)
        labels: list[int] = torch.where(finite, adapted.argmax(1), frozen.logits.argmax(1)).tolist()
        supported = self._supported(labels, frozen, gate.writes)
        for image, (label, plain) in enumerate(zip(labels, frozen.labels, strict=True)):
            differs = label != plain
            if proven:
                trust = float(proven == "helps")
            else:
                trust = course.trust(guard.support_low, guard.support_high) if guard.judge else 1.0
            vetoed = differs and guard.veto and not supported[image] and proven != "helps"
            weights.append(0.0 if vetoed else trust)
            if differs and gate.refused[image] != COPY:
                course.dispute(supported[image])
            course.answer(differs)
            answer = "adapted" if weights[-1] == 1 else "blended" if weights[-1] else "frozen"
            decisions.append(
                Decision(
                    index=self.index + image,
                    answer=UNKNOWN if guard.reject and gate.foreign[image] else answer,
                    refused=gate.refused[image],
                    adapted=label,
                    frozen=plain,
                    known=frozen.confidences[image],
                    trust=trust,
                    disagreement=course.disagreement,
                    drift=gate.alarms[image],
                )
            )
        if all(weight == 1 for weight in weights):
            return adapted, decisions
        share = torch.tensor(weights, dtype=adapted.dtype).to(adapted.device)[:, None]
        share = torch.where(
            finite[:, None], share, 1
        )  # the session must see answers that are not finite, to refuse them
        blended = torch.lerp(frozen.logits.log_softmax(1), adapted.log_softmax(1), share)
        return torch.where(share == 1, adapted, torch.where(share == 0, frozen.logits, blended)), decisions

    def _supported(self, labels: Sequence[int], frozen: Frozen, writes: Sequence[tuple[int, int] | None]) -> list[bool]:
        """Whether the referee, as it was before each image, supports the adapted label where it differs."""
        memory, slots = self._memory, range(self.guard.slots)
        owners: dict[tuple[int, int], int] = {}  # slots that an earlier image of the chunk takes
        disputed, places, images, filled = [], [], [], []
        for image, pair in enumerate(zip(labels, frozen.labels, strict=True)):
            if pair[0] != pair[1]:
                disputed.append(image)
                for label in pair:
                    known = self._filled[label]
                    places += [label * len(slots) + slot for slot in slots]
                    images += [owners.get((label, slot), -1) for slot in slots]
                    filled += [known[slot] or (label, slot) in owners for slot in slots]
            if (write := writes[image]) is not None:
                owners[write] = image
        supported = [True] * len(labels)
        if not disputed:
            return supported
        shape = len(disputed), 2, len(slots)
        rows = memory.keys.flatten(0, 1)[_indices(places, shape, memory.keys)]  # (n, 2, M, D)
        if any(image >= 0 for image in images):
            own = _indices(images, shape, memory.keys)
            rows = torch.where(own[..., None] >= 0, frozen.features[own.clamp_min(0)], rows)
        has = torch.tensor(filled).reshape(shape)
        means = ops.unit((rows * has.to(rows)[..., None]).sum(2))  # (n, 2, D); zero if a class has no features
        cosines = (means * frozen.features[_indices(disputed, (-1,), memory.keys)][:, None]).sum(-1)
        for image, (mine, theirs), (any_mine, any_theirs) in zip(
            disputed, cosines.tolist(), has.any(2).tolist(), strict=True
        ):
            supported[image] = not any_mine or (any_theirs and mine > theirs)
        return supported

    def _remember(self, frozen: Frozen, gate: Admission) -> None:
        """Keep the chunk's features, its disputes and, on schedule, a snapshot."""
        memory = self._memory
        last = {write: image for image, write in enumerate(gate.writes) if write is not None}
        if last:
            labels, slots = zip(*last, strict=True)
            memory.keys[list(labels), list(slots)] = frozen.features[list(last.values())]
            for label, slot in last:
                self._filled[label][slot] = True
        if new := [image for image, reason in enumerate(gate.refused) if reason != COPY][-len(memory.recent) :]:
            cursor = int(memory.cursor)
            memory.recent[[(cursor + place) % len(memory.recent) for place in range(len(new))]] = frozen.features[new]
            memory.cursor.fill_((cursor + len(new)) % len(memory.recent))
        for decision in self.decisions:
            if decision.disputed:
                entry = torch.tensor([decision.index + 1, decision.adapted, decision.frozen])
                memory.disputed[int(memory.disputes) % DISPUTES] = entry
                memory.disputes.add_(1)
        if isinstance(kept := memory.kept, Kept):
            if any(gate.alarms):
                self.stepper.restore([kept.older])
                self._memory = memory._replace(kept=Kept(kept.older, kept.older))
            elif any((decision.index + 1) % KEEP_EVERY == 0 for decision in self.decisions):
                self._memory = memory._replace(kept=Kept(kept.newer, self.stepper.snapshot()[0]))


def _indices(values: Sequence[int], shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values).reshape(*shape).to(like.device)
