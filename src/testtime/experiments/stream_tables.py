"""The stream lab's results as tables and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from testtime.experiments.catalogue import EXPERIMENTS
from testtime.experiments.lab import NOT_RUN, Record
from testtime.experiments.tables import Sheet, described, percent
from testtime.report.data import Gaps, Table, TablesReport
from testtime.report.formatting import count, signed
from testtime.report.markup import Cell, safe

LEGEND = "gap to zero-shot in points (worst tenth of the orders, worst window)"
# of the long table: heading and key
SCORES = {
    "accuracy": "accuracy",
    "spread": "spread",
    "worst tenth": "tail_accuracy",
    "worst window": "worst",
    "macro F1": "macro_f1",
    "ECE": "calibration_error",
    "ECE, calibrated": "calibrated_error",
    "Brier": "brier",
    "AUROC": "auroc",
    "FPR95": "fpr95",
    "foreign in queues": "queued_foreign",
    "attacked class": "attacked",
    "its target": "target",
    "learned from": "learned",
}


def sheets(result: Record) -> list[Sheet]:
    """A summary, a table of gaps for each dataset, and one of every score, which is long."""
    found = [_summary(result)] if result["summary"] else []
    found += [sheet for column in result["columns"] if (sheet := _gaps(result, column))]
    return [*found, _scores(result)]


def _summary(result: Record) -> Sheet:
    header = ["method", "guard", "cells", "at most 1 point under zero-shot", "mean gap", "lowest", "worst window"]
    lines = []
    for each in result["summary"]:
        kept = "" if each["gain_kept"] is None or not each["guard"] else f"{each['gain_kept']:.0%}"
        points = [signed(100 * each[key]) for key in ("gap", "lowest_gap", "worst_gap")]
        guard = "on" if each["guard"] else "off"
        lines.append([each["row"] or "all", guard, str(each["cells"]), f"{each['harmless']:.1%}", *points, kept])
    return Sheet("Gap to zero-shot over all streams, in points", [*header, "gain kept"], lines)


def _gaps(result: Record, column: str) -> Sheet | None:
    """The streams of a dataset, and a column for each method; None if none was run."""
    ran = _ran(result, column)
    kinds = list(dict.fromkeys(row["stream"] for row in ran))
    names = [name for name in _names(result) if any(shown_name(row) == name for row in ran)]
    by_place = {(row["stream"], shown_name(row)): row for row in ran}
    lines = []
    for kind in kinds:
        mine = [by_place.get((kind, name)) for name in names]
        zero_shot = next(row["zero_shot"] for row in mine if row)
        lines.append([kind, f"{100 * zero_shot:.1f}", *(_gap(row) for row in mine)])
    facts = result["facts"]
    title = f"{column}, {facts['encoder']}, {count(len(facts['seeds']), 'order')}: {LEGEND}"
    return Sheet(title, ["stream", "zero-shot", *names], lines) if lines else None


def _gap(row: Record | None) -> str:
    if row is None:
        return "–"
    gap, tail, worst = (signed(100 * row[key]) for key in ("gap", "tail_gap", "worst_gap"))
    return f"{gap} ({tail}, {worst})"


def _scores(result: Record) -> Sheet:
    """Every cell with every score; those in percent are means over orders, but for the worst window's."""
    ran = [row for column in result["columns"] for row in _ran(result, column, zero_shot=True)]
    shown = {head: key for head, key in SCORES.items() if any(row.get(key) is not None for row in ran)}
    lines = []
    for row in ran:
        name = f"{row['column']}, {row['stream']}, {shown_name(row)}"
        lines.append([name, *(_number(key, row.get(key)) for key in shown.values())])
    return Sheet("Every score: a long table", ["cell", *shown], lines, apart=True)


def _number(key: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if key in ("brier", "auroc") else percent(value)


def shown_name(row: Record) -> str:
    """A row's name, and whether it is guarded."""
    return row["row"] + " guarded" * row["guard"]


def _names(result: Record) -> list[str]:
    """The columns: every method, without the guard and with it."""
    return list(dict.fromkeys(shown_name(row) for row in result["rows"]))


def _ran(result: Record, column: str, zero_shot: bool = False) -> list[Record]:
    return [
        row
        for row in result["rows"]
        if row["column"] == column and NOT_RUN not in row and (zero_shot or row["method"] != "zeroshot")
    ]


def remarks(result: Record) -> list[str]:
    """The text below the tables: prompts, what was not run, notes."""
    texts: dict[str, list[str]] = {}
    for column, text in result["text"].items():
        texts.setdefault(described(text), []).append(column)
    lines = [f"Text on {', '.join(columns)}: {text}." for text, columns in texts.items()]
    lines += [f"Not run: {label}: {reason}." for label, reason in result["omitted"].items()]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        if NOT_RUN in row:
            reasons.setdefault((row["stream"], row[NOT_RUN]), []).append(row["column"])
    for (stream, reason), columns in reasons.items():
        lines.append(f"Not run: '{stream}' on {', '.join(dict.fromkeys(columns))}: {reason}.")
    lines.append(
        f"Worst tenth: the mean of the worst tenth of the orders. Worst window: the worst {result['facts']['window']} "
        "consecutive images of any order. Gain kept: what the guard leaves of the gain on all streams where adapting "
        "without it gains more than half a point."
    )
    return [*lines, *([result["note"]] if result["note"] else [])]


def section(result: Record, columns: object = None) -> tuple[TablesReport, dict[str, str]]:
    """The tables and the figure for the page, and no footer entries of their own."""
    facts = result["facts"]
    seeds = count(len(facts["seeds"]), "order")
    made = TablesReport(
        EXPERIMENTS[result["bench"]].heading,
        f"{', '.join(result['columns'])}; {facts['encoder']}, {seeds} of each stream, track {facts['track']}",
        [Table(sheet.title, sheet.header, _in_two_lines(sheet), sheet.apart) for sheet in sheets(result)],
        {},
        gaps=_figure(result),
        notes=remarks(result),
    )
    return made, {}


def _in_two_lines(sheet: Sheet) -> list[list[object]]:
    """The rows of a table for the page: what is in brackets is below what is before them, so that more fits."""
    rows: list[list[object]] = []
    for head, *cells in sheet.rows:
        parts = [cell.partition(" (") for cell in cells]
        rows.append([head, *(Cell(f"{safe(a)}<br><small>({safe(c)}</small>") if c else a for a, _, c in parts)])
    return rows


def _figure(result: Record) -> Gaps | None:
    """The mean gap over datasets of each method on each stream; None if nothing was run."""
    ran = [row for column in result["columns"] for row in _ran(result, column)]
    kinds = list(dict.fromkeys(row["stream"] for row in ran))
    values: dict[bool, dict[str, list[float | None]]] = {False: {}, True: {}}
    for label, guarded in dict.fromkeys((row["row"], row["guard"]) for row in ran):
        mine = [row for row in ran if (row["row"], row["guard"]) == (label, guarded)]
        values[guarded][label] = [_mean([row["gap"] for row in mine if row["stream"] == kind]) for kind in kinds]
    several = sum(bool(_ran(result, column)) for column in result["columns"]) > 1
    title = "Gap to zero-shot on each stream" + ", mean over datasets" * several
    return Gaps(title, kinds, values[False], values[True]) if kinds else None


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None
