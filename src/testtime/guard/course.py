"""The guard's running numbers: typical logits, support, disagreement, drift, and bets on late labels.

Everything is a plain float, so that a stream resumes bit for bit from a float64 tensor.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Self

import torch
from torch import Tensor

TYPICAL = 256  # images that the mean and variance of the top logit look back on
WARM_UP = 16  # images before which nothing is called untypical
PRIOR = 10.0  # supported disputes that the judge starts with
MEMORY = 0.99  # of the judge: a dispute's weight falls by this factor with every later one
SHARE_MEMORY = 0.995  # of the running disagreement: the last 200 or so images count
SLACK = 0.5  # deviations by which a signal may be off without adding to the evidence of drift
ALARM = 25.0  # deviations of summed evidence: a shift by one deviation is found after about 50 images
SETTLED = 32  # images before which drift is not looked for
BETS = (0.25, 0.5, 0.75)  # shares of the wealth that are bet on the next late label
PROVEN = 20.0  # wealth that proves a claim: reached by chance with a probability of at most 1/20, whenever one looks
CEILING = 1000.0  # of the wealth, so that a proof can be undone


@dataclass
class Course:
    """Running numbers along a stream."""

    seen: float = 0.0  # images that the mean counts, up to TYPICAL
    mean: float = 0.0  # of the frozen top logit
    variance: float = 0.0
    supported: float = PRIOR
    disputes: float = PRIOR
    differed: float = 0.0  # weighted images whose adapted answer differs from the frozen one
    answered: float = 0.0
    since: float = 0.0  # images since the last alarm: the next four describe them
    level: float = 0.0
    spread: float = 0.0  # sum of squared deviations from the level
    rising: float = 0.0
    falling: float = 0.0
    period: float = 0.0  # images of the current period
    labels: float = 0.0  # late labels that counted
    helps_1: float = 1.0  # wealth of who bets that adapted answers beat frozen ones, for each of BETS
    helps_2: float = 1.0
    helps_3: float = 1.0
    harms_1: float = 1.0  # and of who bets against them
    harms_2: float = 1.0
    harms_3: float = 1.0

    @classmethod
    def of(cls, numbers: Tensor) -> Self:
        """The course stored in a tensor by `tensor`."""
        return cls(*numbers.tolist())

    def tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)

    def copy(self) -> Self:
        return replace(self)

    def untypical(self, top: float, deviations: float) -> bool:
        """Whether a frozen top logit lies so many deviations below its running mean."""
        return self.seen >= WARM_UP and top < self.mean - deviations * math.sqrt(self.variance)

    def see(self, top: float) -> None:
        """Count an image by its frozen top logit."""
        self.seen = min(self.seen + 1, TYPICAL)
        before, self.mean = self.mean, self.mean + (top - self.mean) / self.seen
        self.variance += ((top - before) * (top - self.mean) - self.variance) / self.seen

    def drifted(self, top: float) -> bool:
        """Whether this image completes the evidence that the stream has changed (Page-Hinkley, both directions)."""
        if self.since >= SETTLED:
            deviation = math.sqrt(self.spread / self.since) or math.inf
            off = (top - self.level) / deviation
            self.rising = max(0.0, self.rising + off - SLACK)
            self.falling = max(0.0, self.falling - off - SLACK)
            if max(self.rising, self.falling) > ALARM:
                self.since = self.level = self.spread = self.rising = self.falling = 0.0
                return True
        self.since += 1
        before, self.level = self.level, self.level + (top - self.level) / self.since
        self.spread += (top - before) * (top - self.level)
        return False

    def dispute(self, supported: bool) -> None:
        """Count an adapted answer that differs from the frozen one, and whether the referee supports it."""
        self.supported = MEMORY * self.supported + (1 - MEMORY) * PRIOR + supported
        self.disputes = MEMORY * self.disputes + (1 - MEMORY) * PRIOR + 1

    def answer(self, differs: bool) -> None:
        """Count an answer for the running disagreement."""
        self.differed = SHARE_MEMORY * self.differed + differs
        self.answered = SHARE_MEMORY * self.answered + 1

    @property
    def disagreement(self) -> float:
        """The share of recent images whose adapted answer differs from the frozen one."""
        return self.differed / self.answered if self.answered else 0.0

    def label(self, adapted: bool, frozen: bool) -> None:
        """Count a late label: whether the adapted and the frozen answer were right. If both or none, it says nothing.

        Each bettor stakes a share of its wealth on the next label. If adapted answers are in truth no better than
        frozen ones, the wealth of who bets on them grows twentyfold with a probability of at most 1/20, over all times
        together (Ville's inequality); and likewise for who bets against them.
        """
        self.labels += 1
        if adapted == frozen:
            return
        for number, share in enumerate(BETS, 1):
            for name, win in (("helps", adapted), ("harms", frozen)):
                wealth = getattr(self, f"{name}_{number}") * (1 + share if win else 1 - share)
                setattr(self, f"{name}_{number}", min(wealth, CEILING))

    @property
    def proven(self) -> str:
        """What late labels have proven: that adapting "helps", that it "harms", or nothing yet."""
        for name in ("helps", "harms"):
            if sum(getattr(self, f"{name}_{number}") for number in range(1, 1 + len(BETS))) / len(BETS) >= PROVEN:
                return name
        return ""

    def trust(self, low: float, high: float) -> float:
        """The weight of adapted answers, 0 to 1: none if a share `low` of them is supported, all from `high` on."""
        return min(max((self.supported / self.disputes - low) / (high - low), 0.0), 1.0)
