"""Accuracy along the stream: the chart, alone or in the page, and its numbers as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from testtime.report import chart
from testtime.report.data import Curve, StreamReport, check_curves
from testtime.report.formatting import px, short
from testtime.report.markup import as_table, asset, safe, safe_characters

BURN_IN = 0.03, 50  # share of the stream, and minimum of images, too noisy to set the range of the chart
POINTS = 320  # at most so many points per curve: about one per two pixels


def running_accuracy_svg(
    curves: Sequence[Curve],
    *,
    width: int = 860,
    height: int = 400,
    standalone: bool = False,
    title: str = "",
    slots: Mapping[str, int] | None = None,
) -> str:
    """Running accuracy by number of images, as an SVG of `width` x `height` pixels.

    The first curve is the baseline, the last one is drawn boldest. The range fits the curves after the burn-in.
    `standalone` makes a separate file, with background and styles for light and dark, and draws `title` above the
    chart. `slots` number the curves' colours by name, so that a method keeps its colour.

    >>> curves = [Curve("zero-shot", [True, False] * 9, 0.1), Curve("DPE", [True] * 18, 0.2)]
    >>> svg = running_accuracy_svg(curves, standalone=True, title="18 photos")
    >>> svg.startswith("<svg") and "At the end: zero-shot 50.0%, DPE 100.0%." in svg
    True
    """
    check_curves(curves)
    slots = slots or chart.slots_of(curve.name for curve in curves[1:])
    images, narrow = len(curves[0].correct), width < chart.NARROW
    running = [[100 * value for value in curve.running()] for curve in curves]  # in points
    burn = burn_in(images)
    late = [value for values in running for value in values[burn:]]
    ticks = chart.tidy_range(min(late), max(late), most=5 if narrow else 6)
    # the value follows the name after a NUL; a narrow chart has space for the name only
    labels = [short(safe_characters(curve.name), 14 if narrow else 20) for curve in curves]
    if not narrow:
        labels = [f"{label}\0{curve.accuracy:.1%}" for label, curve in zip(labels, curves, strict=True)]
    edge = 24 if standalone else 0
    frame = chart.frame_around(ticks, labels, width, height, images, edge, above=34 if standalone and title else 0)
    parts = [f"<title>{safe(title or 'Accuracy so far by number of images')}</title>"]
    parts.append(f"<desc>{safe(_description(curves))}</desc>")
    if standalone:
        parts.append(f"<style>{asset('tokens.css')}{asset('chart.css')}</style>")
        parts.append(f'<rect class="paper" width="{width}" height="{height}" rx="10"/>')
        if title:
            parts.append(f'<text class="heading" x="{edge}" y="{edge + 18}">{safe(title)}</text>')
    parts += chart.y_axis(frame, ticks, edge, "Accuracy so far")
    parts += chart.x_axis(frame, {tick: f"{tick:,}" for tick in image_ticks(images, 4 if narrow else 8)}, "Images seen")
    seen = sampled(images)
    style = chart.styles_of([curve.name for curve in curves], slots)
    parts += _lines(frame, running, seen, burn, style)
    parts += chart.end_labels(frame, [values[-1] for values in running], labels, style)
    attributes = f'viewBox="0 0 {width} {height}" role="img" class="chart"'
    if standalone:
        attributes += f' width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg"'
    else:
        order = sorted(range(len(curves)), key=lambda index: -curves[index].accuracy)
        hundredths = [[round(100 * values[s - 1]) for s in seen] for values in running]
        rows = [[curves[index].name, style[index], hundredths[index], index == 0] for index in order]
        data = frame._asdict() | {"seen": seen, "curves": rows}
        attributes += f' data-chart="{safe(json.dumps(data, separators=(",", ":")))}"'
    return f"<svg {attributes}>\n" + "\n".join(parts) + "\n</svg>"


def running_accuracy(report: StreamReport, slots: Mapping[str, int]) -> str:
    """The chart, and its numbers as a table."""
    images = len(report.labels)
    pale = burn_in(images)
    first = f" The first {pale:,} are drawn pale and do not affect the range." if pale > 1 else ""
    drawn = chart.figure(
        lambda width, height: running_accuracy_svg(report.curves, width=width, height=height, slots=slots),
        400,
        300,
        f"Share of correct answers among the images so far.{first}",
    )
    seen = sorted({max(1, round(images * share / 10)) for share in range(1, 11)})
    running = [curve.running() for curve in report.curves]
    rows = [[f"{count:,}", *(f"{values[count - 1]:.1%}" for values in running)] for count in seen]
    return drawn + as_table(["Images seen", *(curve.name for curve in report.curves)], rows)


def burn_in(images: int) -> int:
    """The number of images at the start that do not affect the range of the chart."""
    share, least = BURN_IN
    return min(max(math.ceil(share * images), least), images // 4)


def image_ticks(images: int, most: int) -> list[int]:
    """Round numbers of images from 0: at most `most` steps of 1, 2 or 5 times a power of ten."""
    steps = (unit * 10**power for power in range(12) for unit in (1, 2, 5))
    step = next(step for step in steps if images / step <= most)
    return list(range(0, images + 1, step))


def sampled(images: int) -> list[int]:
    """Evenly spaced numbers of images, including the first and the last."""
    points = min(images, POINTS)
    return sorted({1 + round(index * (images - 1) / max(points - 1, 1)) for index in range(points)})


def _lines(
    frame: chart.Frame, running: Sequence[Sequence[float]], seen: Sequence[int], burn: int, style: Sequence[str]
) -> list[str]:
    """The curves, with the burn-in pale and clipped to the range."""
    # a nested SVG clips without an id, which would have to be unique per chart
    left, top = frame.left, frame.top - 2
    width, height = frame.right - frame.left, frame.bottom - frame.top + 4
    parts = [f'<svg x="{px(left)}" y="{px(top)}" width="{px(width)}" height="{px(height)}">']
    for values, kind in zip(running, style, strict=True):
        points = [(s, f"{px(frame.x(s) - left)},{px(frame.y(values[s - 1]) - top)}") for s in seen]
        early = [point for s, point in points if s <= burn + 1]
        late = [point for s, point in points if s > burn]
        late = early[-1:] + late if early and early[-1] != late[0] else late
        if len(early) > 1:
            parts.append(f'<polyline class="line early {kind}" points="{" ".join(early)}"/>')
        parts.append(f'<polyline class="line {kind}" points="{" ".join(late)}"/>')
    return [*parts, "</svg>"]


def _description(curves: Sequence[Curve]) -> str:
    ends = ", ".join(f"{curve.name} {curve.accuracy:.1%}" for curve in curves)
    return f"Running accuracy over {len(curves[0].correct):,} images. At the end: {ends}."
