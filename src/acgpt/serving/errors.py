"""Errors of the server: the status and the body of every one, the same for all routes.

    {"error": {"message": "…", "type": "invalid_request_error", "param": null, "code": "too_long"}}

This is the shape that clients of OpenAI's and llama.cpp's servers read.

The server needs this module before the model is loaded: torch is imported only to look at an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from acgpt.errors import Broken, Draining, InputError, QueryError, QueueFull, TemplateError, log_failure, reason

NO_MEMORY = ("not enough memory", "can't allocate memory")  # in messages of torch's allocator on a CPU
NO_ROOM = "the server has no memory for this request. Ask for a shorter text, fewer tokens or fewer samples."
MOST = 5  # problems of a request that an error names


class Rejected(Exception):
    """A request is refused whatever it asks, or nobody waits for its answer any more.

    Args:
        code: Name of the error, one of `STATUS`.
        message: What is wrong, and what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidField(InputError):
    """A field of a request has an invalid value.

    Args:
        param: Path of the field: its name, or for an entry of a list `query.3`.
        cause: What is wrong with it; a text is an `InputError`.
    """

    def __init__(self, param: str, cause: InputError | Rejected | str) -> None:
        super().__init__(str(cause))
        self.param, self.cause = param, InputError(cause) if isinstance(cause, str) else cause


class LimitExceeded(InputError):
    """A request is larger than the server allows."""


STATUS = {  # of the reply, by the name of the error for programs
    "invalid_api_key": 401,
    "model_not_found": 404,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "wrong_host": 421,
    "invalid_request": 422,
    "invalid_template": 422,
    "invalid_query": 422,
    "invalid_value": 422,
    "limit_exceeded": 422,
    "queue_full": 429,
    "disconnected": 499,
    "internal_error": 500,
    "broken": 503,
    "loading": 503,
    "out_of_memory": 503,
    "shutting_down": 503,
    "too_many_connections": 503,
    "time_exceeded": 504,
}
CODES: dict[type[BaseException], str] = {
    TemplateError: "invalid_template",
    QueryError: "invalid_query",
    LimitExceeded: "limit_exceeded",
    InputError: "invalid_value",
    QueueFull: "queue_full",
    Draining: "shutting_down",
    Broken: "broken",
}
TYPES = {401: "authentication_error", 429: "rate_limit_error", 499: "client_error"}  # by status, as OpenAI's servers
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}  # by status


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory: of Python, a GPU, or torch's allocator on a CPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def code_of(error: BaseException) -> str:
    """Return the code of an error: that of its class, or of the nearest parent that has one."""
    if isinstance(error, Rejected):
        return error.code
    if isinstance(error, InvalidField):
        return code_of(error.cause)
    if out_of_memory(error):
        return "out_of_memory"
    return next((CODES[parent] for parent in type(error).__mro__ if parent in CODES), "internal_error")


def log_unexpected(error: BaseException) -> None:
    """Log an error, unless it has a code of its own."""
    if code_of(error) == "internal_error":
        log_failure(error)


def body_of(code: str, message: str, param: str | None = None, status: int | None = None) -> dict[str, Any]:
    """Return the body of a reply to a request that failed; with a status for an error of HTTP itself."""
    status = STATUS[code] if status is None else status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the body for an error. An unexpected one is not described, so that nothing leaks."""
    code = code_of(error)
    told = {"internal_error": "the server has failed to answer this request.", "out_of_memory": NO_ROOM}
    return body_of(code, told.get(code, str(error)), error.param if isinstance(error, InvalidField) else None)


def error_reply(error: BaseException, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the reply to a request that failed."""
    status = STATUS[code_of(error)]
    return JSONResponse(error_body(error), status, {**HEADERS.get(status, {}), **(headers or {})})


def unavailable(message: str) -> JSONResponse:
    """Return the reply of /health if the server answers no requests, in the shape of llama.cpp's server."""
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return JSONResponse({"error": error}, 503, HEADERS[503])


