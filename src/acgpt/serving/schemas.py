"""Requests and replies as pydantic models: fields that protocols share, and models made of the classes in `models.ask`.

Native requests are checked strictly: an unknown field is an error, and a string is not taken for a number. Numbers that
are not finite are null in replies, because JSON has no others.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from acgpt.common.options import Range, last_type
from acgpt.models.answer_json import field_types
from acgpt.models.ask import Ask, Score

LARGEST = 2**31 - 1  # of whole numbers
MOST_TOP = 20  # of most probable tokens with each log-probability
MOST_STOPS, STOP_CHARACTERS = 64, 4096  # strings of a request, and characters of all of them: each token is compared


# ---- fields ---------------------------------------------------------------------------------------------------------


class Strict(BaseModel):
    """A request in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """A request in which unknown fields are ignored, and null stands for the default."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, fields: Any) -> Any:
        """Leave out fields that are null."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


def stops_of(value: Any) -> tuple[str, ...]:
    """Return the stop strings of a request: one, or a list."""
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise PydanticCustomError("stop", "it must be a text that is not empty, or a list of such texts")
    return tuple(bounded_stops(strings))


def bounded_stops(value: Any) -> Any:
    """Refuse stop strings that are too many, or too long together."""
    strings = [value] if isinstance(value, str) else value or []
    if len(strings) > MOST_STOPS:
        raise PydanticCustomError("stop", f"at most {MOST_STOPS} strings are allowed, not {len(strings)}")
    if (characters := sum(map(len, strings))) > STOP_CHARACTERS:
        raise PydanticCustomError("stop", f"at most {STOP_CHARACTERS} characters are allowed, not {characters}")
    return value


TEXT: dict[str, Any] = {"type": "string"}
Stops = Annotated[
    Any, PlainValidator(stops_of), WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}, {"type": "null"}]})
]
BoundedStops = AfterValidator(bounded_stops)  # for fields that say themselves which strings they take
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Token = Annotated[int, Field(ge=0, le=LARGEST)]  # also a number of tokens
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(gt=0, le=1)]
Number = float | None  # null if it is not finite


# ---- requests -------------------------------------------------------------------------------------------------------


def examples(*bodies: dict[str, Any]) -> ConfigDict:
    """Return the settings of a request that has examples in the schema."""
    return ConfigDict(json_schema_extra={"examples": [*bodies]})


class TokenQuery(Strict):
    """A query on token ids: p(asked tokens | given tokens)."""

    tokens: list[Token | None] = Field(
        fail_fast=True, description="Token ids; null for a token to be sampled, or an unknown one."
    )
    given: list[bool] = Field(fail_fast=True, description="For each token, whether it is given.")
    asked: Annotated[list[bool], Field(fail_fast=True)] | None = Field(
        None, description="For each token, whether it is asked. Default: if not given."
    )
    start: Token | None = Field(None, description="Token at position 0. Default: BOS.")


def kind_of_question(value: Any) -> str:
    """Return the name of the type in the union below that a value is meant for."""
    if isinstance(value, list):
        return "list"
    return "template" if isinstance(value, str) else "query"


Question = Annotated[Annotated[str, Tag("template")] | Annotated[TokenQuery, Tag("query")],
                     Discriminator(kind_of_question)]  # fmt: skip
Questions = Annotated[
    Annotated[str, Tag("template")]
    | Annotated[TokenQuery, Tag("query")]
    | Annotated[list[Question], Field(min_length=1, fail_fast=True), Tag("list")],
    Discriminator(kind_of_question),
]
Templates = Annotated[
    Annotated[str, Tag("template")] | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "template"),
]
Stop = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[str], Field(fail_fast=True), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "string"),
    BoundedStops,
]


# Types of fields in JSON; those of the other fields are the ones of Python.
KINDS: dict[str, Any] = {
    "query": Questions, "template": Templates, "stop": Stop, "adapter": str | None,
    "known": Annotated[list[Token], Field(fail_fast=True)], "seed": Annotated[int, Field(ge=0, le=2**63 - 1)] | None,
}  # fmt: skip


