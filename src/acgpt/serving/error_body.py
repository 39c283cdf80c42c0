"""The body of an error. This module imports no torch: the server needs it before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse


@dataclass(frozen=True)
class Kind:
    """How a kind of error is told to a client.

    Args:
        status: Status of the reply.
        type: Kind of error, in the words of OpenAI's servers.
        code: Its name, for programs.
    """

    status: int
    type: str
    code: str


LOADING = Kind(503, "server_error", "loading")
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}  # by status


def body_of(message: str, kind: Kind, param: str | None = None) -> dict[str, Any]:
    """Return the body of a reply to a request that failed."""
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def unavailable(message: str) -> JSONResponse:
    """Return the reply of /health if the server answers no requests, in the shape of llama.cpp's server."""
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return JSONResponse({"error": error}, 503, HEADERS[503])
