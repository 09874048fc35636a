"""Clients of the service: `Client`, and `AsyncClient` for asyncio.

    from testtime.serve.client import Client

    client = Client("http://127.0.0.1:8000", token="tt_...")
    client.create("pets", ["cat", "dog"])
    print(client.classify("pets", "photos/me.jpg")["label"])

A request that the server refuses for now (429, 503), or whose connection breaks, is sent again. Images carry an
idempotency key, so an image that is sent twice is learned once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from testtime.serve import calls
from testtime.serve.async_client import AsyncClient
from testtime.serve.calls import Call, headers_of, httpx, lost, may_follow, may_repeat, stream_path
from testtime.serve.replies import Answer, AuditRow, ImageFailure, LabelResult, SnapshotInfo, StreamInfo
from testtime.serve.types import ServiceError

__all__ = ["AsyncClient", "Client", "ServiceError"]


class Client:
    """Calls a service. Errors are `ServiceError` with the server's own words; no connection, `ConnectionError`."""

    def __init__(
        self, url: str = "http://127.0.0.1:8000", token: str | None = None, *, attempts: int = 5, timeout: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._url, self._attempts = url, max(1, attempts)
        self._http = httpx.Client(base_url=url, headers=headers_of(token), timeout=timeout, transport=transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, call: Call) -> httpx.Response:
        for attempt in range(self._attempts):
            last, response = attempt == self._attempts - 1, None
            try:
                response = self._http.request(**call.arguments())
            except httpx.TransportError as problem:
                if last or not may_repeat(call, problem):
                    raise lost(self._url, problem) from problem
            if response is not None and (last or not may_follow(call, response)):
                break
            time.sleep(calls.wait_before(attempt, response))
        assert response is not None
        if response.is_error:
            raise calls.failure(response)
        return response

    def _json(self, call: Call) -> Any:
        return self._send(call).json()

    def info(self) -> dict[str, Any]:
        """Version, encoder, device, limits and methods of the service."""
        return self._json(calls.get("/v1/info"))

    def streams(self) -> list[StreamInfo]:
        return self._json(calls.get("/v1/streams"))["streams"]

    def stream(self, name: str) -> StreamInfo:
        return self._json(calls.get(stream_path(name)))

    def create(self, name: str, classes: Sequence[str], **options: Any) -> StreamInfo:
        """Make a stream; options are those of the API: templates, method, settings, guard, views, thumbnails, ..."""
        return self._json(calls.new_stream(name, classes, options))

    def delete(self, name: str) -> None:
        self._send(Call("DELETE", stream_path(name)))

    def classify(
        self, stream: str, image: Any, *, learn: bool = True, top: int = 5, name: str | None = None,
        key: str | None = None,
    ) -> Answer:  # fmt: skip
        """Classify an image (a path, bytes or an image of Pillow), and learn from it."""
        return calls.single(self._json(calls.one_image(stream, image, learn, top, name, key)))

    def predict(self, stream: str, image: Any, *, top: int = 5) -> Answer:
        """Classify an image without learning from it."""
        return self.classify(stream, image, learn=False, top=top)

    def batch(
        self, stream: str, images: Iterable[Any], *, learn: bool = True, top: int = 5, key: str | None = None
    ) -> list[Answer | ImageFailure]:
        """Classify several images in one request: an answer or an error for each, in their order."""
        return self._json(calls.several_images(stream, images, learn, top, key))["answers"]

    def label(self, stream: str, image: int, label: str) -> LabelResult:
        """Give the right label of an image, by the `id` of its answer."""
        return self._json(Call("POST", stream_path(stream, "labels"), json={"image": image, "label": label}))

    def images(self, stream: str, before: int | None = None, limit: int = 50) -> list[AuditRow]:
        """The latest events of a stream, newest first."""
        return self._json(calls.get(stream_path(stream, "images"), before=before, limit=limit))["images"]

    def image(self, stream: str, image: int) -> AuditRow:
        return self._json(calls.get(stream_path(stream, "images", image)))

    def thumbnail(self, stream: str, image: int) -> bytes:
        return self._send(calls.get(stream_path(stream, "images", image, "thumbnail"))).content

    def unlearn(self, stream: str, image: int) -> StreamInfo:
        """Make the stream as if it had never seen an image."""
        return self._json(Call("DELETE", stream_path(stream, "images", image)))

    def snapshots(self, stream: str) -> list[SnapshotInfo]:
        return self._json(calls.get(stream_path(stream, "snapshots")))["snapshots"]

    def snapshot(self, stream: str, title: str = "") -> SnapshotInfo:
        """Take a snapshot."""
        return self._json(Call("POST", stream_path(stream, "snapshots"), json={"title": title}))

    def delete_snapshot(self, stream: str, snapshot: int) -> None:
        self._send(Call("DELETE", stream_path(stream, "snapshots", snapshot)))

    def rollback(self, stream: str, *, snapshot: int | None = None, before: int | None = None) -> StreamInfo:
        """Go back to a snapshot, or to right before an image."""
        return self._json(Call("POST", stream_path(stream, "rollback"), json={"snapshot": snapshot, "before": before}))

    def reset(self, stream: str) -> StreamInfo:
        """Forget everything that a stream has learned."""
        return self._json(Call("POST", stream_path(stream, "reset")))

    def fork(self, stream: str, new: str, snapshot: int | None = None) -> StreamInfo:
        """Start a new stream where this one is, or at one of its snapshots."""
        return self._json(Call("POST", stream_path(stream, "fork"), json={"name": new, "snapshot": snapshot}))

    def change_classes(self, stream: str, add: Sequence[str] = (), remove: Sequence[str] = ()) -> StreamInfo:
        body = {"add": list(add), "remove": list(remove)}
        return self._json(Call("POST", stream_path(stream, "classes"), json=body))

    def export(self, stream: str, snapshot: int | None = None) -> bytes:
        """The state of a stream, as a safetensors file."""
        return self._send(calls.get(stream_path(stream, "state"), snapshot=snapshot)).content

    def import_state(self, name: str, state: bytes, *, thumbnails: bool = False) -> StreamInfo:
        """Make a stream of an exported state."""
        params = {"thumbnails": str(thumbnails).lower()}
        return self._json(Call("PUT", stream_path(name, "state"), content=state, params=params))

    def queues(self, stream: str) -> dict[str, Any]:
        return self._json(calls.get(stream_path(stream, "queues")))

    def map(self, stream: str) -> dict[str, Any]:
        return self._json(calls.get(stream_path(stream, "map")))

    def events(self, stream: str) -> Iterator[dict[str, Any]]:
        """Answers and changes of a stream as they happen, until the server stops."""
        lines = calls.EventLines()
        try:
            with self._http.stream("GET", stream_path(stream, "events"), timeout=None) as response:
                if response.is_error:
                    response.read()
                    raise calls.failure(response)
                for line in response.iter_lines():
                    if (event := lines.take(line)) is not None:
                        yield event
        except httpx.TransportError as problem:
            raise lost(self._url, problem) from problem
