"""The paper's tables and figures as declarative experiments, cell by cell, going on where an earlier run stopped."""

from testtime.experiments.catalogue import EXPERIMENTS, Experiment, Row
from testtime.experiments.runner import find_columns, run_bench
from testtime.experiments.systems import SYSTEMS, Bench, System, run_systems
from testtime.experiments.tables import markdown, page, report_parts

__all__ = [
    "EXPERIMENTS",
    "SYSTEMS",
    "Bench",
    "Experiment",
    "Row",
    "System",
    "find_columns",
    "markdown",
    "page",
    "report_parts",
    "run_bench",
    "run_systems",
]
