"""Tokens: how they are kept, what they allow, how often; and where a service without any may listen."""

from __future__ import annotations

import json
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testtime.cli.app import main
from testtime.errors import InputError
from testtime.serve.auth import (
    FILE,
    SCOPES,
    Gate,
    Rates,
    Refusal,
    add_token,
    bearer,
    check_bind,
    is_loopback,
    read_tokens,
    revoke_token,
)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(gate: Gate, secret: str | None, scope: str = "predict") -> int:
    with pytest.raises(Refusal) as problem:
        gate.identify(secret, scope)
    return problem.value.status


def test_the_secret_is_nowhere_kept_and_only_the_owner_can_read_the_file(tmp_path) -> None:
    secret = add_token(tmp_path, "camera", "learn", rate=5)
    path = tmp_path / FILE
    assert secret not in path.read_text() and secret.removeprefix("tt_") not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(secret) >= 43  # 256 bits
    (token,) = read_tokens(tmp_path)
    assert (token.name, token.scope, token.rate) == ("camera", "learn", 5)


def test_secrets_differ(tmp_path) -> None:
    assert len({add_token(tmp_path, f"t{n}", "learn") for n in range(20)}) == 20


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_allows_itself_and_those_before_it(tmp_path, scope) -> None:
    gate_for = {scope: add_token(tmp_path, scope, scope)}
    gate = Gate(tmp_path, "127.0.0.1")
    for needed in SCOPES:
        if SCOPES.index(needed) <= SCOPES.index(scope):
            found = gate.identify(gate_for[scope], needed)
            assert found is not None and found.name == scope
        else:
            assert refused(gate, gate_for[scope], needed) == 403


@given(st.text())
def test_no_other_text_is_a_token(tmp_path_factory, text) -> None:
    folder = tmp_path_factory.getbasetemp() / "auth"
    if not (folder / FILE).exists():
        add_token(folder, "one", "admin")
    assert refused(Gate(folder, "127.0.0.1"), text) == 401


def test_a_bucket_fills_at_the_rate() -> None:
    clock = Clock()
    rates = Rates(clock)
    for _ in range(4):
        rates.spend("camera", 4)
    with pytest.raises(Refusal, match="More than 4 requests a second; wait 0.25 s") as problem:
        rates.spend("camera", 4)
    assert problem.value.status == 429 and problem.value.retry_after == pytest.approx(0.25)
    rates.spend("another", 4)
    clock.now += 0.25
    rates.spend("camera", 4)
    with pytest.raises(Refusal):
        rates.spend("camera", 4)
    clock.now += 3600
    for _ in range(4):  # no more than one second's worth is saved up
        rates.spend("camera", 4)
    with pytest.raises(Refusal):
        rates.spend("camera", 4)


def test_a_rate_below_one_a_second_still_lets_one_through() -> None:
    clock = Clock()
    rates = Rates(clock)
    rates.spend("slow", 0.1)
    with pytest.raises(Refusal):
        rates.spend("slow", 0.1)
    clock.now += 10
    rates.spend("slow", 0.1)


def test_a_running_service_notices_new_and_revoked_tokens(tmp_path) -> None:
    clock = Clock()
    first = add_token(tmp_path, "first", "learn")
    gate = Gate(tmp_path, "127.0.0.1", clock)
    second = add_token(tmp_path, "second", "learn")
    revoke_token(tmp_path, "first")
    clock.now += 1.1
    assert refused(gate, first) == 401
    assert gate.identify(second, "learn")


def test_a_service_that_has_seen_a_token_never_becomes_open(tmp_path) -> None:
    clock = Clock()
    gate = Gate(tmp_path, "127.0.0.1", clock)
    assert gate.open and gate.identify(None, "admin") is None
    add_token(tmp_path, "first", "admin")
    clock.now += 1.1
    assert refused(gate, None) == 401 and not gate.open
    revoke_token(tmp_path, "first")
    clock.now += 1.1
    assert refused(gate, None) == 401
    (tmp_path / FILE).unlink()
    clock.now += 1.1
    assert refused(gate, None) == 401


def test_a_public_service_without_tokens_is_never_open(tmp_path) -> None:
    gate = Gate(tmp_path, "0.0.0.0")
    assert not gate.open and refused(gate, None) == 401


def test_a_file_that_is_damaged_while_it_runs_changes_nothing(tmp_path) -> None:
    clock = Clock()
    secret = add_token(tmp_path, "first", "admin")
    gate = Gate(tmp_path, "127.0.0.1", clock)
    (tmp_path / FILE).write_text("[")
    clock.now += 1.1
    assert gate.identify(secret, "admin") and refused(gate, None) == 401


@pytest.mark.parametrize(
    "content",
    ["{}", "[1]", '[{"name": "x"}]', "", '[{"name": "x", "digest": "00", "scope": "admin", "rate": 0, "created": ""}]',
     json.dumps([{"name": "x", "digest": "0" * 64, "scope": "root", "rate": 0, "created": ""}]),
     json.dumps([{"name": "x", "digest": "0" * 64, "scope": "admin", "rate": -1, "created": ""}])],
)  # fmt: skip
def test_a_damaged_file_is_an_error_at_the_start(tmp_path, content) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(InputError, match="damaged"):
        Gate(tmp_path, "127.0.0.1")


def test_tokens_that_are_added_at_once_are_all_kept(tmp_path) -> None:
    threads = [threading.Thread(target=add_token, args=(tmp_path, f"t{n}", "learn")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_tokens(tmp_path)) == 8


@pytest.mark.parametrize(
    "host, here",
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False), ("127.0.0.1.nip.io", False)],
)  # fmt: skip
def test_which_addresses_are_this_machine_s_own(host, here) -> None:
    assert is_loopback(host) is here


def test_a_public_address_needs_a_token(tmp_path) -> None:
    check_bind("127.0.0.1", tmp_path)
    with pytest.raises(InputError, match="testtime token add NAME --scope admin --folder"):
        check_bind("0.0.0.0", tmp_path)
    add_token(tmp_path, "one", "admin")
    check_bind("0.0.0.0", tmp_path)


@pytest.mark.parametrize(
    "header, secret",
    [
        ("Bearer tt_x", "tt_x"),
        ("bearer  tt_x ", "tt_x"),
        ("Basic tt_x", None),
        ("Bearer ", None),
        ("", None),
        (None, None),
    ],
)
def test_the_secret_in_a_header(header, secret) -> None:
    assert bearer(header) == secret


def test_the_commands_add_list_and_revoke(tmp_path, capsys) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(["token", *arguments, "--folder", str(tmp_path)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, secret, _ = run("add", "camera", "--scope", "learn", "--rate", "50")
    assert code == 0 and Gate(tmp_path, "127.0.0.1").identify(secret.strip(), "learn")
    assert "already" in run("add", "camera")[2]
    assert run("add", "other", "--scope", "root")[0] == 2
    assert run("add", "a/b")[0] == 2
    code, table, _ = run("list")
    assert code == 0 and "camera" in table and "50" in table and secret.strip() not in table
    assert run("revoke", "camera")[0] == 0
    code, _, problem = run("revoke", "camera")
    assert code == 2 and "There is no token 'camera'" in problem
