"""A service without an encoder, for tests of what surrounds it, and a server for any application."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from testtime.serve.auth import Rates
from testtime.serve.server import Stoppable, configuration
from testtime.serve.telemetry import Telemetry
from testtime.serve.types import ServiceError, StreamSpec, Upload

TIME = "2026-01-31T12:00:00+00:00"


class FakeService:
    """Keeps what it is given, and answers with the first class; an image that starts with b"bad" is refused."""

    def __init__(self) -> None:
        self.ready, self.read_only, self.telemetry, self.closed = False, "", Telemetry(), False
        self.rates = Rates()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.specs: dict[str, StreamSpec] = {}
        self.seen: dict[str, list[Upload]] = {}
        self.keys: dict[tuple[str, str], dict[str, Any]] = {}
        self.taken: dict[str, list[dict[str, Any]]] = {}
        self.queues_of: dict[str, list[asyncio.Queue[dict[str, Any]]]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.fail_next: list[Exception] = []
        self.held, self.busy = False, 0  # whether answers wait, and how many requests do

    async def start(self) -> None:
        self.telemetry.watch(lambda: self.ready, lambda: bool(self.read_only))
        self.ready = True

    async def metrics(self) -> bytes:
        return self.telemetry.text()

    async def spend(self, who: str, rate: float) -> None:
        self.rates.spend(who, rate)

    async def close(self) -> None:
        self.ready, self.closed = False, True

    def _check(self, name: str) -> StreamSpec:
        if name not in self.specs:
            raise ServiceError(404, f"No stream {name!r}.")
        return self.specs[name]

    async def info(self) -> dict[str, Any]:
        return {"version": "0", "encoder": "fake", "device": "cpu", "limits": {}, "methods": ["dpe"], "streams": 0}

    async def streams(self) -> list[dict[str, Any]]:
        return [await self.stream(name) for name in self.specs]

    async def stream(self, name: str) -> dict[str, Any]:
        spec = self._check(name)
        count = len(self.seen[name])
        return {
            "name": name, "classes": list(spec.classes), "method": spec.method, "settings": spec.settings,
            "guard": spec.guard, "views": spec.views, "augmix": spec.augmix, "seed": spec.seed,
            "thumbnails": spec.thumbnails, "templates": None, "encoder": "fake", "images": count, "position": count,
            "events": count, "learned": count, "refused": {}, "changed": 0, "disagreement": 0.0, "mean_entropy": 0.5,
            "alarms": [], "feedback": {"labels": 0, "right": 0, "zero_shot_right": 0},
            "snapshots": len(self.taken[name]), "waiting": 0, "read_only": self.read_only, "created": TIME,
        }  # fmt: skip

    async def create(self, spec: StreamSpec) -> dict[str, Any]:
        if spec.name in self.specs:
            raise ServiceError(409, f"There is a stream {spec.name!r} already.")
        self.specs[spec.name], self.seen[spec.name], self.taken[spec.name] = spec, [], []
        self.telemetry.event(spec.name, "create")
        return await self.stream(spec.name)

    async def delete(self, name: str) -> None:
        self._check(name)
        del self.specs[name]
        self.telemetry.event(name, "delete")

    async def answer(
        self, name: str, uploads: Sequence[Upload], *, learn: bool = True, top: int = 5
    ) -> list[dict[str, Any]]:
        spec = self._check(name)
        if self.fail_next:
            raise self.fail_next.pop(0)
        self.busy += 1
        while self.held:
            await asyncio.sleep(0.005)
        self.busy -= 1
        answers = []
        for upload in uploads:
            if upload.data.startswith(b"bad"):
                answers.append({"error": "Not an image.", "status": 422, "image": upload.name})
                continue
            known = self.keys.get((name, upload.key or ""))
            if known is not None:
                answers.append({**known, "repeated": True})
                continue
            if learn:
                self.seen[name].append(upload)
            answer = {
                "id": len(self.seen[name]) if learn else None, "index": len(self.seen[name]), "image": upload.name,
                "label": spec.classes[0], "confidence": 0.8, "calibrated_confidence": 0.7, "entropy": 0.5,
                "zero_shot": spec.classes[-1], "zero_shot_confidence": 0.6,
                "probabilities": [{"label": each, "probability": 1 / len(spec.classes)} for each in spec.classes[:top]],
                "learned": learn, "reason": "" if learn else "predict only", "guard": None, "drift": False,
                "disagreement": 1.0, "repeated": False,
                "milliseconds": {"decode": 1.0, "encode": 2.0, "adapt": 1.0, "store": 1.0, "total": 5.0},
            }  # fmt: skip
            if upload.key:
                self.keys[name, upload.key] = answer
            self.telemetry.answered(name, answer)
            for queue in self.queues_of.get(name, []):
                queue.put_nowait({"type": "answer", "answer": answer})
            answers.append(answer)
        return answers

    async def label(self, name: str, image: int, label: str) -> dict[str, Any]:
        self._check(name)
        await self.image(name, image)
        return {"image": image, "label": label, "used": False, "right": True, "zero_shot_right": False}

    async def snapshot(self, name: str, title: str = "") -> dict[str, Any]:
        self._check(name)
        number, count = len(self.taken[name]) + 1, len(self.seen[name])
        taken = {"id": number, "title": title, "images": count, "event": count, "time": TIME, "automatic": False}
        self.taken[name].append(taken)
        return taken

    async def snapshots(self, name: str) -> list[dict[str, Any]]:
        self._check(name)
        return self.taken[name]

    async def delete_snapshot(self, name: str, snapshot: int) -> None:
        self._check(name)
        if not any(each["id"] == snapshot for each in self.taken[name]):
            raise ServiceError(404, f"No snapshot {snapshot}.")
        self.taken[name] = [each for each in self.taken[name] if each["id"] != snapshot]

    async def rollback(self, name: str, *, snapshot: int | None = None, before: int | None = None) -> dict[str, Any]:
        self.calls.append(("rollback", name, snapshot, before))
        return await self.stream(name)

    async def reset(self, name: str) -> dict[str, Any]:
        self._check(name)
        self.seen[name] = []
        return await self.stream(name)

    async def fork(self, name: str, new: str, snapshot: int | None = None) -> dict[str, Any]:
        spec = self._check(name)
        return await self.create(StreamSpec(new, spec.classes))

    async def unlearn(self, name: str, image: int) -> dict[str, Any]:
        await self.image(name, image)
        self.calls.append(("unlearn", name, image))
        return await self.stream(name)

    async def export(self, name: str, snapshot: int | None = None) -> bytes:
        self._check(name)
        return b"state of " + name.encode()

    async def import_state(
        self, name: str, data: bytes, templates: object = None, thumbnails: bool = False
    ) -> dict[str, Any]:
        self.calls.append(("import", name, data, thumbnails))
        return await self.create(StreamSpec(name, ("cat",), thumbnails=thumbnails))

    async def change_classes(self, name: str, add: Sequence[str] = (), remove: Sequence[str] = ()) -> dict[str, Any]:
        spec = self._check(name)
        classes = [each for each in (*spec.classes, *add) if each not in remove]
        self.specs[name] = StreamSpec(name, tuple(classes))
        return await self.stream(name)

    async def images(self, name: str, before: int | None = None, limit: int = 50) -> list[dict[str, Any]]:
        self._check(name)
        numbers = range(min(len(self.seen[name]), (before or 2**53) - 1), 0, -1)
        return [await self.image(name, number) for number in list(numbers)[:limit]]

    async def image(self, name: str, image: int) -> dict[str, Any]:
        self._check(name)
        if not 1 <= image <= len(self.seen[name]):
            raise ServiceError(404, f"Stream {name!r} has no image {image}.")
        return {
            "id": image, "kind": "image", "live": True, "time": TIME, "image": self.seen[name][image - 1].name,
            "sha256": "0" * 64, "index": image - 1, "label": "cat", "zero_shot": "dog", "confidence": 0.8,
            "entropy": 0.5, "learned": True, "reason": "", "guard": None, "thumbnail": False, "detail": {},
        }  # fmt: skip

    async def thumbnail(self, name: str, image: int) -> bytes:
        await self.image(name, image)
        return b"\xff\xd8thumbnail"

    async def queues(self, name: str) -> dict[str, Any]:
        slots = [{"image": 1, "entropy": 0.1}]
        return {"classes": [{"label": each, "slots": slots} for each in self._check(name).classes]}

    async def map(self, name: str) -> dict[str, Any]:
        self._check(name)
        return {
            "classes": [{"label": "cat", "prompt": [0.0, 1.0], "text": [0.0, 1.0], "visual": None}],
            "images": [{"id": 1, "label": "cat", "x": 0.0, "y": 0.5, "learned": True}],
        }

    async def tour(self) -> dict[str, Any]:
        return await self.create(StreamSpec("tour-1", ("cat",)))

    @asynccontextmanager
    async def subscribe(self, name: str) -> AsyncIterator[asyncio.Queue[dict[str, Any]]]:
        self._check(name)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.queues_of.setdefault(name, []).append(queue)
        try:
            yield queue
        finally:
            self.queues_of[name].remove(queue)


@contextmanager
def served(app: Any, **options: Any) -> Iterator[str]:
    """The address of a server of the application, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Stoppable(configuration(app, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("The server did not start.")
                threading.Event().wait(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join(20)
            assert not thread.is_alive(), "The server did not stop."
