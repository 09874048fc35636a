"""The service on Ray, as the processes that speak HTTP see it: every call goes to the actor of its stream.

An actor may die at any time, and a call with it. Whether it was done is then not known here, but in the log: every
image is sent with an idempotency key, so it is sent again until it is answered, and learned once. Calls that only read
are made again too. Other changes are not: their client is told to look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

import testtime
from testtime import registry
from testtime.cluster.adapter import Adapter
from testtime.cluster.directory import folder_of, has_stream, streams_in
from testtime.cluster.encoders import About
from testtime.cluster.metrics import merged
from testtime.errors import InputError
from testtime.serve.auth import Rates, Refusal
from testtime.serve.remote import Bytes, Header, Remote
from testtime.serve.service import NAME
from testtime.serve.telemetry import Telemetry
from testtime.serve.tour import new_name
from testtime.serve.types import Events, ServiceError, Settings

NAMESPACE = "testtime"
PATIENCE = 60.0  # seconds for a stream to be moved
AGAIN = 0.1  # seconds between two attempts
CPUS = 0.1  # that an actor reserves: its steps are short
MAKING = ("create", "import_state", "tour")
READING = (
    "answer", "export", "image", "images", "info", "map", "metrics", "queues", "snapshots", "stream", "streams",
    "thumbnail",
)  # fmt: skip

log = logging.getLogger("testtime.serve")


def identity(folder: Path) -> str:
    """A short name of a service's folder, which tells it from others on the same cluster."""
    return sha256(str(folder).encode()).hexdigest()[:12]


def prefix(folder: Path) -> str:
    """What the names of a service's actors begin with."""
    return f"{identity(folder)}/"


