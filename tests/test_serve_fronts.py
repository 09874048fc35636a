"""HTTP spoken by processes of its own, in front of the service: the same answers, errors and limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import httpx  # noqa: E402
from test_service import CLASSES, offline, photograph, same, session_of  # noqa: E402

import testtime as tt  # noqa: E402
from testtime.serve.auth import add_token  # noqa: E402
from testtime.serve.client import Client, ServiceError  # noqa: E402
from testtime.serve.front_process import Address  # noqa: E402
from testtime.serve.fronts import Fronts  # noqa: E402
from testtime.serve.remote import KNOWN, Remote  # noqa: E402
from testtime.serve.service import Service  # noqa: E402
from testtime.serve.types import Settings  # noqa: E402

COUNT = 2


class Running:
    """A service with front processes, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.encoder = folder, tt.load_encoder("tiny")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.service: Service
        self.fronts: Fronts

    @contextmanager
    def running(self) -> Iterator[Running]:
        stop, started, loops = asyncio.Event(), threading.Event(), list[asyncio.AbstractEventLoop]()

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            self.service = Service(self.encoder, self.folder, replace(Settings(), decoders=0))
            await self.service.start()
            address = Address(str(self.folder), "127.0.0.1", "text")
            self.fronts = Fronts(self.service, self.listener, COUNT, 2, address)
            started.set()
            await self.fronts.run(stop)
            await self.service.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            assert started.wait(60)
            yield self
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join(60)
            self.listener.close()
        assert not thread.is_alive()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return list(self.fronts._processes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("service")).running() as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def test_answers_and_state_equal_those_of_an_offline_session(server: Running, client: Client) -> None:
    client.create("pets", list(CLASSES), thumbnails=True)
    answers = client.batch("pets", [photograph(number) for number in range(4)])
    answers += [client.classify("pets", photograph(number), name=f"{number}.png") for number in range(4, 12)]
    session, expected = offline(server.encoder, range(12))
    assert [answer["label"] for answer in answers] == [each.label for each in expected]
    assert [answer["confidence"] for answer in answers] == [round(each.confidence, 6) for each in expected]
    assert same(session_of(server.service, "pets"), session)
    assert client.images("pets", limit=1)[0]["thumbnail"] and client.thumbnail("pets", 3)[:2] == b"\xff\xd8"


def test_calls_that_come_together_ask_once_more_whether_a_stream_keeps_thumbnails(monkeypatch) -> None:
    class Elsewhere(Remote):
        keeps, asked = True, 0

        async def exchange(self, header: dict[str, Any], *parts: Any) -> tuple[dict[str, Any], bytes]:
            self.asked += 1
            await asyncio.sleep(0)
            return ({"result": {"thumbnails": self.keeps}} if self.keeps is not None else {"broken": True}), b""

        subscribe = None

    async def calls() -> None:
        remote, clock = Elsewhere(Settings()), [0.0]
        monkeypatch.setattr("testtime.serve.remote.time", SimpleNamespace(monotonic=lambda: clock[0]))
        assert await remote._keeps_thumbnails("pets")
        clock[0], remote.asked, remote.keeps = KNOWN, 0, False
        found = await asyncio.gather(*(remote._keeps_thumbnails("pets") for _ in range(8)))
        assert remote.asked == 1 and found == [False, *[True] * 7]
        clock[0], remote.keeps = 2 * KNOWN, None
        with pytest.raises(RuntimeError, match="its log tells why"):
            await remote._keeps_thumbnails("pets")
        assert not remote._thumbnails  # what is not known is asked by every call

    asyncio.run(calls())


def test_a_new_stream_of_an_old_name_keeps_thumbnails_only_if_it_says_so(server: Running, client: Client) -> None:
    client.create("renewed", list(CLASSES), thumbnails=True)
    client.classify("renewed", photograph(1))  # the process that decodes for this connection has seen the old stream
    assert client.images("renewed")[0]["thumbnail"]
    client.delete("renewed")
    client.create("renewed", list(CLASSES))
    client.classify("renewed", photograph(1))
    assert not client.images("renewed")[0]["thumbnail"]
    client.delete("renewed")
    client.create("renewed", list(CLASSES), thumbnails=True)
    time.sleep(KNOWN)  # then the process asks again
    client.classify("renewed", photograph(1))
    assert client.images("renewed")[0]["thumbnail"]


