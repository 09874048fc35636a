"""The service over HTTP: bodies, bounds, errors, headers, events, the WebSocket and the stop. The service is a fake."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from fake_service import FakeService, served
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from testtime.errors import SettingError
from testtime.serve import bodies
from testtime.serve.app import make_app
from testtime.serve.auth import Gate, add_token
from testtime.serve.types import Limits, ServiceError, StreamSpec

SMALL = Limits(image_bytes=1000, request_bytes=5000, body_bytes=20_000, batch=4)
IMAGES = "/v1/streams/pets/images"
AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A service without tokens, for all tests, and its address."""
    service = FakeService()
    app = make_app(service, Gate(tmp_path_factory.mktemp("open"), "127.0.0.1"), SMALL)
    with served(app, limits=SMALL) as address:
        yield service, address


def with_pets(service: FakeService) -> FakeService:
    """The service with one empty stream and nothing else."""
    service.clear()
    asyncio.run(service.create(StreamSpec("pets", ("cat", "dog"))))
    return service


@pytest.fixture
def service(running) -> FakeService:
    return with_pets(running[0])


@pytest.fixture
def url(running, service) -> str:
    return running[1]


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture
def guarded(tmp_path):
    """The address of a service with a token of each scope, and the tokens."""
    service = with_pets(FakeService())
    secrets = {scope: add_token(tmp_path, scope, scope) for scope in ("predict", "learn", "admin")}
    with served(make_app(service, Gate(tmp_path, "0.0.0.0"), SMALL), limits=SMALL) as address:
        yield address, secrets


def refusal(response: httpx.Response, status: int) -> str:
    """The message of an error, which must have the status and our form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error", "status"} and body["status"] == status
    return body["error"]


def wait_for(condition) -> None:
    """Wait until something is so, five seconds at most."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Bodies


def test_an_image_as_it_is_has_its_name_and_key_in_headers(client, service) -> None:
    headers = {"Content-Type": "image/png", "X-Image-Name": "caf%C3%A9.png", "Idempotency-Key": "k"}
    first, again = (client.post(IMAGES, content=b"pixels", headers=headers).json()["answers"][0] for _ in range(2))
    assert (first["image"], first["id"], first["repeated"], again["repeated"]) == ("café.png", 1, False, True)
    assert [(upload.data, upload.key) for upload in service.seen["pets"]] == [(b"pixels", "k")]


def test_a_form_may_hold_several_images(client, service) -> None:
    files = [("file", (f"{n}.png", b"%d" % n * 300)) for n in range(3)]
    answers = client.post(IMAGES, files=files, headers={"Idempotency-Key": "k"}).json()["answers"]
    assert [answer["image"] for answer in answers] == ["0.png", "1.png", "2.png"]
    assert [upload.key for upload in service.seen["pets"]] == ["k/0", "k/1", "k/2"]
    assert service.seen["pets"][2].data == b"2" * 300


def test_json_may_hold_several_images_each_with_its_own_key(client, service) -> None:
    images = [{"data": base64.b64encode(b"one").decode(), "name": "1.png", "key": "own"}, {"data": "dHdv"}]
    client.post(IMAGES, json={"images": images}, headers={"Idempotency-Key": "k"}).raise_for_status()
    assert [(each.data, each.name, each.key) for each in service.seen["pets"]] == [
        (b"one", "1.png", "own"),
        (b"two", "", "k/1"),
    ]


def test_predictions_alone_leave_the_stream_as_it_is(client, service) -> None:
    answer = client.post(f"{IMAGES}?learn=false&top=1", content=b"pixels").json()["answers"][0]
    assert answer["id"] is None and len(answer["probabilities"]) == 1 and service.seen["pets"] == []


def test_one_good_image_makes_a_success_and_only_bad_ones_their_error(client) -> None:
    mixed = client.post(IMAGES, files=[("file", ("a", b"bad")), ("file", ("b", b"good"))])
    assert mixed.status_code == 200 and [list(each)[:1] for each in mixed.json()["answers"]] == [["error"], ["id"]]
    only = client.post(IMAGES, content=b"bad")
    assert only.status_code == 422 and only.json()["answers"][0]["error"] == "Not an image."


