"""A result as tables for a page or a terminal, and as data for the report's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from testtime.experiments.catalogue import EXPERIMENTS
from testtime.experiments.lab import NOT_RUN, Record
from testtime.experiments.recipes import BACKBONES, MEANS, Published, published
from testtime.report.data import Grid, Series, Table, TablesReport


class Sheet(NamedTuple):
    """One table of text: its title, its header and its rows."""

    title: str
    header: list[str]
    rows: list[list[str]]


def sheets(result: Record) -> list[Sheet]:
    """A result's tables: one for each encoder, and for each dataset unless datasets are the columns."""
    found = []
    for encoder in _unique(result["rows"], "encoder"):
        mine = [row for row in result["rows"] if row["encoder"] == encoder]
        if len(result["columns"]) > 1:
            found.append(_by_dataset(result, encoder, mine))
        elif len(result["axes"]) == 2:
            found.append(_by_axes(result, encoder, mine))
        else:
            found.append(_by_row(result, encoder, mine))
    return found


def markdown(title: str, found: Sequence[Sheet], below: Sequence[str]) -> str:
    """Tables as a page of Markdown: a title, the tables, and the text below."""
    lines = [f"# {title}", ""]
    for sheet in found:
        lines += [sheet.title, "", *table_lines(sheet), ""]
    return "\n".join([*lines, *below]) + "\n"


def table_lines(sheet: Sheet, left: int = 1) -> list[str]:
    """A table in Markdown, its first columns aligned to the left."""
    aligned = ["---" if column < left else "---:" for column in range(len(sheet.header))]
    return [_line(sheet.header), _line(aligned), *map(_line, sheet.rows)]


def evaluation_markdown(result: Record) -> str:
    """An evaluation as a page of Markdown: what it ran on, one table, and the text used."""
    conditions = result["facts"]
    header = ["dataset", "method", "images", "views", "accuracy", "spread", "macro F1", "calibration error"]
    rows = []
    for row in result["rows"]:
        head = [row["dataset"], row["method"]]
        if NOT_RUN in row:
            rows.append([*head, f"not run: {row[NOT_RUN]}", *[""] * 5])
            continue
        scores = (percent(row[key]) for key in ("accuracy", "spread", "macro_f1", "calibration_error"))
        rows.append([*head, str(row["images"]), f"{row['views']}{' AugMix' * row['augmix']}", *scores])
    lines = [
        f"Encoder {conditions['encoder']}, track {conditions['track']}, protocol {conditions['protocol']}, "
        f"{seeds_of(conditions)}. Accuracy in percent, mean and sample deviation over seeds.",
        "",
        *table_lines(Sheet("", header, rows), left=2),
        "",
        *_texts(result["rows"], "dataset", "method"),
    ]
    return "\n".join(lines) + "\n"


def remarks(result: Record) -> list[str]:
    """The text below the tables: text prototypes, rows that were not run, notes."""
    lines = _texts(result["rows"], "column", "row")
    if "table" in result and result["table"]:
        lines.append(f"Published: {result['table']} of the paper, accuracy in percent.")
    reasons: dict[str, list[str]] = {}
    for row in result["rows"]:
        if NOT_RUN in row:
            reasons.setdefault(row[NOT_RUN], []).append(row["row"])
    for reason, labels in reasons.items():
        lines.append(f"Not run: {', '.join(dict.fromkeys(labels))}: {reason}")
    return [*lines, *([result["note"]] if result["note"] else [])]


