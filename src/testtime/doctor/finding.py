"""What the doctor reports: findings, from fine to problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Severity = Literal["problem", "warning", "note", "fine"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note", "fine")  # worst first


class Finding(NamedTuple):
    """One thing that was looked at: what was seen, why it matters, and the way out; a fine one has no more to say."""

    id: str
    severity: Severity
    seen: str
    why: str = ""
    fix: str = ""


def fine(id: str, seen: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(id, "fine", seen)


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names in quotes, and how many more there are.

    >>> some(["cat", "dog"]), some("abcde")
    ("'cat', 'dog'", "'a', 'b', 'c' and 2 more")
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """The findings by severity, and within one as found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
