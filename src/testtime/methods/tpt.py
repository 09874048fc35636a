"""TPT and C-TPT: test-time prompt tuning, and tuning that keeps predictions calibrated.

Shu, Nie, Huang, Yu, Goldstein, Anandkumar and Xiao, "Test-Time Prompt Tuning for Zero-Shot Generalization in
Vision-Language Models", NeurIPS 2022.
Yoon, Yoon, Tee, Hasegawa-Johnson, Li and Yoo, "C-TPT: Calibrated Test-Time Prompt Tuning for Vision-Language Models
via Text Feature Dispersion", ICLR 2024.

The vectors of the prompt's first words ("a photo of a") are tuned for the one image at hand, through the text tower,
so that its confident views agree: the entropy of their mean prediction falls. C-TPT also spreads the prototypes of
the classes apart, because predictions from dispersed prototypes are better calibrated. The prompt is reset for each
image, so nothing is remembered.

Departures: selection keeps at least one view, where the released code keeps none of fewer than ten; everything is in
the precision of the features, where the released code mixes half and single precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import require
from testtime.methods.tuning import Tuning
from testtime.text.contexts import at_start
from testtime.types import Context, MissingPart, Task

GROUP = 8  # images of a scan that share the text tower's pass for the untuned prompt


class State(NamedTuple):
    """Nothing is remembered."""


@dataclass(frozen=True)
class TPT(Tuning):
    """Test-time prompt tuning; the defaults are the released settings.

    Needs a task with a text tower: `build_task(..., context=True)`. `scan` tunes `batch` images side by side, each
    its own prompt; logits then agree with those of single steps up to rounding. The text tower's
    output for the initial prompt is computed once per task.

    >>> import testtime as tt
    >>> encoder = tt.load_encoder("tiny")
    >>> task = tt.build_task(encoder, ["cat", "dog", "fox"], context=True)
    >>> views = task.text[:1] + 0.05 * torch.randn(16, task.dim, generator=torch.Generator().manual_seed(0))
    >>> logits, _ = TPT().step(task, State(), tt.ops.unit(views))
    >>> bool(tt.ops.entropy(logits) < tt.ops.entropy(task.zero_shot(tt.ops.unit(views[0]))))
    True
    """

    name: ClassVar[str] = "tpt"
    summary: ClassVar[str] = "Test-time prompt tuning: one step per image on the prompt, through the text tower"
    source: ClassVar[str] = (
        "Shu, Nie, Huang, Yu, Goldstein, Anandkumar and Xiao, Test-Time Prompt Tuning for Zero-Shot Generalization "
        "in Vision-Language Models, NeurIPS 2022"
    )
    assumes: ClassVar[tuple[str, ...]] = ("views",)
    adapts: ClassVar[str] = "text"
    gradients: ClassVar[str] = "autograd"
    needs_tower: ClassVar[bool] = True

    batch: int = 1  # images tuned side by side; only the memory for prototypes grows with it

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.batch >= 1, "batch", self.batch, "must be 1 or more")

    def check(self, task: Task) -> None:
        tower(task, self.name)

    def init(self, task: Task) -> State:
        return State()

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        return self._predict(task, views[None])[0], state

    def scan(self, task: Task, state: State, stream: Tensor) -> tuple[Tensor, State]:
        if len(stream) == 0:
            return stream.new_empty(0, task.classes), state
        return torch.cat([self._predict(task, images) for images in stream.split(max(self.batch, GROUP))]), state

    def tune(self, task: Task, stream: Tensor) -> Tensor:
        """The tuned prompt of each image (B, V, D): (B, n, width)."""
        context = tower(task, self.name)
        # a session runs in inference mode, whose tensors can never have gradients: hence the copies
        with torch.inference_mode(False):
            stream = stream.clone()
            start = at_start(context, stream)  # the same for every image
            tokens = start.tokens.detach().repeat(len(stream), 1, 1)
            # the views are chosen once, with the untuned prompt
            logits = task.scale * stream @ start.text.T  # (B, V, C)
            rows = torch.stack([views[self.select(one)] for views, one in zip(stream, logits, strict=True)])
            moments = None
            for number in range(1, self.steps + 1):
                if number == 1:
                    grad = start.gradients(self._by_text(task, rows, start.text.expand(len(rows), -1, -1)))
                else:
                    pairs = zip(rows.split(self.batch), tokens.split(self.batch), strict=True)
                    grad = torch.cat([self._by_tokens(task, context, *pair) for pair in pairs])
                tokens, moments = self.adam.step(tokens, grad, moments, number)
        return tokens

    def select(self, logits: Tensor) -> Tensor:
        """Indices of the views to learn from, by their logits with the untuned prompt: (V, C) -> (kept,)."""
        return ops.confident(logits, self.selection)

    def loss(self, task: Task, rows: Tensor, text: Tensor) -> Tensor:
        """The tuning objective: entropy of the mean prediction of rows (R, D) by prototypes (C, D)."""
        return ops.marginal_entropy(task.scale * rows @ text.T)

    def _by_text(self, task: Task, rows: Tensor, text: Tensor) -> Tensor:
        """Gradients of images' losses, of rows (B, R, D), by prototypes (B, C, D), each image's own."""
        with torch.enable_grad():
            text = text.detach().clone().requires_grad_()
            losses = [self.loss(task, *image) for image in zip(rows, text, strict=True)]
            # images are independent, so the gradient of the sum holds each one's own
            return torch.autograd.grad(torch.stack(losses).sum(), text)[0]

    def _by_tokens(self, task: Task, context: Context, rows: Tensor, tokens: Tensor) -> Tensor:
        """Gradients of images' losses, of rows (B, R, D), by their tokens (B, n, width)."""
        with torch.enable_grad():
            tokens = tokens.detach().requires_grad_()
            text = context(tokens)  # (B, C, D)
            return torch.autograd.grad(text, tokens, self._by_text(task, rows, text))[0]

    def _predict(self, task: Task, stream: Tensor) -> Tensor:
        """Logits of the clean views of images (B, V, D), each with its tuned prompt: (B, C)."""
        context, tuned = tower(task, self.name), self.tune(task, stream)
        with torch.inference_mode(False), torch.no_grad():
            pairs = zip(stream[:, 0].split(self.batch), tuned.split(self.batch), strict=True)
            logits = [task.scale * (context(tokens) @ clean[..., None])[..., 0] for clean, tokens in pairs]
        return torch.cat(logits)


