"""How long encoding takes on a cluster, and what it needs: a closed form over the stages.

    read -> decode -> views -> encode -> write

Stages work at the same time, on resources: the storage, the CPU cores, each worker's Python thread, the GPUs, and the
one thread that writes, on the machine of the command, to which all features return. A resource is busy for the sum of
its stages, and the busiest one sets the pace. Workers take tasks of some images; tasks are whole, so the last ones may
leave workers idle. Start-up comes before, and the last write after. Failures cost the tasks in progress, and the time
until a node and its workers are back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from testtime.cluster.figures import ESTIMATE, Figures, published, stages
from testtime.errors import InputError

BYTES = {"float16": 2, "float32": 4}
CORES_PER_GPU = 16  # as on the machine that was measured
GPUS_PER_NODE = 8
HOST_BYTES = 3e9  # of a worker: Python, torch, CUDA and 1 GiB of decoded images (`stream.DECODED`)
GBIT = 1e9 / 8
TASK_VIEWS, TASK_STEP = 1024, 16  # a GPU's worker takes images of about so many views together; any, so many at least


@dataclass(frozen=True)
class Job:
    """What is to be encoded."""

    images: int
    views: int
    dim: int  # D
    augmix: bool = False
    dtype: str = "float16"  # of the stored features
    image_bytes: float = 51157.0  # of one file
    shard: int = 1000  # images per shard

    @property
    def feature_bytes(self) -> int:
        """Bytes of one image's features."""
        return self.views * self.dim * BYTES[self.dtype]

    @property
    def shard_images(self) -> int:
        return min(self.shard, self.images)


