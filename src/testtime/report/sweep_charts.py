"""The effect of settings on accuracy: heat maps over two settings, lines over one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from testtime.report import chart
from testtime.report.data import Grid, Series
from testtime.report.formatting import px, short, text_width
from testtime.report.markup import Cell, as_table, safe, safe_characters, scrolling, table


def heat_map(grid: Grid) -> str:
    """A table with cells coloured by accuracy and the best one framed.

    >>> grid = Grid("Pets", "alpha", [2, 4], "beta", [1, 3], [[0.5, 0.75], [0.25, None]])
    >>> page = heat_map(grid)
    >>> '<td class="heat best" style="--share:1.00">75.0</td>' in page and "<td>–</td>" in page
    True
    """
    known = [value for row in grid.values for value in row if _known(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def cell(value: float | None) -> Cell:
        if not _known(value):
            return Cell("–")
        share = (value - low) / (high - low) if high > low else 0.5
        best = " best" if value == high > low else ""
        return Cell(f"{100 * value:.1f}", f' class="heat{best}" style="--share:{share:.2f}"')

    head = [Cell(f"{safe(grid.x)} →<br>{safe(grid.y)} ↓"), *map(_text, grid.xs)]
    rows = [[_text(y), *map(cell, values)] for y, values in zip(grid.ys, grid.values, strict=True)]
    spread = f", from {low:.1%} to {high:.1%}" if known else ""
    return (
        f'<figure class="grid">{scrolling(table(head, rows, kind="heatmap", caption=grid.title))}'
        f"<figcaption>Accuracy in percent{spread}; deeper colours are better, the best is framed.</figcaption></figure>"
    )


def line_chart(series: Series, slots: Mapping[str, int]) -> str:
    """Accuracy over the values of one setting, evenly spaced, and its numbers as a table."""
    caption = f"{safe(series.title)}. The values of {safe(series.x)} are evenly spaced, not to scale."
    columns = zip(*series.lines.values(), strict=True)
    rows = [[_text(x), *(f"{value:.1%}" for value in values)] for x, values in zip(series.xs, columns, strict=True)]
    drawn = chart.figure(lambda width, height: _lines(series, slots, width, height), 340, 280, caption)
    return drawn + as_table([series.x, *series.lines], rows)


def _lines(series: Series, slots: Mapping[str, int], width: int, height: int) -> str:
    names = list(series.lines)
    styles = chart.styles_of(names, chart.slots_of(names) | dict(slots), baseline=False)
    lines = [[100 * value for value in values] for values in series.lines.values()]  # in points
    ticks = chart.tidy_range(min(map(min, lines)), max(map(max, lines)), most=5)
    labels = [short(safe_characters(name), 14 if width < chart.NARROW else 20) for name in names]
    frame = chart.frame_around(ticks, labels, width, height, max(len(series.xs) - 1, 1))
    ends = ", ".join(f"{name} {min(values):.1%} to {max(values):.1%}" for name, values in series.lines.items())
    parts = [f"<title>{safe(series.title)}</title>", f"<desc>Accuracy over {safe(series.x)}: {safe(ends)}.</desc>"]
    parts += chart.y_axis(frame, ticks, 0, "Accuracy")
    # if there is no space for every value, every second, third, ...
    tick_labels = list(map(_text, series.xs))
    fitting = max(1, int((frame.right - frame.left) / (14 + max(map(text_width, tick_labels)))))
    every = math.ceil(len(tick_labels) / fitting)
    parts += chart.x_axis(frame, {index: tick_labels[index] for index in range(0, len(tick_labels), every)}, series.x)
    for values, style in zip(lines, styles, strict=True):
        points = [(px(frame.x(index)), px(frame.y(value))) for index, value in enumerate(values)]
        parts.append(f'<polyline class="line {style}" points="{" ".join(map(",".join, points))}"/>')
        parts += [f'<circle class="dot {style}" cx="{x}" cy="{y}" r="3"/>' for x, y in points[:-1]]
    parts += chart.end_labels(frame, [values[-1] for values in lines], labels, styles)
    return f'<svg viewBox="0 0 {width} {height}" role="img" class="chart">{"".join(parts)}</svg>'


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