class Broken(ServiceError):
    """A stream that cannot be loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(500, message)


class SharedRates:
    """An actor that counts the requests of each token, for all processes that speak HTTP."""

    def __init__(self) -> None:
        self._rates = Rates()

    def spend(self, who: str, rate: float) -> tuple[Any, ...] | None:
        """Take one request; what the refusal says if there is none left."""
        try:
            self._rates.spend(who, rate)
        except Refusal as refusal:
            return refusal.status, refusal.reason, str(refusal), refusal.retry_after
        return None


class Streams(Remote):
    """The streams of a folder, each in an actor of its own; for one event loop."""

    telemetry: Any

    def __init__(self, folder: Path, settings: Settings, application: str, encoders: str) -> None:
        super().__init__(settings)
        self.telemetry = Telemetry()
        self._folder, self._encoders = folder, (application, encoders)
        self._known: dict[str, Any] = {}  # actors that answered, by stream
        self._about: About | None = None

    async def start(self) -> None:
        """Wait for an encoder."""
        self.telemetry.watch(lambda: self.ready, lambda: False)
        application, name = self._encoders
        self._about = await ray.serve.get_deployment_handle(name, application).about.remote()
        await super().start()

    async def tell(self) -> None:
        """What is counted here stays here."""

    # Calls of one stream

    async def exchange(self, header: Header, *parts: Bytes) -> tuple[Header, Bytes]:
        """Make a call of a stream where the stream is, and return what comes back."""
        call, name = header["call"], _stream_of(header)
        header, ours = _with_keys(header) if call == "answer" else (header, [])
        blob = np.frombuffer(b"".join(parts), np.uint8)
        if call in MAKING:
            await self._check_room(name)
        found, data = await self._ask(name, lambda actor: actor.perform.remote(header, blob), call)
        for place in ours:
            if isinstance(answers := found.get("result"), list) and "repeated" in answers[place]:
                answers[place]["repeated"] = False  # the client has sent it once
        if call == "delete" or (call in MAKING and "result" not in found):
            await self._end_if_empty(name)
        return found, data

    async def _ask(self, name: str, ask: Callable[[Any], Any], call: str) -> Any:
        """What the actor of a stream returns; if it dies, the one that follows it is asked."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while True:
            sent = False
            try:
                actor = self._known.get(name) or await self._found(name, call in MAKING)
                if call not in READING:
                    await actor.ping.remote()  # what may not be done twice is sent to one that lives
                sent = True
                found = await ask(actor)
                if not (isinstance(found, tuple) and "moved" in found[0]):
                    return found
            except RayTaskError as problem:
                if isinstance(problem.cause, ServiceError):
                    raise problem.cause from None
                if isinstance(problem.cause, InputError):
                    raise Broken(f"Stream '{name}' cannot be loaded: {problem.cause}") from None
                raise
            except (RayError, TimeoutError) as problem:
                if sent and call not in READING:
                    raise ServiceError(
                        502, f"The process of stream '{name}' ended during this call; look whether it was done."
                    ) from None
                log.warning("stream '%s' is moving: %s", name, type(problem).__name__)
            self._known.pop(name, None)
            if loop.time() > end:
                raise ServiceError(503, f"Stream '{name}' is being moved; try again later.", 1.0)
            await asyncio.sleep(AGAIN)

    async def _found(self, name: str, make: bool) -> Any:
        """The actor of a stream, started if it does not run, once it answers."""
        if not NAME.fullmatch(name) or not (make or await asyncio.to_thread(has_stream, self._folder, name)):
            raise ServiceError(404, f"There is no stream '{name[:80]}'.")
        actor = await asyncio.to_thread(self._actor, name)
        await asyncio.wait_for(actor.ping.remote(), PATIENCE)
        self._known[name] = actor
        return actor

    def _actor(self, name: str) -> Any:
        settings = replace(self.settings, decoders=0)
        made = ray.remote(Adapter).options(
            name=prefix(self._folder) + name, namespace=NAMESPACE, get_if_exists=True, lifetime="detached",
            max_restarts=-1, num_cpus=CPUS, scheduling_strategy="SPREAD",
        )  # fmt: skip
        return made.remote(str(folder_of(self._folder, name)), self._about, settings, *self._encoders)

    async def _end_if_empty(self, name: str) -> None:
        actor = self._known.pop(name, None)
        with contextlib.suppress(RayActorError):  # it is gone
            if actor is not None and await actor.end.remote(only_empty=True):
                ray.kill(actor)

    async def _check_room(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ServiceError(422, f"A stream's name is 1 to 64 letters, digits, '.', '_' or '-'; got {name[:80]!r}.")
        most = self.settings.limits.streams
        if len(known := await self._names()) >= most and name not in known:
            raise ServiceError(409, f"There are {most} streams, as many as there may be.")

    # Calls of all streams

    async def _names(self) -> list[str]:
        return list(await asyncio.to_thread(streams_in, self._folder))

    async def _all(self, call: str) -> dict[str, Any]:
        """What every stream answers to a call, or that it is broken; one that was deleted meanwhile is left out."""

        async def one(name: str) -> Any:
            try:
                header = {"call": call, "arguments": [], "options": {}}
                found, data = await self._ask(name, lambda actor: actor.perform.remote(header, EMPTY), call)
                return bytes(data) if found.get("bytes") else found.get("result")
            except Broken as broken:
                return broken
            except ServiceError:
                return None

        names = await self._names()
        answers = zip(names, await asyncio.gather(*map(one, names)), strict=True)
        return {name: answer for name, answer in answers if answer is not None}

    async def _whole(self, call: str) -> dict[str, Any]:
        """The same without broken ones."""
        return {name: answer for name, answer in (await self._all(call)).items() if not isinstance(answer, Broken)}

    async def info(self) -> dict[str, Any]:
        """The service in brief."""
        answers, about = await self._all("info"), self._about
        broken = {name: str(answer) for name, answer in answers.items() if isinstance(answer, Broken)}
        found = [answer for name, answer in answers.items() if name not in broken]
        return {
            "version": testtime.__version__,
            "encoder": about and about.name,
            "device": about and about.device,
            "methods": registry.METHODS.names(),
            "limits": asdict(self.settings.limits),
            "streams": sum(each["streams"] for each in found),
            "broken": broken | {name: why for each in found for name, why in each["broken"].items()},
            "waiting": sum(each["waiting"] for each in found),
            "read_only": next((each["read_only"] for each in found if each["read_only"]), ""),
        }

    async def streams(self) -> list[dict[str, Any]]:
        """All streams, by name."""
        return [stream for found in (await self._whole("streams")).values() for stream in found]

    async def metrics(self) -> bytes:
        """The metrics of this process and of every stream's, each under its name."""
        streams = {f"stream {name}": text for name, text in (await self._whole("metrics")).items()}
        return merged({f"front {ray.get_runtime_context().get_actor_id()[:8]}": self.telemetry.text()} | streams)

    async def spend(self, who: str, rate: float) -> None:
        """Take one request from someone's rate, or refuse it."""
        actor = ray.remote(SharedRates).options(
            name=prefix(self._folder), namespace=NAMESPACE, get_if_exists=True, lifetime="detached", max_restarts=-1,
            num_cpus=0,
        )  # fmt: skip
        if (refusal := await actor.remote().spend.remote(who, rate)) is not None:
            raise Refusal(*refusal)

    # Calls that concern two streams

    async def fork(self, name: str, new: str, snapshot: int | None = None) -> dict[str, Any]:
        """A second stream that starts where this one is, or was at a snapshot."""
        info, state = await self.stream(name), await self.export(name, snapshot)
        templates = info["templates"]
        return await self.import_state(
            new, state, templates=tuple(templates) if isinstance(templates, list) else templates,
            thumbnails=info["thumbnails"],
        )  # fmt: skip

    async def tour(self) -> dict[str, Any]:
        """A new stream that shows how adaptation works; those of earlier tours are deleted."""
        for old, spec in (await asyncio.to_thread(streams_in, self._folder)).items():
            if spec.get("tour"):
                await self.delete(old)
        return await self.__getattr__("tour")(new_name())

    # Events

    @asynccontextmanager
    async def subscribe(self, name: str) -> AsyncIterator[Events]:
        """What happens in a stream from now on."""
        events, reader = Events(), secrets.token_hex(8)

        async def take(wait: bool) -> None:
            for event in await self._ask(name, lambda actor: actor.events.remote(name, reader, wait), "stream"):
                events.add(event)

        async def follow() -> None:
            while True:
                await take(wait=True)

        await take(wait=False)
        following = asyncio.create_task(follow())
        try:
            yield events
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServiceError):
                await following


EMPTY = np.empty(0, np.uint8)


def _stream_of(header: Header) -> str:
    """The stream that a call is about."""
    if header["call"] == "answer":
        return header["name"]
    first = header["arguments"][0]
    return first["spec"]["name"] if isinstance(first, dict) else first


def _with_keys(header: Header) -> tuple[Header, list[int]]:
    """The header of images with an idempotency key each, and the places of those that had none."""
    rows = header["pictures"]
    ours = [place for place, row in enumerate(rows) if row["key"] is None]
    return {**header, "pictures": [{**row, "key": row["key"] or secrets.token_hex(16)} for row in rows]}, ours
