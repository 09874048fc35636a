"""What is there of the benchmarks: found where, whole or not, and what to download for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from testtime.datasets.benchmarks import BENCHMARKS, SPLITS, Benchmark
from testtime.datasets.locate import locate, read_benchmark
from testtime.types import InputError

State = Literal["complete", "half copied", "differs", "broken", "missing"]


class Finding(NamedTuple):
    """One benchmark as it was found."""

    row: Benchmark
    state: State
    folder: Path | None = None  # the dataset's own
    layout: str = ""
    images: int = 0
    classes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the benchmark can be run as it is."""
        return self.images > 0


def check_benchmarks(root: str | Path, on_row: Callable[[Benchmark], None] | None = None) -> list[Finding]:
    """One finding per benchmark in `root`, in the order of the table; `on_row` hears of each before it is read."""
    findings = []
    for row in BENCHMARKS:
        if on_row:
            on_row(row)
        findings.append(_check(row, Path(root)))
    return findings


def _check(row: Benchmark, root: Path) -> Finding:
    place = locate(row, root)
    if place is None:
        return Finding(row, "missing", notes=(how_to_get(row),))
    try:
        data = read_benchmark(place)
    except InputError as problem:
        return Finding(row, "broken", place.home, place.layout, notes=(str(problem),))
    size = len(data), len(data.classnames)
    state: State = "complete" if size == (row.images, row.classes) else "half copied"
    if state != "complete" and (size[0] >= row.images or size[1] > row.classes):
        state = "differs"
    return Finding(row, state, place.home, place.layout, *size, data.notes)


def how_to_get(row: Benchmark) -> str:
    """What to download, from where, and into which folder."""
    split = f", and {row.split} linked from {SPLITS}" if row.kind == "split" else ""
    return f"{row.archive} from {row.source} into {row.coop}{split}"
