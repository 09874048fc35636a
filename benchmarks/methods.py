"""The cost of one image in every method, and how it scales, on this machine.

    python benchmarks/methods.py [--methods dpe tda ...] [--turns 5] [--json FILE]

Milliseconds per image at 100 and 1000 classes (64 views, 512 features), the factor by which they grow if classes,
views or features double from 100, 64 and 512, and the bytes of the state. A turn is a scan of 16 images, so that it
includes work done every 16 images. All methods and sizes take turns in one run, with the methods' defaults, and
medians are printed: ratios hold on a shared machine even if milliseconds do not.

States have fixed shapes, so their bytes are also their peak. They are measured after 16 images, while caches still
have free slots for most images; a rejected image copies less.

Methods that tune the prompt do so through the text tower of the encoder "tiny" (2 layers, 64 wide, random weights), so
that all can be compared on one machine in minutes; a real tower takes longer. Their turn is 2 images.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import testtime as tt
from testtime import registry
from testtime.encoding.encoders.tiny import TEXT, tiny
from testtime.methods.base import leaves

TURN = 16  # images per turn
TUNED = 2  # for methods that tune through a text tower, which takes far longer
TOWER = f"the encoder tiny's, {TEXT['layers']} layers, {TEXT['width']} wide"


class Size(NamedTuple):
    classes: int
    views: int
    dim: int


BASE = Size(100, 64, 512)
LARGE = Size(1000, 64, 512)
DOUBLED = {name: BASE._replace(**{name: 2 * getattr(BASE, name)}) for name in Size._fields}


def problem(size: Size, images: int, tuned: bool) -> tuple[tt.Task, torch.Tensor]:
    """A task, with a text tower if prompts are tuned, and a stream of images."""
    task, stream, labels = tt.toy(classes=size.classes, dim=size.dim, images=images, views=size.views)
    if not tuned:
        return task, stream
    tower = tt.build_task(tiny(dim=size.dim), task.classnames, context=True)
    noise = stream - task.text[labels][:, None]  # the same noise, around the tower's prototypes
    return tower, tt.ops.unit(tower.text[labels][:, None] + noise)


def measure(methods: dict[str, Any], sizes: list[Size], turns: int) -> dict[Size, dict[str, dict[str, float]]]:
    """Milliseconds per image, the median of turns, and bytes of the state, by size and method."""
    streams, sessions = {}, {}
    for size in sizes:
        for tuned in {method.needs_tower for method in methods.values()}:
            turn = TUNED if tuned else TURN
            task, stream = problem(size, 2 * turn, tuned)
            warmup, streams[size, tuned] = stream.split(turn)
            for name, method in methods.items():
                if method.needs_tower == tuned:
                    sessions[size, name] = tt.Session(task, method)
                    sessions[size, name].scan(warmup)
    times: dict[tuple[Size, str], list[float]] = {key: [] for key in sessions}
    for _ in range(turns):
        for (size, name), session in sessions.items():
            stream = streams[size, methods[name].needs_tower]
            session.fork().scan(stream[:1])  # warms the CPU caches after the previous contender
            fork = session.fork()  # every turn does the same work
            start = time.perf_counter()
            fork.scan(stream)
            times[size, name].append(1000 * (time.perf_counter() - start) / len(stream))
    found: dict[Size, dict[str, dict[str, float]]] = {size: {} for size in sizes}
    for (size, name), session in sessions.items():
        memory = sum(leaf.numel() * leaf.element_size() for leaf in leaves(session.state))
        found[size][name] = {"ms": statistics.median(times[size, name]), "bytes": memory}
    return found


def table(found: dict[Size, dict[str, dict[str, float]]], names: list[str]) -> str:
    """The measurements, one row per method."""
    head = ["method", f"ms, C={BASE.classes}", f"ms, C={LARGE.classes}", "2C", "2V", "2D"]
    rows = [[*head, f"MB, C={BASE.classes}", f"MB, C={LARGE.classes}"]]
    for name in names:
        base, large = found[BASE][name], found[LARGE][name]
        growth = [f"x{found[size][name]['ms'] / base['ms']:.2f}" for size in DOUBLED.values()]
        memory = [f"{part['bytes'] / 1e6:.1f}" for part in (base, large)]
        rows.append([name, f"{base['ms']:.2f}", f"{large['ms']:.2f}", *growth, *memory])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=registry.method_names(), help="default: all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = {name: registry.make_method(name) for name in options.methods}
    conditions = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32"
    print(f"{conditions}; C classes, V={BASE.views} views, D={BASE.dim}; median of {options.turns} turns")
    print(f"text tower of {', '.join(name for name, m in methods.items() if m.needs_tower)}: {TOWER}")
    found = measure(methods, [BASE, LARGE, *DOUBLED.values()], options.turns)
    print(table(found, list(methods)))
    if options.json:
        rows = [
            {"method": name, **size._asdict(), **part} for size, parts in found.items() for name, part in parts.items()
        ]
        report = {"conditions": conditions, "tower": TOWER, "turns": options.turns, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
