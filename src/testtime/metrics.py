"""Scores: accuracy, macro-F1 and calibration, of a whole stream or of one that comes in chunks.

N images, C classes. `predictions` and `labels` are class indices (N,); `probabilities` are rows that sum to
one, (N, C). Everything is counted in float64, so a result does not depend on the precision of the stream.

Each score is a function of the whole stream, and a class of the same name: its `update` takes the same arguments for a
chunk and returns the score itself, its `compute` gives the value so far. Both give the same value bit for bit, wherever
the stream is split. A score's memory does not grow with the stream, except for the curve of `RunningAccuracy`. Scores
that compare images with one another (`worst_window`, `auroc`, `false_positive_rate`) are functions alone, and so is
`tail_mean`, which summarises several streams.

>>> scores = Scores(classes=2)
>>> for chunk, labels in (([[0.75, 0.25]], [0]), ([[0.5, 0.5], [0.25, 0.75]], [1, 1])):
...     scores = scores.update(torch.tensor(chunk), torch.tensor(labels), seconds=0.5)
>>> scores.compute()["right"], round(scores.compute()["accuracy"], 3), scores.latency.compute()
(2, 0.667, 0.3333333333333333)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from testtime.types import InputError


class Accuracy:
    """Share of correct answers, 0 to 1."""

    def __init__(self) -> None:
        self.right = self.images = 0

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _check_predictions(predictions, labels)
        self.right += int((predictions == labels).sum())
        self.images += len(labels)
        return self

    def compute(self) -> float:
        return self.right / _check_not_empty(self.images)


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Share of correct answers, 0 to 1: (N,), (N,) -> float.

    >>> accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    0.75
    """
    return Accuracy().update(predictions, labels).compute()


class RunningAccuracy:
    """Share of correct answers along the stream; it keeps one byte per image."""

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise InputError(f"window={window}: must be 1 or more, or None for all images so far.")
        self.window = window
        self._right: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _check_predictions(predictions, labels)
        self._right.append(predictions == labels)
        return self

    def compute(self) -> Tensor:
        _check_not_empty(sum(map(len, self._right)))
        right = torch.cat(self._right).long().cumsum(0)  # integers: no rounding error accumulates over a long stream
        seen = torch.arange(1, len(right) + 1, device=right.device)
        if self.window is not None:
            before = torch.zeros_like(right)
            before[self.window :] = right[: -self.window]
            right, seen = right - before, seen.clamp_max(self.window)
        return right.double() / seen


def running_accuracy(predictions: Tensor, labels: Tensor, window: int | None = None) -> Tensor:
    """Share of correct answers up to and including each image, 0 to 1: (N,), (N,) -> (N,) float64.

    With a `window`, the share among the last `window` images only (fewer at the start of the stream).

    >>> running_accuracy(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), window=2).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    return RunningAccuracy(window).update(predictions, labels).compute()


class PerClassAccuracy:
    """Share of each class's images answered correctly."""

    def __init__(self, classes: int) -> None:
        self.images = self.right = torch.zeros(classes, dtype=torch.int64)

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _check_predictions(predictions, labels)
        _check_labels(labels, len(self.images))
        self.images = self.images + _histogram(labels, len(self.images))
        self.right = self.right + _histogram(labels[predictions == labels], len(self.images))
        return self

    def compute(self) -> Tensor:
        _check_not_empty(int(self.images.sum()))
        return self.right.double() / self.images  # 0 / 0 is the documented NaN


def per_class_accuracy(predictions: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Share of each class's images answered correctly, 0 to 1: (N,), (N,) -> (C,) float64.

    NaN marks a class without images.

    >>> per_class_accuracy(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0]), classes=2).tolist()
    [0.6666666666666666, nan]
    """
    return PerClassAccuracy(classes).update(predictions, labels).compute()


class MacroF1:
    """F1 averaged over classes with equal weight."""

    def __init__(self) -> None:
        self._counts = torch.zeros(2, 0, dtype=torch.int64)  # of each class so far: right; seen or predicted

    def update(self, predictions: Tensor, labels: Tensor) -> Self:
        _check_predictions(predictions, labels)
        either = _histogram(torch.cat([labels, predictions]), self._counts.shape[1])
        right = _histogram(labels[predictions == labels], len(either))
        before = torch.nn.functional.pad(self._counts, (0, len(either) - self._counts.shape[1]))
        self._counts = before + torch.stack([right, either])
        return self

    def compute(self) -> float:
        right, either = self._counts[:, self._counts[1] > 0]
        _check_not_empty(len(either))
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
        self.gaps = torch.zeros(bins, dtype=torch.float64)  # sum of confidence minus truth
        self._edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]

    def update(self, probabilities: Tensor, labels: Tensor) -> Self:
        _check_probabilities(probabilities, labels)
        confidences, predictions = probabilities.double().max(-1)
        return self.update_answers(confidences, predictions == labels)

    def update_answers(self, confidences: Tensor, right: Tensor) -> Self:
        """Count answers by their confidence (N,) and whether they are right (N,), without full distributions."""
        confidences, right = confidences.double().cpu(), right.cpu()
        bin_of = torch.bucketize(confidences, self._edges)
        self.images = self.images + _histogram(bin_of, len(self.images))
        self.right = self.right + _histogram(bin_of[right], len(self.images))
        self.gaps.index_add_(0, bin_of, confidences - right.double())
        return self

    def compute(self) -> float:
        return float(self.gaps.abs().sum() / _check_not_empty(int(self.images.sum())))


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
        _check_probabilities(probabilities, labels)
        truth = torch.nn.functional.one_hot(labels, probabilities.shape[1])
        distances = (probabilities.double() - truth).square().sum(-1).cpu()
        # summed sequentially: torch's own sum depends on where the stream is split
        self._sum = torch.cat([self._sum, distances]).cumsum(0)[-1:]
        self.images += len(labels)
        return self

    def compute(self) -> float:
        return float(self._sum) / _check_not_empty(self.images)


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Mean squared distance to the one-hot truth, summed over classes, 0 to 2: (N, C), (N,) -> float.

    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
    0.25
    """
    return Brier().update(probabilities, labels).compute()


