"""A result as tables for a page or a terminal, and as data for the report's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from testtime.experiments.catalogue import EXPERIMENTS
from testtime.experiments.lab import NOT_RUN, Record
from testtime.experiments.recipes import MEANS, backbone_of, published, recipe
from testtime.report.data import Grid, Series, Table, TablesReport
from testtime.report.formatting import count


class Sheet(NamedTuple):
    """One table of text: its title, its header and its rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    apart: bool = False  # published numbers that cannot be compared with the measured ones


def sheets(result: Record) -> list[Sheet]:
    """A result's tables: one for each encoder, and for each dataset unless datasets are the columns.

    A published number is beside the measured one if both are of the same images and backbone; all others are in
    tables of their own at the end.
    """
    found, others = [], []
    for encoder in _unique(result["rows"], "encoder"):
        mine = [row for row in result["rows"] if row["encoder"] == encoder]
        if len(result["columns"]) > 1:
            found.append(_by_dataset(result, encoder, mine))
        elif len(result["axes"]) == 2:
            found.append(_by_axes(result, encoder, mine))
        else:
            found.append(_by_row(result, encoder, mine))
        others += _not_comparable(result, encoder, mine)
    return found + [sheet for index, sheet in enumerate(others) if sheet not in others[:index]]


def markdown(title: str, found: Sequence[Sheet], below: Sequence[str]) -> str:
    """Tables as a page of Markdown: a title, the tables, the text below, and what is not comparable under a heading."""
    lines = [f"# {title}", ""]
    for sheet in found:
        if not sheet.apart:
            lines += [sheet.title, "", *table_lines(sheet), ""]
    lines += [f"- {line}" for line in below]
    for sheet in found:
        if sheet.apart:
            lines += ["", f"## {sheet.title}", "", *table_lines(sheet)]
    return "\n".join(lines) + "\n"


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
    rows = [row | {"row": shown_name(row)} for row in result["rows"]]
    lines = _texts(rows, "column", "row")
    if any(row["comparable"] for row in rows):
        lines.append(f"Published: {EXPERIMENTS[result['bench']].place} of the paper, accuracy in percent.")
    ran = {(row["encoder"], row["column"]) for row in rows if NOT_RUN not in row}
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if NOT_RUN in row:  # a dataset that is missing is named once, and not every row
            whole = (row["encoder"], row["column"]) not in ran and row[NOT_RUN] not in _invalid(result)
            key = ("Not run on", row["column"]) if whole else ("Not run:", row["row"])
            reasons.setdefault((key[0], row[NOT_RUN]), []).append(key[1])
    lines += [f"{what} {', '.join(dict.fromkeys(names))}: {reason}" for (what, reason), names in reasons.items()]
    return [*lines, *([result["note"]] if result["note"] else [])]


def _invalid(result: Record) -> set[str]:
    """Why some rows of the experiment never run."""
    return {row.invalid for row in EXPERIMENTS[result["bench"]].rows}


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
        EXPERIMENTS[result["bench"]].heading,
        f"Track {conditions['track']}, protocol {conditions['protocol']}, {seeds_of(conditions)}" if conditions else "",
        [Table(*sheet) for sheet in sheets(result)],
        {},
        "",
        [Grid(**each) for each in parts["grids"]],
        [Series(**each) for each in parts["series"] if each["xs"]],
        notes=remarks(result),
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
    if ran and all(row["comparable"] and row["published"] is not None for row in ran):
        lines["published"] = [row["published"] / 100 for row in ran]
    lines["measured"] = [row["accuracy"] for row in ran]  # the last line is drawn boldest
    return {"title": title, "x": axis, "xs": [row["at"][0] for row in ran], "lines": lines}


def _by_row(result: Record, encoder: str, rows: Sequence[Record]) -> Sheet:
    timed = EXPERIMENTS[result["bench"]].costs
    several = any(row.get("spread") is not None for row in rows)
    compared = any(row["comparable"] for row in rows)
    header = ["row", "accuracy", *(["spread"] if several else []), "gain"]
    header += timed
    if compared:
        header += [
            "published gain" if rows[0]["published_gain"] else "published",
            *(["published time"] if timed else []),
        ]
    lines = []
    for row in rows:
        ran = NOT_RUN not in row
        line = [shown_name(row), percent(row["accuracy"]) if ran else NOT_RUN]
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
    """Measured, with published in brackets if comparable; a mean only if all its datasets were run."""
    columns = list(result["columns"])
    table = published()[result["table"]]
    means = [column for column in table.columns if column in MEANS]
    lines = []
    for label in _unique(rows, "row"):
        cells = {row["column"]: row for row in rows if row["row"] == label}
        line = [shown_name(cells[columns[0]])]
        for column in columns:
            row = cells[column]
            line.append(_beside(row.get("accuracy"), row["published"], row["comparable"]))
        for average in means:
            over = columns[1:] if average == "ood-average" else columns  # the first is in-domain
            values = [cells[column]["accuracy"] for column in over if "accuracy" in cells[column]]
            mean = sum(values) / len(values) if len(values) == len(over) else None
            same = all(cells[column]["comparable"] for column in over)
            line.append(_beside(mean, table.value(table.backbone(encoder), label, average), same))
        lines.append(line)
    return Sheet(_title(result, encoder, rows), ["method", *columns, *means], lines)


def _beside(measured: float | None, paper: float | None, comparable: bool) -> str:
    """A measured fraction in percent, and the paper's number in brackets if it is comparable."""
    return (percent(measured) or "-") + (f" ({_number(paper) or '-'})" if comparable else "")


def _not_comparable(result: Record, encoder: str, rows: Sequence[Record]) -> list[Sheet]:
    """One table of the paper's numbers for other images or another backbone than these rows', if there are any."""
    others = [row for row in rows if row["published"] is not None and not row["comparable"]]
    if not others:
        return []
    table = published()[result["table"]]
    backbone = table.backbone(encoder)
    names = list(dict.fromkeys(row["published_for"].partition(", ")[0] for row in others))
    datasets = [recipe(name).benchmark for name in names]
    means = [column for column in table.columns if column in MEANS]
    lines = []
    for label in _unique(others, "row"):
        mine = {row["published_for"].partition(", ")[0]: row for row in others if row["row"] == label}
        line = [label, *(_number(mine[name]["published"], table.gain) if name in mine else "" for name in names)]
        line += [_number(table.value(backbone, label, average)) for average in means]
        lines.append([*line, *([next(iter(mine.values()))["published_time"] or ""] if table.time else [])])
    (what,) = (
        {f"{each.title} ({each.images:,} images)" for each in datasets}
        if len(datasets) == 1
        else {f"the test sets of {count(len(datasets), 'benchmark')}"}
    )
    clip = backbone if "CLIP" in backbone else f"CLIP {backbone}"
    header = [
        "row",
        *(f"{each.title}{', gain' * table.gain}" for each in datasets),
        *means,
        *(["time"] * bool(table.time)),
    ]
    return [Sheet(f"Published, {clip}, {what}: not comparable with this run", header, lines, apart=True)]


def shown_name(row: Record) -> str:
    """A row's name. The paper calls its zero-shot classifier CLIP; with any other encoder the name says what ran."""
    return f"zero-shot ({row['encoder']})" if row["row"] == "CLIP" and not backbone_of(row["encoder"]) else row["row"]


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
    beside = len(result["columns"]) > 1 and any(row["comparable"] for row in rows)
    return ", ".join(part for part in shown if part) + "; measured (published)" * beside


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
