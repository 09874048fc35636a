"""The queues: a map of what they hold at each moment, and a list of it by class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from testtime.report.data import Queued, QueueMap, QueuesReport, Snapshot, UnlabelledReport
from testtime.report.pictures import Pictured, image_name, thumbnail
from testtime.report.words import count, plain, px, safe, short, text_width

SIDE, EDGE = 420, 18  # pixels of a map, and around its points
NAMED = 22  # most classes named on a map
LISTED = 20  # classes whose queue is listed before the rest is folded away
RADIUS = 4.2


def queues(report: Pictured, section: int) -> str:
    """The maps of all snapshots side by side and the contents of the last one; nothing where there is no queue."""
    given = report.queues
    if given is None or not any(snapshot.entries for snapshot in given.snapshots):
        return ""
    heading = "Maps" if isinstance(report, QueuesReport) else f"What the queues of {safe(given.method)} hold"
    parts = [f"<h3>{heading}</h3>"]
    if given.text:
        parts.append(f"<p>{safe(given.text)}</p>")
    if given.placed:
        maps = "".join(f"<li>{_map(report, given, snapshot, section)}</li>" for snapshot in given.snapshots)
        legend = "Each point is a feature in a queue, near to those it resembles (t-SNE, one map for all moments)."
        if not isinstance(report, UnlabelledReport):
            legend += " Blue discs are in the queue of their true class, orange diamonds in a wrong one."
        legend += " Point at one to see its image and to find its class in every map."
        parts.append(f'<figure><ul class="maps">{maps}</ul><figcaption>{legend}</figcaption></figure>')
    parts.append(contents(report, given.snapshots[-1], section))
    return "".join(parts)


def contents(report: Pictured, snapshot: Snapshot, section: int) -> str:
    """What each class's queue holds, as pictures or numbers; many classes are folded away."""
    held: dict[int, list[int]] = defaultdict(list)
    for entry in snapshot.entries:
        held[entry.label].append(entry.image)
    labels = None if isinstance(report, UnlabelledReport) else plain(report.labels)

    def row(label: int) -> str:
        cells = []
        for image in held[label]:
            wrong = labels is not None and labels[image] != label
            mark = f'<em title="it is {safe(report.classnames[labels[image]])}">wrong</em>' if labels and wrong else ""
            cells.append(f'<span class="held">{thumbnail(report, image, section)}{mark}</span>')
        return f"<div><dt>{safe(report.classnames[label])}</dt><dd>{''.join(cells)}</dd></div>"

    rows = [row(label) for label in sorted(held)]
    empty = len(report.classnames) - len(held)
    words = f"After {count(snapshot.images, 'image')}, by class, most confident first"
    words += f"; {count(empty, 'class')} without any" if empty else ""
    first, rest = ("".join(part) for part in (rows[:LISTED], rows[LISTED:]))
    more = f"<summary>{count(len(rows) - LISTED, 'more class')}</summary>"
    folded = f'<details>{more}<dl class="queues">{rest}</dl></details>' if rest else ""
    return f'<h4>{words}</h4><dl class="queues">{first}</dl>{folded}'


def _map(report: Pictured, queue_map: QueueMap, snapshot: Snapshot, section: int) -> str:
    every = [entry for moment in queue_map.snapshots for entry in moment.entries]
    xs, ys = ([float(getattr(entry, axis)) for entry in every] for axis in "xy")
    span = max(max(xs) - min(xs), max(ys) - min(ys)) or 1.0
    scale = (SIDE - 2 * EDGE) / span
    # the map is centred where it is not square
    left = EDGE + (SIDE - 2 * EDGE - scale * (max(xs) - min(xs))) / 2 - scale * min(xs)
    top = EDGE + (SIDE - 2 * EDGE - scale * (max(ys) - min(ys))) / 2 - scale * min(ys)
    places = [(left + scale * float(e.x or 0), top + scale * float(e.y or 0)) for e in snapshot.entries]
    labels = None if isinstance(report, UnlabelledReport) else plain(report.labels)
    points, wrong = [], 0
    for entry, (x, y) in zip(snapshot.entries, places, strict=True):
        miss = labels is not None and labels[entry.image] != entry.label
        wrong += miss
        points.append(_point(report, entry, x, y, labels[entry.image] if labels and miss else None, section))
    words = f"After {count(snapshot.images, 'image')}: {len(places):,} features"
    words += f", {wrong:,} in a wrong queue" if labels is not None else ""
    return (
        f'<span class="soft">{words}</span><div class="plot"><svg viewBox="0 0 {SIDE} {SIDE}" role="img" '
        f'class="chart map" data-map><title>Map of the queues</title><desc>{words}.</desc>'
        f'<rect class="field" width="{SIDE}" height="{SIDE}" rx="8"/>{"".join(points)}'
        f"{''.join(_names(report.classnames, snapshot.entries, places))}</svg></div>"
    )


def _point(report: Pictured, entry: Queued, x: float, y: float, truth: int | None, section: int) -> str:
    said = [str(report.classnames[entry.label]), image_name(report, entry.image)]
    if truth is not None:
        said.append(f"in truth {report.classnames[truth]}")
    picture = f"t{section}-{entry.image}" if entry.image in report.thumbnails else ""
    data = f'data-x="{px(x)}" data-y="{px(y)}" data-label="{entry.label}" data-picture="{picture}"'
    data += f' data-said="{safe(chr(10).join(said))}"'
    if truth is None:
        return f'<circle class="point" cx="{px(x)}" cy="{px(y)}" r="{RADIUS}" {data}/>'
    reach = RADIUS + 1
    corners = (x, y - reach), (x + reach, y), (x, y + reach), (x - reach, y)
    path = " ".join(f"{px(a)},{px(b)}" for a, b in corners)
    return f'<polygon class="point off" points="{path}" {data}/>'


def _names(classnames: Sequence[str], entries: Sequence[Queued], places: Sequence[tuple[float, float]]) -> list[str]:
    """Names beside the classes that lie closest together, as many as find room without covering each other."""
    members: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for entry, place in zip(entries, places, strict=True):
        members[entry.label].append(place)
    centres = []
    for label, group in members.items():
        x, y = (sum(values) / len(group) for values in zip(*group, strict=True))
        spread = max(abs(a - x) + abs(b - y) for a, b in group)
        if len(group) > 1 or len(members) <= NAMED:
            centres.append((spread, label, x, min(b for _, b in group)))
    taken: list[tuple[float, float, float]] = []  # middle, line and half the width of the names placed
    parts = []
    for _, label, x, y in sorted(centres):
        name = short(str(classnames[label]), 18)
        half = 0.8 * text_width(name) / 2 + 3
        x, y = min(max(x, half), SIDE - half), max(y - 9, 14)
        free = all(abs(y - b) > 15 or abs(x - a) > half + width for a, b, width in taken)
        if free and len(taken) < NAMED:
            taken.append((x, y, half))
            parts.append(f'<text class="place middle" x="{px(x)}" y="{px(y)}">{safe(name)}</text>')
    return parts
