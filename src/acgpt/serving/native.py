"""The native routes: the methods of `LanguageModel` as JSON.

    POST /v1/log_prob   {"query": "The {{cat}} sat."}                        one score per query
    POST /v1/sample     {"query": "The {{_2}} sat.", "n": 3}                 n samples per query
    POST /v1/fill       {"template": "The {{_}} sat.", "stream": true}       the best fills, or one as it is made
    POST /v1/rank       {"template": "The {{cat|dog}} sat."}                 the alternatives in order
    POST /v1/lengths    {"template": "The {{_}} sat."}                       p(length) of a gap
    POST /v1/query      {"template": "The {{cat}} sat."}                     token ids and roles
    POST /v1/pieces     {"tokens": [5, 6]}                                   the text of tokens
    GET  /v1/model                                                           what the model can do, and the limits

Each question of a list is a search of its own, so that long lists do not hold up others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from acgpt.errors import QueryError, TemplateError
from acgpt.models.answer_json import to_json
from acgpt.models.ask import (
    Ask,
    Fill,
    FillAsk,
    Lengths,
    LengthsAsk,
    Piece,
    RankAsk,
    Ranking,
    Sample,
    SampleAsk,
    Score,
    ScoreAsk,
    StreamAsk,
)
from acgpt.models.executor import Search
from acgpt.models.metadata import model_method
from acgpt.query.gaps import has_gaps
from acgpt.query.query import Query
from acgpt.query.template import Slot, fillings, rendered
from acgpt.query.text import encode_text
from acgpt.serving.errors import InvalidField
from acgpt.serving.options import LimitOptions
from acgpt.serving.schemas import (
    Strict,
    Templates,
    Token,
    TokenQuery,
    examples,
    fields_of,
    replies,
    reply_of,
    request_of,
)
from acgpt.serving.service import Budget, Service, naming
from acgpt.version import __version__

Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=Ask)

CAPITAL, GAP, RANK = "The capital of {{Italy}} is Rome.", "The capital of {{_}} is Rome.", "The {{cat|dog}} sat."
STREAM = (
    "Send one fill as it is made, as server-sent events; its temperature is 0 by default, which gives the best fill."
)
STREAMED = {item.name for item in fields(StreamAsk)}
NUMBERS = ("n", "best_of", "candidates")  # fields that --max-n bounds


# ---- schemas --------------------------------------------------------------------------------------------------------


class QueryRequest(Strict):
    """Tokenize templates."""

    model_config = examples({"template": CAPITAL})
    template: Templates = Field(description="A template without gaps, or a list of these.")


class PiecesRequest(Strict):
    """Ask for the text of tokens."""

    model_config = examples({"tokens": [5, 6, 7]})
    tokens: list[Token] = Field(fail_fast=True, description="Token ids.")


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


# ---- routes ---------------------------------------------------------------------------------------------------------


def router(service: Service) -> APIRouter:
    """Return the native routes; `service` answers the requests."""
    routes, lm, searches = APIRouter(tags=["native"]), service.lm, service.lm.searches

    async def answer(ask: Ask, make: Callable[[Any, Budget], Search[Any]], request: Request) -> Response:
        """Answer a request: one search for each of its questions."""
        questions, budget = named_questions(service, ask.asks, ask.question), Budget(service)

        def search(entry: str | TokenQuery) -> Search[Any]:
            question = entry if isinstance(entry, str) else Query(entry.tokens, entry.given, entry.asked, entry.start)
            return make(ask.about(question), budget)

        makes = [naming(name)(partial(search, entry)) for name, entry in questions]
        for name, entry in questions:  # before `makes`, which take turns
            await check_patterns(service, name, entry, request)
        with naming(ask.asks):  # also of errors that a search itself finds
            return results(await service.ask_all(makes, request))

    async def stream(body: BaseModel, request: Request) -> Response:
        """Send a fill as it is made."""
        if not isinstance(template := body.model_dump()["template"], str):
            raise InvalidField("template", "a stream takes one template, not a list.")
        for name in sorted(body.model_fields_set - STREAMED - {"stream"}):
            if (name, getattr(body, name)) != ("n", 1):
                raise InvalidField(name, f"{name} cannot be used with `stream`: leave it out.")
        ask = asked(service, StreamAsk, body)
        await check_patterns(service, "template", template, request)

        def make(report: Callable[[Piece], object]) -> Search[Any]:
            with naming("template"):
                Budget(service).spend_on_gaps(service.gaps_of(template), ask)
                return searches.stream(ask, report)

        return await service.event_stream(make, request, lambda pieces: (to_json(piece) async for piece in pieces))

    def answers(
        kind: type[Ask], reply: Any, *bodies: dict[str, Any], several: bool = False, content: Any = None, **more: Any
    ) -> Callable[[Callable[[Any, Budget], Search[Any]]], None]:
        """Add the route of a kind of question: what is decorated counts the tokens of one, and makes its search.

        Args:
            kind: The kind of question.
            reply: The answer in JSON.
            *bodies: Examples of requests.
            several: Whether a question has several answers.
            content: Other content of replies than JSON.
            **more: Fields of a request that are none of a question.
        """
        name = kind.name.title().replace("_", "")
        model, schema = request_of(kind, f"{name}Request", *bodies, **more), reply_of(f"{name}Reply", reply, several)

        def add(make: Callable[[Any, Budget], Search[Any]]) -> None:
            async def route(body: BaseModel, request: Request) -> Response:
                if getattr(body, "stream", False):
                    return await stream(body, request)
                return await answer(asked(service, kind, body), make, request)

            route.__name__, route.__doc__ = kind.name, make.__doc__
            route.__annotations__ = {"body": model, "request": Request, "return": Response}
            routes.post(f"/v1/{kind.name}", responses=replies(schema, content))(route)

        return add

    @answers(
        ScoreAsk,
        fields_of(Score),
        {"query": CAPITAL},
        {"query": [CAPITAL, "The {{cat}} sat."], "future": False},
        {"query": {"tokens": [5, 6, 7], "given": [True, False, True]}, "adapter": "none"},
        {"query": {"tokens": [5, 6, 7], "given": [True, False, False], "asked": [False, True, False]}},
    )
    def log_prob(ask: ScoreAsk, budget: Budget) -> Search[Score]:
        """Return log p(asked | given) of each query, exactly, in one pass."""
        service.parsed(ask.question)
        budget.spend(len(searches.scorable(ask.question)))
        return searches.log_prob(ask)

    @answers(
        SampleAsk,
        fields_of(Fill) | fields_of(Sample),
        {"query": "The cat {{_2}} the mat.", "n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"query": ["The {{_1}} sat.", {"tokens": [5, None, 7], "given": [True, False, True]}], "top_k": 3},
        {"query": GAP, "candidates": 4, "max_tokens": 3},
        several=True,
    )
    def sample(ask: SampleAsk, budget: Budget) -> Search[list[Sample]]:
        """Sample the asked tokens of each query."""
        if has_gaps(parts := service.parsed(ask.question)):
            budget.spend_on_gaps(parts, ask, max(ask.n, ask.candidates))
        else:
            query = searches.encode(ask.question).query
            budget.spend(len(query) + (ask.n - 1) * len(query.asked_positions))
        return searches.sample(ask)

    @answers(
        FillAsk,
        fields_of(Fill),
        {"template": GAP, "n": 2, "max_tokens": 4, "seed": 0},
        {"template": [GAP, "The cat {{_1-3}} on the mat."], "n": 1, "max_tokens": 3, "stop": ["."]},
        {"template": GAP, "max_tokens": 3, "stream": True},
        several=True,
        content={"text/event-stream": {"schema": {"type": "string"}}},
        stream=(bool, Field(False, description=STREAM)),
    )
    def fill(ask: FillAsk, budget: Budget) -> Search[list[Fill]]:
        """Fill the gaps of each template; with `stream`, send one fill as it is made."""
        budget.spend_on_gaps(service.gaps_of(ask.question), ask, max(ask.n, ask.best_of or 1))
        return searches.fill(ask)

    @answers(RankAsk, fields_of(Ranking), {"template": RANK}, {"template": [RANK, RANK]})
    def rank(ask: RankAsk, budget: Budget) -> Search[Ranking]:
        """Rank the alternatives of each template."""
        service.parsed(ask.question)
        candidates = fillings(ask.question)
        budget.spend(len(candidates) * len(encode_text(rendered(candidates[0]), lm.tokenizer)))
        return searches.rank(ask)

    @answers(LengthsAsk, fields_of(Lengths), {"template": GAP, "max_tokens": 8}, {"template": [GAP], "known": []})
    def lengths(ask: LengthsAsk, budget: Budget) -> Search[Lengths]:
        """Return the log-probability of each length of a gap."""
        budget.spend_on_gaps(service.gaps_of(ask.question), ask)
        return searches.lengths(ask)

    @routes.post("/v1/query", responses=replies(reply_of("QueryReply", fields_of(Query))))
    async def query(body: QueryRequest) -> Response:
        """Return the token ids and roles of each template."""

        def make(template: str) -> Query:
            service.parsed(template)
            return lm.query(template)

        named = named_questions(service, "template", body.template)
        return results([await service.prepare(naming(name)(partial(make, template))) for name, template in named])

    @routes.post("/v1/pieces", responses=replies(reply_of("PiecesReply", str)))
    async def pieces(body: PiecesRequest) -> Response:
        """Return the text that each token contributes."""
        Budget(service).spend(len(body.tokens), "tokens")
        for i, token in enumerate(body.tokens):
            if token >= lm.vocabulary:
                error = QueryError(f"the token {token} does not exist: the largest id is {lm.vocabulary - 1}.")
                raise InvalidField(f"tokens.{i}", error)
        return JSONResponse({"results": await service.prepare(lambda: lm.pieces(body.tokens))})

    @routes.get("/v1/model", responses=replies(ModelReply))
    async def model() -> Response:
        """Say what the model can do, and how large requests may be."""
        method = model_method(lm.metadata)
        # The options of a server also have paths and addresses, which are not for clients.
        limits = {item.name: getattr(service.limits, item.name) for item in fields(LimitOptions)}
        reply = ModelReply(
            model=service.name,
            version=__version__,
            method=method.name,
            reads_future=lm.reads_future,
            predicts_lengths=bool(service.scheduler.executor.heads),
            bound=method.bound,
            adapters=list(lm.adapters),
            router=lm.router,
            positions=lm.positions,
            vocabulary=lm.vocabulary,
            limits={**limits, "max_rows": service.scheduler.most_rows},
        )
        return JSONResponse(reply.model_dump())

    return routes


# ---- requests -------------------------------------------------------------------------------------------------------


def named_questions(service: Service, field: str, value: Any) -> list[tuple[str, Any]]:
    """Return the questions of a request, at most as many as are allowed, each with its path in the request."""
    if not isinstance(value, list):
        return [(field, value)]
    service.check_questions(field, value)
    return [(f"{field}.{i}", question) for i, question in enumerate(value)]


def asked(service: Service, kind: type[Asked], body: BaseModel) -> Asked:
    """Return what a request asks, after a check of the fields that have limits."""
    settings = {item.name: getattr(body, item.name) for item in fields(kind) if item.name in body.model_fields_set}
    service.check_numbers({name: settings.get(name) for name in NUMBERS})
    with naming(kind.asks):
        return kind(**settings)


async def check_patterns(service: Service, param: str, question: Any, request: Request) -> None:
    """Check that the regular expressions of a template compile within limits.

    Args:
        service: Compiles them.
        param: The field of the question.
        question: The template, or another question.
        request: The request whose client waits.

    Raises:
        InvalidField: One does not.
    """
    if not isinstance(question, str) or "{{_" not in question or ":" not in question:
        return

    async def compile_all() -> None:
        for slot in await service.prepare(naming(param)(partial(service.parsed, question))):
            pattern = slot.gap.pattern if isinstance(slot, Slot) and slot.gap is not None else None
            if pattern is not None and not await service.patterns.compile_in_time(pattern):
                assert isinstance(slot, Slot)
                problem = "the pattern of this gap takes too long or too much memory to compile: simplify it."
                raise InvalidField(param, TemplateError(problem, question, slot.at))

    await service.wait(compile_all(), request)


def results(answers: Sequence[Any]) -> JSONResponse:
    """Return a reply with one entry per question."""
    entries = [[to_json(a) for a in answer] if isinstance(answer, list) else to_json(answer) for answer in answers]
    return JSONResponse({"results": entries})
