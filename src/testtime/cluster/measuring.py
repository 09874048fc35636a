"""The stages measured on this machine, with the code that encodes: `testtime plan --here`.

On a CPU, threads take images from file to features as `testtime encode` does, and each notes the time of every stage,
so that the figures hold with all cores busy. On a GPU, files are read by as many threads as a stream uses, and views
and encoding are timed with the GPU idle before and after.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from testtime.cluster.figures import Figures
from testtime.encoding.compiled import Compiled
from testtime.encoding.encode import DTYPES
from testtime.encoding.encoders import DTYPES as PRECISE
from testtime.encoding.encoders import load_encoder
from testtime.encoding.encoders.open_clip import PRECISIONS, OpenClip, build, make_preprocess
from testtime.encoding.store import save_features
from testtime.encoding.stream import LAUNCH, MAX_IMAGES, READERS, ROWS, on_device
from testtime.errors import InputError
from testtime.files import read_bytes
from testtime.images.draw import draw
from testtime.images.gpu_views import as_pixels, grey_views
from testtime.images.reading import read_image
from testtime.images.views import views as pillow_views
from testtime.machine.devices import find_device
from testtime.machine.lean_open_clip import open_clip
from testtime.machine.threads import workers
from testtime.ops import unit
from testtime.registry import split_precision
from testtime.types import Encoder, ViewPlan

EXTENT = (500, 375)  # pixels of the synthetic photographs, as in the benchmarks
SYNTHETIC = 16
WRITTEN = 2**25  # bytes of features that are written to time it
STAGES = ("read", "decode", "draw", "views", "encode")

Seconds = dict[str, float]  # of each stage, for one image


def measure(
    model: str, plan: ViewPlan, dtype: str, device: str, sample: Sequence[Path], seconds: float
) -> tuple[Figures, Encoder, int]:
    """The figures of this machine, its encoder, and how many threads read or compute; it takes about `seconds`.

    `sample` are image files to read; without any, synthetic photographs are. Features are written to the temporary
    folder, which TMPDIR sets.
    """
    encoder = _encoder(model, device)
    with tempfile.TemporaryDirectory(prefix="testtime-plan-") as scratch:
        paths = list(sample) or _photographs(Path(scratch))
        on_gpu = on_device(encoder, plan.augmix)
        threads = max(2, min(READERS, os.cpu_count() or 1)) if on_gpu else torch.get_num_threads()
        stages = (_on_gpu if on_gpu else _on_cpu)(encoder, paths, plan, threads, seconds)
        figures = Figures(
            image_bytes=sum(os.path.getsize(path) for path in paths) / len(paths),
            read=stages["read"],
            decode=stages["decode"],
            write=_write_rate(encoder, plan, dtype, Path(scratch)),
            startup=_startup(model, paths[0], device, Path(scratch)),
            on_gpu=on_gpu,
            draw=stages["draw"] / plan.count,
            views=stages["views"] / plan.count,
            encode=stages["encode"] / plan.count,
            weights=_weight_bytes(encoder),
            notes=() if sample else ("the photographs measured are synthetic; --sample FOLDER measures yours",),
        )
    return figures, encoder, threads


def _encoder(model: str, device: str) -> Encoder:
    """An encoder by its name, or an open_clip model with random weights, which cost the same."""
    name, precision = split_precision(model)
    if name not in open_clip.list_models():
        return load_encoder(model, device)
    where = find_device(device)
    dtype = PRECISE[precision or ("float16" if where.type == "cuda" else "float32")]
    if dtype not in PRECISIONS:
        raise InputError(f"--model {model}: random weights are measured in {', '.join(map(str, PRECISIONS))}.")
    made = build(name, PRECISIONS[dtype])
    preprocess = make_preprocess(vars(open_clip.transform.PreprocessCfg(size=made.visual.image_size)))
    return OpenClip(model, made, open_clip.get_tokenizer(name), preprocess, where, dtype)


def _weight_bytes(encoder: Any) -> float:
    model = getattr(encoder, "model", None)
    return sum(part.numel() * part.element_size() for part in model.parameters()) if model is not None else 0.0


def _photographs(folder: Path) -> list[Path]:
    """Synthetic photographs, as JPEG files: large shapes under small ones."""
    noise, found = np.random.default_rng(0), []
    for number in range(SYNTHETIC):
        large, small = (
            Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)).resize(EXTENT, Image.Resampling.BICUBIC)
            for shape in ((12, 16, 3), (94, 125, 3))
        )
        found.append(folder / f"{number}.jpg")
        Image.blend(large, small, 0.3).save(found[-1], quality=90)
    return found


class _Watch:
    """Seconds of each stage of one image."""

    def __init__(self) -> None:
        self.stages = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stages[stage] += time.perf_counter() - began


def _mean(call: Callable[[int, Path], Seconds], paths: Sequence[Path], threads: int, seconds: float) -> Seconds:
    """The mean of each stage over images, with all threads busy for about `seconds`, after a warm-up."""
    pool = workers(threads, flush=True)
    list(pool.map(call, range(4 * threads), cycle(paths)))  # each thread has compiled and allocated what it needs
    found: list[Seconds] = []
    turns, ends = zip(count(), cycle(paths), strict=False), time.perf_counter() + seconds
    while not found or time.perf_counter() < ends:
        numbers, chosen = zip(*islice(turns, 4 * threads), strict=True)
        found += pool.map(call, numbers, chosen)
    return {stage: sum(each[stage] for each in found) / len(found) for stage in STAGES}


def _on_cpu(encoder: Encoder, paths: Sequence[Path], plan: ViewPlan, threads: int, seconds: float) -> Seconds:
    def image(index: int, path: Path) -> Seconds:
        watch = _Watch()
        with watch.timed("read"):
            content = read_bytes(path)
        with watch.timed("decode"):
            picture = read_image(content)
        with watch.timed("views"):
            pixels = pillow_views(
                picture, plan.count, encoder.preprocess, seed=plan.seed, index=index, augmix=plan.augmix
            )
        with watch.timed("encode"):
            for block in pixels.split(ROWS):
                encoder.encode_images(block)
        return watch.stages

    return _mean(image, paths, threads, seconds)


def _on_gpu(encoder: Any, paths: Sequence[Path], plan: ViewPlan, threads: int, seconds: float) -> Seconds:
    size = encoder.preprocess.size

    def image(index: int, path: Path) -> Seconds:
        watch = _Watch()
        with watch.timed("read"):
            content = read_bytes(path)
        with watch.timed("decode"):
            picture = as_pixels(read_image(content))
        extent = picture.shape[1], picture.shape[0]
        with watch.timed("draw"):
            draw(extent, plan.count, size, seed=plan.seed, index=index, augmix=plan.augmix)
        return watch.stages

    stages = _mean(image, paths, threads, seconds / 2)
    together = max(1, min(MAX_IMAGES, LAUNCH // plan.count))
    pictures = [as_pixels(read_image(path)).to(encoder.device) for path in islice(cycle(paths), together)]
    drawn = [
        draw((p.shape[1], p.shape[0]), plan.count, size, seed=plan.seed, index=index, augmix=plan.augmix)
        for index, p in enumerate(pictures)
    ]
    grey = torch.cat(list(grey_views(pictures, drawn, encoder.preprocess)))
    compiled = Compiled(encoder, together * plan.count)
    stages["views"] = _idle(lambda: grey_views(pictures, drawn, encoder.preprocess), seconds / 4) / together
    stages["encode"] = _idle(lambda: compiled.encode(grey), seconds / 4) / together
    return stages


def _idle(call: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a call on the GPU, after a warm-up, in rounds of ten."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        calls += 10
    return (time.perf_counter() - began) / calls


def _write_rate(encoder: Encoder, plan: ViewPlan, dtype: str, folder: Path) -> float:
    """Bytes per second at which a shard is written, the second of two."""
    kind, text = DTYPES[dtype], unit(torch.ones(2, encoder.dim))
    images = max(1, WRITTEN // (plan.count * encoder.dim * kind.itemsize))
    rows = unit(torch.randn(images, plan.count, encoder.dim)).to(kind)
    for number in range(2):
        began = time.perf_counter()
        save_features(folder / f"{number}.safetensors", rows, text)
        seconds = time.perf_counter() - began
    return rows.nbytes / seconds


def _startup(model: str, image: Path, device: str, folder: Path) -> float:
    """Seconds of `testtime encode` for one image; with random weights, which no command loads, of making the model."""
    began = time.perf_counter()
    if split_precision(model)[0] in open_clip.list_models():
        _encoder(model, device)
        return time.perf_counter() - began
    words = ["encode", image, "--classes", "cat,dog", "--encoder", model, "--device", device]
    words += ["--out", folder / "one.safetensors"]
    done = subprocess.run([sys.executable, "-m", "testtime", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"'testtime encode' failed here: {done.stderr.strip()[-300:]}")
    return time.perf_counter() - began
