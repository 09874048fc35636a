"""What the service is asked, what it answers, and its limits. Nothing here knows of HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testtime.errors import TesttimeError


@dataclass(frozen=True)
class Limits:
    """Upper bounds on what a client may send; all are checked before anything is decoded."""

    image_bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    batch: int = 64  # images in a request
    request_bytes: int = 64 * 2**20  # a request with several images
    body_bytes: int = 2**30  # requests that are being read or answered, together
    waiting: int = 256  # images accepted and not answered yet, over all streams
    streams: int = 100
    classes: int = 5_000
    name: int = 200  # characters in the name of a class, an image or a snapshot
    templates: int = 100
    views: int = 64
    state_bytes: int = 2**30  # an imported state

    def check_text(self, text: str) -> None:
        """Refuse a name or a template that is too long."""
        if len(text) > self.name:
            raise ServiceError(422, f"Names and templates may have {self.name} characters; got {text[:20]!r}...")


@dataclass(frozen=True)
class Settings:
    """How the service runs."""

    limits: Limits = field(default_factory=Limits)
    max_batch: int = 32  # most images encoded together
    deadline: float = 0.014  # seconds that an image waits at most for others to be encoded with
    decoders: int = 2  # processes that decode images
    decode_seconds: float = 10.0
    decode_memory: int = 2**30  # bytes of address space of such a process
    learners: int = 2  # threads that run steps; a stream is in one at a time
    snapshot_every: int = 1000  # images between two automatic snapshots: the most that a restart replays
    keep_images: int = 10_000  # latest images of a stream whose features are kept, for unlearning
    keep_log: int = 1_000_000  # latest images of a stream whose audit rows are kept
    thumbnail: int = 96  # pixels a side, in streams that keep thumbnails


@dataclass(frozen=True)
class StreamSpec:
    """What a stream is made of."""

    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...] | str | None = None
    method: str = "dpe"
    preset: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    guard: bool = True
    guard_settings: dict[str, Any] = field(default_factory=dict)
    views: int = 1
    augmix: bool = False
    seed: int = 0
    thumbnails: bool = False  # whether small copies of the images may be kept
    tour: bool = False  # whether it was made for the tour, and goes with it

    @classmethod
    def of(cls, stored: dict[str, Any]) -> StreamSpec:
        """A description that was stored as JSON."""
        templates = stored["templates"]
        templates = tuple(templates) if isinstance(templates, list) else templates
        return cls(**stored | {"classes": tuple(stored["classes"]), "templates": templates})


@dataclass(frozen=True)
class Upload:
    """One image of a client."""

    data: bytes = field(repr=False)
    name: str = ""
    key: str | None = None  # idempotency: a second image with the same key gets the answer of the first


@dataclass(frozen=True, eq=False)
class Picture:
    """One image of a client, decoded; or the error that its client gets instead of an answer."""

    name: str
    key: str | None
    sha256: str = ""
    pixels: Any = field(default=None, repr=False)  # (H, W, 3) uint8, RGB
    thumbnail: bytes | None = field(default=None, repr=False)
    seconds: float = 0.0  # that it took to decode
    error: dict[str, Any] | None = None


class Events(asyncio.Queue[dict[str, Any]]):
    """What happens in a stream, for one who listens; of a slow one, the oldest are dropped."""

    def __init__(self) -> None:
        super().__init__(1000)

    def add(self, event: dict[str, Any]) -> None:
        if self.full():
            self.get_nowait()
        self.put_nowait(event)


class ServiceError(TesttimeError):
    """A request that cannot be served now or at all; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after

    def __reduce__(self) -> tuple[Any, ...]:  # to another process: an exception is made again of its message alone
        return ServiceError, (self.status, str(self), self.retry_after)


DATABASE = "testtime.sqlite"
STATES = Path("states")  # folder of state files, inside the service's folder