@dataclass(frozen=True)
class CTPT(TPT):
    """Calibrated test-time prompt tuning: TPT with dispersed prototypes; the defaults are the released settings.

    >>> CTPT().dispersion_weight
    50.0
    """

    name: ClassVar[str] = "ctpt"
    summary: ClassVar[str] = "Calibrated test-time prompt tuning: TPT that also spreads the class prototypes"
    source: ClassVar[str] = (
        "Yoon, Yoon, Tee, Hasegawa-Johnson, Li and Yoo, C-TPT: Calibrated Test-Time Prompt Tuning for "
        "Vision-Language Models via Text Feature Dispersion, ICLR 2024"
    )

    dispersion_weight: float = 50.0  # lambda; the released script for ImageNet's variants has 20

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dispersion_weight >= 0, "dispersion_weight", self.dispersion_weight, "must be 0 or more")

    def loss(self, task: Task, rows: Tensor, text: Tensor) -> Tensor:
        dispersion = (text - text.mean(0)).norm(dim=1).mean()  # mean distance from the centre of all prototypes
        return super().loss(task, rows, text) - self.dispersion_weight * dispersion


def tower(task: Task, method: str) -> Context:
    """The task's differentiable text tower, or an error that says how to get one."""
    if task.context is None:
        raise MissingPart(
            f"Method '{method}' needs the text tower to tune the prompt, and this task has none; most feature "
            "files have none. Run it with an encoder, such as --encoder open_clip:ViT-B-16/openai; in Python, "
            "build_task(encoder, names, context=True)."
        )
    return task.context
