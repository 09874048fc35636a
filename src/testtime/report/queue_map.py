"""The queues: a map of their contents at each snapshot, and a list of the contents by class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from testtime.report.data import Queued, Section, Snapshot, TablesReport, UnlabelledReport
from testtime.report.formatting import count, px, short, text_width
from testtime.report.markup import folded, safe
from testtime.report.thumbnails import image_name, thumbnail

SIDE, EDGE = 420, 18  # pixels: side of a map, and margin around its points
NAMED = 22  # at most so many class names on a map
LISTED = 20  # classes whose queue is listed before the rest is collapsed
RADIUS = 4.2


def queue_map(report: Section, section: int) -> str:
    """The maps of all snapshots side by side and the contents of the last one; empty if there are no queues."""
    queues = report.queues
    if queues is None or not queues.entries:
        return ""
    heading = "Maps" if isinstance(report, TablesReport) else f"Contents of the queues of {safe(queues.method)}"
    parts = [f"<h3>{heading}</h3>"]
    if queues.text:
        parts.append(f"<p>{safe(queues.text)}</p>")
    if queues.placed:
        maps = "".join(f"<li>{_map(report, snapshot, queues.entries, section)}</li>" for snapshot in queues.snapshots)
        legend = "Each point is a feature in a queue, close to similar ones (t-SNE, one map for all snapshots)."
        if not isinstance(report, UnlabelledReport):
            legend += " Blue discs are in the queue of their true class, orange diamonds in another."
        legend += " Point at one to see its image and to highlight its class in every map."
        parts.append(f'<figure><ul class="maps">{maps}</ul><figcaption>{legend}</figcaption></figure>')
    parts.append(contents(report, queues.snapshots[-1], section))
    return "".join(parts)


def contents(report: Section, snapshot: Snapshot, section: int) -> str:
    """The contents of each class's queue, as thumbnails or numbers; long lists are collapsed."""
    held: dict[int, str] = defaultdict(str)
    for entry in sorted(snapshot.entries, key=lambda entry: entry.label):
        truth = _true_class(report, entry)
        mark = f'<em title="label: {safe(truth)}">wrong</em>' if truth is not None else ""
        held[entry.label] += f'<span class="held">{thumbnail(report, entry.image, section)}{mark}</span>'
    rows = [f"<div><dt>{safe(report.classnames[label])}</dt><dd>{cells}</dd></div>" for label, cells in held.items()]
    empty = len(report.classnames) - len(held)
    heading = f"After {count(snapshot.images, 'image')}, by class, most confident first"
    heading += f"; {count(empty, 'class')} with an empty queue" if empty else ""
    first, rest = (f'<dl class="queues">{"".join(part)}</dl>' for part in (rows[:LISTED], rows[LISTED:]))
    more = len(rows) - LISTED
    return f"<h4>{heading}</h4>{first}" + (folded(count(more, "more class"), rest) if more > 0 else "")


def _true_class(report: Section, entry: Queued) -> str | None:
    """The name of an image's true class, if it is known and the image is in another class's queue; else None."""
    truth = entry.label if report.labels is None else report.labels[entry.image]
    return report.classnames[truth] if truth != entry.label else None


def _map(report: Section, snapshot: Snapshot, every: Sequence[Queued], section: int) -> str:
    """One snapshot, scaled to `every` entry of all snapshots."""
    inner = SIDE - 2 * EDGE
    ranges = [(min(values), max(values)) for values in zip(*((e.x or 0.0, e.y or 0.0) for e in every), strict=True)]
    scale = inner / (max(high - low for low, high in ranges) or 1.0)
    # centred if it is not square
    left, top = (EDGE + (inner - scale * (high - low)) / 2 - scale * low for low, high in ranges)
    positions = [(left + scale * (e.x or 0.0), top + scale * (e.y or 0.0)) for e in snapshot.entries]
    points = [_point(report, entry, *at, section) for entry, at in zip(snapshot.entries, positions, strict=True)]
    summary = f"After {count(snapshot.images, 'image')}: {len(positions):,} features"
    if not isinstance(report, UnlabelledReport):
        wrong = sum(_true_class(report, entry) is not None for entry in snapshot.entries)
        summary += f", {wrong:,} in a wrong queue"
    return (
        f'<span class="soft">{summary}</span><div class="plot"><svg viewBox="0 0 {SIDE} {SIDE}" role="img" '
        f'class="chart map" data-map><title>Map of the queues</title><desc>{summary}.</desc>'
        f'<rect class="field" width="{SIDE}" height="{SIDE}" rx="8"/>{"".join(points)}'
        f"{''.join(_names(report.classnames, snapshot.entries, positions))}</svg></div>"
    )


def _point(report: Section, entry: Queued, x: float, y: float, section: int) -> str:
    truth = _true_class(report, entry)
    lines = [str(report.classnames[entry.label]), image_name(report, entry.image)]
    if truth is not None:
        lines.append(f"label: {truth}")
    thumbnail_class = f"t{section}-{entry.image}" if entry.image in report.thumbnails else ""
    data = f'data-x="{px(x)}" data-y="{px(y)}" data-label="{entry.label}" data-thumbnail="{thumbnail_class}"'
    data += f' data-text="{safe(chr(10).join(lines))}"'
    if truth is None:
        return f'<circle class="point" cx="{px(x)}" cy="{px(y)}" r="{RADIUS}" {data}/>'
    reach = RADIUS + 1
    corners = (x, y - reach), (x + reach, y), (x, y + reach), (x - reach, y)
    path = " ".join(f"{px(a)},{px(b)}" for a, b in corners)
    return f'<polygon class="point off" points="{path}" {data}/>'


def _names(classnames: Sequence[str], entries: Sequence[Queued], positions: Sequence[tuple[float, float]]) -> list[str]:
    """Names of the most compact classes, as many as fit without overlap."""
    members: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for entry, position in zip(entries, positions, strict=True):
        members[entry.label].append(position)
    centres = []
    for label, group in members.items():
        x, y = (sum(values) / len(group) for values in zip(*group, strict=True))
        spread = max(abs(a - x) + abs(b - y) for a, b in group)
        if len(group) > 1 or len(members) <= NAMED:
            centres.append((spread, label, x, min(b for _, b in group)))
    taken: list[tuple[float, float, float]] = []  # centre, baseline and half width of the names so far
    parts = []
    for _, label, x, y in sorted(centres):
        name = short(str(classnames[label]), 18)
        half = 0.8 * text_width(name) / 2 + 3
        x, y = min(max(x, half), SIDE - half), max(y - 9, 14)
        free = all(abs(y - b) > 15 or abs(x - a) > half + width for a, b, width in taken)
        if free and len(taken) < NAMED:
            taken.append((x, y, half))
            parts.append(f'<text class="class-name middle" x="{px(x)}" y="{px(y)}">{safe(name)}</text>')
    return parts
