"""Images encoded as they arrive, from any number of callers: for a service, what `stream` is for a run.

On a CPU an image is encoded by itself, as in a stream: its features have the same bits. On a GPU, images that wait at
the same time share launches of a fixed shape, whatever their seeds. There, an image's position in its launch depends on
when it arrives, and the last bits of its features may depend on its position.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter

import torch
from torch import Tensor

from testtime.encoding import stream
from testtime.encoding.encoders import needed
from testtime.encoding.stream import Encoded, Source
from testtime.types import DeviceEncoder, Encoder, InputError, ViewPlan

IN_FLIGHT = 2  # launches on a GPU at once; the second waits until it is full, or the first is done
QUIET = 0.3  # share of the deadline without a new image after which a launch waits for no more

OnBatch = Callable[[int, float], object]


@dataclass(eq=False, slots=True)
class _Job:
    """One image that was submitted."""

    source: Source
    plan: ViewPlan
    index: int
    like: Tensor | None
    future: Future[Encoded] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Ready:
    """An image that was read, and waits for a launch."""

    device: stream._Device  # with what it has in common with others of its launch
    job: _Job
    read: Future[stream._Read]
    at: float  # when it was read, in seconds


class _Done:
    """A launch is done."""


class LiveEncoder:
    """Encodes images as they arrive, from any number of callers, in shared batches.

    On a GPU a batch is up to `max_batch` images, or those that arrive within `deadline` seconds after its first one; it
    is complete sooner if none arrives for a while (`QUIET`).
    `on_batch` is called with the number of images of each launch and the seconds that it took, before its results are
    there; on a CPU a launch is one image.

    >>> import testtime as tt
    >>> from PIL import Image
    >>> encoder = LiveEncoder(tt.load_encoder("tiny"))
    >>> future = encoder.submit(Image.new("RGB", (60, 40), "red"), ViewPlan(count=4), index=0)
    >>> future.result().features.shape
    torch.Size([4, 32])
    >>> encoder.close()
    """

    def __init__(
        self, encoder: Encoder, *, max_batch: int = 32, deadline: float = 0.014, on_batch: OnBatch | None = None
    ) -> None:
        if max_batch < 1 or not 0 <= deadline < threading.TIMEOUT_MAX:
            raise InputError(f"max_batch={max_batch}, deadline={deadline}: must be 1 or more, and 0 seconds or more.")
        self._encoder = needed(encoder)
        self._on_batch: OnBatch = on_batch or (lambda images, seconds: None)
        self._max_batch, self._deadline = max_batch, deadline
        self._lanes: dict[bool, _OnCpu | _OnDevice] = {}  # by whether views are made on the device
        self._waiting: set[Future[Encoded]] = set()
        self._lock, self._closed = threading.Lock(), False

    def submit(self, source: Source, plan: ViewPlan, index: int, like: Tensor | None = None) -> Future[Encoded]:
        """The features of an image, as `stream` gives them for one of that index; an unusable image has an `error`.

        Threads may call it. It returns at once, but for the first image of a number of views (`warm_up`). A future that
        is cancelled before its image is encoded spares the work.
        """
        job = _Job(source, plan, index, like)
        if stream._is_features(source):
            job.future.set_result(stream._unit(index, source, partial(stream.as_rows, source), like))
            return job.future
        with self._lock:
            if self._closed:
                raise RuntimeError("This encoder is closed.")
            lane = self._lane(plan)
            self._waiting.add(job.future)
        job.future.add_done_callback(self._waiting.discard)
        lane.add(job)
        return job.future

    def warm_up(self, plan: ViewPlan) -> None:
        """Encode a black image, so that no later one with this number of views waits for compilers and captures."""
        self.submit(torch.zeros(64, 64, 3, dtype=torch.uint8), plan, 0).result()

    def close(self) -> None:
        """Refuse further images, and wait for those that were submitted."""
        with self._lock:
            self._closed = True
        wait(list(self._waiting))
        for lane in self._lanes.values():
            lane.close()

    def _lane(self, plan: ViewPlan) -> _OnCpu | _OnDevice:
        encoder = self._encoder
        if plan.variations is None and stream.on_device(encoder, plan.augmix):
            if True not in self._lanes:
                self._lanes[True] = _OnDevice(encoder, self._max_batch, self._deadline, self._on_batch)
            return self._lanes[True]
        if False not in self._lanes:
            self._lanes[False] = _OnCpu(encoder, self._on_batch)
        return self._lanes[False]


class _OnCpu:
    """Images encoded by threads, a bounded number at a time; another thread completes their futures."""

    def __init__(self, encoder: Encoder, on_batch: OnBatch) -> None:
        self._threads, self._on_batch = stream._Threads(encoder), on_batch
        self._finisher = ThreadPoolExecutor(1, "testtime-live")
        self._waiting, self._running = deque[_Job](), 0
        self._lock = threading.Lock()

    def add(self, job: _Job) -> None:
        with self._lock:
            self._waiting.append(job)
            self._start()

    def close(self) -> None:
        self._finisher.shutdown()

    def _start(self) -> None:
        """Start the images next in line, as many as may be in progress: each holds the pixels of its views."""
        while self._waiting and self._running < self._threads.ahead(self._waiting[0].plan):
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                self._running += 1
                blocks = self._threads.start(job.index, job.source, job.plan)
                blocks.add_done_callback(partial(self._prepared, job, perf_counter()))

    def _prepared(self, job: _Job, began: float, blocks: Future[list[Future[Tensor]]]) -> None:
        """Finish the image after the last of its blocks."""
        parts = [] if blocks.exception() else blocks.result()
        number = count(1)

        def done(_: object) -> None:
            if next(number) >= len(parts):
                self._finisher.submit(self._finish, job, began, blocks)

        for part in parts:
            part.add_done_callback(done)
        if not parts:
            done(None)

    def _finish(self, job: _Job, began: float, blocks: Future[list[Future[Tensor]]]) -> None:
        with self._lock:
            self._running -= 1
            self._start()
        try:
            encoded = stream._unit(job.index, job.source, partial(stream._joined, blocks), job.like)
            self._on_batch(1, perf_counter() - began)
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(encoded)


class _OnDevice:
    """Images read by threads, and launched together by a dispatcher; another thread completes their futures."""

    def __init__(self, encoder: DeviceEncoder, max_batch: int, deadline: float, on_batch: OnBatch) -> None:
        self._encoder, self._max_batch, self._deadline, self._on_batch = encoder, max_batch, deadline, on_batch
        self._devices: dict[object, stream._Device] = {}  # by what images of one launch have in common
        self._ready: SimpleQueue[_Ready | _Done | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._finisher = ThreadPoolExecutor(1, "testtime-live")
        self._dispatcher = threading.Thread(target=self._dispatch, name="testtime-dispatcher", daemon=True)
        self._dispatcher.start()

    def add(self, job: _Job) -> None:
        device = self._device(job)
        if isinstance(job.source, Tensor) and job.plan.count == 1:  # nothing is decoded or drawn
            read: Future[stream._Read] = Future()
            try:
                read.set_result(device.read(job.index, job.source, job.plan, force=True))
            except Exception as error:
                read.set_exception(error)
        else:
            # a thread may wait for memory: the dispatcher, which frees it, waits for no thread
            read = device.pool.submit(device.read, job.index, job.source, job.plan, wait=True)
        read.add_done_callback(partial(self._arrived, device, job))

    def close(self) -> None:
        self._ready.put(None)
        self._dispatcher.join()
        self._finisher.shutdown()

    def _device(self, job: _Job) -> stream._Device:
        plan, like = job.plan, job.like
        shared = plan.count, plan.augmix, *(() if like is None else (like.dtype, like.device, like.shape[-1]))
        with self._lock:
            if shared not in self._devices:
                self._devices[shared] = device = stream._Device(self._encoder, plan, like)
                device.budget = next(iter(self._devices.values())).budget  # one for all
            return self._devices[shared]

    def _arrived(self, device: stream._Device, job: _Job, read: Future[stream._Read]) -> None:
        if (error := read.exception()) is None:
            self._ready.put(_Ready(device, job, read, perf_counter()))
        elif job.future.set_running_or_notify_cancel():
            if isinstance(error, InputError):
                job.future.set_result(Encoded(job.index, job.source, None, error))
            else:
                job.future.set_exception(error)

    def _dispatch(self) -> None:
        waiting, running, open_ = list[_Ready](), 0, True
        while open_ or waiting or running:
            due = self._due(waiting) if waiting and not running else None
            try:
                entry = self._ready.get(timeout=None if due is None else max(0, due - perf_counter()))
            except Empty:
                pass
            else:
                if entry is None:
                    open_ = False
                elif isinstance(entry, _Done):
                    running -= 1
                elif entry.job.future.set_running_or_notify_cancel():
                    waiting.append(entry)
                else:
                    entry.read.result().share.keep(0)
            while waiting and running < IN_FLIGHT and (group := self._group(waiting, running)):
                waiting = [entry for entry in waiting if entry not in group]
                running += self._launch(group[0].device, group)

    def _due(self, waiting: Sequence[_Ready]) -> float:
        """When images have waited long enough for others."""
        return min(waiting[0].at + self._deadline, waiting[-1].at + QUIET * self._deadline)

    def _group(self, waiting: Sequence[_Ready], running: int) -> list[_Ready]:
        """The images to launch now, if any: a launch that is full, or that has waited long enough for others."""
        device = waiting[0].device
        most = min(self._max_batch, device.together)
        group = [entry for entry in waiting if entry.device is device][:most]
        overdue = not running and perf_counter() >= self._due(waiting)
        return group if len(group) == most or overdue else []

    def _launch(self, device: stream._Device, group: Sequence[_Ready]) -> bool:
        """Launch images of one shape; whether they are on their way."""
        began, jobs = perf_counter(), [entry.job for entry in group]
        images = [
            stream._Waiting(entry.job.index, entry.job.source, position, entry.read)
            for position, entry in enumerate(group)
        ]
        try:
            launched = device.launch(images)
        except BaseException as error:
            _fail(jobs, error)
            return False
        self._finisher.submit(self._finish, device, launched, jobs, began)
        return True

    def _finish(self, device: stream._Device, launched: stream._Launched, jobs: Sequence[_Job], began: float) -> None:
        try:
            found = list(device.finish(launched))
            self._on_batch(len(jobs), perf_counter() - began)
        except BaseException as error:
            _fail(jobs, error)
        else:
            for job, encoded in zip(jobs, found, strict=True):
                job.future.set_result(encoded)
        finally:
            self._ready.put(_Done())


def _fail(jobs: Sequence[_Job], error: BaseException) -> None:
    for job in jobs:
        job.future.set_exception(error)
