"""One image of a method beside the matrix products that it cannot avoid, and that any implementation would need.

    python benchmarks/products.py [--classes 1000] [--dim 512] [--turns 40] [--json FILE]

`Session.step` with features of one view, after one image of each class, in turns with the products alone: same shapes,
precision and threads, on random numbers. Medians of the turns. What remains beside the products is `beyond`, in
ms. It includes what a session does for each answer, whatever the method: that of `zeroshot`. Where a method is fast
without, only the text's logits count as its product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from commands import machine

import testtime as tt
from testtime import registry
from testtime.ops import cholesky, product


def methods() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every method that tunes no prompts, by its name here, with its settings."""
    names = [name for name in registry.method_names() if not registry.method_class(name).needs_tower]
    return {name: (name, {}) for name in names} | {"mcp++": ("mcp", {"residual": True})}


def products(classes: int, dim: int) -> dict[str, Callable[[], object]]:
    """The products of each method for one image."""
    text, image, double = torch.randn(classes, dim), torch.randn(dim), torch.randn(classes, dim, dtype=torch.float64)
    square = torch.eye(dim, dtype=torch.float64) + 0.1 / dim
    few = torch.randn(8, dim, dtype=torch.float64)
    caches = [torch.randn(10 * classes, dim) for _ in range(2)]
    uncertain = torch.randn(3 * classes, dim + classes)
    alike = torch.randn(classes, classes)

    def alignment() -> None:  # similarities of all classes, and their gradients by both sides
        _ = product(text, text.T), product(alike, text), product(alike.T, text)

    def gaussians() -> None:  # the covariance, its factor, and the means divided by it
        _ = few.T @ few, torch.linalg.solve_triangular(cholesky(square.clone()).mT, double.T, upper=False)

    def memories() -> None:
        weight = uncertain[:, :dim] @ image
        _ = caches[0] @ image, caches[1] @ image, weight @ uncertain[:, dim:]

    def coordinates() -> None:
        pull = product(text.T, text)
        _ = product(text, pull), product(text, pull.T)
        memories()

    def frozen() -> None:
        _ = text @ image

    found = {"dpe": alignment, "dlae": alignment, "dota": gaussians, "oga": gaussians, "mcp": memories}
    return dict.fromkeys(methods(), frozen) | found | {"mcp++": coordinates}


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def measure(classes: int, dim: int, turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each method, of its products, and of what is beyond them."""
    task, stream, labels = tt.toy(classes=classes, dim=dim, images=12 * classes, views=1)
    first = torch.stack([(labels == label).nonzero()[0, 0] for label in range(classes)])
    others = torch.tensor(sorted(set(range(len(stream))) - set(first.tolist())))
    stream = stream[torch.cat([first, others])]
    found: dict[str, dict[str, float]] = {}
    alone = products(classes, dim)
    for name, (method, settings) in methods().items():
        session = tt.Session(task, method, **settings)
        session.scan(stream[:classes])
        alone[name]()
        steps, bare = [], []
        for views in stream[classes : classes + turns]:
            steps.append(timed(lambda: session.step(views)))  # noqa: B023
            bare.append(timed(alone[name]))
        step, product = statistics.median(steps), statistics.median(bare)
        found[name] = {"step": round(step, 2), "products": round(product, 2), "beyond": round(step - product, 2)}
        print(f"{name:8s}" + "".join(f"{key} {value:6.2f} ms  " for key, value in found[name].items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.classes, options.dim, options.turns)
    if options.json:
        report = {"machine": machine("cpu"), "threads": torch.get_num_threads(), "classes": options.classes}
        options.json.write_text(json.dumps({**report, "dim": options.dim, "ms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
