"""`testtime plan`: how long encoding takes on a cluster, and what it needs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testtime.cli import options
from testtime.cli.options import flag
from testtime.cli.plans import print_table
from testtime.cli.terminal import note, waiting
from testtime.errors import InputError

if TYPE_CHECKING:
    from testtime.cluster.figures import Figures
    from testtime.types import ViewPlan

app = typer.Typer()
SAMPLE = 64  # files of --sample that are read


def _gpus() -> list[str]:
    from testtime.cluster.figures import gpus

    return list(gpus())


@app.command(epilog="Example:  testtime plan --images 1e9 --model ViT-L-14 --views 64 --gpus 64 --gpu h200")
def plan(
    images: Annotated[str, typer.Option("--images", metavar="COUNT", help="How many images: 50000, or 1e9.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME", help="A model of open_clip, such as ViT-L-14; with --here, any encoder."
        ),
    ] = "ViT-B-16",
    views: Annotated[int, typer.Option("--views", help="Views per image.")] = 64,
    augmix: options.AugMix = False,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="Stored precision: float16 or float32.")
    ] = "float16",
    shard: Annotated[int, typer.Option("--shard", help="Images per shard.")] = 1000,
    image_bytes: Annotated[
        float | None,
        typer.Option(
            "--image-bytes", metavar="BYTES", help="Mean size of a file; decoding takes as much longer as it is larger."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs in all.", show_default="1")] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="Which: h200, a100, l4 ...", autocompletion=_gpus)
    ] = "h200",
    nodes: Annotated[int | None, typer.Option("--nodes", help="Machines.", show_default="one for 8 GPUs")] = None,
    cores: Annotated[
        int | None, typer.Option("--cpus-per-node", help="CPU cores of each.", show_default="16 for each GPU")
    ] = None,
    read_gbps: Annotated[
        float | None,
        typer.Option("--read-gbps", metavar="X", help="Gbit/s that the storage delivers to all nodes together."),
    ] = None,
    write_gbps: Annotated[
        float | None, typer.Option("--write-gbps", metavar="X", help="Gbit/s that the storage takes.")
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            "--mtbf", metavar="HOURS", help="Mean time between failures of a node.", show_default="6334, published"
        ),
    ] = None,
    worker_mtbf: Annotated[
        float | None, typer.Option("--worker-mtbf", metavar="HOURS", help="The same of a worker's process alone.")
    ] = None,
    repair: Annotated[
        float, typer.Option("--repair", metavar="MINUTES", help="Until a failed node is replaced.")
    ] = 10.0,
    simulate: Annotated[bool, flag("--simulate", help="Simulate the job too, for the spread of its duration.")] = False,
    stragglers: Annotated[
        float, typer.Option("--stragglers", metavar="PERCENT", help="With --simulate: workers at half speed.")
    ] = 5.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the simulation.")] = 0,
    here: Annotated[
        bool, flag("--here", help="Measure the stages on this machine first, and plan with nodes like it.")
    ] = False,
    sample: Annotated[
        Path | None, typer.Option("--sample", metavar="FOLDER", help="With --here: images to measure with.")
    ] = None,
    device: options.Device = "auto",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="X", help="With --here: how long to measure the stages.")
    ] = 20.0,
    as_markdown: Annotated[bool, flag("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: Annotated[bool, flag("--json", help="Print everything as JSON on standard output.")] = False,
) -> None:
    """Plan the encoding of many images: hours, GPU-hours, storage, network, memory, failures; and which stage binds.

    Figures were measured on one H200, and come with their source; other models are scaled by their operations, other
    GPUs by their published peak, and the tables say so. --here measures this machine instead.
    """
    from testtime.cluster import planning
    from testtime.cluster.architectures import tower
    from testtime.cluster.figures import figure, published
    from testtime.cluster.planning_tables import record, remarks, sheets, title
    from testtime.cluster.simulation import spread
    from testtime.encoding.encode import DTYPES
    from testtime.experiments.tables import markdown
    from testtime.machine.devices import find_device
    from testtime.registry import unknown
    from testtime.types import ViewPlan

    count = _count(images)
    kinds = ViewPlan(views, augmix)  # checks them
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    positive = {"--shard": shard, "--nodes": nodes, "--cpus-per-node": cores, "--image-bytes": image_bytes,
                "--read-gbps": read_gbps, "--write-gbps": write_gbps, "--mtbf": mtbf, "--worker-mtbf": worker_mtbf,
                "--gpus": gpus, "--seconds": seconds}  # fmt: skip
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} {value}: must be more than 0.")
    if not (0 <= stragglers <= 100 and 0 <= repair < math.inf):
        raise InputError(f"--stragglers {stragglers}, --repair {repair}: from 0 to 100 percent, and 0 minutes or more.")
    if sample is not None and not here:
        raise InputError("--sample needs --here: without it, nothing is measured.")
    if as_json and as_markdown:
        raise InputError("--json and --markdown: give one of the two.")
    if here and gpus and find_device(device).type == "cpu":
        raise InputError(f"--gpus {gpus} with --here: this machine encodes on its CPU; leave it out.")
    if here:
        figures, dim, threads = _measured(model, kinds, dtype, device, sample, seconds)
        gpu = "GPU like this" if figures.on_gpu else ""
        machines = nodes or 1
        found_gpus, found_cores = (gpus or machines) if figures.on_gpu else 0, cores or threads
    else:
        figures, dim, found_gpus = published(model, gpu.lower(), augmix), tower(model).dim, gpus or 1
        machines = nodes or math.ceil(found_gpus / planning.GPUS_PER_NODE)
        found_cores = cores or math.ceil(found_gpus / machines) * planning.CORES_PER_GPU
    if found_gpus and machines > found_gpus:
        raise InputError(f"--nodes {machines} for {found_gpus} GPUs: a node without a GPU has no worker; give fewer.")
    job = planning.Job(
        count, views, dim, augmix, dtype, image_bytes or (figures.image_bytes if here else figure("image_bytes")), shard
    )
    cluster = planning.Cluster(
        machines, found_cores, found_gpus,
        read=planning.GBIT * (read_gbps or math.inf), write=planning.GBIT * (write_gbps or math.inf),
        node_mtbf=mtbf or planning.node_mtbf(), worker_mtbf=worker_mtbf or math.inf, repair=60 * repair,
    )  # fmt: skip
    found = planning.estimate(job, cluster, figures)
    changed = list(planning.changes(found, model, None if here else gpu.lower()))
    share = stragglers / 100
    outcome = spread(job, cluster, figures, seed=seed, stragglers=share) if simulate else None
    name = title(found, model, gpu if here else gpu.upper())
    tables, below = sheets(found, changed, outcome, share), remarks(found, here)
    if as_json:
        print(json.dumps(record(found, changed, outcome, {"plan": name, "model": model}, here)))
    elif as_markdown:
        print(markdown(name, tables, below), end="")
    else:
        note(name)
        for sheet in tables:
            print_table(sheet.title, sheet.header, sheet.rows)
        for line in below:
            note(f"- {line}")


def _count(text: str) -> int:
    """A number of images, also as 1e9."""
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = math.nan
    if not (1 <= value <= 1e15 and value == int(value)):
        raise InputError(f"--images {text}: must be a whole number from 1 on, such as 50000 or 1e9.")
    return int(value)


def _measured(
    model: str, plan: ViewPlan, dtype: str, device: str, sample: Path | None, seconds: float
) -> tuple[Figures, int, int]:
    """This machine's figures, D, and its threads."""
    from testtime.cluster.measuring import measure
    from testtime.images.reading import find_images

    paths = find_images(str(sample)) if sample else []
    paths = paths[:: math.ceil(len(paths) / SAMPLE)] if paths else []  # of all classes
    with waiting(f"measuring {model} on this machine"):
        figures, encoder, threads = measure(model, plan, dtype, device, paths, seconds)
    return figures, encoder.dim, threads
