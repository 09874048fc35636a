"""DPE's kernels on a GPU: whether they match the method's own step, how long a step takes, and with which tiles.

    python benchmarks/kernels_check.py [--try "pull.SPLIT=1 pull.ROWS=64"]... [--tune] [--settings 8]

Compares single steps from the same state, a whole stream, and a stream in two parts, from states with full queues, with
classes that are far apart or nearly equal; and `--settings` settings side by side with each alone. Times replayed
graphs of 32 steps in which every image changes the text prototypes ("moving": nothing can be reused) or none does
("kept"), then each kernel. `--try` repeats this with other tiles than those of `testtime.steppers.gpu.dpe.TILES`, and
may be given several times; `--tune` tries those of the table below. Without a GPU only the steps are compared, in
Triton's interpreter:

    TRITON_INTERPRET=1 python benchmarks/kernels_check.py --classes 20 --dim 32 --views 12 --images 3
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE, State
from testtime.steppers.gpu import dpe
from testtime.steppers.gpu.graph import STEPS
from testtime.types import Task

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPLAYS = 50  # of a graph of 32 steps
CLOSE = 1e-3  # logits of size 100, one step from the same state

ALTERNATIVES = (
    "view_logits.VIEWS=64",
    "view_logits.CLASSES=32",
    "view_logits.DEPTH=64 view_logits.num_stages=4",
    "choose.PART=64",
    "choose.PART=256",
    "rows.CELLS=4096 rows.num_warps=8",
    "rows.CELLS=1024 rows.num_warps=2",
    "similarity.COLUMNS=128 similarity.num_warps=8",
    "similarity.DEPTH=32 similarity.num_stages=4",
    "logit_gradient.ROWS=1",
    "logit_gradient.ROWS=4",
    "pull.SPLIT=1",
    "pull.SPLIT=1 pull.ROWS=64 pull.num_warps=4",
    "pull.DEPTH=64 pull.num_stages=2",
    "pull.SPLIT=4",
    "pull.num_warps=4",
)


class Start(NamedTuple):
    """A task, a state far into a stream with full queues, and the next images."""

    task: Task
    state: State
    stream: Tensor  # (N, V, D)


@contextmanager
def tiles(changes: str) -> Iterator[None]:
    """A context with tiles changed as by "pull.SPLIT=1 choose.PART=64", with few classes too; splits are as given."""
    before, enough = copy.deepcopy((dpe.TILES, dpe.SMALL)), dpe.ENOUGH_PROGRAMS
    for change in changes.split():
        name, value = change.split("=")
        kernel, option = name.split(".")
        dpe.TILES[kernel][option] = dpe.SMALL.setdefault(kernel, {})[option] = int(value)
        dpe.ENOUGH_PROGRAMS = 10**9
    try:
        yield
    finally:
        dpe.TILES.update(before[0])
        dpe.SMALL.clear()
        dpe.SMALL.update(before[1])
        dpe.ENOUGH_PROGRAMS = enough


def start(classes: int, dim: int, views: int, images: int, alike: bool = False) -> Start:
    """An initial state; with classes so `alike` that the alignment has an effect."""
    noise = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> Tensor:
        return ops.unit(torch.randn(*shape, dim, generator=noise))

    own, kind = rows(classes), rows(-(-classes // 10)).repeat(10, 1)[:classes]
    shared, depth = (1.5, 0.6) if alike else (0.0, 0.0)
    text = ops.unit(shared * rows(1) + depth * kind + own)
    likely = shared * rows(1) + 0.35 * own + 0.5 * depth * kind if alike else text  # shared by a class's images
    scatter = 0.8 if alike else 1.0
    keys = ops.unit(likely[:, None] + scatter * rows(classes, DPE().queue))
    stream = ops.unit(likely[torch.arange(images) % classes, None] + scatter * rows(images, views))
    cost = torch.rand(classes, DPE().queue, generator=noise).mul_(0.5).sort(dim=1).values
    task = Task(text.to(DEVICE), tuple(map(str, range(classes))))
    before = DPE().init(task)
    queue = before.queue._replace(keys=keys.to(DEVICE), cost=cost.to(DEVICE))
    return Start(task, State(task.text.clone(), before.updates + 50, queue, queue.keys.mean(1)), stream.to(DEVICE))


def opened(task: Task, methods: list[DPE], state: State, views: int) -> dpe.Stepper:
    """A stepper whose kernels are compiled, and on a GPU captured."""
    stepper = dpe.Stepper(task, methods, [state] * len(methods))
    stepper.warm_up(views)
    if not isinstance(stepper._body, dpe.Kernels):
        raise RuntimeError("the kernels were not launched")
    return stepper


def exact(state: State) -> State:
    text, updates, queue, visual = state
    return State(
        text.double(), updates, queue._replace(keys=queue.keys.double(), cost=queue.cost.double()), visual.double()
    )


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).nan_to_num(posinf=0).abs().max())


def compare(begin: Start, label: str) -> int:
    """Print the difference of the kernels' logits from the method's own; returns the number of failed checks."""
    task, state, stream = begin
    failed = 0
    for method in (DPE(), DPE(entropy_threshold=99.0)):
        stepper = opened(task, [method], state, stream.shape[1])
        from_plain, from_exact, plain_from_exact, same, now = 0.0, 0.0, 0.0, 0, state
        for image in stream:
            stepper.restore([now])
            peeked = stepper.peek(image)[0]
            logits, reached = stepper.step(image)[0][0], stepper.snapshot()[0]
            plain, after = method.step(task, now, image)
            truth, _ = method.step(task.to(dtype=torch.float64), exact(now), image.double())
            from_plain = max(from_plain, far(logits, plain))
            from_exact, plain_from_exact = max(from_exact, far(logits, truth)), max(plain_from_exact, far(plain, truth))
            alike = all(far(*pair) < 1e-4 for pair in zip(leaves(reached), leaves(after), strict=True))
            same += int(alike and torch.equal(peeked, logits) and logits.argmax() == plain.argmax())
            now = after
        stepper.restore([state])
        whole, end = stepper.scan(stream)[0], stepper.snapshot()[0]
        expected, _ = method.scan(task, state, stream)
        stepper.restore([state])
        first = stepper.scan(stream[: len(stream) // 2])[0]
        stepper.restore(stepper.snapshot())
        again = torch.cat([first, stepper.scan(stream[len(stream) // 2 :])[0]])
        bits = torch.equal(again, whole) and all(map(torch.equal, leaves(stepper.snapshot()[0]), leaves(end)))
        good = from_plain < CLOSE and same == len(stream) and bits
        failed += not good
        print(
            f"C={task.classes} D={task.dim} V={stream.shape[1]}, {label}, threshold {method.entropy_threshold}: logits "
            f"{from_plain:.1e} from the method's, {from_exact:.1e} from float64 (it: {plain_from_exact:.1e}); "
            f"{same} of {len(stream)} steps alike; as a stream {far(whole, expected):.1e} apart; in two parts "
            f"{'the same bits' if bits else 'DIFFERENT BITS'}{'' if good else '  FAILED'}",
            flush=True,
        )
    return failed


def compare_settings(begin: Start, settings: int) -> int:
    """Print whether settings side by side give the same bits as each alone; returns how many do not."""
    task, state, stream = begin
    methods = [
        DPE(alpha=2.0 + n % 8, entropy_threshold=(0.0, 0.1, 99.0)[n % 3], align_weight=0.1 * (n % 8))
        for n in range(settings)
    ]
    together = opened(task, methods, state, stream.shape[1])
    logits, ends = together.scan(stream), together.snapshot()
    same = 0
    for run, method in enumerate(methods):
        alone = opened(task, [method], state, stream.shape[1])
        bits = torch.equal(alone.scan(stream)[0], logits[run])
        same += int(bits and all(map(torch.equal, leaves(alone.snapshot()[0]), leaves(ends[run]))))
    print(f"{same} of {settings} settings side by side give the same bits as alone", flush=True)
    return settings - same


def replay_time(stepper: dpe.Stepper) -> float:
    """Microseconds per step of a replayed graph."""
    launch = stepper._launches[STEPS, False]
    for _ in range(5):
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        launch()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / (REPLAYS * STEPS)


def kernel_times(stepper: dpe.Stepper) -> dict[str, float]:
    """Microseconds per step in each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            stepper._launches[STEPS, False]()
        torch.cuda.synchronize()
    rows = {row.key: row.self_device_time_total / (3 * STEPS) for row in profile.key_averages()}
    return {name: time for name, time in sorted(rows.items(), key=lambda row: -row[1]) if time > 0.01}