def sent_fields(kind: type[Ask]) -> dict[str, Any]:
    """Return the fields of a question that a request has: for each its type, and a description with its range."""
    hints, sent = get_type_hints(kind), {}
    for item in sorted(fields(kind), key=lambda item: bool(item.kw_only)):
        if item.name == "notice":  # a function
            continue
        allowed, default = item.metadata.get("range", Range()), ... if item.default is MISSING else item.default
        bounds = {"ge": allowed.minimum, "gt": allowed.above, "le": allowed.maximum}
        if last_type(hints[item.name]) is int and item.name not in KINDS:
            bounds["le"] = LARGEST
        settings: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
        field = Field([] if default == () else default, description=item.metadata["help"], **settings)
        sent[item.name] = (KINDS.get(item.name, hints[item.name]), field)
    return sent


def request_of(kind: type[Ask], name: str, *bodies: dict[str, Any], **more: Any) -> type[BaseModel]:
    """Return the request of a kind of question.

    Args:
        kind: The kind.
        name: Name of the request.
        *bodies: Examples.
        **more: Further fields.
    """
    base = type("Examples", (Strict,), {"model_config": examples(*bodies)})
    made: type[BaseModel] = create_model(name, __base__=base, __doc__=kind.__doc__, **sent_fields(kind), **more)
    return made


# ---- replies --------------------------------------------------------------------------------------------------------


@cache
def fields_of(kind: type, name: str = "") -> type[BaseModel]:
    """Return the reply for a class of answers, with its fields as `answer_json` writes them.

    Args:
        kind: The class.
        name: Name of the reply. Default: that of the class, and `Fields`.
    """
    notes: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        notes |= re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(each) or "", re.MULTILINE)
    hints = dict(field_types(kind))
    if issubclass(kind, Score):
        hints |= {name: float for name in ("log_prob", "perplexity")}
        notes |= {"log_prob": "Of all asked tokens together, in nats.", "perplexity": "Per asked token."}
    entries: dict[str, Any] = {
        name: (json_type(hint), Field(description=note(notes[name]) if name in notes else None))
        for name, hint in hints.items()
    }
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    made: type[BaseModel] = create_model(name or f"{kind.__name__}Fields", __doc__=summary, **entries)
    return made


def note(text: str) -> str:
    """Return the text about a field in the terms of JSON, on one line."""
    return re.sub(r"\s+", " ", text).replace("`None`", "null")


def json_type(hint: Any) -> Any:
    """Return the type in JSON of a field of an answer."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return fields_of(hint)
    if origin is tuple:
        return types.GenericAlias(list, json_type(inner[0]))
    if origin is Mapping:
        return types.GenericAlias(dict, (str, json_type(inner[1])))
    if types.NoneType in inner:
        return json_type(inner[0]) | None
    return Number if hint is float else hint


def reply_of(name: str, entry: Any, several: bool = False) -> type[BaseModel]:
    """Return a reply with one entry per question, or with several."""
    entry = list.__class_getitem__(entry) if several else entry
    return create_model(name, __doc__="One entry per question.", results=(list[entry], ...))


class ErrorFields(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str


class ErrorReply(BaseModel):
    """An error."""

    error: ErrorFields


ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorReply, "description": "The API key is missing or wrong."},
    413: {"model": ErrorReply, "description": "The body is too large."},
    422: {"model": ErrorReply, "description": "The request is invalid, or beyond a limit."},
    429: {"model": ErrorReply, "description": "Too many questions wait."},
    503: {"model": ErrorReply, "description": "The server is starting or shutting down."},
    504: {"model": ErrorReply, "description": "The request took too long."},
}


def replies(model: type[BaseModel], content: Any = None) -> dict[int | str, dict[str, Any]]:
    """Return the replies of a route, for its schema; `content` is other content than JSON."""
    return {200: {"model": model} | ({"content": content} if content else {}), **ERRORS}
