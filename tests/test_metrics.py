"""Scores against brute force in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from testtime import metrics
from testtime.types import InputError

CLASSES = 7


@pytest.fixture(params=range(4))
def answers(request):
    """Probabilities (N, C), predictions (N,) and labels (N,); class 6 never occurs as a label."""
    noise = torch.Generator().manual_seed(request.param)
    labels = torch.randint(CLASSES - 1, (83,), generator=noise)
    logits = 2 * torch.randn(83, CLASSES, generator=noise, dtype=torch.float64)
    logits[torch.arange(83), labels] += 2
    probabilities = logits.softmax(-1)
    return probabilities, probabilities.argmax(-1), labels


def test_accuracy_counts_hits(answers):
    _, predictions, labels = answers
    hits = [p == y for p, y in zip(predictions.tolist(), labels.tolist(), strict=True)]
    assert metrics.accuracy(predictions, labels) == pytest.approx(sum(hits) / len(hits), abs=1e-15)


@pytest.mark.parametrize("window", [None, 1, 10, 83, 500])
def test_running_accuracy_is_the_mean_of_what_went_before(answers, window):
    _, predictions, labels = answers
    hits = [float(p == y) for p, y in zip(predictions.tolist(), labels.tolist(), strict=True)]
    running = metrics.running_accuracy(predictions, labels, window)
    assert running.shape == labels.shape
    for index, value in enumerate(running.tolist()):
        recent = hits[: index + 1] if window is None else hits[: index + 1][-window:]
        assert value == pytest.approx(sum(recent) / len(recent), abs=1e-15)


def test_running_accuracy_ends_at_the_accuracy(answers):
    _, predictions, labels = answers
    assert metrics.running_accuracy(predictions, labels)[-1] == metrics.accuracy(predictions, labels)


def test_per_class_accuracy_marks_absent_classes(answers):
    _, predictions, labels = answers
    scores = metrics.per_class_accuracy(predictions, labels, CLASSES).tolist()
    for label, score in enumerate(scores):
        hits = [p == label for p, y in zip(predictions.tolist(), labels.tolist(), strict=True) if y == label]
        assert score == pytest.approx(sum(hits) / len(hits)) if hits else math.isnan(score)
    assert math.isnan(scores[-1])


def test_macro_f1_is_the_mean_of_precision_and_recall(answers):
    _, predictions, labels = answers
    pairs = list(zip(predictions.tolist(), labels.tolist(), strict=True))
    scores = []
    for label in {x for pair in pairs for x in pair}:
        right = sum(p == y == label for p, y in pairs)
        predicted, seen = sum(p == label for p, _ in pairs), sum(y == label for _, y in pairs)
        precision, recall = right / predicted if predicted else 0, right / seen if seen else 0
        scores.append(2 * precision * recall / (precision + recall) if right else 0)
    assert metrics.macro_f1(predictions, labels) == pytest.approx(sum(scores) / len(scores), abs=1e-14)


@pytest.mark.parametrize("bins", [1, 10, 20])
def test_calibration_error_is_the_weighted_gap_of_bins(answers, bins):
    probabilities, _, labels = answers
    rows, error = probabilities.tolist(), 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = [(row, y) for row, y in zip(rows, labels.tolist(), strict=True) if low < max(row) <= high]
        if inside:
            confidence = sum(max(row) for row, _ in inside) / len(inside)
            right = sum(row.index(max(row)) == y for row, y in inside) / len(inside)
            error += len(inside) / len(rows) * abs(confidence - right)
    assert metrics.expected_calibration_error(probabilities, labels, bins) == pytest.approx(error, abs=1e-12)


def test_certain_and_right_is_perfectly_calibrated():
    labels = torch.tensor([0, 1, 2])
    assert metrics.expected_calibration_error(torch.eye(3), labels) == 0
    assert metrics.expected_calibration_error(torch.eye(3), labels.flip(0)) == pytest.approx(2 / 3)


def test_brier_sums_squares_over_classes(answers):
    probabilities, _, labels = answers
    total = sum(
        (p - (c == y)) ** 2
        for row, y in zip(probabilities.tolist(), labels.tolist(), strict=True)
        for c, p in enumerate(row)
    )
    assert metrics.brier(probabilities, labels) == pytest.approx(total / len(labels), abs=1e-13)
    assert metrics.brier(torch.eye(2), torch.tensor([1, 0])) == 2


def test_half_precision_is_counted_in_double():
    noise = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (50,), generator=noise)
    probabilities = torch.randn(50, CLASSES, generator=noise).softmax(-1).half()
    assert metrics.brier(probabilities, labels) == metrics.brier(probabilities.double(), labels)


# in chunks

BY_ANSWER = {
    "accuracy": (metrics.Accuracy, metrics.accuracy),
    "running accuracy": (metrics.RunningAccuracy, metrics.running_accuracy),
    "recent accuracy": (
        lambda: metrics.RunningAccuracy(9),
        lambda predictions, labels: metrics.running_accuracy(predictions, labels, 9),
    ),
    "per class": (
        lambda: metrics.PerClassAccuracy(1000),
        lambda predictions, labels: metrics.per_class_accuracy(predictions, labels, 1000),
    ),
    "macro-F1": (metrics.MacroF1, metrics.macro_f1),
}
BY_PROBABILITY = {
    "calibration error": (metrics.ExpectedCalibrationError, metrics.expected_calibration_error),
    "brier": (metrics.Brier, metrics.brier),
}


def stream(classes: int, dtype: torch.dtype, images: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (N, C) and labels (N,)."""
    noise = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (images,), generator=noise)
    logits = torch.randn(images, classes, generator=noise, dtype=torch.float64)
    logits[torch.arange(images), labels] += 3
    return logits.to(dtype).softmax(-1), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 7, 100, 1000])
