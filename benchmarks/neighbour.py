"""Commands beside a busy process, and features so similar that their differences are denormals.

    python benchmarks/neighbour.py [--cores 2] [--repeats 3] [--only replay,...] [--json FILE] [--quick]

Each command runs alone and beside a process that keeps one core busy, in turns, both pinned to the same `--cores`
cores. The medians and their ratio are printed. The neighbour takes half of a core that it shares, so a ratio of 2 is
expected on one core; with busy waiting between threads it is many times that. The goal is at most 3, for the whole
command and, for replays, for the method's own time.

"denormal" replays nearly equal features (one direction and a thousandth of noise), whose probabilities and gradients
fall into the denormal range, where a CPU is slow, and ordinary features of the same sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from commands import photographs  # noqa: E402

from testtime.encoding.store import save_features  # noqa: E402
from testtime.ops import unit  # noqa: E402

MOST = 3.0  # largest acceptable ratio
SIZES = {(100, 1): 2000, (100, 64): 400, (1000, 64): 60}  # (classes, views): images
SMALL = {(10, 4): 20}
PARTS = ("replay", "photographs", "denormal")


def stored(path: Path, classes: int, views: int, images: int, dim: int = 512, alike: bool = False) -> Path:
    """A feature file; with nearly equal features if `alike`."""
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, generator=random)

    labels = torch.randint(classes, (images,), generator=random)
    text = unit(unit(noise(1)) + 1e-3 * noise(classes)) if alike else unit(noise(classes))
    scatter = 1e-3 if alike else 0.06
    return save_features(path, unit(text[labels][:, None] + scatter * noise(images, views)), text, labels=labels)


class Runner:
    """Runs commands on a few cores, alone or beside a busy process."""

    def __init__(self, cores: int) -> None:
        here = sorted(os.sched_getaffinity(0))[:cores]
        self.pinned = ["taskset", "-c", ",".join(map(str, here))]

    def call(self, *words: object) -> dict[str, float]:
        """Seconds of a command, and for a replay the milliseconds per image that it reports."""
        start = time.perf_counter()
        command = [*self.pinned, sys.executable, "-m", "testtime", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"testtime {words[0]} failed ({done.returncode}): {done.stderr[-800:]}")
        if words[0] != "replay":
            return {"seconds": seconds}
        summary = json.loads(done.stdout)
        return {"seconds": seconds, "ms an image": 1000 * summary["seconds"] / summary["n"]}

    @contextmanager
    def neighbour(self) -> Iterator[None]:
        """A context in which another process keeps one core busy."""
        busy = subprocess.Popen([*self.pinned, sys.executable, "-c", "while True: pass"])
        try:
            yield
        finally:
            busy.kill()
            busy.wait()

    def compare(self, words: tuple[object, ...], repeats: int) -> dict[str, float]:
        """Medians alone and beside a neighbour, and their ratios."""
        alone, beside = [], []
        if repeats > 1:
            self.call(*words)  # compiled loops are now cached on disk
        for _ in range(repeats):
            alone.append(self.call(*words))
            with self.neighbour():
                beside.append(self.call(*words))
        row = {}
        for what in alone[0]:
            quiet, busy = (statistics.median(times[what] for times in turn) for turn in (alone, beside))
            row |= {f"{what}, alone": quiet, f"{what}, beside": busy, f"{what}, ratio": busy / quiet}
        return row


def cases(folder: Path, options: argparse.Namespace) -> dict[str, tuple[object, ...]]:
    """The arguments of each command."""
    found: dict[str, tuple[object, ...]] = {}
    if "replay" in options.only:
        for (classes, views), images in (SMALL if options.quick else SIZES).items():
            file = stored(folder / f"{classes}-{views}.safetensors", classes, views, images)
            found[f"replay, C={classes} V={views}"] = ("replay", file, "--method", "dpe", "--json")
    if "photographs" in options.only:
        encoder, images = ("tiny", 4) if options.quick else ("offline", 20)
        tree = photographs(folder / "photographs", 4, images)
        common = (tree, "--encoder", encoder, "--device", "cpu")
        found[f"run, {images} photographs"] = ("run", *common)
        found[f"encode, {images} photographs"] = ("encode", *common, "--force", "--out", folder / "made.safetensors")
    return found


def denormal(runner: Runner, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per image for nearly equal features, and for ordinary ones."""
    sizes = (20, 4, 8) if options.quick else (1000, 64, 20)
    row = {}
    for kind in ("ordinary", "nearly equal"):
        file = stored(folder / f"{kind}.safetensors", *sizes, alike=kind == "nearly equal")
        for label, more in (("", ()), (", --reference", ("--reference",))):
            times = [runner.call("replay", file, "--json", *more)["ms an image"] for _ in range(options.repeats)]
            row[f"{kind}{label}"] = statistics.median(times)
    for label in ("", ", --reference"):
        row[f"ratio{label}"] = row[f"nearly equal{label}"] / row[f"ordinary{label}"]
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2, help="cores that commands and the busy process share")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", type=lambda words: words.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats = 1
    runner = Runner(options.cores)
    threads = os.environ.get("OMP_NUM_THREADS", "as many threads as cores")
    report: dict[str, Any] = {"machine": f"torch {torch.__version__}, {options.cores} cores, {threads}", "cases": {}}
    print(report["machine"])
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, words in cases(Path(folder), options).items():
            row = report["cases"][name] = runner.compare(words, options.repeats)
            for what in (key.removesuffix(", ratio") for key in row if key.endswith(", ratio")):
                quiet, busy, ratio = (row[f"{what}, {part}"] for part in ("alone", "beside", "ratio"))
                worst = max(worst, ratio)
                print(f"  {name:26} {quiet:9.3f} {what:11} alone, {busy:9.3f} beside: {ratio:5.2f} times", flush=True)
        if "denormal" in options.only:
            row = report["denormal"] = denormal(runner, Path(folder), options)
            for name, value in row.items():
                print(f"  denormal: {name:26} {value:9.3f} {'times' if 'ratio' in name else 'ms an image'}", flush=True)
    if worst and not options.quick:
        print(
            f"at most {worst:.2f} times as long beside a neighbour; {MOST:g} {'reached' if worst <= MOST else 'MISSED'}"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
