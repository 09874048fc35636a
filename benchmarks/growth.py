"""How the cost of a step scales with classes, features, views and slots, and that it does not grow with the stream.

    python benchmarks/growth.py [--methods dpe tda] [--axes classes dim ...] [--json FILE] [--svg FILE] [--quick]

Varies one size at a time from 1000 classes, 512 features, 64 views and 3 slots. Milliseconds are medians of repeats,
each with as many steps as fit `--seconds`, and at least two. Every cache is full and the method learns from every
image, so nothing can be reused from one step to the next: this is the worst case. A point whose state would exceed 2 GB
is reported as left out: TDA's negative cache holds C x C probabilities in each slot.

`images` runs a stream of `--images` images (10 classes, 64 features, 1 view) through a session and reports, for every
tenth of it, wall-clock and CPU seconds and the bytes of the state: both stay constant, so time is linear in the stream
and memory is constant. Generating the stream is not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import testtime as tt
from testtime import ops
from testtime.files import write_atomic
from testtime.methods.base import leaves
from testtime.types import Task

MOST = 2**31  # bytes; larger states are not measured
TURNS = 3
SLOTS = {"dpe": ("queue",), "tda": ("pos_capacity", "neg_capacity")}  # settings for the number of slots


class Size(NamedTuple):
    classes: int
    dim: int
    views: int
    slots: int


BASE, SMALL = Size(1000, 512, 64, 3), Size(20, 32, 4, 2)
AXES = {
    "classes": (10, 30, 100, 300, 1000, 3000, 10_000, 20_000),
    "dim": (128, 256, 512, 1024, 2048),
    "views": (1, 4, 16, 64, 256),
    "slots": (1, 2, 4, 8, 16, 32),
}
QUICK = {"classes": (10, 40), "dim": (16, 64), "views": (1, 8), "slots": (1, 4)}
TENTHS = 10


def method_of(name: str, slots: int) -> Any:
    """A method with this many slots in every cache, which learns from every image it can."""
    settings: dict[str, object] = {setting: slots for setting in SLOTS[name]}
    settings |= {"entropy_threshold": 99.0} if name == "dpe" else {"neg_entropy_lower": 0.0, "neg_entropy_upper": 1.0}
    return tt.make_method(name, None, settings)


def full(name: str, method: Any, task: Task) -> Any:
    """A state with full caches, of features near their class, in which any image replaces an entry."""
    noise = torch.Generator().manual_seed(1)

    def bank(before: Any) -> Any:
        keys = torch.randn(before.keys.shape, generator=noise).to(task.text).mul_(0.05).add_(task.text[:, None])
        return before._replace(keys=ops.unit(keys), cost=torch.full_like(before.cost, 99.0))

    state = method.init(task)
    if name == "dpe":
        queue = bank(state.queue)
        return state._replace(queue=queue, visual=queue.keys.mean(1))
    # each item considers one class in ten possible; at most three of a hundred pass the mask
    state.negative_prob[:, :, ::10] = 10 / task.classes
    return state._replace(positive=bank(state.positive), negative=bank(state.negative))


def state_bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(state))


def planned_bytes(name: str, size: Size) -> int:
    """Bytes of a state, computed before it is allocated."""
    keys = size.classes * size.slots * size.dim
    numbers = keys + 2 * size.classes * size.dim if name == "dpe" else 2 * keys + size.classes**2 * size.slots
    return 4 * numbers


def measure(name: str, size: Size, device: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step at this size, or why it was left out."""
    row: dict[str, Any] = {"method": name, **size._asdict()}
    if (needed := planned_bytes(name, size)) > MOST:
        return row | {"left out": f"a state of {needed / 1e9:.1f} GB"}
    task, stream, _ = tt.toy(classes=size.classes, dim=size.dim, images=32, views=size.views)
    task, stream = task.to(device), stream.to(device)
    method = method_of(name, size.slots)
    state = full(name, method, task)
    session = tt.Session(task, method)
    session.state = state
    session.scan(stream[:1])  # compiles, allocates
    once = _timed(session, stream[1:2])
    steps = max(2, min(len(stream), int(seconds / TURNS / max(once, 1e-6))))
    turns = TURNS if 2 * once * TURNS < 4 * seconds else 1
    times = [_timed(session, stream[:steps]) / steps for _ in range(turns)]
    return row | {"ms": 1000 * statistics.median(times), "steps": steps * turns, "state_bytes": state_bytes(state)}


def _timed(session: tt.Session, stream: Tensor) -> float:
    start = time.perf_counter()
    session.scan(stream).sum().item()  # the sum waits for the GPU
    return time.perf_counter() - start


