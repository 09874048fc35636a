"""Reliability: whether answers given with 80% confidence are right 80% of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from testtime.metrics import ExpectedCalibrationError, accuracy, macro_f1
from testtime.report.data import Answers, StreamReport
from testtime.report.plot import styles_of
from testtime.report.words import as_table, plain, px, safe

BINS = 15  # of equal width, the usual number
SIDE, LEFT, TOP, FOOT = 200, 42, 10, 34  # pixels: of the square, before it, above it, and the bars of counts below


class Bin(NamedTuple):
    """The images whose answers came with about the same confidence."""

    low: float  # not included
    high: float  # included
    images: int
    confidence: float  # mean; 0 where there is no image
    accuracy: float


def reliability(score: ExpectedCalibrationError) -> list[Bin]:
    """What a score has counted, bin by bin.

    >>> score = ExpectedCalibrationError(bins=2)
    >>> score = score.update_answers(torch.tensor([0.5, 0.9, 1.0]), torch.tensor([True, False, True]))
    >>> [b.images for b in reliability(score)]
    [1, 2]
    """
    counts = torch.stack([score.images, score.right + score.gaps, score.right]).T.tolist()
    return [
        Bin(index / len(counts), (index + 1) / len(counts), int(images), sure / max(images, 1), right / max(images, 1))
        for index, (images, sure, right) in enumerate(counts)
    ]


def figure(report: StreamReport, slots: Mapping[str, int]) -> str:
    """A diagram for each method, a table of scores, and the numbers behind the diagrams."""
    styles = styles_of([answers.name for answers in report.answers], slots)
    diagrams, rows, numbers = [], [], []
    labels = torch.tensor(plain(report.labels))
    with_brier = any(answers.brier is not None for answers in report.answers)
    for answers, style in zip(report.answers, styles, strict=True):
        predictions = torch.tensor(plain(answers.predictions))
        confidences = torch.tensor(plain(answers.confidences), dtype=torch.float64)
        score = ExpectedCalibrationError(BINS).update_answers(confidences, predictions == labels)
        bins, error = reliability(score), score.compute()
        diagrams.append(
            f'<li><span class="name {style}">{safe(answers.name)}</span> <span class="soft">ECE {100 * error:.1f}'
            f"</span>{_diagram(answers, bins, error, style.removesuffix(' last'))}</li>"
        )
        brier = "" if not with_brier else "<td>–</td>" if answers.brier is None else f"<td>{answers.brier:.3f}</td>"
        rows.append(
            f'<tr><th scope="row"><span class="name {style}">{safe(answers.name)}</span></th>'
            f'<td>{confidences.mean():.1%}</td><td class="wide">{accuracy(predictions, labels):.1%}</td>'
            f"<td>{100 * error:.1f}</td>{brier}<td>{100 * macro_f1(predictions, labels):.1f}</td></tr>"
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
    scores = ["Mean confidence", "Accuracy", "ECE, points", *(["Brier"] if with_brier else []), "Macro-F1"]
    # on a phone there is no room for all, and accuracies stand elsewhere too
    places = {"Accuracy": ' class="wide"'}
    head = "".join(f'<th scope="col"{places.get(name, "")}>{name}</th>' for name in ("Method", *scores))
    return (
        "<h3>Whether confidence can be trusted</h3>"
        f"<p>Answers in {BINS} bins by their confidence. A bar is the share that was right, the line across it their "
        "mean confidence: where both meet on the diagonal, confidence means what it says. Bars below count the images. "
        "ECE, the expected calibration error, is the mean distance, weighted by images.</p>"
        f'<figure><ul class="diagrams">{"".join(diagrams)}</ul></figure>'
        f'<div class="scroll" tabindex="0"><table class="scores"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + as_table(["Method and confidence", "Images", "Mean confidence", "Right"], numbers, "The bins as a table")
    )


def _diagram(answers: Answers, bins: Sequence[Bin], error: float, style: str) -> str:
    width, bottom = LEFT + SIDE + 18, TOP + SIDE
    height = bottom + FOOT + 46
    step, most = SIDE / len(bins), max(b.images for b in bins)
    floor = bottom + 8 + FOOT
    parts = [
        f"<title>Reliability of {safe(answers.name)}</title>",
        f"<desc>Share of right answers against confidence, in {len(bins)} bins; expected calibration error "
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
        tall, few = SIDE * b.accuracy, max(1.0, FOOT * b.images / most)
        parts.append(f'<rect class="bar" x="{x}" y="{px(bottom - tall)}" width="{bar}" height="{px(tall)}"/>')
        y, end = px(bottom - SIDE * b.confidence), px(LEFT + (index + 1) * step)
        parts.append(f'<line class="mark" x1="{px(LEFT + index * step)}" x2="{end}" y1="{y}" y2="{y}"/>')
        parts.append(f'<rect class="few" x="{x}" y="{px(floor - few)}" width="{bar}" height="{px(few)}"/>')
    parts.append(f'<line class="cross" x1="{LEFT}" y1="{bottom}" x2="{LEFT + SIDE}" y2="{TOP}"/>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{floor}" y2="{floor}"/>')
    parts.append(f'<text class="axis middle" x="{px(LEFT + SIDE / 2)}" y="{floor + 34}">Confidence</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" class="chart reliability {style}">{"".join(parts)}</svg>'
