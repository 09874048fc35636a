"""Deferring Ctrl-C to safe points, and the message it gives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from testtime.errors import Interrupted

_depth = 0  # of nested blocks that defer interrupts
_previous: Callable[[int, FrameType | None], object] | int | None = None  # the handler outside such blocks
_pending: list[tuple[int, FrameType | None]] = []


def _record(number: int, frame: FrameType | None) -> None:
    _pending.append((number, frame))


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer an interrupt until the end of the block, so that nothing in it is left half done.

    Blocks may be nested. Only the main thread receives interrupts, so other threads do nothing here, and neither does a
    program that embeds Python with its own handler. Never `yield` in such a block: interrupts would be deferred in the
    consumer too.
    """
    global _depth, _previous
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    if _depth == 0:
        _previous = signal.signal(signal.SIGINT, _record)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _deliver()


def _deliver() -> None:
    """Restore the previous handler, unless it was replaced meanwhile, and deliver a deferred interrupt."""
    if signal.getsignal(signal.SIGINT) is _record:
        signal.signal(signal.SIGINT, _previous)
    first, _pending[:] = _pending[:1], []
    if first and callable(handler := signal.getsignal(signal.SIGINT)):
        handler(*first[0])
    elif first:
        signal.raise_signal(first[0][0])  # the system's default: end the process, or ignore it


@contextmanager
def on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt in the block into a one-line message: what was kept and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message()) from None
