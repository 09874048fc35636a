"""What the guard costs: a step of DPE with it and without, in turns, and the same over a stored stream.

    python benchmarks/guard.py [--classes 1000] [--device cuda] [--json FILE]

Both sessions see the same stream, so that each has its own state; one step of the one, one of the other. "step" is the
stepper's, "stream" is `Session.scan` in chunks of 64, in rounds that take turns. Medians; the guard's share is what it
adds beyond the frozen answer, which every prediction has anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

import testtime as tt
from testtime.ops import unit
from testtime.types import Task

DIM = 512


def made(classes: int, images: int, views: int, device: str) -> tuple[Task, Tensor]:
    """A task and a stream (N, V, D) of images between a class and noise."""
    generator = torch.Generator().manual_seed(0)
    text = unit(torch.randn(classes, DIM, generator=generator))
    labels = torch.randint(classes, (images,), generator=generator)
    noise = unit(torch.randn(images, views, DIM, generator=generator))
    stream = unit(text[labels][:, None] + 2.5 * noise)
    return Task(text.to(device), tuple(map(str, range(classes)))), stream.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=300, help="steps of each; and ten times as many in the stream")
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    task, stream = made(options.classes, 10 * options.images, options.views, options.device)
    sessions = {"plain": tt.Session(task, "dpe"), "guarded": tt.Session(task, "dpe", guard=True)}
    for session in sessions.values():
        session.warm_up(options.views)

    def timed(work: object) -> float:
        if options.device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()  # type: ignore[operator]
        if options.device != "cpu":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    steps: dict[str, list[float]] = {"plain": [], "guarded": [], "frozen answer": []}
    with torch.inference_mode():
        steppers = {name: session._steps() for name, session in sessions.items()}
        for views in stream[: options.images]:
            for name, stepper in steppers.items():
                steps[name].append(timed(lambda stepper=stepper, views=views: stepper.step(views)))
            steps["frozen answer"].append(timed(lambda views=views: task.zero_shot(views[0])))
    scans: dict[str, list[float]] = {"plain": [], "guarded": []}
    for session in sessions.values():
        session.reset()
        session.scan(stream[:64])
    for chunk in stream[64:].split(64):
        for name, session in sessions.items():
            scans[name].append(timed(lambda session=session, chunk=chunk: session.scan(chunk)) / len(chunk))
    found = {
        "classes": options.classes,
        "views": options.views,
        "device": options.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "step": {name: statistics.median(times) for name, times in steps.items()},
        "mean step": {name: statistics.mean(times) for name, times in steps.items()},
        "stream": {name: statistics.median(times) for name, times in scans.items()},
    }
    for what in ("step", "mean step", "stream"):
        print(what, "  ".join(f"{name} {value:.4f} ms" for name, value in found[what].items()))
    for what in ("step", "mean step", "stream"):
        added = (
            found[what]["guarded"] - found[what]["plain"] - (found["step"]["frozen answer"] if what != "stream" else 0)
        )
        print(f"the guard adds {added:.4f} ms to a {what}, {added / found[what]['plain']:.1%} of it")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
