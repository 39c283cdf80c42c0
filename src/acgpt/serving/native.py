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

from acgpt.errors import InputError, QueryError, TemplateError
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
from acgpt.serving.errors import InvalidField, LimitExceeded
from acgpt.serving.events import event_stream
from acgpt.serving.options import LimitOptions
from acgpt.serving.requests import Budget, Strict, check_numbers, check_questions, gaps_of, parsed, too_many
from acgpt.serving.schemas import Templates, Token, TokenQuery, examples, fields_of, replies, reply_of, request_of
from acgpt.serving.service import Service
from acgpt.version import __version__

Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=Ask)

CAPITAL, GAP, RANK = "The capital of {{Italy}} is Rome.", "The capital of {{_}} is Rome.", "The {{cat|dog}} sat."
NUMBERS = ("n", "best_of", "candidates")  # fields that --max-n bounds


# ---- schemas --------------------------------------------------------------------------------------------------------


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


class QueryRequest(Strict):
    """Tokenize templates."""

    model_config = examples({"template": CAPITAL})
    template: Templates = Field(description="A template without gaps, or a list of these.")


class PiecesRequest(Strict):
    """Ask for the text of tokens."""

    model_config = examples({"tokens": [5, 6, 7]})
    tokens: list[Token] = Field(fail_fast=True, description="Token ids.")


LogProbReply = reply_of("LogProbReply", fields_of(Score))
SampleReply = reply_of("SampleReply", fields_of(Fill) | fields_of(Sample), several=True)
FillReply = reply_of("FillReply", fields_of(Fill), several=True)
RankReply = reply_of("RankReply", fields_of(Ranking))
LengthsReply = reply_of("LengthsReply", fields_of(Lengths))
QueryReply = reply_of("QueryReply", fields_of(Query))
PiecesReply = reply_of("PiecesReply", str)


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


FIELDS = {*FillRequest.model_fields, *SampleRequest.model_fields, *LengthsRequest.model_fields}
STREAMED = {item.name for item in fields(StreamAsk)}


# ---- routes ---------------------------------------------------------------------------------------------------------


def router(service: Service) -> APIRouter:
    """Return the native routes.

    Args:
        service: Answers the requests.
    """
    routes, lm, searches = APIRouter(tags=["native"]), service.lm, service.lm.searches

    def scoring(ask: ScoreAsk, budget: Budget) -> None:
        parsed(service, ask.question)
        budget.spend(len(searches.scorable(ask.question)))

    def sampling(ask: SampleAsk, budget: Budget) -> None:
        if has_gaps(parts := parsed(service, ask.question)):
            budget.spend_on_gaps(parts, ask.max_tokens, max(ask.n, ask.candidates))
        else:
            query = searches.encode(ask.question).query
            budget.spend(len(query) + (ask.n - 1) * len(query.asked_positions))

    def filling(ask: FillAsk, budget: Budget) -> None:
        budget.spend_on_gaps(gaps_of(service, ask.question), ask.max_tokens, max(ask.n, ask.best_of or 1))

    def ranking(ask: RankAsk, budget: Budget) -> None:
        parsed(service, ask.question)
        candidates = fillings(ask.question)
        budget.spend(len(candidates) * len(encode_text(rendered(candidates[0]), lm.tokenizer)))

    def measuring(ask: LengthsAsk | StreamAsk, budget: Budget) -> None:
        budget.spend_on_gaps(gaps_of(service, ask.question), ask.max_tokens, 1)

    async def answer(ask: Ask, cost: Callable[[Any, Budget], None], request: Request) -> Response:
        """Answer a request: one search for each of its questions."""
        questions, budget = named_questions(service, ask.asks, ask.question), Budget(service)

        def make(entry: str | TokenQuery) -> Search[Any]:
            one = ask.about(as_question(entry))
            cost(one, budget)
            return searches.of(one)

        makes = [naming(name, partial(make, entry)) for name, entry in questions]
        for name, entry in questions:
            if may_have_patterns(entry):  # before `makes`, which take turns
                await service.wait(check_patterns(service, name, entry), request)
        try:
            return results(await service.ask_all(makes, request))
        except InvalidField:
            raise
        except InputError as error:  # found by the search itself
            raise InvalidField(ask.asks, error) from error

    async def stream(body: BaseModel, request: Request) -> Response:
        """Send a fill as it is made."""
        if not isinstance(template := body.model_dump()["template"], str):
            raise InvalidField("template", InputError("a stream takes one template, not a list."))
        for name in body.model_fields_set - STREAMED - {"stream"}:
            if (name, getattr(body, name)) != ("n", 1):
                raise InvalidField(name, InputError(f"{name} cannot be used with `stream`: leave it out."))
        ask = asked(service, StreamAsk, body)
        if may_have_patterns(template):
            await service.wait(check_patterns(service, "template", template), request)

        def make(report: Callable[[Piece], object]) -> Search[Any]:
            measuring(ask, Budget(service))
            return searches.stream(ask, report)

        return await event_stream(
            service,
            lambda report: naming("template", partial(make, report))(),
            request,
            lambda pieces: (to_json(piece) async for piece in pieces),
        )

    def add(
        kind: type[Ask],
        model: type[BaseModel],
        reply: type[BaseModel],
        cost: Callable[[Any, Budget], None],
        what: str,
        **more: Any,
    ) -> None:
        """Add the route of a kind of question."""

        async def route(body: BaseModel, request: Request) -> Response:
            if getattr(body, "stream", False):
                return await stream(body, request)
            return await answer(asked(service, kind, body), cost, request)

        route.__name__, route.__doc__ = kind.name, what
        route.__annotations__ = {"body": model, "request": Request, "return": Response}
        routes.post(f"/v1/{kind.name}", responses=replies(reply, **more))(route)

    add(
        ScoreAsk,
        LogProbRequest,
        LogProbReply,
        scoring,
        "Return log p(asked | given) of each query, exactly, in one pass.",
    )
    add(SampleAsk, SampleRequest, SampleReply, sampling, "Sample the asked tokens of each query.")
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    add(
        FillAsk,
        FillRequest,
        FillReply,
        filling,
        "Fill the gaps of each template; with `stream`, send one fill as it is made.",
        content=events,
    )
    add(RankAsk, RankRequest, RankReply, ranking, "Rank the alternatives of each template.")
    add(LengthsAsk, LengthsRequest, LengthsReply, measuring, "Return the log-probability of each length of a gap.")

    @routes.post("/v1/query", responses=replies(QueryReply))
    async def query(body: QueryRequest) -> Response:
        """Return the token ids and roles of each template."""

        def make(template: str) -> Query:
            parsed(service, template)
            return lm.query(template)

        named = named_questions(service, "template", body.template)
        return results([await service.prepare(naming(name, partial(make, template))) for name, template in named])

    @routes.post("/v1/pieces", responses=replies(PiecesReply))
    async def pieces(body: PiecesRequest) -> Response:
        """Return the text that each token contributes."""
        if len(body.tokens) > service.limits.max_tokens_per_request:
            raise InvalidField("tokens", too_many(len(body.tokens), service.limits.max_tokens_per_request))
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
        return JSONResponse(
            {
                "model": service.name,
                "version": __version__,
                "method": method.name,
                "reads_future": lm.reads_future,
                "predicts_lengths": bool(service.scheduler.executor.heads),
                "bound": method.bound,
                "adapters": list(lm.adapters),
                "router": lm.router,
                "positions": lm.positions,
                "vocabulary": lm.vocabulary,
                "limits": {**limits, "max_rows": service.scheduler.most_rows},
            }
        )

    return routes


