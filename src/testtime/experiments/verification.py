"""Some cells of a submission to a leaderboard, run again and compared with what was submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from testtime import registry
from testtime.experiments import streams
from testtime.experiments.jobs import Job
from testtime.experiments.lab import Record, fingerprint
from testtime.experiments.leaderboard import entries_of
from testtime.experiments.plan import Plan
from testtime.experiments.sources import Source
from testtime.experiments.submission import SCORES
from testtime.types import InputError, MissingPart

ONE_IMAGE = 1 + 1e-9  # by which an accuracy may differ, unless nothing may


class Repeated(NamedTuple):
    """One cell of a submission, run again."""

    label: str
    stream: str
    source: str
    seed: int
    problem: str  # what differs; empty if nothing does


def sample(submission: Record, count: int, seed: int) -> list[tuple[Record, Record]]:
    """Entries with one of their orders, drawn at random; the same for the same seed."""
    cells = [(entry, order) for entry in submission["entries"] for order in entry["scores"]]
    return Random(seed).sample(cells, min(count, len(cells)))


def repeat(
    plan: Plan, submission: Record, sources: Sequence[Source], cells: Sequence[tuple[Record, Record]], tolerance: float
) -> Iterator[Repeated]:
    """Each of these cells run again, beside what was submitted.

    Scores may differ by `tolerance`, a fraction, and accuracies always by one image: other machines round differently.
    """
    known = {fingerprint(source.about): source for source in sources}
    problems: dict[int, str] = {}  # by the number of the cell

    def jobs() -> Iterator[Job]:
        for number, (entry, order) in enumerate(cells):
            if entry["source"] not in known:
                raise InputError(_other_data(submission["sources"][entry["source"]], sources))
            if registry.METHODS.known(entry["label"].partition(":")[0]) is None and entry["package"]:
                raise InputError(
                    f"Method '{entry['label']}' is of the package {entry['package']}; install it to repeat it."
                )
            source, again = known[entry["source"]], replace(plan, seeds=(order["seed"],))
            tracks = entries_of(again, [source], [entry["label"]], [entry["stream"]], oracle=True)
            cell = next((each.cell for each in tracks if each.track == entry["track"]), None)
            if cell is None:
                problems[number] = f"{entry['label']} has no track '{entry['track']}' on {source.name}"
            elif keys := _unlike(cell.about["settings"], entry["settings"]):
                problems[number] = f"its settings are not those of the track '{entry['track']}': {', '.join(keys)}"
            elif (assumed := list(getattr(cell.method, "assumes", ()))) != entry["assumes"]:
                problems[number] = f"it assumes {_either(assumed)}, and not {_either(entry['assumes'])}"
            else:
                yield streams.job_of(number, cell, again, "", lambda line: None)

    def settled() -> Iterator[Repeated]:
        """Those in order whose turn has come."""
        for entry, order in cells[len(told) :]:
            if len(told) not in problems:
                return
            source = known[entry["source"]].name
            told.append(Repeated(entry["label"], entry["stream"], source, order["seed"], problems[len(told)]))
            yield told[-1]

    told: list[Repeated] = []
    for number, ran in plan.executor(jobs()):
        if isinstance(ran, MissingPart):
            raise ran
        problems[number] = _difference(cells[number][1], ran[0], tolerance)
        yield from settled()
    yield from settled()


def _difference(order: Record, ran: streams.Ran, tolerance: float) -> str:
    """What differs between a submitted order and the same one, run now."""
    if ran.scores["images"] != order["images"]:
        return f"{order['images']} images were scored, and now {ran.scores['images']}"
    least = ONE_IMAGE / order["images"] if tolerance else 0.0
    for key in SCORES:
        allowed = tolerance if key == "calibration_error" else max(tolerance, least)
        if abs(ran.scores[key] - order[key]) > allowed:
            return f"{key.replace('_', ' ')} was {100 * order[key]:.2f}%, and now {100 * ran.scores[key]:.2f}%"
    return ""


def _other_data(wanted: Record, sources: Sequence[Source]) -> str:
    """Why none of the sources is the one that was submitted."""
    mine = next((each.about for each in sources if each.name == wanted["name"]), None)
    if mine is None:
        return f"'{wanted['name']}' of the submission was not found: give it, as in 'leaderboard verify FILE SOURCE'."
    keys = _unlike(mine, wanted["about"])
    return f"'{wanted['name']}' is not what was submitted: it differs in {', '.join(keys)}."


def _either(assumed: Sequence[str]) -> str:
    return ", ".join(assumed) or "nothing"


def _unlike(mine: Record, others: Record) -> list[str]:
    """The keys whose values differ."""
    return [key for key in {**mine, **others} if mine.get(key) != others.get(key)]
