"""DPE's kernels on a GPU: are they the method's own step, how long does a step take, and with which tiles.

    python benchmarks/fused_check.py [--try "pull.SPLIT=1 pull.ROWS=64"]... [--tune] [--present]
    python benchmarks/fused_check.py --settings 64 --classes 100 --views 1

Compared are single steps from the same state, a whole stream, and a stream in two goes, from states with full queues.
Timed are replayed graphs of 32 steps where every image moves the text prototypes ("moving": nothing can be kept) and
where none does ("kept"), then each kernel by itself. `--try` does it with other tiles than those of
`testtime.fast.fused.TILES`, as often as it is given; `--tune` tries those of the table below; `--present` times the
compiled step too, which takes a minute to compile. `--settings S` compares S settings side by side with each alone, and
times both, instead. Without a GPU the steps are compared alone, in Triton's interpreter:

    TRITON_INTERPRET=1 python benchmarks/fused_check.py --classes 20 --dim 32 --views 12 --images 3
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import testtime as tt
from testtime import ops
from testtime.fast import fused
from testtime.fast.abreast import Abreast
from testtime.fast.abreast import State as States
from testtime.fast.capture import capture
from testtime.fast.graph import STEPS, Runner
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE, State
from testtime.types import Task

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPLAYS = 50  # of a graph of 32 steps

ALTERNATIVES = (
    "view_logits.VIEWS=64",
    "view_logits.VIEWS=16 view_logits.CLASSES=32",
    "view_logits.CLASSES=32",
    "view_logits.DEPTH=64 view_logits.num_stages=4",
    "view_logits.DEPTH=128 view_logits.num_stages=4",
    "choose.PART=64",
    "choose.PART=256",
    "choose.num_warps=4",
    "rows.num_warps=4",
    "rows.CELLS=2048 rows.num_warps=4",
    "rows.CELLS=8192 rows.num_warps=8",
    "rows.CELLS=4096 rows.num_warps=16",
    "similarity.SPLIT=1",
    "similarity.SPLIT=1 similarity.COLUMNS=64",
    "similarity.SPLIT=1 similarity.COLUMNS=64 similarity.num_warps=4",
    "similarity.DEPTH=32 similarity.num_stages=4",
    "similarity.SPLIT=1 similarity.ROWS=64 similarity.COLUMNS=64 similarity.num_warps=4",
    "similarity.DEPTH=32 similarity.SPLIT=4",
    "similarity.num_warps=4",
    "misplace.ROWS=1",
    "misplace.ROWS=4",
    "misplace.ROWS=4 misplace.num_warps=8",
    "pull.SPLIT=1",
    "pull.SPLIT=1 pull.COLUMNS=64",
    "pull.SPLIT=1 pull.COLUMNS=64 pull.num_warps=4",
    "pull.SPLIT=1 pull.ROWS=64 pull.num_warps=4",
    "pull.SPLIT=1 pull.ROWS=64 pull.COLUMNS=64 pull.num_warps=4",
    "pull.DEPTH=32 pull.num_stages=4",
    "pull.DEPTH=32 pull.num_stages=6",
    "pull.DEPTH=32 pull.SPLIT=4",
    "pull.num_warps=4",
)


@contextmanager
def tiles(changes: str) -> Iterator[None]:
    """While inside, tiles changed as by "pull.SPLIT=1 choose.PART=64", with few classes too; splits are as given."""
    before, small, room = copy.deepcopy(fused.TILES), copy.deepcopy(fused.SMALL), fused.ROOM
    for change in changes.split():
        place, value = change.split("=")
        kernel, option = place.split(".")
        fused.TILES[kernel][option] = int(value)
        fused.SMALL.setdefault(kernel, {})[option] = int(value)
        fused.ROOM = 10**9
    try:
        yield
    finally:
        fused.TILES.update(before)
        fused.SMALL.clear()
        fused.SMALL.update(small)
        fused.ROOM = room


def start(classes: int, dim: int, views: int, images: int) -> tuple[Task, State, Tensor]:
    """A task, a state far into a stream, every queue being full, and the images that come next."""
    task, stream, _ = tt.toy(classes=classes, dim=dim, images=images, views=views)
    noise = torch.Generator().manual_seed(1)
    state = DPE().init(task)
    keys = ops.unit(task.text[:, None] + 0.05 * torch.randn(state.queue.keys.shape, generator=noise))
    cost = torch.rand(state.queue.cost.shape, generator=noise).mul_(0.5).sort(dim=1).values
    text = task.text + 0.01 * torch.randn(task.text.shape, generator=noise)
    state = State(text, torch.tensor(50), state.queue._replace(keys=keys, cost=cost), keys.mean(1))
    return task.to(DEVICE), moved(state, DEVICE), stream.to(DEVICE)


def moved(state: State, to: torch.device | torch.dtype) -> State:
    """The state on a device, or in a precision."""
    text, updates, (keys, cost), visual = state
    keep = updates if isinstance(to, torch.dtype) else updates.to(to)
    return State(text.to(to), keep, state.queue._replace(keys=keys.to(to), cost=cost.to(to)), visual.to(to))


def compare(classes: int, dim: int, views: int, images: int) -> None:
    """Print how far the kernels' logits are from the method's own."""
    task, state, stream = start(classes, dim, views, images)
    exact_task = task.to(dtype=torch.float64)
    for method in (DPE(), DPE(entropy_threshold=99.0)):
        runner = Runner(method, task, views, compile=False, kernels=True)
        assert runner.has_kernels, "the kernels were not launched"
        from_plain = from_exact = plain_from_exact = state_apart = 0.0
        alike = same_queues = 0
        now = state
        for image in stream:
            runner.load(task, now)
            logits, reached = runner.run(image[None])[0], runner.state()
            plain, after = method.step(task, now, image)
            exact, _ = method.step(exact_task, moved(now, torch.float64), image.double())
            from_plain = max(from_plain, float((logits - plain).abs().max()))
            from_exact = max(from_exact, float((logits - exact).abs().max()))
            plain_from_exact = max(plain_from_exact, float((plain - exact).abs().max()))
            alike += int(logits.argmax() == plain.argmax())
            same = all(
                float((ours.double() - theirs.double()).nan_to_num(posinf=0).abs().max()) < 1e-4
                for ours, theirs in zip(leaves(reached.queue), leaves(after.queue), strict=True)
            )
            same_queues += int(same and reached.updates == after.updates)
            state_apart = max(state_apart, float((reached.text - after.text).abs().max()))
            now = after
        print(
            f"C={classes} D={dim} V={views} threshold {method.entropy_threshold}, {len(stream)} single steps: logits "
            f"{from_plain:.1e} from the method's, {from_exact:.1e} from float64 (it: {plain_from_exact:.1e}); "
            f"{alike} predictions and {same_queues} queues alike; text prototypes {state_apart:.1e} apart; "
            f"{int(now.updates - state.updates)} updates",
            flush=True,
        )
        runner.load(task, state)
        whole, end = runner.run(stream), runner.state()
        expected, _ = method.scan(task, state, stream)
        runner.load(task, state)
        half = len(stream) // 2
        first = runner.run(stream[:half])
        runner.load(task, runner.state())
        again = torch.cat([first, runner.run(stream[half:])])
        bits = torch.equal(again, whole) and all(map(torch.equal, leaves(runner.state()), leaves(end)))
        print(
            f"  as a stream: {float((whole - expected).abs().max()):.1e} apart, "
            f"{int((whole.argmax(1) == expected.argmax(1)).sum())} predictions alike; in two goes "
            f"{'the same bits' if bits else f'OTHER BITS, {float((again - whole).abs().max()):.1e} apart'}",
            flush=True,
        )


def grid(size: int, **shared: float) -> list[DPE]:
    """So many settings: of alpha, beta, the threshold and the losses' weights; every eighth has no alignment."""
    return [
        DPE(
            **{
                "alpha": 2.0 + 2 * (number % 8),
                "beta": 1.0 + number // 8 % 8,
                "entropy_threshold": (0.0, 0.01, 0.1, 99.0)[number % 4],
                "align_weight": 0.1 * ((number + 4) % 8),
                **shared,
            }
        )
        for number in range(size)
    ]


