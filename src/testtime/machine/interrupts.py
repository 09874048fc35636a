"""Ctrl-C at moments that can bear it, and what is said of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from testtime.errors import Interrupted

_inside = 0  # blocks that hold interrupts back
_usual: Callable[[int, FrameType | None], object] | int | None = None  # who hears of them otherwise
_waiting: list[tuple[int, FrameType | None]] = []


def _note(number: int, frame: FrameType | None) -> None:
    _waiting.append((number, frame))


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let an interrupt wait until the block has ended, so that nothing in it is left half done.

    Blocks may lie within one another. Only the main thread ever hears of interrupts, so elsewhere nothing is done, nor
    where a program that embeds Python has a handler of its own. Never `yield` in such a block: who takes it from there
    would not hear of an interrupt either.
    """
    global _inside, _usual
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    if _inside == 0:
        _usual = signal.signal(signal.SIGINT, _note)
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1
        if _inside == 0:
            _let_through()


def _let_through() -> None:
    """The handler as it was, unless there is another by now; what has waited is handed to it."""
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, _usual)
    waited, _waiting[:] = _waiting[:1], []
    if waited and callable(handler := signal.getsignal(signal.SIGINT)):
        handler(*waited[0])
    elif waited:
        signal.raise_signal(waited[0][0])  # the system's own: to end the process, or to do nothing


@contextmanager
def on_interrupt(say: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt in the block into one line that says what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(say()) from None
