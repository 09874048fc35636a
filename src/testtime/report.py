"""A page about a stream: what several methods made of it, as one HTML file that needs nothing else.

Pure functions of plain data: the same input gives the same bytes. Styles, pictures and the few lines of
script are inside the page, and its policy forbids it to fetch anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any, NamedTuple

from testtime.types import InputError

BURN_IN = 0.03, 50  # share of the stream, and least images, too noisy to set the range of the chart
SHOWN = 8  # classes named among the gains, and among the losses
COLOURS = 6  # of the palette, besides the baseline's grey; later curves repeat them with dashes
POINTS = 320  # most points drawn for a curve: about one for two pixels


@dataclass(frozen=True)
class Curve:
    """One method over the stream.

    >>> Curve("DPE", [True, False, True, True], seconds=0.02).accuracy
    0.75
    """

    name: str
    correct: Sequence[bool]  # per image, in stream order
    seconds: float  # for the whole stream
    note: str = ""  # settings in short

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return sum(map(bool, _plain(self.correct))) / len(self.correct)

    def running(self) -> list[float]:
        """Share of right answers up to and including each image, 0 to 1."""
        hits = accumulate(map(int, _plain(self.correct)))
        return [hit / seen for seen, hit in enumerate(hits, start=1)]


@dataclass(frozen=True)
class StreamReport:
    """One stream and the methods that were run over it; the first curve is the baseline (zero-shot)."""

    title: str
    subtitle: str
    curves: Sequence[Curve]
    classnames: Sequence[str]
    labels: Sequence[int]  # per image, in stream order
    facts: Mapping[str, str]  # encoder, dataset, images, seed, versions, machine, command
    text: str = ""  # plain; an empty line starts a new paragraph


class Change(NamedTuple):
    """What became of one class."""

    name: str
    images: int
    before: float  # accuracy of the baseline, 0 to 1
    after: float


def html(sections: Sequence[StreamReport], facts: Mapping[str, str], title: str) -> str:
    """The whole page. `facts` hold for all sections and close the page.

    >>> curves = [Curve("zero-shot", [True, False], 0.1), Curve("DPE", [True, True], 0.2)]
    >>> stream = StreamReport("Pets", "two photos", curves, ["cat", "dog"], [0, 1], {"Seed": "0"})
    >>> page = html([stream], {}, "A small test")
    >>> "+50.0" in page and page.startswith("<!doctype html>")
    True
    """
    for section in sections:
        _check(section)
    slots = _slots(curve.name for section in sections for curve in section.curves[1:])
    parts = [_section(section, slots, number) for number, section in enumerate(sections, start=1)]
    if len(sections) > 1:
        parts.insert(0, _overview(sections))
    if facts:
        parts.append(f"<section><h2>About this page</h2>{_facts(facts)}</section>")
    style = "".join(map(_part, ("tokens.css", "chart.css", "page.css")))
    return _part("page.html").format(title=_safe(title), style=style, body="\n".join(parts), script=_part("hover.js"))


def running_accuracy_svg(
    curves: Sequence[Curve],
    *,
    width: int = 860,
    height: int = 400,
    standalone: bool = False,
    title: str = "",
    slots: Mapping[str, int] | None = None,
) -> str:
    """Accuracy so far against images seen, in an SVG of `width` x `height` pixels.

    The first curve is the baseline, the last one is drawn boldest. The range fits what comes after the
    burn-in. `standalone` gives a file of its own, with background and styles for light and dark, and draws
    `title` above the chart. `slots` number the curves' colours by name, so that a method keeps its own.

    >>> curves = [Curve("zero-shot", [True, False] * 9, 0.1), Curve("DPE", [True] * 18, 0.2)]
    >>> picture = running_accuracy_svg(curves, standalone=True, title="18 photos")
    >>> picture.startswith("<svg") and "At the end: zero-shot 50.0%, DPE 100.0%." in picture
    True
    """
    _check_curves(curves)
    slots = slots or _slots(curve.name for curve in curves[1:])
    return _chart(curves, width, height, standalone, title, slots)


# The chart


class Frame(NamedTuple):
    """Where data lie in the picture: images 0 to `images` and points `low` to `high`, in pixels."""

    left: float
    right: float
    top: float
    bottom: float
    images: int
    low: float
    high: float

    def x(self, seen: float) -> float:
        return self.left + (self.right - self.left) * seen / self.images

    def y(self, points: float) -> float:
        return self.bottom - (self.bottom - self.top) * (points - self.low) / (self.high - self.low)


def _chart(
    curves: Sequence[Curve], width: int, height: int, standalone: bool, title: str, slots: Mapping[str, int]
) -> str:
    images, narrow = len(curves[0].correct), width < 520
    running = [[100 * value for value in curve.running()] for curve in curves]  # in points
    burn = _burn_in(images)
    late = [value for values in running for value in values[burn:]]
    ticks = _range(min(late), max(late), most=5 if narrow else 6)
    # the value follows the name after a NUL; on narrow pictures there is room for the name only
    labels = [_short(_safe_characters(curve.name), 14 if narrow else 20) for curve in curves]
    if not narrow:
        labels = [f"{label}\0{curve.accuracy:.1%}" for label, curve in zip(labels, curves, strict=True)]
    edge = 24 if standalone else 0
    top = edge + (34 if standalone and title else 0) + 30
    frame = Frame(
        left=edge + 8 + max(_text_width(f"{tick:g}%") for tick in ticks),
        right=width - edge - 30 - max(_text_width(label) for label in labels),
        top=top,
        bottom=height - edge - 46,
        images=images,
        low=ticks[0],
        high=ticks[-1],
    )
    parts = [f"<title>{_safe(title or 'Accuracy so far against images seen')}</title>"]
    parts.append(f"<desc>{_safe(_described(curves))}</desc>")
    if standalone:
        parts.append(f"<style>{_part('tokens.css')}{_part('chart.css')}</style>")
        parts.append(f'<rect class="paper" width="{width}" height="{height}" rx="10"/>')
        if title:
            parts.append(f'<text class="heading" x="{edge}" y="{edge + 18}">{_safe(title)}</text>')
    parts += _axes(frame, ticks, edge, narrow)
    seen = _sampled(images)
    style = _styles(curves, slots)
    parts += _lines(frame, running, seen, burn, style)
    parts += _end_labels(frame, [values[-1] for values in running], labels, style)
    attributes = f'viewBox="0 0 {width} {height}" role="img" class="chart"'
    if standalone:
        attributes += f' width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg"'
    else:
        order = sorted(range(len(curves)), key=lambda index: -curves[index].accuracy)
        hundredths = [[round(100 * values[s - 1]) for s in seen] for values in running]
        rows = [[curves[index].name, style[index], hundredths[index], index == 0] for index in order]
        data = frame._asdict() | {"seen": seen, "curves": rows}
        attributes += f' data-chart="{_safe(json.dumps(data, separators=(",", ":")))}"'
    return f"<svg {attributes}>\n" + "\n".join(parts) + "\n</svg>"


def _range(low: float, high: float, most: int) -> list[float]:
    """Tidy ticks, in points, that enclose what lies between `low` and `high`: at most `most` steps."""
    if high - low < 2:
        low, high = max(0.0, (low + high) / 2 - 1), min(100.0, (low + high) / 2 + 1)
    for step in (0.5, 1, 2, 5, 10, 20):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [step * number for number in range(first, last + 1)]


def _image_ticks(images: int, most: int) -> list[int]:
    """Tidy numbers of images from 0 on: at most `most` steps of 1, 2 or 5 times a power of ten."""
    steps = (unit * 10**power for power in range(12) for unit in (1, 2, 5))
    step = next(step for step in steps if images / step <= most)
    return list(range(0, images + 1, step))


def _sampled(images: int) -> list[int]:
    """Evenly spread numbers of images seen, the first and the last among them."""
    points = min(images, POINTS)
    return sorted({1 + round(index * (images - 1) / max(points - 1, 1)) for index in range(points)})


def _axes(frame: Frame, ticks: Sequence[float], edge: int, narrow: bool) -> list[str]:
    left, right, bottom = _px(frame.left), _px(frame.right), _px(frame.bottom)
    parts = [f'<text class="axis" x="{edge}" y="{_px(frame.top - 16)}">Accuracy so far</text>']
    for tick in ticks:
        y = _px(frame.y(tick))
        kind = "base" if tick == ticks[0] else "grid"
        parts.append(f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{_px(frame.left - 8)}" y="{y}" dy=".33em">{tick:g}%</text>')
    for tick in _image_ticks(frame.images, 4 if narrow else 8):
        x = _px(frame.x(tick))
        parts.append(f'<line class="base" x1="{x}" x2="{x}" y1="{bottom}" y2="{_px(frame.bottom + 4)}"/>')
        parts.append(f'<text class="tick middle" x="{x}" y="{_px(frame.bottom + 19)}">{tick:,}</text>')
    x, y = _px((frame.left + frame.right) / 2), _px(frame.bottom + 41)
    parts.append(f'<text class="axis middle" x="{x}" y="{y}">Images seen</text>')
    return parts


def _lines(
    frame: Frame, running: Sequence[Sequence[float]], seen: Sequence[int], burn: int, style: Sequence[str]
) -> list[str]:
    """The curves, the burn-in pale and cut off where it leaves the range."""
    # a nested SVG clips without an id, which would have to differ from chart to chart
    left, top = frame.left, frame.top - 2
    width, height = frame.right - frame.left, frame.bottom - frame.top + 4
    parts = [f'<svg x="{_px(left)}" y="{_px(top)}" width="{_px(width)}" height="{_px(height)}">']
    for values, kind in zip(running, style, strict=True):
        points = [(s, f"{_px(frame.x(s) - left)},{_px(frame.y(values[s - 1]) - top)}") for s in seen]
        early = [point for s, point in points if s <= burn + 1]
        late = [point for s, point in points if s > burn]
        late = early[-1:] + late if early and early[-1] != late[0] else late
        if len(early) > 1:
            parts.append(f'<polyline class="line early {kind}" points="{" ".join(early)}"/>')
        parts.append(f'<polyline class="line {kind}" points="{" ".join(late)}"/>')
    return [*parts, "</svg>"]


def _end_labels(frame: Frame, ends: Sequence[float], labels: Sequence[str], style: Sequence[str]) -> list[str]:
    """A dot where each curve ends, and its name beside it, moved as little as keeps the names apart."""
    order = sorted(range(len(ends)), key=lambda index: (-ends[index], index))
    wanted = [frame.y(ends[index]) for index in order]
    parts = []
    for index, end, place in zip(order, wanted, _apart(wanted, 17, frame.top, frame.bottom), strict=True):
        name, _, value = labels[index].partition("\0")
        x = frame.right
        leader = f"{_px(x + 4)},{_px(end)} {_px(x + 16)},{_px(place)} {_px(x + 20)},{_px(place)}"
        number = f'<tspan class="value" dx="6">{value}</tspan>' if value else ""
        parts.append(f'<circle class="dot {style[index]}" cx="{_px(x)}" cy="{_px(end)}" r="3.5"/>')
        parts.append(f'<polyline class="leader {style[index]}" points="{leader}"/>')
        at = f'x="{_px(x + 25)}" y="{_px(place)}" dy=".35em"'
        parts.append(f'<text class="label {style[index]}" {at}>{_safe(name)}{number}</text>')
    return parts


def _apart(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Places in the order of `wanted` (rising), `gap` apart, nearest to it in squares, within top and bottom.

    >>> _apart([10, 11, 40], 10, 0, 100)
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


# The page


def _section(report: StreamReport, slots: Mapping[str, int], number: int) -> str:
    baseline, last = report.curves[0], report.curves[-1]
    paragraphs = [" ".join(part.split()) for part in report.text.split("\n\n")]
    parts = [
        f'<section id="stream-{number}">',
        f"<h2>{_safe(report.title)}</h2>",
        f'<p class="subtitle">{_safe(report.subtitle)}</p>' if report.subtitle else "",
        *(f"<p>{_safe(paragraph)}</p>" for paragraph in paragraphs if paragraph),
        _cards(report, slots),
        "<h3>Along the stream</h3>",
        _figure(report, slots),
    ]
    if last is not baseline:
        parts.append(_class_table(report))
    parts += ["<h3>Side by side</h3>", _method_table(report, slots)]
    if report.facts:
        parts += ["<h3>How this was made</h3>", _facts(report.facts)]
    return "\n".join(part for part in [*parts, "</section>"] if part)


def _cards(report: StreamReport, slots: Mapping[str, int]) -> str:
    cards = []
    for curve, style in zip(report.curves, _styles(report.curves, slots), strict=True):
        gain = f"<b>{_signed(_gain(report.curves[0], curve))}</b> points"
        cards.append(
            f'<li class="card {style}"><span class="name">{_safe(curve.name)}</span>'
            f'<span class="big">{100 * curve.accuracy:.1f}<small>%</small></span>'
            f'<span class="gain">{"baseline" if curve is report.curves[0] else gain}</span></li>'
        )
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _figure(report: StreamReport, slots: Mapping[str, int]) -> str:
    """The chart twice, for wide and for narrow screens (text keeps its size), and the same as a table."""
    wide = running_accuracy_svg(report.curves, width=860, height=400, slots=slots)
    narrow = running_accuracy_svg(report.curves, width=358, height=300, slots=slots)
    images = len(report.labels)
    rows = sorted({max(1, round(images * share / 10)) for share in range(1, 11)})
    running = [curve.running() for curve in report.curves]
    head = "".join(f'<th scope="col">{_safe(curve.name)}</th>' for curve in report.curves)
    body = ""
    for seen in rows:
        cells = "".join(f"<td>{values[seen - 1]:.1%}</td>" for values in running)
        body += f'<tr><th scope="row">{seen:,}</th>{cells}</tr>'
    pale = _burn_in(images)
    first = f" The first {pale:,} are drawn pale and do not set the range." if pale > 1 else ""
    return (
        f'<figure><div class="plot wide">{wide}</div><div class="plot narrow">{narrow}</div>'
        f"<figcaption>Share of right answers among the images seen so far.{first}</figcaption></figure>"
        f'<details><summary>The same as a table</summary><div class="scroll"><table><thead><tr>'
        f'<th scope="col">Images seen</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def changes(report: StreamReport) -> list[Change]:
    """What the last curve made of each class against the first, greatest gain first; classes seen only."""
    images = [0] * len(report.classnames)
    before, after = list(images), list(images)
    correct = (_plain(report.curves[0].correct), _plain(report.curves[-1].correct))
    for label, old, new in zip(_plain(report.labels), *correct, strict=True):
        images[label] += 1
        before[label] += bool(old)
        after[label] += bool(new)
    seen = [
        Change(name, n, old / n, new / n)
        for name, n, old, new in zip(report.classnames, images, before, after, strict=True)
        if n
    ]
    return sorted(seen, key=lambda change: change.before - change.after)  # stable: ties stay in class order


def _class_table(report: StreamReport) -> str:
    every = changes(report)
    gains = [change for change in every if change.after > change.before]
    losses = [change for change in every if change.after < change.before]
    names = _safe(report.curves[0].name), _safe(report.curves[-1].name)
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
            f'<tr><th scope="row">{_safe(change.name)}</th>'
            f'<td class="wide">{change.before:.0%} → {change.after:.0%}</td>'
            f'<td class="track"><div style="--zero:{100 * zero:.2f}%"><i class="{kind}" '
            f'style="left:{100 * start:.2f}%;width:{100 * abs(share):.2f}%"></i></div></td>'
            f"<td>{_signed(100 * (change.after - change.before))}</td><td>{change.images:,}</td></tr>"
        )

    shown = gains[:SHOWN], losses[-SHOWN:]
    groups = "".join(f"<tbody>{''.join(map(row, group))}</tbody>" for group in shown if group)
    return (
        f'{heading}</p><table class="classes"><thead><tr><th scope="col">Class</th>'
        '<th scope="col" class="wide">Accuracy</th>'
        '<th scope="col" class="track"><span class="hidden">Bar</span></th>'
        f'<th scope="col">Points</th><th scope="col">Images</th></tr></thead>{groups}</table>'
    )


def _method_table(report: StreamReport, slots: Mapping[str, int]) -> str:
    baseline, rows = report.curves[0], []
    for curve, style in zip(report.curves, _styles(report.curves, slots), strict=True):
        note = f'<span class="note">{_safe(curve.note)}</span>' if curve.note else ""
        pairs = list(zip(_plain(baseline.correct), _plain(curve.correct), strict=True))
        righted = sum(bool(new) > bool(old) for old, new in pairs)
        spoilt = sum(bool(new) < bool(old) for old, new in pairs)
        compared = _signed(_gain(baseline, curve)), f"{righted:,} / {spoilt:,}"
        if curve is baseline:
            compared = "–", "–"
        rows.append(
            f'<tr><th scope="row"><span class="name {style}">{_safe(curve.name)}</span>{note}</th>'
            f'<td>{curve.accuracy:.1%}</td><td>{compared[0]}</td><td class="wide">{compared[1]}</td>'
            f"<td>{_milliseconds(curve)}</td></tr>"
        )
    return (
        '<table class="methods"><thead><tr><th scope="col">Method and settings</th>'
        '<th scope="col">Accuracy</th><th scope="col">Gain, points</th>'
        '<th scope="col" class="wide">Put right / spoilt</th>'
        f'<th scope="col">ms per image</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _overview(sections: Sequence[StreamReport]) -> str:
    names = list(dict.fromkeys(curve.name for section in sections for curve in section.curves))
    rows = []
    for number, section in enumerate(sections, start=1):
        accuracies = {curve.name: curve.accuracy for curve in section.curves}
        best = max(accuracies.values())
        cells = []
        for name in names:
            if name not in accuracies:
                cells.append("<td>–</td>")
            else:
                mark = ' class="best"' if accuracies[name] == best else ""
                cells.append(f"<td{mark}>{accuracies[name]:.1%}</td>")
        link = f'<a href="#stream-{number}">{_safe(section.title)}</a>'
        rows.append(f'<tr><th scope="row">{link}</th>{"".join(cells)}<td>{len(section.labels):,}</td></tr>')
    head = "".join(f'<th scope="col">{_safe(name)}</th>' for name in names)
    return (
        '<section><h2>At a glance</h2><div class="scroll"><table><thead><tr><th scope="col">Stream</th>'
        f'{head}<th scope="col">Images</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "</section>"
    )


def _facts(facts: Mapping[str, str]) -> str:
    items = []
    for key, value in facts.items():
        said = f"<code>{_safe(value)}</code>" if key.lower() == "command" else _safe(value)
        items.append(f"<div><dt>{_safe(key)}</dt><dd>{said}</dd></div>")
    return f"<dl>{''.join(items)}</dl>"


# Words and numbers


def _safe(text: object) -> str:
    """Text for HTML and XML alike: markup escaped, characters that XML forbids replaced."""
    return escape(_safe_characters(str(text)))


def _safe_characters(text: str) -> str:
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def _text_width(label: str) -> float:
    """About as many pixels as a label of 13 px takes, on the generous side."""
    wide, thin = "mwMWGOQ%@…", "iljtf.,:;'|! "
    return sum(12.5 if letter in wide else 5 if letter in thin else 8.3 for letter in label)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _gain(baseline: Curve, curve: Curve) -> float:
    return 100 * (curve.accuracy - baseline.accuracy)


def _signed(points: float) -> str:
    text = f"{abs(points):.1f}"
    return text if text == "0.0" else ("+" if points > 0 else "−") + text


def _milliseconds(curve: Curve) -> str:
    value = 1000 * curve.seconds / len(curve.correct)
    if not math.isfinite(value):
        return "–"
    if 0 < value < 0.01:
        return "&lt;0.01"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _described(curves: Sequence[Curve]) -> str:
    ends = ", ".join(f"{curve.name} {curve.accuracy:.1%}" for curve in curves)
    return f"Lines of accuracy so far over {len(curves[0].correct):,} images. At the end: {ends}."


def _slots(names: Iterable[str]) -> dict[str, int]:
    """A number for each name, from 1 on, in order of first appearance."""
    return {name: slot for slot, name in enumerate(dict.fromkeys(names), start=1)}


def _styles(curves: Sequence[Curve], slots: Mapping[str, int]) -> list[str]:
    """Classes for each curve's colour, its dashes where colours run out, and the weight of the last one."""
    styles = ["s0"]
    for curve in curves[1:]:
        dashes, colour = divmod(slots[curve.name] - 1, COLOURS)
        styles.append(f"s{colour + 1}" + (f" dash{min(dashes, 2)}" if dashes else ""))
    if len(styles) > 1:
        styles[-1] += " last"
    return styles


