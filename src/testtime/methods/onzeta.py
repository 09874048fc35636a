"""OnZeta: online zero-shot transfer.

Qian and Hu, "Online Zero-Shot Classification with CLIP", ECCV 2024.

Two things are learned along the stream. Dual variables, one per class, raise classes that were predicted too rarely, so
that each gets at least its share. Image proxies start at the prompts and move towards the images that these corrected
predictions assign to them. The answer mixes both, with a weight for the proxies that grows along the stream.

This follows the released code (idstcv/OnZeta befef06). It needs to know how long the stream is, and its one setting is
tuned for ImageNet, 50,000 images of 1000 classes: with few classes its steps are far too long. An image is answered,
then learned.

Ours: the preset `unknown_length`, where the proxies' weight grows with the images per class instead, and the steps are
short enough for few classes. Temperatures are those of a classifier of logit scale 100, as CLIP's; for another encoder
they change in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, at_least, require
from testtime.types import Task

USUAL_TEMPERATURE = 0.01  # of a classifier with a logit scale of 100
HALFWAY = 10  # images per class after which a stream of unknown length counts as half over


class State(NamedTuple):
    image: Tensor  # (C, D) unit image proxies, w
    dual: Tensor  # (C,) dual variables of the classes' shares, rho; 0 or more
    images: Tensor  # () int64, seen so far


@dataclass(frozen=True)
class OnZeta(Base):
    """Online zero-shot transfer. Scores are probabilities, not logits.

    A part is switched off by its own setting: image proxies `mix=0`, dual variables `lr_label=0`.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy(views=1)
    >>> method = OnZeta.released(stream_length=len(stream))
    >>> scores, state = method.scan(task, method.init(task), stream)
    >>> bool((scores.sum(1) - 1).abs().max() < 1e-5), state.images.item()
    (True, 160)
    """

    name: ClassVar[str] = "onzeta"
    summary: ClassVar[str] = (
        "Online zero-shot transfer: balanced labels and image proxies; the stream's length is known"
    )
    source: ClassVar[str] = (
        "Qian and Hu, Online Zero-Shot Classification with CLIP, ECCV 2024; released code idstcv/OnZeta befef06"
    )
    adapts: ClassVar[str] = "both"
    remembers: ClassVar[bool] = True
    gradients: ClassVar[str] = "closed form"
    presets: ClassVar[tuple[str, ...]] = ("released", "unknown_length")
    assumes: ClassVar[tuple[str, ...]] = ("stream length", "class balance")

    stream_length: int = 50_000  # N, images of the whole stream, ImageNet's; 0: unknown (ours)
    tau_text: float = 0.01  # temperature of the text's predictions
    tau_image: float = 0.04  # temperature of the proxies' predictions
    lr_image: float = 0.5  # of the proxies' first step, 0.02 to 0.1 for few classes; falls with the root of the images
    lr_label: float = 20.0  # of the dual variables' first step; for C classes about 20 C / 1000 does as well
    balance: float = 1.0  # alpha: each class's share of the predictions is at least this over C
    mix: float = 0.8  # beta, the proxies' weight at the end of the stream

    @classmethod
    def released(cls, **settings: Any) -> OnZeta:
        """OnZeta as the authors' code has it for ImageNet; give `stream_length` for any other stream."""
        return cls(**settings)

    @classmethod
    def unknown_length(cls, **settings: Any) -> OnZeta:
        """Ours: no stream length, and steps for tens to hundreds of classes."""
        return replace(cls(stream_length=0, lr_image=0.05, lr_label=0.5), **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "stream_length", "lr_image", "lr_label", "balance")
        for name in ("tau_text", "tau_image"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        require(0 <= self.mix <= 1, "mix", self.mix, "must lie in [0, 1]")

    def init(self, task: Task) -> State:
        no_images = torch.zeros((), dtype=torch.int64, device=task.text.device)
        return State(ops.unit(task.text), task.text.new_zeros(task.classes), no_images)

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        clean, images = views[0], state.images + 1
        count = images.to(clean)  # i, from 1
        sharpness = task.scale * USUAL_TEMPERATURE

        # 1. the text's prediction, with rare classes raised, and that of the image proxies
        text = (sharpness / self.tau_text * (task.text @ clean) + state.dual).softmax(0)  # p, (C,)
        image = (sharpness / self.tau_image * (state.image @ clean)).softmax(0)  # q, (C,)

        # 2. predict: a mix in which the proxies gain weight
        weight = self.mix * self._progress(task, count).sqrt()
        scores = weight * image + (1 - weight) * text

        # 3. learn: shares below the bound are raised, and proxies move to what is assigned to them
        falling = count.rsqrt()
        dual = (state.dual - self.lr_label * falling * (text - self.balance / task.classes)).clamp_min(0)
        length = self.lr_image / self.tau_image * falling * (text - image)
        proxies = ops.unit(torch.addr(state.image, length, clean))
        return scores, State(proxies, dual, images)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The scores, which are probabilities already."""
        return logits

    def _progress(self, task: Task, count: Tensor) -> Tensor:
        """How much of the stream has passed: () in [0, 1]."""
        if self.stream_length:
            return (count / self.stream_length).clamp_max(1)
        return count / (count + HALFWAY * task.classes)