@pytest.mark.parametrize("size", [1, 3, 64, 499, 500])
def test_a_stream_in_chunks_has_the_score_of_the_whole_to_the_last_bit(classes, dtype, size):
    probabilities, labels = stream(classes, dtype)
    predictions = probabilities.argmax(-1)
    for table, given in ((BY_ANSWER, predictions), (BY_PROBABILITY, probabilities)):
        for name, (score, whole) in table.items():
            made = score()
            for chunk, truth in zip(given.split(size), labels.split(size), strict=True):
                made.update(chunk, truth)
            found, expected = torch.as_tensor(made.compute()), torch.as_tensor(whole(given, labels))
            assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1)), name


def test_a_score_of_nothing_is_refused_and_an_empty_chunk_changes_nothing():
    probabilities, labels = stream(7, torch.float64, images=20)
    predictions = probabilities.argmax(-1)
    for table, given in ((BY_ANSWER, predictions), (BY_PROBABILITY, probabilities)):
        for score, whole in table.values():
            made = score().update(given[:0], labels[:0])
            with pytest.raises(InputError, match="No images"):
                made.compute()
            found = made.update(given, labels).update(given[:0], labels[:0]).compute()
            expected = torch.as_tensor(whole(given, labels))
            assert torch.equal(torch.as_tensor(found).nan_to_num(-1), expected.nan_to_num(-1))
    with pytest.raises(InputError, match="No images"):
        metrics.Latency().update(1.0, 0).compute()


