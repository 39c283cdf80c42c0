"""The web application: routes, limits and errors around a `Service`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from acgpt.errors import BROKEN
from acgpt.serving import llama_cpp, mistral, native, openai, page, page_routes
from acgpt.serving.errors import add_error_replies, unavailable
from acgpt.serving.middleware import (
    CONTENT_TYPE,
    Checked,
    Metrics,
    Observed,
    check_content_type,
    check_host,
    check_key,
    read_body,
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
    routers = [*(router(service) for router in ROUTERS), page.router()]
    for router in routers:
        app.include_router(router)

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
    app.add_middleware(
        Checked, check=partial(read_body, service=service)
    )  # the last one that is added is the outermost
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
    paths = {route.path for part in (app.router, *routers) for route in part.routes if isinstance(route, Route)}
    app.add_middleware(Observed, metrics=metrics, seconds=service.seconds, paths=paths)
    return app
