from __future__ import annotations

import os
import signal
import threading

import pytest

from testtime.interrupts import held_back


def test_an_interrupt_waits_until_the_block_has_ended() -> None:
    done = []
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)
    assert done == ["all of it"]


def test_other_threads_are_let_through() -> None:
    passed = []

    def work() -> None:
        with held_back():
            passed.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert passed == [True]
