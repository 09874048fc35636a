"""Milliseconds per DPE step on this machine: ours, autograd with a real AdamW, and the bound.

    python benchmarks/step.py [--views 64] [--repeats 30] [--json FILE]

The bound is the three C x C x D matrix products that the alignment loss needs however it is written: similarities,
and their gradients by text and by image. All three are timed in one run, turn by turn, and medians are printed,
so that the ratios hold on a shared machine even where the milliseconds do not.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

import testtime as tt
from testtime import ops
from testtime.methods.dpe import DPE, State
from testtime.types import Task

TURN = 5  # calls in a row


def full_state(method: DPE, task: Task, stream: Tensor) -> State:
    """A state far into a stream: every class has seen fifty of its images, so every queue is full.

    A queue holds the lowest of fifty entropies drawn from those of the stream, as after ImageNet's 50,000 images.
    """
    noise = torch.Generator().manual_seed(1)
    state = method.init(task)
    keys = ops.unit(task.text[:, None] + 0.05 * torch.randn(state.queue.keys.shape, generator=noise))
    entropies = torch.stack([method.step(task, state, views)[1].queue.cost.min() for views in stream])
    drawn = entropies[torch.randint(len(entropies), (task.classes, 50), generator=noise)]
    cost = drawn.sort(dim=1).values[:, : method.queue].contiguous()
    return state._replace(queue=state.queue._replace(keys=keys, cost=cost), visual=keys.mean(1))


def autograd_step(method: DPE, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
    """The same step with residuals as parameters, a backward pass and torch's AdamW."""

    def learn(
        rows: Tensor,
        text: Tensor,
        at_text: ops.Prototypes,
        visual: Tensor,
        seen: Tensor,
        aligned: Tensor,
        objective: ops.Objective,
    ) -> tuple[Tensor, Tensor]:
        d_text = torch.zeros_like(text, requires_grad=True)
        d_visual = torch.zeros_like(visual, requires_grad=True)
        groups = [{"params": [d_text], "lr": method.lr_text}, {"params": [d_visual], "lr": method.lr_image}]
        optimiser = torch.optim.AdamW(groups, eps=method.adamw_eps, weight_decay=method.adamw_weight_decay)
        ops.loss(rows, text + d_text, visual + d_visual, seen, aligned, objective).backward()
        optimiser.step()
        return ops.unit(text + d_text.detach()), ops.unit(visual + d_visual.detach())

    twin = DPE()
    object.__setattr__(twin, "_learn", learn)  # everything but the residual learning is shared
    return twin.step(task, state, views)


def medians(turns: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each; they take turns of several calls, as a stream is many steps in a row."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeats):
        for name, call in turns.items():
            call()  # whatever ran before has emptied the caches
            for _ in range(TURN):
                start = time.perf_counter()
                call()
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(classes: int, dim: int, views: int, repeats: int) -> dict[str, float]:
    task, stream, _ = tt.toy(classes=classes, dim=dim, images=32, views=views)
    method = DPE()
    state = full_state(method, task, stream)
    for image in stream[:4]:
        ours, _ = method.step(task, state, image)
        plain, _ = autograd_step(method, task, state, image)
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=0)  # the two must be the same step
    text, visual, square = task.text, state.visual, torch.rand(classes, classes)
    images = cycle(stream)

    def ours_as_sessions_call_it() -> None:
        with torch.inference_mode():
            method.step(task, state, next(images))

    calls = {
        "ours": ours_as_sessions_call_it,
        "autograd": lambda: autograd_step(method, task, state, next(images)),
        "bound": lambda: (visual @ text.T, square.T @ visual, square @ text),
    }
    return medians(calls, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32")
    print(f"{'C':>5} {'D':>4} {'V':>3} {'ours ms':>9} {'autograd ms':>12} {'bound ms':>9} {'ours/bound':>11} "
          f"{'autograd/ours':>14}")  # fmt: skip
    rows = []
    for classes, dim in ((1000, 512), (100, 512)):
        repeats = options.repeats if classes > 500 else 10 * options.repeats
        row = measure(classes, dim, options.views, repeats)
        rows.append({"classes": classes, "dim": dim, "views": options.views, **row})
        print(
            f"{classes:>5} {dim:>4} {options.views:>3} {row['ours']:>9.2f} {row['autograd']:>12.2f} "
            f"{row['bound']:>9.2f} {row['ours'] / row['bound']:>11.2f} {row['autograd'] / row['ours']:>14.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
