"""The leaderboard: every method on every dataset and stream, in tracks that say how its settings were chosen.

    one-setting    the method's own settings, the same everywhere
    per-dataset    the authors' settings for each benchmark, where there are any
    oracle         something is chosen with the test labels; only if asked for

Cells are the stream lab's own, in the same folder: what was run for either is not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from testtime import registry
from testtime.datasets import find_dataset
from testtime.experiments import streams
from testtime.experiments.catalogue import Row
from testtime.experiments.lab import Record, fingerprint, note, noted, provenance
from testtime.experiments.oracle import oracle_of
from testtime.experiments.plan import Plan
from testtime.experiments.recipes import TRACKS
from testtime.experiments.run import find_columns, find_experiment
from testtime.experiments.scenarios import KINDS, make_stream
from testtime.experiments.sources import Source, find_sources
from testtime.experiments.submission import FORMAT, ORACLE, SCORES, made, package_of
from testtime.machine.devices import step_device
from testtime.machine.threads import workers
from testtime.session.session import Session
from testtime.steppers import parallel_steppers
from testtime.types import InputError, Method, MissingPart

BASELINE = "zeroshot"  # always a row
ORDERS = 20
# one of each kind: between shuffled and sorted are Dirichlet's, and an attacker who sees the state takes hours
STREAMS = (
    "shuffled",
    "sorted",
    "4 classes",
    "10% of classes",
    "long tail 100",
    "200 images",
    "open set 30%",
    "poisoned 5%",
    "domains in sequence",
    "domains mixed",
)
PROBED = 64  # images that a method is timed on before the start
LONGEST = 900.0  # seconds that a method may take which is not named; a slower one runs in fewer orders
ROUND = 1200.0  # seconds that its least number of orders may take, one on each core
FEWEST = 2  # orders: with one there is no interval
TUNING = "prompt tuning, which takes hours and needs an encoder; see 'testtime bench systems'"
VIEWS = "learns from several views of an image alone, and here each has one; give --views N, or name it with --methods"


class Entry(NamedTuple):
    """A method on one stream of a source, in a track."""

    track: str
    cell: streams.Cell


def chosen_methods(names: Sequence[str] | None, views: int = 1) -> tuple[list[str], dict[str, str]]:
    """The methods of a board, the baseline first, and those left out by default, each with the reason."""
    if names is not None:
        for name in names:
            registry.method_class(name.partition(":")[0])
        return list(dict.fromkeys([BASELINE, *names])), {}
    left_out, kept = dict[str, str](), [BASELINE]
    for name in registry.method_names():
        try:
            method = registry.method_class(name)
        except MissingPart as reason:  # a plug-in
            left_out[name] = str(reason)
            continue
        if getattr(method, "needs_tower", False):
            left_out[name] = TUNING
        elif views == 1 and "views" in getattr(method, "assumes", ()) and not getattr(method, "remembers", True):
            left_out[name] = VIEWS
        elif name != BASELINE:
            kept.append(name)
    return kept, left_out


def chosen_streams(names: Sequence[str] | None) -> list[str]:
    """The streams of these names, or the default ones; "all" are all of the lab's."""
    if names is not None and list(names) == ["all"]:
        return list(KINDS)
    for name in names or ():
        if name not in KINDS:
            raise registry.unknown("stream", name, [*KINDS, "all"])
    return list(dict.fromkeys(names or STREAMS))


def open_sources(plan: Plan, given: str, root: Path | None = None) -> list[Source]:
    """The images that an argument names: a dataset, the domains in a folder, or a feature file."""
    if root is not None:
        return find_sources(plan, [find_dataset(given, root)])
    columns = find_columns(find_experiment("streams"), Path(given))
    return find_sources(plan, [each for each in columns.values() if not isinstance(each, str)])


def entries_of(
    plan: Plan, sources: Sequence[Source], methods: Sequence[str], kinds: Sequence[str], oracle: bool = False
) -> list[Entry]:
    """Every entry of a board: each method in each track that it has on each stream."""
    return [
        Entry(track, streams.cell_of(plan, source, kind, Row(label, label, text="given"), method))
        for source in sources
        for kind in kinds
        if kind in source.kinds
        for label in methods
        for track, method in _in_tracks(plan, source, label, oracle)
    ]


def _in_tracks(plan: Plan, source: Source, label: str, oracle: bool) -> Iterator[tuple[str, Method]]:
    one, per_dataset = TRACKS
    method = plan.method(label, source.entry)
    yield one, method
    if source.entry is not None and label in source.entry.settings:  # a preset is a setting of its own
        yield per_dataset, replace(plan, track=per_dataset).method(label, source.entry)
    if oracle:
        with suppress(InputError):  # a method without anything to choose
            yield ORACLE, oracle_of(method)