@dataclass(frozen=True)
class Cluster:
    """The machines, and how often they fail."""

    nodes: int
    cores: int  # of each node
    gpus: int = 0  # in all; without any, each node has one worker on its cores
    read: float = math.inf  # bytes per second that the storage delivers to all nodes together
    write: float = math.inf  # bytes per second that it takes
    node_mtbf: float = math.inf  # hours between failures of one node
    worker_mtbf: float = math.inf  # hours between failures of one worker, in which its node survives
    repair: float = 600.0  # seconds until a failed node is replaced

    @property
    def workers(self) -> int:
        return self.gpus or self.nodes

    def task_images(self, job: Job) -> int:
        """Images that a worker takes together, and that are repeated if it dies."""
        together = (TASK_VIEWS // job.views if self.gpus else self.cores) // TASK_STEP
        return min(TASK_STEP * max(1, together), job.images)


class Load(NamedTuple):
    """The part of a resource that a stage takes."""

    stage: str
    resource: str
    units: float  # how many there are of the resource: cores, GPUs
    seconds: float  # that all of it together is busy for one image


@dataclass(frozen=True)
class Estimate:
    """The cost of a job on a cluster."""

    job: Job
    cluster: Cluster
    figures: Figures
    loads: tuple[Load, ...]
    seconds: float  # in all
    quiet_seconds: float  # if nothing fails
    failures: float  # expected number, of nodes and workers
    repeated_tasks: float
    restarts: float  # expected failures of the command's own machine, after which the command is run again
    lost_seconds: float  # of one worker, summed over the failures

    @property
    def pace(self) -> float:
        """Seconds per image of the resource that sets the pace."""
        return max(busy(self.loads).values())

    @property
    def binding(self) -> Load:
        """The largest stage of the resource that sets the pace."""
        resources = busy(self.loads)
        slowest = max(resources, key=lambda name: resources[name])
        return max((load for load in self.loads if load.resource == slowest), key=lambda load: load.seconds)

    @property
    def gpu_hours(self) -> float:
        return self.cluster.gpus * self.seconds / 3600

    @property
    def core_hours(self) -> float:
        return self.cluster.nodes * self.cluster.cores * self.seconds / 3600

    @property
    def read_gbps(self) -> float:
        """Gbit/s that the storage must deliver while the job runs."""
        return self.job.image_bytes / self.pace / GBIT

    @property
    def write_gbps(self) -> float:
        return self.job.feature_bytes / self.pace / GBIT

    @property
    def worker_bytes(self) -> float:
        """Host memory of a worker."""
        return HOST_BYTES + (0.0 if self.figures.on_gpu else self.figures.weights)

    @property
    def command_bytes(self) -> float:
        """Memory of the command's own process: two shards of features, one of them being written."""
        return HOST_BYTES + 2 * self.job.shard_images * self.job.feature_bytes

    @property
    def gpu_bytes(self) -> float:
        """GPU memory of a worker: the model, and the activations of one launch."""
        launch = max(64, self.job.views)
        return self.figures.weights + launch * self.figures.activations if self.figures.on_gpu else 0.0


def node_mtbf() -> float:
    """Hours between failures of one node, as published."""
    return float(stages()["failures"]["node_mtbf_hours"])


def loads(job: Job, cluster: Cluster, figures: Figures) -> tuple[Load, ...]:
    """What one image costs each stage, as seconds that the whole of a resource is busy."""
    cores, workers, size = cluster.nodes * cluster.cores, cluster.workers, job.image_bytes / figures.image_bytes
    made_by, units = ("GPUs", cluster.gpus) if figures.on_gpu else ("CPU cores", cores)
    return (
        Load("read", "storage", 1, job.image_bytes / cluster.read),
        Load("read", "CPU cores", cores, figures.read * size / cores),
        Load("decode", "CPU cores", cores, figures.decode * size / cores),
        Load("views", "worker threads", workers, figures.draw * job.views / workers),
        Load("views", made_by, units, figures.views * job.views / units),
        Load("encode", made_by, units, figures.encode * job.views / units),
        Load("write", "writer thread", 1, job.feature_bytes / figures.write),
        Load("write", "storage, writing", 1, job.feature_bytes / cluster.write),
    )


def busy(found: tuple[Load, ...]) -> dict[str, float]:
    """Seconds per image that each resource is busy."""
    total: dict[str, float] = {}
    for load in found:
        total[load.resource] = total.get(load.resource, 0.0) + load.seconds
    return total


def estimate(job: Job, cluster: Cluster, figures: Figures) -> Estimate:
    """The cost of a job, by the closed form."""
    found = loads(job, cluster, figures)
    resources, workers, shared = busy(found), cluster.workers, ("storage", "writ")
    together = cluster.task_images(job)
    tasks = math.ceil(job.images / together)
    # the stages of a worker for one task: those of the resources that are divided among the workers
    pace = workers * max(resources[name] for name in resources if not name.startswith(shared))
    task = together * pace
    writing = job.shard_images * max(job.feature_bytes / figures.write, found[-1].seconds)
    most = min(math.ceil(tasks / workers) * together, job.images)  # images of the worker that has the most
    running = max(job.images * max(resources.values()), most * pace)
    quiet = figures.startup + running + writing
    lost_by_worker = task / 2 + figures.startup  # half a task, on average
    lost_by_node = workers / cluster.nodes * (lost_by_worker + cluster.repair)
    node_rate, worker_rate = cluster.nodes / cluster.node_mtbf / 3600, workers / cluster.worker_mtbf / 3600
    share = (node_rate * lost_by_node + worker_rate * lost_by_worker) / workers
    if share >= 1:
        raise InputError(
            f"Failures cost more time than there is: one comes every {1 / (node_rate + worker_rate):.0f} s, and a node "
            f"is back after {cluster.repair + figures.startup:.0f} s. Plan with machines that fail less often."
        )
    seconds = quiet / (1 - share)
    nodes, processes = node_rate * seconds, worker_rate * seconds
    return Estimate(
        job, cluster, figures, found, seconds, quiet, nodes + processes,
        repeated_tasks=nodes * workers / cluster.nodes + processes,
        restarts=seconds / 3600 / cluster.node_mtbf,
        lost_seconds=nodes * lost_by_node + processes * lost_by_worker,
    )  # fmt: skip


def changes(found: Estimate, model: str, gpu: str | None) -> Iterator[tuple[str, Estimate]]:
    """What would change with fewer views, another precision, more machines or, from `gpu` of the table, others."""
    job, cluster, figures = found.job, found.cluster, found.figures
    for views in sorted({job.views // 2, job.views // 4} - {0}, reverse=True):
        yield f"{views} views", estimate(replace(job, views=views), cluster, figures)
    other = "float32" if job.dtype == "float16" else "float16"
    yield f"stored as {other}", estimate(replace(job, dtype=other), cluster, figures)
    if cluster.gpus:
        more = replace(cluster, gpus=2 * cluster.gpus, nodes=2 * cluster.nodes)
        yield f"{more.gpus} GPUs, {more.nodes} nodes", estimate(job, more, figures)
    else:
        more = replace(cluster, nodes=2 * cluster.nodes)
        yield f"{more.nodes} nodes", estimate(job, more, figures)
    yield f"{2 * cluster.cores} cores per node", estimate(job, replace(cluster, cores=2 * cluster.cores), figures)
    for name in ("h200", "a100", "l4") if gpu else ():
        if name != gpu:
            others = published(model, name, job.augmix)
            mark = " (estimate)" if others.kind("encode") == ESTIMATE else ""
            yield f"{name.upper()}{mark}", estimate(job, cluster, others)
