"""`testtime plan --here` against real runs of `testtime encode`, on this machine.

    python benchmarks/plan_check.py ../shared/data/caltech-101 [--repeats 3] [--only tiny,offline] [--json FILE]

Half of the images measure the stages, the other half is encoded. Measuring and encoding alternate, so that both see the
same neighbours; each round compares the two that follow one another. Predicted and real are wall-clock seconds of the
whole command, start-up included. The target is a median ratio within 20 %. It needs a machine that does little else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from commands import checkpoint  # noqa: E402

from testtime.files import write_atomic  # noqa: E402
from testtime.images.reading import find_images  # noqa: E402

TARGET = 0.2


class Case(NamedTuple):
    model: str
    images: int
    views: int


CASES = (Case("tiny", 600, 8), Case("tiny", 600, 1), Case("offline", 300, 4), Case("ViT-B-16", 30, 4))


def call(*words: object) -> tuple[float, str]:
    """The seconds of a command, and its output."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "testtime", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"testtime {words[0]} failed ({done.returncode}): {done.stderr[-800:]}")
    return time.perf_counter() - began, done.stdout


def check(case: Case, encoder: str, lists: tuple[Path, Path], options: argparse.Namespace, folder: Path) -> Any:
    """Predicted and real seconds, round by round."""
    measured, encoded = lists
    common = ("--views", case.views, "--device", options.device)
    rounds = []
    for turn in range(options.repeats):
        _, printed = call(
            "plan", "--here", "--model", encoder, "--images", case.images, "--shard", case.images, *common,
            "--sample", measured, "--seconds", options.seconds, "--json",
        )  # fmt: skip
        out = folder / f"{case.model}-{case.views}-{turn}.safetensors"
        real, _ = call(
            "encode",
            encoded,
            "--encoder",
            encoder,
            "--classes",
            "cat,dog",
            "--limit",
            case.images,
            "--out",
            out,
            *common,
        )
        predicted = json.loads(printed)["cost"]["seconds"]
        rounds.append({"predicted": predicted, "real": real, "ratio": predicted / real})
    return rounds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="a folder of photographs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a measurement takes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default=",".join(dict.fromkeys(case.model for case in CASES)))
    parser.add_argument("--limit", type=int, help="most images of a case")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    paths = [str(path.absolute()) for path in find_images(str(options.images))]
    step = max(1, len(paths) // 1200)  # of all classes
    found, worst = {}, 0.0
    print(f"{'encoder':<10} {'images':>6} {'views':>5} {'predicted':>10} {'real':>8}  ratio (each round)")
    with tempfile.TemporaryDirectory(prefix="testtime-plan-check-") as name:
        folder = Path(name)
        lists = folder / "measured.txt", folder / "encoded.txt"
        for place, file in enumerate(lists):
            file.write_text("\n".join(paths[place * step :: 2 * step]))
        for case in CASES:
            if case.model not in options.only.split(","):
                continue
            case = case._replace(images=min(case.images, options.limit or case.images))
            encoder = checkpoint(case.model, folder) if case.model.startswith("ViT") else case.model
            rounds = check(case, encoder, lists, options, folder)
            predicted, real, ratio = (
                statistics.median(r[key] for r in rounds) for key in ("predicted", "real", "ratio")
            )
            worst = max(worst, abs(ratio - 1))
            found[f"{case.model}, {case.images} images, {case.views} views"] = rounds
            each = ", ".join(f"{r['ratio']:.2f}" for r in rounds)
            shown = f"{predicted:>8.1f} s {real:>6.1f} s  {ratio:.2f} ({each})"
            print(f"{case.model:<10} {case.images:>6} {case.views:>5} {shown}", flush=True)
    print(f"largest median error: {100 * worst:.0f} %; target: within {100 * TARGET:.0f} %")
    if options.json:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
        write_atomic(options.json, json.dumps({"machine": machine, "results": found}, indent=1) + "\n")
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
