"""Requests and replies of the native routes and the page's, as pydantic models for checks and the OpenAPI schema.

The requests of questions have the fields of the classes in `models.ask`.

Requests are checked strictly: an unknown field is an error, and a string is not taken for a number. Numbers that are
not finite are null in replies, because JSON has no others.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from acgpt.common.options import Range, last_type
from acgpt.models.answer_json import field_types
from acgpt.models.ask import (
    Ask,
    Fill,
    FillAsk,
    Lengths,
    LengthsAsk,
    RankAsk,
    Ranking,
    Sample,
    SampleAsk,
    Score,
    ScoreAsk,
    TokenScore,
)
from acgpt.query.query import Query
from acgpt.serving.requests import LARGEST, MOST_TOP, BoundedStops, Count, Strict

CAPITAL, GAP, RANK = "The capital of {{Italy}} is Rome.", "The capital of {{_}} is Rome.", "The {{cat|dog}} sat."

Token = Annotated[int, Field(ge=0, le=LARGEST)]
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


def request_of(kind: type[Ask], *bodies: dict[str, Any], **more: Any) -> type[BaseModel]:
    """Return the request of a kind of question.

    Args:
        kind: The kind.
        *bodies: Examples.
        **more: Further fields.
    """
    name = f"{kind.name.title().replace('_', '')}Request"
    with_examples = create_model("Examples", __base__=Strict)
    with_examples.model_config |= examples(*bodies)
    made: type[BaseModel] = create_model(
        name, __base__=with_examples, __doc__=kind.__doc__, **sent_fields(kind), **more
    )
    return made


LogProbRequest = request_of(
    ScoreAsk,
    {"query": CAPITAL},
    {"query": [CAPITAL, "The {{cat}} sat."], "future": False},
    {"query": {"tokens": [5, 6, 7], "given": [True, False, True]}, "adapter": "none"},
    {"query": {"tokens": [5, 6, 7], "given": [True, False, False], "asked": [False, True, False]}},
)
SampleRequest = request_of(
    SampleAsk,
    {"query": "The cat {{_2}} the mat.", "n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"query": ["The {{_1}} sat.", {"tokens": [5, None, 7], "given": [True, False, True]}], "top_k": 3},
    {"query": GAP, "candidates": 4, "max_tokens": 3},
)
STREAM = (
    "Send one fill as it is made, as server-sent events; its temperature is 0 by default, which gives the best fill."
)
FillRequest = request_of(
    FillAsk,
    {"template": GAP, "n": 2, "max_tokens": 4, "seed": 0},
    {"template": [GAP, "The cat {{_1-3}} on the mat."], "n": 1, "max_tokens": 3, "stop": ["."]},
    {"template": GAP, "max_tokens": 3, "stream": True},
    stream=(bool, Field(False, description=STREAM)),
)
RankRequest = request_of(RankAsk, {"template": RANK}, {"template": [RANK, RANK]})
LengthsRequest = request_of(LengthsAsk, {"template": GAP, "max_tokens": 8}, {"template": [GAP], "known": []})


class Asking(Strict):
    """Fields of the other requests to the model."""

    future: bool | None = sent_fields(Ask)["future"][1]
    adapter: str | None = sent_fields(Ask)["adapter"][1]


class QueryRequest(Strict):
    """Tokenize templates."""

    model_config = examples({"template": CAPITAL})
    template: Templates = Field(description="A template without gaps, or a list of these.")


class PiecesRequest(Strict):
    """Ask for the text of tokens."""

    model_config = examples({"tokens": [5, 6, 7]})
    tokens: list[Token] = Field(fail_fast=True, description="Token ids.")


class SurpriseRequest(Asking):
    """Ask how surprising the tokens of a text are."""

    model_config = examples(
        {"text": "The cat sat on the mat."},
        {"text": "The cat sat on the mat.", "future": True, "positions": [1, 2], "top": 3},
    )
    text: str = Field(description="A text; braces have no meaning.")
    future: bool = Field(False, description="Given all other tokens. Default: given the tokens before it.")
    positions: Annotated[list[Count], Field(fail_fast=True)] | None = Field(
        None, description="Positions to score, from 1. Default: all."
    )
    top: int = Field(5, ge=0, le=MOST_TOP, description="Number of most probable tokens to return for each.")


class LayoutRequest(Asking):
    """Ask for the input of the model."""

    model_config = examples({"template": CAPITAL}, {"template": "The {{_2}} sat."})
    template: str = Field(description="A template without gaps.")


# ---- replies --------------------------------------------------------------------------------------------------------


@cache
def fields_of(kind: type) -> type[BaseModel]:
    """Return the reply for a class of answers, with its fields as `answer_json` writes them."""
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
    made: type[BaseModel] = create_model(f"{kind.__name__}Fields", __doc__=summary, **entries)
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


def results(name: str, entry: Any, *, several: bool = False) -> type[BaseModel]:
    """Return a reply with one entry per question, or with several."""
    entry = list.__class_getitem__(entry) if several else entry
    return create_model(name, __doc__="One entry per question.", results=(list[entry], ...))


LogProbReply = results("LogProbReply", fields_of(Score))
SampleReply = results("SampleReply", fields_of(Fill) | fields_of(Sample), several=True)
FillReply = results("FillReply", fields_of(Fill), several=True)
RankReply = results("RankReply", fields_of(Ranking))
LengthsReply = results("LengthsReply", fields_of(Lengths))
QueryReply = results("QueryReply", fields_of(Query))
PiecesReply = results("PiecesReply", str)
REQUESTS: dict[type[Ask], tuple[type[BaseModel], type[BaseModel]]] = {  # and replies
    ScoreAsk: (LogProbRequest, LogProbReply),
    SampleAsk: (SampleRequest, SampleReply),
    FillAsk: (FillRequest, FillReply),
    RankAsk: (RankRequest, RankReply),
    LengthsAsk: (LengthsRequest, LengthsReply),
}


class ModelReply(BaseModel):
    """What the server's model can do."""

    model: str
    version: str = Field(description="Version of acgpt.")
    method: str
    reads_future: bool
    predicts_lengths: bool
    bound: bool = Field(description="Whether log-probabilities are lower bounds.")
    adapters: list[str]
    router: bool = Field(description="Whether the adapter is chosen for each query.")
    positions: int = Field(description="A text has at most one token less.")
    vocabulary: int
    limits: dict[str, float | int | None]


