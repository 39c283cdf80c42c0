"""Requests and replies of the native routes and the page's, as pydantic models for checks and the OpenAPI schema.

The requests of questions have the fields of the classes in `models.ask`.

Requests are checked strictly: an unknown field is an error, and a string is not taken for a number. Numbers that are
not finite are null in replies, because JSON has no others.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from acgpt.common.options import Range, last_type
from acgpt.models.ask import Ask, FillAsk, LengthsAsk, RankAsk, SampleAsk, ScoreAsk
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


class TokenFields(BaseModel):
    """One asked token."""

    text: str
    id: int
    position: int = Field(description="Position in the text, from 1.")
    log_prob: Number


class QueryFields(BaseModel):
    """A query: token ids and their roles."""

    tokens: list[int | None]
    given: list[bool]
    asked: list[bool]
    start: int | None = Field(description="Token at position 0; null is BOS.")


class ScoreFields(BaseModel):
    """log p(asked | given), in nats."""

    tokens: list[TokenFields]
    future: bool = Field(description="Whether every prediction saw all given tokens.")
    adapter: str | None = Field(description="Name of the adapter that answered; null is the model alone.")
    bound: bool = Field(description="Whether the log-probability is a lower bound.")
    log_prob: Number = Field(description="Of all asked tokens together; null if it is minus infinity.")
    perplexity: Number = Field(description="Per asked token; null if it is infinite.")


class SampleFields(ScoreFields):
    """A sample and its score."""

    text: str = Field(description="The completed text.")
    fills: list[str] = Field(description="The text of each slot.")
    seed: int
    query: QueryFields = Field(description="The completed query.")


class FillFields(SampleFields):
    """A fill and its score."""

    lengths: list[int] = Field(description="Number of tokens generated for each gap.")
    length_log_prob: Number = Field(description="Of these lengths; null if the model does not predict lengths.")
    score: Number = Field(description="What fills are ordered by.")


class RankedFields(BaseModel):
    """One alternative of a ranking."""

    text: str
    choice: list[str]
    probability: Number
    log_prob: Number


class RankingFields(BaseModel):
    """The alternatives, the most probable first."""

    alternatives: list[RankedFields]
    compared: str
    future: bool
    adapter: str | None


class LengthsFields(BaseModel):
    """Log-probability of each length."""

    log_probs: dict[str, Number]


def results(name: str, entry: Any) -> type[BaseModel]:
    """Return a reply with one entry per question."""
    return create_model(name, __doc__="One entry per question.", results=(list[entry], ...))


LogProbReply = results("LogProbReply", ScoreFields)
SampleReply = results("SampleReply", list[FillFields | SampleFields])
FillReply = results("FillReply", list[FillFields])
RankReply = results("RankReply", RankingFields)
LengthsReply = results("LengthsReply", LengthsFields)
QueryReply = results("QueryReply", QueryFields)
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


class SurpriseFields(TokenFields):
    """One token, and what the model expected in its place."""

    expected: list[ExpectedFields]


class SurpriseReply(BaseModel):
    """The tokens that were asked, and the pieces of the whole text."""

    pieces: list[str] = Field(description="The text of every token.")
    tokens: list[SurpriseFields]
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