def stacked(state: State, runs: int) -> States:
    """The state as that of so many runs."""
    return States(*(leaf.expand(runs, *leaf.shape) for leaf in leaves(state)))


def compare_settings(begin: tuple[Task, State, Tensor], settings: int) -> None:
    """Print how far settings side by side are from each alone, over a stream from a state with full queues."""
    task, state, stream = begin
    methods = grid(settings)
    together = ready(Abreast(task, methods), begin, compile=False, kernels=True)
    assert together.has_kernels, "the kernels were not launched"
    together.load(task, stacked(state, settings))
    logits, end = together.run(stream), together.state()
    apart, same_logits, same_states = 0.0, 0, 0
    for run, method in enumerate(methods):
        alone = Runner(method, task, stream.shape[1], compile=False, kernels=True)
        alone.load(task, state)
        expected = alone.run(stream)
        apart = max(apart, float((logits[:, run] - expected).abs().max()))
        same_logits += int(torch.equal(logits[:, run], expected))
        same_states += int(all(map(torch.equal, [leaf[run] for leaf in end], leaves(alone.state()))))
    moves = (end.updates - state.updates).tolist()
    print(
        f"C={task.classes} D={task.dim} V={stream.shape[1]}, {settings} settings side by side, {len(stream)} images: "
        f"logits {apart:.1e} from each alone; {same_logits} runs' logits and {same_states} runs' states the same bits; "
        f"{min(moves)} to {max(moves)} updates",
        flush=True,
    )


