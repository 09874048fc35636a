"""What one image costs each stage: measured figures, with where each comes from, and how others are scaled from them.

`stages.json` holds every figure with its machine, command, date and file. A model that was not measured is scaled by
its floating point operations, at the utilisation of the measured model most like it; a GPU that was not measured by
its published peak alone, which is an estimate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from testtime.cluster.architectures import Tower, tower
from testtime.errors import InputError
from testtime.registry import split_precision, unknown

LAUNCH = 64  # views that the figures of `stages.json` are for
MEASURED, SCALED, ESTIMATE = "measured", "scaled", "estimate"


@dataclass(frozen=True)
class Figures:
    """Seconds of one core, one GPU or one worker's Python thread; the last four are per view.

    Views are made and encoded by GPUs if `on_gpu`, else by CPU cores.
    """

    image_bytes: float  # of the images that `read` and `decode` were measured on
    read: float  # core seconds per image, waiting for its bytes
    decode: float  # core seconds per image
    write: float  # bytes per second that one worker writes
    startup: float  # seconds until a worker encodes
    on_gpu: bool
    draw: float  # the worker's Python thread: random parameters
    views: float
    encode: float
    weights: float = 0.0  # bytes that a worker's model takes
    activations: float = 0.0  # bytes per view in flight
    kinds: tuple[tuple[str, str], ...] = ()  # (stage, how its figure was found)
    notes: tuple[str, ...] = ()

    def kind(self, stage: str) -> str:
        """How a stage's figure was found: measured, scaled or estimate."""
        return dict(self.kinds).get(stage, MEASURED)


@cache
def stages() -> dict[str, Any]:
    """The data file, parsed."""
    return json.loads(files("testtime.cluster").joinpath("stages.json").read_text(encoding="utf-8"))


def gpus() -> dict[str, dict[str, float]]:
    """Published peaks of the GPUs that can be planned with, by name."""
    return {name: peak for name, peak in stages()["gpus"].items() if name != "comment"}


def figure(name: str) -> float:
    """One measured figure, in seconds or bytes."""
    found = stages()["figures"][name]
    return found["value"] / 1000 if found["unit"] == "ms" else found["value"]


def utilisation(model: str) -> float:
    """The share of the measured GPU's published peak that encoding with a measured model reaches."""
    peak = gpus()[stages()["measured_gpu"]]["tflops"] * 1e12
    return LAUNCH * tower(model).flops / figure(f"encode, {model}") / peak


def published(model: str, gpu: str, augmix: bool = False) -> Figures:
    """The figures of a model on a GPU, from the data file."""
    if gpu not in gpus():
        raise unknown("GPU", gpu, gpus())
    if (precision := split_precision(model)[1]) not in ("", "float16"):
        raise InputError(
            f"--model {model}: the figures are of float16; leave out @{precision}, or measure with --here."
        )
    sizes, here, notes = tower(model), stages()["measured_gpu"], []
    encode, kind, note = _encode(sizes)
    notes += [note] if note else []
    faster, wider = (gpus()[gpu][key] / gpus()[here][key] for key in ("tflops", "bandwidth"))
    if gpu != here:
        notes.append(
            f"estimate: {gpu} was not measured; its speed is that of {here} scaled by the published peaks "
            f"({faster:.2g}x compute for encoding, {wider:.2g}x memory bandwidth for views)"
        )
    mixed = ", AugMix" if augmix else ""
    views_kind, kind = (MEASURED, kind) if gpu == here else (ESTIMATE, ESTIMATE)
    if 2 * sizes.weights > 1e9 * gpus()[gpu]["memory"]:
        raise InputError(f"--gpu {gpu}: its {gpus()[gpu]['memory']:g} GB do not hold {model} in half precision.")
    return Figures(
        image_bytes=figure("image_bytes"),
        read=0.0,
        decode=4 * figure("decode"),  # four threads
        write=figure("write"),
        startup=figure("startup"),
        on_gpu=True,
        draw=figure("draw" + mixed) / LAUNCH,
        views=figure("views" + mixed) / LAUNCH / wider,
        encode=encode / faster,
        weights=2 * sizes.weights,
        activations=2 * sizes.activations,
        kinds=(("views", views_kind), ("encode", kind)),
        notes=tuple(notes),
    )


def _encode(sizes: Tower) -> tuple[float, str, str]:
    """Seconds of the measured GPU per view; how they were found; a remark if they were not measured."""
    measured = [name.removeprefix("encode, ") for name in stages()["figures"] if name.startswith("encode, ")]
    same = [name for name in measured if sizes.model in (name, f"{name}-quickgelu")]  # another activation, equal work
    if same:
        return figure(f"encode, {same[0]}") / LAUNCH, MEASURED, ""
    alike = [name for name in measured if name.startswith("RN") == sizes.model.startswith("RN")]
    nearest = min(alike, key=lambda name: abs(tower(name).flops - sizes.flops))
    ratio = sizes.flops / tower(nearest).flops
    remark = (
        f"encode is scaled from {nearest}: {sizes.flops / 1e9:.0f} GFLOP per view, {ratio:.3g} times as many, "
        f"at its utilisation of {100 * utilisation(nearest):.0f} %"
    )
    return ratio * figure(f"encode, {nearest}") / LAUNCH, SCALED, remark