def _texts(rows: Sequence[Record], dataset: str, label: str) -> list[str]:
    """What text prototypes were made of on each dataset; if rows differ, which rows. Names are under these keys."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "text" in row:
            found.setdefault((row[dataset], described(row["text"])), []).append(row[label])
    several = Counter(name for name, _ in found)
    return [
        f"Text on {name}: {text}" + f" ({', '.join(dict.fromkeys(labels))})" * (several[name] > 1) + "."
        for (name, text), labels in sorted(found.items())
    ]


def section(result: Record, columns: object = None) -> tuple[TablesReport, dict[str, str]]:
    """The tables and figures for the page, and no footer entries of their own."""
    parts, conditions = report_parts(result), result["facts"]
    made = TablesReport(
        result["title"],
        f"Track {conditions['track']}, protocol {conditions['protocol']}, {seeds_of(conditions)}" if conditions else "",
        [Table(*sheet) for sheet in sheets(result)],
        {},
        "\n\n".join(remarks(result)),
        [Grid(**each) for each in parts["grids"]],
        [Series(**each) for each in parts["series"] if each["xs"]],
    )
    return made, {}


def report_parts(result: Record) -> dict[str, list[Record]]:
    """What the report draws, under "grids" and "series": the arguments of its `Grid` and `Series`.

    An experiment without axes has no figure, and both lists are empty. Values are fractions, None where not run.
    """
    parts: dict[str, list[Record]] = {"grids": [], "series": []}
    axes = result["axes"]
    for encoder in _unique(result["rows"], "encoder"):
        for column in result["columns"]:
            mine = [row for row in result["rows"] if (row["encoder"], row["column"]) == (encoder, column)]
            title = f"{result['title']}: {column}, {encoder}"
            if len(axes) == 2:
                parts["grids"].append(_grid(title, axes, mine))
            elif len(axes) == 1:
                for line in _unique(mine, "line"):
                    parts["series"].append(_series(title, line or axes[0], [r for r in mine if r["line"] == line]))
    return parts


def _grid(title: str, axes: Sequence[str], rows: Sequence[Record]) -> Record:
    ys, xs = (sorted({row["at"][axis] for row in rows}) for axis in (0, 1))
    values = {tuple(row["at"]): row.get("accuracy") for row in rows}
    return {
        "title": title,
        "x": axes[1],
        "xs": xs,
        "y": axes[0],
        "ys": ys,
        "values": [[values.get((y, x)) for x in xs] for y in ys],
    }


def _series(title: str, axis: str, rows: Sequence[Record]) -> Record:
    ran = [row for row in rows if "accuracy" in row]
    lines: dict[str, list[float]] = {}
    if ran and all(row["published"] is not None for row in ran):
        lines["published"] = [row["published"] / 100 for row in ran]
        title += f"; published for {ran[0]['published_for']}"
    lines["measured"] = [row["accuracy"] for row in ran]  # the last line is drawn boldest
    return {"title": title, "x": axis, "xs": [row["at"][0] for row in ran], "lines": lines}


def _by_row(result: Record, encoder: str, rows: Sequence[Record]) -> Sheet:
    timed = EXPERIMENTS[result["bench"]].costs
    several = any(row.get("spread") is not None for row in rows)
    compared = any(row["published"] is not None for row in rows)
    header = ["row", "accuracy", *(["spread"] if several else []), "gain"]
    header += timed
    if compared:
        where = next(row["published_for"] for row in rows if row["published"] is not None)
        what = "published gain" if rows[0]["published_gain"] else "published"
        header += [f"{what} ({where})", *(["published time"] if timed else [])]
    lines = []
    for row in rows:
        ran = NOT_RUN not in row
        line = [row["row"], percent(row["accuracy"]) if ran else NOT_RUN]
        line += [percent(row.get("spread"))] if several else []
        line.append(f"{100 * row['gain']:+.2f}" if ran else "")
        line += [COSTS[name](row) if row.get("milliseconds") is not None else "" for name in timed]
        if compared:
            line.append(_number(row["published"], row["published_gain"]))
            line += [row["published_time"] or ""] if timed else []
        lines.append(line)
    return Sheet(_title(result, encoder, rows), header, lines)


def _by_axes(result: Record, encoder: str, rows: Sequence[Record]) -> Sheet:
    grid = _grid("", result["axes"], rows)
    header = [f"{grid['y']} \\ {grid['x']}", *map(str, grid["xs"])]
    lines = [[str(y), *map(percent, values)] for y, values in zip(grid["ys"], grid["values"], strict=True)]
    return Sheet(_title(result, encoder, rows), header, lines)


def _by_dataset(result: Record, encoder: str, rows: Sequence[Record]) -> Sheet:
    """Measured, with published in brackets; a mean only if all its datasets were run."""
    columns = list(result["columns"])
    table = published()[result["table"]]
    means = [column for column in table.columns if column in MEANS]
    lines = []
    for label in _unique(rows, "row"):
        cells = {row["column"]: row for row in rows if row["row"] == label}
        line = [label]
        for column in columns:
            row = cells[column]
            line.append(f"{percent(row.get('accuracy')) or '-'} ({_number(row['published']) or '-'})")
        for average in means:
            over = columns[1:] if average == "ood-average" else columns  # the first is in-domain
            values = [cells[column]["accuracy"] for column in over if "accuracy" in cells[column]]
            shown = percent(sum(values) / len(values)) if len(values) == len(over) else "-"
            line.append(f"{shown} ({_number(_mean(table, rows, label, average)) or '-'})")
        lines.append(line)
    return Sheet(_title(result, encoder, rows), ["method", *columns, *means], lines)


def _mean(table: Published, rows: Sequence[Record], label: str, average: str) -> float | None:
    here = BACKBONES.get(rows[0]["encoder"])
    return table.value(here if here and here in table.rows else next(iter(table.rows)), label, average)


def duration(seconds: float) -> str:
    """Seconds in hours and minutes, rounded.

    >>> duration(6600), duration(540), duration(3)
    ('1 h 50 min', '9 min', '3 s')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _all_time(row: Record) -> str:
    """How long all images take, encoding included."""
    encoding = row["encoding_milliseconds"]
    return "" if encoding is None else duration(row["images"] * (row["milliseconds"] + encoding) / 1000)