def _burn_in(images: int) -> int:
    """How many images, at the start, do not set the range of the chart."""
    share, least = BURN_IN
    return min(max(math.ceil(share * images), least), images // 4)


def _check_curves(curves: Sequence[Curve]) -> None:
    if not curves:
        raise InputError("A report needs at least one curve, the baseline first.")
    for curve in curves:
        if len(curve.correct) != len(curves[0].correct):
            raise InputError(
                f"Curve '{curve.name}' has {len(curve.correct)} images, '{curves[0].name}' has "
                f"{len(curves[0].correct)}; all must run over the same stream."
            )
    if not len(curves[0].correct):
        raise InputError(f"Curve '{curves[0].name}' has no images; there is nothing to report.")


def _check(report: StreamReport) -> None:
    _check_curves(report.curves)
    labels, images = _plain(report.labels), len(report.curves[0].correct)
    if len(labels) != images:
        raise InputError(f"'{report.title}': {len(labels)} labels for {images} images.")
    wrong = next((label for label in labels if not 0 <= label < len(report.classnames)), None)
    if wrong is not None:
        known = len(report.classnames)
        raise InputError(f"'{report.title}': label {wrong}, where {known} class names are given.")


def _part(name: str) -> str:
    """A style sheet, a script or the frame of the page, from the package's data."""
    return (files("testtime") / "data" / "report" / name).read_text(encoding="utf-8")
