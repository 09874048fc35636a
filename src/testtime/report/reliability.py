"""Calibration: whether answers with 80% confidence are correct 80% of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testtime.metrics import ExpectedCalibrationError, accuracy, macro_f1
from testtime.report.chart import styles_of
from testtime.report.data import Answers, StreamReport
from testtime.report.formatting import px
from testtime.report.markup import WIDE, Cell, as_table, safe, scrolling, table

BINS = 15  # of equal width, the usual number
CALIBRATED = (
    " The calibrated confidence softens each answer by a temperature that keeps the running mean confidence at "
    "zero-shot's; it uses no labels and changes no answer."
)
SIDE, LEFT, TOP, FOOT = 200, 42, 10, 34  # pixels: the square, left of it, above it, and the histogram below it


class Bin(NamedTuple):
    """The images whose answers have about the same confidence."""

    low: float  # not included
    high: float  # included
    images: int
    confidence: float  # mean; 0 if there are no images
    accuracy: float


def reliability(score: ExpectedCalibrationError) -> list[Bin]:
    """The counts of a score, bin by bin.

    >>> score = ExpectedCalibrationError(bins=2)
    >>> score = score.update_answers(torch.tensor([0.5, 0.9, 1.0]), torch.tensor([True, False, True]))
    >>> [b.images for b in reliability(score)]
    [1, 2]
    """
    counts = torch.stack([score.images, score.right + score.gaps, score.right]).T.tolist()
    return [
        Bin(index / len(counts), (index + 1) / len(counts), int(images), total / max(images, 1), right / max(images, 1))
        for index, (images, total, right) in enumerate(counts)
    ]


def figure(report: StreamReport, slots: Mapping[str, int]) -> str:
    """A diagram for each method, a table of scores, and the numbers behind the diagrams."""
    styles = styles_of([answers.name for answers in report.answers], slots)
    diagrams, rows, numbers = [], [], []
    labels = torch.tensor(report.labels)
    with_brier = any(answers.brier is not None for answers in report.answers)
    with_calibrated = all(answers.calibrated for answers in report.answers)
    for answers, style in zip(report.answers, styles, strict=True):
        predictions = torch.tensor(answers.predictions)
        confidences = torch.tensor(answers.confidences, dtype=torch.float64)
        score = ExpectedCalibrationError(BINS).update_answers(confidences, predictions == labels)
        bins, error = reliability(score), score.compute()
        calibrated = torch.tensor(answers.calibrated, dtype=torch.float64)
        diagrams.append(
            f'<li><span class="name {style}">{safe(answers.name)}</span> <span class="soft">ECE {100 * error:.1f}'
            f"</span>{_diagram(answers, bins, error, style.removesuffix(' last'))}</li>"
        )
        brier = "–" if answers.brier is None else f"{answers.brier:.3f}"
        rows.append(
            [
                Cell(f'<span class="name {style}">{safe(answers.name)}</span>'),
                Cell(f"{confidences.mean():.1%}", WIDE),
                Cell(f"{accuracy(predictions, labels):.1%}", WIDE),
                f"{100 * error:.1f}",
                *([_error(calibrated, predictions == labels)] if with_calibrated else []),
                *([brier] if with_brier else []),
                f"{100 * macro_f1(predictions, labels):.1f}",
            ]
        )
        numbers += [
            [
                f"{answers.name}, {b.low:.0%} to {b.high:.0%}",
                f"{b.images:,}",
                f"{b.confidence:.1%}",
                f"{b.accuracy:.1%}",
            ]
            for b in bins
            if b.images
        ]
    brier_head = ["Brier"] if with_brier else []
    # a phone has no space for all columns, and these two are shown elsewhere too
    head = ["Method", Cell("Mean confidence", WIDE), Cell("Accuracy", WIDE), "ECE, points"]
    head += ["ECE, calibrated"] * with_calibrated + brier_head + ["Macro-F1"]
    return (
        "<h3>Calibration</h3>"
        f"<p>Answers in {BINS} bins by confidence. A bar is the share of correct answers, the line across it their "
        "mean confidence; in a calibrated model both meet on the diagonal. The bars below count the images. ECE, the "
        "expected calibration error, is the mean distance, weighted by images." + CALIBRATED * with_calibrated + "</p>"
        f'<figure><ul class="diagrams">{"".join(diagrams)}</ul></figure>'
        + scrolling(table(head, rows, kind="scores"))
        + as_table(["Method and confidence", "Images", "Mean confidence", "Correct"], numbers, "Bins as a table")
    )


def _error(confidences: Tensor, right: Tensor) -> str:
    return f"{100 * ExpectedCalibrationError(BINS).update_answers(confidences, right).compute():.1f}"


def _diagram(answers: Answers, bins: Sequence[Bin], error: float, style: str) -> str:
    width, bottom = LEFT + SIDE + 18, TOP + SIDE
    height = bottom + FOOT + 46
    step, most = SIDE / len(bins), max(b.images for b in bins)
    floor = bottom + 8 + FOOT
    parts = [
        f"<title>Reliability of {safe(answers.name)}</title>",
        f"<desc>Share of correct answers by confidence, in {len(bins)} bins; expected calibration error "
        f"{100 * error:.1f} points.</desc>",
    ]
    for tick in (0, 0.5, 1):
        y = px(bottom - SIDE * tick)
        parts.append(f'<line class="{"grid" if tick else "base"}" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y}" dy=".33em">{tick:.0%}</text>')
        parts.append(f'<text class="tick middle" x="{px(LEFT + SIDE * tick)}" y="{floor + 16}">{tick:.0%}</text>')
    for index, b in enumerate(bins):
        if not b.images:
            continue
        x, bar = px(LEFT + index * step + 1), px(step - 2)
        tall, count = SIDE * b.accuracy, max(1.0, FOOT * b.images / most)
        parts.append(f'<rect class="bar" x="{x}" y="{px(bottom - tall)}" width="{bar}" height="{px(tall)}"/>')
        y, end = px(bottom - SIDE * b.confidence), px(LEFT + (index + 1) * step)
        parts.append(f'<line class="mark" x1="{px(LEFT + index * step)}" x2="{end}" y1="{y}" y2="{y}"/>')
        parts.append(f'<rect class="count" x="{x}" y="{px(floor - count)}" width="{bar}" height="{px(count)}"/>')
    parts.append(f'<line class="cross" x1="{LEFT}" y1="{bottom}" x2="{LEFT + SIDE}" y2="{TOP}"/>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{floor}" y2="{floor}"/>')
    parts.append(f'<text class="axis middle" x="{px(LEFT + SIDE / 2)}" y="{floor + 34}">Confidence</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" class="chart reliability {style}">{"".join(parts)}</svg>'
