"""Calls between the service and the processes that speak HTTP for it, over a pair of sockets.

A message is two lengths, a header in JSON, and bytes. Here a thread for each process receives its calls: pixels go
straight into memory that a GPU reads from, and Python waits for them once an image.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from testtime.serve.remote import Bytes, Call, Header, Remote, perform
from testtime.serve.types import Events, ServiceError, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from testtime.serve.service import Service

HEAD = struct.Struct("<IQ")  # bytes of the header, and those that follow it
LARGE = 2**16  # bytes from which an answer is sent by a thread, since it may fill the socket
STALLED = 10  # seconds after which a process that takes nothing is given up
TELL = 0.5  # seconds between two reports of what was counted


def message(header: Header, *parts: Bytes) -> list[Bytes]:
    """A message, in parts."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return [HEAD.pack(len(text), sum(map(len, parts))) + text, *parts]


def receive(link: socket.socket, into: Callable[[int], Any]) -> tuple[Header, Any]:
    """The next message of a socket that blocks; `into` makes the memory for its bytes. EOFError at the end."""
    length, count = HEAD.unpack(_exactly(link, bytearray(HEAD.size)))
    header = json.loads(_exactly(link, bytearray(length)))
    memory = into(count)
    if count:
        _exactly(link, memoryview(memory if isinstance(memory, bytearray) else memory.numpy()))
    return header, memory


def _exactly(link: socket.socket, memory: Any) -> Any:
    left = memoryview(memory)
    while left:
        count = link.recv_into(left, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        left = left[count:]
    return memory


# Where the service is


class Link:
    """Answers the calls of one process; made in the service's event loop. `ended` is set once the process is gone."""

    def __init__(self, service: Service, link: socket.socket, memory: Callable[[int], Tensor]) -> None:
        self._service, self._link, self._memory = service, link, memory
        self._loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        self._sending = threading.Lock()  # messages are sent whole
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALLED, 0))
        self._subscriptions: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._receive, name="testtime-link", daemon=True).start()

    def send(self, header: Header, *parts: Bytes) -> None:
        """Send a message; the link ends if the process does not take it."""
        try:
            with self._sending:
                for part in message(header, *parts):
                    self._link.sendall(part)
        except OSError:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)  # which the thread that receives notices

    def _receive(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    call = Call.of(*receive(self._link, self._memory))  # here: the event loop has enough to do
                    self._loop.call_soon_threadsafe(self._begin, call)
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop may have ended before
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for task in self._subscriptions.values():
            task.cancel()
        self._link.close()
        self.ended.set()

    def _begin(self, call: Call) -> None:
        header = call.header
        if header["call"] == "unsubscribe":
            if (feed := self._subscriptions.pop(header["id"], None)) is not None:
                feed.cancel()
        elif header["call"] == "subscribe":
            self._subscriptions[header["id"]] = self._loop.create_task(self._feed(header["id"], header["name"]))
        else:
            task = self._loop.create_task(self._perform(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _perform(self, call: Call) -> None:
        found, data = await perform(self._service, call)
        await self._reply({"id": call.header["id"], **found}, data)

    async def _reply(self, header: Header, data: bytes = b"") -> None:
        if len(data) < LARGE and not self._sending.locked():
            self.send(header, data)
        else:
            await asyncio.to_thread(self.send, header, data)

    async def _feed(self, number: int, name: str) -> None:
        with contextlib.suppress(ServiceError):  # the stream was deleted meanwhile
            async with self._service.subscribe(name) as queue:
                while True:
                    await self._reply({"id": number, "event": await queue.get()})


# Where HTTP is spoken


class Linked(Remote):
    """The service at the other end of a socket. If it goes, this process ends: nothing can be answered."""

    def __init__(self, link: socket.socket, settings: Settings) -> None:
        super().__init__(settings)
        self._link, self._numbers = link, itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[Header, Bytes]]] = {}
        self._queues: dict[int, Events] = {}

    async def start(self) -> None:
        """Wait until the service is ready."""
        self._link.setblocking(False)
        self._loop, self._sending = asyncio.get_running_loop(), asyncio.Lock()
        self._opened = self._loop.create_future()
        self._tasks = [self._loop.create_task(self._receive()), self._loop.create_task(self._report())]
        await self._opened
        await super().start()

    async def close(self) -> None:
        """Tell what is left to tell, and leave."""
        await super().close()
        for task in self._tasks:
            task.cancel()
        self._link.close()

    async def exchange(self, header: Header, *parts: Bytes) -> tuple[Header, Bytes]:
        """Send a call, and return what comes back."""
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        try:
            await self._send({"id": number, **header}, *parts)
            return await answer
        finally:
            del self._answers[number]

    @asynccontextmanager
    async def subscribe(self, name: str) -> AsyncIterator[Events]:
        """What happens in a stream from now on."""
        number = next(self._numbers)
        queue = self._queues[number] = Events()
        try:
            await self._send({"call": "subscribe", "id": number, "name": name})
            yield queue
        finally:
            del self._queues[number]
            await self._send({"call": "unsubscribe", "id": number})

    async def _send(self, header: Header, *parts: Bytes) -> None:
        # a request that is cancelled must not leave half a message behind
        task = self._loop.create_task(self._send_whole(message(header, *parts)))
        await asyncio.shield(task)

    async def _send_whole(self, parts: list[Bytes]) -> None:
        async with self._sending:
            for part in parts:
                await self._loop.sock_sendall(self._link, part)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(TELL)
            await self.tell()

    async def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                length, count = HEAD.unpack(await self._exactly(HEAD.size))
                header = json.loads(await self._exactly(length))
                self._take(header, await self._exactly(count))
        os._exit(1)  # the service is gone: connections end here, and none of them waits for an answer

    def _take(self, header: Header, blob: bytearray) -> None:
        if "ready" in header:
            self._opened.set_result(None)
        elif "event" in header:
            if (queue := self._queues.get(header["id"])) is not None:
                queue.add(header["event"])
        elif (answer := self._answers.get(header["id"])) is not None and not answer.done():
            answer.set_result((header, blob))

    async def _exactly(self, count: int) -> bytearray:
        memory = bytearray(count)
        left = memoryview(memory)
        while left:
            received = await self._loop.sock_recv_into(self._link, left)
            if not received:
                raise EOFError
            left = left[received:]
        return memory
