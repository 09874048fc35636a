"""Shared by methods that tune something for a single image, by AdamW, so that its confident views agree."""

from __future__ import annotations

from dataclasses import dataclass

from testtime import ops
from testtime.methods.base import Base, at_least, check_adamw, require


@dataclass(frozen=True)
class Tuning(Base):
    """The settings of the tuning; the defaults are those of the released codes of TPT and TPS."""

    lr: float = 5e-3  # about the size of one coordinate's change: AdamW's first step is nearly a sign
    steps: int = 1  # each further step costs as much and gains little
    selection: float = 0.1  # fraction of the views that count as confident
    adamw_eps: float = 1e-8
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_weight_decay: float = 0.01  # also in the first step, unless the tuned values start at zero

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "lr")
        check_adamw(self)
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    @property
    def adam(self) -> ops.AdamW:
        """The optimiser."""
        return ops.AdamW(self.lr, self.adamw_eps, self.adamw_betas, self.adamw_weight_decay)
