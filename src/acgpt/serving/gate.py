"""The application that uvicorn runs: it refuses requests until the model is loaded, then hands them on.

This module imports no torch, so that the server answers while torch is imported.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from acgpt.serving.error_body import HEADERS, LOADING, body_of
from acgpt.serving.page import reply


def unavailable(message: str) -> JSONResponse:
    """Return the reply of /health if the server answers no requests, in the shape of llama.cpp's server."""
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return JSONResponse({"error": error}, 503, HEADERS[503])


class Gate:
    """Hands requests to `app`; until it is set, answers with a file of the page or 503."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # neither lifespan events nor web sockets are used
            return
        await (self.app or self.loading(scope))(scope, receive, send)

    def loading(self, scope: Scope) -> ASGIApp:
        """Return the reply to a request before the model is loaded."""
        if scope["path"] == "/health":
            return unavailable("Loading model")
        known = Headers(scope=scope).get("if-none-match")
        page = reply(scope["path"], known) if scope["method"] == "GET" else None
        message = "the model is being loaded. Try again when GET /health returns 200."
        return page or JSONResponse(body_of(message, LOADING), LOADING.status, HEADERS[LOADING.status])
