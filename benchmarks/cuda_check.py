"""Sessions on a GPU against stored runs of released code, and against the CPU.

    python benchmarks/cuda_check.py FOLDER_OF_TRACES

Every trace is replayed through `Session.scan` on the GPU, captured and compiled, in both precisions; the largest
difference from the stored logits and the share of equal predictions are printed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

from testtime.fast import graph
from testtime.features import Features
from testtime.replay import recorded_settings, replay

NAMES = {"DPE": "dpe", "TDA": "tda", "TPS": "tps", "DMN-ZS": "dmn", "ZERO": "zero", "MTA": "mta"}
CLOSE = {"float64": 1e-5, "float32": 1e-3}


def main() -> None:
    failed = 0
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        store = Features(path)
        if store.metadata["method"] not in NAMES:
            continue
        method = NAMES[store.metadata["method"]]
        with safe_open(path, "pt") as file:
            expected, answers = file.get_tensor("expected_logits"), file.get_tensor("expected_pred")
        for dtype, compiled in (("float64", False), ("float32", False), ("float32", True)):
            graph.PATIENCE = 0 if compiled else 10**9
            start = time.perf_counter()
            try:
                result = replay(
                    store, method, settings=recorded_settings(store, method), dtype=dtype, device=torch.device("cuda")
                )
            except Exception as problem:
                failed += 1
                print(f"{path.stem:22} {dtype} {'compiled' if compiled else 'captured'}: FAILED {problem!r}"[:300])
                continue
            apart = float((result.logits - expected.to(result.logits)).abs().max())
            alike = float((result.predictions == answers).double().mean())
            good = apart <= CLOSE[dtype] and alike == 1
            failed += not good
            print(
                f"{path.stem:22} {dtype} {'compiled' if compiled else 'captured'}: largest difference {apart:.1e}, "
                f"{100 * alike:.2f}% alike, {time.perf_counter() - start:.1f} s {'' if good else 'TOO FAR'}",
                flush=True,
            )
    print("failed:", failed)


if __name__ == "__main__":
    main()
