"""What the guard does, as plain settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from testtime.registry import kinds, read_setting, require
from testtime.types import Method


@dataclass(frozen=True)
class Guard:
    """Settings of the guard around a method. None is chosen with labels; `docs/guard.md` says on which streams.

    A part is switched off by its own setting: `veto=False`, `judge=False`, `foreign=0`, `duplicate=1`,
    `view_agreement=0`, `budget=0`, `text_anchor=0`, `drift="ignore"`.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> session = tt.Session(task, "dpe", guard=Guard())
    >>> first, again = session.step(stream[0]).decision, session.step(stream[0]).decision
    >>> first.refused, again.refused
    ('', 'near-duplicate')
    """

    name: ClassVar[str] = "guard"

    veto: bool = True  # an answer that differs from the frozen one needs the referee's support
    slots: int = 3  # features per class in the referee's memory; more of them blur it
    judge: bool = True  # blend back to the frozen answer as the referee supports fewer of the adapted ones
    support_low: float = 0.3  # share of supported answers at which nothing of the adapted answer is left
    support_high: float = 0.6  # and from which on nothing is taken away
    foreign: float = 1.0  # deviations of the frozen top logit below its running mean: such images teach nothing
    reject: bool = False  # answer "unknown" for them
    duplicate: float = 0.999  # cosine to a recent image above which an image is a copy, which counts once
    recent: int = 300  # images that it is compared with
    view_agreement: float = 0.25  # share of an image's views that must have its frozen label, where there are several
    period: int = 256  # images over which the budget counts
    budget: int = 128  # images that one class may teach in a period: half of it
    text_anchor: int = 10  # images that the prompt's own prototype counts for, in methods that evolve the text
    drift: Literal["ignore", "alarm", "restart"] = "alarm"  # restart: from the last snapshot before the change

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            require(read_setting(type(self), entry.name, value) == value, entry.name, value, "has another type")
            if kinds(type(self))[entry.name] in (int, float):
                require(value >= 0, entry.name, value, "must be 0 or more")
        for name in ("slots", "recent", "period"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        require(
            self.support_low < self.support_high <= 1,
            "support_low",
            self.support_low,
            f"must be below support_high={self.support_high!r}, and that at most 1",
        )

    def anchored(self, method: Method) -> Method:
        """The method with its prompts counting for at least `text_anchor` images, if it has such a count."""
        if getattr(method, "prompt_count", self.text_anchor) >= self.text_anchor:
            return method
        return replace(method, prompt_count=self.text_anchor)  # type: ignore[type-var]


def make_guard(guard: Guard | bool | None) -> Guard | None:
    """The guard that `True` or `Guard(...)` asks for; None for no guard."""
    return Guard() if guard is True else guard or None
