"""How good the answers were: accuracy, macro-F1 and calibration.

N images, C classes. `predictions` and `labels` are class indices (N,); `probabilities` are rows that sum to
one, (N, C). Everything is counted in float64, so a result does not depend on the precision of the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.types import InputError


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Share of right answers, 0 to 1: (N,), (N,) -> float.

    >>> accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    0.75
    """
    _same_length(predictions, labels)
    return float((predictions == labels).double().mean())


def running_accuracy(predictions: Tensor, labels: Tensor, window: int | None = None) -> Tensor:
    """Share of right answers up to and including each image, 0 to 1: (N,), (N,) -> (N,) float64.

    With a `window`, the share among the last `window` images only (fewer at the start of the stream).

    >>> running_accuracy(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), window=2).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    _same_length(predictions, labels)
    if window is not None and window < 1:
        raise InputError(f"window={window}: give one or more, or None for all so far.")
    right = (predictions == labels).long().cumsum(0)  # whole numbers: no error builds up along a long stream
    seen = torch.arange(1, len(right) + 1, device=right.device)
    if window is not None:
        before = torch.zeros_like(right)
        before[window:] = right[:-window]
        right, seen = right - before, seen.clamp_max(window)
    return right.double() / seen


def per_class_accuracy(predictions: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Share of each class's images answered rightly, 0 to 1: (N,), (N,) -> (C,) float64.

    NaN marks a class of which no image was seen.

    >>> per_class_accuracy(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0]), classes=2).tolist()
    [0.6666666666666666, nan]
    """
    _same_length(predictions, labels)
    _in_range(labels, classes)
    images = labels.bincount(minlength=classes)
    right = labels[predictions == labels].bincount(minlength=classes)
    return right.double() / images  # 0 / 0 is the NaN promised


def macro_f1(predictions: Tensor, labels: Tensor) -> float:
    """F1 averaged over classes with equal weight, 0 to 1: (N,), (N,) -> float.

    Classes that are neither seen nor predicted do not count; one that is seen and never hit counts as 0.

    >>> macro_f1(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    0.6666666666666666
    """
    _same_length(predictions, labels)
    classes = int(torch.maximum(predictions.max(), labels.max())) + 1
    right = labels[predictions == labels].bincount(minlength=classes).double()
    either = labels.bincount(minlength=classes) + predictions.bincount(minlength=classes)
    present = either > 0
    return float((2 * right[present] / either[present]).mean())


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 20) -> float:
    """Gap between confidence and accuracy, 0 to 1: (N, C), (N,) -> float.

    Images are put into `bins` bins of equal width by the probability of their top class, a bin's upper edge
    included; the gap of each bin's means is weighted by its share of the images.

    >>> expected_calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    0.25
    """
    _distribution(probabilities, labels)
    if bins < 1:
        raise InputError(f"bins={bins}: at least one bin is needed.")
    confidence, predictions = probabilities.double().max(-1)
    right = (predictions == labels).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    bin_of = torch.bucketize(confidence, edges)
    gaps = confidence.new_zeros(bins).index_add(0, bin_of, confidence - right)
    return float(gaps.abs().sum() / len(labels))


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Mean squared distance to the one-hot truth, summed over classes, 0 to 2: (N, C), (N,) -> float.

    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
    0.25
    """
    _distribution(probabilities, labels)
    truth = torch.nn.functional.one_hot(labels, probabilities.shape[1])
    return float((probabilities.double() - truth).square().sum(-1).mean())


def _same_length(predictions: Tensor, labels: Tensor) -> None:
    if predictions.shape != labels.shape or labels.ndim != 1:
        raise InputError(
            f"Predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)} must both be (N,), "
            "one class index per image."
        )
    if not len(labels):
        raise InputError("No images: a score needs at least one.")


def _in_range(labels: Tensor, classes: int) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(f"Labels run from {low} to {high}; {classes} classes are 0 to {classes - 1}.")


def _distribution(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.ndim != 1 or len(probabilities) != len(labels):
        raise InputError(
            f"Probabilities must be (N, C) and labels (N,); got {tuple(probabilities.shape)} and {tuple(labels.shape)}."
        )
    if not len(labels):
        raise InputError("No images: a score needs at least one.")
    _in_range(labels, probabilities.shape[1])
    # half precision rows sum to one within some 1e-2; logits are nowhere near
    if not torch.allclose(probabilities.double().sum(-1), probabilities.new_ones(1).double(), atol=2e-2):
        raise InputError("Rows of probabilities must sum to one; for logits, take their softmax first.")