def add_error_replies(app: FastAPI) -> None:
    """Answer every error in the shape of `serving.errors`."""

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return error_reply(error)

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(validation_body(error.errors(), error.body, model_of(request)), 422)

    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        status, message, path = error.status_code, str(error.detail), request.url.path
        if status == 400:  # how FastAPI reports other errors of the JSON parser
            message = "the body is not valid JSON: it is not UTF-8, nested too deeply, or has too long a number."
            return error_reply(Rejected("invalid_request", message))
        paths = app.openapi()["paths"] if status in (404, 405) else {}
        if status == 404:
            meant = f"/v1{path}" if f"/v1{path}" in paths else nearest(path, paths)
            message = f"there is no path {reason(path)}" + (
                f". Did you mean {meant}?" if meant else ": see /openapi.json."
            )
        elif status == 405:
            allowed = [method.upper() for method in paths.get(path, ())] or ["GET"]  # files of the page
            message = f"{reason(path)} does not take {reason(request.method)}: use {' or '.join(sorted(allowed))}."
        code = HTTPStatus(status).phrase.lower().replace(" ", "_")
        return JSONResponse(body_of(code, message, status=status), status, error.headers)

    for kind in (Rejected, MemoryError, *CODES):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, refused)  # type: ignore[arg-type]


def model_of(request: Request) -> type[BaseModel] | None:
    """Return the model that the body of a request is validated with."""
    route = request.scope.get("route")
    field = route.body_field if isinstance(route, APIRoute) else None
    model = None if field is None else field.field_info.annotation
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def validation_body(errors: Sequence[Any], body: Any, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the body for a request whose fields are invalid.

    Args:
        errors: The errors of pydantic.
        body: What was validated; the text, if it is not JSON.
        model: The fields that a request may have.
    """
    problems = [(field_of(error["loc"], body), problem_of(error, body, model)) for error in errors[:MOST]]
    message = "; ".join(f"{param}: {problem}" if param else problem for param, problem in problems)
    return body_of("invalid_request", f"{message}.", problems[0][0] if problems else None)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of some names that is most like another one, if one is."""
    return next(iter(get_close_matches(name, list(names), 1)), None)


def problem_of(error: Any, body: Any, model: type[BaseModel] | None) -> str:
    """Return what is wrong with a field, or with the whole body, in words."""
    kind, path, fields = error["type"], error["loc"], {} if model is None else model.model_fields
    if kind == "json_invalid":
        return f"the body is not valid JSON: {place_of(error, body)}"
    if kind == "missing" and path == ("body",):
        required = " and ".join(name for name, field in fields.items() if field.is_required())
        return "the body is empty: send a JSON object" + (f" with {required}" if required else "")
    if kind == "missing":
        return "this field is required"
    if kind == "extra_forbidden":
        meant = nearest(str(path[-1]), fields) if len(path) == 2 else None  # of the request itself
        return "there is no such field" + (f" (did you mean '{meant}'?)" if meant else "")
    if path == ("body",) and not isinstance(body, dict):
        return "the body must be a JSON object"
    message = str(error["msg"]).rstrip(".")
    return message[:1].lower() + message[1:]


def place_of(error: Any, text: str) -> str:
    """Return why a text is not JSON, and where."""
    at, why = error["loc"][1], str(error["ctx"]["error"])
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f"{why[:1].lower()}{why[1:]} at line {line}, column {column}"


def field_of(path: Sequence[str | int], body: Any) -> str | None:
    """Return the path of a field, `query.0.tokens`, without what pydantic adds to it: names of types in a union."""
    names: list[str] = []
    for i, name in enumerate(path[1:] if path[:1] == ("body",) else path):
        inside = (isinstance(body, dict) and name in body) or (
            isinstance(body, list) and isinstance(name, int) and name < len(body)
        )
        if inside:
            names.append(str(name))
            body = body[name]
        elif isinstance(body, dict) and i == len(path) - 2:  # a field that is missing
            names.append(str(name))
    return ".".join(names) or None
