"""Shared by the line charts: frame, axes, round ticks, labels that do not overlap, and a colour for each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from testtime.report.formatting import px, text_width
from testtime.report.markup import safe

NARROW = 520  # pixels; a narrower chart has fewer and shorter labels
COLOURS = 6  # in the palette, besides the baseline's grey; further curves repeat them with dashes


class Frame(NamedTuple):
    """Maps data to pixels: 0 to `images` on the x axis, `low` to `high` percentage points on the y axis."""

    left: float
    right: float
    top: float
    bottom: float
    images: float
    low: float
    high: float

    def x(self, seen: float) -> float:
        return self.left + (self.right - self.left) * seen / self.images

    def y(self, points: float) -> float:
        return self.bottom - (self.bottom - self.top) * (points - self.low) / (self.high - self.low)


def frame_around(
    ticks: Sequence[float], labels: Sequence[str], width: int, height: int, images: float, edge: int = 0, above: int = 0
) -> Frame:
    """The frame that leaves space for the ticks on its left, the labels on its right, and `above` for a heading."""
    return Frame(
        left=edge + 8 + max(text_width(f"{tick:g}%") for tick in ticks),
        right=width - edge - 30 - max(map(text_width, labels)),
        top=edge + above + 30,
        bottom=height - edge - 46,
        images=images,
        low=ticks[0],
        high=ticks[-1],
    )


def figure(draw: Callable[[int, int], str], height: int, narrow_height: int, caption: str) -> str:
    """A chart drawn twice, for wide and for narrow screens, so that text keeps its size."""
    return (
        f'<figure><div class="plot wide">{draw(860, height)}</div>'
        f'<div class="plot narrow">{draw(358, narrow_height)}</div><figcaption>{caption}</figcaption></figure>'
    )


def tidy_range(low: float, high: float, most: int) -> list[float]:
    """Round ticks, in points, that enclose `low` to `high` in at most `most` steps."""
    if high - low < 2:
        low, high = max(0.0, (low + high) / 2 - 1), min(100.0, (low + high) / 2 + 1)
    for step in (0.5, 1, 2, 5, 10, 20):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [step * number for number in range(first, last + 1)]


def y_axis(frame: Frame, ticks: Sequence[float], edge: int, name: str) -> list[str]:
    """The axis title, and a horizontal line for each tick, in percent."""
    left, right = px(frame.left), px(frame.right)
    parts = [f'<text class="axis" x="{edge}" y="{px(frame.top - 16)}">{safe(name)}</text>']
    for tick in ticks:
        y = px(frame.y(tick))
        kind = "base" if tick == ticks[0] else "grid"
        parts.append(f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{px(frame.left - 8)}" y="{y}" dy=".33em">{tick:g}%</text>')
    return parts


def x_axis(frame: Frame, ticks: Mapping[float, str], name: str) -> list[str]:
    """Ticks with their labels, by value, and the axis title."""
    parts, bottom = [], px(frame.bottom)
    for tick, label in ticks.items():
        x = px(frame.x(tick))
        parts.append(f'<line class="base" x1="{x}" x2="{x}" y1="{bottom}" y2="{px(frame.bottom + 4)}"/>')
        parts.append(f'<text class="tick middle" x="{x}" y="{px(frame.bottom + 19)}">{safe(label)}</text>')
    x, y = px((frame.left + frame.right) / 2), px(frame.bottom + 41)
    return [*parts, f'<text class="axis middle" x="{x}" y="{y}">{safe(name)}</text>']


def end_labels(frame: Frame, ends: Sequence[float], labels: Sequence[str], style: Sequence[str]) -> list[str]:
    """A dot at the end of each curve, with its name beside it, moved only as far as needed to avoid overlap.

    A label may have a value after a NUL.
    """
    order = sorted(range(len(ends)), key=lambda index: (-ends[index], index))
    wanted = [frame.y(ends[index]) for index in order]
    parts = []
    for index, end, y in zip(order, wanted, spread_out(wanted, 17, frame.top, frame.bottom), strict=True):
        name, _, value = labels[index].partition("\0")
        x = frame.right
        leader = f"{px(x + 4)},{px(end)} {px(x + 16)},{px(y)} {px(x + 20)},{px(y)}"
        number = f'<tspan class="value" dx="6">{value}</tspan>' if value else ""
        parts.append(f'<circle class="dot {style[index]}" cx="{px(x)}" cy="{px(end)}" r="3.5"/>')
        parts.append(f'<polyline class="leader {style[index]}" points="{leader}"/>')
        at = f'x="{px(x + 25)}" y="{px(y)}" dy=".35em"'
        parts.append(f'<text class="label {style[index]}" {at}>{safe(name)}{number}</text>')
    return parts


def spread_out(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Positions at least `gap` apart, closest to `wanted` (ascending) in least squares, between top and bottom.

    >>> spread_out([10, 11, 40], 10, 0, 100)
    [5.5, 15.5, 40.0]
    """
    gap = min(gap, (bottom - top) / max(len(wanted) - 1, 1))
    # with the gaps subtracted this is isotonic regression: neighbours out of order share their mean
    blocks: list[tuple[float, int]] = []
    for index, position in enumerate(wanted):
        total, count = position - index * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            previous = blocks.pop()
            total, count = total + previous[0], count + previous[1]
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    highest = bottom - gap * (len(wanted) - 1)
    return [min(max(mean, top), highest) + index * gap for index, mean in enumerate(means)]


def slots_of(names: Iterable[str]) -> dict[str, int]:
    """A number for each name, starting at 1, in order of first appearance."""
    return {name: slot for slot, name in enumerate(dict.fromkeys(names), start=1)}


def styles_of(names: Sequence[str], slots: Mapping[str, int], baseline: bool = True) -> list[str]:
    """CSS classes of each name: its colour, dashes once colours run out, and a heavier line for the last one.

    With a `baseline`, the first is grey.
    """
    styles = []
    for index, name in enumerate(names):
        dashes, colour = divmod(slots.get(name, index + 1) - 1, COLOURS)
        plain = baseline and index == 0
        styles.append("s0" if plain else f"s{colour + 1}" + (f" dash{min(dashes, 2)}" if dashes else ""))
    if len(styles) > 1:
        styles[-1] += " last"
    return styles
