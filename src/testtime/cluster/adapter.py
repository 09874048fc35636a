"""A stream's own process on Ray: the actor that holds the stream, with its log in a folder that all machines see.

One actor for each stream: the steps of a stream follow one another, so a stream is what can be moved, and one that dies
or fills its memory takes no other with it. Ray starts an actor that dies again, on another machine if need be; it takes
the folder over and goes on from its log. Should the old one still live, out of reach, its folder is fenced off.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve

from testtime.cluster.encoders import About, Encoders
from testtime.images.gpu_views import as_tensor
from testtime.serve.remote import Call, Header, perform
from testtime.serve.service import Service
from testtime.serve.types import Settings

LEAVE = 1.0  # seconds for answers to be sent before a process that lost its folder ends
ENDED = 10.0  # seconds for whoever ended it to kill it
POLL = 10.0  # seconds that a reader of events waits for the next one
FORGET = 60.0  # seconds after which a reader that no longer asks is forgotten
MOVED: tuple[Header, bytes] = {"moved": True}, b""  # the answer to a call of which nothing was done here

Event = dict[str, Any]


class Adapter:
    """The service of one stream. Nothing starts before the first call, in the actor's event loop."""

    def __init__(self, folder: str, about: About, settings: Settings, application: str, encoders: str) -> None:
        self._folder, self._about, self._settings = Path(folder), about, settings
        self._encoders = application, encoders
        self._service: Service | None = None
        self._starting, self._ending = asyncio.Lock(), False
        self._readers: dict[str, _Reader] = {}

    async def _started(self) -> Service:
        async with self._starting:
            if self._service is None:
                application, name = self._encoders
                encoders = Encoders(self._about, serve.get_deployment_handle(name, application))
                service = Service(encoders, self._folder, self._settings, live=encoders, take_over=True)
                await service.start()
                self._service = service
            return self._service

    async def ping(self) -> tuple[str, int]:
        """The machine and the process of this actor, once the stream is loaded."""
        await self._started()
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def perform(self, header: Header, blob: np.ndarray) -> tuple[Header, bytes]:
        """Answer a call as `serve.remote.perform` does, or say that it must be made elsewhere."""
        service = await self._started()
        if self._ending:
            return MOVED
        found = MOVED if service.fenced else await perform(service, Call.of(header, as_tensor(blob)))
        if not service.fenced:
            return found
        asyncio.get_running_loop().call_later(LEAVE, os._exit, 1)
        return MOVED

    async def events(self, name: str, reader: str, wait: bool) -> list[Event]:
        """What happened in the stream since a reader last asked, or happens next if it waits."""
        service, loop = await self._started(), asyncio.get_running_loop()
        for old in [key for key, each in self._readers.items() if loop.time() - each.asked > FORGET]:
            await self._readers.pop(old).context.__aexit__(None, None, None)
        if reader not in self._readers:
            context = service.subscribe(name)
            self._readers[reader] = _Reader(context, await context.__aenter__())
        found, queue = list[Event](), self._readers[reader].queue
        self._readers[reader].asked = loop.time()
        if wait and queue.empty():
            try:
                found.append(await asyncio.wait_for(queue.get(), POLL))
            except TimeoutError:
                return found
        while not queue.empty():
            found.append(queue.get_nowait())
        return found

    async def end(self, only_empty: bool = False) -> bool:
        """Answer what was accepted, and take no more; or only if there is no stream. Whether it may be killed then.

        If nobody kills it, it ends by itself, and Ray starts an empty one: leaving for good (`ray.actor.exit_actor`)
        would wait for references that handles of Ray Serve never let go.
        """
        service = await self._started()
        if not self._ending:
            if only_empty and not service.empty:
                return False
            self._ending = True
            await service.close()
            asyncio.get_running_loop().call_later(ENDED, os._exit, 1)
        return True


class _Reader:
    """Someone who follows the events of the stream."""

    def __init__(self, context: AbstractAsyncContextManager[Any], queue: asyncio.Queue[Event]) -> None:
        self.context, self.queue, self.asked = context, queue, 0.0