def worst_window(values: Tensor, window: int) -> float:
    """The lowest mean of any `window` consecutive values, or of all if there are fewer: (N,) -> float.

    Of correct answers (bool) it is the lowest accuracy; of differences between two methods' answers, the largest loss.

    >>> worst_window(torch.tensor([1, 0, 0, 1]), window=3)
    0.3333333333333333
    """
    if window < 1:
        raise InputError(f"window={window}: must be 1 or more.")
    window = min(window, _check_not_empty(len(values)))
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), values.double().cpu().cumsum(0)])
    return float((sums[window:] - sums[:-window]).min()) / window


def tail_mean(values: Sequence[float], share: float = 0.1) -> float:
    """The mean of the worst (lowest) share of the values, of one at least: what to expect of bad luck.

    >>> tail_mean([0.9, 0.5, 0.8, 0.7, 0.6], share=0.4)
    0.55
    """
    _check_not_empty(len(values))
    worst = sorted(values)[: max(1, math.ceil(share * len(values) - 1e-9))]
    return math.fsum(worst) / len(worst)


def auroc(scores: Tensor, known: Tensor) -> float:
    """How often an image that is `known` (N,) bool scores higher than one that is not, 0 to 1; a tie counts half.

    This is the area under the ROC curve: (N,), (N,) -> float.

    >>> auroc(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([True, True, False, False]))
    0.875
    """
    inside, outside = _both_kinds(scores, known)
    lower, not_higher = (torch.searchsorted(outside, inside, right=right).sum() for right in (False, True))
    return int(lower + not_higher) / (2 * len(inside) * len(outside))


def false_positive_rate(scores: Tensor, known: Tensor, recall: float = 0.95) -> float:
    """Share of unknown images that pass where the threshold lets that share of the known ones (N,) pass, 0 to 1.

    It is called FPR95 at a recall (true positive rate) of 0.95. A score at the threshold passes.

    >>> false_positive_rate(torch.tensor([0.9, 0.4, 0.5, 0.1]), torch.tensor([True, True, False, False]))
    0.5
    """
    inside, outside = _both_kinds(scores, known)
    threshold = inside[len(inside) - math.ceil(recall * len(inside) - 1e-9)]
    return int((outside >= threshold).sum()) / len(outside)


class Latency:
    """Time per image; `seconds` is the total."""

    def __init__(self) -> None:
        self.seconds, self.images = 0.0, 0

    def update(self, seconds: float, images: int = 1) -> Self:
        """Add the time of a chunk of images."""
        self.seconds += seconds
        self.images += images
        return self

    def compute(self) -> float:
        """Mean seconds per image so far."""
        return self.seconds / _check_not_empty(self.images)


class Scores:
    """All scalar scores together, with `per_class` beside them."""

    def __init__(self, classes: int) -> None:
        self.accuracy, self.macro_f1, self.per_class = Accuracy(), MacroF1(), PerClassAccuracy(classes)
        self.calibration_error, self.brier, self.latency = ExpectedCalibrationError(), Brier(), Latency()

    def update(
        self, probabilities: Tensor, labels: Tensor, seconds: float = 0.0, *, predictions: Tensor | None = None
    ) -> Self:
        """Add a chunk of images by their probabilities (N, C), and the seconds they took.

        `predictions` (N,) are the answers if they come from logits, which distinguish classes whose probabilities round
        to the same value.
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


def _histogram(indices: Tensor, classes: int) -> Tensor:
    """How often each index occurs (at least C,), on the CPU."""
    return indices.bincount(minlength=classes).cpu()


def _check_predictions(predictions: Tensor, labels: Tensor) -> None:
    if predictions.shape != labels.shape or labels.ndim != 1:
        raise InputError(
            f"Predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)} must both be (N,), "
            "one class index per image."
        )


def _both_kinds(scores: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of the known and of the unknown images, each in ascending order, in float64."""
    if scores.shape != known.shape or scores.ndim != 1 or known.dtype != torch.bool:
        raise InputError(
            f"Scores {tuple(scores.shape)} and known {tuple(known.shape)} must both be (N,), the second of bool."
        )
    scores, known = scores.double().cpu(), known.cpu()
    if scores.isnan().any():
        raise InputError("A score is NaN; they must be comparable.")
    inside, outside = scores[known].sort().values, scores[~known].sort().values
    if not len(inside) or not len(outside):
        raise InputError(f"{len(inside)} known and {len(outside)} unknown images: at least one of each is needed.")
    return inside, outside


def _check_not_empty(images: int) -> int:
    if not images:
        raise InputError("No images: a score needs at least one.")
    return images


def _check_labels(labels: Tensor, classes: int) -> None:
    if not len(labels):
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(f"Labels run from {low} to {high}; {classes} classes are 0 to {classes - 1}.")


def _check_probabilities(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.ndim != 1 or len(probabilities) != len(labels):
        raise InputError(
            f"Probabilities must be (N, C) and labels (N,); got {tuple(probabilities.shape)} and {tuple(labels.shape)}."
        )
    _check_labels(labels, probabilities.shape[1])
    # half-precision rows sum to one within about 1e-2; logits are nowhere near
    if not torch.allclose(probabilities.double().sum(-1), probabilities.new_ones(1).double(), atol=2e-2):
        raise InputError("Rows of probabilities must sum to one; for logits, take their softmax first.")
