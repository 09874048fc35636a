"""A leaderboard as tables: for a terminal, Markdown and the page, from the submissions alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testtime.experiments.lab import Record
from testtime.experiments.recipes import TRACKS
from testtime.experiments.run import write_results
from testtime.experiments.standings import Interval, Standing, mean_of, ranks, standing
from testtime.experiments.submission import NAMES, ORACLE, cells_of, shown_names, views_of
from testtime.experiments.tables import Sheet, markdown, percent
from testtime.files import write_atomic
from testtime.report.data import Board, Ranked, Table, TablesReport, Value
from testtime.report.formatting import count, signed
from testtime.report.page import html

TITLE = "Leaderboard"
ALL = "all cells"
TRACK = {
    TRACKS[0]: "The method's own settings, the same on every dataset and stream.",
    TRACKS[1]: "The authors' settings for each dataset, where they published any.",
    ORACLE: "Something is chosen with the test labels. No honest system can do this.",
}
COLUMNS = {
    "Rank": "1, and one more for each method whose whole interval lies above; ties share a rank",
    "Accuracy": "mean over cells in percent, and its standard error",
    "Expected tail": "mean accuracy over the worst tenth of the cells, in percent",
    "Worst cell": "the lowest accuracy of a cell, and where",
    "Against zero-shot": "mean paired difference to zero-shot on the same cells in points, and its 95% interval",
    "Below zero-shot": "share of the cells in which zero-shot is better",
    "ECE": "expected calibration error, mean over cells, in percent",
    "ms per image": "processor time of one core, or time by the clock on a GPU; without encoding",
    "State": "size of what the method remembers",
    "Assumes": "what the method has to know or to get that a plain stream does not give",
    "Cells": "orders of streams of datasets",
}
REMARKS = (
    "A cell is one order of one stream of one dataset; every stream of every dataset counts the same.",
    "Expected tail accuracy: the mean accuracy over the worst tenth of the cells.",
    "Against zero-shot: paired differences on the same cells, with 95% t intervals. Only orders are random, so the "
    "variance is taken over the orders of each stream, with Satterthwaite's degrees of freedom; the intervals say "
    "nothing about other datasets or streams.",
    "Ranks: 1, and one more for each method whose whole interval lies above. A method without all streams has no rank. "
    "One in fewer orders has a wider interval, so fewer methods rank before it; its accuracy, tail and worst cell are "
    "of fewer draws, and only its difference to zero-shot can be compared.",
)


def standings(board: Record) -> Record:
    """The rows of each track, best first: for all cells, for each dataset, and for each stream, by these names."""
    names = shown_names(board["sources"], (entry["source"] for entry in board["entries"]))
    streams = dict.fromkeys(entry["stream"] for entry in board["entries"])
    choices = {ALL: ("", "")}  # of entries, by a key and its value
    if len(names) > 1:
        choices |= {f"dataset: {name}": ("source", key) for key, name in names.items()}
    if len(streams) > 1:
        choices |= {f"stream: {name}": ("stream", name) for name in streams}
    return {
        track: {choice: _rows(board, _chosen(board, track, *which), names) for choice, which in choices.items()}
        for track in NAMES
        if _chosen(board, track)
    }


def _chosen(board: Record, track: str, key: str = "", value: str = "") -> list[Record]:
    """The entries of a track, all or those with this value of a key."""
    return [each for each in board["entries"] if each["track"] == track and (not key or each[key] == value)]


def _rows(board: Record, entries: Sequence[Record], names: dict[str, str]) -> list[Record]:
    """A row for each method; those without every group of cells have no rank."""
    groups = {(each["source"], each["stream"]) for each in entries}
    found: list[tuple[Record, Standing]] = []
    for label in dict.fromkeys(each["label"] for each in entries):
        mine = [each for each in entries if each["label"] == label]
        of = standing({(names[each["source"]], each["stream"]): cells_of(each) for each in mine})
        found.append((_about(board, mine, whole=len(mine) == len(groups)), of))
    found.sort(key=lambda each: -each[1].gap.mean)
    most = max((of.cells for _, of in found), default=0)
    places = ranks([of.gap if about["whole"] else None for about, of in found])
    return [
        about
        | {"rank": rank, "fewer": about["whole"] and of.cells < most}
        | of._asdict()
        | {"where": list(of.where), "gap": of.gap._asdict()}
        for (about, of), rank in zip(found, places, strict=True)
    ]


def _about(board: Record, entries: Sequence[Record], whole: bool) -> Record:
    """What a row says besides its scores; a mean of times only if they are of one machine."""
    timed = [(each["milliseconds"], sum(order["images"] for order in each["scores"])) for each in entries]
    machines = {board["made"][each["made"]].get("machine") for each in entries}
    known = [(ms, images) for ms, images in timed if ms is not None and len(machines) == 1]
    sizes = [each["state_bytes"] for each in entries if each["state_bytes"] is not None]
    return {
        "label": entries[0]["label"],
        "package": entries[0].get("package", ""),
        "assumes": list(dict.fromkeys(text for each in entries for text in each["assumes"])),
        "whole": whole,
        "milliseconds": sum(ms * images for ms, images in known) / sum(n for _, n in known) if known else None,
        "state_bytes": max(sizes, default=None),
    }


def sheets(board: Record) -> list[Sheet]:
    """A table for each track, and one of the differences on each stream."""
    found = []
    for track, choices in standings(board).items():
        header = ["method", *(column.lower().replace("ece", "ECE") for column in COLUMNS)]
        lines = [[row["label"], *(_text(value) for value in _values(row))] for row in choices[ALL]]
        found.append(Sheet(f"{NAMES[track]}. {TRACK[track]}", header, lines))
    return [*found, *(sheet for track in standings(board) if (sheet := _by_stream(board, track)))]


def _text(value: Value) -> str:
    return f"{value.shown} ({value.below})" if value.below else value.shown


def _by_stream(board: Record, track: str) -> Sheet | None:
    """Differences to zero-shot on each stream, means over datasets with half the width of their intervals."""
    entries = _chosen(board, track)
    streams = list(dict.fromkeys(each["stream"] for each in entries))
    labels = [row["label"] for row in standings(board)[track][ALL]]
    if len(streams) < 2:
        return None
    lines = []
    for label in labels:
        mine = [[e for e in entries if (e["label"], e["stream"]) == (label, stream)] for stream in streams]
        gaps = [
            mean_of([[c.accuracy - c.zero_shot for c in cells_of(e)] for e in each]) if each else None for each in mine
        ]
        lines.append([label, *("–" if gap is None else _half(gap) for gap in gaps)])
    return Sheet(
        f"{NAMES[track]}: points against zero-shot on each stream, with 95% intervals", ["method", *streams], lines
    )


def _half(gap: Interval) -> str:
    shown = signed(100 * gap.mean)
    return shown if gap.high is None else f"{shown} ± {100 * (gap.high - gap.mean):.1f}"


def _values(row: Record) -> list[Value]:
    """A row's value for each column."""
    gap, size, where = row["gap"], row["state_bytes"], row["where"]
    bounds = "" if gap["low"] is None else f"{_points(gap['low'])} to {_points(gap['high'])}"
    error = [] if row["error"] is None else [f"± {percent(row['error'])}"]
    fewer = [f"{row['cells']:,} cells"] if row["fewer"] else []
    return [
        Value("–" if row["rank"] is None else str(row["rank"]), row["rank"]),
        Value(percent(row["accuracy"]), row["accuracy"], ", ".join(error + fewer)),
        Value(percent(row["tail"]), row["tail"]),
        Value(percent(row["worst"]), row["worst"], f"{where[0]}, {where[1]}, order {where[2]}"),
        Value(_points(gap["mean"]), gap["mean"], bounds),
        Value(f"{row['below']:.0%}", row["below"]),
        Value(percent(row["calibration_error"]), row["calibration_error"]),
        Value("–" if row["milliseconds"] is None else f"{row['milliseconds']:.2f}", row["milliseconds"]),
        Value("–" if size is None else _bytes(size), size),
        Value(", ".join(row["assumes"]) or "nothing", len(row["assumes"])),
        Value(f"{row['cells']:,}", row["cells"], "" if row["whole"] else "not all"),
    ]


