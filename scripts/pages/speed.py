"""What was measured, as the programs in `benchmarks` wrote it down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testtime.experiments.catalogue import SYSTEMS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("h200-commands.json", "h200-parts.json")  # a stage is told from the first with it
TITLES = {
    "commands": "What a user types: 64 views, 1000 classes, ViT-B/16; milliseconds per image after the first 50",
    "four cores": "The same commands kept to 4 of the machine's 16 cores",
    "step": "One step, C = 1000, D = 512, 64 views, DPE with full queues",
    "encoder": "ViT-B/16 in half precision, 64 views of an image",
    "float8": "ViT-B/16 with its large products in 8 bits, which is off unless asked for: 256 views, per image",
    "views": "Views of a photograph, 64 of them",
    "whole": "From an image to its prediction, ViT-B/16",
    "decode": "Reading a JPEG file",
    "rn50": "From an image to its prediction, RN50",
    "released": "The way of the released code, ViT-B/16, views made before",
}
ORDER = [row.label for row in SYSTEMS if not row.invalid]
SKIPPED = ("seconds to prepare", "difference", "classes alike", "least cosine", "bytes of a file")


def systems() -> str:
    """Every system over Caltech101's test split, as `testtime bench systems` left it."""
    cells = json.loads((RESULTS / "systems-h200.json").read_text())
    lines = ["| system | accuracy | ms per image | peak MB | state MB |", "|---|---:|---:|---:|---:|"]
    for name in ORDER:
        cell = next(each for each in cells.values() if each.get("system") == name)
        lines.append(
            f"| {name} | {100 * cell['accuracy']:.2f} | {cell['milliseconds']:.2f} | "
            f"{cell['peak_megabytes']:.1f} | {cell['state_megabytes']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def cpu() -> str:
    """A step of DPE on two cores, as `benchmarks/step.py --json` left it, and a sweep, as `benchmarks/sweep.py` did."""
    rows = json.loads((RESULTS / "step.json").read_text())
    sizes = [f"C = {row['classes']}" for row in rows]
    names = [name for name in rows[0] if name not in ("classes", "dim", "views")]
    lines = [f"| ms a step, D = {rows[0]['dim']}, {rows[0]['views']} views | {' | '.join(sizes)} |", "|---|---:|---:|"]
    lines += [f"| {name} | {' | '.join(f'{row[name]:.2f}' for row in rows)} |" for name in names]
    told = json.loads((RESULTS / "sweep-cpu.json").read_text())
    commands = f"; {told['settings'] * told['one_command_seconds']:.0f} s as so many commands"
    lines += ["", _swept(told, f"{told['threads']} threads", commands)]
    return "\n".join(lines) + "\n"


def _swept(told: dict[str, Any], where: str, besides: str) -> str:
    """What a sweep took beside the same settings one by one."""
    return (
        f"{told['settings']} settings over {told['images']} images of {told['classes']} classes, {where}: "
        f"{told['sweep_seconds']:.2f} s in one pass; {told['one_run_seconds']:.3f} s one of them alone, so "
        f"{told['settings'] * told['one_run_seconds']:.1f} s one by one in one process{besides}. {_compared(told)}"
    )


def _compared(told: dict[str, Any]) -> str:
    """How the numbers of a sweep differ from those of single runs."""
    if not told["largest_difference"]:
        return "Logits are the same bit for bit."
    wrong = 100 - 100 * told["predictions_alike"]
    return f"Logits differ by {told['largest_difference']:.0e} at most, predictions in {wrong:.2f} %."


def gpu() -> str:
    """Tables of milliseconds per image, a machine's name above them."""
    lines: list[str] = []
    told_before: set[str] = set()
    for name in FILES:
        told = json.loads((RESULTS / name).read_text())
        machine = told["machine"]
        lines += [
            f"On one {machine['device']}, torch {machine['torch']}, Python {machine['python']}, "
            f"{machine['cores']} cores; random weights in the published shapes. From `benchmarks/results/{name}`.",
            "",
        ]
        for stage, title in TITLES.items():
            values = told["results"].get(stage)
            if not values or stage in told_before:
                continue
            told_before.add(stage)
            lines += [f"**{title}**", "", "| what | |", "|---|---:|"]
            lines += [
                f"| {what} | {value:.1e} |" if "1 - cosine" in what else f"| {what} | {value:.2f}{_unit(what)} |"
                for what, value in values.items()
                if isinstance(value, float) and not any(word in what for word in SKIPPED)
            ]
            lines.append("")
    told = json.loads((RESULTS / "sweep-h200.json").read_text())
    lines += [_swept(told, f"one {told['device']}", ""), ""]
    return "\n".join(lines)


def _unit(what: str) -> str:
    """The unit of an entry, which its name tells."""
    return "×" if "over encoder" in what else " s" if "seconds" in what else " ms"
