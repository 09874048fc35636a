"""The calls of the API as data, shared by both clients: what is sent, when it is sent again, what comes back."""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from testtime.errors import MissingPart
from testtime.serve.types import ServiceError

try:
    import httpx
except ImportError:
    raise MissingPart("The client needs httpx: pip install 'testtime[serve]'.") from None

AGAIN = (429, 503)  # statuses after which a request is sent again: the server has done nothing
LONGEST = 10.0  # seconds between two attempts


@dataclass(frozen=True)
class Call:
    """One request. A `repeatable` one may be sent again if nobody knows whether it arrived."""

    method: str
    path: str
    json: Any = None
    content: bytes | None = None
    files: list[tuple[str, tuple[str, bytes]]] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    repeatable: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of httpx's `request`."""
        given = {"json": self.json, "content": self.content, "files": self.files, "params": self.params or None}
        sent = {key: value for key, value in given.items() if value is not None}
        return {"method": self.method, "url": self.path, "headers": self.headers, **sent}


def headers_of(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def lost(url: str, problem: Exception) -> ConnectionError:
    return ConnectionError(f"No answer from {url}: {str(problem) or type(problem).__name__}. Is the service running?")


def may_repeat(call: Call, problem: httpx.TransportError) -> bool:
    """Whether a call may be sent again: it is repeatable, or the connection was never made."""
    return call.repeatable or isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)


def may_follow(call: Call, response: httpx.Response) -> bool:
    """Whether a call may be sent again after this response.

    An error of a server is JSON. Another one comes from a proxy in front of it, which lost the connection to it.
    """
    proxy = response.status_code >= 500 and "json" not in response.headers.get("content-type", "")
    return response.status_code in AGAIN or (call.repeatable and proxy)


def get(path: str, **params: Any) -> Call:
    return Call("GET", path, params={key: value for key, value in params.items() if value is not None}, repeatable=True)


def stream_path(name: str, *rest: object) -> str:
    return "/".join(["/v1/streams", quote(name, safe=""), *map(str, rest)])


def read_image(image: Any, name: str | None) -> tuple[str, bytes]:
    """The name and the bytes of an image given as a path, as bytes, or as an image of Pillow."""
    if isinstance(image, str | os.PathLike):
        return Path(image).name if name is None else name, Path(image).read_bytes()
    if isinstance(image, bytes | bytearray | memoryview):
        return name or "", bytes(image)
    if hasattr(image, "save") and hasattr(image, "convert"):
        buffer = BytesIO()
        kept = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
        kept.save(buffer, "PNG")  # without loss
        return name or "", buffer.getvalue()
    raise TypeError(f"An image is a path, bytes or an image of Pillow; got {type(image).__name__}.")


def one_image(stream: str, image: Any, learn: bool, top: int, name: str | None, key: str | None) -> Call:
    """Send one image. Its key is made here, once, so that a second attempt teaches nothing."""
    title, data = read_image(image, name)
    headers = {"Content-Type": "application/octet-stream", "Idempotency-Key": key or uuid.uuid4().hex}
    if title:
        headers["X-Image-Name"] = quote(title)
    params = {"learn": str(learn).lower(), "top": top}
    path = stream_path(stream, "images")
    return Call("POST", path, content=data, params=params, headers=headers, repeatable=True)


def several_images(stream: str, images: Iterable[Any], learn: bool, top: int, key: str | None) -> Call:
    """Send several images in one request."""
    files = [("file", read_image(image, None)) for image in images]
    files = [("file", (title or "image", data)) for _, (title, data) in files]
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    params = {"learn": str(learn).lower(), "top": top}
    return Call("POST", stream_path(stream, "images"), files=files, params=params, headers=headers, repeatable=True)


def new_stream(name: str, classes: Sequence[str], options: dict[str, Any]) -> Call:
    return Call("POST", "/v1/streams", json={"name": name, "classes": list(classes), **options})


def wait_before(attempt: int, response: Any) -> float:
    """Seconds before the next attempt: what the server asks for, else longer each time; never all clients at once."""
    try:
        asked = float(response.headers["retry-after"]) if response is not None else 0.0
    except (KeyError, ValueError):
        asked = 0.0
    return min(LONGEST, max(asked, 0.1 * 2**attempt)) * random.uniform(1.0, 1.25)


def failure(response: Any) -> ServiceError:
    """The error of a response that has one."""
    try:
        body = response.json()
        message = body["error"] if "error" in body else body["answers"][0]["error"]
    except (ValueError, KeyError, TypeError, IndexError):
        message = f"The server answered {response.status_code} without a reason; is this a testtime service?"
    wait = response.headers.get("retry-after", "")
    return ServiceError(response.status_code, message, float(wait) if wait.isdecimal() else None)


def single(answers: Any) -> Any:
    """The answer to the one image of a request."""
    return answers["answers"][0]


class EventLines:
    """Server-sent events, from the lines of a response."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def take(self, line: str) -> dict[str, Any] | None:
        """The event that a line completes, if it does."""
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            event: dict[str, Any] = json.loads("\n".join(self._data))
            self._data = []
            return event
        return None
