"""Jobs of an experiment as tasks of Ray, on all machines of a cluster.

A task runs a job as this process would, with as many threads, and returns its result, which is written here. If its
worker is killed, or its machine is lost, the job is run again elsewhere.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

import testtime
from testtime.cluster.connect import import_ray
from testtime.errors import InputError, MissingPart, TesttimeError
from testtime.experiments.jobs import Executor, Job, Where

RETRIES = 3  # of a job whose worker was killed
POLL = 0.3  # seconds between two looks at what has started
AHEAD = 2  # jobs that are sent, for each that the cluster can run at a time: so that no machine waits
ALIKE = ("torch", "numba")  # packages of which another version rounds differently


class Watch(Protocol):
    """What is told where jobs run; it is entered while there are any."""

    def started(self, number: int, what: str, machine: str) -> None:
        """A job has started; or again, if its worker was killed."""

    def finished(self, number: int, what: str, machine: str, seconds: float) -> None:
        """A job is done."""


def on_ray(watch: Callable[[], AbstractContextManager[Watch]]) -> Executor:
    """An executor on the cluster that this process is connected to."""
    return partial(run_jobs, watch=watch)


def run_jobs(jobs: Iterable[Job], watch: Callable[[], AbstractContextManager[Watch]]) -> Iterator[tuple[Any, Any]]:
    """The results as they are finished.

    If jobs fail, the error is that of the first of them, as if they were run in order: those before it are finished.
    """
    with watch() as told:
        sender = _Sender(told)
        try:
            yield from sender.results(enumerate(jobs))
        finally:
            sender.cancel(after=-1)


class Board:
    """An actor that is told which jobs have started, and where."""

    def __init__(self) -> None:
        self._started: list[tuple[int, str]] = []

    def started(self, number: int, machine: str) -> None:
        self._started.append((number, machine))

    def take(self) -> list[tuple[int, str]]:
        """Those that have started since the last call."""
        taken, self._started = self._started, []
        return taken


class _Sender:
    """The jobs that are on their way."""

    def __init__(self, watch: Watch) -> None:
        self.ray, self.watch = import_ray(), watch
        self.running: dict[Any, tuple[int, Job]] = {}  # by the reference to the result
        self.failed: dict[int, BaseException] = {}  # by the number of the job
        self._sent: dict[int, tuple[Any, Any]] = {}  # shared objects by their id, and the references to what was sent
        self._task = self.ray.remote(max_retries=RETRIES)(work)
        self._board = self.ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
        self._asked = self._board.take.remote()
        self._versions = versions()

    def results(self, jobs: Iterator[tuple[int, Job]]) -> Iterator[tuple[Any, Any]]:
        more, last = True, -1
        while more or self.running:
            if free := more and len(self.running) < self._room():
                try:
                    if (following := next(jobs, None)) is None:
                        more = free = False
                    else:
                        last = following[0]
                        self._send(*following)
                except Exception as problem:  # jobs before it are finished first, as if they were run in order
                    self.failed[last + 1] = problem
            # looked at before the next job is taken, since features may have to be encoded for it
            done, _ = self.ray.wait([*self.running], timeout=0 if free else POLL) if self.running else ([], [])
            self._look()
            for reference in done:
                number, job = self.running.pop(reference)
                try:
                    result = self._result(reference, number, job)
                except Exception as problem:
                    self.failed[number] = problem
                else:
                    yield job.key, result
            if self.failed:
                more = False
                self.cancel(after=min(self.failed))
        if self.failed:
            raise self.failed[min(self.failed)]

    def cancel(self, after: int) -> None:
        """Stop the jobs after a number."""
        for reference, (number, _) in list(self.running.items()):
            if number > after:
                del self.running[reference]
                self.ray.cancel(reference, force=True)

    def _send(self, number: int, job: Job) -> None:
        dumps = self.ray.cloudpickle.dumps
        if id(job.shared) not in self._sent:
            self._sent[id(job.shared)] = job.shared, self.ray.put(dumps(job.shared))
        _, shared = self._sent[id(job.shared)]
        own, place = dumps((job.function, job.own)), (job.where.device.type, job.threads, self._versions)
        task = self._task.options(**self._needs(job))
        self.running[task.remote(self._board, number, job.what, shared, own, *place)] = number, job

    def _needs(self, job: Job) -> dict[str, float]:
        """What a job reserves on a machine: its threads, up to all of the largest machine's, or a GPU."""
        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        most = {kind: int(max((each.get(kind, 0) for each in machines), default=0)) for kind in ("CPU", "GPU")}
        if job.where.device.type == "cuda":
            if not most["GPU"]:
                raise InputError("No machine of the Ray cluster has a GPU; use --device cpu.")
            return {"num_cpus": min(1, most["CPU"]), "num_gpus": 1}
        if not most["CPU"]:
            raise InputError("No machine of the Ray cluster has a CPU for tasks; start one with 'ray start'.")
        return {"num_cpus": min(job.threads, most["CPU"])}

    def _room(self) -> int:
        """How many jobs may be sent at a time."""
        return AHEAD * max(1, int(self.ray.cluster_resources().get("CPU", 0)))

    def _look(self) -> None:
        """Tell which jobs have started; it never waits."""
        if not self.ray.wait([self._asked], timeout=0)[0]:
            return
        try:
            begun = self.ray.get(self._asked)
        except self.ray.exceptions.RayError:  # the machine of the board was lost; it starts again on another
            begun = []
        self._asked = self._board.take.remote()
        jobs = dict(self.running.values())
        for number, machine in begun:
            if number in jobs:
                self.watch.started(number, jobs[number].what, machine)

    def _result(self, reference: Any, number: int, job: Job) -> Any:
        errors = self.ray.exceptions
        try:
            machine, seconds, result = self.ray.get(reference)
        except errors.RayTaskError as problem:
            raise (problem.cause if isinstance(problem.cause, Exception) else problem) from problem
        except errors.RayError as problem:
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise TesttimeError(
                f"{job.what}: its worker on the Ray cluster was lost {RETRIES + 1} times ({reason}). "
                "Finished cells are kept; run the same command again to resume."
            ) from None
        self.watch.finished(number, job.what, machine, seconds)
        if isinstance(result, Exception) and not isinstance(result, MissingPart):
            raise result
        return result


