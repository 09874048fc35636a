"""The calls of the service: each parses, calls and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from testtime.serve import schemas
from testtime.serve.auth import Gate, Token, bearer
from testtime.serve.bodies import Budget, read_json, read_state, read_uploads
from testtime.serve.types import Limits, ServiceError

if TYPE_CHECKING:
    from testtime.serve.remote import Served

Name = Annotated[str, Path(pattern=schemas.STREAM_NAME, examples=["pets"], description="The stream.")]
Event = Annotated[int, Path(ge=0, le=schemas.MOST, examples=[12], description="Number of the image in its stream.")]
SnapshotId = Annotated[int, Path(ge=0, le=schemas.MOST, examples=[3])]
AtSnapshot = Annotated[int | None, Query(ge=0, le=schemas.MOST, description="One of its snapshots; else as it is now.")]
Before = Annotated[int | None, Query(ge=0, le=schemas.MOST, description="Only events before this one.")]
Limit = Annotated[int, Query(ge=1, le=1000)]

REASONS = {
    400: "The body cannot be read.",
    401: "No token, or an unknown one.",
    403: "The token does not allow this; or, without tokens, the request comes from another site.",
    404: "No such stream, image or snapshot.",
    408: "The body did not arrive in time.",
    409: "The name is taken, or the stream is not in a state to do this.",
    413: "Too large.",
    415: "Not a form of body that is known here.",
    422: "Something in the request is wrong; the message names it.",
    429: "Too many requests of this token; Retry-After says when to try again.",
    503: "Busy, starting or stopping; Retry-After says when to try again.",
    507: "The disk is full, or does not take the change.",
}
ALWAYS = (401, 403, 422, 429, 503)
WITH_BODY = (400, 408, 413)
LARGE = schemas.LIMITS.image_bytes


class Json(JSONResponse):
    """JSON, without a model in between."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def described(scope: str, model: Any = None, *others: int, status: int = 200, content: Any = None) -> dict[str, Any]:
    """What OpenAPI says of a route: its scope, its answer and its errors."""
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": schemas.Failure, "description": REASONS[code]} for code in sorted({*ALWAYS, *others})
    }
    answer: dict[str, Any] = {"description": "Done."}
    if model is not None:
        answer["model"] = model
    if content is not None:
        answer["content"] = content
    responses[status] = answer
    if scope == "admin":
        responses[507] = {"model": schemas.Failure, "description": REASONS[507]}
    return {
        "status_code": status,
        "response_class": Json if model is not None else Response,
        "responses": responses,
        "openapi_extra": {"security": [{"token": []}], "x-scope": scope},
    }


async def admit(service: Served, gate: Gate, secret: str | None, scope: str) -> Token | None:
    """The token of a request, which counts towards its rate; None on an open service."""
    token = gate.identify(secret, scope)
    if token is not None and token.rate:
        await service.spend(token.digest, token.rate)
    return token


async def admitted(service: Served, gate: Gate, request: Request, scope: str) -> None:
    """Check the token of a request, and note its name for the log."""
    token = await admit(service, gate, bearer(request.headers.get("authorization")), scope)
    request.scope["token_name"] = token and token.name


def flag(text: str | None, name: str) -> bool:
    if text not in (None, "true", "false", "1", "0"):
        raise ServiceError(422, f"{name}={text[:50]!r}: must be true or false.")
    return text in (None, "true", "1")


def top_of(text: str | None) -> int:
    if text is None:
        return 5
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= schemas.LIMITS.classes:
        raise ServiceError(422, f"top={text[:50]!r}: must be a number from 1 to {schemas.LIMITS.classes}.")
    return int(text)


FILE = {"type": "string", "format": "binary", "maxLength": LARGE}
IMAGES = {
    "security": [{"token": []}],
    "x-scope": "learn, or predict with learn=false",
    "parameters": [
        {"name": "learn", "in": "query", "schema": {"type": "boolean", "default": True},
         "description": "Whether the stream takes the image and learns from it; with false it only answers."},
        {"name": "top", "in": "query", "description": "How many of the most probable classes to return.",
         "schema": {"type": "integer", "default": 5, "minimum": 1, "maximum": schemas.LIMITS.classes}},
        {"name": "X-Image-Name", "in": "header", "schema": {"type": "string", "maxLength": 200}, "example": "me.jpg",
         "description": "Name of an image that is sent as it is; characters beyond ASCII are percent-encoded."},
        {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 200},
         "description": "A second request with the same key is answered like the first and teaches nothing. Of several "
         "images, image i gets KEY/i."},
    ],
    "requestBody": {
        "required": True,
        "description": "One image as it is, or several in a form or as JSON.",
        "content": {
            "image/*": {"schema": FILE},
            "application/octet-stream": {"schema": FILE},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "array", "items": FILE, "maxItems": schemas.LIMITS.batch}},
                }
            },
            "application/json": {"schema": {"$ref": "#/components/schemas/Images"}},
        },
    },
}  # fmt: skip


