"""Milliseconds per image, by stage, end to end and as commands, on a GPU or, with --quick and small sizes, on the CPU.

    python benchmarks/speed.py --out speed.json [--svg speed.svg] [--stages step,encoder,views,...] [--quick]

Encoders have random weights (the work is the same), and photographs are synthetic, 500 x 375 pixels. Every stage is
timed after a warm-up, in wall-clock time, with the GPU idle before and after; medians are reported. If a stage fails,
it is reported and the others run. "Encoder alone" is the same encoder on the same number of precomputed views: a lower
bound for any stream. `whole` times `Session.run`; `commands` are those of benchmarks/commands.py.
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
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from commands import FIRST, Commands, photograph  # noqa: E402
from released_loop import ReleasedLoop  # noqa: E402
from step import full_state  # noqa: E402

import testtime as tt  # noqa: E402
from testtime import ops  # noqa: E402
from testtime.encoding.compiled import Compiled  # noqa: E402
from testtime.encoding.stream import READERS, stream  # noqa: E402
from testtime.files import write_atomic  # noqa: E402
from testtime.images import gpu_views  # noqa: E402
from testtime.images.draw import draw  # noqa: E402
from testtime.images.reading import read_image  # noqa: E402
from testtime.images.views import grey_levels  # noqa: E402
from testtime.images.views import views as pillow_views  # noqa: E402
from testtime.machine.threads import workers  # noqa: E402
from testtime.steppers import fast_of, open_stepper  # noqa: E402
from testtime.steppers.gpu import dpe as kernels_of_dpe  # noqa: E402
from testtime.steppers.gpu import graph  # noqa: E402
from testtime.types import Preprocess, Task, ViewPlan  # noqa: E402


class Bench:
    """The settings of a run, its measurements, and objects shared between stages."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick, self.device = options.quick, torch.device(options.device)
        self.gpu = self.device.type == "cuda"
        self.classes, self.views = (20, 4) if self.quick else (1000, 64)
        self.first, self.images, self.repeats = (2, 6, 2) if self.quick else (FIRST, options.images, options.repeats)
        self.out, self.svg = options.out, options.svg
        self.folder = Path(tempfile.mkdtemp(prefix="testtime-speed-"))
        self.report: dict[str, Any] = {"machine": machine(self.device), "results": {}, "errors": {}}
        self.profiled: dict[str, Callable[[], object]] = {}  # calls to profile at the end
        self.methods = options.methods.split(",")
        self._encoders: dict[str, Any] = {}

    def note(self, stage: str, name: str, value: Any, unit: str = "ms") -> None:
        self.report["results"].setdefault(stage, {})[name] = value
        shown = f"{value:12.4f} {unit}" if isinstance(value, float) else f"{value}"
        print(f"  {stage:>9} | {name:<58} {shown}", flush=True)

    def save(self) -> None:
        if self.out:
            write_atomic(self.out, json.dumps(self.report, indent=1) + "\n")
        if self.svg:
            write_atomic(self.svg, chart(self.report))

    def ms(self, call: Callable[[], object], repeats: int | None = None, warm: int = 2) -> float:
        """Median milliseconds of a call, the device idle before and after."""
        for _ in range(warm):
            call()
        return 1000 * statistics.median(self.seconds(call)[0] for _ in range(repeats or self.repeats))

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The seconds of one call, and its result."""
        self.wait()
        start = time.perf_counter()
        found = call()
        self.wait()
        return time.perf_counter() - start, found

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def encoder(self, name: str) -> Any:
        if name not in self._encoders:
            self._encoders[name] = random_encoder("tiny" if self.quick else name, self.device)
        return self._encoders[name]

    def grey(self, encoder: Any, views: int) -> Tensor:
        """Random views."""
        size, levels = encoder.preprocess.size, torch.float16 if self.gpu else torch.float32
        return torch.randint(0, 256, (views, 3, size, size), device=self.device).to(levels)

    def task(self, encoder: Any) -> Task:
        noise = torch.Generator().manual_seed(0)
        shared, own = (ops.unit(torch.randn(n, encoder.dim, generator=noise)) for n in (1, self.classes))
        text = ops.unit(1.5 * shared + own).to(self.device)
        return Task(text, tuple(f"class {number}" for number in range(self.classes)))

    def photographs(self) -> list[Path]:
        """JPEG files, created on the first call."""
        files = [self.folder / f"{number:03d}.jpg" for number in range(4 if self.quick else 32)]
        for number, file in enumerate(files):
            if not file.exists():
                photograph(number).save(file, quality=90)
        return files


def machine(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
    }
    return about | ({"cuda": torch.version.cuda} if device.type == "cuda" else {})


def random_encoder(name: str, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A CLIP with random weights; by default in half precision on a GPU."""
    from testtime.encoding.encoders import open_clip as clip
    from testtime.encoding.encoders.tiny import tiny

    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    if name == "tiny":
        return tiny(device=device, dtype=dtype)
    import open_clip

    torch.manual_seed(0)
    model = clip.build(name, clip.PRECISIONS[dtype])
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.weight.data.uniform_(0.5, 1.5)  # the initial ones zero out the residual branches
    preprocess = clip.make_preprocess(vars(open_clip.transform.PreprocessCfg(size=model.visual.image_size)))
    return clip.OpenClip(name, model, open_clip.get_tokenizer(name), preprocess, device, dtype)