def time_settings(begin: tuple[Task, State, Tensor], settings: int) -> None:
    """Print the time of a step of settings side by side, beside that of one alone, and of each kernel."""
    task = begin[0]
    for name, threshold in (("moving", 99.0), ("kept", 0.0)):
        methods = grid(settings, entropy_threshold=threshold, align_weight=0.5)
        one = ready(methods[0], begin, compile=False, kernels=True)
        many = ready(Abreast(task, methods), begin, compile=False, kernels=True)
        times = [replay_time(runner) for runner in (one, many, one, many)]
        alone, together = min(times[::2]), min(times[1::2])
        print(f"{name}: {alone:.1f} us a step alone, {together:.1f} us for {settings}: {together / alone:.2f} times")
        rows = [kernel_times(runner) for runner in (one, many)]
        print(f"  in kernels {sum(rows[0].values()):.1f} us alone, {sum(rows[1].values()):.1f} us for {settings}:")
        for kernel, time in rows[1].items():
            print(f"    {rows[0].get(kernel, 0.0):6.2f} {time:7.2f} {kernel[:90]}", flush=True)


def replay_time(runner: Runner) -> float:
    """Microseconds per step of a replayed graph."""
    launch = runner._captured[STEPS]
    for _ in range(5):
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        launch()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / (REPLAYS * STEPS)


def kernel_times(runner: Runner) -> dict[str, float]:
    """Microseconds per step in each kernel."""
    launch = runner._captured[STEPS]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            launch()
        torch.cuda.synchronize()
    rows = {row.key: row.self_device_time_total / (3 * STEPS) for row in profile.key_averages()}
    return {name: time for name, time in sorted(rows.items(), key=lambda row: -row[1]) if time > 0.01}


def ready(method: DPE | Abreast, start: tuple[Task, State, Tensor], **options: bool) -> Runner:
    """A runner in the given state whose graph is captured and that has seen images."""
    task, state, stream = start
    runner = Runner(method, task, stream.shape[1], **options)  # type: ignore[arg-type]
    runner.load(task, stacked(state, len(method.methods)) if isinstance(method, Abreast) else state)
    runner.run(stream[: 2 * STEPS])
    return runner


def timings(begin: tuple[Task, State, Tensor], changes: str = "", detail: bool = True) -> None:
    """Print the time of a step, and of each kernel."""
    with tiles(changes):
        try:
            runner = ready(DPE(entropy_threshold=99.0), begin, compile=False, kernels=True)
        except Exception as error:
            print(f"{changes}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            return
        if not runner.has_kernels:
            print(f"{changes}: not launched", flush=True)
            return
        moving, kernels = replay_time(runner), kernel_times(runner)
        if not detail:
            mine = {change.split(".")[0] for change in changes.split()}
            shown = {"aim", "push", "answer", "evolve"} if "rows" in mine else mine
            parts = ", ".join(f"{name} {time:.1f}" for name, time in kernels.items() if name in shown)
            print(f"{changes:80} {moving:6.1f} us a step; {parts}", flush=True)
            return
        kept = replay_time(ready(DPE(entropy_threshold=0.0), begin, compile=False, kernels=True))
        print(f"\nkernels {changes or 'as they are'}: {moving:.1f} us a step moving, {kept:.1f} us kept")
        print(f"  in kernels {sum(kernels.values()):.1f} us:")
        for name, time in kernels.items():
            print(f"    {time:6.2f} {name[:90]}", flush=True)


def ready_made(classes: int, dim: int) -> None:
    """Print what cuBLAS takes for the products, from parts that stand side by side already."""

    def half(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=DEVICE, dtype=torch.float16)

    for name, (a, b) in {
        "similarity": (half(classes, 3 * dim), half(classes, 3 * dim).T),
        "one of the two pulls": (half(classes, 3 * classes), half(3 * classes, dim)),
        "the other": (half(3 * classes, classes).T, half(3 * classes, dim)),
    }.items():
        graph = capture(lambda a=a, b=b: [torch.mm(a, b, out_dtype=torch.float32) for _ in range(STEPS)])
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        print(f"cuBLAS, {name}: {1000 * begin.elapsed_time(end) / (REPLAYS * STEPS):.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--settings", type=int, metavar="S")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="CHANGES")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--present", action="store_true")
    options = parser.parse_args()
    if options.settings:
        compare_settings(start(options.classes, options.dim, options.views, options.images), options.settings)
        if DEVICE.type == "cuda":
            begin = start(options.classes, options.dim, options.views, 2 * STEPS)
            for changes in ("", *options.tries):
                with tiles(changes):
                    print(f"\nkernels {changes or 'as they are'}")
                    time_settings(begin, options.settings)
        return
    compare(options.classes, options.dim, options.views, options.images)
    compare(max(2, options.classes // 10), options.dim, 1, options.images)
    if DEVICE.type != "cuda":
        return
    begin = start(options.classes, options.dim, options.views, 2 * STEPS)
    for changes in ("", *options.tries):
        timings(begin, changes)
    if options.present:
        runner = ready(DPE(entropy_threshold=99.0), begin, kernels=False)
        print(f"\ncompiled step: {replay_time(runner):.1f} us, {sum(kernel_times(runner).values()):.1f} us in kernels")
    if options.tune:
        ready_made(options.classes, options.dim)
        for changes in ALTERNATIVES:
            timings(begin, changes, detail=False)


if __name__ == "__main__":
    main()
