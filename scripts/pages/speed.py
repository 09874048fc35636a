"""What was measured on a GPU, as `benchmarks/speed.py --out` wrote it down."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("h200.json", "h200-more.json")
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
SKIPPED = ("seconds to prepare", "difference", "least cosine", "bytes of a file")


def gpu() -> str:
    """Tables of milliseconds per image, a machine's name above them."""
    lines: list[str] = []
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
            if not values:
                continue
            lines += [f"**{title}**", "", "| what | |", "|---|---:|"]
            lines += [
                f"| {what} | {value:.2f}{'×' if 'over encoder' in what else ' ms'} |"
                for what, value in values.items()
                if isinstance(value, float) and not any(word in what for word in SKIPPED)
            ]
            lines.append("")
    return "\n".join(lines)
