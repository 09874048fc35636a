"""HTML: escaping, tables, collapsible and scrolling parts, and the style sheets and scripts in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from testtime.display import safe as safe
from testtime.display import safe_characters as safe_characters

WIDE = ' class="wide"'  # of cells that are hidden on narrow screens


class Cell(NamedTuple):
    """A table cell that is already HTML; any other value is escaped."""

    html: str
    attributes: str = ""  # with a leading space


Row = Sequence[object]  # cells; the first is the row's heading


def table(head: Row, *bodies: Iterable[Row], kind: str = "", caption: str = "") -> str:
    """A table of one or more groups of rows; `kind` is its class.

    >>> table(["Class"], [["<cat>", Cell("<b>3</b>", ' class="best"')]]).partition("<tbody>")[2]
    '<tr><th scope="row">&lt;cat&gt;</th><td class="best"><b>3</b></td></tr></tbody></table>'
    """
    attributes = f' class="{kind}"' if kind else ""
    above = f"<caption>{safe(caption)}</caption>" if caption else ""
    top = "".join(_cell("th", cell, ' scope="col"') for cell in head)
    groups = "".join(f"<tbody>{''.join(map(_row, body))}</tbody>" for body in bodies)
    return f"<table{attributes}>{above}<thead><tr>{top}</tr></thead>{groups}</table>"


def _row(cells: Row) -> str:
    first, *others = cells
    heading = _cell("th", first, ' scope="row"')
    return f"<tr>{heading}{''.join(_cell('td', cell) for cell in others)}</tr>"


def _cell(tag: str, cell: object, scope: str = "") -> str:
    html, attributes = cell if isinstance(cell, Cell) else (safe(cell), "")
    return f"<{tag}{scope}{attributes}>{html}</{tag}>"


def scrolling(content: str, kind: str = "") -> str:
    """Content that scrolls horizontally if it is too wide."""
    return f'<div class="scroll{kind and f" {kind}"}" tabindex="0">{content}</div>'


def folded(summary: str, content: str) -> str:
    """Content that a click on its summary opens."""
    return f"<details><summary>{safe(summary)}</summary>{content}</details>"


def as_table(head: Row, rows: Iterable[Row], summary: str = "Show as a table") -> str:
    """The numbers of a chart as a collapsed table."""
    return folded(summary, scrolling(table(head, rows)))


def card(name: str, style: str, big: str, below: str) -> str:
    """A method with its main number, `big`, and a line below it; both are HTML."""
    return (
        f'<li class="card {style}"><span class="name">{safe(name)}</span><span class="big">{big}</span>'
        f'<span class="gain">{below}</span></li>'
    )


@cache
def asset(name: str) -> str:
    """A style sheet, a script or the page template, from the package's data."""
    return (files("testtime") / "report" / "assets" / name).read_text(encoding="utf-8")
