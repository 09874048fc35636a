"""Measurements, from the files that the scripts in `benchmarks` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testtime.experiments.catalogue import SYSTEMS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("h200-commands.json", "h200-parts.json")  # a stage is taken from the first file that has it
TITLES = {
    "commands": "Commands: 64 views, 1000 classes, ViT-B/16; milliseconds per image after the first 50",
    "four cores": "The same commands, limited to 4 of the machine's 16 cores",
    "step": "One step, C = 1000, D = 512, 64 views, DPE with full queues",
    "encoder": "ViT-B/16 in half precision, 64 views of an image",
    "float8": "ViT-B/16 with its large products in 8 bits, off by default: 256 views, per image",
    "views": "64 views of a photograph",
    "whole": "From an image to its prediction, ViT-B/16",
    "decode": "Reading a JPEG file",
    "rn50": "From an image to its prediction, RN50",
    "released": "The approach of the released code, ViT-B/16, with precomputed views",
}
ORDER = [row.label for row in SYSTEMS if not row.invalid]
SKIPPED = ("seconds to prepare", "difference", "classes alike", "least cosine", "bytes of a file")


def systems() -> str:
    """Every system over Caltech101's test split, from the output of `testtime bench systems`."""
    cells = json.loads((RESULTS / "systems-h200.json").read_text())
    lines = ["| system | accuracy | ms per image | peak MB | state MB |", "|---|---:|---:|---:|---:|"]
    measured = {cell.get("system"): cell for cell in cells.values()}
    for name in ORDER:
        if (cell := measured.get(name)) is None:
            continue  # not run since it was added or changed
        lines.append(
            f"| {name} | {100 * cell['accuracy']:.2f} | {cell['milliseconds']:.2f} | "
            f"{cell['peak_megabytes']:.1f} | {cell['state_megabytes']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def cpu() -> str:
    """A step of DPE on two cores and a sweep, from the output of `benchmarks/step.py` and `benchmarks/sweep.py`."""
    rows = json.loads((RESULTS / "step.json").read_text())
    sizes = [f"C = {row['classes']}" for row in rows]
    names = [name for name in rows[0] if name not in ("classes", "dim", "views")]
    head = f"ms per step, D = {rows[0]['dim']}, {rows[0]['views']} views"
    lines = [f"| {head} | {' | '.join(sizes)} |", "|---|---:|---:|"]
    lines += [f"| {name} | {' | '.join(f'{row[name]:.2f}' for row in rows)} |" for name in names]
    measured = json.loads((RESULTS / "sweep-cpu.json").read_text())
    commands = f"; {measured['settings'] * measured['one_command_seconds']:.0f} s as separate commands"
    lines += ["", _sweep(measured, f"{measured['threads']} threads", commands)]
    return "\n".join(lines) + "\n"


def _sweep(measured: dict[str, Any], where: str, commands: str) -> str:
    """The time of a sweep, compared with the same settings one by one."""
    single = measured["one_run_seconds"]
    return (
        f"{measured['settings']} settings over {measured['images']} images of {measured['classes']} classes, {where}: "
        f"{measured['sweep_seconds']:.2f} s in one pass; {single:.3f} s for one of them alone, so "
        f"{measured['settings'] * single:.1f} s one by one in one process{commands}. {_differences(measured)}"
    )


def _differences(measured: dict[str, Any]) -> str:
    """How the results of a sweep differ from those of single runs."""
    if not measured["largest_difference"]:
        return "Logits are the same bit for bit."
    changed = 100 - 100 * measured["predictions_alike"]
    return f"Logits differ by {measured['largest_difference']:.0e} at most, predictions in {changed:.2f} %."


def gpu() -> str:
    """Tables of milliseconds per image, under the name of the machine."""
    lines: list[str] = []
    listed: set[str] = set()
    for name in FILES:
        measured = json.loads((RESULTS / name).read_text())
        machine = measured["machine"]
        lines += [
            f"On one {machine['device']}, torch {machine['torch']}, Python {machine['python']}, "
            f"{machine['cores']} cores; random weights in the published shapes. From `benchmarks/results/{name}`.",
            "",
        ]
        for stage, title in TITLES.items():
            values = measured["results"].get(stage)
            if not values or stage in listed:
                continue
            listed.add(stage)
            lines += [f"**{title}**", "", "| what | |", "|---|---:|"]
            lines += [
                f"| {what} | {value:.1e} |" if "1 - cosine" in what else f"| {what} | {value:.2f}{_unit(what)} |"
                for what, value in values.items()
                if isinstance(value, float) and not any(word in what for word in SKIPPED)
            ]
            lines.append("")
    measured = json.loads((RESULTS / "sweep-h200.json").read_text())
    lines += [_sweep(measured, f"one {measured['device']}", ""), ""]
    return "\n".join(lines)


def _unit(what: str) -> str:
    """The unit of an entry, from its name."""
    return "×" if "over encoder" in what else " s" if "seconds" in what else " ms"
