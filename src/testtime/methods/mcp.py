"""MCP: multi-cache enhanced prototype learning (MCP++, the variant with residuals).

Chen, Zhai, Zhang, Shi and Li, "Multi-Cache Enhanced Prototype Learning for Test-Time Generalization of
Vision-Language Models", ICCV 2025 (arXiv 2508.01225).

Three caches grow along the stream. The entropy cache keeps the most confident features of each class; the align cache
keeps features that the views agree on and that lie near the class's centre; the negative cache keeps uncertain
features, which lower the classes they consider possible. The answer adds three probabilities: of the confident views,
of a classifier read from both caches (as DMN's), and of the class prototypes, the caches' means. MCP++ (`residual`)
also learns residuals on text and visual prototypes for each image.

This follows the released code (CenturyChen/MCP f9d063f), with its settings for ImageNet as the defaults. Departures:
- The released script picks both fusion weights with the test labels. Here they are settings, equal by default; that
  search is a different system (`testtime.experiments.oracle`).
- Selection keeps at least one view, where the released code keeps none of fewer than ten, one included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import bank as banks
from testtime import ops
from testtime.methods.base import at_least, check_ranges, copied, differ, require
from testtime.methods.evolving import over_bits
from testtime.methods.mcp_residuals import Residuals
from testtime.types import Task


class State(NamedTuple):
    entropy: banks.Bank  # (C, E, D) features and (C, E) entropies in nats
    align: banks.Bank  # (C, A, D) clean features and (C, A) entropies of the views' vote
    negative: banks.Bank  # (C, N, D + C) a feature, then 1 for each class that it considers possible
    prototypes: Tensor  # (C, D) mean of both caches when the class last received an image, not normalised
    held: Tensor  # (C,) int64, features in that mean
    recalled: Tensor  # (C, E, D) the entropy cache at that time, as unit rows
    gram: Tensor  # (C, A + E + 1, A + E + 1) products of a class's memories: align, entropy, and its prompt

    @property
    def costs(self) -> tuple[Tensor, ...]:
        return self.entropy.cost, self.align.cost, self.negative.cost


@dataclass(frozen=True)
class MCP(Residuals):
    """Multi-cache prototypes. Scores are weighted probabilities, not logits.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> scores, state = MCP().scan(task, MCP().init(task), stream)
    >>> bool((scores.argmax(1) == labels).sum() > (task.zero_shot(stream[:, 0]).argmax(1) == labels).sum())
    True
    """

    name: ClassVar[str] = "mcp"
    summary: ClassVar[str] = "Multi-cache prototypes: confident, central and uncertain features (residual: MCP++)"
    source: ClassVar[str] = (
        "Chen, Zhai, Zhang, Shi and Li, Multi-Cache Enhanced Prototype Learning for Test-Time Generalization of "
        "Vision-Language Models, ICCV 2025; released code CenturyChen/MCP f9d063f"
    )
    adapts: ClassVar[str] = "both"
    remembers: ClassVar[bool] = True
    gradients: ClassVar[str] = "closed form"
    assumes: ClassVar[tuple[str, ...]] = ("views", "LLM texts")

    entropy_capacity: int = 10  # E, confident features kept per class
    align_capacity: int = 10  # A, central features kept per class
    centre: float = 0.8  # share of the prototype in the centre; the rest is the prompt's
    memory_beta: float = 5.5  # how sharply a memory's weight falls with its distance from the image (DMN's)
    fusion_memory: float = 1.0  # equal weights: without labels there is no way to tell which is better
    fusion_prototype: float = 1.0
    neg_capacity: int = 3  # N; these seven are TDA's, with one more slot
    neg_alpha: float = 0.117
    neg_beta: float = 1.0
    neg_entropy_lower: float = 0.2
    neg_entropy_upper: float = 0.5
    neg_mask_lower: float = 0.03
    neg_mask_upper: float = 1.0
    selection: float = 0.1  # fraction of the views that count as confident
    multi_view_prediction: bool = False  # the mean of confident views in place of the image (released: ImageNet-A)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "memory_beta", "fusion_memory", "fusion_prototype", "neg_capacity", "neg_alpha", "neg_beta")
        at_least(1, self, "entropy_capacity", "align_capacity")
        check_ranges(self, "neg_entropy", "neg_mask")
        require(0 <= self.centre <= 1, "centre", self.centre, "must lie in [0, 1]")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        text, memories = task.text, self.align_capacity + self.entropy_capacity
        confident, central = banks.empty(text, self.entropy_capacity), banks.empty(text, self.align_capacity)
        negative = banks.empty(text.new_zeros(task.classes, task.dim + task.classes), self.neg_capacity)
        gram = torch.nn.functional.pad(text.square().sum(1)[:, None, None], (memories, 0, memories, 0))
        recalled, held = torch.zeros_like(confident.keys), torch.zeros_like(text[:, 0], dtype=torch.int64)
        return State(confident, central, negative, torch.zeros_like(text), held, recalled, gram)

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        parts, state = self.parts(task, state, views)
        return self.fused(parts), state

    def step_in_place(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State, Tensor]:
        """As `step`, and whether a cache accepted the image; the state is overwritten."""
        before = copied(state.costs)
        parts, state = self.parts(task, state, views, in_place=True)
        return self.fused(parts), state, differ(before, state.costs)

    def fused(self, parts: Tensor) -> Tensor:
        """The weighted sum (..., C) of probabilities (3, ..., C)."""
        return parts[0] + self.fusion_memory * parts[1] + self.fusion_prototype * parts[2]

    def parts(self, task: Task, state: State, views: Tensor, in_place: bool = False) -> tuple[Tensor, State]:
        """Probabilities of the text, the memory and the prototypes for an image (V, D): (3, C), and the next state."""
        put = Tensor.index_copy_ if in_place else Tensor.index_copy

        # 1. the image, its label and entropy, and the vote of its confident views
        clean, view_logits = views[0], task.zero_shot(views)  # (D,), (V, C)
        feature, rows = clean, view_logits[:1]
        if self.multi_view_prediction:
            feature, rows = ops.confident_mean(views, view_logits, self.selection)
        frozen, entropy = rows.mean(0), ops.marginal_entropy(rows)
        vote = ops.vote(view_logits, self.selection)
        doubt = -(vote * vote.clamp_min(1e-8).log()).sum()
        own, voted = frozen.argmax().reshape(1), vote.argmax().reshape(1)

        # 2. entropy cache: the most confident features; align cache: also nearer to the centre than what they replace
        confident = banks.push(state.entropy, own, feature, entropy, in_place)
        prompt, last = task.text[voted][0], state.align.keys[voted][0, -1]
        centre = torch.lerp(prompt, state.prototypes[voted][0], (self.centre * (state.held[voted] > 0)).to(prompt))
        enters = ((clean - centre).norm() < (last - centre).norm()) | ~state.align.cost[voted][0, -1].isfinite()
        central = banks.push(state.align, voted, clean, torch.where(enters, doubt, torch.inf), in_place)

        # 3. prototypes and memories of the classes that received the image
        touched = torch.cat([own, voted])
        rows = torch.cat([central.keys[touched], confident.keys[touched]], 1)  # (2, A + E, D)
        number = torch.cat([central.cost[touched], confident.cost[touched]], 1).isfinite().sum(1)
        keys = ops.unit(torch.cat([rows, task.text[touched][:, None]], 1))
        prototypes = put(state.prototypes, 0, touched, rows.sum(1) / number[:, None])
        held = put(state.held, 0, touched, number)
        recalled = put(state.recalled, 0, touched, keys[:, self.align_capacity : -1])
        gram = put(state.gram, 0, touched, keys @ keys.mT)

        # 4. negative cache: what it lowers
        confident, negative = self._reflect(task, state.negative, confident, feature, frozen, entropy, in_place)
        uncertain = negative.keys.flatten(0, 1)
        weight = ops.affinity(uncertain[:, : task.dim] @ feature, self.neg_alpha, self.neg_beta)
        lowered = (weight * negative.cost.flatten().isfinite()) @ uncertain[:, task.dim :]

        # 5. the prototypes' probabilities; with residuals, the text votes again
        seen = (held > 0).to(prompt)
        if self.residual:
            text, logits = self.learn(task, feature, frozen, prototypes, seen, lowered, negative)
            vote = ops.vote(task.scale * (views @ text.T), self.selection)
        else:
            logits = frozen + seen * ops.affinity(prototypes @ feature, self.alpha, self.beta) - lowered

        # 6. the memory's: class vectors weighted towards the image; only their lengths and products with it are needed
        cosine = torch.cat([central.keys @ clean, recalled @ clean, (task.text @ clean)[:, None]], 1)  # (C, A + E + 1)
        weight = ops.affinity(cosine, 1.0, self.memory_beta)
        length = (weight[:, None] @ gram @ weight[:, :, None])[:, 0, 0].clamp_min(1e-24).sqrt()
        memory = task.scale * (weight * cosine).sum(1) / length
        after = State(confident, central, negative, prototypes, held, recalled, gram)
        return torch.stack([vote, memory.softmax(0), logits.softmax(0)]), after

    def _reflect(
        self, task: Task, negative: banks.Bank, confident: banks.Bank, feature: Tensor, frozen: Tensor, entropy: Tensor,
        in_place: bool,
    ) -> tuple[banks.Bank, banks.Bank]:  # fmt: skip
        """Both caches after a second look, with the entropy cache's help, at an image that is moderately uncertain."""

        def within(nats: Tensor) -> Tensor:
            ratio = over_bits(nats, task.classes)
            return (self.neg_entropy_lower < ratio) & (ratio < self.neg_entropy_upper)

        moderate = within(entropy)
        if moderate.is_cpu and not moderate:
            return confident, negative  # on the CPU reading a number is free
        raised = ops.affinity(confident.keys @ feature, self.alpha, self.beta) * confident.cost.isfinite()
        logits = frozen + raised.sum(1)
        label, cost, prob = logits.argmax(), ops.entropy(logits), logits.softmax(0)
        sure = over_bits(cost, task.classes) <= self.neg_entropy_lower
        possible = ((self.neg_mask_lower < prob) & (prob < self.neg_mask_upper)).to(feature)
        # an infinite cost is never accepted
        unsure_cost, sure_cost = (torch.where(moderate & which, cost, torch.inf) for which in (within(cost), sure))
        negative = banks.push(negative, label, torch.cat([feature, possible]), unsure_cost, in_place)
        return banks.push(confident, label, feature, sure_cost, in_place), negative

    def learned(self, before: State, after: State) -> Tensor:
        """Whether a cache accepted the image."""
        return differ(before.costs, after.costs)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Weighted sums of probabilities, normalised."""
        return logits / logits.sum(-1, keepdim=True)
