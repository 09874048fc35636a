"""The shared types: tasks, predictions, protocols and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from testtime import display
from testtime.errors import FeatureError as FeatureError
from testtime.errors import ImageError as ImageError
from testtime.errors import InputError as InputError
from testtime.errors import Interrupted as Interrupted
from testtime.errors import MissingPart as MissingPart
from testtime.errors import SettingError as SettingError
from testtime.errors import StateError as StateError
from testtime.errors import TesttimeError as TesttimeError
from testtime.errors import UnknownName as UnknownName
from testtime.stored import StoredImage as StoredImage

if TYPE_CHECKING:
    from PIL.Image import Image

    from testtime.calibration import Calibration


class Context(Protocol):
    """A differentiable function from prompt tokens to prototypes, through the encoder's text tower."""

    @property
    def start(self) -> Tensor:
        """The initial tokens, (n, width): for example those of "a photo of a"."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Unit prototypes of prompts that begin with `tokens`: (n, width) -> (C, D), or (B, n, width) -> (B, C, D).

        The B sets of tokens are independent prompts of all classes. Gradients reach `tokens`, and nothing else.
        """

    def by_class(self, tokens: Tensor) -> Tensor:
        """Unit prototypes where every class has its own tokens: (C, n, width) -> (C, D)."""