def test_all_scores_together_are_those_of_the_functions():
    probabilities, labels = stream(7, torch.float32)
    scores = metrics.Scores(7)
    for chunk, truth in zip(probabilities.split(33), labels.split(33), strict=True):
        scores.update(chunk, truth, seconds=0.25)
    predictions = probabilities.argmax(-1)
    assert scores.compute() == {
        "images": 500,
        "right": int((predictions == labels).sum()),
        "accuracy": metrics.accuracy(predictions, labels),
        "macro_f1": metrics.macro_f1(predictions, labels),
        "calibration_error": metrics.expected_calibration_error(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "seconds": 4.0,
    }
    assert torch.equal(scores.per_class.compute(), metrics.per_class_accuracy(predictions, labels, 7))
    assert scores.latency.compute() == 4.0 / 500


def test_answers_may_come_from_what_probabilities_are_too_coarse_for():
    probabilities, labels = torch.tensor([[0.5, 0.5]]), torch.tensor([1])
    assert metrics.Scores(2).update(probabilities, labels).compute()["right"] == 0
    assert metrics.Scores(2).update(probabilities, labels, predictions=torch.tensor([1])).compute()["right"] == 1


def test_bins_count_their_images_and_what_is_right():
    made = metrics.ExpectedCalibrationError(2)
    made.update_answers(torch.tensor([0.25, 0.5, 0.75, 1.0]), torch.tensor([True, False, True, False]))
    assert made.images.tolist() == [2, 2] and made.right.tolist() == [1, 1]
    assert made.gaps.tolist() == [-0.25, 0.75] and made.compute() == 0.25


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.accuracy(torch.zeros(2), torch.zeros(3)), "must both be"),
        (lambda: metrics.accuracy(torch.zeros(0), torch.zeros(0)), "No images"),
        (lambda: metrics.running_accuracy(torch.zeros(2), torch.zeros(2), window=0), "window=0"),
        (lambda: metrics.per_class_accuracy(torch.tensor([0]), torch.tensor([5]), 3), "3 classes are 0 to 2"),
        (lambda: metrics.brier(torch.eye(3), torch.tensor([0, 1])), "must be"),
        (lambda: metrics.brier(torch.eye(2), torch.tensor([0, 2])), "2 classes"),
        (lambda: metrics.expected_calibration_error(5 * torch.eye(2), torch.tensor([0, 1])), "softmax"),
        (lambda: metrics.expected_calibration_error(torch.eye(2), torch.tensor([0, 1]), bins=0), "bins=0"),
    ],
)
def test_wrong_input_is_named(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_the_worst_window_is_the_lowest_mean_of_any(answers):
    _, predictions, labels = answers
    right = predictions == labels
    for window in (1, 7, 83, 500):
        width = min(window, 83)
        means = [sum(right[start : start + width].tolist()) / width for start in range(84 - width)]
        assert metrics.worst_window(right, window) == pytest.approx(min(means), abs=1e-15)
    assert metrics.worst_window(torch.tensor([0.0, 1.0, -1.0, -1.0]), 2) == -1
    with pytest.raises(InputError, match="window=0"):
        metrics.worst_window(right, 0)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (9, 1), (10, 1), (20, 2), (21, 3), (30, 3)])
def test_the_tail_is_the_worst_tenth_rounded_up(count, kept):
    values = [float((7 * number) % 31) for number in range(count)]
    assert metrics.tail_mean(values) == pytest.approx(sum(sorted(values)[:kept]) / kept)


@pytest.fixture(params=[(40, 60, 1000), (300, 200, 12), (1, 1, 3), (20, 500, 2)])
def ranked(request):
    """Scores (N,), of which some are equal, and which images are known."""
    inside, outside, levels = request.param
    noise = torch.Generator().manual_seed(sum(request.param))
    known = torch.arange(inside + outside) < inside
    scores = torch.rand(inside + outside, generator=noise) + 0.3 * known
    return (scores * levels).round() / levels, known


def test_ranking_scores_agree_with_scikit_learn(ranked):
    reference = pytest.importorskip("sklearn.metrics")
    scores, known = ranked
    assert metrics.auroc(scores, known) == pytest.approx(reference.roc_auc_score(known, scores), abs=1e-12)
    passing, recall, _ = reference.roc_curve(known, scores, drop_intermediate=False)
    for wanted in (0.5, 0.95, 1.0):
        expected = next(float(p) for p, r in zip(passing, recall, strict=True) if r >= wanted - 1e-9)
        assert metrics.false_positive_rate(scores, known, wanted) == pytest.approx(expected, abs=1e-12)


def test_ranking_scores_depend_on_the_order_of_scores_alone(ranked):
    scores, known = ranked
    mixed = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    for score in (metrics.auroc, metrics.false_positive_rate):
        assert score(scores, known) == score(scores[mixed].exp(), known[mixed])
    assert metrics.auroc(torch.zeros(len(scores)), known) == 0.5


def test_ranking_scores_need_both_kinds_of_images():
    for score in (metrics.auroc, metrics.false_positive_rate):
        with pytest.raises(InputError, match="2 known and 0 unknown"):
            score(torch.tensor([0.1, 0.2]), torch.tensor([True, True]))
        with pytest.raises(InputError, match="NaN"):
            score(torch.tensor([0.1, math.nan]), torch.tensor([True, False]))
        with pytest.raises(InputError, match="of bool"):
            score(torch.tensor([0.1, 0.2]), torch.tensor([1, 0]))
