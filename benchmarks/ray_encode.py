"""What Ray adds to encoding: `testtime encode` and the same with `--on ray --workers 1`, on the same images, in turns.

    python benchmarks/ray_encode.py --out ray_encode.json

Random weights in a published architecture, synthetic photographs. Each command runs in its own process, in a long and
a short run; seconds per image in steady state are the difference of the two divided by the difference of their images,
so that starting (Python, the encoder, Ray and its workers) is excluded. Start-up is what remains of the short run. Both
are given as wall time and as CPU time of the command and its workers: on a machine that others use, CPU time is the one
to compare. Ray's services (GCS, raylet and others) are given on their own: they take CPU time by the second, not by the
image, and so the more of it the longer others keep the machine busy. The overhead is the median over rounds of Ray's
steady time per image over the local one's, less 1. The files of both are compared, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from commands import checkpoint, photographs

TICK = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Seconds of a command: of the clock, of all processors for it and its workers, and for Ray's own services."""

    wall: float
    cpu: float
    services: float


class Session:
    """The CPU time of all processes of a command, also of those that Ray starts in sessions of their own.

    They carry a mark in their environment; the last sample of each that has ended is kept.
    """

    def __init__(self, mark: str) -> None:
        self.mark, self.seconds = f"TESTTIME_BENCHMARK={mark}".encode(), dict[tuple[int, bool], float]()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(0.2):
            self.sample()

    def sample(self) -> None:
        """Note the CPU time that each process has had."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                        fields = (folder / "stat").read_text().rpartition(")")[2].split()
                        line = (folder / "cmdline").read_bytes()
                        ours = line.startswith(b"ray::") or b"\0testtime\0" in line
                        self.seconds[int(folder.name), ours] = (int(fields[11]) + int(fields[12])) / TICK
                except OSError:  # it has ended
                    continue

    def close(self) -> tuple[float, float]:
        """Stop, and return the seconds of the command and its workers, and of other processes."""
        self.ended.set()
        self.thread.join()
        most = dict(sorted(((process, seconds) for (process, _), seconds in self.seconds.items()), key=lambda x: x[1]))
        ours = {process for process, ours in self.seconds if ours}  # a worker has its name only once it has started
        return sum(most[process] for process in ours), sum(most[process] for process in most.keys() - ours)


def encode(tree: Path, encoder: str, images: int, out: Path, options: argparse.Namespace, on: list[str]) -> Cost:
    """One run of the command."""
    command = [
        sys.executable, "-m", "testtime", "encode", tree, "--encoder", encoder, "--views", options.views,
        "--limit", images, "--shard", options.shard, "--out", out, "--device", options.device, *on,
    ]  # fmt: skip
    session, began = Session(str(out)), time.perf_counter()
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    try:
        subprocess.run(
            [str(part) for part in command],
            check=True, capture_output=True, env=environment | {"TESTTIME_BENCHMARK": str(out)},
        )  # fmt: skip
    finally:
        wall, (cpu, services) = time.perf_counter() - began, session.close()
    return Cost(wall, cpu, services)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """All rounds, and what follows from them."""
    tree = photographs(folder / "photographs", 4, options.images)
    encoder = checkpoint(options.model, folder)
    ways = {"local": [], "ray": ["--on", "ray", "--workers", "1"]}
    steady: dict[str, list[Cost]] = {way: [] for way in ways}
    start: dict[str, list[Cost]] = {way: [] for way in ways}
    same = True
    for turn in range(options.rounds):
        files: dict[str, list[bytes]] = {}
        for way, on in ways.items() if turn % 2 == 0 else reversed(ways.items()):
            short, long = (
                encode(tree, encoder, images, folder / f"{way}-{turn}-{images}", options, on)
                for images in (options.short, options.images)
            )
            count = options.images - options.short
            steady[way].append(Cost(*((b - a) / count for a, b in zip(short, long, strict=True))))
            start[way].append(Cost(*(a - options.short * each for a, each in zip(short, steady[way][-1], strict=True))))
            out = folder / f"{way}-{turn}-{options.images}"
            files[way] = [file.read_bytes() for file in sorted(out.iterdir())]
            print(f"round {turn + 1}, {way}: {short}, {long}", file=sys.stderr)
        same = same and files["local"] == files["ray"]
    results: dict[str, object] = {"options": vars(options) | {"out": str(options.out)}, "same_bytes": same}
    for field in ("wall", "cpu"):
        each = {way: [getattr(cost, field) for cost in steady[way]] for way in ways}
        ratios = [ray / local - 1 for ray, local in zip(each["ray"], each["local"], strict=True)]
        results[field] = {
            "steady_ms_per_image": {way: 1000 * statistics.median(each[way]) for way in ways},
            "start_seconds": {way: statistics.median(getattr(cost, field) for cost in start[way]) for way in ways},
            "overhead_percent": 100 * statistics.median(ratios),
            "overhead_percent_of_rounds": [100 * ratio for ratio in ratios],
        }
    results["services_cpu_seconds_per_image"] = statistics.median(cost.services for cost in steady["ray"])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--short", type=int, default=32, help="images of the short runs")
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--shard", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options)
    text = json.dumps(results, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
