"""Reports: one self-contained HTML page about a run, from plain data.

`gather.stream_report` makes the data from a run over features, `record.Record` while a session runs; `html` the page.
"""

from __future__ import annotations

from testtime.report.classes import Change, changes
from testtime.report.curves import running_accuracy_svg
from testtime.report.data import (
    Answers,
    Curve,
    Grid,
    Queued,
    QueueMap,
    QueuesReport,
    Series,
    Snapshot,
    StreamReport,
    Table,
    TablesReport,
    UnlabelledReport,
)
from testtime.report.page import html

__all__ = [
    "Answers",
    "Change",
    "Curve",
    "Grid",
    "QueueMap",
    "Queued",
    "QueuesReport",
    "Series",
    "Snapshot",
    "StreamReport",
    "Table",
    "TablesReport",
    "UnlabelledReport",
    "changes",
    "html",
    "running_accuracy_svg",
]