def test_calls_of_all_kinds_pass_through(client: Client) -> None:
    client.create("calls", list(CLASSES))
    for number in range(5):
        client.classify("calls", photograph(number))
    kept = client.snapshot("calls", "five")
    client.classify("calls", photograph(9))
    assert client.rollback("calls", snapshot=kept["id"])["images"] == 5
    assert client.unlearn("calls", 2)["images"] == 4
    state = client.export("calls")
    assert client.import_state("again", state)["classes"] == list(CLASSES)
    assert client.change_classes("again", add=["yak"], remove=["owl"])["classes"] == ["cat", "dog", "fox", "yak"]
    client.delete("again")
    assert "again" not in [stream["name"] for stream in client.streams()]


def test_errors_are_those_of_the_service(server: Running, client: Client) -> None:
    client.create("errors", list(CLASSES))
    for status, call in (
        (404, lambda: client.stream("nobody")),
        (404, lambda: client.classify("nobody", photograph(1))),
        (409, lambda: client.create("errors", list(CLASSES))),
        (422, lambda: client.create("others", list(CLASSES), method="nothing of the kind")),
        (422, lambda: client.classify("errors", b"no image")),
        (404, lambda: client.unlearn("errors", 99)),
    ):
        with pytest.raises(ServiceError) as problem:
            call()
        assert problem.value.status == status
    answers = httpx.post(
        f"{server.url}/v1/streams/errors/images",
        files=[("file", ("a.png", photograph(1))), ("file", ("b.png", b"no image"))],
    ).json()["answers"]
    assert answers[0]["id"] == 1 and answers[1]["status"] == 422


def test_a_key_is_known_to_all_processes(server: Running) -> None:
    with Client(server.url) as client:
        client.create("keys", list(CLASSES))

    def send(_: int) -> Any:
        with Client(server.url) as client:  # a connection of its own
            return client.classify("keys", photograph(1), key="one")["id"]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(send, range(24))) == {1}


def test_events_reach_a_listener_through_any_process(server: Running, client: Client) -> None:
    client.create("events", list(CLASSES))
    with httpx.stream("GET", f"{server.url}/v1/streams/events/events", timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        client.classify("events", photograph(1), name="one.png")
        found = next(line for line in lines if line.startswith("data: "))
    assert json.loads(found.removeprefix("data: "))["answer"]["image"] == "one.png"


def test_metrics_are_those_of_all_processes(server: Running, client: Client) -> None:
    for _ in range(20):
        with httpx.Client() as other:  # a new connection each time, so that every process gets some
            other.get(f"{server.url}/v1/streams/counted-nowhere")
    time.sleep(1.5)  # what other processes counted arrives within half a second
    text = httpx.get(f"{server.url}/metrics").text
    (line,) = [
        each
        for each in text.splitlines()
        if each.startswith("testtime_requests_total") and '"/v1/streams/{name}",status="404"' in each
    ]
    assert float(line.split()[-1]) >= 20


def test_front_processes_have_no_torch(server: Running) -> None:
    for process in server.processes():
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_process_that_dies_is_replaced(server: Running, client: Client) -> None:
    client.create("deaths", list(CLASSES))
    before = server.processes()
    for process in before:
        process.kill()
    with Client(server.url, attempts=100) as patient:
        answers = [patient.classify("deaths", photograph(number), key=str(number)) for number in range(6)]
    assert [answer["id"] for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert not set(before) & set(server.processes())


def test_a_rate_holds_for_all_processes_together(tmp_path: Path) -> None:
    admin = add_token(tmp_path, "admin", "admin")
    slow = add_token(tmp_path, "slow", "learn", rate=3)
    with Running(tmp_path).running() as server:
        with Client(server.url, token=admin) as client:
            client.create("pets", list(CLASSES))

        def send(_: int) -> int:
            headers = {"Authorization": f"Bearer {slow}", "Content-Type": "image/png"}
            with httpx.Client() as each:
                return each.post(
                    f"{server.url}/v1/streams/pets/images", content=photograph(1), headers=headers
                ).status_code

        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(send, range(32)))
        assert found.count(200) <= 3 + 3 * (time.monotonic() - began) and found.count(429) > 0
        assert httpx.get(f"{server.url}/v1/streams").status_code == 401


def test_processes_end_with_the_service(tmp_path: Path) -> None:
    from test_serve_kill import Server

    server = Server(tmp_path / "service")
    server.kill()
    server.start()  # with processes
    server.wait()
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert len(children) == 2
    server.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}/fd").exists() and _alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_stops_the_processes_in_order(tmp_path: Path) -> None:
    from test_serve_kill import Server

    server = Server(tmp_path / "service")
    server.kill()
    server.start()
    server.wait()
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(timeout=60) == 0, server.log.read_text()[-2000:]
