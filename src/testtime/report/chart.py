"""What the line charts share: frame, axes, tidy ticks, labels that keep apart, and a colour for each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from testtime.report.formatting import px, text_width
from testtime.report.markup import safe

NARROW = 520  # pixels; a chart that is less wide has fewer and shorter labels
COLOURS = 6  # of the palette, besides the baseline's grey; later curves repeat them with dashes


class Frame(NamedTuple):
    """Where data lie in the picture: 0 to `images` to the right and points `low` to `high` upwards, in pixels."""

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
    """The frame that leaves room for the ticks on its left, the labels on its right, and `above` for a heading."""
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
    """A chart drawn twice by width and height, for wide and for narrow screens: text keeps its size."""
    return (
        f'<figure><div class="plot wide">{draw(860, height)}</div>'
        f'<div class="plot narrow">{draw(358, narrow_height)}</div><figcaption>{caption}</figcaption></figure>'
    )


def tidy_range(low: float, high: float, most: int) -> list[float]:
    """Tidy ticks, in points, that enclose what lies between `low` and `high`: at most `most` steps."""
    if high - low < 2:
        low, high = max(0.0, (low + high) / 2 - 1), min(100.0, (low + high) / 2 + 1)
    for step in (0.5, 1, 2, 5, 10, 20):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [step * number for number in range(first, last + 1)]


def upright_axis(frame: Frame, ticks: Sequence[float], edge: int, name: str) -> list[str]:
    """The name of what is drawn, and a line across for each tick, in percent."""
    left, right = px(frame.left), px(frame.right)
    parts = [f'<text class="axis" x="{edge}" y="{px(frame.top - 16)}">{safe(name)}</text>']
    for tick in ticks:
        y = px(frame.y(tick))
        kind = "base" if tick == ticks[0] else "grid"
        parts.append(f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{px(frame.left - 8)}" y="{y}" dy=".33em">{tick:g}%</text>')
    return parts


def level_axis(frame: Frame, ticks: Mapping[float, str], name: str) -> list[str]:
    """A tick with its words for each place, and the name of what runs to the right."""
    parts, bottom = [], px(frame.bottom)
    for tick, words in ticks.items():
        x = px(frame.x(tick))
        parts.append(f'<line class="base" x1="{x}" x2="{x}" y1="{bottom}" y2="{px(frame.bottom + 4)}"/>')
        parts.append(f'<text class="tick middle" x="{x}" y="{px(frame.bottom + 19)}">{safe(words)}</text>')
    x, y = px((frame.left + frame.right) / 2), px(frame.bottom + 41)
    return [*parts, f'<text class="axis middle" x="{x}" y="{y}">{safe(name)}</text>']


def end_labels(frame: Frame, ends: Sequence[float], labels: Sequence[str], style: Sequence[str]) -> list[str]:
    """A dot where each curve ends, and its name beside it, moved as little as keeps the names apart.

    A label may carry a value after a NUL.
    """
    order = sorted(range(len(ends)), key=lambda index: (-ends[index], index))
    wanted = [frame.y(ends[index]) for index in order]
    parts = []
    for index, end, place in zip(order, wanted, keep_apart(wanted, 17, frame.top, frame.bottom), strict=True):
        name, _, value = labels[index].partition("\0")
        x = frame.right
        leader = f"{px(x + 4)},{px(end)} {px(x + 16)},{px(place)} {px(x + 20)},{px(place)}"
        number = f'<tspan class="value" dx="6">{value}</tspan>' if value else ""
        parts.append(f'<circle class="dot {style[index]}" cx="{px(x)}" cy="{px(end)}" r="3.5"/>')
        parts.append(f'<polyline class="leader {style[index]}" points="{leader}"/>')
        at = f'x="{px(x + 25)}" y="{px(place)}" dy=".35em"'
        parts.append(f'<text class="label {style[index]}" {at}>{safe(name)}{number}</text>')
    return parts


def keep_apart(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Places in the order of `wanted` (rising), `gap` apart, nearest to it in squares, within top and bottom.

    >>> keep_apart([10, 11, 40], 10, 0, 100)
    [5.5, 15.5, 40.0]
    """
    gap = min(gap, (bottom - top) / max(len(wanted) - 1, 1))
    # without the gaps this is isotonic regression: neighbours out of order share their mean
    blocks: list[tuple[float, int]] = []
    for index, place in enumerate(wanted):
        total, count = place - index * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    highest = bottom - gap * (len(wanted) - 1)
    return [min(max(mean, top), highest) + index * gap for index, mean in enumerate(means)]


def slots_of(names: Iterable[str]) -> dict[str, int]:
    """A number for each name, from 1 on, in order of first appearance."""
    return {name: slot for slot, name in enumerate(dict.fromkeys(names), start=1)}


def styles_of(names: Sequence[str], slots: Mapping[str, int], baseline: bool = True) -> list[str]:
    """Classes for each name's colour, its dashes where colours run out, and the weight of the last one.

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
