"""An estimate as tables for a terminal or a page, and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from testtime.cluster.figures import MEASURED, stages
from testtime.cluster.planning import Estimate, Load, busy
from testtime.cluster.simulation import SLOWDOWN, Spread
from testtime.experiments.tables import Sheet, duration

UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    """Bytes in a unit that is easy to read.

    >>> size(98_304_000_000_000), size(51157), size(12)
    ('98.3 TB', '51.2 kB', '12 bytes')
    """
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def title(found: Estimate, model: str, gpu: str) -> str:
    """What is planned, in a line."""
    cluster, job = found.cluster, found.job
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes != 1)} of {cluster.cores} cores"
    machines = f"{cluster.gpus} x {gpu} in {nodes}" if cluster.gpus else nodes
    mixed = " with AugMix" if job.augmix else ""
    return f"{job.images:,} images x {job.views} views{mixed}, {model}, {machines}"


def sheets(
    found: Estimate, changed: Sequence[tuple[str, Estimate]], spread: Spread | None, stragglers: float
) -> list[Sheet]:
    """The cost, the stages and what would change."""
    return [Sheet("Cost", ["what", ""], _cost(found, spread, stragglers)), _stages(found), _changes(found, changed)]


def _cost(found: Estimate, spread: Spread | None, stragglers: float) -> list[list[str]]:
    job, cluster = found.job, found.cluster
    rows = [["duration", duration(found.seconds)]]
    if spread is not None:
        slow = f", {100 * stragglers:g} % of workers {SLOWDOWN:g}x slower" if stragglers else ""
        rows.append([f"p50 of {spread.runs} simulated runs{slow}", duration(spread.p50)])
        rows.append(["p95", duration(spread.p95)])
    rows += [
        ["GPU-hours", _number(found.gpu_hours)] if cluster.gpus else ["core-hours", _number(found.core_hours)],
        ["images per second", _number(1 / found.pace)],
        ["stage that binds", f"{found.binding.stage} ({found.binding.resource})"],
        ["read", f"{size(job.images * job.image_bytes)}, {found.read_gbps:.3g} Gbit/s"],
        [f"features, {job.dtype}", f"{size(job.images * job.feature_bytes)}, {found.write_gbps:.3g} Gbit/s"],
        ["shards", f"{-(-job.images // job.shard_images):,} of {size(job.shard_images * job.feature_bytes)}"],
    ]
    if cluster.gpus:
        rows.append(["memory of a GPU, about", size(found.gpu_bytes)])
    rows += [
        ["memory of a node's workers, about", size(cluster.workers / cluster.nodes * found.worker_bytes)],
        ["memory of the command itself, about", size(found.command_bytes)],
        ["failures expected, tasks repeated", f"{found.failures:.2g}, {found.repeated_tasks:.2g}"],
        ["their cost", f"{duration(found.seconds - found.quiet_seconds)}, {_hours(found)}"],
        ["restarts of the command expected", f"{found.restarts:.2g}"],
    ]
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _hours(found: Estimate) -> str:
    return f"{found.lost_seconds / 3600:.2g} {'GPU' if found.cluster.gpus else 'node'}-hours"


def _stages(found: Estimate) -> Sheet:
    """Each stage that takes time, what it uses, and how busy it keeps that."""
    rows = []
    for load in found.loads:
        if load.seconds:
            each = 1000 * load.seconds * load.units
            share = f"{100 * load.seconds / found.pace:.3g} %"
            rows.append([load.stage, load.resource, f"{each:.3g} ms", share, _kind(found, load)])
    return Sheet("Stages, per image", ["stage", "on", "of one", "busy", "figure"], rows)


def _kind(found: Estimate, load: Load) -> str:
    return "given" if load.resource.startswith("storage") else found.figures.kind(load.stage)


def _changes(found: Estimate, changed: Sequence[tuple[str, Estimate]]) -> Sheet:
    rows = [
        [
            label,
            duration(each.seconds),
            _number(each.gpu_hours if each.cluster.gpus else each.core_hours),
            size(each.job.images * each.job.feature_bytes),
            each.binding.stage,
        ]
        for label, each in [("as planned", found), *changed]
    ]
    hours = "GPU-hours" if found.cluster.gpus else "core-hours"
    return Sheet("What would change", ["", "duration", hours, "features", "binds"], rows)


def remarks(found: Estimate, here: bool) -> list[str]:
    """Where the figures come from, and what they leave out."""
    lines = [*found.figures.notes]
    if here:
        lines.append("measured on this machine just now; what else runs on it counts")
    else:
        sources = stages()["sources"].values()
        dates, where = sorted({each["date"] for each in sources}), ", ".join(each["file"] for each in sources)
        lines.append(f"figures marked {MEASURED}: one NVIDIA H200, 16 cores, {dates[0]} to {dates[-1]}; {where}")
    if found.cluster.read == float("inf"):
        lines.append("the storage is assumed to keep up; --read-gbps and --write-gbps bound it")
    if not here and found.job.views < 16:
        lines.append("launches of fewer than 64 views are less efficient, which is not in these figures")
    return lines


def record(
    found: Estimate,
    changed: Sequence[tuple[str, Estimate]],
    spread: Spread | None,
    about: Mapping[str, Any],
    here: bool,
) -> dict[str, Any]:
    """The estimate as JSON data; what has no bound is null."""
    return _finite(
        {
            **about,
            "job": asdict(found.job),
            "cluster": asdict(found.cluster),
            "figures": asdict(found.figures) | {"kinds": dict(found.figures.kinds)},
            "cost": costs(found),
            "stages": [load._asdict() | {"figure": _kind(found, load)} for load in found.loads],
            "busy": {name: seconds / found.pace for name, seconds in busy(found.loads).items()},
            "simulated": None if spread is None else spread._asdict(),
            "changes": {label: costs(each) for label, each in changed},
            "notes": remarks(found, here),
        }
    )


def costs(found: Estimate) -> dict[str, Any]:
    """The numbers of an estimate."""
    job = found.job
    return {
        "seconds": found.seconds,
        "quiet_seconds": found.quiet_seconds,
        "gpu_hours": found.gpu_hours,
        "core_hours": found.core_hours,
        "images_per_second": 1 / found.pace,
        "binds": found.binding.stage,
        "resource": found.binding.resource,
        "read_bytes": job.images * job.image_bytes,
        "read_gbps": found.read_gbps,
        "feature_bytes": job.images * job.feature_bytes,
        "write_gbps": found.write_gbps,
        "gpu_bytes": found.gpu_bytes,
        "node_bytes": found.cluster.workers / found.cluster.nodes * found.worker_bytes,
        "command_bytes": found.command_bytes,
        "failures": found.failures,
        "repeated_tasks": found.repeated_tasks,
        "restarts": found.restarts,
        "lost_worker_seconds": found.lost_seconds,
    }


def _finite(value: Any) -> Any:
    """Data with null for infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value == float("inf") else value
