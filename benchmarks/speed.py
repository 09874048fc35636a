"""Milliseconds per image, part by part and as a whole, on a GPU or, with --quick, in small on the CPU.

    python benchmarks/speed.py --out speed.json [--svg speed.svg] [--stages step,encoder,views,...] [--quick]

Encoders have random weights (the work is the same) and photographs are made up, 500 x 375 pixels. Every stage
is timed after a warm-up, by the clock, with the GPU idle before and after; medians are given. A stage that fails
is reported and the others go on. `encoder alone` is the same encoder on the same number of views, already made:
what no pipeline can be faster than.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from released_loop import ReleasedLoop  # noqa: E402
from step import full_state  # noqa: E402

import testtime as tt  # noqa: E402
from testtime import ops  # noqa: E402
from testtime.encode import encode_views  # noqa: E402
from testtime.fast import fused, graph, pipeline  # noqa: E402
from testtime.fast import views as fast_views  # noqa: E402
from testtime.fast.draw import draw  # noqa: E402
from testtime.fast.encoder import FastEncoder  # noqa: E402
from testtime.files import write_atomic  # noqa: E402
from testtime.types import Task  # noqa: E402
from testtime.views import views as pillow_views  # noqa: E402

EXTENT = (500, 375)  # about what ImageNet's photographs are


class Bench:
    """The settings of a run, what has been measured, and what is shared between stages."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick, self.device = options.quick, torch.device(options.device)
        self.gpu = self.device.type == "cuda"
        self.classes, self.views = (20, 4) if self.quick else (1000, 64)
        self.images, self.repeats = (6, 2) if self.quick else (options.images, options.repeats)
        self.out, self.svg = options.out, options.svg
        self.folder = Path(tempfile.mkdtemp(prefix="testtime-speed-"))
        self.report: dict[str, Any] = {"machine": machine(self.device), "results": {}, "errors": {}}
        self.profiled: dict[str, Callable[[], object]] = {}  # calls to look into at the end
        self.methods = options.methods.split(",")
        self._encoders: dict[str, FastEncoder] = {}

    def note(self, stage: str, name: str, value: Any, unit: str = "ms") -> None:
        self.report["results"].setdefault(stage, {})[name] = value
        shown = f"{value:12.4f} {unit}" if isinstance(value, float) else f"{value}"
        print(f"  {stage:>9} | {name:<58} {shown}", flush=True)

    def save(self) -> None:
        if self.out:
            write_atomic(self.out, json.dumps(self.report, indent=1) + "\n")
        if self.svg:
            write_atomic(self.svg, picture(self.report))

    def ms(self, call: Callable[[], object], repeats: int | None = None, warm: int = 2) -> float:
        """Median milliseconds of a call, the device idle before and after."""
        for _ in range(warm):
            call()
        times = []
        for _ in range(repeats or self.repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def encoder(self, name: str) -> FastEncoder:
        if name not in self._encoders:
            self._encoders[name] = FastEncoder(plain_encoder("tiny" if self.quick else name, self.device))
        return self._encoders[name]

    def task(self, encoder: FastEncoder) -> Task:
        noise = torch.Generator().manual_seed(0)
        shared, own = (
            torch.randn(1, encoder.dim, generator=noise),
            torch.randn(self.classes, encoder.dim, generator=noise),
        )
        text = ops.unit(1.5 * ops.unit(shared) + ops.unit(own)).to(self.device)
        return Task(text, tuple(f"class {number}" for number in range(self.classes)))

    def photographs(self) -> list[Path]:
        """JPEG files, made at the first call."""
        files = [self.folder / f"{number:03d}.jpg" for number in range(4 if self.quick else 32)]
        for number, file in enumerate(files):
            if not file.exists():
                photograph(number).save(file, quality=90)
        return files


def machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
    }
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    return facts


def plain_encoder(name: str, device: torch.device) -> Any:
    """A CLIP with random weights, in half precision on a GPU."""
    from testtime.encoders import clip
    from testtime.encoders.tiny import tiny

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    if name == "tiny":
        return tiny(device=device, dtype=dtype)
    import open_clip

    torch.manual_seed(0)
    model = clip.build(name, clip.PRECISIONS[dtype])
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.weight.data.uniform_(0.5, 1.5)  # fresh ones let nothing through
    looks = clip.make_preprocess(vars(open_clip.transform.PreprocessCfg(size=model.visual.image_size)))
    return clip.OpenClip(name, model, open_clip.get_tokenizer(name), looks, device, dtype)


