"""Processes that speak HTTP and decode images for the service: Python runs one thread at a time, and a GPU needs more.

    clients -> front processes (HTTP, tokens, decoders) -> this process (encoder, streams, log)

They share the listening socket, so the system gives a connection to one that is free. A process that dies is replaced;
its connections break, and clients send again. If this process dies, they end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from testtime.serve.front_process import Address
from testtime.serve.link import Link
from testtime.serve.server import GRACE, event_loop, steady

if TYPE_CHECKING:
    from testtime.serve.service import Service

LEAVE = 5.0  # seconds for a process to end after its last message
AGAIN = 1.0  # seconds before a process that ended is replaced

log = logging.getLogger("testtime.serve")


class Fronts:
    """Front processes of a service; for its event loop."""

    def __init__(self, service: Service, listener: socket.socket, count: int, decoders: int, address: Address) -> None:
        self._service, self._listener, self._count, self._address = service, listener, count, address
        limits = service.settings.limits
        limits = replace(limits, body_bytes=max(limits.body_bytes // count, limits.request_bytes))
        self._settings = replace(service.settings, limits=limits, decoders=-(-decoders // count))
        self._processes: dict[subprocess.Popen[bytes], Link] = {}
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the processes running until told to stop, and then until they have answered what they accepted."""
        keepers = [asyncio.create_task(self._keep()) for _ in range(self._count)]
        await stop.wait()
        self._stopping = True
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=GRACE + 5)
        for process in self._processes:
            process.kill()
        for keeper in late:
            keeper.cancel()

    async def _keep(self) -> None:
        while not self._stopping:
            process, link = self._spawn()
            self._processes[process] = link
            await link.ended.wait()
            try:
                code = await asyncio.to_thread(process.wait, LEAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                code = await asyncio.to_thread(process.wait)
            del self._processes[process]
            if not self._stopping:
                log.error("a front process ended with status %s, and is replaced", code)
                await asyncio.sleep(AGAIN)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], Link]:
        ours, theirs = socket.socketpair()
        passed = theirs.fileno(), self._listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "testtime.serve.front_process", *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is for this process, which stops them in order
        )
        theirs.close()
        link = Link(self._service, ours, _memory(self._service.encoder.device))
        link.send({"settings": asdict(self._settings), "address": asdict(self._address)})
        link.send({"ready": True})
        return process, link


def serve_through(fronts: Callable[[], Fronts], service: Service) -> None:
    """Serve until a signal comes, and until what was accepted by then is answered."""

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await service.start()
        try:
            with steady():
                await fronts().run(stop)
        finally:
            await service.close()

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(serve())


def _memory(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Makes memory for images: such that a GPU can read from it, if there is one."""
    pinned = device.type == "cuda"
    return lambda count: torch.empty(count, dtype=torch.uint8, pin_memory=pinned and count > 0)
