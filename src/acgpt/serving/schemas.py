"""Requests and replies of the native routes and the page's, as pydantic models for checks and the OpenAPI schema.

Requests are checked strictly: an unknown field is an error, and a string is not taken for a number. Numbers that are
not finite are null in replies, because JSON has no others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from acgpt.models.fill import PATIENCE
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


class Asking(Strict):
    """Fields of every request to the model."""

    future: bool | None = Field(None, description="Condition on text after a slot. Default: if the model can.")
    adapter: str | None = Field(
        None, description='Name of a loaded adapter, or "none" for the model alone. Default: the server\'s choice.'
    )


class Drawing(Asking):
    """Fields of every request that draws tokens."""

    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling: total probability of the tokens drawn from.")
    top_k: Count | None = Field(None, description="Draw from the most probable tokens only. Default: from all.")
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="Seed. Default: a new one, which is returned.")
    max_tokens: Count | None = Field(None, description="Maximum number of tokens of a gap.")
    stop: Stop = Field([], description="Texts before which the text of a gap ends.")


class LogProbRequest(Asking):
    """Ask for log p(asked | given)."""

    model_config = examples(
        {"query": CAPITAL},
        {"query": [CAPITAL, "The {{cat}} sat."], "future": False},
        {"query": {"tokens": [5, 6, 7], "given": [True, False, True]}, "adapter": "none"},
        {"query": {"tokens": [5, 6, 7], "given": [True, False, False], "asked": [False, True, False]}},
    )
    query: Questions = Field(description="A template, a query on token ids, or a list of these.")


class SampleRequest(Drawing):
    """Sample the asked tokens."""

    model_config = examples(
        {"query": "The cat {{_2}} the mat.", "n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"query": ["The {{_1}} sat.", {"tokens": [5, None, 7], "given": [True, False, True]}], "top_k": 3},
        {"query": GAP, "candidates": 4, "max_tokens": 3},
    )
    query: Questions = Field(description="A template, a query on token ids, or a list of these.")
    n: Count = Field(1, description="Number of samples per query.")
    candidates: Count = Field(64, description="Gaps: number of fills to choose from.")


class FillRequest(Drawing):
    """Fill the gaps of templates."""

    model_config = examples(
        {"template": GAP, "n": 2, "max_tokens": 4, "seed": 0},
        {"template": [GAP, "The cat {{_1-3}} on the mat."], "n": 1, "max_tokens": 3, "stop": ["."]},
        {"template": GAP, "max_tokens": 3, "stream": True},
    )
    template: Templates = Field(description="A template with gaps, or a list of these.")
    n: Count = Field(5, description="Number of fills per template. With `stream`: 1.")
    best_of: Count | None = Field(None, description="Number of candidates. Default: one for each length tried.")
    patience: Count = Field(
        PATIENCE, description="Number of longer lengths than the best that may be no better. Not with `stream`."
    )
    distinct: bool = Field(True, description="Return no two fills with the same text. Not with `stream`.")
    stream: bool = Field(
        False,
        description="Send one fill as it is made, as server-sent events; its temperature is 0 by default, which gives "
        "the best fill.",
    )


class RankRequest(Asking):
    """Rank the alternatives of templates."""

    model_config = examples({"template": RANK}, {"template": [RANK, RANK]})
    template: Templates = Field(description="A template with alternatives, or a list of these.")


class LengthsRequest(Asking):
    """Ask how long a gap is."""

    model_config = examples({"template": GAP, "max_tokens": 8}, {"template": [GAP], "known": []})
    template: Templates = Field(description="A template with gaps, or a list of these.")
    known: list[Token] = Field([], fail_fast=True, description="Lengths of the first gaps; the next gap is asked for.")
    max_tokens: Count | None = Field(None, description="Maximum number of tokens of a gap.")


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
