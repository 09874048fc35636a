"""Sessions that threads share, and interrupts that come while they work."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import testtime as tt
from testtime import Prediction, Session
from testtime.machine.interrupts import deferred_interrupts


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Ctrl-C as Python has it, before and after."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def toy(method: str = "dpe", **options: Any) -> tuple[Session, torch.Tensor]:
    task, stream, _ = tt.toy(classes=6, dim=16, images=60, views=2)
    return Session(task, method, **options), stream


# Interrupts


def interrupted_in(session: Session, patch: pytest.MonkeyPatch, step: int) -> None:
    """Press Ctrl-C in the middle of the step of that number."""
    whole, steps = Prediction.of, []

    def pressed(*arguments: Any) -> Prediction:
        steps.append(1)
        if len(steps) == step:
            press()
        return whole(*arguments)

    patch.setattr(Prediction, "of", pressed)


@pytest.mark.parametrize("reference", [False, True])
def test_answer_of_an_image_that_was_counted_is_given_out(reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session, stream = toy(reference=reference)
    interrupted_in(session, monkeypatch, 3)
    answered = []
    with pytest.raises(KeyboardInterrupt):
        for _, prediction in session.run(stream):
            answered.append(prediction)
    assert len(answered) == session.count == session.position == 3


def test_interrupt_is_raised_when_a_run_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    session, stream = toy()
    interrupted_in(session, monkeypatch, 1)
    run = session.run(stream)
    assert next(run) and session.count == 1
    with pytest.raises(KeyboardInterrupt):
        run.close()


def test_interrupt_in_the_callers_turn_is_the_callers() -> None:
    session, stream = toy()
    with pytest.raises(KeyboardInterrupt):
        for _ in session.run(stream):
            press()
    assert session.count == 1


def test_runs_in_turns_leave_ctrl_c_alone() -> None:
    (one, stream), (other, _) = toy(), toy()
    runs = one.run(stream), other.run(stream)
    for run in (*runs, *runs):
        next(run)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    runs[0].close()
    runs[1].close()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_run_may_go_on_in_another_thread() -> None:
    session, stream = toy()
    run = session.run(stream)
    next(run)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run))
    thread.start()
    thread.join()
    assert len(found) == len(stream) - 1 and session.count == len(stream)


def test_blocks_within_one_another_let_through_at_the_last() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        with deferred_interrupts():
            press()
            done.append("inner")
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        done.append("outer")
    assert done == ["inner", "outer"]


def test_blocks_that_overlap_restore_what_was_there() -> None:
    one, other = deferred_interrupts(), deferred_interrupts()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handler_that_is_set_within_a_block_stays() -> None:
    heard = []
    with deferred_interrupts():
        press()
        signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    assert heard == [True]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts():
        press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_handler_that_is_not_pythons_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        patch.setattr(signal, "signal", None)
        with deferred_interrupts():
            pass


def test_interrupt_that_ends_the_process_does_so_after_the_block() -> None:
    program = """
import os, signal
from testtime.machine.interrupts import deferred_interrupts
signal.signal(signal.SIGINT, signal.SIG_DFL)
with deferred_interrupts():
    os.kill(os.getpid(), signal.SIGINT)
    print("all of it", flush=True)
print("too far")
"""
    source = str(Path(tt.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert (ended.stdout, ended.returncode) == ("all of it\n", -signal.SIGINT)


# Threads


@pytest.mark.parametrize("method", ["dota", "dpe"])
def test_what_is_saved_beside_steps_is_whole(method: str, tmp_path: Path) -> None:
    """The state is that of as many images as it says."""
    session, stream = toy(method)
    states = [leaf_bytes(session)]
    alone = session.fork()
    for views in stream:
        alone.step(views)
        states.append(leaf_bytes(alone))
    failed: list[BaseException] = []

    def save() -> None:
        try:
            for number in range(40):
                loaded = Session.load(session.save(tmp_path / f"{number}.safetensors"))
                assert leaf_bytes(loaded) == states[loaded.count]
                assert leaf_bytes(session.fork()) in states
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    for views in stream:
        session.step(views)
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    assert session.count == len(stream)


def leaf_bytes(session: Session) -> bytes:
    from testtime.methods.base import leaves

    return b"".join(leaf.numpy().tobytes() for leaf in leaves(session.state))


def test_steps_of_several_threads_are_all_counted() -> None:
    session, stream = toy("dota")
    threads = [threading.Thread(target=lambda part=part: [session.step(x) for x in part]) for part in stream.split(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.count == session.position == int(session.state.images) == 60


@pytest.mark.parametrize("duplicate", [Session.fork, copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copy_has_its_own_lock_and_state(duplicate: Any) -> None:
    session, stream = toy()
    session.scan(stream[:5])
    other = duplicate(session)
    assert other._lock is not session._lock and leaf_bytes(other) == leaf_bytes(session)
    with session._lock:  # other threads wait for it, but not those of the copy
        thread = threading.Thread(target=other.scan, args=(stream[5:9],))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert (session.count, other.count) == (5, 9)
    assert torch.equal(session.scan(stream[5:9]), toy()[0].scan(stream[:9])[5:])
