"""Errors of the server: the status and the body of every one, the same for all routes.

    {"error": {"message": "…", "type": "invalid_request_error", "param": null, "code": "too_long"}}

This is the shape that clients of OpenAI's and llama.cpp's servers read.

The server needs this module before the model is loaded: torch is imported only to look at an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from http import HTTPStatus
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
        cause: What is wrong with it.
    """

    def __init__(self, param: str, cause: InputError) -> None:
        super().__init__(str(cause))
        self.param, self.cause = param, cause


class LimitExceeded(InputError):
    """A request is larger than the server allows."""


class UnknownModel(InputError):
    """A request names a model that the server does not have."""


class BodyTooLarge(Exception):
    """The body of a request has too many bytes."""


class NotJson(Exception):
    """The body of a request is not declared as JSON."""


class Unauthorized(Exception):
    """A request has no API key, or a wrong one."""


class WrongHost(Exception):
    """A request is for another host than this machine."""


class TimeExceeded(Exception):
    """A request took longer than it may."""


class Disconnected(Exception):
    """The client has hung up, so that nobody waits for the answer."""


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


KINDS: dict[type[BaseException], Kind] = {
    TemplateError: Kind(422, "invalid_request_error", "invalid_template"),
    QueryError: Kind(422, "invalid_request_error", "invalid_query"),
    LimitExceeded: Kind(422, "invalid_request_error", "limit_exceeded"),
    UnknownModel: Kind(404, "invalid_request_error", "model_not_found"),
    InputError: Kind(422, "invalid_request_error", "invalid_value"),
    BodyTooLarge: Kind(413, "invalid_request_error", "body_too_large"),
    NotJson: Kind(415, "invalid_request_error", "unsupported_media_type"),
    Unauthorized: Kind(401, "authentication_error", "invalid_api_key"),
    WrongHost: Kind(421, "invalid_request_error", "wrong_host"),
    QueueFull: Kind(429, "rate_limit_error", "queue_full"),
    Draining: Kind(503, "server_error", "shutting_down"),
    Broken: Kind(503, "server_error", "broken"),
    TimeExceeded: Kind(504, "server_error", "time_exceeded"),
    Disconnected: Kind(499, "client_error", "disconnected"),
    MemoryError: Kind(503, "server_error", "out_of_memory"),
}
LOADING = Kind(503, "server_error", "loading")
INVALID = Kind(422, "invalid_request_error", "invalid_request")
UNEXPECTED = Kind(500, "server_error", "internal_error")
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}  # by status


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory: of Python, a GPU, or torch's allocator on a CPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error: that of its class, or of the nearest parent that has one."""
    if isinstance(error, InvalidField):
        return kind_of(error.cause)
    if out_of_memory(error):
        return KINDS[MemoryError]
    return next((KINDS[parent] for parent in type(error).__mro__ if parent in KINDS), UNEXPECTED)


def body_of(message: str, kind: Kind, param: str | None = None) -> dict[str, Any]:
    """Return the body of a reply to a request that failed."""
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the body for an error. An unexpected one is not described, so that nothing leaks."""
    kind = kind_of(error)
    if kind is UNEXPECTED:
        return body_of("the server has failed to answer this request.", kind)
    message = NO_ROOM if out_of_memory(error) else str(error)
    return body_of(message, kind, error.param if isinstance(error, InvalidField) else None)


def error_reply(error: BaseException) -> JSONResponse:
    """Return the reply to a request that failed."""
    status = kind_of(error).status
    return JSONResponse(error_body(error), status, HEADERS.get(status))


def unavailable(message: str) -> JSONResponse:
    """Return the reply of /health if the server answers no requests, in the shape of llama.cpp's server."""
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return JSONResponse({"error": error}, 503, HEADERS[503])


def http_body(status: int, detail: str) -> dict[str, Any]:
    """Return the body for an error of HTTP itself, such as a wrong path."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return body_of(detail, Kind(status, kind, code))


def validation_body(errors: Sequence[Any], body: Any, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the body for a request whose fields are invalid.

    Args:
        errors: The errors of pydantic.
        body: What was validated; the text, if it is not JSON.
        model: The fields that a request may have.
    """
    problems = [(field_of(error["loc"], body), problem_of(error, body, model)) for error in errors[:MOST]]
    message = "; ".join(f"{param}: {problem}" if param else problem for param, problem in problems)
    return body_of(f"{message}.", INVALID, problems[0][0] if problems else None)


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