def on_device(state: Any, device: torch.device) -> Any:
    return state.to(device) if isinstance(state, Tensor) else type(state)(*(on_device(part, device) for part in state))


# Stages


def step(bench: Bench) -> None:
    """The adaptation alone with full queues: the plain step, the captured one, and DPE's kernels."""
    dim = 32 if bench.quick else 512
    task, images, _ = tt.toy(classes=bench.classes, dim=dim, images=16, views=bench.views)
    state = on_device(full_state(tt.make_method("dpe"), task, images), bench.device)
    task, images = task.to(bench.device), images.to(bench.device)
    many = images.repeat(2 if bench.quick else 20, 1, 1)
    for name in bench.methods:
        method = tt.make_method(name)
        start = state if name == "dpe" else method.init(task)
        makers: dict[str, Callable[..., Any]] = {"captured": graph.Stepper} if bench.gpu else {"stepper": open_stepper}
        if bench.gpu and fast_of(task, method):
            makers["own kernels, captured"] = kernels_of_dpe.Stepper
        with torch.inference_mode():
            bench.note("step", f"{name}, plain", bench.ms(partial(method.scan, task, start, images)) / len(images))
            expected, _ = method.scan(task, start, images)
            for label, make in makers.items():
                kind, stepper = f"{name}, {label}", make(task, [method], [start])
                prepared, _ = bench.seconds(partial(stepper.warm_up, bench.views))
                bench.note("step", f"{kind}: seconds to prepare", prepared, "s")
                apart = float((stepper.scan(images)[0] - expected).abs().max())
                bench.note("step", f"{kind}: largest difference of a logit", apart, "")
                stepper.restore([start])
                bench.note("step", kind, bench.ms(partial(stepper.scan, many)) / len(many))
                if bench.gpu and name == "dpe":
                    bench.profiled[f"one step, {kind}"] = partial(stepper.scan, images[:1])
    text, visual, square = task.text, state.visual, torch.rand(task.classes, task.classes, device=bench.device)

    def three() -> None:
        for _ in range(20):
            visual @ text.T, square.T @ visual, square @ text

    bench.note("step", "dpe: the three products alone", bench.ms(three) / 20)  # those of the alignment, a lower bound


def normalise(grey: Tensor, preprocess: Preprocess) -> Tensor:
    """Grey levels (..., 3, H, W) normalised by the model's mean and standard deviation, in float32."""
    mean, std = (torch.tensor(x, device=grey.device)[:, None, None] for x in (preprocess.mean, preprocess.std))
    return torch.addcmul(-mean / std, grey.float(), 1 / (255 * std))