def photograph(seed: int, extent: tuple[int, int] = EXTENT) -> Image.Image:
    """Shapes of several sizes with noise on them: compresses about as a photograph does."""
    random = np.random.default_rng(seed)
    layers = np.zeros((extent[1], extent[0], 3))
    for cells, weight in ((4, 0.6), (16, 0.25), (64, 0.15)):
        coarse = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        layers += weight * np.asarray(coarse.resize(extent, Image.Resampling.BICUBIC))
    return Image.fromarray((layers + random.normal(0, 4, layers.shape)).clip(0, 255).astype(np.uint8))


def on_device(state: Any, device: torch.device) -> Any:
    return state.to(device) if isinstance(state, Tensor) else type(state)(*(on_device(part, device) for part in state))


# Stages


def step(bench: Bench) -> None:
    """The adaptation alone, queues full: the plain step, and the captured one."""
    dim = 32 if bench.quick else 512
    task, stream, _ = tt.toy(classes=bench.classes, dim=dim, images=16, views=bench.views)
    state = on_device(full_state(tt.make_method("dpe"), task, stream), bench.device)
    task, stream = task.to(bench.device), stream.to(bench.device)
    many = stream.repeat(2 if bench.quick else 20, 1, 1)
    for name in bench.methods:
        method = tt.make_method(name)
        start = state if name == "dpe" else method.init(task)
        with torch.inference_mode():
            bench.note("step", f"{name}, plain", bench.ms(partial(method.scan, task, start, stream)) / len(stream))
            expected, _ = method.scan(task, start, stream)
        ways = {"runner": {}}
        if bench.gpu:
            ways = {
                "compiled and captured": {"compile": True, "kernels": False},
                "captured": {"compile": False, "kernels": False},
            }
        if bench.gpu and fused.fits([method], task, bench.views):
            ways["own kernels, captured"] = {"compile": False, "kernels": True}
        for way, options in ways.items():
            began = time.perf_counter()
            runner = graph.Runner(method, task, bench.views, **options)
            runner.load(task, start)
            logits = runner.run(stream)
            kind = f"{name}, {way}"
            runner.run(many)
            bench.wait()
            bench.note("step", f"{kind}: seconds to prepare", time.perf_counter() - began, "s")
            bench.note("step", f"{kind}: largest difference of a logit", float((logits - expected).abs().max()), "")
            runner.load(task, start)
            bench.note("step", kind, bench.ms(partial(runner.run, many)) / len(many))
            if name == "dpe":
                bench.note("step", f"{kind}: the same, classes alike", apart_where_alike(bench, runner, method), "")
            if bench.gpu and name == "dpe":
                bench.profiled[f"one step, {kind}"] = partial(runner.run, stream[:1])
    products(bench, task, state)


