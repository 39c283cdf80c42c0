"""Routes that the page needs beside the native ones.

    POST /v1/surprise   {"text": "The cat sat.", "top": 5}      p(token | tokens before it) of every token, one query
    POST /v1/surprise   {…, "future": true, "positions": [2]}   p(token | all others) at some positions, a query each
    POST /v1/layout     {"template": "The {{cat}} sat."}        the input of the model, as `acgpt show --json` prints it

p(token | all others) takes one query per token, so clients ask for some positions at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from acgpt.common.files import finite
from acgpt.display.show import figure
from acgpt.engine.score import TopScore
from acgpt.errors import InputError, QueryError
from acgpt.methods import METHODS
from acgpt.models.ask import Ask, TokenScore
from acgpt.models.executor import Scores, Search, Top
from acgpt.models.metadata import model_method
from acgpt.models.router import Route
from acgpt.query.query import Query
from acgpt.query.text import encode_text
from acgpt.serving.errors import InvalidField, LimitExceeded
from acgpt.serving.native import CAPITAL
from acgpt.serving.schemas import MOST_TOP, Count, Strict, examples, fields_of, replies, sent_fields
from acgpt.serving.service import USAGE, Budget, Service, naming

MOST_SLOTS = 400  # maximum number of slots of a layout: the mask is quadratic

Scored = tuple[list[int], dict[int, TopScore], Route | None]  # the tokens of a text, scores by position, the route


# ---- schemas --------------------------------------------------------------------------------------------------------


class Asking(Strict):
    """Fields of the other requests to the model."""

    future: bool | None = sent_fields(Ask)["future"][1]
    adapter: str | None = sent_fields(Ask)["adapter"][1]


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


@dataclass(frozen=True)
class Expected:
    """A token that the model expected."""

    text: str
    id: int
    log_prob: float


@dataclass(frozen=True)
class Surprise(TokenScore):
    """One token, and what the model expected in its place."""

    expected: tuple[Expected, ...]


@dataclass(frozen=True)
class Surprises:
    """The tokens that were asked, and the pieces of the whole text.

    Attributes:
        pieces: The text of every token.
        future: Whether all other tokens were given.
    """

    pieces: tuple[str, ...]
    tokens: tuple[Surprise, ...]
    future: bool
    adapter: str | None


class PredictedFields(BaseModel):
    """The token that an input slot predicts."""

    position: int
    id: int | None
    text: str


class LayoutReply(BaseModel):
    """What the model reads, one entry of each list per input slot."""

    future: bool
    adapter: str | None
    copies: int = Field(description="Number of copies, which are the first input slots.")
    tokens: list[str]
    ids: list[int | None] = Field(description="Token ids; null for a blank.")
    positions: list[int]
    roles: list[str] = Field(description='"copy", "BOS", "given", "asked" or "unknown".')
    predicts: list[PredictedFields | None]
    mask: list[str] = Field(description="A string of 0 and 1 per input slot: which ones it reads.")


# ---- routes ---------------------------------------------------------------------------------------------------------


def router(service: Service) -> APIRouter:
    """Return the routes; `service` answers the requests."""
    routes, lm, searches = APIRouter(tags=["page"]), service.lm, service.lm.searches

    @routes.post("/v1/surprise", responses=replies(fields_of(Surprises, "SurpriseReply")))
    async def surprise(body: SurpriseRequest, request: Request) -> Response:
        """Return the log-probability of the tokens of a text, and the tokens that were expected."""

        def make() -> Search[Scored]:
            service.check_characters(len(body.text))
            ids = encode_text(body.text, lm.tokenizer)
            if not ids:
                raise QueryError("the text has no tokens to score.")
            positions = range(1, len(ids) + 1) if body.positions is None else body.positions
            if wrong := next((position for position in positions if position > len(ids)), None):
                problem = f"there is no position {wrong}: the text has {len(ids)} tokens."
                raise InvalidField("positions", QueryError(problem))
            searches.check(Query(ids, [False] * len(ids)))
            # Counted before they are made: each of them is as long as the text.
            Budget(service).spend(len(ids) * (len(positions) if body.future else 1))
            queries = surprise_queries(ids, positions, body.future)
            found = searches.router.routes(queries, body.future, body.adapter)
            return surprise_search(ids, queries, found, body.top)

        ((ids, scores, route),) = await service.ask_all([naming("text")(make)], request)
        USAGE.get([]).append(len(scores))
        reply = partial(surprise_reply, ids, scores, route, lm.pieces)  # of a long text it takes a second
        return JSONResponse(await service.prepare(reply))

    @routes.post("/v1/layout", responses=replies(LayoutReply))
    async def layout(body: LayoutRequest) -> Response:
        """Return the input slots of the model, and which ones each of them reads."""

        def make() -> dict[str, Any]:
            service.check_characters(len(body.template))
            query = searches.encode(body.template).query
            (route,) = searches.router.routes([query], body.future, body.adapter)
            if not (method := model_method(searches.router.metadata(route.adapter))).drawable:
                drawable = " and ".join(name for name, other in METHODS.items() if other.drawable)
                raise InputError(f"the layout of a model of method {method.name} cannot be drawn, only {drawable}.")
            slots = len(query) + 1 + sum(query.given) * route.future  # at most
            if slots > MOST_SLOTS:
                raise LimitExceeded(f"the layout has up to {slots} slots; at most {MOST_SLOTS} are allowed.")
            mask = searches.executor.mask(route.adapter)
            drawn = figure(query, lm.tokenizer, bos=lm.bos, mask=mask, future=route.future)
            return {"future": route.future, "adapter": route.adapter, **drawn.as_dict()}

        return JSONResponse(await service.prepare(naming("template")(make)))

    return routes


def surprise_queries(ids: Sequence[int], positions: Sequence[int], future: bool) -> list[Query]:
    """Return the queries for the tokens at some positions: one from left to right, or one each, given all others."""
    if future:
        return [Query(ids, [other != position for other in range(1, len(ids) + 1)]) for position in positions]
    wanted = set(positions)
    # Tokens before an asked one are read, given or not. Those after the last one are not needed.
    asked = [position in wanted for position in range(1, max(wanted, default=0) + 1)]
    return [Query(ids[: len(asked)], [not each for each in asked], asked)] if asked else []


def surprise_search(ids: list[int], queries: list[Query], routes: list[Route], top: int) -> Search[Scored]:
    """Score queries, with the most probable tokens if some are wanted; return the scores by position."""
    scores: list[TopScore] = []
    if queries and top:
        scores = [score for answer in (yield Top(queries, routes, top)) for score in answer]
    elif queries:
        scores = [TopScore(float(each), (), ()) for answer in (yield Scores(queries, routes)) for each in answer]
    positions = [position for query in queries for position in query.asked_positions]
    return ids, dict(zip(positions, scores, strict=True)), routes[0] if routes else None


def surprise_reply(
    ids: list[int], scores: Mapping[int, TopScore], route: Route | None, pieces: Callable[[list[int]], list[str]]
) -> Any:
    """Return the content of a reply; `pieces` returns the text of each token."""
    texts = pieces(ids)
    names = {token: pieces([token])[0] for token in {i for score in scores.values() for i in score.ids}}
    tokens = []
    for position, score in scores.items():
        expected = (Expected(names[i], i, log_prob) for i, log_prob in zip(score.ids, score.log_probs, strict=True))
        tokens.append(Surprise(texts[position - 1], ids[position - 1], position, score.log_prob, tuple(expected)))
    future, adapter = (route.future, route.adapter) if route else (False, None)
    return finite(asdict(Surprises(tuple(texts), tuple(tokens), future, adapter)))