def image_routes(service: Served, gate: Gate, budget: Budget, limits: Limits) -> APIRouter:
    """Images in, answers out; this is the hot path, so only the request is a parameter, and it is parsed by hand."""
    router = APIRouter(tags=["images"])
    said = described("", schemas.Answers, *WITH_BODY, 404, 409, 415) | {"openapi_extra": IMAGES}
    for code in (413, 422, 503):  # what a request gets whose every image failed
        said["responses"][code] = said["responses"][code] | {"model": schemas.Failure | schemas.Answers}

    @router.post("/v1/streams/{name}/images", summary="Classify images, and learn from them", **said)
    async def classify(request: Request) -> Response:
        query = request.query_params
        learn, top = flag(query.get("learn"), "learn"), top_of(query.get("top"))
        await admitted(service, gate, request, "learn" if learn else "predict")
        with budget.held() as hold:
            uploads = await read_uploads(request, hold, limits)
            answers = await service.answer(request.path_params["name"], uploads, learn=learn, top=top)
        failed = [answer["status"] for answer in answers if "error" in answer]
        status = failed[0] if len(failed) == len(answers) else 200
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return Json({"answers": answers}, status_code=status, headers=headers)

    return router


def _checked(service: Served, gate: Gate, budget: Budget) -> type[APIRoute]:
    """Routes that check the token first, for the scope they are documented with, and then read the body with a bound.

    FastAPI alone would read a body of any length before it knows who sent it.
    """

    class Checked(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner, scope = super().get_route_handler(), (self.openapi_extra or {})["x-scope"]
            has_body = self.body_field is not None

            async def handle(request: Request) -> Response:
                await admitted(service, gate, request, scope)
                if not has_body:
                    return await inner(request)
                with budget.held() as hold:
                    body = await read_json(request, hold)

                    async def receive() -> dict[str, Any]:
                        return {"type": "http.request", "body": body, "more_body": False}

                    return await inner(Request(request.scope, receive))

            return handle

    return Checked


def stream_routes(service: Served, gate: Gate, budget: Budget, limits: Limits) -> APIRouter:
    """Everything else about streams."""
    router = APIRouter(prefix="/v1", tags=["streams"], route_class=_checked(service, gate, budget))

    @router.get("/info", summary="Version, encoder, limits and methods", **described("predict", dict[str, Any]))
    async def info() -> Response:
        return Json(await service.info())

    @router.get("/streams", summary="All streams", **described("predict", schemas.Streams))
    async def streams() -> Response:
        return Json({"streams": await service.streams()})

    @router.get("/streams/{name}", summary="A stream", **described("predict", schemas.StreamInfo, 404))
    async def stream(name: Name) -> Response:
        return Json(await service.stream(name))

    @router.post(
        "/streams", summary="Make a stream", **described("admin", schemas.StreamInfo, *WITH_BODY, 409, status=201)
    )
    async def create(body: schemas.NewStream) -> Response:
        return Json(await service.create(body.spec()), 201)

    @router.delete("/streams/{name}", summary="Delete a stream", **described("admin", None, 404, status=204))
    async def delete(name: Name) -> Response:
        await service.delete(name)
        return Response(status_code=204)

    @router.post(
        "/streams/{name}/labels",
        summary="Give the right label",
        **described("learn", schemas.LabelResult, *WITH_BODY, 404, 409),
    )
    async def label(name: Name, body: schemas.NewLabel) -> Response:
        return Json(await service.label(name, body.image, body.label))

    @router.get("/streams/{name}/images", summary="The audit log", **described("predict", schemas.AuditRows, 404))
    async def images(name: Name, before: Before = None, limit: Limit = 50) -> Response:
        return Json({"images": await service.images(name, before, limit)})

    @router.get("/streams/{name}/images/{image}", summary="An event", **described("predict", schemas.AuditRow, 404))
    async def image(name: Name, image: Event) -> Response:
        return Json(await service.image(name, image))

    @router.get(
        "/streams/{name}/images/{image}/thumbnail",
        summary="The small copy of an image, if the stream keeps them",
        **described("predict", None, 404, content={"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}),
    )
    async def thumbnail(name: Name, image: Event) -> Response:
        headers = {"Cache-Control": "private, max-age=86400, immutable"}
        return Response(await service.thumbnail(name, image), media_type="image/jpeg", headers=headers)

    @router.delete(
        "/streams/{name}/images/{image}", summary="Unlearn an image", **described("admin", schemas.StreamInfo, 404, 409)
    )
    async def unlearn(name: Name, image: Event) -> Response:
        return Json(await service.unlearn(name, image))

    @router.get("/streams/{name}/snapshots", summary="The snapshots", **described("predict", schemas.Snapshots, 404))
    async def snapshots(name: Name) -> Response:
        return Json({"snapshots": await service.snapshots(name)})

    @router.post(
        "/streams/{name}/snapshots",
        summary="Take a snapshot",
        **described("admin", schemas.SnapshotInfo, *WITH_BODY, 404, 409, status=201),
    )
    async def snapshot(name: Name, body: schemas.NewSnapshot) -> Response:
        return Json(await service.snapshot(name, body.title), 201)

    @router.delete(
        "/streams/{name}/snapshots/{snapshot}",
        summary="Delete a snapshot",
        **described("admin", None, 404, 409, status=204),
    )
    async def delete_snapshot(name: Name, snapshot: SnapshotId) -> Response:
        await service.delete_snapshot(name, snapshot)
        return Response(status_code=204)

    @router.post(
        "/streams/{name}/rollback", summary="Go back", **described("admin", schemas.StreamInfo, *WITH_BODY, 404, 409)
    )
    async def rollback(name: Name, body: schemas.Rollback) -> Response:
        return Json(await service.rollback(name, snapshot=body.snapshot, before=body.before))

    @router.post(
        "/streams/{name}/reset", summary="Forget everything", **described("admin", schemas.StreamInfo, 404, 409)
    )
    async def reset(name: Name) -> Response:
        return Json(await service.reset(name))

    @router.post(
        "/streams/{name}/fork",
        summary="Start a new stream here",
        **described("admin", schemas.StreamInfo, *WITH_BODY, 404, 409, status=201),
    )
    async def fork(name: Name, body: schemas.Fork) -> Response:
        return Json(await service.fork(name, body.name, body.snapshot), 201)

    @router.post(
        "/streams/{name}/classes",
        summary="Add or remove classes",
        **described("admin", schemas.StreamInfo, *WITH_BODY, 404, 409),
    )
    async def change_classes(name: Name, body: schemas.ClassChange) -> Response:
        return Json(await service.change_classes(name, add=body.add, remove=body.remove))

    @router.post("/tour", summary="Start the guided tour's stream", **described("admin", schemas.StreamInfo, 409))
    async def tour() -> Response:
        return Json(await service.tour())

    state = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @router.get(
        "/streams/{name}/state", summary="Export the state", **described("admin", None, 404, 409, content=state)
    )
    async def export(name: Name, snapshot: AtSnapshot = None) -> Response:
        headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
        data = await service.export(name, snapshot)
        return Response(data, media_type="application/octet-stream", headers=headers)

    importing = described("admin", schemas.StreamInfo, *WITH_BODY, 409, status=201)
    importing["openapi_extra"] = importing["openapi_extra"] | {"requestBody": {"required": True, "content": state}}

    @router.put("/streams/{name}/state", summary="Make a stream of an exported state", **importing)
    async def import_state(name: Name, request: Request, thumbnails: bool = False) -> Response:
        with budget.held() as hold:
            data = await read_state(request, hold, limits)
            return Json(await service.import_state(name, data, thumbnails=thumbnails), 201)

    @router.get(
        "/streams/{name}/queues", summary="What each class remembers", **described("predict", schemas.Queues, 404)
    )
    async def queues(name: Name) -> Response:
        return Json(await service.queues(name))

    @router.get(
        "/streams/{name}/map", summary="Prototypes and images as a map", **described("predict", schemas.Map, 404)
    )
    async def map_(name: Name) -> Response:
        return Json(await service.map(name))

    return router
