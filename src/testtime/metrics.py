"""How good the answers were: accuracy, macro-F1 and calibration, of a whole stream or of one that comes in chunks.

N images, C classes. `predictions` and `labels` are class indices (N,); `probabilities` are rows that sum to
one, (N, C). Everything is counted in float64, so a result does not depend on the precision of the stream.

Each score is a function of the whole stream, and a class of the same name: its `update` takes the same of a chunk and
returns the score itself, its `compute` gives the number so far. Both give the same number to the last bit, wherever the
stream is cut. What a score keeps does not grow with the stream, but for the curve of `RunningAccuracy`, by nature.

>>> scores = Scores(classes=2)
>>> for chunk, labels in (([[0.75, 0.25]], [0]), ([[0.5, 0.5], [0.25, 0.75]], [1, 1])):
...     scores = scores.update(torch.tensor(chunk), torch.tensor(labels), seconds=0.5)
>>> scores.compute()["right"], round(scores.compute()["accuracy"], 3), scores.latency.compute()
(2, 0.667, 0.3333333333333333)
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from testtime.types import InputError


class Accuracy:
    """Share of right answers, 0 to 1."""

    def __init__(self) -> None:
        self.right = self.images = 0

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _same_length(predictions, labels)
        self.right += int((predictions == labels).sum())
        self.images += len(labels)
        return self

    def compute(self) -> float:
        return self.right / _some(self.images)


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Share of right answers, 0 to 1: (N,), (N,) -> float.

    >>> accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    0.75
    """
    return Accuracy().update(predictions, labels).compute()


class RunningAccuracy:
    """Share of right answers along the stream: a byte is kept for each image."""

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise InputError(f"window={window}: give one or more, or None for all so far.")
        self.window = window
        self._right: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _same_length(predictions, labels)
        self._right.append(predictions == labels)
        return self

    def compute(self) -> Tensor:
        _some(sum(map(len, self._right)))
        right = torch.cat(self._right).long().cumsum(0)  # whole numbers: no error builds up along a long stream
        seen = torch.arange(1, len(right) + 1, device=right.device)
        if self.window is not None:
            before = torch.zeros_like(right)
            before[self.window :] = right[: -self.window]
            right, seen = right - before, seen.clamp_max(self.window)
        return right.double() / seen


def running_accuracy(predictions: Tensor, labels: Tensor, window: int | None = None) -> Tensor:
    """Share of right answers up to and including each image, 0 to 1: (N,), (N,) -> (N,) float64.

    With a `window`, the share among the last `window` images only (fewer at the start of the stream).

    >>> running_accuracy(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), window=2).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    return RunningAccuracy(window).update(predictions, labels).compute()


class PerClassAccuracy:
    """Share of each class's images answered rightly."""

    def __init__(self, classes: int) -> None:
        self.images = self.right = torch.zeros(classes, dtype=torch.int64)

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _same_length(predictions, labels)
        _in_range(labels, len(self.images))
        self.images = self.images + _by_class(labels, len(self.images))
        self.right = self.right + _by_class(labels[predictions == labels], len(self.images))
        return self

    def compute(self) -> Tensor:
        _some(int(self.images.sum()))
        return self.right.double() / self.images  # 0 / 0 is the NaN promised


def per_class_accuracy(predictions: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Share of each class's images answered rightly, 0 to 1: (N,), (N,) -> (C,) float64.

    NaN marks a class of which no image was seen.

    >>> per_class_accuracy(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0]), classes=2).tolist()
    [0.6666666666666666, nan]
    """
    return PerClassAccuracy(classes).update(predictions, labels).compute()


class MacroF1:
    """F1 averaged over classes with equal weight."""

    def __init__(self) -> None:
        self._counts = torch.zeros(2, 0, dtype=torch.int64)  # of each class that has come up: right; seen or answered

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _same_length(predictions, labels)
        either = _by_class(torch.cat([labels, predictions]), self._counts.shape[1])
        right = _by_class(labels[predictions == labels], len(either))
        before = torch.nn.functional.pad(self._counts, (0, len(either) - self._counts.shape[1]))
        self._counts = before + torch.stack([right, either])
        return self

    def compute(self) -> float:
        right, either = self._counts[:, self._counts[1] > 0]
        _some(len(either))
        return float((2 * right.double() / either).mean())


def macro_f1(predictions: Tensor, labels: Tensor) -> float:
    """F1 averaged over classes with equal weight, 0 to 1: (N,), (N,) -> float.

    Classes that are neither seen nor predicted do not count; one that is seen and never hit counts as 0.

    >>> macro_f1(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    0.6666666666666666
    """
    return MacroF1().update(predictions, labels).compute()


class ExpectedCalibrationError:
    """Gap between confidence and accuracy, in `bins` bins of equal width; `images` and `right` count each bin's."""

    def __init__(self, bins: int = 20) -> None:
        if bins < 1:
            raise InputError(f"bins={bins}: at least one bin is needed.")
        self.images = self.right = torch.zeros(bins, dtype=torch.int64)
        self.gaps = torch.zeros(bins, dtype=torch.float64)  # confidence less truth, summed
        self._edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]

    def update(self, probabilities: Tensor, labels: Tensor) -> Self:
        _distribution(probabilities, labels)
        confidences, predictions = probabilities.double().max(-1)
        return self.update_answers(confidences, predictions == labels)

    def update_answers(self, confidences: Tensor, right: Tensor) -> Self:
        """Count answers by their confidence (N,) and whether they are right (N,), where no more is known of them."""
        confidences, right = confidences.double().cpu(), right.cpu()
        bin_of = torch.bucketize(confidences, self._edges)
        self.images = self.images + _by_class(bin_of, len(self.images))
        self.right = self.right + _by_class(bin_of[right], len(self.images))
        self.gaps.index_add_(0, bin_of, confidences - right.double())
        return self

    def compute(self) -> float:
        return float(self.gaps.abs().sum() / _some(int(self.images.sum())))


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 20) -> float:
    """Gap between confidence and accuracy, 0 to 1: (N, C), (N,) -> float.

    Images are put into `bins` bins of equal width by the probability of their top class, a bin's upper edge
    included; the gap of each bin's means is weighted by its share of the images.

    >>> expected_calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    0.25
    """
    return ExpectedCalibrationError(bins).update(probabilities, labels).compute()


