"""Gaps to the baseline: a row for each stream, a dot for each method, without a guard and with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from testtime.report import chart
from testtime.report.data import Gaps
from testtime.report.formatting import px, signed, text_width
from testtime.report.markup import as_table, safe

BESIDE = 7  # pixels between the dots of two methods in a row
BETWEEN = 10  # pixels between the dots of two rows, more than within one
STEPS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of the axis, in points
HOLLOW, FILLED = "○", "●"


def gap_chart(gaps: Gaps | None, slots: Mapping[str, int]) -> str:
    """The figure with its legend, and its numbers as a table; nothing without gaps.

    >>> page = gap_chart(Gaps("Gaps", ["sorted"], {"DPE": [-0.02]}, {"DPE": [0.0]}), {})
    >>> page.count("<circle"), "\u22122.0" in page  # drawn for a wide and for a narrow screen
    (4, True)
    """
    if gaps is None:
        return ""
    styles = dict(zip(gaps.methods, chart.styles_of(gaps.methods, slots, baseline=False), strict=True))
    legend = "".join(f'<li class="{styles[name]}"><span class="key"></span>{safe(name)}</li>' for name in gaps.methods)
    both = f" {HOLLOW} without the guard, {FILLED} with it." if gaps.guarded else ""
    height = 50 + round(_row(gaps) * len(gaps.streams))
    caption = f"{safe(gaps.title)}. Right of the line at 0, adapting helps; left of it, it hurts.{both}"
    drawn = chart.figure(lambda width, tall: _draw(gaps, styles, width, tall), height, height, caption)
    return f'<ul class="legend">{legend}</ul>{drawn}{_table(gaps)}'


def _row(gaps: Gaps) -> float:
    """The height of a stream's row in pixels; a label needs 17."""
    return max(17, BESIDE * (len(gaps.methods) - 1) + BETWEEN)


def _draw(gaps: Gaps, styles: Mapping[str, str], width: int, height: int) -> str:
    known = [100 * v for each in (gaps.plain, gaps.guarded) for vs in each.values() for v in vs if v is not None]
    ticks = _ticks(min([0.0, *known]), max([0.0, *known]), 5 if width < chart.NARROW else 9)
    left, right, top = 12 + max(map(text_width, gaps.streams)), width - 14, 12

    def x(value: float) -> float:
        return left + (right - left) * (100 * value - ticks[0]) / (ticks[-1] - ticks[0])

    bottom = top + _row(gaps) * len(gaps.streams)
    parts = [f"<title>{safe(gaps.title)}</title>"]
    for tick in ticks:
        at = px(x(tick / 100))
        kind = "base" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{px(top)}" y2="{px(bottom)}"/>')
        parts.append(f'<text class="tick middle" x="{at}" y="{px(bottom + 16)}">{_tick(tick)}</text>')
    middle = px((left + right) / 2)
    parts.append(f'<text class="axis middle" x="{middle}" y="{px(bottom + 34)}">Gap to zero-shot, points</text>')
    for number, stream in enumerate(gaps.streams):
        centre, above = top + _row(gaps) * (number + 0.5), px(top + _row(gaps) * number)
        parts.append(f'<line class="grid" x1="0" x2="{px(right)}" y1="{above}" y2="{above}"/>')
        parts.append(f'<text class="tick end" x="{px(left - 8)}" y="{px(centre)}" dy=".35em">{safe(stream)}</text>')
        for place, name in enumerate(gaps.methods):
            y = px(centre + BESIDE * (place - (len(gaps.methods) - 1) / 2))
            before, after = (
                values.get(name, [None] * len(gaps.streams))[number] for values in (gaps.plain, gaps.guarded)
            )
            if before is not None and after is not None:
                ends = f'x1="{px(x(before))}" x2="{px(x(after))}"'
                parts.append(f'<line class="change {styles[name]}" {ends} y1="{y}" y2="{y}"/>')
            for value, kind in ((before, "hollow" if gaps.guarded else "dot"), (after, "dot")):
                if value is not None:
                    shown = f"<title>{safe(stream)}, {safe(name)}: {signed(100 * value)}</title>"
                    at = f'cx="{px(x(value))}" cy="{y}"'
                    parts.append(f'<circle class="{kind} {styles[name]}" {at} r="3.5">{shown}</circle>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" class="chart">{"".join(parts)}</svg>'


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round ticks, in points, that enclose `low` to `high` in at most `most` steps, if any do."""
    for step in STEPS:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _tick(value: float) -> str:
    return f"{value:g}".replace("-", "\u2212")


def _table(gaps: Gaps) -> str:
    columns = [(name, gaps.plain[name]) for name in gaps.plain]
    columns += [(f"{name} guarded", gaps.guarded[name]) for name in gaps.guarded]
    rows: list[Sequence[str]] = []
    for number, stream in enumerate(gaps.streams):
        values = [values[number] for _, values in columns]
        rows.append([stream, *("–" if value is None else signed(100 * value) for value in values)])
    return as_table(["Stream", *(name for name, _ in columns)], rows)
