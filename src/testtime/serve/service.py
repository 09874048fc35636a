"""The service: streams that learn, one encoder for all of them, kept in a folder. Nothing here knows of HTTP.

A change of a stream, such as a rollback, waits for the images that came before it, and those after it wait for it.
Other processes may decode images and speak HTTP for it: `Remote` has the same coroutines.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import testtime
from testtime import files, registry
from testtime.guard.settings import Guard
from testtime.machine.devices import step_device
from testtime.serve import look
from testtime.serve.auth import Rates
from testtime.serve.front import Front
from testtime.serve.learning import Learning, new_task
from testtime.serve.pipeline import Live, Pipeline, Stream, log
from testtime.serve.rows import audit_row, snapshot_row
from testtime.serve.store import Event, Store
from testtime.serve.telemetry import Telemetry
from testtime.serve.tour import Tour, new_name
from testtime.serve.types import Events, Picture, ServiceError, Settings, StreamSpec, Upload
from testtime.session.session import Session
from testtime.text.prompts import build_task, check_classes
from testtime.types import Encoder, InputError, StateError, Task

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
T = TypeVar("T")


class Service:
    """Streams that learn while they serve; see the module. For one event loop.

    With settings of no decoders, it takes only images that are decoded already (`enter`).
    """

    def __init__(
        self,
        encoder: Encoder,
        folder: Path,
        settings: Settings | None = None,
        telemetry: Telemetry | None = None,
        *,
        live: Live | None = None,
        take_over: bool = False,
    ) -> None:
        """`live` encodes images as they arrive, by default here; `take_over` is that of the `Store`."""
        self._live, self._take_over = live, take_over
        self.encoder, self.folder, self.settings = encoder, folder, settings or Settings()
        self.telemetry = telemetry or Telemetry()
        self.ready, self._draining = False, False
        self._streams: dict[str, Stream] = {}
        self._making: set[str] = set()  # names of streams on their way
        self._broken: dict[str, str] = {}  # streams that could not be loaded, and why
        self._device = step_device(encoder.device)
        self._tour, self._rates = Tour(self), Rates()
        self._front: Front | None = None

    async def start(self) -> None:
        """Open the folder, load the streams, and be ready."""
        self._loop = asyncio.get_running_loop()
        self._helpers = ThreadPoolExecutor(2, "testtime-change")
        self._store = Store(self.folder, self._take_over)
        self.pipeline = Pipeline(self.encoder, self._store, self.settings, self.telemetry, self._live)
        if self.settings.decoders:
            self._front = Front(self.settings, self.telemetry)
        self.telemetry.watch(lambda: self.ready, lambda: bool(self.read_only))
        for number, name, spec, created in self._store.streams():
            try:
                self._streams[name] = await self._in_thread(self._opened, number, name, StreamSpec.of(spec), created)
            except (InputError, ServiceError) as error:
                log.error("stream '%s' cannot be loaded: %s", name, error)
                self._broken[name] = str(error)
        self.ready = True

    async def close(self) -> None:
        """Refuse new images, answer those that were accepted, and close."""
        self.ready, self._draining = False, True
        await self._tour.close()
        while self.waiting:
            await asyncio.sleep(0.01)
        for stream in list(self._streams.values()):
            async with stream.order:
                await stream.settle()
        if self._front is not None:
            await self._front.close()
        await self.pipeline.close()
        await asyncio.to_thread(self._helpers.shutdown)
        self._store.close()

    # What there is

    @property
    def read_only(self) -> str:
        """Why nothing can be written; empty if it can."""
        return self.pipeline.read_only

    @property
    def fenced(self) -> bool:
        """Whether another process has taken over the folder."""
        return self._store.fenced

    @property
    def empty(self) -> bool:
        """Whether there is no stream, nor one on its way."""
        return not (self._streams or self._making or self._broken)

    @property
    def waiting(self) -> int:
        """Images that were accepted and are not answered yet."""
        return self.pipeline.waiting + (self._front.waiting if self._front is not None else 0)

    async def info(self) -> dict[str, Any]:
        """The service in brief."""
        return {
            "version": testtime.__version__,
            "encoder": self.encoder.name,
            "device": str(self.encoder.device),
            "methods": registry.METHODS.names(),
            "limits": asdict(self.settings.limits),
            "streams": len(self._streams),
            "broken": self._broken,
            "waiting": self.waiting,
            "read_only": self.read_only,
        }

    async def streams(self) -> list[dict[str, Any]]:
        """All streams, by name."""
        return [self._info(stream) for _, stream in sorted(self._streams.items())]

    def tours(self) -> list[str]:
        """The names of the streams that were made for tours."""
        return [name for name, stream in self._streams.items() if stream.spec.tour]

    async def stream(self, name: str) -> dict[str, Any]:
        """One stream."""
        return self._info(self.find(name))

    def _info(self, stream: Stream) -> dict[str, Any]:
        spec = asdict(stream.spec)
        shown = ("method", "settings", "guard", "views", "augmix", "seed", "thumbnails", "templates")
        return {
            "name": stream.name,
            "classes": list(stream.task.classnames),
            **{name: spec[name] for name in shown},
            "encoder": stream.task.encoder,
            **stream.learning.numbers(),
            "position": stream.position,
            "snapshots": len(self._store.snapshots(stream.number)),
            "waiting": len(stream.queue),
            "read_only": self.read_only,
            "created": stream.created,
        }

    def find(self, name: str) -> Stream:
        """The stream of a name."""
        if (stream := self._streams.get(name)) is None:
            raise ServiceError(404, f"There is no stream '{name[:80]}'.")
        return stream

    # Images

    async def answer(
        self, name: str, uploads: Sequence[Upload], *, learn: bool = True, top: int = 5
    ) -> list[dict[str, Any]]:
        """An answer for each image, in order; or its error, with its status."""
        self._check_open()
        if self._front is None:
            raise RuntimeError("This service has no decoders.")
        thumbnails = self.find(name).spec.thumbnails
        pictures = await self._front.pictures(uploads, thumbnails, self.pipeline.waiting)
        return await self.enter(name, pictures, learn=learn, top=top)

    async def enter(self, name: str, pictures: Sequence[Picture], *, learn: bool, top: int) -> list[dict[str, Any]]:
        """The same for images that are decoded."""
        self._check_open()
        return await self.pipeline.answer(self.find(name), pictures, learn, top)

    async def spend(self, who: str, rate: float) -> None:
        """Take one request from someone's rate, or refuse it."""
        self._rates.spend(who, rate)

    async def metrics(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.telemetry.text()

    async def tour(self, name: str | None = None) -> dict[str, Any]:
        """A new stream that shows how adaptation works, on features that come with the package."""
        return await self._tour.start(name or new_name())

    # Streams

    async def create(self, spec: StreamSpec) -> dict[str, Any]:
        """A new stream."""

        def make() -> Session:
            method = registry.make_method(spec.method, spec.preset, spec.settings)
            chosen: Any = {key: registry.read_setting(Guard, key, value) for key, value in spec.guard_settings.items()}
            return Session(
                self._task(spec.classes, spec), method, encoder=self.encoder, views=spec.views, augmix=spec.augmix,
                seed=spec.seed, guard=Guard(**chosen) if spec.guard else None,
            )  # fmt: skip

        return await self.add(spec, make, "start")

    async def add(self, spec: StreamSpec, make: Callable[[], Session], title: str) -> dict[str, Any]:
        """A new stream of the session that `make` returns, in a thread."""
        self._check_open()
        self._check_spec(spec)
        name, limits = spec.name, self.settings.limits
        if name in self._streams or name in self._making or name in self._broken:
            raise ServiceError(409, f"There is a stream '{name}' already.")
        if len(self._streams) + len(self._making) >= limits.streams:
            raise ServiceError(409, f"There are {limits.streams} streams, as many as there may be.")

        def added() -> Stream:
            session = make()
            with self._refusing_writes():
                number, created = self._store.add_stream(name, asdict(spec), session, title)
            return self._opened(number, name, spec, created, session)

        self._making.add(name)
        try:
            stream = self._streams[name] = await self._in_thread(added)
        finally:
            self._making.discard(name)
        self.telemetry.event(name, "create")
        return self._info(stream)

    async def delete(self, name: str) -> None:
        """Delete a stream and everything known of it."""

        def delete(stream: Stream) -> None:
            self._store.delete_stream(stream.number)
            self._store.checkpoint()
            stream.deleted = True

        await self._change(name, "delete", delete)
        del self._streams[name]

    async def fork(self, name: str, new: str, snapshot: int | None = None) -> dict[str, Any]:
        """A second stream that starts where this one is, or was at a snapshot."""
        session = await self._change(name, "fork", lambda stream: stream.learning.load_snapshot(snapshot).fork())
        spec = replace(self.find(name).spec, name=new, classes=session.task.classnames)
        return await self.add(spec, lambda: session, f"fork of {name}")

    async def export(self, name: str, snapshot: int | None = None) -> bytes:
        """The state of a stream as a file that `Session.load` and `import_state` read."""

        def saved(stream: Stream) -> bytes:
            with tempfile.TemporaryDirectory() as folder:
                return stream.learning.load_snapshot(snapshot).save(Path(folder) / "state.safetensors").read_bytes()

        return await self._change(name, "export", saved)

    async def import_state(
        self, name: str, data: bytes, templates: tuple[str, ...] | str | None = None, thumbnails: bool = False
    ) -> dict[str, Any]:
        """A new stream from an exported state."""
        most = self.settings.limits.state_bytes
        if len(data) > most:
            raise ServiceError(413, f"A state may have {most:,} bytes; this one has {len(data):,}.")

        def read() -> Session:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state"
                path.write_bytes(data)
                try:
                    return Session.load(path, encoder=self.encoder, device=self._device)
                except StateError as error:
                    raise ServiceError(422, str(error).replace(str(path), "The state")) from None

        session = await self._in_thread(read)
        method, guard, plan = session.method, session.guard, session.plan
        spec = StreamSpec(
            name, session.task.classnames, templates, method.name, None, registry.settings_of(method),
            guard is not None, registry.settings_of(guard) if guard else {}, plan.count, plan.augmix, plan.seed,
            thumbnails,
        )  # fmt: skip
        if _tunes(spec):
            raise ServiceError(422, f"Method '{method.name}' tunes prompts; its state cannot be imported.")
        return await self.add(spec, lambda: session, "import")

    def _opened(self, number: int, name: str, spec: StreamSpec, created: str, session: Session | None = None) -> Stream:
        """A stream of the store, as it was left."""

        def load(file: str) -> Session:
            path = self._store.state_path(file)
            encoder = (files.open_tensors(path, StateError).metadata() or {}).get("encoder")
            task = self._task(spec.classes, spec) if _tunes(spec) else None
            ours = self.encoder if encoder == self.encoder.name else None  # else it answers no images
            return Session.load(path, task, encoder=ours, device=self._device)

        learning = Learning(self._store, number, self.settings, load, session)
        ready = learning.session
        ready.warm_up()  # no client waits for compilers
        if ready.encoder is not None:
            self.pipeline.warm_up(ready.plan)
        return Stream(name, number, spec, created, learning, ready.task, ready.position)

    def _task(self, classes: Sequence[str], spec: StreamSpec) -> Task:
        return build_task(self.encoder, classes, spec.templates, context=_tunes(spec)).to(self._device)

    def _check_spec(self, spec: StreamSpec) -> None:
        limits = self.settings.limits
        if not NAME.fullmatch(spec.name):
            raise ServiceError(
                422, f"A stream's name is 1 to 64 letters, digits, '.', '_' or '-'; got {spec.name[:80]!r}."
            )
        templates = spec.templates if isinstance(spec.templates, tuple) else (spec.templates or "",)
        for count, most, what in (
            (len(spec.classes), limits.classes, "classes"),
            (spec.views, limits.views, "views"),
            (len(templates), limits.templates, "templates"),
        ):
            if count > most:
                raise ServiceError(422, f"{count:,} {what}; there may be {most:,}.")
        for text in (*spec.classes, *templates):
            limits.check_text(text)

    # Changes

    async def label(self, name: str, image: int, label: str) -> dict[str, Any]:
        """Take the true label of an image, which may come late."""
        return await self._change(name, "label", lambda stream: stream.learning.label(image, label))

    async def snapshot(self, name: str, title: str = "") -> dict[str, Any]:
        """Keep the state of a stream."""
        self.settings.limits.check_text(title)
        return snapshot_row(await self._change(name, "snapshot", lambda stream: stream.learning.snapshot(title)))

    async def snapshots(self, name: str) -> list[dict[str, Any]]:
        """The snapshots of a stream, oldest first."""
        return [snapshot_row(snapshot) for snapshot in self._store.snapshots(self.find(name).number)]

    async def delete_snapshot(self, name: str, snapshot: int) -> None:
        """Delete a snapshot."""
        await self._change(name, "delete snapshot", lambda stream: stream.learning.delete_snapshot(snapshot))

    async def rollback(self, name: str, *, snapshot: int | None = None, before: int | None = None) -> dict[str, Any]:
        """Go back to a snapshot, or to before an image."""
        return await self._changed(name, "rollback", lambda stream: stream.learning.roll_back(snapshot, before))

    async def reset(self, name: str) -> dict[str, Any]:
        """Forget everything that was learned."""
        return await self._changed(name, "reset", lambda stream: stream.learning.reset())

    async def unlearn(self, name: str, image: int) -> dict[str, Any]:
        """Go on as if an image had never come."""
        return await self._changed(name, "unlearn", lambda stream: stream.learning.unlearn(image))

    async def change_classes(self, name: str, add: Sequence[str] = (), remove: Sequence[str] = ()) -> dict[str, Any]:
        """Add classes to a stream, or remove some, keeping what was learned of the others."""
        for text in (*add, *remove):
            self.settings.limits.check_text(text)

        def change(stream: Stream) -> None:
            before, limits = stream.task, self.settings.limits
            if unknown := [each for each in remove if each not in before.classnames]:
                raise ServiceError(422, f"'{unknown[0]}' is none of the stream's classes.")
            if before.encoder != self.encoder.name:
                raise ServiceError(409, f"Stream '{name}' is of encoder '{before.encoder}', which does not run here.")
            names = check_classes([*(each for each in before.classnames if each not in remove), *add])
            if len(names) > limits.classes:
                raise ServiceError(422, f"{len(names):,} classes; there may be {limits.classes:,}.")
            stream.learning.change_classes(new_task(before, self._task(names, stream.spec)), add, remove)

        return await self._changed(name, "classes", change)

    async def _changed(self, name: str, kind: str, work: Callable[[Stream], object]) -> dict[str, Any]:
        """Change what a stream has learned; the stream afterwards."""
        await self._change(name, kind, work)
        stream = self.find(name)
        info = self._info(stream)
        stream.publish({"type": "stream", "stream": info, "why": kind})
        return info

    async def _change(self, name: str, kind: str, work: Callable[[Stream], T]) -> T:
        """Run work on a stream in a thread, after the images before it and before those after it."""
        self._check_open()
        stream = self.find(name)

        def changed() -> T:
            stream.learning.wait_until_saved()
            with self._refusing_writes(stream):
                result = work(stream)
            if not stream.deleted:
                stream.task, stream.position = stream.learning.session.task, stream.learning.session.position
            return result

        async with stream.order:
            stream.check_there()
            await stream.settle()
            result = await self._in_thread(changed)
        self.telemetry.event(name, kind)
        return result

    @contextmanager
    def _refusing_writes(self, stream: Stream | None = None) -> Iterator[None]:
        """A block that writes: if the disk does not take it, its client is told, and the service predicts only."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if stream is not None:
                stream.learning.forget_unwritten()
            self.pipeline.stop_writing(error)
            raise ServiceError(507, f"The disk does not take it, so nothing was changed: {error}") from None

    # The log, and what the page shows

    async def images(self, name: str, before: int | None = None, limit: int = 50) -> list[dict[str, Any]]:
        """The latest rows of the audit log, newest first."""
        return [audit_row(event) for event in self._store.latest(self.find(name).number, before, limit)]

    async def image(self, name: str, image: int) -> dict[str, Any]:
        """One row of the audit log."""
        return audit_row(self._event(name, image))

    async def thumbnail(self, name: str, image: int) -> bytes:
        """The thumbnail of an image, a JPEG."""
        if (found := self._event(name, image).thumbnail) is None:
            raise ServiceError(404, f"There is no thumbnail of image {image}.")
        return found

    def _event(self, name: str, number: int) -> Event:
        event = self._store.event(self.find(name).number, number)
        if event is None:
            raise ServiceError(404, f"Stream '{name}' has no image {number}.")
        return event

    async def queues(self, name: str) -> dict[str, Any]:
        """What is in the memory of each class: the images that its features came from."""
        return await self._in_thread(self._looked, self.find(name), look.queues)

    async def map(self, name: str) -> dict[str, Any]:
        """Prototypes and recent images on a plane."""
        return await self._in_thread(self._looked, self.find(name), look.plane)

    def _looked(self, stream: Stream, show: Callable[[Session, Sequence[Event]], T]) -> T:
        return show(stream.learning.session, self._store.recent_images(stream.number, look.IMAGES))

    @asynccontextmanager
    async def subscribe(self, name: str) -> AsyncIterator[Events]:
        """What happens in a stream from now on."""
        stream, queue = self.find(name), Events()
        stream.subscribers.add(queue)
        try:
            yield queue
        finally:
            stream.subscribers.discard(queue)

    def _check_open(self) -> None:
        if not self.ready:
            why = "The service is shutting down." if self._draining else "The service is starting."
            raise ServiceError(503, why, 1.0)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await self._loop.run_in_executor(self._helpers, work, *arguments)


def _tunes(spec: StreamSpec) -> bool:
    """Whether a stream's method needs the text tower."""
    return bool(getattr(registry.make_method(spec.method, spec.preset, spec.settings), "needs_tower", False))
