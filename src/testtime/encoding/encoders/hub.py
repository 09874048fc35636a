"""Downloads of weights: a quick check whether the hub can be reached, and what to do if not."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import constants

from testtime.types import MissingPart

T = TypeVar("T")
TIMEOUT = 4.0  # seconds for a hub to answer; its own client would retry for most of a minute


def answers(address: str) -> bool:
    """Whether a host answers within TIMEOUT; any answer will do. Proxies are honoured."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as problem:
        return isinstance(problem.reason, ssl.SSLError)  # the client may have certificates that we do not
    except OSError:
        return False
    return True


def fetch(address: str, download: Callable[[], T], missing: str, advice: str) -> T:
    """The result of a download if the hub at `address` answers; else MissingPart says what is missing and why."""
    reason = "and the hub does not answer"
    if answers(address):
        try:
            return download()
        except Exception as problem:  # the client's errors have no common base class
            reason = f"and the download failed ({first_line(problem)})"
    raise MissingPart(f"{missing}, {reason}.\n{advice}\nThe encoder 'offline' needs no hub.")


def first_line(problem: Exception) -> str:
    """The first line of a library's error message."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