class ExpectedFields(BaseModel):
    """A token that the model expected."""

    text: str
    id: int
    log_prob: Number


SurpriseFields = create_model(
    "SurpriseFields",
    __base__=fields_of(TokenScore),
    __doc__="One token, and what the model expected in its place.",
    expected=(list[ExpectedFields], ...),
)


class SurpriseReply(BaseModel):
    """The tokens that were asked, and the pieces of the whole text."""

    pieces: list[str] = Field(description="The text of every token.")
    tokens: list[SurpriseFields]  # type: ignore[valid-type]
    future: bool = Field(description="Whether all other tokens were given.")
    adapter: str | None


class PredictedFields(BaseModel):
    """The token that a slot predicts."""

    position: int
    id: int | None
    text: str


class LayoutReply(BaseModel):
    """The slots of the model's input, one entry of each list per slot."""

    future: bool
    adapter: str | None
    copies: int = Field(description="Number of copies, which are the first slots.")
    tokens: list[str]
    ids: list[int | None] = Field(description="Token ids; null for a blank.")
    positions: list[int]
    roles: list[str] = Field(description='"copy", "BOS", "given", "asked" or "unknown".')
    predicts: list[PredictedFields | None]
    mask: list[str] = Field(description="A string of 0 and 1 per slot: which slots it reads.")


class ErrorFields(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str


class ErrorReply(BaseModel):
    """An error."""

    error: ErrorFields


class HealthReply(BaseModel):
    """The server answers requests."""

    status: Literal["ok"]
