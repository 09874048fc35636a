"""How fast one worker writes features: bytes per second of a shard of 1000 images, 64 views of 768 numbers.

    python benchmarks/write.py FOLDER [--json FILE]

The files are checked, written, flushed to the disk of FOLDER and removed again. Medians of six, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from testtime.encoding.encode import DTYPES
from testtime.encoding.store import save_features
from testtime.files import write_atomic
from testtime.ops import unit

IMAGES, VIEWS, DIM, REPEATS = 1000, 64, 768, 7


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    machine = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    text, found = unit(torch.ones(1000, DIM)), {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, kind in DTYPES.items():
            rows, taken = unit(torch.randn(IMAGES, VIEWS, DIM)).to(kind), []
            for _ in range(REPEATS):
                began = time.perf_counter()
                save_features(Path(folder) / "shard.safetensors", rows, text)
                taken.append(time.perf_counter() - began)
            what = f"{name}, {IMAGES} images of {VIEWS} views of {DIM}, bytes per second"
            found[what] = rows.nbytes / statistics.median(taken[1:])
            found[f"{name}: seconds"] = taken
            print(f"{what}: {found[what] / 1e6:.0f} MB/s")
    if options.json:
        report = {"machine": machine | {"cores": os.cpu_count()}, "results": {"write": found}}
        write_atomic(options.json, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
