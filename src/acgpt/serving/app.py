"""The web application: routes, limits and errors around a `Service`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from acgpt.errors import InputError
from acgpt.serving import llama_cpp, mistral, native, openai, page, page_routes
from acgpt.serving.error_body import body_of
from acgpt.serving.errors import INVALID, KINDS, http_body, validation_body
from acgpt.serving.gate import unavailable
from acgpt.serving.metrics import CONTENT_TYPE, Metrics
from acgpt.serving.middleware import BodyRead, KeyRequired, Observed, error_reply
from acgpt.serving.schemas import HealthReply
from acgpt.serving.service import Service
from acgpt.version import __version__

# Each returns the routes of one protocol.
ROUTERS = (native.router, openai.router, mistral.router, llama_cpp.router, page_routes.router)


def create_app(service: Service, *, keys: Sequence[str] = (), cors: Sequence[str] = ()) -> FastAPI:
    """Return the application.

    Args:
        service: Answers the requests.
        keys: API keys, one of which a client must send. None: no key is needed.
        cors: Origins of web pages that may ask.
    """
    # Swagger's and Redoc's pages would load scripts from another host.
    app = FastAPI(title="acgpt", version=__version__, docs_url=None, redoc_url=None)
    metrics = Metrics()
    for router in ROUTERS:
        app.include_router(router(service))
    app.include_router(page.router())

    @app.get("/health", tags=["server"], responses={200: {"model": HealthReply}})
    async def health() -> Response:
        """Say whether the server answers requests: 200, or 503 while it starts or shuts down."""
        return unavailable("Shutting down") if service.scheduler.draining else JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["server"])
    async def prometheus() -> Response:
        """Return counts of requests and tokens, in the text format of Prometheus."""
        return Response(metrics.render(service.scheduler), media_type=CONTENT_TYPE)

    add_error_replies(app)
    app.add_middleware(BodyRead, service=service)  # the last one that is added is the outermost
    app.add_middleware(KeyRequired, keys=keys)
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(Observed, metrics=metrics)
    return app


def add_error_replies(app: FastAPI) -> None:
    """Answer every error in the shape of `serving.errors`."""

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return error_reply(error)

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(validation_body(error.errors(), error.body), INVALID.status)

    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # how FastAPI reports a body that is no JSON: bad UTF-8, too deeply nested
            return JSONResponse(body_of("the body is not valid JSON.", INVALID), INVALID.status)
        message = {404: "there is no such path.", 405: "this path does not have this method."}.get(error.status_code)
        return JSONResponse(
            http_body(error.status_code, message or str(error.detail)), error.status_code, error.headers
        )

    for kind in (InputError, *KINDS):
        app.add_exception_handler(kind, failed)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, refused)  # type: ignore[arg-type]