# what an experiment may show of a run's costs, by column header
COSTS: dict[str, Callable[[Record], str]] = {
    "ms per image": lambda row: f"{row['milliseconds']:.2f}",
    "ms encoding": lambda row: _shown(row["encoding_milliseconds"]),
    "time for all": _all_time,
    "peak MB": lambda row: _shown(row["peak_megabytes"]),
    "state MB": lambda row: _shown(row["state_megabytes"]),
}


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _title(result: Record, encoder: str, rows: Sequence[Record]) -> str:
    conditions = result["facts"]
    ran = [row for row in rows if NOT_RUN not in row]
    shown = [", ".join(result["columns"]) if len(result["columns"]) == 1 else "", encoder]
    if ran:
        views = {f"{row['views']} view{'s' * (row['views'] > 1)}{' AugMix' * row['augmix']}" for row in ran}
        shown += [f"{ran[0]['images']} images" if len(result["columns"]) == 1 else "", " or ".join(sorted(views))]
    if conditions:
        shown += [conditions["track"], conditions["protocol"], seeds_of(conditions)]
    elif len(result["columns"]) > 1:
        shown.append("measured (published)")
    return ", ".join(part for part in shown if part) + (
        "; measured (published)" if conditions and len(result["columns"]) > 1 else ""
    )


def _number(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{value:+.2f}" if signed else f"{value:.2f}"


def _unique(rows: Sequence[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def seeds_of(conditions: Record) -> str:
    """The seeds in words: seed 1, or seeds 1, 2, 3."""
    return f"seed{'s' * (len(conditions['seeds']) > 1)} {', '.join(map(str, conditions['seeds']))}"


def described(text: Record) -> str:
    """What text prototypes were made of, in words."""
    if text["learned"]:
        return f"learned prompt {text['learned']}"
    templates = text["templates"]
    parts = [f"'{templates[0]}'" if len(templates) == 1 else f"{len(templates)} templates"] if templates else []
    return " and ".join([*parts, *([f"descriptions {text['descriptions']}"] if text["descriptions"] else [])])


def percent(fraction: float | None) -> str:
    """A fraction in percent with two decimals, empty for None."""
    return "" if fraction is None else f"{100 * fraction:.2f}"
