"""Milliseconds per DPE step on the CPU, from stored features, all in one run.

    python benchmarks/step.py [--views 64] [--repeats 30] [--json FILE]

bound     the three C x C x D matrix products that the alignment loss needs: similarities, and their gradients with
          respect to text and image
ours      a step of the fastest stepper, if every image changes the prototypes, so that nothing can be reused
kept      the same if no image changes them: the products of the previous step are still valid
lambda 0  ours without the alignment loss, with every image changing the text prototypes
plain     the method's own step, which returns a new state (`--reference`)
autograd  the same with residuals as parameters, a backward pass and torch's AdamW
released  the approach of the released code: a dictionary of lists, a Python loop over classes, autograd

They take turns, and medians are printed, so that the ratios hold on a shared machine even if milliseconds do not.
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
from released_loop import ReleasedLoop
from torch import Tensor

import testtime as tt
from testtime import ops
from testtime.methods.dpe import DPE, State
from testtime.steppers import open_stepper
from testtime.types import Task

TURN = 8  # steps per turn


def full_state(method: DPE, task: Task, stream: Tensor) -> State:
    """A state far into a stream: every class has seen fifty of its images, so every queue is full.

    A queue holds the lowest of fifty entropies close to those of the stream, as after ImageNet's 50,000 images.
    """
    noise = torch.Generator().manual_seed(1)
    state = method.init(task)
    keys = ops.unit(task.text[:, None] + 0.05 * torch.randn(state.queue.keys.shape, generator=noise))
    entropies = torch.stack([method.step(task, state, views)[1].queue.cost.min() for views in stream])
    drawn = entropies[torch.randint(len(entropies), (task.classes, 50), generator=noise)]
    cost = 1.1 * drawn.sort(dim=1).values[:, : method.queue]  # not equal: rounding would decide between equals
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

    by_autograd = DPE()
    object.__setattr__(by_autograd, "_learn", learn)  # everything but the residual learning is shared
    return by_autograd.step(task, state, views)


def medians(turns: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds per step of each; they take turns of `TURN` steps, as a stream is many steps in a row."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeats):
        for name, call in turns.items():
            call()  # warms the CPU caches after the previous contender
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start) / TURN)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(classes: int, dim: int, views: int, repeats: int) -> dict[str, float]:
    task, stream, _ = tt.toy(classes=classes, dim=dim, images=32, views=views)
    method = DPE()
    state = full_state(method, task, stream)
    for image in stream[:4]:
        plain, _ = method.step(task, state, image)
        autograd, _ = autograd_step(method, task, state, image)
        fast, _ = open_stepper(task, [method], [state]).step(image)
        torch.testing.assert_close(plain, autograd, atol=1e-3, rtol=0)  # the three must be the same step
        torch.testing.assert_close(plain, fast[0], atol=1e-3, rtol=0)
    text, visual, square = task.text, state.visual, torch.rand(classes, classes)
    released = ReleasedLoop(Identity(), text, autocast=False)
    released.fill()

    def fast_steps(settings: dict[str, float]) -> Callable[[], object]:
        stepper, chunks = open_stepper(task, [DPE(**settings)], [state]), cycle(stream.split(TURN))
        return lambda: stepper.scan(next(chunks))

    def steps(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(TURN)]

    def inferring(call: Callable[[], object]) -> Callable[[], object]:
        def inside() -> None:
            with torch.inference_mode():
                call()

        return inside

    images = cycle(stream)
    calls = {
        "bound": steps(lambda: (visual @ text.T, square.T @ visual, square @ text)),
        "ours": inferring(fast_steps({"entropy_threshold": 99.0})),
        "kept": inferring(fast_steps({"entropy_threshold": 0.0})),
        "lambda 0": inferring(fast_steps({"entropy_threshold": 99.0, "align_weight": 0.0})),
        "plain": inferring(steps(lambda: method.step(task, state, next(images)))),
        "autograd": steps(lambda: autograd_step(method, task, state, next(images))),
        "released": steps(lambda: released.step(next(images))),
    }
    return medians(calls, repeats)


class Identity:
    """An encoder whose images are already features."""

    def requires_grad_(self, _: bool) -> Identity:
        return self

    def encode_image(self, features: Tensor) -> Tensor:
        return features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32")
    rows = []
    for classes, dim in ((1000, 512), (100, 512)):
        repeats = options.repeats if classes > 500 else 10 * options.repeats
        row = measure(classes, dim, options.views, repeats)
        rows.append({"classes": classes, "dim": dim, "views": options.views, **row})
        print(f"\nC={classes} D={dim} V={options.views}\n{'':10} {'ms':>8} {'/ bound':>8} {'/ ours':>8}")
        for name, time_taken in row.items():
            print(f"{name:10} {time_taken:>8.2f} {time_taken / row['bound']:>8.2f} {time_taken / row['ours']:>8.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