def apart_where_alike(bench: Bench, runner: graph.Runner, method: Any) -> float:
    """Largest difference of a logit from the plain step, classes being so alike that the alignment has work to do."""
    noise, dim, classes = torch.Generator().manual_seed(0), runner.task.dim, bench.classes

    def rows(*shape: int) -> Tensor:
        return ops.unit(torch.randn(*shape, dim, generator=noise))

    own, kind, gap = rows(classes), rows(classes // 10).repeat(10, 1), 1.5 * rows(1)
    text = ops.unit(1.5 * rows(1) + 0.6 * kind + own)
    likely = gap + 0.35 * own + 0.3 * kind  # what images of a class have in common
    task = Task(text.to(bench.device), runner.task.classnames, scale=runner.task.scale)
    keys = ops.unit(likely[:, None] + 0.8 * rows(classes, 3)).to(bench.device)
    stream = ops.unit(likely[torch.arange(16), None] + 0.8 * rows(16, bench.views)).to(bench.device)
    state = method.init(task)
    queue = state.queue._replace(keys=keys, cost=torch.full_like(state.queue.cost, 0.3))
    state = state._replace(queue=queue, visual=keys.mean(1))
    with torch.inference_mode():
        expected, _ = method.scan(task, state, stream)
    runner.load(task, state)
    return float((runner.run(stream) - expected).abs().max())


def products(bench: Bench, task: Task, state: Any) -> None:
    """The three C x C x D products that the alignment needs however it is written."""
    text, visual, square = task.text, state.visual, torch.rand(task.classes, task.classes, device=bench.device)

    def three() -> None:
        for _ in range(20):
            visual @ text.T, square.T @ visual, square @ text

    bench.note("step", "dpe: the three products alone", bench.ms(three) / 20)


def kernels(bench: Bench) -> None:
    """Which kernels take the time of a call, by the profiler, in microseconds; last, as profilers may crash."""
    for name, call in bench.profiled.items():
        kernels_of(bench, name, call)


def kernels_of(bench: Bench, name: str, call: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        bench.wait()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    rows = [(event.key[:90], event.count, round(event.self_device_time_total, 1)) for event in found]
    bench.report["results"].setdefault("kernels", {})[name] = rows
    print(f"  kernels of {name}: {sum(row[1] for row in rows)} launches, {sum(row[2] for row in rows):.0f} us")
    for key, count, total in rows[:14]:
        print(f"    {total:8.1f} us {count:4d} x {key}")


def encoder(bench: Bench, name: str = "ViT-B-16", stage: str = "encoder") -> None:
    """The encoder alone, plain and compiled, for one image's views and for four images'."""
    fast = bench.encoder(name)
    size = fast.preprocess.size
    grey = torch.randint(0, 256, (4 * bench.views, 3, size, size), device=bench.device).to(
        torch.float16 if bench.gpu else torch.float32
    )
    normal = fast_views.normalise(grey, fast.preprocess, fast.dtype)
    one, four = bench.views, 4 * bench.views
    bench.note(stage, f"{name}, plain, {one} views", bench.ms(lambda: fast.encoder.encode_images(normal[:one])))
    began = time.perf_counter()
    features = fast.encode_grey(grey[:one])
    bench.wait()
    bench.note(stage, f"{name}, {one} views: seconds to prepare", time.perf_counter() - began, "s")
    gap = (features - fast.encoder.encode_images(normal[:one])).abs().max()
    bench.note(stage, f"{name}: largest difference of a feature", float(gap), "")
    bench.note(stage, f"{name}, {one} views", bench.ms(lambda: fast.encode_grey(grey[:one])))
    began = time.perf_counter()
    fast.encode_grey(grey)
    bench.wait()
    bench.note(stage, f"{name}, {four} views: seconds to prepare", time.perf_counter() - began, "s")
    bench.note(stage, f"{name}, {four} views, per image", bench.ms(lambda: fast.encode_grey(grey)) / 4)


def views(bench: Bench) -> None:
    """Making the views of one image: drawing, crops, AugMix, and Pillow's way; and how far the two are apart."""
    looks = bench.encoder("ViT-B-16").preprocess
    image = photograph(0)
    picture = fast_views.as_picture(image).to(bench.device)
    for augmix in (False, True):
        name = "AugMix" if augmix else "crops"
        options = dict(seed=0, index=5, augmix=augmix)
        sampled = draw(image.size, bench.views, looks.size, **options)
        drawing = bench.ms(partial(draw, image.size, bench.views, looks.size, **options))
        bench.note("views", f"{name}: drawing what is random", drawing)
        ours = fast_views.grey_views([picture], [sampled], looks)[0]
        make = partial(fast_views.grey_views, [picture], [sampled], looks)
        bench.note("views", f"{name}: one image", bench.ms(make))
        four = partial(fast_views.grey_views, [picture] * 4, [sampled] * 4, looks)
        bench.note("views", f"{name}: four images, each", bench.ms(four) / 4)
        if bench.gpu:
            bench.profiled[f"views, {name}"] = make
        by_pillow = partial(pillow_views, image, bench.views, looks, **options)
        theirs = by_pillow()
        std = torch.tensor(looks.std)[:, None, None]
        apart = (fast_views.normalise(ours.cpu().float(), looks, torch.float32) - theirs).mul(255 * std).abs()
        bench.note("views", f"{name}: mean difference from Pillow", float(apart.mean()), "grey levels")
        bench.note(
            "views", f"{name}: largest mean difference of a view", float(apart.flatten(1).mean(1).max()), "levels"
        )
        bench.note("views", f"{name}: Pillow, one core", bench.ms(by_pillow, 2, 0))


def decode(bench: Bench) -> None:
    """Reading JPEG files: Pillow in one thread, and the device's decoder in batches."""
    files = bench.photographs()
    each = len(files)
    bench.note("decode", "bytes of a file", os.path.getsize(files[0]), "")
    bench.note(
        "decode", "Pillow, one thread", bench.ms(lambda: [pipeline.read_image(file) for file in files], 3, 1) / each
    )
    made = [pipeline.Prepared(file, 0, pipeline._plain_jpeg(file)[0], None) for file in files]  # type: ignore[index]
    fours = [made[start : start + 4] for start in range(0, each, 4)]
    on_device = bench.ms(lambda: [pipeline._decode(four, bench.device) for four in fours], 3, 1) / each
    bench.note("decode", "torchvision on the device, batches of 4", on_device)
    by_device = pipeline._decode(made[:1], bench.device)[0]
    assert isinstance(by_device, Tensor)
    apart = (by_device.cpu().float() - fast_views.as_picture(pipeline.read_image(files[0])).float()).abs().mean()
    bench.note("decode", "mean difference from Pillow", float(apart), "grey levels")


def whole(
    bench: Bench, name: str = "ViT-B-16", stage: str = "whole", augmixes: tuple[bool, ...] = (False, True)
) -> None:
    """From a decoded image, or a file, to a prediction: a stream of images, and one at a time."""
    fast = bench.encoder(name)
    task, method = bench.task(fast), tt.make_method("dpe")
    runner = graph.Runner(method, task, bench.views)
    files = bench.photographs()
    decoded = [pipeline.read_image(file) for file in files]
    start = full_queues(method, task)
    size = fast.preprocess.size
    grey = torch.randint(0, 256, (4 * bench.views, 3, size, size), device=bench.device).to(
        torch.float16 if bench.gpu else torch.float32
    )
    alone = {
        1: bench.ms(lambda: fast.encode_grey(grey[: bench.views])),
        4: bench.ms(lambda: fast.encode_grey(grey)) / 4,
    }
    for batch, value in alone.items():
        bench.note(stage, f"{name}, encoder alone, {batch} images together", value)
    for augmix in augmixes:
        kind = "AugMix" if augmix else "crops"
        agreement(bench, stage, f"{name}, {kind}", fast, decoded[:2], augmix)
        for batch in (1, 4):
            options: dict[str, Any] = dict(views=bench.views, augmix=augmix, batch=batch)
            for label, sources, more in (
                ("decoded", decoded, {}),
                ("files, Pillow", files, {}),
                ("files, device", files, {"decode": "torchvision"}),
            ):
                if label != "decoded" and (augmix or stage != "whole"):
                    continue

                def go(sources: list[Any] = sources, options: dict[str, Any] = options | more) -> None:
                    runner.load(task, start)
                    images: Iterator[Any] = islice(cycle(sources), bench.images)
                    answered = sum(
                        answer.logits is not None for answer in pipeline.classify(runner, fast, images, **options)
                    )
                    assert answered == bench.images

                try:
                    each = bench.ms(go, 3, 1) / bench.images
                except Exception:
                    bench.report["errors"][f"{stage}: {label}, {batch}"] = traceback.format_exc()
                    traceback.print_exc()
                    continue
                bench.note(stage, f"{name}, {kind}, {label}, batch {batch}, a stream, each", each)
                bench.note(
                    stage, f"{name}, {kind}, {label}, batch {batch}, over encoder alone", each / alone[batch], "x"
                )
        turn = cycle(enumerate(decoded))

        def single(augmix: bool = augmix, turn: Iterator[Any] = turn) -> None:
            index, image = next(turn)
            list(pipeline.classify(runner, fast, [image], views=bench.views, augmix=augmix, batch=1, first=index))

        bench.note(stage, f"{name}, {kind}, decoded, one image by itself", bench.ms(single, 10))


def full_queues(method: Any, task: Task) -> Any:
    """A state with every queue full, of features near their class."""
    state = method.init(task)
    keys = ops.unit(task.text[:, None] + 0.05 * torch.randn_like(state.queue.keys))
    cost = torch.full_like(state.queue.cost, 1e-3)
    return state._replace(queue=state.queue._replace(keys=keys, cost=cost), visual=keys.mean(1))


def agreement(bench: Bench, stage: str, kind: str, fast: FastEncoder, images: list[Any], augmix: bool) -> None:
    """How near the features are to those by Pillow and the plain encoder."""
    ours = [e.features for e in pipeline.stream(fast, images, views=bench.views, augmix=augmix, batch=1)]
    theirs = encode_views(fast.encoder, images, range(len(images)), views=bench.views, seed=0, augmix=augmix)
    cosine = (torch.stack([rows for rows in ours if rows is not None]) * theirs).sum(-1)
    bench.note(stage, f"{kind}: least cosine with the plain features", float(cosine.min()), "")


def rn50(bench: Bench) -> None:
    encoder(bench, "RN50", "rn50")
    whole(bench, "RN50", "rn50", (False,))


def released(bench: Bench) -> None:
    """The released loop on the same views: autograd through the encoder, lists of queues, loops over classes."""
    plain = plain_encoder("tiny" if bench.quick else "ViT-B-16", bench.device)
    fast = bench.encoder("ViT-B-16")
    task = bench.task(fast)
    image = photograph(0)
    pixels = pillow_views(image, bench.views, fast.preprocess, seed=0, index=0).to(bench.device)
    loop = ReleasedLoop(plain.model, task.text)
    loop.fill()
    bench.note("released", "views to prediction", bench.ms(lambda: loop.step(pixels), 5))
    make = bench.ms(lambda: pillow_views(image, bench.views, fast.preprocess, seed=0, index=0), 2, 0)
    bench.note("released", "crops by Pillow, one core", make)
    mix = bench.ms(lambda: pillow_views(image, bench.views, fast.preprocess, seed=0, index=0, augmix=True), 2, 0)
    bench.note("released", "AugMix by Pillow, one core", mix)


STAGES: dict[str, Callable[[Bench], None]] = {
    "step": step,
    "encoder": encoder,
    "views": views,
    "whole": whole,
    "decode": decode,
    "rn50": rn50,
    "released": released,
    "kernels": kernels,
}


# what one H200 should reach with 1000 classes and 64 views: stage, entry, at most
TARGETS = (
    ("step", "dpe, own kernels, captured", 0.1),
    *(("whole", f"ViT-B-16, crops, decoded, batch {batch}, a stream, each", 7.0) for batch in (1, 4)),
    *(("whole", f"ViT-B-16, crops, decoded, batch {batch}, over encoder alone", 1.1) for batch in (1, 4)),
    *(("whole", f"ViT-B-16, AugMix, decoded, batch {batch}, over encoder alone", 1.3) for batch in (1, 4)),
    *(("whole", f"ViT-B-16, crops, files, Pillow, batch {batch}, a stream, each", 7.5) for batch in (1, 4)),
    *(("whole", f"ViT-B-16, crops, files, device, batch {batch}, a stream, each", 7.5) for batch in (1, 4)),
    *(("rn50", f"RN50, crops, decoded, batch {batch}, a stream, each", 4.0) for batch in (1, 4)),
)


def compare(bench: Bench) -> None:
    """Print what was measured beside what should be reached, last, where a cut-off log still shows it."""
    results = bench.report["results"]
    rows = [(name, results[stage][name], most) for stage, name, most in TARGETS if name in results.get(stage, {})]
    bench.report["targets"] = [{"entry": name, "measured": value, "at most": most} for name, value, most in rows]
    for name, value, most in rows:
        print(f"  {'reached' if value <= most else 'MISSED':>7} {value:9.3f} of {most:g}  {name}")


def picture(report: dict[str, Any]) -> str:
    """The measured milliseconds as bars, in SVG."""
    bars = [
        (f"{stage}: {name}", value)
        for stage, entries in report["results"].items()
        if stage in ("step", "encoder", "views", "whole", "rn50", "released")
        for name, value in entries.items()
        if isinstance(value, float) and not any(word in name for word in ("difference", "seconds", "cosine", "over"))
    ]
    top = max((value for _, value in bars), default=1.0)
    low = min((value for _, value in bars if value > 0), default=0.01)
    span = max(np.log10(top / low), 1e-6)
    lines = []
    for row, (name, value) in enumerate(bars):
        width = 20 + 380 * np.log10(max(value, low) / low) / span
        y = 40 + 20 * row
        lines.append(f'<text x="440" y="{y + 11}" text-anchor="end">{name}</text>')
        lines.append(f'<rect x="450" y="{y}" width="{width:.1f}" height="14" fill="#4269d0"/>')
        lines.append(f'<text x="{456 + width:.1f}" y="{y + 11}">{value:.3g} ms</text>')
    height = 60 + 20 * len(bars)
    title = f"Milliseconds per image, {report['machine']['device']}; the bars' scale is logarithmic"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="940" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="20" y="22" font-size="14">{title}</text>'
        + "".join(lines)
        + "</svg>\n"
    )


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, written anew after every stage")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--methods", default="dpe", help="whose steps are timed, as in dpe,tda,tps,dmn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=128, help="length of the streams that are timed")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.stages.split(",")) - set(STAGES))
    if unknown:
        parser.error(f"unknown stages {', '.join(unknown)}; there are {', '.join(STAGES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    bench = Bench(options)
    print(json.dumps(bench.report["machine"]))
    for name in options.stages.split(","):
        began = time.perf_counter()
        try:
            STAGES[name](bench)
        except Exception:
            bench.report["errors"][name] = traceback.format_exc()
            traceback.print_exc()
        print(f"  {name}: {time.perf_counter() - began:.1f} s", flush=True)
        bench.save()
    if not bench.quick:
        compare(bench)
        bench.save()
    print("failed: " + (", ".join(bench.report["errors"]) or "nothing"))
    return 1 if bench.report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
