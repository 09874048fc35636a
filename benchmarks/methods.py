"""What one image costs in every method that runs on stored features, and how that grows, on this machine.

    python benchmarks/methods.py [--methods dpe tda ...] [--turns 5] [--json FILE]

Milliseconds per image at 100 and 1000 classes (64 views, 512 features), the factor by which they grow where
classes, views or features double from 100, 64 and 512, and the bytes of the state. A turn is a scan of 16
images, so that work done every 16 images is in it; all methods and sizes take turns in one run, with the methods'
defaults, and medians are printed: ratios hold on a shared machine even where milliseconds do not.

States have fixed shapes, so their bytes are also their peak. They are measured after 16 images, while most images
still find room in a cache; one that is refused copies less.
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
from testtime.methods.base import leaves
from testtime.types import MissingPart

TURN = 16  # images in a row


class Size(NamedTuple):
    classes: int
    views: int
    dim: int


BASE = Size(100, 64, 512)
LARGE = Size(1000, 64, 512)
DOUBLED = {name: BASE._replace(**{name: 2 * getattr(BASE, name)}) for name in Size._fields}


def usable(names: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Methods by name with their defaults, and why the others are left out."""
    task, _, _ = tt.toy()
    methods, left_out = {}, {}
    for name in names:
        method = registry.make_method(name)
        try:
            method.check(task)
        except MissingPart as reason:
            left_out[name] = str(reason)
        else:
            methods[name] = method
    return methods, left_out


def measure(methods: dict[str, Any], sizes: list[Size], turns: int) -> dict[Size, dict[str, dict[str, float]]]:
    """Milliseconds per image, the median of turns, and bytes of the state, by size and method."""
    streams, sessions = {}, {}
    for size in sizes:
        task, stream, _ = tt.toy(classes=size.classes, dim=size.dim, images=2 * TURN, views=size.views)
        warmup, streams[size] = stream.split(TURN)
        for name, method in methods.items():
            sessions[size, name] = tt.Session(task, method)
            sessions[size, name].scan(warmup)
    times: dict[tuple[Size, str], list[float]] = {key: [] for key in sessions}
    for _ in range(turns):
        for (size, name), session in sessions.items():
            session.fork().scan(streams[size][:1])  # whatever ran before has emptied the caches
            fork = session.fork()  # every turn is the same work
            start = time.perf_counter()
            fork.scan(streams[size])
            times[size, name].append(1000 * (time.perf_counter() - start) / TURN)
    found: dict[Size, dict[str, dict[str, float]]] = {size: {} for size in sizes}
    for (size, name), session in sessions.items():
        memory = sum(leaf.numel() * leaf.element_size() for leaf in leaves(session.state))
        found[size][name] = {"ms": statistics.median(times[size, name]), "bytes": memory}
    return found


def table(found: dict[Size, dict[str, dict[str, float]]], names: list[str]) -> str:
    """The measurements, a row per method."""
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
    parser.add_argument("--methods", nargs="+", default=registry.method_names(), help="all, unless named")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods, left_out = usable(options.methods)
    conditions = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32"
    print(f"{conditions}; C classes, V={BASE.views} views, D={BASE.dim}; median of {options.turns} turns")
    found = measure(methods, [BASE, LARGE, *DOUBLED.values()], options.turns)
    print(table(found, list(methods)))
    for name, reason in left_out.items():
        print(f"Left out: {name}. {reason}")
    if options.json:
        rows = [
            {"method": name, **size._asdict(), **part} for size, parts in found.items() for name, part in parts.items()
        ]
        report = {"conditions": conditions, "turns": options.turns, "rows": rows, "left_out": left_out}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
