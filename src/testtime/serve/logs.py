"""The service's logs: one line for each request and each change, as text or JSON. No image and no token is in them."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

FORMATS = ("text", "json")
PLAIN = re.compile(r"[!#-&(-<>-~]+")  # printable ASCII without quotes, = and spaces


class _Lines(logging.Formatter):
    """A record as one line; whatever clients send is escaped, so that nobody can forge a line."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if self._json:
            line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
            return json.dumps(line, default=str)
        trace = fields.pop("traceback", None)
        words = " ".join(f"{key}={_shown(value)}" for key, value in fields.items())
        line_text = f"{time} {record.levelname.lower()} {_plain(record.getMessage())} {words}".rstrip()
        return line_text if trace is None else f"{line_text}\n{trace}"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def set_up(style: str, level: int = logging.INFO) -> None:
    """Write the service's and the server's log to standard error; call it once, in the process that serves."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(style))
    for name in ("testtime.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "testtime.serve" else logging.WARNING)
