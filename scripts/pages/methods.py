"""The page on methods: what each does, its settings, and its cost."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pages import NOTICE, table
from testtime import registry
from testtime.methods.base import ASSUMPTIONS

COSTS = Path(__file__).parents[2] / "benchmarks" / "results" / "methods.json"


def comments(cls: type[Any]) -> dict[str, str]:
    """The comment beside each setting in the source, including inherited settings."""
    beside = {}
    for part in reversed([one for one in cls.__mro__ if one is not object]):
        for line in inspect.getsource(part).splitlines():
            name, colon, rest = line.strip().partition(":")
            if colon and name.isidentifier() and "=" in rest:
                beside[name] = rest.split("#", 1)[1].strip() if "#" in rest else beside.get(name, "")
    return beside


def costs() -> tuple[dict[tuple[str, int], float], str, str]:
    """Measured milliseconds by method and number of classes (64 views, 512 features), their conditions, the tower."""
    report = json.loads(COSTS.read_text())
    plain = [row for row in report["rows"] if (row["views"], row["dim"]) == (64, 512)]
    return (
        {(row["method"], row["classes"]): row["ms"] for row in plain},
        report["conditions"],
        report.get("tower", "not measured yet"),
    )


def cost(milliseconds: float | None, tower: bool) -> str:
    """A cell of the table; a star marks methods that use a text tower."""
    return "not measured" if milliseconds is None else f"{milliseconds:.2f}{'*' * tower}"


def page() -> str:
    """The page, in Markdown."""
    measured, conditions, tower = costs()
    rows = []
    for name in registry.METHODS.ours:
        cls = registry.method_class(name)
        rows.append(
            [
                f"[`{name}`](#{name})",
                cls.adapts,
                "yes" if cls.remembers else "no",
                cls.gradients,
                "needed" if cls.needs_tower else "no",
                ", ".join(cls.assumes) or "nothing",
                *(cost(measured.get((name, classes)), cls.needs_tower) for classes in (100, 1000)),
            ]
        )
    head = ["name", "adapts", "remembers", "gradients", "text tower", "assumes", "ms at C = 100", "ms at C = 1000"]
    lines = [
        "# Methods",
        "",
        NOTICE,
        "",
        "See [choosing a method](choosing.md) for advice.",
        "",
        table(head, rows),
        "",
        "What a method assumes, with its default settings: "
        + "; ".join(f"*{name}*, {meaning}" for name, meaning in ASSUMPTIONS.items())
        + ".",
        "",
        "Cost: milliseconds per image on stored features, 64 views, 512 features, measured with "
        f"`benchmarks/methods.py` on a shared two-core machine ({conditions}). A star marks methods that ran "
        f"through a small text tower ({tower}); their cost is that of the tower, and a real "
        "encoder's tower costs many times as much.",
    ]
    for name in registry.METHODS.ours:
        cls = registry.method_class(name)
        lines += ["", f"## {name}", "", f"{cls.summary}.", "", f"*{cls.source}*", ""]
        settings = fields(cls)
        if not settings:
            lines.append("Nothing to set.")
            continue
        if cls.presets:
            lines += [f"Presets: {', '.join(f'`{preset}`' for preset in cls.presets)}.", ""]
        beside = comments(cls)
        rows = [[f"`{entry.name}`", f"`{entry.default!r}`", beside.get(entry.name, "")] for entry in settings]
        lines.append(table(["setting", "default", ""], rows))
    return "\n".join(lines) + "\n"
