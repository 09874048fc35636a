"""Ctrl-C at moments that can bear it, and what is said of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from testtime.errors import Interrupted


@contextmanager
def held_back() -> Iterator[None]:
    """Let an interrupt wait until the block has ended, so that nothing in it is left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts only ever reach the main thread
        return
    waiting: list[tuple[int, FrameType | None]] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if waiting and callable(usual):
            usual(*waiting[0])


@contextmanager
def told(say: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt in the block into one line that says what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(say()) from None
