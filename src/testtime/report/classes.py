"""Class by class: what became of each against zero-shot, and which are taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from testtime.metrics import per_class_accuracy
from testtime.report.data import StreamReport
from testtime.report.words import plain, safe, short, signed

SHOWN = 8  # classes named among the gains, and among the losses
CONFUSED = 12  # classes in the matrix of answers


class Change(NamedTuple):
    """What became of one class."""

    name: str
    images: int
    before: float  # accuracy of the baseline, 0 to 1
    after: float


def changes(report: StreamReport) -> list[Change]:
    """What the last curve made of each class against the first, greatest gain first; classes seen only."""
    labels, classes = torch.tensor(plain(report.labels)), len(report.classnames)
    images = labels.bincount(minlength=classes).tolist()
    before, after = (
        per_class_accuracy(torch.where(curve.right(), labels, -1), labels, classes).tolist()  # -1: any other class
        for curve in (report.curves[0], report.curves[-1])
    )
    everyone = zip(report.classnames, images, before, after, strict=True)
    seen = [Change(name, number, old, new) for name, number, old, new in everyone if number]
    return sorted(seen, key=lambda change: change.before - change.after)  # stable: ties stay in class order


def class_table(report: StreamReport) -> str:
    """The classes that gained and lost most, with bars."""
    every = changes(report)
    gains = [change for change in every if change.after > change.before]
    losses = [change for change in every if change.after < change.before]
    names = safe(report.curves[0].name), safe(report.curves[-1].name)
    same = len(every) - len(gains) - len(losses)
    heading = (
        f"<h3>Class by class</h3><p>{names[1]} against {names[0]}: of {len(every):,} classes, "
        f"{len(gains):,} gain, {len(losses):,} lose and {same:,} stay as they were."
    )
    if not gains and not losses:
        return heading + "</p>"
    if len(gains) > SHOWN or len(losses) > SHOWN:
        heading += " The greatest changes:"
    most = max((c.after - c.before for c in gains), default=0.0)
    least = min((c.after - c.before for c in losses), default=0.0)
    zero, span = -least / (most - least), most - least

    def row(change: Change) -> str:
        share = (change.after - change.before) / span
        start, kind = (zero, "up") if share > 0 else (zero + share, "down")
        return (
            f'<tr><th scope="row">{safe(change.name)}</th>'
            f'<td class="wide">{change.before:.0%} → {change.after:.0%}</td>'
            f'<td class="track"><div style="--zero:{100 * zero:.2f}%"><i class="{kind}" '
            f'style="left:{100 * start:.2f}%;width:{100 * abs(share):.2f}%"></i></div></td>'
            f"<td>{signed(100 * (change.after - change.before))}</td><td>{change.images:,}</td></tr>"
        )

    shown = gains[:SHOWN], losses[-SHOWN:]
    groups = "".join(f"<tbody>{''.join(map(row, group))}</tbody>" for group in shown if group)
    return (
        f'{heading}</p><table class="classes"><thead><tr><th scope="col">Class</th>'
        '<th scope="col" class="wide">Accuracy</th>'
        '<th scope="col" class="track"><span class="hidden">Bar</span></th>'
        f'<th scope="col">Points</th><th scope="col">Images</th></tr></thead>{groups}</table>'
    )


def most_moved(labels: Sequence[int], before: Sequence[int], after: Sequence[int], most: int = CONFUSED) -> list[int]:
    """The classes that take part in most changed answers, as truth, old or new answer; in class order.

    >>> most_moved([0, 0, 1, 2], [1, 1, 1, 2], [0, 0, 1, 3], most=2)
    [0, 1]
    """
    part: Counter[int] = Counter()
    for label, old, new in zip(plain(labels), plain(before), plain(after), strict=True):
        if old != new:
            part.update({label, old, new})
    ranked = sorted(part, key=lambda c: (-part[c], c))
    return sorted(ranked[:most])


def confusion(report: StreamReport) -> str:
    """The answers of the baseline beside those of the last method, for the classes that moved most."""
    if len(report.answers) < 2:
        return ""
    labels = plain(report.labels)
    columns = [plain(answers.predictions) for answers in (report.answers[0], report.answers[-1])]
    chosen = most_moved(labels, columns[0], columns[1])
    if not chosen:
        return ""
    counts = [Counter(zip(labels, predictions, strict=True)) for predictions in columns]
    totals = Counter(labels)
    names = [safe(report.answers[0].name), safe(report.answers[-1].name)]
    wide = len(chosen) + 1
    head = "".join(f'<th scope="colgroup" colspan="{wide}" class="group">{name}</th>' for name in names)
    numbers = ""
    for index, c in enumerate(chosen):
        apart = "" if index else ' class="group"'
        numbers += f'<th scope="col"{apart}><abbr title="{safe(report.classnames[c])}">{index + 1}</abbr></th>'
    numbers += '<th scope="col">other</th>'
    rows = []
    for index, truth in enumerate(chosen):
        name = safe(short(str(report.classnames[truth]), 22))
        cells = "".join(_cells(count, truth, chosen, totals[truth]) for count in counts)
        rows.append(f'<tr><th scope="row"><small>{index + 1}</small> {name}</th>{cells}</tr>')
    return (
        "<h3>What is taken for what</h3>"
        f"<p>The {len(chosen)} classes that take part in most changed answers. Each row is a class, each column the "
        "answer, by the row's number; “other” counts the answers outside this table. Right answers are blue, wrong "
        "ones orange, deeper the larger their share of the row.</p>"
        f'<div class="scroll matrix" tabindex="0"><table><thead><tr><td></td>{head}</tr>'
        f'<tr><th scope="col">Truth</th>{numbers * 2}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _cells(counts: Mapping[tuple[int, int], int], truth: int, chosen: Sequence[int], total: int) -> str:
    inside = [counts.get((truth, answer), 0) for answer in chosen]
    cells = []
    for answer, number in zip([*chosen, -1], [*inside, total - sum(inside)], strict=True):
        kind = "right" if answer == truth else "other" if answer < 0 else "wrong"
        kind += " group" if answer == chosen[0] else ""
        share = f' style="--share:{number / total:.2f}"' if number and answer >= 0 else ""
        cells.append(f'<td class="{kind}"{share}>{number or ""}</td>')
    return "".join(cells)
