"""Whether a hub of weights can be reached, said soon."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

from huggingface_hub import constants

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


def first_line(problem: Exception) -> str:
    """What a library says is wrong, in a line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
