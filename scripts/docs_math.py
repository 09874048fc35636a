"""Converts equations to MathML when the documentation is built, so that the pages need no script and no font.

A hook of mkdocs: `pymdownx.arithmatex` marks the equations, and this converts them.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """A page's HTML with its equations as MathML."""
    content = BLOCK.sub(lambda found: f'<div class="equation">{mathml(found[1], "block")}</div>', content)
    return INLINE.sub(lambda found: mathml(found[1], "inline"), content)


def mathml(latex: str, display: str) -> str:
    """One equation, with its source as the label for screen readers."""
    source = html.unescape(latex).strip()
    rendered = convert(source, display=display)
    return rendered.replace("<math ", f'<math aria-label="{html.escape(source)}" ', 1)
