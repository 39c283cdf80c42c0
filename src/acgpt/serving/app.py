"""The web application: routes, limits and errors around a `Service`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Literal

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from acgpt.errors import BROKEN, reason
from acgpt.serving import llama_cpp, mistral, native, openai, page, page_routes
from acgpt.serving.errors import (
    INVALID,
    KINDS,
    Kind,
    Rejected,
    body_of,
    error_reply,
    nearest,
    unavailable,
    validation_body,
)
from acgpt.serving.middleware import (
    CONTENT_TYPE,
    BodyRead,
    Checked,
    Metrics,
    Observed,
    check_content_type,
    check_host,
    check_key,
)
from acgpt.serving.service import Service
from acgpt.version import __version__

LOCAL = ("localhost", "127.0.0.1", "::1")  # names and addresses of this machine
# Each returns the routes of one protocol.
ROUTERS = (native.router, openai.router, mistral.router, llama_cpp.router, page_routes.router)


class HealthReply(BaseModel):
    """The server answers requests."""

    status: Literal["ok"]


def create_app(
    service: Service, *, keys: Sequence[str] = (), cors: Sequence[str] = (), address: str = "127.0.0.1"
) -> FastAPI:
    """Return the application.

    Args:
        service: Answers the requests.
        keys: API keys, one of which a client must send. None: no key is needed.
        cors: Origins of web pages that may ask.
        address: Address that the server listens on. Without a key, requests for another host are refused.
    """
    # Swagger's and Redoc's pages would load scripts from another host.
    app = FastAPI(
        title="acgpt", version=__version__, docs_url=None, redoc_url=None, dependencies=[Depends(check_content_type)]
    )
    metrics = Metrics()
    for router in ROUTERS:
        app.include_router(router(service))
    app.include_router(page.router())

    @app.get("/health", tags=["server"], responses={200: {"model": HealthReply}})
    async def health() -> Response:
        """Say whether the server answers requests: 200, or 503 while it starts or shuts down, or if it has failed."""
        if service.scheduler.broken:
            return unavailable(BROKEN)
        return unavailable("Shutting down") if service.scheduler.draining else JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["server"])
    async def prometheus() -> Response:
        """Return counts of requests and tokens, in the text format of Prometheus."""
        return Response(metrics.render(service.scheduler), media_type=CONTENT_TYPE)

    add_error_replies(app)
    app.add_middleware(BodyRead, service=service)  # the last one that is added is the outermost
    if keys:
        app.add_middleware(Checked, check=partial(check_key, keys=[key.encode() for key in keys]))
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    if not keys:
        app.add_middleware(Checked, check=partial(check_host, hosts={*LOCAL, address}))
    app.add_middleware(Observed, metrics=metrics, seconds=service.seconds)
    return app


def add_error_replies(app: FastAPI) -> None:
    """Answer every error in the shape of `serving.errors`."""

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return error_reply(error)

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(validation_body(error.errors(), error.body, model_of(request)), INVALID.status)

    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        status, message, path = error.status_code, str(error.detail), request.url.path
        if status == 400:  # how FastAPI reports other errors of the JSON parser
            message = "the body is not valid JSON: it is not UTF-8, nested too deeply, or has too long a number."
            return JSONResponse(body_of(INVALID, message), INVALID.status)
        paths = app.openapi()["paths"] if status in (404, 405) else {}
        if status == 404:
            meant = f"/v1{path}" if f"/v1{path}" in paths else nearest(path, paths)
            message = f"there is no path {reason(path)}" + (
                f". Did you mean {meant}?" if meant else ": see /openapi.json."
            )
        elif status == 405:
            allowed = [method.upper() for method in paths.get(path, ())] or ["GET"]  # files of the page
            message = f"{reason(path)} does not take {reason(request.method)}: use {' or '.join(sorted(allowed))}."
        kind = Kind(status, HTTPStatus(status).phrase.lower().replace(" ", "_"))
        return JSONResponse(body_of(kind, message), status, error.headers)

    for kind in (Rejected, MemoryError, *KINDS):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, refused)  # type: ignore[arg-type]


def model_of(request: Request) -> type[BaseModel] | None:
    """Return the model that the body of a request is validated with."""
    route = request.scope.get("route")
    field = route.body_field if isinstance(route, APIRoute) else None
    model = None if field is None else field.field_info.annotation
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None
