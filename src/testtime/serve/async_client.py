"""The client for asyncio; `testtime.serve.client` has the other, and what both share is in `testtime.serve.calls`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from testtime.serve import calls
from testtime.serve.calls import Call, headers_of, httpx, lost, may_follow, may_repeat, stream_path
from testtime.serve.replies import Answer, AuditRow, ImageFailure, LabelResult, SnapshotInfo, StreamInfo


class AsyncClient:
    """`Client` for asyncio, call for call, with the same errors."""

    def __init__(
        self, url: str = "http://127.0.0.1:8000", token: str | None = None, *, attempts: int = 5, timeout: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._url, self._attempts = url, max(1, attempts)
        self._http = httpx.AsyncClient(base_url=url, headers=headers_of(token), timeout=timeout, transport=transport)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, call: Call) -> httpx.Response:
        for attempt in range(self._attempts):
            last, response = attempt == self._attempts - 1, None
            try:
                response = await self._http.request(**call.arguments())
            except httpx.TransportError as problem:
                if last or not may_repeat(call, problem):
                    raise lost(self._url, problem) from problem
            if response is not None and (last or not may_follow(call, response)):
                break
            await asyncio.sleep(calls.wait_before(attempt, response))
        assert response is not None
        if response.is_error:
            raise calls.failure(response)
        return response

    async def _json(self, call: Call) -> Any:
        return (await self._send(call)).json()

    async def info(self) -> dict[str, Any]:
        """Version, encoder, device, limits and methods of the service."""
        return await self._json(calls.get("/v1/info"))

    async def streams(self) -> list[StreamInfo]:
        return (await self._json(calls.get("/v1/streams")))["streams"]

    async def stream(self, name: str) -> StreamInfo:
        return await self._json(calls.get(stream_path(name)))

    async def create(self, name: str, classes: Sequence[str], **options: Any) -> StreamInfo:
        """Make a stream; options are those of the API: templates, method, settings, guard, views, thumbnails, ..."""
        return await self._json(calls.new_stream(name, classes, options))

    async def delete(self, name: str) -> None:
        await self._send(Call("DELETE", stream_path(name)))

    async def classify(
        self, stream: str, image: Any, *, learn: bool = True, top: int = 5, name: str | None = None,
        key: str | None = None,
    ) -> Answer:  # fmt: skip
        """Classify an image (a path, bytes or an image of Pillow), and learn from it."""
        return calls.single(await self._json(calls.one_image(stream, image, learn, top, name, key)))

    async def predict(self, stream: str, image: Any, *, top: int = 5) -> Answer:
        """Classify an image without learning from it."""
        return await self.classify(stream, image, learn=False, top=top)

    async def batch(
        self, stream: str, images: Iterable[Any], *, learn: bool = True, top: int = 5, key: str | None = None
    ) -> list[Answer | ImageFailure]:
        """Classify several images in one request: an answer or an error for each, in their order."""
        return (await self._json(calls.several_images(stream, images, learn, top, key)))["answers"]

    async def label(self, stream: str, image: int, label: str) -> LabelResult:
        """Give the right label of an image, by the `id` of its answer."""
        return await self._json(Call("POST", stream_path(stream, "labels"), json={"image": image, "label": label}))

    async def images(self, stream: str, before: int | None = None, limit: int = 50) -> list[AuditRow]:
        """The latest events of a stream, newest first."""
        return (await self._json(calls.get(stream_path(stream, "images"), before=before, limit=limit)))["images"]

    async def image(self, stream: str, image: int) -> AuditRow:
        return await self._json(calls.get(stream_path(stream, "images", image)))

    async def thumbnail(self, stream: str, image: int) -> bytes:
        return (await self._send(calls.get(stream_path(stream, "images", image, "thumbnail")))).content

    async def unlearn(self, stream: str, image: int) -> StreamInfo:
        """Make the stream as if it had never seen an image."""
        return await self._json(Call("DELETE", stream_path(stream, "images", image)))

    async def snapshots(self, stream: str) -> list[SnapshotInfo]:
        return (await self._json(calls.get(stream_path(stream, "snapshots"))))["snapshots"]

    async def snapshot(self, stream: str, title: str = "") -> SnapshotInfo:
        """Take a snapshot."""
        return await self._json(Call("POST", stream_path(stream, "snapshots"), json={"title": title}))

    async def delete_snapshot(self, stream: str, snapshot: int) -> None:
        await self._send(Call("DELETE", stream_path(stream, "snapshots", snapshot)))

    async def rollback(self, stream: str, *, snapshot: int | None = None, before: int | None = None) -> StreamInfo:
        """Go back to a snapshot, or to right before an image."""
        return await self._json(
            Call("POST", stream_path(stream, "rollback"), json={"snapshot": snapshot, "before": before})
        )

    async def reset(self, stream: str) -> StreamInfo:
        """Forget everything that a stream has learned."""
        return await self._json(Call("POST", stream_path(stream, "reset")))

    async def fork(self, stream: str, new: str, snapshot: int | None = None) -> StreamInfo:
        """Start a new stream where this one is, or at one of its snapshots."""
        return await self._json(Call("POST", stream_path(stream, "fork"), json={"name": new, "snapshot": snapshot}))

    async def change_classes(self, stream: str, add: Sequence[str] = (), remove: Sequence[str] = ()) -> StreamInfo:
        body = {"add": list(add), "remove": list(remove)}
        return await self._json(Call("POST", stream_path(stream, "classes"), json=body))

    async def export(self, stream: str, snapshot: int | None = None) -> bytes:
        """The state of a stream, as a safetensors file."""
        return (await self._send(calls.get(stream_path(stream, "state"), snapshot=snapshot))).content

    async def import_state(self, name: str, state: bytes, *, thumbnails: bool = False) -> StreamInfo:
        """Make a stream of an exported state."""
        params = {"thumbnails": str(thumbnails).lower()}
        return await self._json(Call("PUT", stream_path(name, "state"), content=state, params=params))

    async def queues(self, stream: str) -> dict[str, Any]:
        return await self._json(calls.get(stream_path(stream, "queues")))

    async def map(self, stream: str) -> dict[str, Any]:
        return await self._json(calls.get(stream_path(stream, "map")))

    async def events(self, stream: str) -> AsyncIterator[dict[str, Any]]:
        """Answers and changes of a stream as they happen, until the server stops."""
        lines = calls.EventLines()
        try:
            async with self._http.stream("GET", stream_path(stream, "events"), timeout=None) as response:
                if response.is_error:
                    await response.aread()
                    raise calls.failure(response)
                async for line in response.aiter_lines():
                    if (event := lines.take(line)) is not None:
                        yield event
        except httpx.TransportError as problem:
            raise lost(self._url, problem) from problem
