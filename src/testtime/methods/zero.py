"""ZERO: test-time augmentation with zero temperature.

Farina, Franchi, Iacca, Mancini and Ricci, "Frustratingly Easy Test-Time Adaptation of Vision-Language
Models", NeurIPS 2024.

Predicted classes are more reliable than their confidences, so the softmax temperature is set to zero: each
confident view casts one whole vote, and the class with most votes wins. Nothing is trained and nothing is
remembered.

An option after ADTE (Jinx630/ADTE b20efe0c, ICLR 2026): `filter="tsallis"` sorts the views by their Tsallis entropy of
order `tsallis_q`, 0.5 by default as there. ADTE's own order for each class is left out: its code takes it from a first
pass over the whole test set, and code and accounts of the paper disagree on its sign.

Departures: at least one view votes, where the released code keeps none of fewer than four. If every view has
voted, none is left to break a tie, and the lower index wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, require
from testtime.types import Task

# the machine epsilon of each precision, which stands for zero when the released code runs in it
SMALLEST = {"bfloat16 eps": 2**-7, "float16 eps": 2**-10, "float32 eps": 2**-23, "float64 eps": 2**-52}


class State(NamedTuple):
    """Nothing is remembered."""


def read_temperature(text: str) -> float:
    """A temperature from text; 0 for hard votes, NaN if it cannot be parsed.

    >>> read_temperature("hard"), read_temperature("float64 eps (hard votes)"), read_temperature("0.5")
    (0.0, 0.0, 0.5)
    >>> read_temperature("float16 eps") == 2**-10
    True
    """
    text = text.strip()
    if text == "hard" or text.endswith("(hard votes)"):
        return 0.0
    text = text.partition("(")[0].strip()  # drop a remark
    try:
        return SMALLEST[text] if text in SMALLEST else float(text)
    except ValueError:
        return float("nan")


@dataclass(frozen=True)
class ZERO(Base):
    """Zero temperature: confident views vote. Scores are votes, not logits.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy(views=20)
    >>> votes, _ = ZERO().step(task, State(), stream[0])
    >>> votes.sum().item()
    6.0
    """

    name: ClassVar[str] = "zero"
    summary: ClassVar[str] = "Zero temperature: every confident view casts one vote; learns nothing"
    source: ClassVar[str] = (
        "Farina, Franchi, Iacca, Mancini and Ricci, Frustratingly Easy Test-Time Adaptation of "
        "Vision-Language Models, NeurIPS 2024"
    )
    assumes: ClassVar[tuple[str, ...]] = ("views",)

    gamma: float = 0.3  # fraction of the views that vote
    filter: Literal["shannon", "tsallis"] = "shannon"  # the entropy by which views are sorted
    tsallis_q: float = 0.5  # order of Tsallis entropy; towards 1 it becomes Shannon's
    # A number makes votes soft: softmax of the cosines over it. Under half-precision autocast the released
    # code does this, with float16's 0.0009765625.
    zero_temperature: str = "hard"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.gamma <= 1, "gamma", self.gamma, "must lie in (0, 1]")
        require(0 < self.tsallis_q != 1, "tsallis_q", self.tsallis_q, "must be above 0, and not 1: that is 'shannon'")
        known = isinstance(self.zero_temperature, str) and 0 <= read_temperature(self.zero_temperature) < float("inf")
        wanted = f"must be text: 'hard', a number of 0 (hard) or more, or one of {', '.join(SMALLEST)}"
        require(known, "zero_temperature", self.zero_temperature, wanted)

    def init(self, task: Task) -> State:
        return State()

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        # 1. views sorted by confidence; the first ones vote
        logits = task.zero_shot(views)  # (V, C)
        doubt = ops.entropy(logits) if self.filter == "shannon" else ops.tsallis_entropy(logits, self.tsallis_q)
        logits = logits[doubt.argsort(stable=True)]
        voting = ops.kept(len(views), self.gamma)
        votes = self._votes(logits[:voting] / task.scale)  # (C,)

        # 2. a tie is broken by the views that follow, as released
        if voting < len(views):
            tied = votes == votes.max()
            votes = votes + _tie_breaker(tied, logits[voting:]) * (tied.sum() > 1)
        return votes.to(views.dtype), state

    def probabilities(self, logits: Tensor) -> Tensor:
        """Fractions of the votes."""
        return logits / logits.sum(-1, keepdim=True)

    def _votes(self, cosines: Tensor) -> Tensor:
        """The votes of views (V, C) for each class: (C,)."""
        temperature = read_temperature(self.zero_temperature)
        if temperature == 0:
            return F.one_hot(cosines.argmax(1), cosines.shape[1]).sum(0)
        # in double precision, so that a vote of 1 - 1e-9 does not count as 1: a tie is an exact equality
        return (cosines.double() / temperature).softmax(1).sum(0)


def _tie_breaker(tied: Tensor, rest: Tensor) -> Tensor:
    """One more vote (C,) where classes are tied (C,), by the other views' logits (R, C), most confident first."""
    choices = rest.argmax(1)  # (R,)
    decides = tied[choices]
    first = choices[decides.to(torch.uint8).argmax(0, keepdim=True)][0]  # a scalar index would be read back
    # If no view chooses a tied class, the released code means to mask the classes that are not tied. Its `~` negates
    # the indices instead, so it masks the mirror images of the tied: the vote may go to any other class, and
    # depends on the order of the classes.
    otherwise = rest[0].masked_fill(tied.flip(0), -torch.inf).argmax()
    return F.one_hot(torch.where(decides.any(), first, otherwise), len(tied))
