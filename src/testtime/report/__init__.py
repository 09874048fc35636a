"""Reports: one self-contained HTML page about a run, from plain data.

`gather.stream_report` collects the data from a run over features, `record.Record` from a running session; `html` makes
the page.
"""

from __future__ import annotations

from testtime.report.class_changes import Change, changes
from testtime.report.data import (
    Answers,
    Curve,
    Grid,
    Queued,
    QueueMap,
    Series,
    Snapshot,
    StreamReport,
    Table,
    TablesReport,
    UnlabelledReport,
)
from testtime.report.page import html
from testtime.report.running_accuracy import running_accuracy_svg

__all__ = [
    "Answers",
    "Change",
    "Curve",
    "Grid",
    "QueueMap",
    "Queued",
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
