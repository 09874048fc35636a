"""What surrounds every request: an id, security headers, checks of Host and Origin, its log line and its metrics."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from testtime.serve.auth import Gate, is_loopback
from testtime.serve.remote import Notes
from testtime.serve.telemetry import Telemetry

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "media-src 'self' blob:; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),  # for browsers older than frame-ancestors
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(self), geolocation=(), microphone=()"),
]
SAFE = ("GET", "HEAD", "OPTIONS")  # change nothing, and another site cannot read their answers

requests = logging.getLogger("testtime.serve.requests")


class Envelope:
    """ASGI middleware around the application."""

    def __init__(self, app: App, gate: Gate, telemetry: Telemetry | Notes, secure: bool = False) -> None:
        self._app, self._gate, self._telemetry = app, gate, telemetry
        self._headers = HEADERS + ([(b"strict-transport-security", b"max-age=31536000")] if secure else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        http, began, status = scope["type"] == "http", time.perf_counter(), 0
        identity = os.urandom(8).hex()
        scope["request_id"] = identity

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), *self._headers, (b"x-request-id", identity.encode())]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": headers}
            elif message["type"] == "websocket.accept":
                status = 101
            elif message["type"] == "websocket.close" and not status:
                status = 403  # what a server answers to a handshake that is closed
            await send(message)

        try:
            problem = self._foreign(scope)
            if problem:
                self._telemetry.refused("origin")
                await (refuse(answer, problem) if http else answer({"type": "websocket.close", "code": 1008}))
            else:
                await self._app(scope, receive, answer)
        except Exception:
            requests.exception("failed", extra={"fields": {"request": identity}})
            if http and not status:
                await refuse(answer, f"The server failed; its log tells why, under request {identity}.", 500)
            elif not http:
                await answer({"type": "websocket.close", "code": 1011})
        finally:
            self._note(scope, status, time.perf_counter() - began)

    def _foreign(self, scope: Scope) -> str:
        """Why a request to an open service may be another site's doing; empty if it may not.

        A service without tokens trusts whoever reaches it, and a browser on this machine reaches it for any site: by a
        form or a script that posts here (Origin), or under a name of its own that leads here, "DNS rebinding" (Host).
        """
        if not self._gate.open:
            return ""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not _is_here(host):
            return (
                f"Host {host[:100]!r}: a service without tokens answers to localhost alone. Use http://127.0.0.1, or "
                "make a token with 'testtime token add'."
            )
        origin = headers.get(b"origin")
        if origin is None or (scope["type"] == "http" and scope["method"] in SAFE):
            return ""
        if (text := origin.decode("latin-1")).partition("://")[2].lower() == host.lower():
            return ""
        return f"Origin {text[:100]!r} may not change a service without tokens."

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope.get("method", "WEBSOCKET")
        route = getattr(scope.get("route"), "path", None) or "other"
        self._telemetry.request(route, method, status, seconds)
        if requests.isEnabledFor(logging.INFO):
            fields = {
                "request": scope["request_id"],
                "method": method,
                "path": scope["path"][:200],
                "status": status,
                "milliseconds": round(1000 * seconds, 2),
                "client": scope["client"][0] if scope.get("client") else None,
                "token": scope.get("token_name"),
            }
            requests.info("request", extra={"fields": fields})


@lru_cache(64)
def _is_here(host: str) -> bool:
    """Whether a Host header names this machine, with or without a port."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


async def refuse(send: Send, problem: str, status: int = 403) -> None:
    """Answer with an error, below the application's own handlers."""
    body = json.dumps({"error": problem, "status": status}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
