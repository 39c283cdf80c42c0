"""Errors of the server: the status and the body of every one, the same for all routes.

    {"error": {"message": "…", "type": "invalid_request_error", "param": null, "code": "too_long"}}

This is the shape that clients of OpenAI's and llama.cpp's servers read.

The server needs this module before the model is loaded: torch is imported only to look at an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from acgpt.errors import Broken, Draining, InputError, QueryError, QueueFull, TemplateError

NO_MEMORY = ("not enough memory", "can't allocate memory")  # in messages of torch's allocator on a CPU
NO_ROOM = "the server has no memory for this request. Ask for a shorter text, fewer tokens or fewer samples."
MOST = 5  # problems of a request that an error names


class InvalidField(InputError):
    """A field of a request has an invalid value.

    Args:
        param: Path of the field: its name, or for an entry of a list `query.3`.
        cause: What is wrong with it; a text is an `InputError`.
    """

    def __init__(self, param: str, cause: InputError | str) -> None:
        super().__init__(str(cause))
        self.param, self.cause = param, InputError(cause) if isinstance(cause, str) else cause


class LimitExceeded(InputError):
    """A request is larger than the server allows."""


class UnknownModel(InputError):
    """A request names a model that the server does not have."""


class Rejected(Exception):
    """A request is refused whatever it asks, or nobody waits for its answer any more.

    Args:
        kind: The kind of error.
        message: What is wrong, and what to do.
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Kind:
    """How a kind of error is told to a client.

    Args:
        status: Status of the reply.
        code: Its name, for programs.
    """

    status: int
    code: str

    @property
    def type(self) -> str:
        """The kind of error, in the words of OpenAI's servers."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


TYPES = {401: "authentication_error", 429: "rate_limit_error", 499: "client_error"}  # by status
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}  # by status

INVALID = Kind(422, "invalid_request")
BODY_TOO_LARGE = Kind(413, "body_too_large")
NOT_JSON = Kind(415, "unsupported_media_type")
UNAUTHORIZED = Kind(401, "invalid_api_key")
WRONG_HOST = Kind(421, "wrong_host")
DISCONNECTED = Kind(499, "disconnected")
UNEXPECTED = Kind(500, "internal_error")
LOADING = Kind(503, "loading")
OUT_OF_MEMORY = Kind(503, "out_of_memory")
TOO_MANY = Kind(503, "too_many_connections")
TIME_EXCEEDED = Kind(504, "time_exceeded")

KINDS: dict[type[BaseException], Kind] = {
    TemplateError: Kind(422, "invalid_template"),
    QueryError: Kind(422, "invalid_query"),
    LimitExceeded: Kind(422, "limit_exceeded"),
    UnknownModel: Kind(404, "model_not_found"),
    InputError: Kind(422, "invalid_value"),
    QueueFull: Kind(429, "queue_full"),
    Draining: Kind(503, "shutting_down"),
    Broken: Kind(503, "broken"),
}


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory: of Python, a GPU, or torch's allocator on a CPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error: that of its class, or of the nearest parent that has one."""
    if isinstance(error, Rejected):
        return error.kind
    if isinstance(error, InvalidField):
        return kind_of(error.cause)
    if out_of_memory(error):
        return OUT_OF_MEMORY
    return next((KINDS[parent] for parent in type(error).__mro__ if parent in KINDS), UNEXPECTED)


def body_of(kind: Kind, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of a reply to a request that failed."""
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the body for an error. An unexpected one is not described, so that nothing leaks."""
    kind = kind_of(error)
    told = {UNEXPECTED: "the server has failed to answer this request.", OUT_OF_MEMORY: NO_ROOM}
    return body_of(kind, told.get(kind, str(error)), error.param if isinstance(error, InvalidField) else None)


def error_reply(error: BaseException) -> JSONResponse:
    """Return the reply to a request that failed."""
    status = kind_of(error).status
    return JSONResponse(error_body(error), status, HEADERS.get(status))


def unavailable(message: str) -> JSONResponse:
    """Return the reply of /health if the server answers no requests, in the shape of llama.cpp's server."""
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return JSONResponse({"error": error}, 503, HEADERS[503])


def validation_body(errors: Sequence[Any], body: Any, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the body for a request whose fields are invalid.

    Args:
        errors: The errors of pydantic.
        body: What was validated; the text, if it is not JSON.
        model: The fields that a request may have.
    """
    problems = [(field_of(error["loc"], body), problem_of(error, body, model)) for error in errors[:MOST]]
    message = "; ".join(f"{param}: {problem}" if param else problem for param, problem in problems)
    return body_of(INVALID, f"{message}.", problems[0][0] if problems else None)


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
