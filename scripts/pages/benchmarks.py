"""Tables of the fifteen benchmarks: their contents and sources, and their folder layouts."""

from __future__ import annotations

from pages import table as markdown
from testtime.datasets import BENCHMARKS


def table() -> str:
    """Classes, test images, terms and source of every benchmark."""
    rows = [
        [row.title, f"`{row.name}`", f"{row.classes:,}", f"{row.images:,}", row.terms, f"[{row.archive}]({row.source})"]
        for row in BENCHMARKS
    ]
    return markdown(["dataset", "name", "classes", "test images", "terms", "download"], rows) + "\n"


def layouts() -> str:
    """The folders of every benchmark in both layouts, and the file that lists its images."""
    rows = [
        [f"`{row.name}`", f"`{row.coop}`", f"`{row.tpt}`", f"`{row.split}`" if row.split else "its folders"]
        for row in BENCHMARKS
    ]
    return markdown(["name", "layout of CoOp", "layout of TPT", "images listed in"], rows) + "\n"
