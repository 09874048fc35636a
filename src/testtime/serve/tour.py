"""The tour: a stream that shows how adaptation works, on features that come with the package."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from testtime.serve.types import ServiceError, StreamSpec
from testtime.session.packaged import demo_stream, largest
from testtime.session.session import Session

if TYPE_CHECKING:
    from testtime.serve.service import Service

CLASSES = 20
IMAGES = 400
PACE = 0.05  # seconds between two images


def new_name() -> str:
    """A name for the stream of a tour."""
    return f"tour-{secrets.token_hex(4)}"


class Tour:
    """Runs one tour at a time: a new one ends the one before it, and deletes its stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None

    async def start(self, name: str) -> dict[str, Any]:
        """A new stream of that name, which is fed from now on."""
        await self.close()
        for old in self._service.tours():
            await self._service.delete(old)
        stream = await asyncio.to_thread(lambda: largest(demo_stream(), CLASSES))
        spec = StreamSpec(name, stream.task.classnames, tour=True)
        info = await self._service.add(spec, lambda: Session(stream.task, "dpe", guard=True), "start")
        self._task = asyncio.create_task(self._feed(spec.name, stream.views, stream.labels.tolist()))
        return info

    async def close(self) -> None:
        """End the tour that runs, if one does; its stream stays as it is."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _feed(self, name: str, views: Any, labels: list[int]) -> None:
        service, right, frozen = self._service, 0, 0
        stream = service.find(name)
        with contextlib.suppress(ServiceError):  # the stream was deleted, or the service is closing
            for count, (image, label) in enumerate(zip(views[:IMAGES], labels, strict=False), 1):
                answer = await service.pipeline.feed(stream, image, f"photograph {count}")
                truth = stream.task.classnames[label]
                right, frozen = right + (answer["label"] == truth), frozen + (answer["zero_shot"] == truth)
                event = {"images": count, "accuracy": right / count, "zero_shot_accuracy": frozen / count}
                stream.publish({"type": "tour", "truth": truth, **event})
                await asyncio.sleep(PACE)
