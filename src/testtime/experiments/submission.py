"""A submission to a leaderboard: one JSON file with every score, and everything that is needed to repeat it.

    format    "testtime leaderboard 1"
    made      versions, commit and machine, one for each run that is in the file
    sources   images by identifier: name, how they were given, and everything that their features depend on
    entries   one for each track, method, source and stream: settings, the scores of each order, what it cost
    left_out  methods that were not run, each with the reason; not_run: streams that cannot be made of the images

Files of several runs merge into one board (`merge`). A file may come from anyone: `read` checks all of it.
"""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import testtime
from testtime import files, registry
from testtime.experiments.lab import Record, fingerprint, provenance, read_bytes
from testtime.experiments.recipes import TRACKS
from testtime.experiments.standings import Cell
from testtime.report.conditions import machine
from testtime.types import InputError

FORMAT = "testtime leaderboard 1"
ORACLE = "oracle"  # the track of settings chosen with the test labels
NAMES = dict(zip((*TRACKS, ORACLE), ("One setting", "Per dataset", "Oracle"), strict=True))  # of the tracks, in order
SCORES = ("accuracy", "zero_shot", "calibration_error")  # of an order, each a fraction
# what an entry must have, and of which type; a number may be None where it was not measured
ENTRY: dict[str, tuple[type, ...]] = {
    "track": (str,),
    "label": (str,),
    "method": (str,),
    "settings": (dict,),
    "package": (str,),
    "assumes": (list,),
    "source": (str,),
    "stream": (str,),
    "scores": (list,),
    "milliseconds": (float, int, type(None)),
    "state_bytes": (int, type(None)),
    "machine": (str,),
    "made": (int,),
}
ROUNDING = 0.002  # by which an accuracy may differ between machines, or by one image; the default tolerance of `verify`
WHOLE = 1e-4  # how near to a whole number of images an accuracy must be
LONGEST = 200  # characters of a name, which ends in tables
MOST_VIEWS = 1024  # of an image: `verify` encodes as many as a file says


def made(device: torch.device) -> Record:
    """Versions, the commit of testtime if it runs from a repository, and the machine, with its GPU if that is used."""
    return provenance(device) | {
        "python": platform.python_version(),
        "machine": machine(device),
        "commit": _commit(Path(testtime.__file__).parent),
    }


def package_of(method: str) -> str:
    """The package and version that a plug-in comes from; empty for a built-in method."""
    point = registry.METHODS.plug_ins().get(method)
    return f"{point.dist.name} {point.dist.version}" if point is not None and point.dist is not None else ""


def _commit(folder: Path) -> str:
    """The commit of a folder whose files are in a repository, with -dirty if some differ; else empty."""
    with suppress(OSError, subprocess.SubprocessError):
        for command in (
            ["ls-files", "--error-unmatch", "__init__.py"],
            ["describe", "--always", "--dirty", "--abbrev=40"],
        ):
            done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    return ""


def read(path: Path) -> Record:
    """A submission, with everything in it checked; an InputError names what is wrong."""
    found = files.parse_json(read_bytes(path), path, kind=dict)
    try:
        _check(found, path)
    except RecursionError:  # its identities are computed from what it holds
        raise InputError(f"{path} is malformed: it is nested too deeply.") from None
    return found