def encoder(bench: Bench, name: str = "ViT-B-16", stage: str = "encoder") -> None:
    """The encoder alone, plain and captured, for one image's views and for four images'."""
    plain = bench.encoder(name)
    grey = bench.grey(plain, 4 * bench.views)
    one, four = bench.views, 4 * bench.views
    normal = normalise(grey[:one], plain.preprocess).to(plain.dtype)
    bench.note(stage, f"{name}, plain, {one} views", bench.ms(partial(plain.encode_images, normal)))
    for count, what in ((one, f"{one} views"), (four, f"{four} views, per image")):
        captured = Compiled(plain, count)
        seconds, features = bench.seconds(partial(captured.encode, grey[:count]))
        bench.note(stage, f"{name}, {count} views: seconds to prepare", seconds, "s")
        gap = float((features[:one] - plain.encode_images(normal)).abs().max())
        bench.note(stage, f"{name}, {count} views: largest difference of a feature", gap, "")
        bench.note(stage, f"{name}, {what}", bench.ms(partial(captured.encode, grey[:count])) * one / count)


def float8(bench: Bench) -> None:
    """The encoder's large products in 8 bits, which is off by default: its speed and its error."""
    plain = random_encoder("tiny" if bench.quick else "ViT-B-16", bench.device, torch.bfloat16)
    exact = random_encoder("tiny" if bench.quick else "ViT-B-16", bench.device, torch.float32)
    preprocess, count = plain.preprocess, 4 * bench.views
    views = [pillow_views(photograph(number), bench.views, preprocess, seed=0, index=number) for number in range(4)]
    shift, gain = (torch.tensor(x)[:, None, None] for x in (preprocess.mean, preprocess.std))
    grey = (255 * (torch.cat(views) * gain + shift)).round().to(bench.device)
    truth = exact.encode_images(normalise(grey, preprocess))
    bench.note("float8", "1 - cosine of two images' features, mean", float(1 - (truth @ truth.T).mean()), "")
    for plain.float8, name in ((False, "bfloat16"), (True, "float8")):
        captured = Compiled(plain, count)
        features = captured.encode(grey)
        bench.note(
            "float8", f"{name}: largest 1 - cosine with float32", float((1 - (features * truth).sum(1)).max()), ""
        )
        bench.note("float8", name, bench.ms(partial(captured.encode, grey)) / 4)


def views(bench: Bench) -> None:
    """Making the views of one image: random parameters, crops, AugMix; with Pillow, on a GPU, and the difference."""
    preprocess = bench.encoder("ViT-B-16").preprocess
    image = photograph(0)
    picture = gpu_views.as_pixels(image).to(bench.device)
    for augmix in (False, True):
        name = "AugMix" if augmix else "crops"
        options = dict(seed=0, index=5, augmix=augmix)
        drawing = partial(draw, image.size, bench.views, preprocess.size, **options)
        bench.note("views", f"{name}: drawing what is random", bench.ms(drawing))
        if bench.gpu:
            make = partial(gpu_views.grey_views, [picture], [drawing()], preprocess)
            bench.note("views", f"{name}: one image", bench.ms(make))
            four = partial(gpu_views.grey_views, [picture] * 4, [drawing()] * 4, preprocess)
            bench.note("views", f"{name}: four images, each", bench.ms(four) / 4)
            bench.profiled[f"views, {name}"] = make
            apart = (make()[0].cpu().float() - grey_levels(image, drawing(), preprocess)).abs().flatten(1).mean(1)
            bench.note("views", f"{name}: mean difference from Pillow", float(apart.mean()), "grey levels")
            bench.note("views", f"{name}: largest mean difference of a view", float(apart.max()), "levels")
        by_pillow = partial(pillow_views, image, bench.views, preprocess, **options)
        bench.note("views", f"{name}: Pillow, one core", bench.ms(by_pillow, 2, 0))


