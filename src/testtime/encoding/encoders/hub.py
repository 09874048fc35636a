"""A hub of weights: whether it can be reached, said soon, and what to do where it cannot."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import constants

from testtime.types import MissingPart

T = TypeVar("T")
PATIENCE = 4.0  # seconds for a hub to answer; its own client would retry for most of a minute


def answers(address: str) -> bool:
    """Whether a host answers at all within PATIENCE; any answer will do. Proxies are honoured."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as problem:
        return isinstance(problem.reason, ssl.SSLError)  # the client may know certificates that we do not
    except OSError:
        return False
    return True


def fetch(address: str, download: Callable[[], T], missing: str, way_out: str) -> T:
    """What a download gives where the hub at `address` answers; else a MissingPart says what is missing and why."""
    reason = "and the hub does not answer"
    if answers(address):
        try:
            return download()
        except Exception as problem:  # the client's errors have no common root
            reason = f"and the download failed ({first_line(problem)})"
    raise MissingPart(f"{missing}, {reason}.\n{way_out}\nThe encoder 'offline' needs no hub.")


def first_line(problem: Exception) -> str:
    """What a library says is wrong, in a line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
