"""From images to answers: encoded in any order, stepped on in the order of their stream, then answered.

    images, decoded -> one encoder, in shared batches -> each stream's own queue -> log -> answers

Encoding needs no state, so images of all streams share it. An image takes its place in its stream once it is decoded; a
stream's steps follow that order, in one thread at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from testtime.encoding.live import LiveEncoder
from testtime.encoding.stream import Encoded, Source
from testtime.serve.database import Fenced
from testtime.serve.front import check_count, failure
from testtime.serve.learning import Learning, Work
from testtime.serve.store import Store
from testtime.serve.telemetry import Telemetry
from testtime.serve.types import Events, Picture, ServiceError, Settings, StreamSpec
from testtime.types import Encoder, InputError, Task, ViewPlan

TOGETHER = 64  # most images of a stream in one transaction
PROBE = 5.0  # seconds between attempts to write to a disk that was full
STAGES = ("decode", "encode", "adapt", "store", "total")

log = logging.getLogger("testtime.serve")
Answer = dict[str, Any]


@dataclass(eq=False)
class Pending:
    """An image that was admitted to a stream."""

    picture: Picture
    index: int
    learn: bool
    top: int
    encoded: Future[Encoded]
    answer: asyncio.Future[Answer]
    began: float  # when it came, in seconds
    decoded: float


@dataclass(eq=False)
class Stream:
    """A stream in memory."""

    name: str
    number: int  # of its row
    spec: StreamSpec
    created: str
    learning: Learning
    task: Task  # of now
    position: int  # of the next image in the input
    order: asyncio.Lock = field(default_factory=asyncio.Lock)  # held to admit an image, or for a whole change
    mutex: threading.Lock = field(default_factory=threading.Lock)  # for the next two
    queue: deque[Pending] = field(default_factory=deque)
    running: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    keys: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # of images on their way
    subscribers: set[Events] = field(default_factory=set)
    deleted: bool = False

    def publish(self, event: dict[str, Any]) -> None:
        """Tell everyone who listens."""
        for queue in self.subscribers:
            queue.add(event)

    def check_there(self) -> None:
        """Refuse a stream that was deleted meanwhile."""
        if self.deleted:
            raise ServiceError(404, f"Stream '{self.name}' was deleted.")

    async def settle(self) -> None:
        """Wait until every image that was admitted is answered."""
        while True:
            with self.mutex:
                if not self.queue and not self.running:
                    return
                self.idle.clear()
            await self.idle.wait()


class Live(Protocol):
    """Encodes images as they arrive, as `LiveEncoder` does."""

    def submit(self, source: Source, plan: ViewPlan, index: int, like: Tensor | None = None) -> Future[Encoded]:
        """The features of an image, as `stream` gives them for one of that index."""

    def warm_up(self, plan: ViewPlan) -> None:
        """Prepare for images of these views."""

    def close(self) -> None:
        """Wait for the images that were submitted."""


class Pipeline:
    """Answers images of all streams; for one event loop. `read_only` says why nothing is learned, if so."""

    def __init__(
        self, encoder: Encoder, store: Store, settings: Settings, telemetry: Telemetry, live: Live | None = None
    ) -> None:
        self.settings, self.telemetry, self.read_only = settings, telemetry, ""
        self.waiting = 0  # images that were accepted and not answered yet
        self._encoder, self._store, self._loop = encoder, store, asyncio.get_running_loop()
        self._live: Live = live or LiveEncoder(
            encoder, max_batch=settings.max_batch, deadline=settings.deadline, on_batch=telemetry.batch
        )
        self._learners = ThreadPoolExecutor(settings.learners, "testtime-learner")
        self._probe_at = 0.0

    async def close(self) -> None:
        """Close, once every stream has settled."""
        await asyncio.to_thread(self._live.close)
        await asyncio.to_thread(self._learners.shutdown)

    def warm_up(self, plan: ViewPlan) -> None:
        """Prepare the encoder for images of these views."""
        self._live.warm_up(plan)

    # In the event loop

    async def answer(self, stream: Stream, pictures: Sequence[Picture], learn: bool, top: int) -> list[Answer]:
        """An answer for each image, in order; or its error, with its status."""
        if stream.task.encoder != self._encoder.name:
            ours, other = self._encoder.name, stream.task.encoder
            raise ServiceError(409, f"Stream '{stream.name}' is of encoder '{other}'; this server runs '{ours}'.")
        check_count(len(pictures), self.waiting, self.settings)
        self._count_waiting(len(pictures))
        try:
            return await self._answers(stream, pictures, learn, top)
        finally:
            self._count_waiting(-len(pictures))

    def _count_waiting(self, change: int) -> None:
        self.waiting += change
        self.telemetry.waiting(self.waiting)

    async def _answers(self, stream: Stream, pictures: Sequence[Picture], learn: bool, top: int) -> list[Answer]:
        came = time.perf_counter()
        keys = {picture.key for picture in pictures if learn and picture.key is not None}
        while (other := next((stream.keys[key] for key in keys if key in stream.keys), None)) is not None:
            await asyncio.shield(other)  # whatever comes of the image with this key; then it is in the log, or is not
        answers: dict[int, Answer] = {}
        fresh, twins = dict[int, Picture](), dict[int, str]()  # twins: images whose key comes twice in this request
        claimed: set[str] = set()  # keys of images that are not admitted yet
        for place, picture in enumerate(pictures):
            if learn and picture.key in claimed:
                twins[place] = picture.key or ""
            elif learn and picture.key is not None and (before := self._with_key(stream, picture.key)) is not None:
                answers[place] = before
            elif picture.error is not None:
                answers[place] = picture.error
            else:
                fresh[place] = picture
                if learn and picture.key is not None:
                    stream.keys[picture.key] = self._loop.create_future()
                    claimed.add(picture.key)
        pending: dict[int, Pending] = {}
        try:
            async with stream.order:
                stream.check_there()
                for place, picture in fresh.items():
                    pending[place] = self._pending(stream, picture, learn, top, came)
                    claimed.discard(picture.key or "")
                self._admit(stream, list(pending.values()))
        finally:
            for key in claimed:  # nothing came of these images
                stream.keys.pop(key).set_result(None)
        for place, admitted in pending.items():
            answers[place] = await admitted.answer
        for place, key in twins.items():
            first = next(answers[other] for other, picture in fresh.items() if picture.key == key)
            answers[place] = first if "error" in first else {**first, "repeated": True}
        return [answers[place] for place in range(len(pictures))]

    def _with_key(self, stream: Stream, key: str) -> Answer | None:
        """The answer to an image that came with a key before; None if there was none."""
        event = self._store.with_key(stream.number, key)
        if event is None:
            return None
        if event.answer is None:
            return failure(ServiceError(410, "The image with this key was unlearned."), "")
        answer: Answer = json.loads(event.answer)
        return {**answer, "repeated": True, "milliseconds": dict.fromkeys(STAGES, 0.0)}

    def _pending(self, stream: Stream, picture: Picture, learn: bool, top: int, came: float) -> Pending:
        """An image that takes its place in the stream; its encoding starts."""
        index, spec = stream.position, stream.spec
        stream.position += learn
        plan = ViewPlan(spec.views, spec.augmix, spec.seed)
        encoded = self._live.submit(picture.pixels, plan, index, stream.task.text)
        return Pending(picture, index, learn, top, encoded, self._loop.create_future(), came - picture.seconds, came)

    async def feed(self, stream: Stream, views: Tensor, name: str) -> Answer:
        """The answer to an image of which only the features are at hand."""
        async with stream.order:
            stream.check_there()
            encoded = Future[Encoded]()
            encoded.set_result(Encoded(stream.position, name, views))
            answer, now = self._loop.create_future(), time.perf_counter()
            self._admit(stream, [Pending(Picture(name, None), stream.position, True, 5, encoded, answer, now, now)])
            stream.position += 1
        return await answer

    def _admit(self, stream: Stream, images: Sequence[Pending]) -> None:
        with stream.mutex:
            stream.queue.extend(images)
        for image in images:
            image.encoded.add_done_callback(lambda _: self._wake(stream))

    def _deliver(self, stream: Stream, images: Sequence[Pending], answers: Sequence[Answer]) -> None:
        for image, answer in zip(images, answers, strict=True):
            if "error" not in answer:
                answer["milliseconds"]["total"] = round(1000 * (time.perf_counter() - image.began), 3)
                self.telemetry.answered(stream.name, answer)
                stream.publish({"type": "answer", "answer": answer})
            if image.learn and image.picture.key is not None:
                stream.keys.pop(image.picture.key).set_result(None)
            if not image.answer.done():  # its client may have gone
                image.answer.set_result(answer)

    # In a learner's thread

    def _wake(self, stream: Stream) -> None:
        """Run a stream if its next image is encoded and it is not running; any thread may call it."""
        with stream.mutex:
            if stream.running or not stream.queue or not stream.queue[0].encoded.done():
                return
            stream.running = True
        self._learners.submit(self._run, stream)

    def _run(self, stream: Stream) -> None:
        """Answer the images of a stream that are encoded, in order, until the next one is not."""
        while True:
            ready: list[Pending] = []
            with stream.mutex:
                while stream.queue and stream.queue[0].encoded.done() and len(ready) < TOGETHER:
                    ready.append(stream.queue.popleft())
                if not ready:
                    stream.running = False
                    break
            try:
                answers = self._step(stream, ready)
            except Fenced as error:
                log.error("stream '%s': %s", stream.name, error)
                answers = [failure(error, image.picture.name) for image in ready]
            except Exception as error:  # a bug; the stream goes on from its log
                log.exception("stream '%s' failed", stream.name)
                stream.learning.forget_unwritten()
                answers = [failure(error, image.picture.name) for image in ready]
            self._loop.call_soon_threadsafe(self._deliver, stream, ready, answers)
        self._loop.call_soon_threadsafe(stream.idle.set)

    def _step(self, stream: Stream, ready: Sequence[Pending]) -> list[Answer]:
        """The answers to images that are encoded; those that have no features get an error."""
        began, results = time.perf_counter(), [image.encoded.result() for image in ready]
        works = [
            _work(stream, image, each.features)
            for image, each in zip(ready, results, strict=True)
            if each.features is not None
        ]
        done = iter(self._advance(stream, works))
        answers = [
            next(done) if each.features is not None else failure(each.error or RuntimeError(), image.picture.name)
            for image, each in zip(ready, results, strict=True)
        ]
        spent, stored = time.perf_counter() - began, stream.learning.seconds_writing
        for image, answer in zip(ready, answers, strict=True):
            seconds = image.decoded - image.began, began - image.decoded, spent - stored, stored, 0.0
            answer["milliseconds"] = {
                stage: round(1000 * max(0.0, part), 3) for stage, part in zip(STAGES, seconds, strict=True)
            }
        return answers

    def _advance(self, stream: Stream, works: Sequence[Work]) -> list[Answer]:
        """The answers to images, learned from if the disk takes it."""
        learning = stream.learning
        if self.read_only and time.monotonic() >= self._probe_at:
            self._try_to_write()
        if not self.read_only:
            try:
                return learning.advance(works)
            except (sqlite3.Error, OSError) as error:
                self.stop_writing(error)
            except InputError as error:  # an answer that is not finite: find out whose
                learning.forget_unwritten()
                if len(works) == 1:
                    return [failure(error, works[0].name)]
                return [answer for work in works for answer in self._advance(stream, [work])]
        return [
            {**answer, "reason": f"storage: {self.read_only}" if work.learn else answer["reason"]}
            for work, answer in zip(works, learning.advance(works, learning=False), strict=True)
        ]

    def stop_writing(self, error: Exception) -> None:
        """Predict without learning until the disk takes the log again."""
        log.error("the disk does not take the log, so nothing is learned: %s", error)
        self.read_only, self._probe_at = str(error), time.monotonic() + PROBE

    def _try_to_write(self) -> None:
        try:
            self._store.probe()
        except (sqlite3.Error, OSError) as error:
            self.stop_writing(error)
        else:
            log.info("the disk takes the log again")
            self.read_only = ""


def _work(stream: Stream, image: Pending, views: Tensor) -> Work:
    picture, key = image.picture, image.picture.key if image.learn else None
    # whoever decoded it may remember an older stream of this name, which kept thumbnails
    thumbnail = picture.thumbnail if stream.spec.thumbnails else None
    return Work(views, image.index, image.learn, picture.name, picture.sha256, key, thumbnail, image.top)