def lengths(name: str, images: int, device: str) -> list[dict[str, Any]]:
    """Seconds and bytes of the state for each tenth of a long stream."""
    task, _, _ = tt.toy(classes=10, dim=64, images=1, views=1)
    task = task.to(device)
    noise = torch.Generator(device).manual_seed(0)
    session = tt.Session(task, tt.make_method(name))
    chunk = min(10_000, images // TENTHS)

    def random_stream(count: int) -> Tensor:
        labels = torch.randint(task.classes, (count,), generator=noise, device=device)
        scatter = torch.randn(count, 1, task.dim, generator=noise, device=device)
        return ops.unit(task.text[labels][:, None] + 0.15 * scatter)

    session.fork().scan(random_stream(1))  # compiles
    rows = []
    for _ in range(TENTHS):
        wall = processor = 0.0
        for _ in range(images // TENTHS // chunk):
            stream, began = random_stream(chunk), time.process_time()
            wall += _timed(session, stream)
            processor += time.process_time() - began
        took = {"seconds": wall, "processor_seconds": processor}
        rows.append({"method": name, "images": session.count, **took, "state_bytes": state_bytes(session.state)})
        print(f"  {name:>4} {session.count:>9,} images  {wall:8.2f} s  {processor:8.2f} s  {rows[-1]['state_bytes']} B")
    return rows


def chart(report: dict[str, Any]) -> str:
    """A panel per size: milliseconds of a step on logarithmic axes; then the stream."""
    panels = [
        (axis, "ms", [row | {"x": row[axis]} for row in rows if "ms" in row]) for axis, rows in report["axes"].items()
    ]
    if report["images"]:
        each = [row | {"x": row["images"], "ms": 1e3 * row["seconds"]} for row in report["images"]]
        panels.append(("images", f"ms per {report['images'][0]['images']:,} images", each))
    drawn = [_panel(*panel, left=320 * index) for index, panel in enumerate(panels) if panel[2]]
    title = f"Scaling of the cost of a step: {report['machine']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{320 * len(panels)}" height="300" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="20" font-size="14">{title}</text>' + "".join(drawn) + "</svg>\n"
    )


def _panel(axis: str, unit: str, rows: list[dict[str, Any]], left: int) -> str:
    """Lines in a frame of 240 x 200, one per method, with every value beside its point."""
    xs, ys = [row["x"] for row in rows], [row["ms"] for row in rows]

    def position(value: float, values: list[float], length: float) -> float:
        low, high = math.log(min(values)), math.log(max(values))
        return length * (math.log(value) - low) / max(high - low, 0.7)  # at least a factor of two across

    parts = [f'<text x="{left + 60}" y="46">{unit}, by {axis}</text>']
    for colour, name in zip(("#4269d0", "#c2410c"), dict.fromkeys(row["method"] for row in rows), strict=False):
        points = [
            (left + 60 + position(row["x"], xs, 220), 260 - position(row["ms"], ys, 190), row)
            for row in rows
            if row["method"] == name
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for x, y, row in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>')
            parts.append(f'<text x="{x:.1f}" y="{y - 6:.1f}" font-size="8" text-anchor="middle">{row["ms"]:.3g}</text>')
            parts.append(f'<text x="{x:.1f}" y="276" font-size="8" text-anchor="middle">{row["x"]:,}</text>')
        x, y, _ = points[-1]
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 3:.1f}" fill="{colour}">{name}</text>')
    return "".join(parts)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(SLOTS), choices=list(SLOTS))
    parser.add_argument("--axes", nargs="+", default=[*AXES, "images"], choices=[*AXES, "images"])
    parser.add_argument("--images", type=int, default=1_000_000, help="length of the long stream")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate time per point")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test")
    options = parser.parse_args(arguments)
    if options.images < TENTHS:
        parser.error(f"--images {options.images}: at least {TENTHS} are needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    base, axes = (SMALL, QUICK) if options.quick else (BASE, AXES)
    images, seconds = (min(options.images, 500), 0.05) if options.quick else (options.images, options.seconds)
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {options.device}"
    report: dict[str, Any] = {"machine": machine, "base": base._asdict(), "axes": {}, "images": []}
    print(machine)
    for axis in options.axes:
        for name in options.methods:
            if axis == "images":
                report["images"] += lengths(name, images, options.device)
                continue
            for value in axes[axis]:
                row = measure(name, base._replace(**{axis: value}), options.device, seconds)
                report["axes"].setdefault(axis, []).append(row)
                found = f"{row['ms']:10.3f} ms" if "ms" in row else f"left out: {row['left out']}"
                print(f"  {name:>4} {axis:>8} = {value:<6} {found}", flush=True)
        if options.json:  # after every axis, as the next one may take long
            write_atomic(options.json, json.dumps(report, indent=1) + "\n")
        if options.svg:
            write_atomic(options.svg, chart(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
