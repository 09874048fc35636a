"""The confusion matrix of the baseline beside that of the last method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from testtime.report.data import Answers, StreamReport
from testtime.report.formatting import count, short
from testtime.report.markup import safe, scrolling

CONFUSED = 12  # classes in the matrix


def most_changed(labels: Sequence[int], before: Sequence[int], after: Sequence[int], most: int = CONFUSED) -> list[int]:
    """The classes with the most changed answers, as label, old or new answer; in class order.

    >>> most_changed([0, 0, 1, 2], [1, 1, 1, 2], [0, 0, 1, 3], most=2)
    [0, 1]
    """
    changes: Counter[int] = Counter()
    for label, old, new in zip(labels, before, after, strict=True):
        if old != new:
            changes.update({label, old, new})
    ranked = sorted(changes, key=lambda c: (-changes[c], c))
    return sorted(ranked[:most])


def confusion_matrix(report: StreamReport) -> str:
    """The answers of the baseline beside those of the last method, for the classes with the most changes."""
    if len(report.answers) < 2:
        return ""
    both = report.answers[0], report.answers[-1]
    chosen = most_changed(report.labels, both[0].predictions, both[1].predictions)
    if not chosen:
        return ""
    totals = Counter(report.labels)
    tables = "".join(_table(report, answers, chosen, totals) for answers in both)
    return (
        "<h3>Confusion matrix</h3>"
        f"<p>The {count(len(chosen), 'class')} with the most changed answers. Each row is a label, each column an "
        "answer, by the row's number; “other” counts the answers outside this table. Correct answers are blue, wrong "
        "ones orange; a deeper colour is a larger share of the row.</p>"
        f'<div class="matrices">{tables}</div>'
    )


def _table(report: StreamReport, answers: Answers, chosen: Sequence[int], totals: Mapping[int, int]) -> str:
    """The matrix of one method, in a box of its own that scrolls if it is too wide."""
    found = Counter(zip(report.labels, answers.predictions, strict=True))
    names = [safe(report.classnames[label]) for label in chosen]
    numbers = "".join(f'<th scope="col"><abbr title="{n}">{i}</abbr></th>' for i, n in enumerate(names, start=1))
    rows = []
    for number, truth in enumerate(chosen, start=1):
        name = safe(short(str(report.classnames[truth]), 22))
        cells = _cells(found, truth, chosen, totals[truth]) if totals[truth] else _empty(len(chosen) + 1)
        head = f'<small>{number}</small> <span title="{names[number - 1]}">{name}</span>'
        rows.append(f'<tr><th scope="row">{head}</th>{cells}</tr>')
    return scrolling(
        f'<table><caption>{safe(answers.name)}</caption><thead><tr><th scope="col"><span>Label</span></th>{numbers}'
        f'<th scope="col">other</th></tr></thead><tbody>{"".join(rows)}</tbody></table>',
        "matrix",
    )


def _empty(columns: int) -> str:
    return f'<td class="other" colspan="{columns}">no images</td>'


def _cells(counts: Mapping[tuple[int, int], int], truth: int, chosen: Sequence[int], total: int) -> str:
    inside = [counts.get((truth, answer), 0) for answer in chosen]
    cells = []
    for answer, number in zip([*chosen, -1], [*inside, total - sum(inside)], strict=True):
        kind = "right" if answer == truth else "other" if answer < 0 else "wrong"
        share = f' style="--share:{number / total:.2f}"' if number and answer >= 0 else ""
        cells.append(f'<td class="{kind}"{share}>{number or ""}</td>')
    return "".join(cells)
