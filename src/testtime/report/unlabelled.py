"""A stream without labels: what changed, the most and least confident answers, and the predictions per class."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from testtime.report.changed_answers import ROW, by_confidence
from testtime.report.chart import styles_of
from testtime.report.data import UnlabelledReport
from testtime.report.formatting import count, milliseconds
from testtime.report.markup import Cell, card, folded, safe, scrolling, table
from testtime.report.thumbnails import gallery, thumbnail

MOVES = 15  # kinds of change that are listed
EXAMPLES = 4  # thumbnails beside each
ANSWERED = 10  # most frequently predicted classes that are listed


class Move(NamedTuple):
    """Images whose answer the last method changed in the same way."""

    before: int  # class
    after: int
    images: list[int]


def moves(report: UnlabelledReport) -> list[Move]:
    """The answers that the last method changed from the baseline's, most frequent change first."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for image, pair in enumerate(zip(report.answers[0].predictions, report.answers[-1].predictions, strict=True)):
        if pair[0] != pair[1]:
            groups[pair].append(image)
    found = [Move(old, new, images) for (old, new), images in groups.items()]
    return sorted(found, key=lambda move: (-len(move.images), move.before, move.after))


def confident(report: UnlabelledReport, most: int = ROW) -> tuple[list[int], list[int]]:
    """The images with the most and the least confident answers of the last method."""
    order = by_confidence(report.answers[-1])
    return order[:most], order[: -most - 1 : -1]


def unlabelled_parts(report: UnlabelledReport, slots: Mapping[str, int], section: int) -> list[str]:
    """The parts of the section, in order."""
    return [
        _cards(report, slots),
        _moves(report, section),
        _confident(report, section),
        _answered(report),
    ]


def _cards(report: UnlabelledReport, slots: Mapping[str, int]) -> str:
    baseline, cards = report.answers[0].predictions, []
    styles = styles_of([answers.name for answers in report.answers], slots)
    for answers, style in zip(report.answers, styles, strict=True):
        changed = sum(old != new for old, new in zip(baseline, answers.predictions, strict=True))
        first = answers is report.answers[0]
        big = f"{len(baseline):,} <small>images</small>" if first else f"{changed:,} <small>changed</small>"
        confidence = sum(answers.confidences) / len(baseline)
        below = f"mean confidence {confidence:.0%}"
        if math.isfinite(answers.seconds):  # the time of a run includes encoding, and is at the end of the page
            below += f", {milliseconds(answers.seconds, len(baseline))} ms per image"
        cards.append(card(answers.name, style, big, below))
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _moves(report: UnlabelledReport, section: int) -> str:
    found = moves(report)
    names = report.classnames
    old, new = safe(report.answers[0].name), safe(report.answers[-1].name)
    if not found:
        return f"<h3>What changed</h3><p>{new} gives the same answer as {old} for every image.</p>"
    total = sum(len(move.images) for move in found)
    images = len(report.answers[0].predictions)

    def row(move: Move) -> list[object]:
        examples = "".join(thumbnail(report, image, section) for image in move.images[:EXAMPLES])
        change = Cell(f"{safe(names[move.before])} → <b>{safe(names[move.after])}</b>")
        return [change, f"{len(move.images):,}", Cell(examples, ' class="examples"')]

    listed = table([Cell(f"{old} → {new}"), "Images", "Examples"], map(row, found[:MOVES]), kind="moves")
    rest = len(found) - MOVES
    more = f"<p>And {count(rest, 'less frequent change')}.</p>" if rest > 0 else ""
    return (
        f"<h3>What changed</h3><p>{new} and {old} differ on {total:,} of {count(images, 'image')}. "
        f"Without labels it is unknown which of the two is correct.</p>{listed}{more}"
    )


def _confident(report: UnlabelledReport, section: int) -> str:
    last = report.answers[-1]

    def shown(images: list[int]) -> str:
        names = [safe(report.classnames[last.predictions[image]]) for image in images]
        captions = [f"<b>{name}</b>{last.confidences[i]:.0%}" for i, name in zip(images, names, strict=True)]
        return gallery(report, zip(images, captions, strict=True), section)

    most, least = confident(report)
    return (
        f"<h3>Confidence of {safe(last.name)}</h3><h4>Most confident</h4>{shown(most)}"
        f"<h4>Least confident</h4>{shown(least)}"
    )


def _answered(report: UnlabelledReport) -> str:
    """How often each class is predicted, by every method."""
    tallies = [Counter(answers.predictions) for answers in report.answers]
    order = sorted(range(len(report.classnames)), key=lambda label: (-tallies[-1][label], label))

    def listed(labels: Sequence[int]) -> str:
        rows = [[report.classnames[label], *(f"{tally[label]:,}" for tally in tallies)] for label in labels]
        return scrolling(table(["Class", *(answers.name for answers in report.answers)], rows))

    rest = order[ANSWERED:]
    more = folded(count(len(rest), "more class"), listed(rest)) if rest else ""
    return f"<h3>Predictions per class</h3>{listed(order[:ANSWERED])}{more}"