def timings(begin: Start, changes: str = "", detail: bool = True) -> None:
    """Print the time of a step, and of each kernel."""
    task, state, stream = begin

    def ready(threshold: float) -> dpe.Stepper:
        stepper = opened(task, [DPE(entropy_threshold=threshold)], state, stream.shape[1])
        stepper.scan(stream)  # from here on the graphs' inputs are images
        return stepper

    with tiles(changes):
        try:
            stepper = ready(99.0)
        except RuntimeError as error:
            print(f"{changes}: {str(error)[:120]}", flush=True)
            return
        moving, kernels = replay_time(stepper), kernel_times(stepper)
        mine = {change.split(".")[0] for change in changes.split()}
        if not detail:
            shown = {"normalise", "push", "answer", "evolve"} if "rows" in mine else mine
            parts = ", ".join(f"{name} {time:.1f}" for name, time in kernels.items() if name in shown)
            print(f"{changes:60} {moving:6.1f} us per step; {parts}", flush=True)
            return
        kept = replay_time(ready(0.0))
        print(f"\nkernels {changes or 'as they are'}: {moving:.1f} us per step moving, {kept:.1f} us kept")
        print(f"  in kernels {sum(kernels.values()):.1f} us:")
        for name, time in kernels.items():
            print(f"    {time:6.2f} {name[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--settings", type=int, default=8)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="CHANGES")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    size = options.classes, options.dim, options.views
    few = max(2, options.classes // 10), options.dim, 1
    with torch.inference_mode():
        failed = compare(start(*size, options.images), "classes apart")
        failed += compare(start(*size, options.images, alike=True), "classes alike")
        failed += compare(start(*few, options.images), "classes apart")
        failed += compare_settings(start(*few, options.images), options.settings)
        if DEVICE.type == "cuda":
            begin = start(*size, 2 * STEPS)
            for changes in ("", *options.tries):
                timings(begin, changes)
            for changes in ALTERNATIVES if options.tune else ():
                timings(begin, changes, detail=False)
    print("failed:", failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
