"""Accuracy per class: the last method compared with the baseline, with bars."""

from __future__ import annotations

from typing import NamedTuple

import torch

from testtime.metrics import per_class_accuracy
from testtime.report.data import StreamReport
from testtime.report.formatting import count, signed
from testtime.report.markup import WIDE, Cell, safe, table

SHOWN = 8  # classes listed among the gains, and among the losses


class Change(NamedTuple):
    """How the accuracy of one class changed."""

    name: str
    images: int
    before: float  # accuracy of the baseline, 0 to 1
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def changes(report: StreamReport) -> list[Change]:
    """The change of each class from the first curve to the last, largest gain first; only classes that occur."""
    labels, classes = torch.tensor(report.labels), len(report.classnames)
    images = labels.bincount(minlength=classes).tolist()
    before, after = (
        per_class_accuracy(torch.where(curve.right(), labels, -1), labels, classes).tolist()  # -1: any other class
        for curve in (report.curves[0], report.curves[-1])
    )
    rows = zip(report.classnames, images, before, after, strict=True)
    seen = [Change(name, number, old, new) for name, number, old, new in rows if number]
    return sorted(seen, key=lambda change: -change.gain)  # stable: ties stay in class order


def class_table(report: StreamReport) -> str:
    """The classes with the largest gains and losses, with bars."""
    every = changes(report)
    gains = [change for change in every if change.gain > 0]
    losses = [change for change in every if change.gain < 0]
    same = len(every) - len(gains) - len(losses)
    heading = (
        f"<h3>Accuracy per class</h3><p>{safe(report.curves[-1].name)} compared with {safe(report.curves[0].name)}: "
        f"of {count(len(every), 'class')}, {len(gains):,} gain, {len(losses):,} lose and {same:,} are unchanged."
    )
    if not gains and not losses:
        return heading + "</p>"
    if len(gains) > SHOWN or len(losses) > SHOWN:
        heading += " The largest changes:"
    most, least = max(every[0].gain, 0.0), min(every[-1].gain, 0.0)
    zero, span = -least / (most - least), most - least

    def row(change: Change) -> list[object]:
        share = change.gain / span
        start, kind = (zero, "up") if share > 0 else (zero + share, "down")
        bar = (
            f'<div style="--zero:{100 * zero:.2f}%"><i class="{kind}" '
            f'style="left:{100 * start:.2f}%;width:{100 * abs(share):.2f}%"></i></div>'
        )
        accuracies = Cell(f"{change.before:.0%} → {change.after:.0%}", WIDE)
        return [change.name, accuracies, Cell(bar, ' class="track"'), signed(100 * change.gain), f"{change.images:,}"]

    columns = Cell("Accuracy", WIDE), Cell('<span class="hidden">Bar</span>', ' class="track"')
    groups = [map(row, group) for group in (gains[:SHOWN], losses[-SHOWN:]) if group]
    return f"{heading}</p>{table(['Class', *columns, 'Points', 'Images'], *groups, kind='classes')}"
