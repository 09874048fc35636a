"""`testtime run` on the CPU, compared with a plain zero-shot loop with open_clip over the same files in the same run.

    python benchmarks/zero_shot_loop.py [FOLDER] [--model ViT-B-32] [--images 200] [--precision bfloat16] [--quick]

Random weights, one view, photographs of the folder or synthetic ones. Times are milliseconds per image after the first
10, so loading is excluded from both. The plain loop opens a file with Pillow, applies open_clip's preprocessing,
encodes one image at a time with all threads and takes the softmax; "batches of 16" encodes 16 at once, for comparison.
They take turns with `testtime run`, which also adapts and whose rows are timed as they arrive; medians are printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parent))

from commands import checkpoint, photographs  # noqa: E402

import testtime as tt  # noqa: E402

FIRST = 10  # images that are not counted
BATCH = 16
CLASSES = tuple(f"thing {number:04d}" for number in range(100))


def per_image(times: list[float], first: int, together: int = 1) -> float:
    """Milliseconds per image, from the times at which each answer, or batch of answers, arrived."""
    rest = times[-(-first // together) :]
    return 1000 * (rest[-1] - rest[0]) / (len(rest) - 1) / together


class Plain:
    """A zero-shot classifier as in open_clip's documentation."""

    def __init__(self, encoder: Any) -> None:
        self.model = encoder.model
        self.preprocess = open_clip.image_transform(encoder.preprocess.size, is_train=False)
        self.text = encoder.encode_texts([f"a photo of a {name}." for name in CLASSES])

    def loop(self, files: list[Path], together: int = 1) -> tuple[list[float], list[int]]:
        """The time of each batch, and the answers."""
        times, answers = [], list[int]()
        with torch.inference_mode():
            for start in range(0, len(files), together):
                pixels = [self.preprocess(Image.open(file).convert("RGB")) for file in files[start : start + together]]
                answers += self._probabilities(torch.stack(pixels)).argmax(1).tolist()
                times.append(time.perf_counter())
        return times, answers

    def _probabilities(self, pixels: Tensor) -> Tensor:
        features = normalize(self.model.encode_image(pixels), dim=-1)
        return (self.model.logit_scale.exp() * features @ self.text.T).softmax(-1)


def run(folder: Path, encoder: str, listing: Path) -> tuple[list[float], list[str]]:
    """The arrival time of each row of `testtime run`, and its zero-shot answers."""
    names = folder / "classes.txt"
    names.write_text("\n".join(CLASSES) + "\n")
    words = ["run", str(listing), "--encoder", encoder, "--classes-file", str(names), "--device", "cpu"]
    command, errors, times, lines = [sys.executable, "-m", "testtime", *words], folder / "errors.txt", [], []
    with errors.open("w") as problems:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=problems, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                times.append(time.perf_counter())
    if process.returncode:
        raise RuntimeError(f"testtime run failed: {errors.read_text()[-800:]}")
    return times[1:], [row["zero_shot"] for row in csv.DictReader(lines)]  # the header comes first


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="photographs; default: synthetic ones")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--precision", default="float32", help="of `testtime run`; the plain loops are in float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the tiny model, as a smoke test")
    options = parser.parse_args(arguments)
    model, images, repeats = ("tiny", 20, 1) if options.quick else (options.model, options.images, options.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tree = options.folder or photographs(folder / "photographs", 4, images)
        files = sorted(file for file in tree.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))[:images]
        if len(files) < FIRST + 2:
            parser.error(f"{tree} holds {len(files)} photographs; at least {FIRST + 2} are needed")
        listing = folder / "files.txt"
        listing.write_text("\n".join(str(file.absolute()) for file in files) + "\n")
        name = checkpoint(model, folder)
        plain = Plain(tt.load_encoder(name, device="cpu"))
        found: dict[str, list[float]] = {"testtime run": [], "plain loop": [], f"batches of {BATCH}": []}
        for _ in range(repeats):
            times, answers = plain.loop(files)
            found["plain loop"].append(per_image(times, FIRST))
            rows, frozen = run(folder, f"{name}@{options.precision}", listing)
            found["testtime run"].append(per_image(rows, FIRST))
            whole = files[: len(files) // BATCH * BATCH]  # a shorter last batch would count as much as the others
            if len(whole) > 2 * BATCH:
                found[f"batches of {BATCH}"].append(per_image(plain.loop(whole, BATCH)[0], FIRST, BATCH))
    each = {way: statistics.median(times) for way, times in found.items() if times}
    alike = sum(CLASSES[answer] == label for answer, label in zip(answers, frozen, strict=True)) / len(files)
    report = {
        "machine": f"torch {torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "model": model,
        "precision": options.precision,
        "images": len(files),
        "ms an image": each,
        "ratio to the plain loop": each["testtime run"] / each["plain loop"],
        "zero-shot answers alike": alike,
    }
    print(f"{model} in {options.precision}, {len(files)} photographs, {report['machine']}")
    for way, ms in each.items():
        print(f"  {way:16} {ms:9.2f} ms an image")
    print(
        f"  ratio to the plain loop {report['ratio to the plain loop']:.2f}; zero-shot answers alike {100 * alike:.1f}%"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