# ---- requests -------------------------------------------------------------------------------------------------------


def named_questions(service: Service, field: str, value: Any) -> list[tuple[str, Any]]:
    """Return the questions of a request, at most as many as are allowed, each with its path in the request."""
    if not isinstance(value, list):
        return [(field, value)]
    check_questions(service, field, value)
    return [(f"{field}.{i}", question) for i, question in enumerate(value)]


def as_question(question: str | TokenQuery) -> str | Query:
    """Return a question as `LanguageModel` takes it."""
    if isinstance(question, str):
        return question
    return Query(question.tokens, question.given, question.asked, question.start)


def asked(service: Service, kind: type[Asked], body: BaseModel) -> Asked:
    """Return what a request asks, after a check of the fields that have limits."""
    settings = {item.name: getattr(body, item.name) for item in fields(kind) if item.name in body.model_fields_set}
    check_numbers(service, {name: settings.get(name) for name in NUMBERS})
    return naming(kind.asks, lambda: kind(**settings))()


def naming(param: str, make: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function whose errors name the field that is wrong.

    Args:
        param: The field of the question. Errors in other arguments begin with the name of these.
        make: The function.
    """

    def made() -> Result:
        try:
            return make()
        except InvalidField:
            raise
        except (TemplateError, QueryError, LimitExceeded) as error:
            raise InvalidField(param, error) from error
        except InputError as error:
            name = str(error).split(" ", 1)[0]
            raise InvalidField(name if name in FIELDS else param, error) from error

    return made


def may_have_patterns(question: Any) -> bool:
    """Return whether a question could have a gap with a regular expression."""
    return isinstance(question, str) and "{{_" in question and ":" in question


async def check_patterns(service: Service, param: str, template: str) -> None:
    """Check that the regular expressions of a template compile within limits.

    Args:
        service: Compiles them.
        param: The field of the template.
        template: The template.

    Raises:
        InvalidField: One does not.
    """
    for slot in await service.prepare(naming(param, partial(parsed, service, template))):
        pattern = slot.gap.pattern if isinstance(slot, Slot) and slot.gap is not None else None
        if pattern is not None and not await service.patterns.compile_in_time(pattern):
            assert isinstance(slot, Slot)
            problem = "the pattern of this gap takes too long or too much memory to compile: simplify it."
            raise InvalidField(param, TemplateError(problem, template, slot.at))


def results(answers: Sequence[Any]) -> JSONResponse:
    """Return a reply with one entry per question."""
    return JSONResponse(
        {
            "results": [
                [to_json(a) for a in answer] if isinstance(answer, list) else to_json(answer) for answer in answers
            ]
        }
    )
