"""How objects are shown: short lines of text, and HTML for notebooks.

The HTML is a fragment that carries its own styles and runs no script; all text in it is escaped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape

ROW = "display:flex;align-items:center;gap:8px;margin:2px 0"
NAME = "width:10em;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;text-align:right"
COLOUR = "#0072b2"  # the first colour of a report's curves


def safe(text: object) -> str:
    """Text for HTML and XML alike: markup escaped, characters that XML forbids replaced."""
    return escape(safe_characters(str(text)))


def safe_characters(text: str) -> str:
    """Text without the characters that XML forbids."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def short(name: str, most: int) -> str:
    """The name, truncated with an ellipsis if it is longer than `most` characters."""
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def line(text: str, most: int) -> str:
    """The text on one line of at most `most` characters.

    >>> line("red \\n fox", 20), line("red fox", 5)
    ('red fox', 'red…')
    """
    return short(" ".join(text[: 4 * most].split()), most)


def listed(names: Sequence[str], most: int = 40) -> str:
    """The first few names on one line of at most `most` characters.

    >>> listed(["cat", "dog", "fox"]), listed(["class 0"] * 1000, 20)
    ('cat, dog, fox', 'class 0, class 0, c…')
    """
    return line(", ".join(names[:most]), most)


def facts(title: str, pairs: Mapping[str, object]) -> str:
    """A small table of facts, as HTML."""
    rows = "".join(
        f'<tr><th style="text-align:left">{safe(key)}</th><td style="text-align:left">{safe(value)}</td></tr>'
        for key, value in pairs.items()
    )
    return f"<table><caption><b>{safe(title)}</b></caption><tbody>{rows}</tbody></table>"


def bars(shares: Iterable[tuple[str, float]]) -> str:
    """A horizontal bar for each name and its share of 1, as HTML."""
    return "".join(
        f'<div style="{ROW}"><span style="{NAME}" title="{safe(name)}">{safe(name)}</span>'
        f'<span style="display:inline-block;width:{160 * share:.0f}px;height:10px;background:{COLOUR}"></span>'
        f"<span>{share:.1%}</span></div>"
        for name, share in shares
    )


def in_notebook() -> bool:
    """Whether this is a notebook, which draws HTML, and not a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
