"""The API's document and the service agree: requests made from the document find no failure, and the answers fit it."""

from __future__ import annotations

import asyncio
import typing
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import schemathesis
from fake_service import FakeService, served
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from testtime.encoding.encoders import load_encoder
from testtime.serve import replies, schemas
from testtime.serve.app import make_app
from testtime.serve.auth import Gate
from testtime.serve.service import Service
from testtime.serve.types import Settings, StreamSpec, Upload

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
EXAMPLES = 10  # requests of each call and each kind: valid, and not


def picture(shade: int) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (12, 9), (shade, 90, 60)).save(buffer, "PNG")
    return buffer.getvalue()


def make_service(folder: Path) -> Service:
    return Service(load_encoder("tiny"), folder, Settings(decoders=1))


# no service needs to run for the document
DOCUMENT = make_app(FakeService(), Gate(Path("nowhere"), "127.0.0.1")).openapi()
CALLS = [
    (method.upper(), path, mode)
    for path, methods in DOCUMENT["paths"].items()
    for method, call in methods.items()
    for mode in ("positive", "negative")
    if not path.endswith("/events")  # these never end
    if mode == "positive" or "parameters" in call or "requestBody" in call  # there is something to get wrong
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with served(make_app(make_service(folder), Gate(folder, "127.0.0.1"))) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def fill(client: httpx.Client) -> None:
    """Have a stream 'pets' with a few images and a snapshot, whatever the requests before did to it."""
    if client.get("/v1/streams/pets").status_code == 404:
        new = {"name": "pets", "classes": ["cat", "dog"], "method": "tda", "thumbnails": True}
        client.post("/v1/streams", json=new).raise_for_status()
        client.post("/v1/streams/pets/images", files=[("file", ("x", picture(n))) for n in (0, 80, 160)])
        client.post("/v1/streams/pets/snapshots", json={"title": "good"}).raise_for_status()


schemathesis.openapi.media_type("image/*", st.sampled_from([picture(9), b"not an image", b"\x89PNG", b""]))


@pytest.mark.parametrize("method, path, mode", CALLS, ids=[" ".join(call) for call in CALLS])
def test_no_request_makes_the_service_fail(url, client, method, path, mode) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    cases = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    known = st.tuples(st.sampled_from(["pets", "pets", None]), st.integers(0, 8))

    @given(cases, known)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case, chosen) -> None:
        fill(client)
        name, number = chosen
        if name is not None:  # a stream that is there, more often than chance would have it
            numbers = {key: number for key in ("image", "snapshot") if key in case.path_parameters}
            case.path_parameters.update({"name": name, **numbers} if "name" in case.path_parameters else {})
        response = case.call(base_url=url)
        case.validate_response(response, checks=list(CHECKS))

    run()


def test_a_key_of_an_image_that_is_not_learned_and_cannot_be_read_does_no_harm(client) -> None:
    fill(client)
    at, headers = "/v1/streams/pets/images", {"Idempotency-Key": "one"}
    assert client.post(f"{at}?learn=false", content=b"bad", headers=headers).status_code == 422
    assert client.post(at, content=b"bad", headers=headers).status_code == 422
    assert client.post(at, content=picture(7), headers=headers).json()["answers"][0]["repeated"] is False


# What the service answers


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What a real service answers to one of each call, by the name of its schema."""

    async def use() -> dict[str, list[typing.Any]]:
        service = make_service(tmp_path_factory.mktemp("answers"))
        await service.start()
        try:
            spec = StreamSpec("pets", ("cat", "dog"), method="tda", settings={"pos_alpha": 2.0}, thumbnails=True)
            streams = [await service.create(spec)]
            uploads = [Upload(picture(80 * shade), f"{shade}.png") for shade in range(3)]
            answers = await service.answer("pets", [*uploads, Upload(b"bad", "bad.png")])
            answers += await service.answer("pets", uploads[:1], learn=False, top=1)
            found: dict[str, list[typing.Any]] = {
                "Answers": [{"answers": answers}],
                "Answer": [answer for answer in answers if "error" not in answer],
                "ImageFailure": [answer for answer in answers if "error" in answer],
                "Queues": [await service.queues("pets")],
                "Map": [await service.map("pets")],
                "LabelResult": [await service.label("pets", 1, "cat")],
                "SnapshotInfo": [await service.snapshot("pets", "good"), *await service.snapshots("pets")],
            }
            streams += [await service.change_classes("pets", add=["fox"]), await service.unlearn("pets", 2)]
            streams += [await service.rollback("pets", before=3), await service.reset("pets"), *await service.streams()]
            state = await service.export("pets")
            streams += [await service.import_state("copy", state), await service.fork("pets", "fork")]
            found["StreamInfo"] = streams
            found["AuditRow"] = await service.images("pets")
            return found
        finally:
            await service.close()

    return asyncio.run(use())


NAMES = [
    "Answer", "Answers", "AuditRow", "ImageFailure", "LabelResult", "Map", "Queues", "SnapshotInfo", "StreamInfo",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_the_service_fit_their_schema_and_have_no_other_field(answered, name) -> None:
    model = getattr(schemas, name)
    assert answered[name]
    for value in answered[name]:
        read = model.model_validate(value, strict=True)
        assert read.model_dump() == plain(value), value


def plain(value: typing.Any) -> typing.Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_the_kinds_of_events_that_happened_are_several(answered) -> None:
    assert {"image", "label", "classes", "unlearn", "rollback", "reset"} <= {
        row["kind"] for row in answered["AuditRow"]
    }


@pytest.mark.parametrize("name", ["Answer", "AuditRow", "ImageFailure", "LabelResult", "SnapshotInfo", "StreamInfo"])
def test_the_client_s_types_have_the_fields_of_the_schemas(name) -> None:
    assert typing.get_type_hints(getattr(replies, name)).keys() == getattr(schemas, name).model_fields.keys()


@pytest.mark.parametrize(
    "model, body",
    [
        ("NewStream", {"name": "x", "classes": ["c"] * (schemas.LIMITS.classes + 1)}),
        ("NewStream", {"name": "x", "classes": ["c"], "templates": ["{}"] * (schemas.LIMITS.templates + 1)}),
        ("NewStream", {"name": "x" * 65, "classes": ["c"]}),
        ("NewStream", {"name": "x\n", "classes": ["c"]}),
        ("NewStream", {"name": "x", "classes": ["c"], "settings": {str(n): n for n in range(101)}}),
        ("NewStream", {"name": "x", "classes": ["c"], "settings": {"alpha": float("nan")}}),
        ("NewStream", {"name": "x", "classes": ["c"], "settings": {"alpha": [1]}}),
        ("NewSnapshot", {"title": "t" * (schemas.LIMITS.name + 1)}),
        ("ClassChange", {"add": [""]}),
    ],
)
def test_what_is_beyond_a_bound_is_refused(model, body) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(getattr(schemas, model)).validate_python(body)


def test_a_stream_s_description_reaches_the_service_whole() -> None:
    body = {"name": "x", "classes": ["a", "b"], "templates": ["{}!"], "settings": {"alpha": 2}, "seed": 7, "views": 3}
    spec = schemas.NewStream.model_validate(body).spec()
    assert spec == StreamSpec("x", ("a", "b"), ("{}!",), settings={"alpha": 2}, seed=7, views=3)


def test_every_call_documents_its_errors_and_has_a_scope() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method, call in methods.items():
            assert call["summary"], path
            if path.startswith("/v1/"):
                assert call["x-scope"] and {"401", "403", "422", "429", "503"} <= call["responses"].keys(), (
                    method,
                    path,
                )