@dataclass(frozen=True, eq=False)
class Task:
    """What to classify: class names and their text prototypes.

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
        if self.text.device.type == "mps":
            raise MissingPart(
                "Methods need float64, which Apple's GPUs (mps) lack; put the task on the CPU. Encoders may use mps."
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise FeatureError(f"The logit scale must be a positive number; got {self.scale}.")
        if len(self.classnames) != len(self.text):
            raise FeatureError(f"{len(self.classnames)} class names for {len(self.text)} text prototypes.")
        if len(self.classnames) < 2:
            raise InputError(
                f"One class ({', '.join(self.classnames) or 'none'}) leaves nothing to classify; give two or more."
            )
        if not torch.isfinite(self.text).all():
            raise FeatureError("Text prototypes hold NaN or infinity.")
        if not (self.text.norm(dim=1) > 0).all():
            raise FeatureError("A text prototype is zero; every class needs a direction.")

    def __repr__(self) -> str:
        names, encoder = display.listed(self.classnames), display.line(self.encoder, 30)
        return f"Task({self.classes} classes: {names}; dim {self.dim}{encoder and ', ' + encoder})"

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


UNKNOWN = "unknown"  # the answer for a foreign image, if asked for


@dataclass(frozen=True, slots=True)
class Decision:
    """What the guard decided on one image, and why."""

    index: int  # the image's position in the input
    answer: str  # adapted, blended, frozen or unknown
    refused: str  # why the image taught the method nothing; empty if it was offered to it
    adapted: int  # the class that the method answers
    frozen: int  # the class that the frozen classifier answers
    known: float  # the frozen classifier's confidence: low for images of none of the classes
    trust: float  # weight of adapted answers, 0 to 1
    disagreement: float  # share of recent images whose adapted answer differs from the frozen one
    drift: bool  # whether this image raised the alarm

    @property
    def learned(self) -> bool:
        """Whether the image was offered to the method, which may still find nothing in it to learn."""
        return not self.refused

    @property
    def disputed(self) -> bool:
        """Whether the method and the frozen classifier answer differently."""
        return self.adapted != self.frozen

    def words(self, classnames: Sequence[str]) -> str:
        """The decision for people to read."""
        said = self.answer
        if self.disputed:
            said += f" ({classnames[self.adapted]}, not {classnames[self.frozen]})" if self.answer == "adapted" else ""
            said += f" (not {classnames[self.adapted]})" if self.answer == "frozen" else ""
        parts = [said, *([f"not learned from: {self.refused}"] if self.refused else [])]
        return "; ".join([*parts, *(["alarm: the stream has changed"] if self.drift else [])])


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """One image's answer, beside that of the frozen classifier. A notebook draws it as bars."""

    label: str  # the best class, or "unknown" if a guard says so
    confidence: float  # probability of the best class, 0 to 1
    calibrated: float  # the same, softened to be as sure on average as the frozen classifier
    entropy: float  # of the predicted distribution, in nats
    zero_shot: str
    zero_shot_confidence: float
    learned: bool  # whether this image changed the method's memory
    index: int  # of `label` in the task's class names
    zero_shot_index: int
    logits: Tensor  # (C,), on the CPU
    probabilities: Tensor  # (C,), on the CPU
    classnames: tuple[str, ...]  # those of the task
    decision: Decision | None = None  # the guard's, if there is one

    def __repr__(self) -> str:
        answer, frozen = (display.line(name, 32) for name in (self.label, self.zero_shot))
        return (
            f"Prediction({answer} {self.confidence:.1%}, zero-shot {frozen} {self.zero_shot_confidence:.1%}"
            f"{', learned' * self.learned})"
        )

    def _repr_html_(self) -> str:
        frozen = f"zero-shot: {display.safe(self.zero_shot)} {self.zero_shot_confidence:.1%}"
        learned = "learned from" if self.learned else "not learned from"
        bars = display.bars(self.top())
        return f"<div><b>{display.safe(self.label)}</b> ({frozen}; {learned}){bars}</div>"

    def is_right(self, label: int) -> bool:
        """Whether the answer is the class of that index; "unknown" is not."""
        return self.index == label and not (self.decision and self.decision.answer == UNKNOWN)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most probable classes, each with its probability, the best first."""
        best = self.probabilities.topk(min(count, len(self.probabilities)))
        names = [self.classnames[index] for index in best.indices.tolist()]
        return list(zip(names, best.values.tolist(), strict=True))

    @classmethod
    def of(
        cls,
        task: Task,
        method: Method,
        numbers: Tensor,
        shares: Tensor,
        first: int,
        calibration: Calibration,
        decisions: Sequence[Decision | None],
    ) -> list[Prediction]:
        """The answers whose `Summaries` are given: numbers (N, 14), and logits beside probabilities (N, 2, A).

        Those that are not finite are refused; `first` is the position in the input of the first image. `calibration` is
        that of the stream, and moves on by these images.
        """
        rows = numbers.tolist()
        for index, (finite, *_) in enumerate(rows, first):
            if not finite:
                raise not_finite(method, index)
        calibrated = calibration.follow([row[7:] for row in rows])
        parts = zip(rows, calibrated, *(each.unbind() for each in shares.unbind(1)), decisions, strict=True)
        found = []
        for row, soft, logits, probabilities, decision in parts:
            _, learned, best, frozen, confidence, frozen_confidence, entropy = row[:7]
            index, zero_shot_index = int(best), int(frozen)
            found.append(
                cls(
                    label=_label(task, index, decision),
                    confidence=confidence,
                    calibrated=soft,
                    entropy=entropy or 0.0,
                    zero_shot=task.classnames[zero_shot_index],
                    zero_shot_confidence=frozen_confidence,
                    learned=bool(learned),
                    index=index,
                    zero_shot_index=zero_shot_index,
                    logits=logits,
                    probabilities=probabilities,
                    classnames=task.classnames,
                    decision=decision,
                )
            )
        return found


def _label(task: Task, index: int, decision: Decision | None) -> str:
    return UNKNOWN if decision is not None and decision.answer == UNKNOWN else task.classnames[index]


def log_of(probabilities: Tensor) -> Tensor:
    """Logarithms, finite for a probability of zero too."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def check_finite(method: Method, rows: Tensor, first: int) -> None:
    """Refuse answers (N, ...) that hold NaN or infinity; `first` is the position in the input of the first image."""
    if not (finite := torch.isfinite(rows)).all():
        raise not_finite(method, first + int((~finite).any(1).nonzero()[0]))


def not_finite(method: Method, image: int) -> InputError:
    """What to say of an answer that is not finite."""
    return InputError(
        f"Method '{method.name}' gives NaN or infinity for image {image}. Use settings and a logit scale of "
        "moderate size, and start again or resume from an earlier saved state."
    )


@dataclass(frozen=True)
class Preprocess:
    """How a model's images are preprocessed; the clean view is made exactly like this."""

    size: int = 224  # side of the square that the model sees
    resize: int = 224  # what the image is scaled to before the centre crop
    mode: Literal["shortest", "squash"] = "shortest"  # the shortest side becomes `resize`, or both do
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        if self.size < 1 or self.resize < 1:
            raise InputError(f"Image sides must be 1 or more; got size={self.size}, resize={self.resize}.")
        if self.mode not in ("shortest", "squash"):
            raise InputError(f"Unknown resize mode {self.mode!r}. Available: shortest, squash.")
        if self.interpolation not in ("bicubic", "bilinear"):
            raise InputError(f"Unknown interpolation {self.interpolation!r}. Available: bicubic, bilinear.")
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            raise InputError(f"Expected 3 means and 3 positive standard deviations; got {self.mean}, {self.std}.")


