"""The ranks of the boards in `docs/board`, for the page on leaderboards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import table

BOARDS = Path(__file__).parents[2] / "docs" / "board"
COLUMNS = {
    "one setting, all datasets": ("leaderboard.json", "one-setting", "all cells"),
    "one setting, Caltech101": ("leaderboard.json", "one-setting", "dataset: caltech101"),
    "per dataset, Caltech101": ("leaderboard.json", "per-dataset", "dataset: caltech101"),
    "one setting, demo": ("demo.json", "one-setting", "all cells"),
}
HEAD = ["method", *COLUMNS, "below zero-shot"]


def ranks() -> str:
    """The rank of each method in some tables, with its gain over zero-shot and the interval of that.

    A method that lacks some of the streams has "-".
    """
    columns = [
        {row["label"]: row for row in json.loads((BOARDS / file).read_text())["standings"][track][cells]}
        for file, track, cells in COLUMNS.values()
    ]
    rows = [
        [
            label,
            *(_rank(column.get(label)) for column in columns),
            f"{100 * row['below']:.0f}%" if row["whole"] else "-",
        ]
        for label, row in columns[0].items()
    ]
    return table(HEAD, rows) + "\n"


def _rank(row: dict[str, Any] | None) -> str:
    if row is None or row["rank"] is None:
        return "-"
    low, mean, high = (100 * row["gap"][name] for name in ("low", "mean", "high"))
    return f"{row['rank']} ({mean:+.2f}; {low:+.2f} to {high:+.2f})"