def decode(bench: Bench) -> None:
    """Reading JPEG files: Pillow in one thread, and in as many threads as a stream uses."""
    files = bench.photographs()
    bench.note("decode", "bytes of a file", os.path.getsize(files[0]), "")
    for label, each in (("one thread", map), (f"{READERS} threads", workers(READERS).map)):
        taken = bench.ms(lambda each=each: list(each(read_image, files)), 3, 1)
        bench.note("decode", f"Pillow, {label}", taken / len(files))


def whole(bench: Bench, name: str = "ViT-B-16", stage: str = "whole") -> None:
    """From a decoded image, or a file, to a prediction: a stream of images, and one at a time."""
    plain = bench.encoder(name)
    task, files = bench.task(plain), bench.photographs()
    decoded = [read_image(file) for file in files]
    captured, grey = Compiled(plain, bench.views), bench.grey(plain, bench.views)
    alone = bench.ms(partial(captured.encode, grey))
    bench.note(stage, f"{name}, encoder alone", alone)
    for kind in ("crops", "AugMix") if stage == "whole" else ("crops",):
        agreement(bench, stage, f"{name}, {kind}", plain, decoded[:2], kind == "AugMix")
        session = tt.Session(task, "dpe", encoder=plain, views=bench.views, augmix=kind == "AugMix")
        session.state = full_queues(session.method, task)
        for label, sources in {"decoded": decoded, "files": files}.items():
            if label == "decoded" or stage == "whole":
                each = statistics.median(paced(bench, session, sources) for _ in range(3))
                bench.note(stage, f"{name}, {kind}, {label}, a stream, each", each)
                bench.note(stage, f"{name}, {kind}, {label}, over encoder alone", each / alone, "x")
        turn = cycle(decoded)
        single = bench.ms(lambda session=session, turn=turn: session.step(next(turn)), 10)
        bench.note(stage, f"{name}, {kind}, decoded, one image by itself", single)


def paced(bench: Bench, session: tt.Session, sources: list[Any]) -> float:
    """Milliseconds between two answers, after the first ones."""
    answers = session.run(islice(cycle(sources), bench.images))
    times = [time.perf_counter() for _ in answers][bench.first :]
    return 1000 * (times[-1] - times[0]) / (len(times) - 1)


def full_queues(method: Any, task: Task) -> Any:
    """A state with full queues, of features near their class."""
    state = method.init(task)
    keys = ops.unit(task.text[:, None] + 0.05 * torch.randn_like(state.queue.keys))
    cost = torch.full_like(state.queue.cost, 1e-3)
    return state._replace(queue=state.queue._replace(keys=keys, cost=cost), visual=keys.mean(1))


def agreement(bench: Bench, stage: str, kind: str, plain: Any, images: list[Any], augmix: bool) -> None:
    """The cosine of a stream's features to those of Pillow and the plain encoder."""
    ours = [entry.features for entry in stream(plain, images, ViewPlan(bench.views, augmix))]
    theirs = [
        plain.encode_images(pillow_views(image, bench.views, plain.preprocess, seed=0, index=index, augmix=augmix))
        for index, image in enumerate(images)
    ]
    cosine = (torch.stack([rows for rows in ours if rows is not None]) * torch.stack(theirs)).sum(-1)
    bench.note(stage, f"{kind}: least cosine with the plain features", float(cosine.min()), "")


def rn50(bench: Bench) -> None:
    encoder(bench, "RN50", "rn50")
    whole(bench, "RN50", "rn50")


def released(bench: Bench) -> None:
    """The released loop on the same views: autograd through the encoder, lists of queues, loops over classes."""
    plain = random_encoder("tiny" if bench.quick else "ViT-B-16", bench.device)
    make = partial(pillow_views, photograph(0), bench.views, plain.preprocess, seed=0, index=0)
    loop = ReleasedLoop(plain.model, bench.task(plain).text)
    loop.fill()
    pixels = make().to(bench.device)
    bench.note("released", "views to prediction", bench.ms(lambda: loop.step(pixels), 5))
    bench.note("released", "crops by Pillow, one core", bench.ms(make, 2, 0))
    bench.note("released", "AugMix by Pillow, one core", bench.ms(partial(make, augmix=True), 2, 0))


