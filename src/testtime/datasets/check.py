"""Which of the named datasets are on disk: where, complete or not, and what to download for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from testtime.datasets import open_dataset
from testtime.datasets.benchmarks import BENCHMARKS, DATASETS, SPLITS, Benchmark
from testtime.datasets.locate import locate, read_benchmark
from testtime.types import InputError

State = Literal["complete", "found", "half copied", "differs", "broken", "missing"]


class Finding(NamedTuple):
    """One dataset as it was found."""

    name: str
    row: Benchmark | None  # None for a plug-in's dataset, whose expected size is unknown
    state: State
    folder: Path | None = None  # the dataset's own; for a plug-in's, the folder searched
    layout: str = ""
    images: int = 0
    classes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the dataset can be run as it is."""
        return self.images > 0


def check_datasets(root: str | Path, on_name: Callable[[str], None] | None = None) -> list[Finding]:
    """One finding per dataset in `root`: the benchmarks in the order of their table, then those of plug-ins.

    `on_name` is called with the name of each before it is read.
    """
    findings = []
    for name, row in ({row.name: row for row in BENCHMARKS} | dict.fromkeys(DATASETS.plug_ins())).items():
        if on_name:
            on_name(row.title if row else name)
        findings.append(_check(row, Path(root)) if row else _check_plug_in(name, Path(root)))
    return findings


def _check(row: Benchmark, root: Path) -> Finding:
    location = locate(row, root)
    if location is None:
        return Finding(row.name, row, "missing", notes=(how_to_get(row),))
    try:
        data = read_benchmark(location)
    except InputError as problem:
        return Finding(row.name, row, "broken", location.home, location.layout, notes=(str(problem),))
    size = len(data), len(data.classnames)
    state: State = "complete" if size == (row.images, row.classes) else "half copied"
    if state != "complete" and (size[0] >= row.images or size[1] > row.classes):
        state = "differs"
    return Finding(row.name, row, state, location.home, location.layout, *size, data.notes)


def _check_plug_in(name: str, root: Path) -> Finding:
    try:
        data = open_dataset(name, root=root)
    except InputError as problem:  # only the plug-in knows whether its data are missing or damaged
        return Finding(name, None, "missing", notes=(str(problem),))
    return Finding(name, None, "found", root, "", len(data), len(data.classnames), data.notes)


def how_to_get(row: Benchmark) -> str:
    """What to download, from where, and into which folder."""
    split = f", and {row.split} linked from {SPLITS}" if row.kind == "split" else ""
    return f"{row.archive} from {row.source} into {row.coop}{split}"
