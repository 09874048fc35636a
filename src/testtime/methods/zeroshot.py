"""Zero-shot classification: the frozen model, the baseline of every method.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.

The logit of a class is the scaled cosine between the image and the class's text prototype. Whether that
prototype comes from one template or from an ensemble is decided where the task is built (`prompts.build_task`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from testtime.methods.base import Base
from testtime.types import Task


class State(NamedTuple):
    """Nothing is remembered."""


@dataclass(frozen=True)
class ZeroShot(Base):
    """The frozen classifier on the image itself.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> ZeroShot().scan(task, State(), stream)[0].shape == (len(stream), task.classes)
    True
    """

    name: ClassVar[str] = "zeroshot"
    summary: ClassVar[str] = "The frozen model: scaled cosine to the text prototypes; learns nothing"
    source: ClassVar[str] = (
        "Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021"
    )

    def init(self, task: Task) -> State:
        return State()

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        return task.zero_shot(views[0]), state
