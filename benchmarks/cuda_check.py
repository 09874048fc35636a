"""Sessions on a GPU: compared with stored runs of released code, two at a time, and `predict` before `step`.

    python benchmarks/cuda_check.py [FOLDER_OF_TRACES]... [--device cpu]

Replays every trace through `Session.scan` in both precisions, with the fastest stepper and, as `reference`, with the
method's own steps, and prints the largest difference from the stored logits and the share of equal predictions. Then
two sessions run in two threads, and each is compared with the same session run alone. Last, `Session.predict` is
compared with the step that follows, and both are timed. `--device cpu` is a smoke test.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from commands import photograph  # noqa: E402

import testtime as tt  # noqa: E402
from testtime.encoding.store import Features  # noqa: E402
from testtime.session.replay import recorded_settings, replay  # noqa: E402

NAMES = {"DMN-ZS": "dmn", "C-TPT": "ctpt"}  # otherwise the method's name in lower case
CLOSE = {"float64": 1e-5, "float32": 1e-3}
GOLDEN = Path(__file__).parents[2] / "shared" / "golden"


def traces(folder: Path, device: str) -> int:
    """Replay every trace of a folder; returns the number of failures."""
    failed = 0
    for path in sorted(folder.glob("*.safetensors")):
        store = Features(path)
        method = NAMES.get(store.metadata["method"], store.metadata["method"].lower())
        with safe_open(path, "pt") as file:
            expected, answers = file.get_tensor("expected_logits"), file.get_tensor("expected_pred")
        for dtype, reference in ((dtype, reference) for dtype in CLOSE for reference in (False, True)):
            label, start = f"{path.stem:18} {dtype} {'reference' if reference else 'fastest':9}", time.perf_counter()
            try:
                settings = recorded_settings(store, method)
                found = replay(store, method, settings=settings, dtype=dtype, device=device, reference=reference)
            except Exception as problem:
                failed += 1
                print(f"{label}: FAILED {problem!r}"[:300], flush=True)
                continue
            apart = float((found.logits - expected.to(found.logits)).abs().max())
            alike = float((found.predictions == answers).double().mean())
            good = apart <= CLOSE[dtype] and alike == 1
            failed += not good
            print(
                f"{label}: largest difference {apart:.1e}, {100 * alike:.2f}% of predictions equal, "
                f"{time.perf_counter() - start:.1f} s{'' if good else '  TOO FAR'}",
                flush=True,
            )
    return failed


def problem(device: str, images: int, seed: int = 0) -> tuple[tt.Task, Tensor]:
    task, stream, _ = tt.toy(classes=100, dim=512, images=images, views=64, seed=seed)
    return task.to(device), stream.to(device)


def threads(device: str, images: int) -> int:
    """Run pairs of sessions concurrently from their first image; returns how many differ from the same session alone.

    The last pair shares an encoder and runs over photographs.
    """
    failed, shared = 0, tt.load_encoder("tiny", device=device)
    seen = tt.build_task(shared, [f"thing {number}" for number in range(20)])
    for names in (("dpe", "dpe"), ("dpe", "tda"), ("tps", "dmn"), ("dpe, photographs",) * 2):
        problems = [problem(device, images, seed) for seed in range(2)]

        def work(index: int, gate: Callable[[], object], names: Any = names, problems: Any = problems) -> Tensor:
            if names[index].endswith("photographs"):
                session = tt.Session(seen, "dpe", encoder=shared, views=16, seed=index)
                images_of_run = [photograph(number + 100 * index) for number in range(min(images, 40))]
                gate()
                return torch.stack([answer.logits for _, answer in session.run(images_of_run)])
            task, stream = problems[index]
            session = tt.Session(task, names[index])
            gate()
            half = images // 2
            scanned = session.scan(stream[:half]).cpu()
            return torch.cat([scanned, torch.stack([session.step(views).logits for views in stream[half:]])])

        alone = [work(index, lambda: None) for index in range(2)]
        barrier, found = threading.Barrier(2), dict[int, Tensor]()

        def run(index: int, work: Any = work, barrier: Any = barrier, found: Any = found) -> None:
            found[index] = work(index, barrier.wait)

        pair = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        for index, name in enumerate(names):
            apart = float((found[index] - alone[index]).abs().max()) if index in found else float("nan")
            good = apart <= CLOSE["float32"]  # false for NaN, and so for a thread that failed
            failed += not good
            print(
                f"{name} beside {names[1 - index]}: {'the same bits as' if apart == 0 else f'{apart:.1e} from'} alone"
                f"{'' if good else '  FAILED'}",
                flush=True,
            )
    return failed


def peeking(device: str, images: int) -> int:
    """`predict`, then `step`, image by image; returns how many methods give different answers."""
    failed = 0
    task, stream = problem(device, images)
    for name in ("dpe", "tda", "tps", "dmn", "zeroshot"):
        session, stepped = tt.Session(task, name), tt.Session(task, name)
        apart, seconds = 0.0, {"predict": [], "step": []}
        for views in stream:
            logits = {}
            for what, call in (("predict", session.predict), ("step", session.step)):
                start = time.perf_counter()
                logits[what] = call(views).logits
                seconds[what].append(time.perf_counter() - start)
            same = torch.equal(logits["step"], stepped.step(views).logits)  # without `predict`
            apart = max(apart, float((logits["predict"] - logits["step"]).abs().max()), 0.0 if same else 1.0)
        failed += apart > 0
        took = {what: 1000 * statistics.median(times[len(times) // 4 :]) for what, times in seconds.items()}
        print(
            f"{name}: predict {took['predict']:.3f} ms, step {took['step']:.3f} ms, "
            f"{'the same bits' if apart == 0 else f'DIFFERENT LOGITS, {apart:.1e} apart'}",
            flush=True,
        )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=[GOLDEN])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=200, help="of synthetic streams, 64 views, 100 classes")
    options = parser.parse_args()
    failed = sum(traces(folder, options.device) for folder in options.folders)
    failed += threads(options.device, options.images)
    failed += peeking(options.device, options.images)
    print("failed:", failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