def _points(value: float) -> str:
    """A difference in points with two decimals and its sign."""
    text = f"{abs(100 * value):.2f}"
    return text if text == "0.00" else ("+" if value > 0 else "−") + text


def _bytes(size: int) -> str:
    """A size in bytes, kB or MB.

    >>> _bytes(0), _bytes(20_480), _bytes(3_400_000)
    ('0 B', '20.5 kB', '3.4 MB')
    """
    return f"{size} B" if size < 1000 else f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def remarks(board: Record) -> list[str]:
    """The text below the tables: the datasets, what the columns mean, what was not run."""
    names = shown_names(board["sources"], (entry["source"] for entry in board["entries"]))
    lines = []
    for key, name in names.items():
        about = board["sources"][key]["about"]
        classes = f", {count(about['classes'], 'class')}" if isinstance(about.get("classes"), int) else ""
        images = f"{about['images']:,} images" if isinstance(about.get("images"), int) else "images"
        views, augmix = views_of(about)
        seen = f"{count(views, 'view')} of each{' by AugMix' * augmix}"
        lines.append(f"{name}: {images}{classes}, {seen}, encoder {about['encoder'] or 'unknown'}.")
    lines.append(f"Orders of each stream: {_orders(board)}.")
    if chosen := _chosen_orders(board):
        lines.append(f"Not the first orders, which may have been chosen by their scores: {', '.join(chosen)}.")
    lines += REMARKS
    machines = list(dict.fromkeys(each.get("machine", "") for each in board["made"]))
    lines.append(f"Times are of {'; '.join(machines)}" + ", and not comparable with one another." * (len(machines) > 1))
    lines += [f"Left out: {label}: {reason}." for label, reason in board["left_out"].items()]
    return [*lines, *_not_run(board)]


