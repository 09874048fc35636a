"""Encode the features that ship with `testtime demo`, from a copy of Caltech101.

    python scripts/make_demo.py ../shared/data/caltech-101

The folder holds `101_ObjectCategories/` and `split_zhou_Caltech101.json`. Writes
`src/testtime/data/caltech101.safetensors`: the test split, one view, the offline encoder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import testtime as tt
from testtime.datasets import open_dataset
from testtime.encoding.encode import encode

OUT = Path(__file__).parents[1] / "src" / "testtime" / "data" / "caltech101.safetensors"


def main(root: Path) -> None:
    test = open_dataset(root)
    encoder = tt.load_encoder("offline")
    task = tt.build_task(encoder, test.classnames, templates="single")
    encode(
        encoder,
        task,
        test.paths,
        OUT,
        labels=test.labels,
        dataset="Caltech101, test split",
        progress=lambda done: print(f"\r{done} of {len(test)}", end="", file=sys.stderr),
    )
    print(f"\n{OUT}: {OUT.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