def _check(found: Record, path: Path) -> None:
    if found.get("format") != FORMAT:
        raise InputError(f"{path} is no leaderboard file: its format is {found.get('format')!r}, expected '{FORMAT}'.")
    for key, kind in (("made", list), ("sources", dict), ("entries", list), ("left_out", dict), ("not_run", list)):
        if not isinstance(found.get(key), kind):
            raise InputError(f"{path} is malformed: '{key}' must be a {kind.__name__}.")
    for name, source in found["sources"].items():
        if problem := _source_problem(name, source):
            raise InputError(f"{path} is malformed: source {name[:LONGEST]!r} {problem}.")
    for key, values in (("made", found["made"]), ("not_run", found["not_run"])):
        if not all(isinstance(each, dict) and all(isinstance(text, str) for text in each.values()) for each in values):
            raise InputError(f"{path} is malformed: each of '{key}' must be an object of texts.")
    if not all(isinstance(reason, str) for reason in found["left_out"].values()):
        raise InputError(f"{path} is malformed: 'left_out' must give a reason for each method.")
    for number, entry in enumerate(found["entries"]):
        if problem := _entry_problem(entry, found):
            raise InputError(f"{path} is malformed: entry {number} {problem}.")
    keys = [key_of(entry) for entry in found["entries"]]
    if len(set(keys)) < len(keys):
        raise InputError(f"{path} is malformed: two entries are of the same track, method, source and stream.")
    _check_baseline(found["entries"], str(path))


def _check_baseline(entries: Iterable[Record], name: str) -> None:
    """Refuse entries that are compared with different baselines on the same order, beyond what rounding can do."""
    known: dict[tuple[str, str, int], tuple[str, Record]] = {}
    for entry in entries:
        for order in entry["scores"]:
            label, other = known.setdefault((entry["source"], entry["stream"], order["seed"]), (entry["label"], order))
            allowed = max(ROUNDING, 1 / order["images"] + WHOLE)
            if order["images"] != other["images"] or abs(order["zero_shot"] - other["zero_shot"]) > allowed:
                raise InputError(
                    f"{name}: zero-shot on '{entry['stream']}', order {order['seed']}, is not the same beside {label} "
                    f"and beside {entry['label']}; repeat both with 'testtime leaderboard verify'."
                )


def _source_problem(name: str, source: object) -> str:
    if not isinstance(source, dict) or not isinstance(source.get("about"), dict):
        return "must be an object with 'about'"
    if not all(isinstance(source.get(key), str) and len(source[key]) <= LONGEST * 20 for key in ("name", "given")):
        return "needs a 'name' and how it was 'given'"
    if not isinstance(source.get("limit"), int | type(None)) or not isinstance(source["about"].get("encoder"), str):
        return "needs a 'limit', which may be null, and the encoder"
    views, augmix = views_of(source["about"])
    if type(views) is not int or not 1 <= views <= MOST_VIEWS or not isinstance(augmix, bool):
        return f"needs a number of 'views' from 1 to {MOST_VIEWS}, and whether they are made by 'augmix'"
    return "" if name == fingerprint(source["about"]) else "has an identifier that is not that of its content"


def _entry_problem(entry: object, found: Record) -> str:
    if not isinstance(entry, dict):
        return "is not an object"
    for key, kinds in ENTRY.items():
        if key not in entry or not isinstance(entry[key], kinds) or isinstance(entry[key], bool):
            return f"needs '{key}', a {kinds[0].__name__}"
        if kinds == (str,) and len(entry[key]) > LONGEST:
            return f"has a '{key}' of more than {LONGEST} characters"
    if entry["track"] not in NAMES:
        return f"is of track '{entry['track']}', which is none of {', '.join(NAMES)}"
    if entry["source"] not in found["sources"] or not 0 <= entry["made"] < len(found["made"]):
        return "refers to a source or a run that is not in the file"
    if not all(isinstance(each, str) for each in entry["assumes"]):
        return "has assumptions that are not texts"
    if not all(value is None or 0 <= value < math.inf for value in (entry["milliseconds"], entry["state_bytes"])):
        return "has a time or a size that is no number from 0"
    seeds = [_seed(order) for order in entry["scores"]]
    if not seeds or None in seeds or len(set(seeds)) < len(seeds):
        return (
            f"needs scores, each with its own seed, a number of images, and from 0 to 1: {', '.join(SCORES)}; "
            "accuracies are of whole images"
        )
    return ""


