"""A sweep of many settings in one pass, compared with the same settings one by one: time and results.

    python benchmarks/sweep.py [--settings 64] [--classes 100] [--images 1000] [--stream demo] [--json FILE]

Stored features of one view, from a toy stream (D = 512) or, with `--stream demo`, of the packaged photographs. Single
runs are done in two ways: as commands, `testtime replay` with the setting's values on a stored stream, each of which
starts Python and reads the features (`--no-commands` skips them); and as Sessions in this process. `--singles` of them
are run, spread over the grid, with `--repeats` sweeps in between, since the speed of a shared machine drifts; times are
medians. With one thread, on a GPU, and if steps are so small that a run uses one core, all agree bit for bit; otherwise
a single run splits a product over several cores, and they agree up to rounding.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import testtime as tt
from testtime.encoding.store import save_features
from testtime.methods.dpe import DPE
from testtime.session.packaged import demo_stream
from testtime.types import Task

SHARD = 256  # images per chunk, as from a feature store
T = TypeVar("T")
TESTTIME = sys.executable, "-c", "from testtime.cli.app import main; main()"


def grid(size: int) -> list[DPE]:
    """`size` settings around the released ones: alpha x beta, as in the paper's figure."""
    pairs = list(product((2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)))
    return [DPE(alpha=alpha, beta=beta) for alpha, beta in (pairs * (size // len(pairs) + 1))[:size]]


def save(task: Task, stream: Tensor, folder: Path) -> Path:
    """The stream as a feature store."""
    return save_features(folder / "stream.safetensors", stream, task.text, scale=task.scale)


def replayed(store: Path, method: DPE) -> float:
    """Seconds that `testtime replay` takes for one setting, from start to end."""
    settings = [f"--set={name}={getattr(method, name)}" for name in ("alpha", "beta")]
    start = time.perf_counter()
    subprocess.run([*TESTTIME, "replay", str(store), *settings, "--json"], check=True, capture_output=True)
    return time.perf_counter() - start


def timed(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """The seconds of a call, including work on the GPU, and its result."""
    start = time.perf_counter()
    found = call(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--singles", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--stream", choices=("toy", "demo"), default="toy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commands", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.stream == "demo":
        task, stream, *_ = demo_stream()
        stream = stream[: options.images]
    else:
        task, stream, _ = tt.toy(classes=options.classes, dim=512, images=options.images, views=1)
    task, stream = task.to(options.device), stream.to(options.device)
    methods = grid(options.settings)
    chosen = list(range(0, len(methods), max(1, len(methods) // options.singles)))

    def run(index: int) -> Tensor:
        return tt.Session(task, methods[index]).scan(stream)

    def sweep() -> list[Tensor]:
        return tt.sweep(task, methods, stream.split(SHARD))

    run(0), sweep()  # one-time compilation is not counted; capturing, which every new setting needs, is
    with tempfile.TemporaryDirectory() as folder:
        store = save(task, stream, Path(folder)) if task.text.is_cpu and options.commands else None
        alone: dict[int, Tensor] = {}
        singles, commands, sweeps = [], [], []
        for turn in range(options.repeats):
            for index in chosen[turn :: options.repeats]:
                seconds, alone[index] = timed(run, index)
                singles.append(seconds)
                if store is not None:
                    commands.append(replayed(store, methods[index]))
            seconds, together = timed(sweep)
            sweeps.append(seconds)
    single, swept = statistics.median(singles), statistics.median(sweeps)
    command = statistics.median(commands) if commands else 0.0

    apart = max(float((logits - together[index]).abs().max()) for index, logits in alone.items())
    alike = sum(int((logits.argmax(1) == together[index].argmax(1)).sum()) for index, logits in alone.items())
    alike /= sum(map(len, alone.values()))
    report = {
        "settings": len(methods),
        "stream": options.stream,
        "classes": task.classes,
        "dim": task.dim,
        "images": len(stream),
        "sweep_seconds": swept,
        "one_run_seconds": single,
        "ratio_to_single_runs": swept / (single * len(methods)),
        "one_command_seconds": command,
        "ratio_to_commands": swept / (command * len(methods)) if command else None,
        "ratio_to_one_run": swept / single,
        "device": torch.cuda.get_device_name() if task.text.is_cuda else "cpu",
        "largest_difference": apart,
        "predictions_alike": alike,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    print(
        f"{len(methods)} settings, {options.stream}, C={task.classes}, D={task.dim}, N={len(stream)}, "
        f"{report['device']}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
        f"one pass: {swept:.2f} s (of {len(sweeps)}, {min(sweeps):.2f} to {max(sweeps):.2f})\n"
        f"one by one in this process: {single * len(methods):.1f} s ({len(chosen)} runs of {single:.3f} s): "
        f"ratio {report['ratio_to_single_runs']:.2f}, {report['ratio_to_one_run']:.2f} times one run"
    )
    if store is not None:
        ratio = report["ratio_to_commands"]
        print(f"one by one as commands: {command * len(methods):.1f} s ({command:.2f} s each): ratio {ratio:.2f}")
    print(f"largest difference of a logit {apart:.1e}, equal predictions {100 * alike:.2f}%")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
