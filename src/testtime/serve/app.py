"""The service as a web application: routes, errors, the page and the documentation, around one `Service`."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from testtime import __version__
from testtime.errors import InputError
from testtime.serve.auth import Gate, Refusal
from testtime.serve.bodies import Budget
from testtime.serve.envelope import Envelope
from testtime.serve.live import live_routes
from testtime.serve.reference import reference
from testtime.serve.routes import Json, admitted, described, image_routes, stream_routes
from testtime.serve.schemas import Images
from testtime.serve.server import steady
from testtime.serve.types import Limits, ServiceError

if TYPE_CHECKING:
    from testtime.serve.remote import Served

ABOUT = """Streams of images are classified, and the classifier learns from them while it serves.

Send a token as 'Authorization: Bearer TOKEN'; its scope (predict, learn or admin) must be the one named at the call \
or a later one. A service on a loopback address without tokens asks for none.

Errors are {"error": "what is wrong, and the way out", "status": 4xx}. Retry 429 and 503 after the seconds in \
Retry-After, with the same Idempotency-Key, so that no image is learned twice.

Images can also be sent over a WebSocket at /v1/streams/{name}/live?learn=true&top=5: each binary frame is an image, \
each text frame that comes back is its answer, in order. The token is in the Authorization header, or in a first text \
frame {"token": TOKEN}."""


def make_app(service: Served, gate: Gate, limits: Limits | None = None, secure: bool = False) -> FastAPI:
    """The application. It starts and closes the service with itself; `secure` says that it is served with TLS."""
    limits = limits or Limits()
    stopping = asyncio.Event()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            with steady():
                yield
        finally:
            stopping.set()
            await service.close()

    app = FastAPI(
        title="testtime", version=__version__, description=ABOUT, lifespan=life, docs_url=None, redoc_url=None,
        openapi_url=None, redirect_slashes=False,
    )  # fmt: skip
    app.state.stopping = stopping
    budget = Budget(limits.body_bytes)
    app.include_router(image_routes(service, gate, budget, limits))
    app.include_router(stream_routes(service, gate, budget, limits))
    app.include_router(live_routes(service, gate, budget, limits, stopping))
    _operations(app, service, gate)
    _pages(app)
    _errors(app, service)
    app.add_middleware(Envelope, gate=gate, telemetry=service.telemetry, secure=secure)
    return app


def _operations(app: FastAPI, service: Served, gate: Gate) -> None:
    stopping = app.state.stopping

    @app.get("/healthz", tags=["operations"], summary="Whether the process lives")
    async def healthz() -> dict[str, bool]:
        return {"alive": True}

    @app.get(
        "/readyz",
        tags=["operations"],
        summary="Whether images are accepted",
        responses={503: {"description": "Starting or stopping."}},
    )
    async def readyz() -> Response:
        ready = service.ready and not stopping.is_set()
        return Json({"ready": ready}, 200 if ready else 503)

    text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", tags=["operations"], summary="Metrics for Prometheus", **described("predict", content=text))
    async def metrics(request: Request) -> Response:
        await admitted(service, gate, request, "predict")
        return Response(await service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _pages(app: FastAPI) -> None:
    """The page and its files, read once: a request names one of them and never a path."""
    folder, shared = resources.files("testtime.serve") / "page", resources.files("testtime.report") / "assets"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    files["tokens.css"] = (shared / "tokens.css").read_bytes()  # colours and sizes are those of the reports

    def answer(request: Request, name: str, content: bytes) -> Response:
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(content, media_type=kind or "application/octet-stream", headers=headers)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return answer(request, "index.html", files["index.html"])

    @app.get("/assets/{file}", include_in_schema=False)
    async def asset(request: Request, file: str) -> Response:
        if file not in files:
            raise HTTPException(404)
        return answer(request, file, files[file])

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = FastAPI.openapi(app)
            made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            images = Images.model_json_schema(ref_template="#/components/schemas/{model}")
            made["components"]["schemas"] |= images.pop("$defs") | {"Images": images}
        return app.openapi_schema or made

    app.openapi = document  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Json(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return answer(request, "docs.html", reference(app.openapi()).encode())


def _errors(app: FastAPI, service: Served) -> None:
    def failure(problem: str, status: int, **headers: str) -> Response:
        return Json({"error": problem, "status": status}, status, headers)

    @app.exception_handler(ServiceError)
    async def refused(request: Request, problem: ServiceError) -> Response:
        headers = {} if problem.retry_after is None else {"Retry-After": f"{max(1, round(problem.retry_after + 0.5))}"}
        if problem.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="testtime"'
        if problem.status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not waited for
        if isinstance(problem, Refusal):
            service.telemetry.refused(problem.reason)
        return failure(str(problem), problem.status, **headers)

    @app.exception_handler(InputError)
    async def wrong(request: Request, problem: InputError) -> Response:
        return failure(str(problem), 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, problem: RequestValidationError) -> Response:
        parts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problem.errors()[:3]]
        return failure("; ".join(parts)[:1000] + ".", 422)

    @app.exception_handler(HTTPException)
    async def other(request: Request, problem: HTTPException) -> Response:
        words = {404: "There is nothing here; /docs lists the calls.", 405: "This call has no such method."}
        return failure(
            words.get(problem.status_code, str(problem.detail)), problem.status_code, **problem.headers or {}
        )