def commands(bench: Bench) -> None:
    """Whole commands, each in its own process. --quick uses the machine's own caches, as compiling takes long."""
    sizes = {"images": 56, "stored": 20} if bench.quick else {"images": 600, "stored": 5000}
    model = "tiny" if bench.quick else "ViT-B-16"
    options = argparse.Namespace(
        device=str(bench.device), model=model, views=bench.views, classes=bench.classes, cores=0, **sizes
    )
    typed = Commands(bench.folder / "commands", options)
    calls: list[Callable[[], None]] = [partial(typed.run, "crops"), typed.replay]
    if bench.quick:
        typed.environment = dict(os.environ)
    else:
        calls.insert(0, partial(typed.run, "crops, caches cold"))
        calls += [partial(typed.run, "AugMix", "--augmix"), typed.encode, typed.eval]
    bench.report["results"]["commands"] = typed.results
    for number, call in enumerate(calls):
        try:
            call()
        except (RuntimeError, ValueError):
            bench.report["errors"][f"commands, {number}"] = traceback.format_exc()
            traceback.print_exc()
        bench.save()


def kernels(bench: Bench) -> None:
    """The time of each kernel of a call, from the profiler, in microseconds; runs last, as profilers may crash."""
    for name, call in bench.profiled.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            bench.wait()
        found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        rows = [(event.key[:90], event.count, round(event.self_device_time_total, 1)) for event in found]
        bench.report["results"].setdefault("kernels", {})[name] = rows
        print(f"  kernels of {name}: {sum(row[1] for row in rows)} launches, {sum(row[2] for row in rows):.0f} us")
        for key, count, total in rows[:14]:
            print(f"    {total:8.1f} us {count:4d} x {key}")


STAGES: dict[str, Callable[[Bench], None]] = {
    stage.__name__: stage for stage in (step, encoder, float8, views, decode, whole, rn50, released, commands, kernels)
}


# targets for one H200 with 1000 classes and 64 views: stage, entry, maximum
TARGETS = (
    ("step", "dpe, own kernels, captured", 0.1),
    ("encoder", "ViT-B-16, 64 views", 5.6),
    ("rn50", "RN50, crops, decoded, a stream, each", 4.0),
    ("commands", "run, crops", 8.0),
    ("commands", "run, AugMix", 8.5),
    ("commands", "run, crops: seconds to the first answer", 15.0),
    ("commands", "run, crops, caches cold: seconds to the first answer", 45.0),
    ("commands", "encode", 7.5),
    ("commands", "eval", 7.5),
    ("commands", "replay, dpe", 0.3),
)


def compare(bench: Bench) -> None:
    """Print the measurements beside their targets; last, so that a truncated log still shows them."""
    results = bench.report["results"]
    rows = [(name, results[stage][name], most) for stage, name, most in TARGETS if name in results.get(stage, {})]
    bench.report["targets"] = [{"entry": name, "measured": value, "at most": most} for name, value, most in rows]
    for name, value, most in rows:
        print(f"  {'reached' if value <= most else 'MISSED':>7} {value:9.3f} of {most:g}  {name}")


def chart(report: dict[str, Any]) -> str:
    """The measured milliseconds as an SVG bar chart."""
    bars = [
        (f"{stage}: {name}", value)
        for stage, entries in report["results"].items()
        if stage not in ("decode", "kernels")
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
    title = f"Milliseconds per image, {report['machine']['device']}; logarithmic scale"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="940" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="20" y="22" font-size="14">{title}</text>'
        + "".join(lines)
        + "</svg>\n"
    )


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every stage")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--methods", default="dpe", help="methods whose steps are timed, such as dpe,tda,tps,dmn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=250, help=f"length of the streams, {FIRST} of them not timed")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.stages.split(",")) - set(STAGES))
    if unknown:
        parser.error(f"unknown stages {', '.join(unknown)}; available: {', '.join(STAGES)}")
    if options.images < FIRST + 2:
        parser.error(f"--images {options.images}: at least {FIRST + 2} are needed")
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