@pytest.mark.parametrize(
    "request_, status, words",
    [
        ({"content": b"x" * 1001}, 413, "at most 1,000 bytes"),
        ({"content": b""}, 422, "empty"),
        ({"content": b"x", "headers": {"Content-Type": "text/html"}}, 415, "'text/html'"),
        ({"content": b"x", "headers": {"X-Image-Name": "n" * 201}}, 422, "at most 200 characters"),
        ({"content": b"x", "headers": {"X-Image-Name": "%00"}}, 422, "not valid text"),
        ({"content": b"x", "params": {"learn": "maybe"}}, 422, "learn='maybe'"),
        ({"content": b"x", "params": {"top": "0"}}, 422, "top='0'"),
        ({"content": b"x", "params": {"top": "9" * 5000}}, 422, "top='999"),
        ({"files": [("file", ("a", b"x" * 1001))]}, 413, "at most 1,000 bytes"),
        ({"files": [("file", ("a", b"x"))] * 5}, 422, "at most 4 images"),
        ({"files": [("other", ("a", b"x"))]}, 422, "Unknown field 'other'"),
        ({"files": [("file", ("a", b"x" * 900))] * 8}, 413, "at most 5,000 bytes"),
        ({"content": b"nothing", "headers": {"Content-Type": "multipart/form-data"}}, 400, "boundary"),
        ({"content": b"nothing", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "form"),
        ({"content": b"--b\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "its end"),
        ({"json": {"images": []}}, 422, "must have the form"),
        ({"json": {"images": [{"data": "!"}]}}, 422, "images[0].data is not base64"),
        ({"json": {"images": [{"data": "dHdv", "nmae": "x"}]}}, 422, "must have the form"),
        ({"json": {"images": [{"data": "dHdv", "name": 3}]}}, 422, "images[0].name must be text"),
        ({"json": {"images": [{"data": "A" * 2000}]}}, 413, "at most 1,000 bytes"),
        ({"content": b'{"images": [{"data": "dHdv", "name": "\\ud800"}]}', "headers": AS_JSON}, 422, "not valid text"),
        ({"content": b"[" * 4000, "headers": AS_JSON}, 422, "must have the form"),
    ],
)  # fmt: skip
def test_a_body_that_does_not_fit_is_refused_with_the_reason(client, service, request_, status, words) -> None:
    assert words in refusal(client.post(IMAGES, **request_), status)
    assert service.seen["pets"] == []


def test_a_body_without_end_is_refused_where_it_passes_the_bound(url) -> None:
    """Nobody waits for the rest: the answer comes while the client still sends."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        head = f"POST {IMAGES} HTTP/1.1\r\nHost: {host}:{port}\r\nTransfer-Encoding: chunked\r\n"
        raw.sendall(f"{head}Content-Type: image/png\r\n\r\n".encode())
        for _ in range(2):
            raw.sendall(b"258\r\n" + b"x" * 600 + b"\r\n")  # 1,200 bytes, and no end
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert answer.status == 413 and answer.headers["connection"] == "close"


def test_a_declared_length_beyond_the_bound_is_refused_before_the_body(url) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        head = f"POST {IMAGES} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 99999999999\r\n\r\n"
        raw.sendall(head.encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert answer.status == 413


def test_a_body_that_never_arrives_is_given_up(url, monkeypatch) -> None:
    monkeypatch.setattr(bodies, "SECONDS", 0.2)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(f"POST {IMAGES} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 10\r\n\r\nab".encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert answer.status == 408


def test_bodies_of_all_requests_together_have_a_bound_and_give_it_back(client, service) -> None:
    service.held = True
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.post(IMAGES, content=b"x" * 1000).status_code))
        for _ in range(20)  # as many as the budget holds
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: service.busy == 20)
    busy = client.post(IMAGES, content=b"x")
    assert "large requests" in refusal(busy, 503) and busy.headers["retry-after"]
    service.held = False
    for thread in threads:
        thread.join()
    assert statuses == [200] * 20
    assert client.post(IMAGES, content=b"x" * 1000).status_code == 200


def test_a_json_body_of_other_calls_has_a_bound_before_it_is_parsed(client, monkeypatch) -> None:
    monkeypatch.setattr(bodies, "JSON_BYTES", 100)
    assert "at most 100 bytes" in refusal(client.post("/v1/streams", content=b"[" * 101), 413)


# Calls


def test_every_call_reaches_the_service(client, service) -> None:
    client.post(IMAGES, content=b"pixels", headers={"X-Image-Name": "a.png"}).raise_for_status()
    at = "/v1/streams/pets"
    assert client.get("/v1/info").json()["encoder"] == "fake"
    assert [each["name"] for each in client.get("/v1/streams").json()["streams"]] == ["pets"]
    assert client.get(at).json()["images"] == 1
    assert client.post(f"{at}/labels", json={"image": 1, "label": "cat"}).json()["right"] is True
    assert client.get(f"{at}/images", params={"limit": 1}).json()["images"][0]["image"] == "a.png"
    assert client.get(f"{at}/images/1").json()["id"] == 1
    assert client.get(f"{at}/images/1/thumbnail").headers["content-type"] == "image/jpeg"
    made = client.post(f"{at}/snapshots", json={"title": "good"})
    assert made.status_code == 201 and made.json()["title"] == "good"
    assert [each["id"] for each in client.get(f"{at}/snapshots").json()["snapshots"]] == [1]
    assert client.post(f"{at}/rollback", json={"snapshot": 1}).json()["name"] == "pets"
    assert client.post(f"{at}/rollback", json={"before": 7}).json()["name"] == "pets"
    assert client.delete(f"{at}/images/1").json()["name"] == "pets"
    assert service.calls == [("rollback", "pets", 1, None), ("rollback", "pets", None, 7), ("unlearn", "pets", 1)]
    assert client.post(f"{at}/fork", json={"name": "other"}).status_code == 201
    assert client.post(f"{at}/classes", json={"add": ["fox"], "remove": ["dog"]}).json()["classes"] == ["cat", "fox"]
    exported = client.get(f"{at}/state")
    assert exported.content == b"state of pets" and "pets.safetensors" in exported.headers["content-disposition"]
    assert client.put("/v1/streams/new/state?thumbnails=true", content=b"state").json()["thumbnails"] is True
    assert service.calls[-1] == ("import", "new", b"state", True)
    refusal(client.put("/v1/streams/new/state", content=b"state"), 409)
    assert client.get(f"{at}/queues").json()["classes"][0]["slots"] == [{"image": 1, "entropy": 0.1}]
    assert client.get(f"{at}/map").json()["images"][0]["id"] == 1
    assert client.post("/v1/tour").json()["name"] == "tour-1"
    assert client.post(f"{at}/reset").json()["images"] == 0
    assert client.delete(f"{at}/snapshots/1").status_code == 204
    assert client.delete(at).status_code == 204
    refusal(client.get(at), 404)


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("streams", {"name": "../etc", "classes": ["cat"]}, "name"),
        ("streams", {"name": "x", "classes": []}, "classes"),
        ("streams", {"name": "x", "classes": ["c" * 201]}, "classes.0"),
        ("streams", {"name": "x", "classes": ["cat"], "views": 65}, "views"),
        ("streams", {"name": "x", "classes": ["cat"], "gaurd": True}, "gaurd"),
        ("streams/pets/rollback", {}, "give one of 'snapshot' and 'before'"),
        ("streams/pets/rollback", {"snapshot": 1, "before": 1}, "give one of"),
        ("streams/pets/labels", {"image": 2**60, "label": "cat"}, "image"),
        ("streams/pets/labels", {"image": "1", "label": "cat"}, "image"),
    ],
)
def test_a_field_out_of_its_bounds_is_named(client, path, body, words) -> None:
    assert words in refusal(client.post(f"/v1/{path}", json=body), 422)


def test_text_that_cannot_be_stored_is_refused(client) -> None:
    body = b'{"name": "x", "classes": ["\\ud800"]}'
    refusal(client.post("/v1/streams", content=body, headers={"Content-Type": "application/json"}), 422)


def test_errors_of_the_service_keep_their_status_and_say_when_to_return(client, service) -> None:
    service.fail_next = [ServiceError(503, "Full.", 2.4), SettingError("alpha=-1: must be positive.")]
    busy = client.post(IMAGES, content=b"x")
    assert refusal(busy, 503) == "Full." and busy.headers["retry-after"] == "3"
    assert refusal(client.post(IMAGES, content=b"x"), 422) == "alpha=-1: must be positive."


def test_a_failure_is_logged_with_its_request_and_tells_the_client_nothing(client, service, caplog) -> None:
    service.fail_next = [RuntimeError("secret detail")]
    answer = client.post(IMAGES, content=b"x")
    message = refusal(answer, 500)
    assert "secret" not in answer.text and answer.headers["x-request-id"] in message
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert any("secret detail" in str(record.exc_info) for record in caplog.records)


# Tokens


def test_each_scope_allows_what_is_below_it(guarded) -> None:
    url, secrets = guarded
    calls = {
        "predict": [("GET", "/v1/streams"), ("GET", "/metrics"), ("GET", "/v1/info"), ("GET", "/v1/streams/pets/map"),
                    ("POST", f"{IMAGES}?learn=false"), ("GET", IMAGES), ("GET", "/v1/streams/pets/snapshots")],
        "learn": [("POST", IMAGES), ("POST", "/v1/streams/pets/labels")],
        "admin": [("POST", "/v1/streams"), ("POST", "/v1/streams/pets/reset"), ("POST", "/v1/streams/pets/snapshots"),
                  ("POST", "/v1/streams/pets/rollback"), ("GET", "/v1/streams/pets/state"),
                  ("PUT", "/v1/streams/pets/state"), ("POST", "/v1/streams/pets/classes"),
                  ("DELETE", "/v1/streams/pets/images/1"), ("POST", "/v1/streams/pets/fork"),
                  ("DELETE", "/v1/streams/pets/snapshots/1"), ("DELETE", "/v1/streams/pets")],
    }  # fmt: skip
    order = list(secrets)
    with httpx.Client(base_url=url) as client:
        for needed, requests in calls.items():
            for method, path in requests:
                bare = client.request(method, path)
                assert refusal(bare, 401) and bare.headers["www-authenticate"].startswith("Bearer"), path
                refusal(client.request(method, path, headers={"Authorization": "Bearer tt_wrong"}), 401)
                for scope in order:
                    found = client.request(method, path, headers={"Authorization": f"Bearer {secrets[scope]}"})
                    if order.index(scope) < order.index(needed):
                        assert needed in refusal(found, 403), (method, path, scope)
                    else:
                        assert found.status_code not in (401, 403), (method, path, scope)


def test_health_and_the_page_need_no_token(guarded) -> None:
    url, _ = guarded
    for path in ("/healthz", "/readyz", "/", "/docs", "/openapi.json", "/assets/reference.css"):
        assert httpx.get(url + path).status_code == 200, path


def test_a_token_that_asks_too_often_is_told_when_to_return(service, tmp_path) -> None:
    headers = {"Authorization": f"Bearer {add_token(tmp_path, 'slow', 'predict', rate=2)}"}
    with served(make_app(service, Gate(tmp_path, "127.0.0.1"))) as url, httpx.Client(base_url=url) as client:
        statuses = [client.get("/v1/info", headers=headers).status_code for _ in range(3)]
        last = client.get("/v1/info", headers=headers)
        assert statuses == [200, 200, 429] and refusal(last, 429) and int(last.headers["retry-after"]) >= 1
        text = service.telemetry.text().decode()
        assert 'testtime_refused_requests_total{reason="rate"} 2.0' in text


# What surrounds a request


def test_every_answer_has_the_security_headers(client) -> None:
    for path in ("/", "/docs", "/v1/streams", "/nothing", "/metrics", "/assets/none.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'") and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8000", "", "[::1", "10.0.0.1"]
)
def test_an_open_service_answers_to_this_machine_s_names_alone(client, host) -> None:
    assert "testtime token add" in refusal(client.get("/v1/streams", headers={"Host": host}), 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:9", "[::1]:8000"])
def test_an_open_service_answers_to_each_name_of_this_machine(client, host) -> None:
    assert client.get("/v1/streams", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "http://["]
)
def test_another_site_cannot_change_an_open_service(client, service, origin) -> None:
    assert "Origin" in refusal(client.post(IMAGES, content=b"x", headers={"Origin": origin}), 403)
    refusal(client.delete("/v1/streams/pets", headers={"Origin": origin}), 403)
    assert service.seen["pets"] == []


def test_the_service_s_own_page_can_change_it(client, url) -> None:
    assert client.post(IMAGES, content=b"x", headers={"Origin": url}).status_code == 200


def test_another_site_cannot_open_a_websocket_to_an_open_service(url) -> None:
    at = url.replace("http", "ws") + "/v1/streams/pets/live"
    with pytest.raises(InvalidStatus) as refused:
        connect(at, origin="https://evil.example")
    assert refused.value.response.status_code == 403


def test_a_service_with_tokens_may_have_any_name(guarded) -> None:
    url, secrets = guarded
    headers = {"Host": "pets.example", "Origin": "https://a.example", "Authorization": f"Bearer {secrets['learn']}"}
    assert httpx.post(url + IMAGES, content=b"x", headers=headers).status_code == 200


def test_a_request_is_one_line_of_the_log_without_its_token(guarded, caplog) -> None:
    url, secrets = guarded
    caplog.set_level(logging.INFO, "testtime.serve")
    httpx.post(url + IMAGES, content=b"pixels", headers={"Authorization": f"Bearer {secrets['learn']}"})
    wait_for(lambda: any(record.getMessage() == "request" for record in caplog.records))  # written after the answer
    line = caplog.records[-1].fields
    assert (line["method"], line["path"], line["status"], line["token"]) == ("POST", IMAGES, 200, "learn")
    assert secrets["learn"] not in json.dumps(line) and "pixels" not in json.dumps(line)


def test_assets_are_cached_by_their_content(client) -> None:
    first = client.get("/assets/reference.css")
    again = client.get("/assets/reference.css", headers={"If-None-Match": first.headers["etag"]})
    assert first.headers["content-type"].startswith("text/css") and again.status_code == 304
    for path in ("/assets/../app.py", "/assets/%2e%2e%2fapp.py", "/assets/..%5capp.py"):
        assert client.get(path).status_code == 404


def test_the_reference_lists_every_call_and_asks_no_other_host(client) -> None:
    page = client.get("/docs").text
    document = client.get("/openapi.json").json()
    assert len(document["paths"]) >= 18
    for path in document["paths"]:
        assert path in page
    assert "<script" not in page and "//" not in page.replace("http://127.0.0.1", "").replace("<!--", "")


# Connections that stay


def test_events_arrive_as_they_happen(client) -> None:
    with client.stream("GET", "/v1/streams/pets/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        httpx.post(client.base_url.join(IMAGES), content=b"x", headers={"X-Image-Name": "a.png"}).raise_for_status()
        found = [line for line, _ in zip(lines, range(3), strict=False) if line]
    assert found[0] == "event: answer" and json.loads(found[1].removeprefix("data: "))["answer"]["image"] == "a.png"


def test_events_of_no_stream_are_an_error(client) -> None:
    refusal(client.get("/v1/streams/none/events"), 404)


def test_events_end_when_the_token_is_revoked(guarded, tmp_path, monkeypatch) -> None:
    from testtime.serve import auth, live

    monkeypatch.setattr(live, "BEAT", 0.05)
    monkeypatch.setattr(auth, "LOOK_AGAIN", 0.0)
    url, secrets = guarded
    headers = {"Authorization": f"Bearer {secrets['predict']}"}
    with httpx.stream("GET", f"{url}/v1/streams/pets/events", headers=headers) as response:
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        auth.revoke_token(tmp_path, "predict")
        assert set(lines) <= {"", ": still here"}  # and they end


def test_frames_are_answered_in_order(url, service) -> None:
    with connect(url.replace("http", "ws") + "/v1/streams/pets/live?top=1") as live:
        for number in range(3):
            live.send(b"pixels %d" % number)
        live.send(b"bad")
        live.send("text")
        live.send(b"x" * 999)
        answers = [json.loads(live.recv(timeout=5)) for _ in range(6)]
    assert [answer.get("id") for answer in answers] == [1, 2, 3, None, None, 4]
    assert [answer.get("status") for answer in answers] == [None, None, None, 422, 422, None]
    assert len(answers[0]["probabilities"]) == 1


def test_a_frame_beyond_the_bound_ends_the_connection(url, service) -> None:
    with connect(url.replace("http", "ws") + "/v1/streams/pets/live") as live:
        live.send(b"x" * 1001)
        with pytest.raises(Exception, match="1009"):
            live.recv(timeout=5)
    assert service.seen["pets"] == []


def test_a_websocket_takes_its_token_from_the_header_or_the_first_frame(guarded) -> None:
    url, secrets = guarded
    at = url.replace("http", "ws") + "/v1/streams/pets/live"
    with connect(at, additional_headers={"Authorization": f"Bearer {secrets['learn']}"}) as live:
        live.send(b"x")
        assert json.loads(live.recv(timeout=5))["label"] == "cat"
    with connect(at) as live:
        live.send(json.dumps({"token": secrets["learn"]}))
        live.send(b"x")
        assert json.loads(live.recv(timeout=5))["label"] == "cat"
    for first, status in ((json.dumps({"token": "tt_wrong"}), 401), ("nonsense", 401), (b"x", 401),
                          (json.dumps({"token": secrets["predict"]}), 403)):  # fmt: skip
        with connect(at) as live:
            live.send(first)
            assert json.loads(live.recv(timeout=5))["status"] == status
    with connect(at + "?learn=false") as live:
        live.send(json.dumps({"token": secrets["predict"]}))
        live.send(b"x")
        assert json.loads(live.recv(timeout=5))["learned"] is False


def test_a_websocket_of_no_stream_says_so(url) -> None:
    with connect(url.replace("http", "ws") + "/v1/streams/none/live") as live:
        assert json.loads(live.recv(timeout=5))["status"] == 404


# The stop


def test_a_stop_answers_what_was_accepted_and_ends_lasting_connections(tmp_path) -> None:
    service = with_pets(FakeService())

    def listen(url: str) -> list[str]:
        with httpx.stream("GET", f"{url}/v1/streams/pets/events", timeout=30) as response:
            return list(response.iter_lines())

    def watch(url: str) -> int:
        with connect(url.replace("http", "ws") + "/v1/streams/pets/live") as live, suppress(ConnectionClosed):
            live.recv(timeout=20)
        return live.close_code

    with ThreadPoolExecutor() as pool, served(make_app(service, Gate(tmp_path, "127.0.0.1"))) as url:
        service.held = True
        sent = pool.submit(httpx.post, url + IMAGES, content=b"x")
        lines, closed = pool.submit(listen, url), pool.submit(watch, url)
        wait_for(lambda: service.busy == 1 and service.queues_of.get("pets"))
        pool.submit(lambda: (time.sleep(0.5), setattr(service, "held", False)))
        # leaving stops the server, half a second before the image is answered
    assert sent.result().status_code == 200 and service.closed
    assert lines.result()[0] == ": connected"  # and they ended
    assert closed.result() in (1001, 1012)  # going away, service restart
