"""A leaderboard: tables that sort by any column, and filters for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from testtime.report.data import Board, Ranked, Value
from testtime.report.markup import Cell, safe, scrolling, table


def board(found: Board | None) -> str:
    """The filters and the tables; nothing without a board.

    Each table has a group of rows for each choice of cells. Without scripts the first is shown.

    >>> rows = [Ranked("tda", "", ["batch"], [Value("54.1", 0.541)])]
    >>> page = board(Board({"Accuracy": "mean"}, ["all cells"], [("One setting", "", [rows])]))
    >>> 'data-value="0.541"' in page, "batch" in page
    (True, True)
    """
    if found is None:
        return ""
    return _filters(found) + "".join(
        f"<div><h3>{safe(title)}</h3>" + (f"<p>{safe(below)}</p>" if below else "") + _table(found, bodies) + "</div>"
        for title, below, bodies in found.tables
    )


def _filters(found: Board) -> str:
    choices = "".join(f"<option>{safe(choice)}</option>" for choice in found.choices)
    boxes = "".join(
        f'<label><input type="checkbox" value="{safe(each)}"> {safe(each)}</label>' for each in found.assumed
    )
    hide = f"<fieldset><legend>Hide what assumes</legend>{boxes}</fieldset>" if boxes else ""
    return (
        f'<form class="filters"><label>Cells <select>{choices}</select></label>'
        f'<label>Method <input type="search" placeholder="part of a name"></label>{hide}'
        '<output aria-live="polite"></output></form>'
    )


def _table(found: Board, bodies: Sequence[Sequence[Ranked]]) -> str:
    head = [_heading("Method", "name of the method"), *(_heading(key, text) for key, text in found.columns.items())]
    groups = [[_row(row) for row in body] for body in bodies]
    return scrolling(table(head, *groups, kind="board"))


def _heading(title: str, meaning: str) -> Cell:
    return Cell(f'<button type="button" title="{safe(meaning)}">{safe(title)}</button>')


def _row(row: Ranked) -> list[object]:
    note = f'<span class="note">{safe(row.note)}</span>' if row.note else ""
    assumes = f" data-assumes='{safe(json.dumps(list(row.assumes)))}'"
    return [Cell(f"{safe(row.name)}{note}", f'{assumes} data-value="{safe(row.name)}"'), *map(_value, row.values)]


def _value(value: Value) -> Cell:
    order = "" if value.order is None else f' data-value="{value.order:.10g}"'
    return Cell(safe(value.shown) + (f"<br><small>{safe(value.below)}</small>" if value.below else ""), order)
