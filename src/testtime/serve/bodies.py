"""Request bodies, read with a bound: a body that is too large is refused where it passes the bound, not after.

No file is written and no name that a client sends becomes a path.
"""

from __future__ import annotations

import asyncio
import binascii
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from testtime.serve.types import Limits, ServiceError, Upload

SECONDS = 60  # for a body to arrive
JSON_BYTES = 8 * 2**20  # 5,000 names of 200 characters fit, whatever their escapes
FIELD = "file"  # the field of a form that images are sent in


class Budget:
    """Memory for bodies, shared by all requests: what clients send at once has a bound, however many they are."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """A hold on nothing yet; what it takes is given back at the end."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self._left += hold.taken

    def take(self, count: int) -> None:
        if count > self._left:
            raise ServiceError(503, "The server is busy with large requests; try again.", retry_after=1)
        self._left -= count


class Hold:
    """One request's part of the budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.taken = budget, 0

    def take(self, count: int) -> None:
        self._budget.take(count)
        self.taken += count


def too_large(limit: int, what: str) -> ServiceError:
    return ServiceError(413, f"{what} may have at most {limit:,} bytes.")


async def _chunks(request: Request, hold: Hold, limit: int, what: str) -> AsyncIterator[bytes]:
    """The parts of a body as they arrive; an error as soon as they are more than `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large(limit, what)
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limit:
            raise too_large(limit, what)
        hold.take(len(chunk))
        yield chunk


@asynccontextmanager
async def _arriving() -> AsyncIterator[None]:
    """A body is read inside: it must arrive whole and in time."""
    try:
        async with asyncio.timeout(SECONDS):
            yield
    except TimeoutError:
        raise ServiceError(408, f"The body did not arrive within {SECONDS} seconds.") from None
    except ClientDisconnect:
        raise ServiceError(400, "The connection was closed before the end of the body.") from None


async def _whole(request: Request, hold: Hold, limit: int, what: str) -> bytes:
    return b"".join([chunk async for chunk in _chunks(request, hold, limit, what)])


async def read_json(request: Request, hold: Hold) -> bytes:
    """A JSON body that holds no image."""
    async with _arriving():
        return await _whole(request, hold, JSON_BYTES, "A JSON body")


async def read_state(request: Request, hold: Hold, limits: Limits) -> bytes:
    """An exported state."""
    async with _arriving():
        return await _whole(request, hold, limits.state_bytes, "A state")


async def read_uploads(request: Request, hold: Hold, limits: Limits) -> list[Upload]:
    """The images of a request, in any of the three forms, with their idempotency keys."""
    async with _arriving():
        uploads = await _uploads(request, hold, limits)
    return _with_keys(uploads, request.headers.get("idempotency-key"), limits)


async def _uploads(request: Request, hold: Hold, limits: Limits) -> list[Upload]:
    kind = request.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        name = _text(unquote(request.headers.get("x-image-name", "")), limits, "X-Image-Name")
        return [_upload(await _whole(request, hold, limits.image_bytes, "An image"), name, None)]
    if kind == "multipart/form-data":
        return await _form(request, hold, limits)
    if kind == "application/json":
        return _from_json(await _whole(request, hold, limits.request_bytes, "A request"), limits)
    raise ServiceError(
        415, f"Content-Type {kind[:100]!r}: send image/*, application/octet-stream, multipart/form-data or JSON."
    )


def _with_keys(uploads: list[Upload], key: str | None, limits: Limits) -> list[Upload]:
    """Images that have no idempotency key of their own get that of the request."""
    if not key:
        return uploads
    key = _text(key, limits, "Idempotency-Key")
    if len(uploads) == 1:
        return [replace(upload, key=upload.key or key) for upload in uploads]
    return [replace(upload, key=upload.key or f"{key}/{index}") for index, upload in enumerate(uploads)]


def _upload(data: bytes, name: str, key: str | None) -> Upload:
    if not data:
        raise ServiceError(422, f"Image {name!r} is empty." if name else "The image is empty: send its bytes.")
    return Upload(data, name, key)


def _text(value: object, limits: Limits, what: str) -> str:
    """A short text that can be stored."""
    if not isinstance(value, str) or len(value) > limits.name:
        raise ServiceError(422, f"{what} must be text of at most {limits.name} characters.")
    if any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in value):
        raise ServiceError(422, f"{what} {ascii(value)} is not valid text.")
    return value


def too_many(limits: Limits) -> ServiceError:
    return ServiceError(422, f"A request may have at most {limits.batch} images; send the others in another.")


def _from_json(body: bytes, limits: Limits) -> list[Upload]:
    form = 'JSON must have the form {"images": [{"data": BASE64, "name": "", "key": null}]}.'
    try:
        images = json.loads(body)["images"]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ServiceError(422, form) from None
    if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
        raise ServiceError(422, form)
    if len(images) > limits.batch:
        raise too_many(limits)
    return [_image(image, index, form, limits) for index, image in enumerate(images)]


def _image(image: dict[str, Any], index: int, form: str, limits: Limits) -> Upload:
    if set(image) - {"data", "name", "key"} or not isinstance(image.get("data"), str):
        raise ServiceError(422, form)
    if len(image["data"]) > 4 * (limits.image_bytes // 3 + 1):
        raise too_large(limits.image_bytes, "An image")
    try:
        data = binascii.a2b_base64(image["data"], strict_mode=True)
    except ValueError:
        raise ServiceError(422, f"images[{index}].data is not base64.") from None
    key = image.get("key")
    name = _text(image.get("name", ""), limits, f"images[{index}].name")
    return _upload(data, name, None if key is None else _text(key, limits, f"images[{index}].key"))


async def _form(request: Request, hold: Hold, limits: Limits) -> list[Upload]:
    _, options = parse_options_header(request.headers["content-type"])
    form = _Form(options.get(b"boundary", b""), limits)
    try:
        async for chunk in _chunks(request, hold, limits.request_bytes, "A request"):
            form.write(chunk)
        return form.uploads()
    except (FormParserError, ValueError) as problem:
        raise ServiceError(400, f"The form cannot be read: {str(problem)[:200]}.") from None


class _Form:
    """The images of a form, parsed as it arrives."""

    def __init__(self, boundary: bytes, limits: Limits) -> None:
        if not boundary:
            raise ServiceError(400, "The Content-Type of a form must name its boundary.")
        self._limits = limits
        self._parts: list[tuple[str, bytearray]] = []
        self._header, self._value = bytearray(), bytearray()
        self._disposition: bytes | None = None
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._take_header,
                "on_headers_finished": self._open,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def write(self, chunk: bytes) -> None:
        self._parser.write(chunk)

    def uploads(self) -> list[Upload]:
        self._parser.finalize()
        if not self._ended:
            raise ValueError("its end is missing")
        if not self._parts:
            raise ServiceError(422, f"The form has no image: send each as a field named '{FIELD}'.")
        return [_upload(bytes(data), name, None) for name, data in self._parts]

    def _begin(self) -> None:
        self._disposition = None
        if len(self._parts) >= self._limits.batch:
            raise too_many(self._limits)

    def _take_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition or b"")
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field != FIELD:
            raise ServiceError(422, f"Unknown field {field[:100]!r}: send images as fields named '{FIELD}'.")
        name = options.get(b"filename", b"").decode("utf-8", "replace")
        self._parts.append((_text(name, self._limits, "A file name"), bytearray()))

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._parts[-1][1]
        part += data[start:end]
        if len(part) > self._limits.image_bytes:
            raise too_large(self._limits.image_bytes, "An image")

    def _end(self) -> None:
        self._ended = True
