"""What settings do to accuracy: heat maps over two of them, lines over one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from testtime.report.data import Grid, Series
from testtime.report.plot import Frame, end_labels, level_axis, slots_of, styles_of, tidy_range, upright_axis
from testtime.report.words import as_table, px, safe, safe_characters, short, text_width


def heat_map(grid: Grid) -> str:
    """A table whose cells are coloured by accuracy, the best one framed.

    >>> grid = Grid("Pets", "alpha", [2, 4], "beta", [1, 3], [[0.5, 0.75], [0.25, None]])
    >>> page = heat_map(grid)
    >>> '<td class="heat best" style="--share:1.00">75.0</td>' in page and "<td>–</td>" in page
    True
    """
    known = [value for row in grid.values for value in row if _known(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def cell(value: float | None) -> str:
        if not _known(value):
            return "<td>–</td>"
        share = (value - low) / (high - low) if high > low else 0.5
        best = " best" if value == high > low else ""
        return f'<td class="heat{best}" style="--share:{share:.2f}">{100 * value:.1f}</td>'

    head = "".join(f'<th scope="col">{safe(_said(x))}</th>' for x in grid.xs)
    rows = ""
    for y, values in zip(grid.ys, grid.values, strict=True):
        rows += f'<tr><th scope="row">{safe(_said(y))}</th>{"".join(map(cell, values))}</tr>'
    spread = f", from {low:.1%} to {high:.1%}" if known else ""
    return (
        f'<figure class="grid"><div class="scroll" tabindex="0"><table class="heatmap"><caption>{safe(grid.title)}'
        f'</caption><thead><tr><th scope="col">{safe(grid.x)} →<br>{safe(grid.y)} ↓</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f"<figcaption>Accuracy in percent{spread}; deeper is better, and the best is framed.</figcaption></figure>"
    )


def line_chart(series: Series, slots: Mapping[str, int]) -> str:
    """Accuracy over one setting's values, evenly spaced, for wide and for narrow screens, and as a table."""
    wide, narrow = (_lines(series, slots, width, height) for width, height in ((860, 340), (358, 280)))
    rows = [
        [_said(x), *(f"{values[index]:.1%}" for values in series.lines.values())] for index, x in enumerate(series.xs)
    ]
    return (
        f'<figure><div class="plot wide">{wide}</div><div class="plot narrow">{narrow}</div>'
        f"<figcaption>{safe(series.title)}. The values of {safe(series.x)} stand evenly, whatever lies between them."
        f"</figcaption></figure>" + as_table([series.x, *series.lines], rows)
    )


def _lines(series: Series, slots: Mapping[str, int], width: int, height: int) -> str:
    narrow, steps = width < 520, max(len(series.xs) - 1, 1)
    names = list(series.lines)
    styles = styles_of(names, slots_of(names) | dict(slots), baseline=False)
    points = [100 * value for values in series.lines.values() for value in values]
    ticks = tidy_range(min(points), max(points), most=5)
    labels = [short(safe_characters(name), 14 if narrow else 20) for name in names]
    frame = Frame(
        left=8 + max(text_width(f"{tick:g}%") for tick in ticks),
        right=width - 30 - max(map(text_width, labels)),
        top=30,
        bottom=height - 46,
        images=steps,
        low=ticks[0],
        high=ticks[-1],
    )
    ends = ", ".join(f"{name} {min(values):.1%} to {max(values):.1%}" for name, values in series.lines.items())
    parts = [f"<title>{safe(series.title)}</title>", f"<desc>Accuracy over {safe(series.x)}: {safe(ends)}.</desc>"]
    parts += upright_axis(frame, ticks, 0, "Accuracy")
    # where there is no room for every value, every second, third, ...
    room = max(1, int((frame.right - frame.left) / (14 + max(text_width(_said(x)) for x in series.xs))))
    every = math.ceil(len(series.xs) / room)
    parts += level_axis(frame, {index: _said(x) for index, x in enumerate(series.xs) if index % every == 0}, series.x)
    for values, style in zip(series.lines.values(), styles, strict=True):
        places = [(px(frame.x(index)), px(frame.y(100 * value))) for index, value in enumerate(values)]
        parts.append(f'<polyline class="line {style}" points="{" ".join(map(",".join, places))}"/>')
        parts += [f'<circle class="dot {style}" cx="{x}" cy="{y}" r="3"/>' for x, y in places[:-1]]
    parts += end_labels(frame, [100 * values[-1] for values in series.lines.values()], labels, styles)
    return f'<svg viewBox="0 0 {width} {height}" role="img" class="chart">{"".join(parts)}</svg>'


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _said(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
