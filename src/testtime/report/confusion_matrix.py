"""The confusion matrix of the baseline beside that of the last method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from testtime.report.data import StreamReport
from testtime.report.formatting import short
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
    counts = [Counter(zip(report.labels, answers.predictions, strict=True)) for answers in both]
    totals = Counter(report.labels)
    wide = len(chosen) + 1
    head = "".join(f'<th scope="colgroup" colspan="{wide}" class="group">{safe(each.name)}</th>' for each in both)
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
    matrix = (
        f'<table><thead><tr><td></td>{head}</tr><tr><th scope="col">Label</th>{numbers * 2}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    return (
        "<h3>Confusion matrix</h3>"
        f"<p>The {len(chosen)} classes with the most changed answers. Each row is a label, each column an answer, by "
        "the row's number; “other” counts the answers outside this table. Correct answers are blue, wrong ones orange; "
        "a deeper colour is a larger share of the row.</p>" + scrolling(matrix, "matrix")
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
