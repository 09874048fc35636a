"""Every system over one dataset: accuracy, time and memory, going on where an earlier run stopped.

A cell is one system's run, a JSON file in the output folder, written whole when the run is done. Unlike those of
other experiments it holds time and memory, which are what this one is about.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from testtime import registry
from testtime.datasets import Dataset
from testtime.encoding.encode import RECIPE
from testtime.encoding.store import Features
from testtime.experiments import oracle as oracles
from testtime.experiments.cells import Lab, Text, provenance
from testtime.files import parse_json, write_atomic
from testtime.machine.memory import Peak
from testtime.methods.base import leaves
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.text.prompts import build_task
from testtime.types import Encoder, InputError, MissingPart, Task, ViewPlan

PATIENCE = 20  # seconds after which a cell says how far it is


class System(NamedTuple):
    """One row of the table of systems."""

    name: str
    method: str
    templates: str = "single"
    coop: bool = False  # text prototypes from prompts learned on the training part
    oracle: bool = False  # shown the test labels, to choose a setting by; only ever beside the honest row


SYSTEMS = (
    System("zero-shot", "zeroshot"),
    System("ensemble", "zeroshot", "imagenet7"),
    System("CoOp", "zeroshot", coop=True),
    System("TPT", "tpt"),
    System("C-TPT", "ctpt"),
    System("TDA", "tda"),
    System("TPS", "tps"),
    System("DMN-ZS", "dmn"),
    System("DMN-ZS (oracle)", "dmn", oracle=True),
    System("ZERO", "zero"),
    System("MTA", "mta"),
    System("DOTA", "dota"),
    System("MCP", "mcp"),
    System("DPE", "dpe"),
    System("TPT + CoOp", "tpt", coop=True),
    System("DPE + CoOp", "dpe", coop=True),
)


def named(names: Sequence[str] | None) -> list[System]:
    """The systems of these names, however they are written; all of them for None."""
    known = {system.name.lower().replace(" ", ""): system for system in SYSTEMS}
    wanted = [name.lower().replace(" ", "") for name in names] if names else list(known)
    for name in wanted:
        if name not in known:
            raise registry.unknown("system", name, known)
    return [known[name] for name in wanted]


class Bench(NamedTuple):
    """Where a bench runs, and on what."""

    folder: Path
    encoder: Encoder
    dataset: Dataset
    views: int = 1
    augmix: bool = False
    seed: int = 1
    limit: int | None = None
    report: Callable[[str], None] = print

    def facts(self) -> dict[str, Any]:
        """What a cell's numbers depend on, besides the system: cells of other facts are not mixed."""
        return {
            "encoder": self.encoder.name,
            "dataset": self.dataset.name,
            "images": len(self.dataset) if self.limit is None else min(self.limit, len(self.dataset)),
            "classes": len(self.dataset.classnames),
            "views": self.views,
            "augmix": self.augmix,
            "seed": self.seed,
        }

    def features(self) -> Features:
        """The features of the images taken, shared with every other experiment of that limit in the folder."""
        return self.lab().store(ViewPlan(self.views, self.augmix), self.seed)

    def lab(self) -> Lab:
        """The dataset with the encoder, in the folder."""
        return Lab(self.folder, self.encoder, self.dataset, self.limit, report=self.report)


def run_systems(bench: Bench, systems: Sequence[System] = SYSTEMS, prompts: Path | None = None) -> list[dict[str, Any]]:
    """One row per system that the encoder supports; a system that cannot run says why in its row.

    `prompts` are learned prompts (CoOp); without them, the systems that need them are left out with a reason.
    """
    _same_facts(bench)
    store, lab = bench.features(), bench.lab()
    rows = {}
    # what tunes prompts takes a thousand times as long as the rest, so it comes last
    for system in sorted(systems, key=lambda system: registry.method_class(system.method).needs_tower):
        cell = bench.folder / "systems" / f"{system.name.lower().replace(' ', '')}.json"
        source = {"data": lab.data, "weights": lab.weights, "recipe": RECIPE}
        source |= Text(learned=prompts).facts() if system.coop else {}
        damaged = f"{cell} (remove it, and it is made again)"
        row = parse_json(cell.read_bytes(), damaged, kind=dict) if cell.exists() else {}
        if row.get("source") == source and "accuracy" in row:
            bench.report(f"{system.name}: done before")
        else:
            row = _run(bench, store, system, prompts) | {"source": source}
            if "skipped" not in row:  # what is missing may be there next time
                write_atomic(cell, json.dumps(row, indent=1) + "\n")
            bench.report(f"{system.name}: {row.get('skipped') or format(100 * row['accuracy'], '.2f') + '%'}")
        rows[system] = row
    return [rows[system] for system in systems]


def _run(bench: Bench, store: Features, system: System, prompts: Path | None) -> dict[str, Any]:
    head = {"system": system.name, "method": system.method}
    try:
        task = _task(bench, system, prompts)
        method: Any = registry.make_method(system.method)
        if system.oracle:
            method = oracles.parts_of(method)
        session = Session(task, method)
    except MissingPart as reason:
        return head | {"skipped": str(reason)}
    truth = bench.lab().labels_of(store)
    order = shuffled(len(store), bench.seed)
    correct, seconds = torch.zeros(len(oracles.WEIGHTS) if system.oracle else 1, dtype=torch.int64), 0.0
    loading = session.warm_up(store.views)  # before the clocks: it is done once, whichever system comes first
    with Peak() as peak:
        for chunk, rows in zip(store.chunks(order.tolist(), size=64), order.split(64), strict=True):
            start = time.perf_counter()
            scores = session.scan(chunk.to(task.text.device)).cpu()
            seconds += time.perf_counter() - start
            if seconds > PATIENCE:
                bench.report(f"{system.name}: {session.count} of {len(order)}")
            labels = truth[rows]
            correct += method.correct(scores, labels) if system.oracle else (scores.argmax(1) == labels).sum()
    shown = oracles.described(method, correct, len(order)) if system.oracle else {}
    return head | {
        "accuracy": int(correct.max()) / len(order),
        "images": len(order),
        "milliseconds": 1000 * seconds / len(order),
        "loading_seconds": loading,
        "peak_megabytes": peak.megabytes,
        "state_megabytes": sum(leaf.nbytes for leaf in leaves(session.state)) / 1e6,
        "templates": "learned (CoOp)" if system.coop else system.templates,
        "settings": registry.settings_of(session.method),
        **provenance(),
        **shown,
    }


def _task(bench: Bench, system: System, prompts: Path | None) -> Task:
    names = bench.dataset.classnames
    tuned = registry.method_class(system.method).needs_tower
    if system.coop:
        if prompts is None:
            raise MissingPart("needs learned prompts: give --prompts FILE, made by 'testtime train-prompts'")
        return build_task(bench.encoder, names, prompts=f"coop:{prompts}", allow_duplicates=True)
    return build_task(bench.encoder, names, templates=system.templates, context=tuned, allow_duplicates=True)


def _same_facts(bench: Bench) -> None:
    """Refuse to go on in a folder whose cells were made from something else."""
    path = bench.folder / "systems" / "facts.json"
    facts = bench.facts()
    if not path.exists():
        write_atomic(path, json.dumps(facts, indent=1) + "\n")
        return
    before = parse_json(path.read_bytes(), f"{path} (remove it, or give another --out)", kind=dict)
    if different := [key for key in facts if before.get(key) != facts[key]]:
        key = different[0]
        raise InputError(
            f"{bench.folder} holds a bench of {key} {before.get(key)}, this one is of {facts[key]}; give another --out."
        )
