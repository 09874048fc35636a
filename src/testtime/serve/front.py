"""The front of the service: what clients send, checked and decoded. It knows no stream and no model."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from testtime.errors import InputError
from testtime.serve.decoding import Decoder
from testtime.serve.types import Picture, ServiceError, Settings, Upload


class Restarts(Protocol):
    """Counts decoders that were replaced."""

    def restarted(self, count: int = 1) -> None: ...


class Front:
    """Decodes images, in processes of their own, for one event loop. `waiting` counts those that it has accepted."""

    def __init__(self, settings: Settings, telemetry: Restarts) -> None:
        self._settings, self._telemetry, self.waiting, self._restarts = settings, telemetry, 0, 0
        self._decoder = Decoder(
            settings.decoders,
            max_pixels=settings.limits.pixels,
            seconds=settings.decode_seconds,
            memory=settings.decode_memory,
        )

    async def pictures(self, uploads: Sequence[Upload], thumbnails: bool, waiting: int = 0) -> list[Picture]:
        """The images, decoded; what is wrong with one is its `error`. `waiting` images wait further on."""
        check_count(len(uploads), self.waiting + waiting, self._settings)
        self.waiting += len(uploads)
        try:
            return await asyncio.gather(*(self._picture(upload, thumbnails) for upload in uploads))
        finally:
            self.waiting -= len(uploads)
            if restarts := self._decoder.restarts - self._restarts:
                self._telemetry.restarted(restarts)
                self._restarts = self._decoder.restarts

    async def close(self) -> None:
        """Refuse further images, and end the processes."""
        await self._decoder.close()

    async def _picture(self, upload: Upload, thumbnails: bool) -> Picture:
        began, limits = time.perf_counter(), self._settings.limits
        try:
            for text in (upload.name, upload.key or ""):
                limits.check_text(text)
            if len(upload.data) > limits.image_bytes:
                size = len(upload.data)
                raise ServiceError(413, f"An image may have {limits.image_bytes:,} bytes; this one has {size:,}.")
            found = await self._decoder.decode(upload.data, self._settings.thumbnail if thumbnails else 0)
        except (InputError, ServiceError) as error:
            return Picture(upload.name, upload.key, error=failure(error, upload.name))
        digest = hashlib.sha256(upload.data).hexdigest()
        seconds = time.perf_counter() - began
        return Picture(upload.name, upload.key, digest, found.pixels, found.thumbnail, seconds)


def check_count(images: int, waiting: int, settings: Settings) -> None:
    """Refuse a request of too many images, or one too many."""
    limits = settings.limits
    if not 1 <= images <= limits.batch:
        raise ServiceError(413, f"{images} images in a request; there may be 1 to {limits.batch}.")
    if waiting + images > limits.waiting:
        raise ServiceError(429, f"{waiting} images are waiting; send this one again later.", 1.0)


def failure(error: Exception, image: str) -> dict[str, Any]:
    """An error as an answer. Errors of ours name what is wrong; of others, only their kind is told."""
    if isinstance(error, ServiceError):
        return {"error": str(error), "status": error.status, "image": image}
    if isinstance(error, InputError):
        return {"error": str(error), "status": 422, "image": image}
    return {"error": f"{type(error).__name__} while this image was answered.", "status": 500, "image": image}
