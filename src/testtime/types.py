"""The words everything else is written in: tasks, predictions, protocols and errors.

The error tree:

    TesttimeError            something failed while working (exit code 1)
    ├── Interrupted          stopped by Ctrl-C (exit code 130)
    └── InputError           the input or the options are wrong (exit code 2)
        ├── UnknownName      no method, encoder, dataset or setting of that name
        ├── SettingError     a setting's value is out of its range
        ├── FeatureError     features or a feature file that cannot be used
        ├── ImageError       an image that cannot be read
        ├── StateError       a saved session that does not fit
        └── MissingPart      an extra, a checkpoint or a capability that is not there
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from testtime.views import Preprocess


class TesttimeError(Exception):
    """Something failed while working."""

    exit_code = 1


class Interrupted(TesttimeError):
    """Stopped by Ctrl-C; the message says what is kept and how to go on."""

    exit_code = 130


class InputError(TesttimeError):
    """The input or the options are wrong; the message names the value and the way out."""

    exit_code = 2


class UnknownName(InputError):
    """No method, encoder, dataset or setting of that name."""


class SettingError(InputError):
    """A setting's value is out of its range."""


class FeatureError(InputError):
    """Features, or a feature file, that cannot be used."""


class ImageError(InputError):
    """An image that cannot be read."""


class StateError(InputError):
    """A saved session that does not fit this task, or cannot be read."""


class MissingPart(InputError):
    """An extra, a checkpoint or a capability that is not there."""


@runtime_checkable
class StoredImage(Protocol):
    """An image that is no file of its own: a member of an archive, a row of a table. A Path is one too.

    Its `str()` names it, always the same, as a path does.
    """

    def read_bytes(self) -> bytes:
        """The image file's bytes."""


class Context(Protocol):
    """A differentiable way from prompt tokens to prototypes, through the encoder's text tower."""

    @property
    def start(self) -> Tensor:
        """The tokens to start from, (n, width): those of "a photo of a", say."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Unit prototypes of prompts that begin with `tokens`: (n, width) -> (C, D), or (B, n, width) -> (B, C, D).

        The B sets of tokens are independent prompts of all classes. Gradients reach `tokens`, and nothing else.
        """

    def by_class(self, tokens: Tensor) -> Tensor:
        """Unit prototypes where every class has tokens of its own: (C, n, width) -> (C, D)."""


@dataclass(frozen=True, eq=False)
class Task:
    """What to tell apart: class names and their text prototypes.

    `text` is (C, D), one row per class, unit rows. Its dtype and device are those of the whole computation.
    `scale` is the logit scale: logits are `scale * cosine`. `context`, where the encoder offers one, is a
    differentiable function from prompt tokens to prototypes; only prompt tuning needs it.

    >>> import torch
    >>> task = Task(torch.eye(3), ("cat", "dog", "fox"))
    >>> task.classes, task.dim, task.classnames[2]
    (3, 3, 'fox')
    """

    text: Tensor
    classnames: tuple[str, ...]
    scale: float = 100.0
    encoder: str = ""
    context: Context | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.text.ndim != 2:
            raise FeatureError(f"Text prototypes must be (C, D), one row per class; got {tuple(self.text.shape)}.")
        if self.text.dtype not in (torch.float32, torch.float64):
            raise FeatureError(f"Text prototypes must be float32 or float64 to adapt; got {self.text.dtype}.")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise FeatureError(f"The logit scale must be a positive number; got {self.scale}.")
        if len(self.classnames) != len(self.text):
            raise FeatureError(f"{len(self.classnames)} class names for {len(self.text)} text prototypes.")
        if len(self.classnames) < 2:
            raise InputError(
                f"One class ({', '.join(self.classnames) or 'none'}) leaves nothing to tell apart; give two or more."
            )
        if not torch.isfinite(self.text).all():
            raise FeatureError("Text prototypes hold NaN or infinity.")
        if not (self.text.norm(dim=1) > 0).all():
            raise FeatureError("A text prototype is zero; every class needs a direction.")

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return self.text.shape[0]

    @property
    def dim(self) -> int:
        """D, the size of a feature."""
        return self.text.shape[1]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Task:
        """The same task on another device or in another precision. Rows are not renormalised."""
        return replace(self, text=self.text.to(device=device, dtype=dtype))

    def zero_shot(self, views: Tensor) -> Tensor:
        """Logits of the frozen classifier: (..., D) -> (..., C)."""
        return self.scale * (views @ self.text.T)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """One image's answer, beside what the frozen classifier would have said."""

    label: str
    confidence: float  # probability of `label`, 0 to 1
    entropy: float  # of the predicted distribution, in nats
    zero_shot: str
    zero_shot_confidence: float
    learned: bool  # whether this image changed the method's memory
    index: int  # of `label` in the task's class names
    zero_shot_index: int
    logits: Tensor  # (C,)


@runtime_checkable
class Encoder(Protocol):
    """Turns images and texts into unit features of one shared space."""

    @property
    def name(self) -> str:
        """What `load_encoder` takes to make this encoder again."""

    @property
    def dim(self) -> int:
        """D, the size of a feature."""

    @property
    def scale(self) -> float:
        """The logit scale that the model was trained with."""

    @property
    def preprocess(self) -> Preprocess:
        """How the model wants its images: size, resampling, mean and deviation."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit features of preprocessed images: (B, 3, H, W) -> (B, D) float32, on the encoder's device."""

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of sentences: n texts -> (n, D) float32, on the encoder's device."""


class Method(Protocol):
    """What a method promises; `testtime.checks` holds it to that.

    A method is a frozen dataclass of plain settings with pure functions. `methods.base.Base` supplies
    `scan`, `learned`, `probabilities` and `check`.
    """

    name: str

    def init(self, task: Task) -> Any:
        """The state before the first image: a NamedTuple of tensors of fixed shape."""

    def step(self, task: Task, state: Any, views: Tensor) -> tuple[Tensor, Any]:
        """Logits (C,) and the next state for one image's unit views (V, D); `state` is left as it was."""

    def scan(self, task: Task, state: Any, stream: Tensor) -> tuple[Tensor, Any]:
        """Logits (N, C) and the state after the last of N images (N, V, D)."""

    def learned(self, before: Any, after: Any) -> bool:
        """Whether the step from `before` to `after` changed what later images will meet."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """The method's scores as a distribution over classes: (..., C) -> (..., C)."""

    def check(self, task: Task) -> None:
        """Raise MissingPart, before the stream starts, if the task lacks what the method needs."""
