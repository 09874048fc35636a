"""What was measured on a GPU, as `benchmarks/speed.py --out` wrote it down."""

from __future__ import annotations

import json
from pathlib import Path

from testtime.bench.systems import SYSTEMS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("h200.json", "h200-rn50.json", "h200-more.json")  # a stage is told from the first that has it
TITLES = {
    "step": "One step of DPE, C = 1000, D = 512, 64 views, full queues",
    "encoder": "ViT-B/16 in half precision, 64 views of an image",
    "views": "Views of a photograph, 64 of them",
    "whole": "From an image to its prediction, ViT-B/16",
    "decode": "Reading a JPEG file",
    "rn50": "From an image to its prediction, RN50",
    "released": "The way of the released code, ViT-B/16, views made before",
    "growth": "A captured step that is not compiled, as one number grows (else C = 1000, D = 512, 64 views, queue 3)",
}
ORDER = [system.name for system in SYSTEMS]
SKIPPED = ("seconds to prepare", "difference", "least cosine", "bytes of a file")


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
                f"| {what} | {value:.2f}{'×' if 'over encoder' in what else ' ms'} |"
                for what, value in values.items()
                if isinstance(value, float) and not any(word in what for word in SKIPPED)
            ]
            lines.append("")
    return "\n".join(lines)