def _seed(order: object) -> int | None:
    """The seed of an order whose scores are whole."""
    if not isinstance(order, dict):
        return None
    numbers = [order.get(key) for key in ("seed", "images")]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers) or order["images"] < 1:
        return None
    scores = [order.get(key) for key in SCORES]
    fine = all(isinstance(each, float | int) and not isinstance(each, bool) and 0 <= each <= 1 for each in scores)
    counts = [order[key] * order["images"] for key in SCORES[:2]] if fine else [0.5]
    return order["seed"] if all(abs(each - round(each)) < WHOLE for each in counts) else None


def views_of(about: Record) -> tuple[int, bool]:
    """How many views of each image a source has, and whether they are made by AugMix."""
    domains = about.get("domains")
    first = domains[0] if isinstance(domains, list) and domains and isinstance(domains[0], dict) else about
    return first.get("views", 1), first.get("augmix", False)


def key_of(entry: Record) -> tuple[str, str, str, str]:
    """What tells an entry from the others of a board."""
    return entry["track"], entry["label"], entry["source"], entry["stream"]


def cells_of(entry: Record) -> list[Cell]:
    """The orders of an entry as cells."""
    return [Cell(order["seed"], *(order[key] for key in SCORES)) for order in entry["scores"]]


def merge(boards: Sequence[tuple[str, Record]]) -> Record:
    """Several submissions, each with its name for messages, as one board; entries in the order in which they come.

    Orders of the same entry are united. Where two files differ in the same order, or in a method's settings, an
    InputError says so: one of them is of another version, or wrong.
    """
    board: Record = {"format": FORMAT, "made": [], "sources": {}, "entries": [], "left_out": {}, "not_run": []}
    entries: dict[tuple[str, str, str, str], Record] = {}
    for name, found in boards:
        for source, about in found["sources"].items():
            board["sources"].setdefault(source, about)
        runs = [_place(board["made"], each) for each in found["made"]]
        for entry in found["entries"]:
            known = entries.get(key_of(entry))
            if known is None:
                entries[key_of(entry)] = entry | {"made": runs[entry["made"]]}
            else:
                known["scores"] = _united(known, entry, name)
        for each in found["not_run"]:
            _place(board["not_run"], each)
        board["left_out"] |= found["left_out"]
    ran = {label for _, label, _, _ in entries}
    board["left_out"] = {label: reason for label, reason in board["left_out"].items() if label not in ran}
    _check_baseline(entries.values(), " and ".join(name for name, _ in boards))
    return board | {"entries": list(entries.values())}


def _place(values: list[Any], value: Any) -> int:
    """The place of a value in a list, added at its end if it is not there."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _united(known: Record, entry: Record, name: str) -> list[Record]:
    what = f"{entry['label']} on '{entry['stream']}' ({NAMES[entry['track']].lower()})"
    if known["settings"] != entry["settings"]:
        raise InputError(f"{name}: {what} has other settings than on the board; leave out one of the two.")
    scores = {order["seed"]: order for order in known["scores"]}
    for order in entry["scores"]:
        if _told(scores.setdefault(order["seed"], order)) != _told(order):
            raise InputError(
                f"{name}: {what}, order {order['seed']}, has other scores than on the board; "
                "repeat both with 'testtime leaderboard verify'."
            )
    return [scores[seed] for seed in sorted(scores)]


def _told(order: Record) -> list[Any]:
    return [order[key] for key in ("images", *SCORES)]


def shown_names(sources: Record, used: Iterable[str]) -> dict[str, str]:
    """A name for each source, by identifier, with its views if several; those of the same name have identifiers too."""
    views = {key: views_of(sources[key]["about"])[0] for key in dict.fromkeys(used)}
    names = {key: sources[key]["name"] + (f", {count} views" if count > 1 else "") for key, count in views.items()}
    several = [name for name in names.values() if list(names.values()).count(name) > 1]
    return {key: f"{name} ({key})" if name in several else name for key, name in names.items()}
