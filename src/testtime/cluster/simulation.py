"""A discrete-event simulation of a job: it checks the closed form, and gives the spread of the duration.

Workers take blocks of tasks from one list. Each stage of a worker is a process: blocks are read from the storage
(shared, first come, first served); prepared, that is, decoded by the worker's share of the cores while views are drawn;
and encoded, with their views made. Their features go to the one thread that writes, and to the storage. Queues between
stages are bounded: a stage that is done waits until the next one takes its block. Some workers are slow. When a worker
or a node fails, finished tasks are kept and the rest of its blocks goes back to the list; it returns after its repair
and start-up. The run ends when every image is written.

Randomness comes from the seed alone. Blocks hold many tasks at first and fewer towards the end, down to one, so that a
run of any size takes a moment and its end is as fine as the real one.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from statistics import mean, quantiles
from typing import Any, NamedTuple, TypeAlias

from testtime.cluster.figures import Figures
from testtime.cluster.planning import Cluster, Job, busy, loads

QUEUE = 0  # blocks that wait between two stages of a worker, beside the one in each
BLOCKS = 16  # that each worker could take of what is left; more take longer to simulate and change little
SLOWDOWN = 2.0  # a straggler's time over that of the others
RUNS = 20

# a process yields seconds to wait, a queue to take from, or a queue and what to put into it
Process: TypeAlias = Generator[Any, Any, None]


class Outcome(NamedTuple):
    """One simulated run."""

    seconds: float
    failures: int
    repeated_images: float


class Spread(NamedTuple):
    """The outcomes of many runs; durations in seconds."""

    runs: int
    p50: float
    p95: float
    failures: float  # mean of a run
    repeated_images: float


def simulate(job: Job, cluster: Cluster, figures: Figures, *, seed: int = 0, stragglers: float = 0.0) -> Outcome:
    """One run; `stragglers` is the share of workers that take `SLOWDOWN` times as long."""
    return _Run(job, cluster, figures, random.Random(seed), stragglers).finish()


def spread(
    job: Job, cluster: Cluster, figures: Figures, *, seed: int = 0, stragglers: float = 0.0, runs: int = RUNS
) -> Spread:
    """The spread of many runs, with seeds from `seed` on."""
    found = [simulate(job, cluster, figures, seed=seed + run, stragglers=stragglers) for run in range(runs)]
    cuts = quantiles([each.seconds for each in found], n=20, method="inclusive")
    failures, repeated = mean(each.failures for each in found), mean(each.repeated_images for each in found)
    return Spread(runs, cuts[9], cuts[18], failures, repeated)


@dataclass(eq=False)
class _Block:
    images: int


@dataclass(eq=False)
class _Queue:
    room: float = QUEUE
    items: deque[_Block] = field(default_factory=deque)
    takers: deque[Process] = field(default_factory=deque)
    givers: deque[tuple[Process, _Block]] = field(default_factory=deque)


@dataclass(eq=False)
class _Server:
    """What all workers share: it serves requests in the order of their arrival."""

    seconds: float  # per image
    free: float = 0.0  # when the last request will be done

    def delay(self, now: float, images: int) -> float:
        self.free = max(now, self.free) + images * self.seconds
        return self.free - now


@dataclass(eq=False)
class _Worker:
    slow: float  # its time over that of the others
    stages: list[Process] = field(default_factory=list)
    held: dict[_Block, float] = field(default_factory=dict)  # its blocks, and when their encoding began


def _blocks(job: Job, cluster: Cluster) -> Iterator[_Block]:
    left, task = job.images, cluster.task_images(job)
    while left:
        images = min(left, task * max(1, left // (BLOCKS * cluster.workers * task)))
        yield _Block(images)
        left -= images


class _Run:
    def __init__(self, job: Job, cluster: Cluster, figures: Figures, noise: random.Random, stragglers: float) -> None:
        self.job, self.cluster, self.figures, self.random = job, cluster, figures, noise
        self.now, self.number, self.failures, self.repeated = 0.0, 0, 0, 0.0
        self.events: list[tuple[float, int, Process, Any]] = []
        self.stopped: set[Process] = set()
        count, found = cluster.workers, busy(loads(job, cluster, figures))
        self.reading, self.writing, self.storing = (
            _Server(found[name]) for name in ("storage", "writer thread", "storage, writing")
        )
        # seconds per image of one worker: its share of the cores, its Python thread, its GPU
        cores, draw, gpu = (count * found.get(name, 0.0) for name in ("CPU cores", "worker threads", "GPUs"))
        self.preparing, self.encoding = (max(cores, draw), gpu) if figures.on_gpu else (0.0, cores)
        slow = [SLOWDOWN if noise.random() < stragglers else 1.0 for _ in range(count)]
        self.nodes = [
            [_Worker(slow[number]) for number in range(count) if number * cluster.nodes // count == node]
            for node in range(cluster.nodes)
        ]
        self.todo, self.left = _Queue(math.inf, deque(_blocks(job, cluster))), job.images

    def finish(self) -> Outcome:
        for node in self.nodes:
            for worker in node:
                self._start(worker, 0.0)
                self._resume(self._failing([worker], self.cluster.worker_mtbf, 0.0))
            self._resume(self._failing(node, self.cluster.node_mtbf, self.cluster.repair))
        while self.left:
            self.now, _, process, value = heapq.heappop(self.events)
            self._resume(process, value)
        return Outcome(self.now, self.failures, self.repeated)

    def _start(self, worker: _Worker, delay: float) -> None:
        worker.stages = [self._boot(worker, delay)]
        self._resume(worker.stages[0])

    # The processes

    def _boot(self, worker: _Worker, delay: float) -> Process:
        """Start a worker's stages."""
        yield delay + self.figures.startup
        read, ready, encoded = _Queue(), _Queue(), _Queue()
        worker.stages = [
            self._read(worker, read),
            self._prepare(worker, read, ready),
            self._encode(worker, ready, encoded),
            self._write(worker, encoded),
        ]
        for process in worker.stages:
            self._resume(process)
        yield math.inf

    def _read(self, worker: _Worker, after: _Queue) -> Process:
        while True:
            block = yield self.todo
            worker.held[block] = math.inf
            yield self.reading.delay(self.now, block.images)
            yield after, block

    def _prepare(self, worker: _Worker, before: _Queue, after: _Queue) -> Process:
        while True:
            block = yield before
            yield block.images * self.preparing * worker.slow
            yield after, block

    def _encode(self, worker: _Worker, before: _Queue, after: _Queue) -> Process:
        while True:
            block = yield before
            worker.held[block] = self.now
            yield block.images * self.encoding * worker.slow
            yield after, block

    def _write(self, worker: _Worker, before: _Queue) -> Process:
        while True:
            block = yield before
            yield self.writing.delay(self.now, block.images)
            yield self.storing.delay(self.now, block.images)
            del worker.held[block]
            self.left -= block.images

    def _failing(self, workers: list[_Worker], hours: float, repair: float) -> Process:
        """Fail again and again, after random times whose mean is `hours`."""
        while True:
            yield self.random.expovariate(1 / (3600 * hours)) if hours < math.inf else math.inf
            self.failures += 1
            for worker in workers:  # all of them, before a block of one is given to another
                self.stopped.update(worker.stages)
            for worker in workers:
                for block, began in worker.held.items():
                    self._return(worker, block, began)
                worker.held.clear()
                self._start(worker, repair)
            yield repair + self.figures.startup

    def _return(self, worker: _Worker, block: _Block, began: float) -> None:
        """Put what is left of a block back on the list; its finished tasks are kept."""
        done = min(1.0, max(0.0, self.now - began) / (block.images * self.encoding * worker.slow or 1.0))
        task = self.cluster.task_images(self.job)
        tasks = math.ceil(block.images / task)
        kept = min(int(done * tasks), tasks - 1) * task
        self.repeated += done * block.images - kept
        self.left -= kept
        self._give(self.todo, _Block(block.images - kept))

    # What runs them

    def _resume(self, process: Process, value: Any = None) -> None:
        """Run a process up to its next request."""
        if process in self.stopped:
            return
        request = process.send(value)
        if isinstance(request, _Queue):
            self._take(request, process)
        elif isinstance(request, tuple):
            queue, block = request
            if queue.takers or len(queue.items) < queue.room:
                self._give(queue, block)
                self._later(process)
            else:
                queue.givers.append((process, block))
        elif request < math.inf:
            self._later(process, None, request)

    def _take(self, queue: _Queue, process: Process) -> None:
        if queue.givers:  # the first of them has room now
            giver, block = queue.givers.popleft()
            queue.items.append(block)
            self._later(giver)
        if queue.items:
            self._later(process, queue.items.popleft())
        else:
            queue.takers.append(process)

    def _give(self, queue: _Queue, block: _Block) -> None:
        """Give a block to the first that waits for one, or put it before the others."""
        while queue.takers:
            if (taker := queue.takers.popleft()) not in self.stopped:
                self._later(taker, block)
                return
        queue.items.appendleft(block)

    def _later(self, process: Process, value: Any = None, seconds: float = 0.0) -> None:
        self.number += 1  # what happens at the same time happens in this order
        heapq.heappush(self.events, (self.now + seconds, self.number, process, value))
