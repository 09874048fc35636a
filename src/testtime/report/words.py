"""Words and numbers as the page writes them, and the parts of it that lie in files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any


def safe(text: object) -> str:
    """Text for HTML and XML alike: markup escaped, characters that XML forbids replaced."""
    return escape(safe_characters(str(text)))


def safe_characters(text: str) -> str:
    """Text without the characters that XML forbids."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def plain(values: Any) -> list[Any]:
    """A list of plain values, from a tensor, an array or any sequence."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def short(name: str, most: int) -> str:
    """The name, cut off with an ellipsis where it is longer than `most` letters."""
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def text_width(label: str) -> float:
    """About as many pixels as a label of 13 px takes, on the generous side."""
    wide, thin = "mwMWGOQ%@…", "iljtf.,:;'|! "
    return sum(12.5 if letter in wide else 5 if letter in thin else 8.3 for letter in label)


def px(value: float) -> str:
    """A length in pixels, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def signed(points: float) -> str:
    """A change in points with its sign; none where it rounds to nothing."""
    text = f"{abs(points):.1f}"
    return text if text == "0.0" else ("+" if points > 0 else "−") + text


def milliseconds(seconds: float, images: int) -> str:
    """Milliseconds per image."""
    value = 1000 * seconds / images
    if not math.isfinite(value):
        return "–"
    if 0 < value < 0.01:
        return "&lt;0.01"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def count(number: int, what: str) -> str:
    """A number of things in words: 1 image, 2,465 images.

    >>> count(1, "class"), count(2465, "image")
    ('1 class', '2,465 images')
    """
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending}"


def as_table(head: Sequence[object], rows: Iterable[Sequence[object]], summary: str = "The same as a table") -> str:
    """Numbers behind a chart, folded away; the first cell of each row is its heading."""
    return f"<details><summary>{safe(summary)}</summary>{table(head, rows)}</details>"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls inside the page where it is too wide; the first cell of each row is its heading."""
    top = "".join(f'<th scope="col">{safe(cell)}</th>' for cell in head)
    body = ""
    for first, *others in rows:
        body += f'<tr><th scope="row">{safe(first)}</th>{"".join(f"<td>{safe(cell)}</td>" for cell in others)}</tr>'
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


@cache
def part(name: str) -> str:
    """A style sheet, a script or the frame of the page, from the package's data."""
    return (files("testtime") / "report" / "assets" / name).read_text(encoding="utf-8")
