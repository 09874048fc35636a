"""Jobs on a cluster as they run: a table that is updated in a terminal; in a pipe, an occasional plain line."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from testtime.cli.terminal import counted, err, note
from testtime.experiments.jobs import occasional

RUNNING, FINISHED = 12, 6  # rows of the table, at most


class Running(NamedTuple):
    """A job that runs."""

    what: str
    machine: str
    start: float


class Jobs:
    """What runs where, and what is finished; used as a context manager while there are jobs."""

    def __init__(self) -> None:
        self.running: dict[int, Running] = {}
        self.finished_on: Counter[str] = Counter()
        self.last: list[tuple[str, str, float]] = []
        self._live = Live(console=err, transient=True, refresh_per_second=2, get_renderable=self.table)
        self._note = occasional(note)

    def __enter__(self) -> Jobs:
        if err.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if err.is_terminal:
            self._live.stop()
        if self.finished_on:
            machines = ", ".join(f"{count} on {name}" for name, count in sorted(self.finished_on.items()))
            note(f"{counted(self.finished_on.total(), 'job')} finished: {machines}.")

    def started(self, number: int, what: str, machine: str) -> None:
        """A job has started, for the first time or again."""
        self.running[number] = Running(what, machine, time.perf_counter())

    def finished(self, number: int, what: str, machine: str, seconds: float) -> None:
        """A job is done."""
        self.running.pop(number, None)
        self.finished_on[machine] += 1
        self.last = [*self.last, (what, machine, seconds)][-FINISHED:]
        if not err.is_terminal:
            told = f"{what} on {machine}, {seconds:.1f} s"
            self._note(f"{self.finished_on.total()} finished, {len(self.running)} running; the last: {told}")

    def table(self) -> Table:
        """The jobs that run, and those that were finished last."""
        table = Table(title=f"{self.finished_on.total()} finished, {len(self.running)} running", title_justify="left")
        for name in ("cell", "machine", ""):
            table.add_column(name, no_wrap=True)
        table.add_column("seconds", justify="right")
        for what, machine, seconds in self.last:
            table.add_row(escape(what), escape(machine), "[green]finished[/]", f"{seconds:.1f}")
        now, running = time.perf_counter(), list(self.running.values())
        for what, machine, start in running[:RUNNING]:
            table.add_row(escape(what), escape(machine), "running", f"{now - start:.0f}")
        if len(running) > RUNNING:
            table.add_row(f"{len(running) - RUNNING} more", "", "running", "")
        return table
