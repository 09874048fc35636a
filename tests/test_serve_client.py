"""The clients: every call, retries that learn nothing twice, and light imports."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import httpx
import pytest
from fake_service import FakeService, served
from PIL import Image

from testtime.serve import calls
from testtime.serve.app import make_app
from testtime.serve.auth import Gate, add_token
from testtime.serve.client import AsyncClient, Client, ServiceError
from testtime.serve.types import ServiceError as Raised

WAYS = ["sync", "async"]


class Ran:
    """An `AsyncClient` used like a `Client`, so that one test holds for both."""

    def __init__(self, url: str, *arguments: object, **options: object) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(url, *arguments, **options)

    def __getattr__(self, name: str):
        def call(*arguments: object, **options: object):
            return self._loop.run_until_complete(getattr(self._client, name)(*arguments, **options))

        return call

    def events(self, stream: str):
        found = self._client.events(stream)
        while True:
            try:
                yield self._loop.run_until_complete(anext(found))
            except StopAsyncIteration:
                return
            except GeneratorExit:
                self._loop.run_until_complete(found.aclose())
                raise

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    service = FakeService()
    with served(make_app(service, Gate(tmp_path_factory.mktemp("open"), "127.0.0.1"))) as url:
        yield service, url


@pytest.fixture
def service(running, monkeypatch):
    monkeypatch.setattr(calls, "LONGEST", 0.01)  # seconds between attempts
    running[0].clear()
    return running[0]


@pytest.fixture(params=WAYS)
def client(request, running, service):
    client = (Client if request.param == "sync" else Ran)(running[1])
    client.create("pets", ["cat", "dog"], thumbnails=True)
    yield client
    client.close()


def test_both_clients_have_the_same_calls() -> None:
    def public(cls: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(cls, inspect.isfunction)
        return {
            name: [str(each) for each in inspect.signature(found).parameters.values()]
            for name, found in functions
            if not name.startswith("_")
        }

    assert public(Client) == public(AsyncClient)
    docs = {name: inspect.getdoc(getattr(Client, name)) for name in public(Client)}
    assert docs == {name: inspect.getdoc(getattr(AsyncClient, name)) for name in public(AsyncClient)}


def test_an_image_may_be_a_path_bytes_or_of_pillow(client, service, tmp_path) -> None:
    path = tmp_path / "café.png"
    Image.new("RGB", (8, 6), (200, 30, 30)).save(path)
    assert client.classify("pets", path)["image"] == "café.png"
    assert client.classify("pets", str(path), name="other")["image"] == "other"
    assert client.classify("pets", path.read_bytes())["image"] == ""
    client.classify("pets", Image.new("CMYK", (8, 6)))
    first, _, third, fourth = (upload.data for upload in service.seen["pets"])
    assert first == third == path.read_bytes() and fourth.startswith(b"\x89PNG")
    with pytest.raises(TypeError, match="got int"):
        client.classify("pets", 3)


def test_a_prediction_teaches_nothing(client, service) -> None:
    assert client.predict("pets", b"x", top=1)["learned"] is False and service.seen["pets"] == []


def test_a_batch_has_an_answer_or_an_error_for_each_image(client) -> None:
    answers = client.batch("pets", [b"one", b"bad", b"three"])
    assert [answer.get("id") for answer in answers] == [1, None, 2] and answers[1]["error"] == "Not an image."


def test_an_image_that_cannot_be_used_is_an_error(client) -> None:
    with pytest.raises(ServiceError, match="Not an image") as problem:
        client.classify("pets", b"bad")
    assert problem.value.status == 422


def test_every_call_reaches_the_service(client, service) -> None:
    client.classify("pets", b"x", name="a.png")
    assert client.info()["encoder"] == "fake" and client.streams()[0]["name"] == "pets"
    assert client.stream("pets")["thumbnails"] is True
    assert client.label("pets", 1, "cat")["right"] is True
    assert client.images("pets", limit=1)[0]["image"] == "a.png" and client.image("pets", 1)["id"] == 1
    assert client.thumbnail("pets", 1).startswith(b"\xff\xd8")
    assert client.snapshot("pets", "good")["id"] == 1 and client.snapshots("pets")[0]["title"] == "good"
    client.rollback("pets", snapshot=1)
    client.rollback("pets", before=5)
    client.unlearn("pets", 1)
    assert service.calls == [("rollback", "pets", 1, None), ("rollback", "pets", None, 5), ("unlearn", "pets", 1)]
    assert client.fork("pets", "other")["name"] == "other"
    assert client.change_classes("pets", add=["fox"])["classes"] == ["cat", "dog", "fox"]
    state = client.export("pets")
    assert client.import_state("copy", state, thumbnails=True)["thumbnails"] is True
    assert service.calls[-1] == ("import", "copy", state, True)
    assert client.queues("pets")["classes"] and client.map("pets")["classes"]
    assert client.reset("pets")["images"] == 0
    client.delete_snapshot("pets", 1)
    client.delete("pets")
    with pytest.raises(ServiceError, match="No stream 'pets'"):
        client.stream("pets")


def test_events_come_as_they_happen(client, running) -> None:
    events = client.events("pets")
    with Client(running[1]) as other:
        import threading

        sender = threading.Timer(0.3, other.classify, ("pets", b"x"))
        sender.start()
        assert next(events)["answer"]["id"] == 1
        sender.join()
    events.close()


def test_events_of_no_stream_are_an_error(client) -> None:
    with pytest.raises(ServiceError, match="No stream"):
        next(client.events("none"))


def test_a_busy_server_is_asked_again(client, service) -> None:
    service.fail_next = [Raised(503, "Full.", 1), Raised(503, "Full.", 1)]
    assert client.classify("pets", b"x")["id"] == 1
    service.fail_next = [Raised(503, "Full.", 1)] * 9
    with pytest.raises(ServiceError, match="Full") as problem:
        client.classify("pets", b"x")
    assert problem.value.status == 503 and problem.value.retry_after and len(service.fail_next) == 4


def test_an_error_of_the_client_is_not_sent_again(client, service) -> None:
    service.fail_next = [Raised(422, "Wrong.")] * 2
    with pytest.raises(ServiceError, match="Wrong"):
        client.classify("pets", b"x")
    assert len(service.fail_next) == 1


class Lossy(httpx.HTTPTransport):
    """Sends the request, and loses the answer, the first times."""

    losses = 2

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self.losses:
            self.losses -= 1
            response.read()
            raise httpx.ReadError("the connection broke")
        return response


def test_an_image_whose_answer_was_lost_is_learned_once(running, service) -> None:
    with Client(running[1]) as plain:
        plain.create("pets", ["cat", "dog"])
    with Client(running[1], transport=Lossy()) as client:
        assert client.classify("pets", b"x")["repeated"] is True
    with Client(running[1], transport=Lossy()) as client:
        assert [answer["repeated"] for answer in client.batch("pets", [b"y", b"z"])] == [True, True]
    assert [upload.data for upload in service.seen["pets"]] == [b"x", b"y", b"z"]


def test_a_change_whose_answer_was_lost_is_not_repeated(running, service) -> None:
    with Client(running[1], transport=Lossy()) as client, pytest.raises(ConnectionError, match="the connection broke"):
        client.create("pets", ["cat"])
    assert list(service.specs) == ["pets"]


class Proxied(Lossy):
    """A proxy that loses the first answer, and says so in its own words."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return super().handle_request(request)
        except httpx.ReadError:
            return httpx.Response(500, text="Internal Server Error", request=request)


