"""The diagram of the subpackages: boxes in the order of the data flow, arrows from the page's table."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# the boxes from top to bottom, each in one of three columns; the arrows between them come from the table
LAYERS = (
    {"core": 1},
    {"files": 0, "machine": 2},
    {"images": 0, "text": 2},
    {"datasets": 0, "encoding": 1, "methods": 2},
    {"steppers": 2},
    {"guard": 2},
    {"session": 1},
    {"report": 1},
    {"experiments": 0, "doctor": 1, "serve": 2},
    {"cluster": 2},
    {"cli": 1},
)
WIDTH, BOX, TALL, STEP = 640, 150, 34, 66
ROW = re.compile(r"^\| `([a-z]+)` \|.*\|([^|]*)\|$", re.M)


def subpackages(page: str) -> dict[str, list[str]]:
    """The subpackages in the page's table, each with those that it depends on."""
    return {name: re.findall(r"`([a-z]+)`", on) for name, on in ROW.findall(page)}


def diagram() -> str:
    """The subpackages as SVG, in the page's own colours."""
    centres = {
        name: (WIDTH * (2 * column + 1) / 6, STEP * depth + TALL)
        for depth, layer in enumerate(LAYERS)
        for name, column in layer.items()
    }
    parts = []
    for name, below in subpackages(PAGE.read_text()).items():
        x, y = centres[name]
        for other in below:
            a, b = centres[other]
            start, end = b + TALL / 2, y - TALL / 2 - 5
            bend = (start + end) / 2
            parts.append(
                f'<path d="M{a:g} {start:g}C{a:g} {bend:g} {x:g} {bend:g} {x:g} {end:g}" marker-end="url(#tip)"/>'
            )
    boxes = [
        f'<rect x="{x - BOX / 2:g}" y="{y - TALL / 2:g}" width="{BOX}" height="{TALL}" rx="6"/>'
        f'<text x="{x:g}" y="{y + 5:g}">{escape(name)}</text>'
        for name, (x, y) in centres.items()
    ]
    height = STEP * (len(LAYERS) - 1) + 2 * TALL
    return (
        f'<svg class="subpackages" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The subpackages, and which depends on which" xmlns="http://www.w3.org/2000/svg">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z"/></marker></defs>{"".join(parts + boxes)}</svg>\n'
    )
