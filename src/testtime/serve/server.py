"""The server process: uvicorn around the application, and a stop that lets accepted requests finish."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from testtime.errors import InputError
from testtime.serve.types import Limits

GRACE = 30  # seconds for requests to finish once the server stops
CONNECTIONS = 1000  # beyond these, requests get 503
LEAVING = 1.0  # seconds until a port is taken for good
SWITCH = 0.0005  # seconds a thread may keep the others from Python: an answer passes through several threads


class Stoppable(uvicorn.Server):
    """A server whose lasting connections (events, WebSockets) end when it stops, since it would wait for them.

    SIGTERM and SIGINT stop it in order, and it ends normally after them; a second SIGINT ends it at once.
    """

    def stop(self) -> None:
        """Stop in order; may be called from another thread or a signal handler."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.stop()

    async def shutdown(self, sockets: Any = None) -> None:
        self.config.app.state.stopping.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; a port that is taken is an error before the encoder is loaded."""
    end = time.monotonic() + LEAVING
    while True:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and time.monotonic() < end:
                time.sleep(0.05)  # processes of a server that was killed leave a moment later
                continue
            raise InputError(
                f"Cannot listen on {host}, port {port}: {problem.strerror or problem}. Choose another --port or --host."
            ) from None


def configuration(
    app: Any, limits: Limits | None = None, certificate: str | None = None, key: str | None = None
) -> uvicorn.Config:
    """How the application is served. The logs are ours (`serve.logs`), and headers of proxies are not believed."""
    return uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=(limits or Limits()).image_bytes,
        ws_max_queue=2,  # frames that are read ahead of the one being answered
        ws_per_message_deflate=False,  # images do not compress
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def serve_on(listener: socket.socket, config: uvicorn.Config) -> None:
    """Serve until a signal comes, and until what was accepted by then is answered."""
    Stoppable(config).run(sockets=[listener])


@contextmanager
def steady() -> Iterator[None]:
    """Answers come at an even pace: threads take turns often, and what is loaded is not searched for garbage."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop that uvicorn uses: uvloop's where it is installed."""
    return uvicorn.Config(None).get_loop_factory()  # type: ignore[arg-type]