def _orders(board: Record) -> str:
    """How many orders each stream has, and the methods that have fewer than the others on the same."""
    most, fewer = dict[tuple[str, str], int](), dict[str, set[int]]()
    for entry in board["entries"]:
        place = entry["source"], entry["stream"]
        most[place] = max(most.get(place, 0), len(entry["scores"]))
    for entry in board["entries"]:
        if len(entry["scores"]) < most[entry["source"], entry["stream"]]:
            name = entry["label"] + f" ({NAMES[ORACLE].lower()})" * (entry["track"] == ORACLE)
            fewer.setdefault(name, set()).add(len(entry["scores"]))
    named = [f"{label} {_either(numbers)}" for label, numbers in fewer.items()]
    return _either(set(most.values())) + (f"; fewer of {', '.join(named)}" if named else "")


def _chosen_orders(board: Record) -> list[str]:
    """The methods with orders other than 1, 2, 3 and so on."""
    seeds = [(entry["label"], sorted(order["seed"] for order in entry["scores"])) for entry in board["entries"]]
    return list(dict.fromkeys(label for label, found in seeds if found != list(range(1, len(found) + 1))))


def _either(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _not_run(board: Record) -> list[str]:
    """What was not run, and why: sources are named together, and methods only if others did run."""
    ran = {entry["label"] for entry in board["entries"]}
    found: dict[tuple[str, str], list[Record]] = {}
    for each in board["not_run"]:
        found.setdefault((each.get("stream", ""), each.get("reason", "")), []).append(each)
    lines = []
    for (stream, reason), places in found.items():
        sources, labels = (list(dict.fromkeys(each.get(key, "") for each in places)) for key in ("source", "label"))
        whose = "" if ran <= set(labels) else f" ({', '.join(labels)})"
        lines.append(f"Not run: '{stream}' on {', '.join(sources)}{whose}: {reason}.")
    return lines


def section(board: Record) -> TablesReport:
    """The board for the page."""
    found = standings(board)
    choices = list(dict.fromkeys(choice for track in found.values() for choice in track))
    tables = [
        (NAMES[track], TRACK[track], [[_ranked(row) for row in rows[choice]] for choice in choices])
        for track, rows in found.items()
    ]
    below = [Table(sheet.title, sheet.header, sheet.rows) for sheet in sheets(board)[len(found) :]]
    names = shown_names(board["sources"], (entry["source"] for entry in board["entries"])).values()
    return TablesReport(", ".join(names), "", below, {}, board=Board(COLUMNS, choices, tables), notes=remarks(board))


def _ranked(row: Record) -> Ranked:
    return Ranked(row["label"], row["package"], row["assumes"], _values(row))


def write_board(folder: Path, board: Record, command: str = "") -> None:
    """leaderboard.json, leaderboard.md and leaderboard.html in a folder; the first can be submitted and merged."""
    pages = markdown(TITLE, sheets(board), remarks(board))
    write_results(folder, "leaderboard", board | {"standings": standings(board)}, pages)
    about = {"Versions": _versions(board), "Command": command}
    write_atomic(folder / "leaderboard.html", html([section(board)], {k: v for k, v in about.items() if v}, TITLE))


def _versions(board: Record) -> str:
    keys = ("version", "commit", "torch", "python")
    shown = [", ".join(f"{key} {run[key]}" for key in keys if run.get(key)) for run in board["made"]]
    return "; ".join(dict.fromkeys(shown))
