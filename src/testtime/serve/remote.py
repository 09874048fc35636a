"""The service, called from another process: a call is a header, which is JSON, and bytes. So is what comes back.

`Remote` has the coroutines of `Service`; it decodes images itself, and `perform` answers it where the service is. How
the two reach each other is not known here.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from testtime.errors import InputError
from testtime.serve.auth import Refusal
from testtime.serve.front import Front
from testtime.serve.types import Events, Picture, ServiceError, Settings, StreamSpec, Upload

if TYPE_CHECKING:
    from torch import Tensor

    from testtime.serve.service import Service

CALLS = frozenset((
    "change_classes", "create", "delete", "delete_snapshot", "export", "fork", "image", "images", "import_state",
    "info", "label", "map", "metrics", "queues", "reset", "rollback", "snapshot", "snapshots", "spend", "stream",
    "streams", "thumbnail", "tour", "unlearn",
))  # fmt: skip

KNOWN = 2.0  # seconds for which it is known whether a stream keeps thumbnails

log = logging.getLogger("testtime.serve")
Header = dict[str, Any]
Bytes = bytes | bytearray | memoryview
Served: TypeAlias = "Service | Remote"  # what HTTP is spoken for


class Notes:
    """What a front counts, kept until it is told to the service's `Telemetry`."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ...]] = []

    def request(self, *values: Any) -> None:
        self._kept.append(("request", *values))

    def refused(self, reason: str) -> None:
        self._kept.append(("refused", reason))

    def restarted(self, count: int = 1) -> None:
        self._kept.append(("restarted", count))

    def take(self) -> list[tuple[Any, ...]]:
        """What was counted since the last time."""
        kept, self._kept = self._kept, []
        return kept