def work(
    board: Any, number: int, what: str, shared: bytes, own: bytes, device: str, threads: int, wanted: dict[str, str]
) -> tuple[str, float, Any]:
    """In a worker: the machine, the seconds, and a job's result or its error."""
    from ray import cloudpickle

    start, machine = time.perf_counter(), platform.node()
    board.started.remote(number, machine)
    torch.set_num_threads(threads)  # Ray starts workers with as many as the CPUs that a task reserves
    result: Any
    try:
        _check_versions(machine, wanted)
        try:
            function, arguments = cloudpickle.loads(own)
            common = cloudpickle.loads(shared)
        except (ImportError, AttributeError) as problem:  # such as a method of another package
            raise InputError(
                f"{what}: the machine {machine} of the Ray cluster cannot import what this one can ({problem}). "
                "Install the same packages on every machine."
            ) from None
        result = function(Where(torch.device(device), lambda line: None), common, *arguments)
    except TesttimeError as problem:
        result = problem
    return machine, time.perf_counter() - start, result


def versions() -> dict[str, str]:
    """The versions of which another one may give other numbers; empty for a package that is missing."""
    found = {"testtime": testtime.__version__}
    for name in ALIKE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _check_versions(machine: str, wanted: dict[str, str]) -> None:
    for name, here in versions().items():
        if here != wanted[name]:
            mine, other = (f"{name} {each}" if each else f"no {name}" for each in (wanted[name], here))
            raise InputError(
                f"The machine {machine} of the Ray cluster has {other}, but this one has {mine}; install the same on "
                "every machine, since others may give other numbers."
            )