class Brier:
    """Mean squared distance to the one-hot truth, summed over classes."""

    def __init__(self) -> None:
        self.images, self._sum = 0, torch.zeros(1, dtype=torch.float64)

    def update(self, probabilities: Tensor, labels: Tensor) -> Self:
        _distribution(probabilities, labels)
        truth = torch.nn.functional.one_hot(labels, probabilities.shape[1])
        distances = (probabilities.double() - truth).square().sum(-1).cpu()
        # one after another: a sum that torch takes at once depends on where the stream is cut
        self._sum = torch.cat([self._sum, distances]).cumsum(0)[-1:]
        self.images += len(labels)
        return self

    def compute(self) -> float:
        return float(self._sum) / _some(self.images)


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Mean squared distance to the one-hot truth, summed over classes, 0 to 2: (N, C), (N,) -> float.

    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
    0.25
    """
    return Brier().update(probabilities, labels).compute()


class Latency:
    """Time per image; `seconds` in all."""

    def __init__(self) -> None:
        self.seconds, self.images = 0.0, 0

    def update(self, seconds: float, images: int = 1) -> Self:
        """Add what a chunk of images took."""
        self.seconds += seconds
        self.images += images
        return self

    def compute(self) -> float:
        """Mean seconds per image so far."""
        return self.seconds / _some(self.images)


class Scores:
    """Every score that is one number, together; `per_class` beside them."""

    def __init__(self, classes: int) -> None:
        self.accuracy, self.macro_f1, self.per_class = Accuracy(), MacroF1(), PerClassAccuracy(classes)
        self.calibration_error, self.brier, self.latency = ExpectedCalibrationError(), Brier(), Latency()

    def update(
        self, probabilities: Tensor, labels: Tensor, seconds: float = 0.0, *, predictions: Tensor | None = None
    ) -> Self:
        """Add a chunk of images by their probabilities (N, C), and the seconds they took.

        `predictions` (N,) are the answers where they come from logits, which tell classes apart that probabilities
        may round to the same.
        """
        predictions = probabilities.argmax(-1) if predictions is None else predictions
        for by_answer in (self.accuracy, self.macro_f1, self.per_class):
            by_answer.update(predictions, labels)
        for by_probability in (self.calibration_error, self.brier):
            by_probability.update(probabilities, labels)
        self.latency.update(seconds, len(labels))
        return self

    def compute(self) -> dict[str, float]:
        """The scores so far, and the seconds of the whole stream."""
        return {
            "images": self.accuracy.images,
            "right": self.accuracy.right,
            "accuracy": self.accuracy.compute(),
            "macro_f1": self.macro_f1.compute(),
            "calibration_error": self.calibration_error.compute(),
            "brier": self.brier.compute(),
            "seconds": self.latency.seconds,
        }


def _by_class(indices: Tensor, classes: int) -> Tensor:
    """How often each index comes up (at least C,), on the CPU."""
    return indices.bincount(minlength=classes).cpu()


def _same_length(predictions: Tensor, labels: Tensor) -> None:
    if predictions.shape != labels.shape or labels.ndim != 1:
        raise InputError(
            f"Predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)} must both be (N,), "
            "one class index per image."
        )


def _some(images: int) -> int:
    if not images:
        raise InputError("No images: a score needs at least one.")
    return images


def _in_range(labels: Tensor, classes: int) -> None:
    if not len(labels):
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(f"Labels run from {low} to {high}; {classes} classes are 0 to {classes - 1}.")


def _distribution(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.ndim != 1 or len(probabilities) != len(labels):
        raise InputError(
            f"Probabilities must be (N, C) and labels (N,); got {tuple(probabilities.shape)} and {tuple(labels.shape)}."
        )
    _in_range(labels, probabilities.shape[1])
    # half precision rows sum to one within some 1e-2; logits are nowhere near
    if not torch.allclose(probabilities.double().sum(-1), probabilities.new_ones(1).double(), atol=2e-2):
        raise InputError("Rows of probabilities must sum to one; for logits, take their softmax first.")
