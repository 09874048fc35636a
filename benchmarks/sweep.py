"""A sweep of many settings in one pass against the same settings one by one: time and numbers.

    python benchmarks/sweep.py [--settings 64] [--classes 100] [--images 1000] [--device cpu] [--json FILE]

Cached features, one view, D = 512. Both ways run in this process; the single runs are Sessions, as `testtime replay`
makes them. Their time is that of `--singles` of them, spread over the grid, times settings over singles.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from itertools import product
from pathlib import Path

import torch

import testtime as tt
from testtime.methods.dpe import DPE


def grid(size: int) -> list[DPE]:
    """Settings around the released ones: alpha x beta, as in the paper's figure, and as many as asked for."""
    pairs = list(product((2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)))
    return [DPE(alpha=alpha, beta=beta) for alpha, beta in (pairs * (size // len(pairs) + 1))[:size]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--singles", type=int, default=16)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    task, stream, labels = tt.toy(classes=options.classes, dim=512, images=options.images)
    methods = grid(options.settings)
    chosen = list(range(0, len(methods), max(1, len(methods) // options.singles)))

    start = time.perf_counter()
    together = tt.sweep(task, methods, stream.split(64))
    swept = time.perf_counter() - start

    start = time.perf_counter()
    alone = {place: tt.Session(task, methods[place]).scan(stream) for place in chosen}
    single = (time.perf_counter() - start) / len(chosen)

    equal = all(torch.equal(logits, together[place]) for place, logits in alone.items())
    facts = {
        "settings": len(methods),
        "classes": options.classes,
        "images": options.images,
        "sweep_seconds": swept,
        "one_run_seconds": single,
        "ratio_to_single_runs": swept / (single * len(methods)),
        "ratio_to_one_run": swept / single,
        "equal": equal,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    print(
        f"{len(methods)} settings, C={options.classes}, N={options.images}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}\n"
        f"one pass {swept:.1f} s, one by one {single * len(methods):.1f} s ({len(chosen)} runs of {single:.2f} s): "
        f"ratio {facts['ratio_to_single_runs']:.2f}; logits {'equal bit for bit' if equal else 'DIFFER'}"
    )
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
