"""Zero-shot and DPE over a folder of real photographs, through the `testtime run` command itself.

    python benchmarks/pacs.py [../shared/data/pacs/photo] [--seeds 0 1 2]

The folder holds one folder of images per class. Every run uses the method's defaults, one view and the offline encoder;
each seed shuffles the stream, and the folder names are used only for scoring.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def run(folder: Path, classes: list[str], seed: int) -> dict[str, float]:
    """The summary that `testtime run` prints for one order of the stream."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(sys.executable, "-m", "testtime.cli.app", "run", str(folder)),
            *("--classes", ",".join(classes), "--encoder", "offline", "--method", "dpe"),
            *("--shuffle", "--seed", str(seed), "--out", f"{scratch}/rows.csv", "--json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stderr.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[2] / "shared" / "data" / "pacs" / "photo"
    parser.add_argument("folder", type=Path, nargs="?", default=default)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if not options.folder.is_dir():
        sys.exit(f"No folder {options.folder}; give one with a folder of images per class.")
    classes = sorted(path.name for path in options.folder.iterdir() if path.is_dir())
    print(f"{options.folder}: {', '.join(classes)}")
    print(f"{'seed':>5} {'images':>7} {'zero-shot':>10} {'DPE':>7} {'gain':>6}")
    for seed in options.seeds:
        summary = run(options.folder, classes, seed)
        frozen, adapted = 100 * summary["zero_shot_accuracy"], 100 * summary["accuracy"]
        print(f"{seed:>5} {summary['images']:>7} {frozen:>9.2f}% {adapted:>6.2f}% {adapted - frozen:>+6.2f}")


if __name__ == "__main__":
    main()
