from __future__ import annotations

import json
import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from small_data import make_folders

import testtime as tt
from testtime.encoding import store as features
from testtime.encoding import stream as streams
from testtime.machine.interrupts import deferred_interrupts, on_interrupt
from testtime.types import Interrupted


def test_an_interrupt_waits_until_the_block_has_ended() -> None:
    done = []
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)
    assert done == ["all of it"]


def test_other_threads_are_not_blocked() -> None:
    passed = []

    def work() -> None:
        with deferred_interrupts():
            passed.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert passed == [True]


def test_an_interrupt_becomes_a_message_about_what_is_kept() -> None:
    with pytest.raises(Interrupted, match="all of it") as caught, on_interrupt(lambda: "all of it"):
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130


# commands


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "photos", images=4)


def stop_at(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Press Ctrl-C at the call of that number."""
    usual, calls = getattr(owner, name), count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return usual(*arguments, **options)

    patch.setattr(owner, name, interrupted)


def test_an_interrupted_run_writes_its_report_and_says_how_to_resume(cli, photos, tmp_path, monkeypatch) -> None:
    rows, state, page = tmp_path / "a.csv", tmp_path / "s.safetensors", tmp_path / "p.html"
    run = ["run", photos, "-e", "tiny", "--out", rows, "--save", state]
    with monkeypatch.context() as patch:
        stop_at(patch, tt.Session, "_advance", 6)
        stopped = cli(*run, "--report", page)
    assert stopped.code == 130
    assert f"Interrupted after 5 of 12 images. To resume, run the same command with --resume {state}" in stopped.err
    assert "interrupted after 5 of 12 images" in page.read_text()
    assert cli(*run, "--resume", state).code == 0
    whole = tmp_path / "whole.csv"
    assert cli("run", photos, "-e", "tiny", "--out", whole).code == 0
    assert rows.read_bytes() == whole.read_bytes()


def test_an_interrupted_run_without_a_state_says_what_would_have_kept_it(cli, photos, monkeypatch) -> None:
    stop_at(monkeypatch, tt.Session, "_advance", 1)
    stopped = cli("run", photos, "-e", "tiny", "--json")
    assert stopped.code == 130 and "--save FILE would keep it" in stopped.err
    assert json.loads(stopped.err.splitlines()[-2])["images"] == 0


def test_an_interrupted_encoding_keeps_its_shards(cli, photos, tmp_path, monkeypatch) -> None:
    out = tmp_path / "shards"
    with monkeypatch.context() as patch:
        stop_at(patch, streams, "_unit", 10)
        stopped = cli("encode", photos, "-e", "tiny", "--views", 2, "--shard", 4, "--out", out)
    assert stopped.code == 130 and f"kept in {out}" in stopped.err
    assert len(list(out.glob("features-*"))) == 2
    with monkeypatch.context() as patch:
        stop_at(patch, streams, "_unit", 10)
        stopped = cli("encode", photos, "-e", "tiny", "--views", 2, "--out", tmp_path / "one.safetensors")
    assert stopped.code == 130 and "nothing was saved. With --shard" in stopped.err


def test_interrupted_experiments_say_how_to_resume(cli, photos, tmp_path, monkeypatch) -> None:
    for words in (["eval", photos], ["bench", "losses", photos], ["bench", "systems", photos]):
        with monkeypatch.context() as patch:
            stop_at(patch, features.Features, "read", 1)
            stopped = cli(*words, "-e", "tiny", "--out", tmp_path / "o")
        assert stopped.code == 130 and f"kept in {tmp_path / 'o'}; run the same command again" in stopped.err


def test_an_interrupted_replay_ends_with_a_message(cli, tmp_path, monkeypatch) -> None:
    task, stream, labels = tt.toy(images=40)
    store = tt.save_features(tmp_path / "toy.safetensors", stream, task.text, labels=labels)
    stop_at(monkeypatch, features.Features, "read", 1)
    stopped = cli("replay", store, "--out", tmp_path / "o.safetensors")
    assert stopped.code == 130 and "Interrupted. No partial file was left" in stopped.err
    assert not (tmp_path / "o.safetensors").exists()


def test_an_interrupt_while_loading_leaves_no_traceback(monkeypatch) -> None:
    from testtime import __main__

    class Stop:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "testtime.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "testtime.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Stop(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 130