class Variations(Protocol):
    """A source of variations of an image."""

    def __call__(self, image: Image, count: int, seed: int) -> list[Image]:
        """`count` RGB images with the content of `image`; the same arguments give the same images."""


MAX_VIEWS = 10_000  # 6 GB of pixels at 224 a side


@dataclass(frozen=True)
class ViewPlan:
    """Which views an image gets: itself, `count - 1` random crops, and with `variations` as many of those.

    Views depend only on the image, the seed and the image's index in the input.
    """

    count: int = 1
    augmix: bool = False
    seed: int = 0
    variations: Variations | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"views={self.count}: must be 1 or more, since the image itself counts.")
        if self.count > MAX_VIEWS:
            raise InputError(f"views={self.count}: must be {MAX_VIEWS:,} or less, to fit in memory.")

    @property
    def total(self) -> int:
        """The total number of views."""
        return self.count if self.variations is None else 2 * self.count - 1

    def metadata(self) -> dict[str, str]:
        """Metadata of the variations; empty if there are none."""
        return {} if self.variations is None else {"variations": getattr(self.variations, "name", "own")}


@runtime_checkable
class Encoder(Protocol):
    """Turns images and texts into unit features of one shared space."""

    @property
    def name(self) -> str:
        """The name under which `load_encoder` loads this encoder again."""

    @property
    def dim(self) -> int:
        """D, the size of a feature."""

    @property
    def device(self) -> torch.device:
        """The device it runs on."""

    @property
    def scale(self) -> float:
        """The logit scale that the model was trained with."""

    @property
    def preprocess(self) -> Preprocess:
        """How the model's images are preprocessed: size, resampling, mean and standard deviation."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit features of preprocessed images: (B, 3, H, W) -> (B, D) float32, on the encoder's device.

        Called from several threads at once.
        """

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of sentences: n texts -> (n, D) float32, on the encoder's device."""


@runtime_checkable
class DeviceEncoder(Encoder, Protocol):
    """An encoder that exposes its image tower: on a GPU it is captured in a CUDA graph, after views made there too."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision that it computes in."""

    def image_tower(self) -> Callable[[Tensor], Tensor]:
        """A function from normalised pixels (B, 3, H, W) in that precision to features (B, D), not yet unit rows.

        Tensors in, a tensor out, no synchronisation: it is captured in a CUDA graph. It may change the weights' layout.
        """


@runtime_checkable
class PromptEncoder(Encoder, Protocol):
    """An encoder that computes prototypes from prompt tokens, for prompt tuning."""

    def soft_prompts(self, classnames: Sequence[str], words: str, chunk: int) -> Context:
        """The context of these classes, starting from `words`; the text tower takes `chunk` classes at a time."""


class Method(Protocol):
    """What a method promises; `testtime.checks` verifies it.

    A method is a frozen dataclass of plain settings with pure functions. `methods.base.Base` supplies
    `scan`, `learned`, `probabilities` and `check`.
    """

    @property
    def name(self) -> str:
        """The method's name."""

    def init(self, task: Task) -> Any:
        """The state before the first image: a NamedTuple of tensors of fixed shape."""

    def step(self, task: Task, state: Any, views: Tensor) -> tuple[Tensor, Any]:
        """Logits (C,) and the next state for one image's unit views (V, D); `state` is left as it was."""

    def scan(self, task: Task, state: Any, stream: Tensor) -> tuple[Tensor, Any]:
        """Logits (N, C) and the state after the last of N images (N, V, D).

        As single steps, but a method whose `reads_ahead` is above 1 reads so many images before it answers the first.
        """

    def learned(self, before: Any, after: Any) -> Tensor | bool:
        """Whether the step from `before` to `after` changed what later images will see: () bool.

        A tensor on the state's device, which avoids a GPU synchronisation.
        """

    def probabilities(self, logits: Tensor) -> Tensor:
        """The method's scores as a distribution over classes: (..., C) -> (..., C)."""

    def check(self, task: Task) -> None:
        """Raise MissingPart, before the stream starts, if the task lacks what the method needs."""
