"""Times whole commands: `run`, `encode`, `eval` and `replay`, each in its own process.

    python benchmarks/commands.py --out commands.json

Random weights in a published architecture, synthetic photographs, as many classes as folders. Milliseconds per image
exclude the first 50: for `run`, from the times of its rows; for the others, from the difference of a long and a short
run. One-time costs are reported separately: seconds to the first answer, with cold caches (new folders) and warm ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from testtime.encoding.store import save_features
from testtime.ops import unit

FIRST = 50  # images that are not counted


def photograph(number: int, extent: tuple[int, int] = (500, 375)) -> Image.Image:
    """A synthetic image with large and small shapes, the same for each number."""
    random = np.random.default_rng(number)
    small = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        extent, Image.Resampling.BICUBIC
    )
    fine = Image.fromarray(random.integers(0, 256, (94, 125, 3), dtype=np.uint8)).resize(
        extent, Image.Resampling.BILINEAR
    )
    return Image.blend(small, fine, 0.3)


def photographs(folder: Path, classes: int, images: int) -> Path:
    """JPEG files in one folder per class."""
    for number in range(max(images, classes)):
        class_folder = folder / f"thing {number % classes:04d}"
        class_folder.mkdir(parents=True, exist_ok=True)
        photograph(number).save(class_folder / f"{number:06d}.jpg", quality=90)
    return folder


def checkpoint(model: str, folder: Path) -> str:
    """A name for `--encoder`: a file with random weights of this model, or the tiny encoder."""
    if model == "tiny":
        return "tiny"
    from safetensors.torch import save_file

    from testtime.encoding.encoders.open_clip import build

    torch.manual_seed(0)
    made = build(model)
    with torch.no_grad():
        made.logit_scale.fill_(np.log(100))
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, folder / f"{model}.safetensors")
    return f"open_clip:{model}/{folder / f'{model}.safetensors'}"


class Commands:
    """A folder to run commands in, with its own caches."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.tree = photographs(folder / "photographs", options.classes, options.images)
        self.encoder = checkpoint(options.model, folder)
        self.results: dict[str, Any] = {}
        self.caches = 0
        self.new_caches()

    def new_caches(self) -> None:
        """Switch to empty caches: nothing compiled earlier is found."""
        self.caches += 1
        caches = self.folder / f"caches-{self.caches}"
        self.environment = os.environ | {
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "NUMBA_CACHE_DIR": str(caches / "numba"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "PYTHONPYCACHEPREFIX": str(caches / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",  # a user's Python caches bytecode
        }
        if self.options.cores:
            self.environment["OMP_NUM_THREADS"] = str(self.options.cores)

    def start(self, *words: object, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "testtime", *map(str, words)]
        if self.options.cores:
            command = ["taskset", "-c", f"0-{self.options.cores - 1}", *command]
        return subprocess.Popen(command, env=self.environment, text=True, **more)

    def call(self, *words: object) -> tuple[float, str]:
        """The seconds of a command, and its output."""
        began = time.perf_counter()
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(f"testtime {words[0]} failed ({process.returncode}): {err[-800:]}")
        return time.perf_counter() - began, out

    def note(self, name: str, value: float, unit: str = "ms") -> None:
        self.results[name] = round(value, 4)
        print(f"  {name}: {value:.3f} {unit}", flush=True)

    def run(self, label: str, *more: object) -> None:
        """`run`, row by row: the first answer, and milliseconds per image after the first 50."""
        began, times = time.perf_counter(), []
        words = ("run", self.tree, "--encoder", self.encoder, "--limit", self.options.images, *self.kind(), *more)
        with tempfile.TemporaryFile("w+") as err, self.start(*words, stdout=subprocess.PIPE, stderr=err) as process:
            for _ in process.stdout or []:
                times.append(time.perf_counter())
            if process.wait():
                err.seek(0)
                raise RuntimeError(f"testtime run failed: {err.read()[-800:]}")
        first, *_, last = times[1:]  # the header comes first
        self.note(f"run, {label}: seconds to the first answer", first - began, "s")
        rest = times[FIRST + 1 :]
        if len(rest) > 1:
            self.note(f"run, {label}", 1000 * (rest[-1] - rest[0]) / (len(rest) - 1))

    def kind(self) -> tuple[object, ...]:
        return ("--views", self.options.views, "--device", self.options.device)

    def difference(self, label: str, words: Any) -> None:
        """Milliseconds per image of a command, given by `words(images, path)`."""
        few, many = FIRST, self.options.images
        # the start takes seconds and varies: take the faster of two
        short, long = (
            min(self.call(*words(images, self.folder / f"{label}-{images}-{turn}"))[0] for turn in range(2))
            for images in (few, many)
        )
        self.note(f"{label}: seconds of {few} images", short, "s")
        self.note(label, 1000 * (long - short) / (many - few))

    def encode(self) -> None:
        def words(images: int, path: Path) -> tuple[object, ...]:
            out = path.with_suffix(".safetensors")
            return ("encode", self.tree, "--encoder", self.encoder, "--limit", images, "--out", out, *self.kind())

        self.difference("encode", words)

    def eval(self) -> None:
        def words(images: int, path: Path) -> tuple[object, ...]:
            common = ("--encoder", self.encoder, "--limit", images, "--seeds", "1", "--methods", "zeroshot,dpe")
            return ("eval", self.tree, *common, "--out", path, *self.kind())

        self.difference("eval", words)
        again = self.call(*words(self.options.images, self.folder / f"eval-{self.options.images}-0"))[0]
        self.note("eval again, nothing left to do: seconds", again, "s")

    def replay(self) -> None:
        options = self.options
        random = torch.Generator().manual_seed(0)
        text = unit(torch.randn(options.classes, 512, generator=random))
        labels = torch.randint(options.classes, (options.stored,), generator=random)
        path = self.folder / "stored.safetensors"
        noise = torch.randn(options.stored, options.views, 512, generator=random)
        save_features(path, unit(text[labels][:, None] + 0.06 * noise).half(), text, labels=labels)
        for method in ("dpe", "tda", "zeroshot"):
            seconds, printed = self.call("replay", path, "--method", method, "--device", options.device, "--json")
            found = json.loads(printed)
            self.note(f"replay, {method}", 1000 * found["seconds"] / found["n"])
            self.note(f"replay, {method}: seconds loading, compiling, capturing", found["loading_seconds"], "s")
            self.note(f"replay, {method}: seconds in all", seconds, "s")


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return {"device": name, "torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every command")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--stored", type=int, default=5000, help="images of stored features to replay")
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--cores", type=int, default=0, help="limit commands to this number of cores")
    parser.add_argument("--only", default="run,augmix,encode,eval,replay")
    options = parser.parse_args(arguments)
    stages = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(Path(folder), options)
        failed = 0
        for stage, work in {
            "run": lambda: (commands.run("crops, caches cold"), commands.run("crops")),
            "augmix": lambda: commands.run("AugMix", "--augmix"),
            "encode": commands.encode,
            "eval": commands.eval,
            "replay": commands.replay,
        }.items():
            if stage not in stages:
                continue
            try:
                work()
            except (RuntimeError, ValueError) as problem:
                failed += 1
                print(f"  {stage} FAILED: {problem}", flush=True)
            if options.out:
                report = {"machine": machine(options.device), "options": vars(options) | {"out": str(options.out)}}
                options.out.write_text(json.dumps(report | {"results": commands.results}, indent=1) + "\n")
    print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