def test_a_proxy_that_lost_the_server_is_asked_again_for_what_may_be_repeated(running, service) -> None:
    with Client(running[1]) as plain:
        plain.create("pets", ["cat", "dog"])
    with Client(running[1], transport=Proxied()) as client:
        assert client.classify("pets", b"x")["id"] == 1
    assert len(service.seen["pets"]) == 1
    with Client(running[1], transport=Proxied()) as client, pytest.raises(ServiceError) as problem:
        client.reset("pets")
    assert problem.value.status == 500
    service.fail_next = [RuntimeError("a bug")]
    with Client(running[1]) as client, pytest.raises(ServiceError, match="its log tells why"):
        client.classify("pets", b"y")


@pytest.mark.parametrize("way", WAYS)
def test_no_server_is_said_with_its_address(way, service) -> None:
    client = (Client if way == "sync" else Ran)("http://127.0.0.1:9", attempts=2)
    with pytest.raises(ConnectionError, match="No answer from http://127.0.0.1:9"):
        client.info()
    client.close()


def test_a_token_is_sent(tmp_path) -> None:
    secret = add_token(tmp_path, "one", "admin")
    with served(make_app(FakeService(), Gate(tmp_path, "127.0.0.1"))) as url:
        with Client(url, secret) as client:
            assert client.streams() == []
        with Client(url) as client, pytest.raises(ServiceError, match="A token is needed"):
            client.streams()


def test_the_client_needs_neither_torch_nor_the_server() -> None:
    code = (
        "import sys, testtime.serve.client; print({'torch', 'numpy', 'PIL', 'fastapi', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_missing_package_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from testtime.errors import MissingPart\n"
        "try:\n    import testtime.serve.client\nexcept MissingPart as problem:\n    print(problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'testtime[serve]'" in done.stdout
