"""Connections that stay: a stream's events as they happen, and images sent one after another over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response, WebSocket
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocketDisconnect

from testtime.errors import InputError
from testtime.serve.auth import Gate, Refusal, bearer
from testtime.serve.bodies import Budget, too_large
from testtime.serve.routes import Name, admit, admitted, described, flag, top_of
from testtime.serve.types import Limits, ServiceError, Upload

if TYPE_CHECKING:
    from testtime.serve.remote import Served

BEAT = 15.0  # seconds without an event after which a sign of life is sent, and the token is looked at again
TOKEN_SECONDS = 10.0  # for the token of a WebSocket to arrive


def live_routes(service: Served, gate: Gate, budget: Budget, limits: Limits, stopping: asyncio.Event) -> APIRouter:
    """Server-sent events and the WebSocket; both end when the server stops."""
    router = APIRouter(prefix="/v1", tags=["live"])
    content = {"text/event-stream": {"schema": {"type": "string"}}}

    @router.get(
        "/streams/{name}/events",
        summary="Answers and changes of a stream, as server-sent events",
        **described("predict", None, 404, content=content),
    )
    async def events(request: Request, name: Name) -> Response:
        await admitted(service, gate, request, "predict")
        await service.stream(name)  # 404 while it can still be said

        def allowed() -> None:
            gate.identify(bearer(request.headers.get("authorization")), "predict")

        lines = _lines(service, name, stopping, allowed)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    @router.websocket("/streams/{name}/live")
    async def live(socket: WebSocket, name: str) -> None:
        await _Live(service, gate, budget, limits, socket, name).run(stopping)

    return router


async def _lines(service: Served, name: str, stopping: asyncio.Event, allowed: Any) -> AsyncIterator[str]:
    stop = asyncio.ensure_future(stopping.wait())
    try:
        async with service.subscribe(name) as queue:
            yield ": connected\n\n"
            while not stop.done():
                event = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait({event, stop}, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
                    allowed()
                    if event.done():
                        found = event.result()
                        yield f"event: {found['type']}\ndata: {json.dumps(found, separators=(',', ':'))}\n\n"
                    else:
                        yield ": still here\n\n"
                finally:
                    event.cancel()
    except Refusal:
        return  # the token was revoked
    finally:
        stop.cancel()


class _Live:
    """One WebSocket: frames are answered one after another, in their order."""

    def __init__(
        self, service: Served, gate: Gate, budget: Budget, limits: Limits, socket: WebSocket, name: str
    ) -> None:
        self._service, self._gate, self._budget, self._limits = service, gate, budget, limits
        self._socket, self._name = socket, name
        self._learn, self._top = True, 5

    async def run(self, stopping: asyncio.Event) -> None:
        """Answer frames until the client leaves or the server stops."""
        await self._socket.accept()
        stop = asyncio.ensure_future(stopping.wait())
        try:
            self._learn = flag(self._socket.query_params.get("learn"), "learn")
            self._top = top_of(self._socket.query_params.get("top"))
            secret = await self._secret()
            self._gate.identify(secret, self._scope)
            await self._service.stream(self._name)
            while not stop.done():
                frame = asyncio.ensure_future(self._socket.receive())
                try:
                    await asyncio.wait({frame, stop}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not frame.done():
                        frame.cancel()
                if stop.done() and not frame.done():
                    break
                message = frame.result()
                if message["type"] == "websocket.disconnect":
                    return
                await self._say(await self._answer(secret, message.get("bytes")))
            await self._socket.close(1001, "The server is stopping.")
        except ServiceError as problem:
            await self._say(_failure(problem))
            await self._socket.close(1008)
        except WebSocketDisconnect:
            return
        finally:
            stop.cancel()

    @property
    def _scope(self) -> str:
        return "learn" if self._learn else "predict"

    async def _secret(self) -> str | None:
        """The token of the header, or of the first frame."""
        header = self._socket.headers.get("authorization")
        if header is not None or self._gate.open:
            return bearer(header)
        try:
            async with asyncio.timeout(TOKEN_SECONDS):
                first = await self._socket.receive()
            given = json.loads(first.get("text") or "")["token"]
        except (TimeoutError, ValueError, RecursionError, TypeError, KeyError):
            given = None
        if not isinstance(given, str):
            raise Refusal(401, "no token", 'A token is needed: send the text {"token": TOKEN} first.')
        return given

    async def _answer(self, secret: str | None, data: bytes | None) -> dict[str, Any]:
        """The answer to one frame. Its errors are answers too, and the connection stays, unless the token is gone."""
        try:
            if data is None:
                raise ServiceError(422, "Send an image as a binary frame.")
            if len(data) > self._limits.image_bytes:
                raise too_large(self._limits.image_bytes, "An image")
            await admit(self._service, self._gate, secret, self._scope)
            with self._budget.held() as hold:
                hold.take(len(data))
                uploads = [Upload(data)]
                answers = await self._service.answer(self._name, uploads, learn=self._learn, top=self._top)
            return answers[0]
        except Refusal as problem:
            if problem.status != 429:
                raise
            return _failure(problem)
        except (ServiceError, InputError) as problem:
            return _failure(problem)

    async def _say(self, answer: dict[str, Any]) -> None:
        await self._socket.send_text(json.dumps(answer, separators=(",", ":")))


def _failure(problem: ServiceError | InputError) -> dict[str, Any]:
    if isinstance(problem, InputError):
        return {"error": str(problem), "status": 422, "image": ""}
    wait = {} if problem.retry_after is None else {"retry_after": problem.retry_after}
    return {"error": str(problem), "status": problem.status, "image": "", **wait}