def estimate(plan: Plan, entries: Sequence[Entry]) -> dict[str, float]:
    """Seconds that the entries still to run will take, by method, from a few steps of each and the streams' lengths.

    The time of a step is kept in the plan's folder: who resumes there, on the same machine, gets the same estimates.
    """
    pending = [each.cell for each in entries if not _ran(plan, each)]
    device, found = step_device(plan.encoder.device), dict[str, float]()
    made = provenance(device)
    for cell in pending:
        images = cell.source.load()
        task = images.task.to(device)
        orders = cell.about["orders"]
        stream = make_stream(cell.kind, images, orders[0])
        if isinstance(stream, str):
            continue
        probe = cell.source.about | {key: cell.about[key] for key in ("method", "settings")}
        step = f"step-{fingerprint(probe | made)}"
        try:
            if noted(plan.folder, step) is None:
                seconds = workers(1).submit(_seconds, Session(task, cell.method), images.views[:PROBED]).result()
                note(plan.folder, step, probe, seconds, made)
        except MissingPart:
            continue
        rounds = math.ceil(len(orders) / parallel_steppers(device))
        seconds = (noted(plan.folder, step) or {})["seconds"] * len(stream.rows) * rounds
        found[cell.row.label] = found.get(cell.row.label, 0.0) + seconds
    return found


def affordable(plan: Plan, seconds: Mapping[str, float]) -> dict[str, int]:
    """The slow methods: those for which the plan's orders take longer than `LONGEST`, and how many orders do not.

    0: fewer than `FEWEST`, with which a method is left out.
    """
    together = parallel_steppers(step_device(plan.encoder.device))
    rounds, found = math.ceil(len(plan.seeds) / together), {}
    for label, each in seconds.items():
        if each > LONGEST:
            number = together * (int(rounds * LONGEST / each) or int(each / rounds <= ROUND))
            found[label] = number if number >= FEWEST else 0
    return found


def shortened(plan: Plan, entries: Sequence[Entry], orders: Mapping[str, int]) -> list[Entry]:
    """The entries, those of some methods with only their first so many orders; none of them with 0.

    An entry of such a method that was run in some orders keeps these, the most of them if it was run several times.
    """
    found = []
    for entry in entries:
        seeds = entry.cell.about["orders"]
        if (number := orders.get(entry.cell.row.label)) is not None:
            fewer = (_with_orders(entry, seeds[:count]) for count in range(len(seeds), 0, -1))
            found += [next((each for each in fewer if _ran(plan, each)), _with_orders(entry, seeds[:number]))]
        else:
            found.append(entry)
    return [entry for entry in found if entry.cell.about["orders"]]


def _with_orders(entry: Entry, orders: Sequence[int]) -> Entry:
    return entry._replace(cell=entry.cell._replace(about=entry.cell.about | {"orders": list(orders)}))


def _ran(plan: Plan, entry: Entry) -> bool:
    return streams.path_of(plan.folder, entry.cell).exists()


def _seconds(session: Session, stream: Tensor) -> float:
    """Seconds of a step over a stream (N, V, D), on one core, whatever else runs on it."""
    session.warm_up(stream.shape[1])
    clock = time.thread_time if session.task.text.is_cpu else time.perf_counter
    start = clock()
    session.scan(stream).cpu()
    return (clock() - start) / len(stream)


def run(plan: Plan, given: Sequence[tuple[str, Sequence[Source]]], entries: Sequence[Entry]) -> Record:
    """A submission of these entries; those that were run before are read. `given` names the sources' origin."""
    origin: dict[str, str] = {}
    for what, found in given:
        for source in found:
            if origin.setdefault(source.name, what) != what:
                raise InputError(
                    f"{origin[source.name]} and {what} both have a source named '{source.name}'; give one at a time, "
                    "and put them together with 'testtime leaderboard add'."
                )
    now = made(step_device(plan.encoder.device))
    submission: Record = {"format": FORMAT, "made": [now], "sources": {}, "entries": [], "left_out": {}}
    missing: list[Record] = []
    results = streams.run_cells(plan, [entry.cell for entry in entries])
    for (track, cell), scores in zip(entries, results, strict=True):
        if isinstance(scores, str):
            named = {"source": cell.source.name, "stream": cell.kind, "label": cell.row.label, "reason": scores}
            missing.append(named)
            continue
        identity = fingerprint(cell.source.about)
        submission["sources"][identity] = {
            "name": cell.source.name,
            "given": origin[cell.source.name],
            "limit": plan.limit,
            "about": cell.source.about,
        }
        cost = noted(plan.folder, streams.path_of(plan.folder, cell).stem) or {}
        submission["entries"].append(
            {
                "track": track,
                "label": cell.row.label,
                "method": cell.method.name,
                "settings": cell.about["settings"],
                "package": package_of(cell.row.label.partition(":")[0]),
                "assumes": list(getattr(cell.method, "assumes", ())),
                "source": identity,
                "stream": cell.kind,
                "scores": [{key: order[key] for key in ("seed", "images", *SCORES)} for order in scores],
                "milliseconds": 1000 * cost["seconds"] / cost["images"] if cost else None,
                "state_bytes": cost.get("state_bytes"),
                "machine": cost.get("machine", ""),
                "made": 0,
            }
        )
    return submission | {"not_run": missing}
