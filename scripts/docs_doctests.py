"""Examples in docstrings become code blocks in the reference.

An extension of griffe, which reads the docstrings: to Markdown `>>>` would be a quotation in a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences every run of lines that starts with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mend the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with its examples in fences, and a drawing that is indented left alone."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