class Remote(ABC):
    """A service that runs elsewhere; for one event loop. Its public coroutines are those of `Service`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.telemetry, self.ready = settings, Notes(), False
        # streams that are known: whether they keep thumbnails, and when that was asked
        self._thumbnails: dict[str, tuple[bool, float]] = {}

    async def start(self) -> None:
        """Be ready for requests."""
        self._front = Front(self.settings, self.telemetry)
        self.ready = True

    async def close(self) -> None:
        """Refuse further images."""
        self.ready = False
        await self.tell()
        await self._front.close()

    @abstractmethod
    async def exchange(self, header: Header, *parts: Bytes) -> tuple[Header, Bytes]:
        """Send a call, and return what comes back."""

    @abstractmethod
    def subscribe(self, name: str) -> AbstractAsyncContextManager[Events]:
        """What happens in a stream from now on."""

    async def tell(self) -> None:
        """Tell the service what was counted here."""
        if notes := self.telemetry.take():
            await self.exchange({"call": "tell", "notes": notes})

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        async def call(*arguments: Any, **options: Any) -> Any:
            if name == "metrics":
                await self.tell()
            parts = [each for each in arguments if isinstance(each, bytes)]
            plain = [_plain(each) for each in arguments]
            return _result(*await self.exchange({"call": name, "arguments": plain, "options": options}, *parts))

        return call

    async def answer(
        self, name: str, uploads: Sequence[Upload], *, learn: bool = True, top: int = 5
    ) -> list[dict[str, Any]]:
        """An answer for each image, in order; or its error, with its status."""
        pictures = await self._front.pictures(uploads, await self._keeps_thumbnails(name))
        header, parts = packed(pictures)
        return _result(
            *await self.exchange({"call": "answer", "name": name, "learn": learn, "top": top, **header}, *parts)
        )

    async def _keeps_thumbnails(self, name: str) -> bool:
        """Whether a stream keeps thumbnails; asked again now and then, since another may have got its name."""
        now, (keeps, asked) = time.monotonic(), self._thumbnails.get(name, (False, -KNOWN))
        if now - asked >= KNOWN:
            if name in self._thumbnails:
                self._thumbnails[name] = keeps, now  # one call asks; those that come meanwhile go by what was known
            try:
                keeps = (await self.stream(name))["thumbnails"]
            except BaseException:
                self._thumbnails.pop(name, None)
                raise
            self._thumbnails[name] = keeps, now
        return keeps


def packed(pictures: Sequence[Picture]) -> tuple[Header, list[Bytes]]:
    """Images as a header and bytes."""
    rows, parts = [], list[Bytes]()
    for each in pictures:
        row = {"name": each.name, "key": each.key, "sha256": each.sha256, "seconds": each.seconds, "error": each.error}
        if each.pixels is not None:
            row["size"] = each.pixels.shape[:2]
            parts.append(memoryview(each.pixels).cast("B"))
        if each.thumbnail is not None:
            row["thumbnail"] = len(each.thumbnail)
            parts.append(each.thumbnail)
        rows.append(row)
    return {"pictures": rows}, parts


def unpacked(header: Header, blob: Tensor) -> list[Picture]:
    """The images of a header and bytes; their pixels are parts of these."""
    pictures, at = [], 0
    for row in header["pictures"]:
        pixels = thumbnail = None
        if row.get("size"):
            height, width = row["size"]
            pixels = blob.as_strided((height, width, 3), (3 * width, 3, 1), at)
            at += 3 * height * width
        if count := row.get("thumbnail"):
            thumbnail = blob[at : at + count].numpy().tobytes()
            at += count
        pictures.append(
            Picture(row["name"], row["key"], row["sha256"], pixels, thumbnail, row["seconds"], row["error"])
        )
    return pictures


class Call(NamedTuple):
    """A call that has arrived where the service is."""

    header: Header
    blob: Tensor  # its bytes, uint8
    pictures: list[Picture]  # in these

    @classmethod
    def of(cls, header: Header, blob: Tensor) -> Call:
        """A call of a header and bytes."""
        return cls(header, blob, unpacked(header, blob) if "pictures" in header else [])


async def perform(service: Service, call: Call) -> tuple[Header, bytes]:
    """Answer a call, where the service is; errors are told like results."""
    try:
        result = await _performed(service, call)
    except Refusal as error:
        return {"refused": [error.status, error.reason, str(error), error.retry_after]}, b""
    except ServiceError as error:
        return {"failed": [error.status, str(error), error.retry_after]}, b""
    except InputError as error:
        return {"wrong": str(error)}, b""
    except Exception:
        log.exception("the call '%s' failed", call.header.get("call"))
        return {"broken": True}, b""
    return ({"bytes": True}, result) if isinstance(result, bytes) else ({"result": result}, b"")


async def _performed(service: Service, call: Call) -> Any:
    header, blob, pictures = call
    if header["call"] == "answer":
        return await service.enter(header["name"], pictures, learn=header["learn"], top=header["top"])
    if header["call"] == "tell":
        for name, *values in header["notes"]:
            getattr(service.telemetry, name)(*values)
        return None
    if header["call"] not in CALLS:
        raise RuntimeError(f"{header['call']!r} is no call of the service.")
    arguments = [_argument(each, blob) for each in header["arguments"]]
    return await getattr(service, header["call"])(*arguments, **header["options"])


def _plain(argument: Any) -> Any:
    """An argument as JSON; bytes are sent beside it."""
    if isinstance(argument, StreamSpec):
        return {"spec": asdict(argument)}
    return {"bytes": True} if isinstance(argument, bytes) else argument


def _argument(plain: Any, blob: Tensor) -> Any:
    if isinstance(plain, dict) and "spec" in plain:
        return StreamSpec.of(plain["spec"])
    return blob.numpy().tobytes() if isinstance(plain, dict) else plain


def _result(header: Header, blob: Bytes) -> Any:
    """What a call returned, or its error."""
    if "refused" in header:
        raise Refusal(*header["refused"])
    if "failed" in header:
        raise ServiceError(*header["failed"])
    if "wrong" in header:
        raise InputError(header["wrong"])
    if "broken" in header:
        raise RuntimeError("The service failed; its log tells why.")
    return bytes(blob) if header.get("bytes") else header["result"]
