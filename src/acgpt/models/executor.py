"""Running queries on the network: what is between the public methods of `LanguageModel` and a method's passes.

    searches   ──► requests (`Rows`, `Scores`, …) of all of them ──► batches with the same route ──► passes

A search is a generator that yields requests and is sent their results, so that the requests of many questions are
answered together (`models.searches` makes them). A request is split by the route of its queries, because a pass has one
adapter. During a pass the network is locked, see `engine.modules`. `Executor` runs searches to their ends, all in step;
`serving.scheduler` answers the same requests as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from acgpt.common.options import ignore
from acgpt.engine.decode import Drawn
from acgpt.engine.engine import Engine
from acgpt.engine.length_head import LengthHead
from acgpt.engine.modules import evaluating, turn, unchanged
from acgpt.engine.peft import Switch
from acgpt.engine.steps import Guide, Row
from acgpt.errors import ModelError
from acgpt.models.adapters import BARE
from acgpt.models.router import Route, Router, by_route, lookup
from acgpt.query.lengths import LengthQuestion
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling


@dataclass
class Rows:
    """A request to draw candidates. Its result is a list of rows that have ended.

    Args:
        sampling: Temperature, truncation and seed.
        stopped: Tells whether a row ends early.
        notice: Called with the number of new tokens whenever some are drawn.
        progress: Called with a row whenever it has drawn a token.
        queries: The query of each row.
        samples: The number of each sample.
        routes: What answers each query.
        guides: The guide of each row.
    """

    sampling: Sampling
    stopped: Callable[[Row], bool]
    notice: Callable[[int], object] = ignore
    progress: Callable[[Row], object] = ignore
    queries: list[Query] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    guides: list[Guide] = field(default_factory=list)

    def add(self, query: Query, sample: int, route: Route, guide: Guide) -> None:
        """Add a row."""
        self.queries.append(query)
        self.samples.append(sample)
        self.routes.append(route)
        self.guides.append(guide)


@dataclass
class Samples:
    """A request for n samples of each query. Its result has a list of n samples for each of them.

    Args:
        queries: The queries.
        routes: What answers each query.
        n: Number of samples per query.
        sampling: Temperature, truncation and seed.
        notice: Called with the number of new tokens whenever some are drawn.
    """

    queries: list[Query]
    routes: list[Route]
    n: int
    sampling: Sampling
    notice: Callable[[int], object] = ignore


@dataclass
class Scores:
    """A request for the log-probabilities of the asked tokens of each query. Its result is a list for each of them."""

    queries: list[Query]
    routes: list[Route]


@dataclass
class Top(Scores):
    """`Scores` with the k most probable tokens in each place. Its result has a list of `TopScore` for each query."""

    k: int


@dataclass
class LengthRequest:
    """A request for the distribution of lengths of gaps. Its result is an array of (n, CLASSES) log-probabilities."""

    questions: list[LengthQuestion]
    route: Route


Result = TypeVar("Result")
Request = Rows | Samples | Scores | LengthRequest
Search = Generator[Request, Any, Result]


class Executor:
    """Runs queries on a network, each along its route.

    Args:
        engine: The engine of the network.
        router: Chooses the routes, and the method of each.
        masks: Ids of the MASK tokens of the base model (under the name "none") and of each adapter.
        heads: Heads for lengths of gaps of the base model (under the name "none") and of each adapter, if it has one.
        biased: Whether an adapter has trained biases of the base model, so that it cannot be switched off.
    """

    def __init__(
        self,
        engine: Engine,
        router: Router,
        masks: Mapping[str, int | None],
        heads: Mapping[str, LengthHead],
        *,
        biased: bool,
    ) -> None:
        self.engine, self.router, self.masks, self.heads, self.biased = engine, router, masks, heads, biased
        self.switch = Switch(engine.model)

    def mask(self, adapter: str | None) -> int | None:
        """Return the id of the MASK token of an adapter, or of the base model."""
        return lookup(self.masks, adapter)

    def length_head(self, route: Route) -> LengthHead | None:
        """Return the head that predicts lengths on a route; `None` if it has none, or does not read the future."""
        return self.heads.get((route.adapter or BARE).partition("+")[0]) if route.future else None

    @contextmanager
    def inference(self, route: Route, *, stepping: bool = False) -> Iterator[Engine]:
        """Lock the model, activate the adapter of a route, and switch off gradients and dropout, inside the context.

        Args:
            route: The route.
            stepping: A step of decoding follows, for rows that were prefilled along this route. Their modules are not
                listed again, which would take longer than the step.

        Yields:
            The engine, with the MASK token of the adapter.
        """
        if self.biased and route.adapter is None and not route.keep_adapters:
            raise ModelError(
                "the adapter has trained biases of the base model, so it cannot be switched off. Load the base model "
                'alone, or train the adapter with bias="none".'
            )
        model = self.engine.model
        switch = nullcontext() if route.keep_adapters else self.switch.to(route.adapter, same_layers=stepping)
        same = nullcontext() if stepping else unchanged(model)
        with (
            turn(model),
            same,
            switch,
            torch.inference_mode(),
            # Chosen inside the turn: another thread may have switched the mode for the moment.
            nullcontext() if stepping and not model.training else evaluating(model),
        ):
            yield self.engine.with_mask(self.mask(route.adapter))

    def log_probs(self, queries: Sequence[Query], routes: Sequence[Route], k: int | None = None) -> list[list[Any]]:
        """Return the log-probability of each asked token; with k, a `TopScore` with the k most probable tokens."""
        results: dict[int, list[Any]] = {}
        for route, members in by_route(routes):
            method, asked = self.router.method(route), [queries[i] for i in members]
            with self.inference(route) as engine:
                answers: Sequence[list[Any]] = (
                    method.log_probs(engine, asked, future=route.future)
                    if k is None
                    else method.top_log_probs(engine, asked, k, future=route.future)
                )
            results.update(zip(members, answers, strict=True))
        return [results[i] for i in range(len(queries))]

    def run(self, searches: Sequence[Search[Result]]) -> list[Result]:
        """Run searches to their ends, and return their results. Their requests are answered together."""
        steps = self.steps(searches)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                results: list[Result] = end.value
                return results

    def steps(self, searches: Sequence[Search[Result]]) -> Generator[None, None, list[Result]]:
        """Run searches as `run` does, and yield after each decoding step, so that a caller can show what was drawn."""
        results: dict[int, Result] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(searches)))  # for each active search
        while answers:
            requests: dict[int, Request] = {}
            for i, answer in answers.items():
                try:
                    requests[i] = searches[i].send(answer)
                except StopIteration as end:
                    results[i] = end.value
            answers = yield from self.answers(requests)
        return [results[i] for i in range(len(searches))]

    def answers(self, requests: Mapping[int, Request]) -> Generator[None, None, dict[int, Any]]:
        """Return the results of requests, by number; those of one kind are computed together."""
        answers: dict[int, Any] = {}
        scoring = {i: request for i, request in requests.items() if type(request) is Scores}
        routes = [route for request in scoring.values() for route in request.routes]
        found = iter(self.log_probs([query for r in scoring.values() for query in r.queries], routes))
        answers.update({i: list(islice(found, len(request.queries))) for i, request in scoring.items()})
        for i, request in requests.items():
            if isinstance(request, Top):
                answers[i] = self.log_probs(request.queries, request.routes, request.k)
        sampling = {i: request for i, request in requests.items() if isinstance(request, Samples)}
        answers.update(zip(sampling, self.samples(list(sampling.values())), strict=True))
        answers.update(self.lengths({i: r for i, r in requests.items() if isinstance(r, LengthRequest)}))
        drawing = {i: request for i, request in requests.items() if isinstance(request, Rows)}
        rows = iter((yield from self.draw(list(drawing.values()))))
        answers.update({i: list(islice(rows, len(request.queries))) for i, request in drawing.items()})
        return answers

    def samples(self, requests: Sequence[Samples]) -> list[list[list[Drawn]]]:
        """Return the samples of each request; those with the same options are drawn together."""
        results: list[list[list[Drawn]]] = [[[] for _ in request.queries] for request in requests]
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for number, request in enumerate(requests):
            for i, route in enumerate(request.routes):
                groups.setdefault((route, request.n, request.sampling, request.notice), []).append((number, i))
        for (route, n, sampling, notice), members in groups.items():
            queries = [requests[number].queries[i] for number, i in members]
            with self.inference(route) as engine:
                batch = self.router.method(route).sample(engine.with_notice(notice), queries, n, sampling, route.future)
            for (number, i), drawn in zip(members, batch, strict=True):
                results[number][i] = drawn
        return results

    def lengths(self, requests: Mapping[int, LengthRequest]) -> dict[int, np.ndarray]:
        """Return the log-probabilities of lengths of requests, by number."""
        results: dict[int, np.ndarray] = {}
        numbers = list(requests)
        for route, members in by_route([request.route for request in requests.values()]):
            head, chosen = self.length_head(route), [numbers[member] for member in members]
            assert head is not None
            questions = [question for number in chosen for question in requests[number].questions]
            with self.inference(route) as engine:
                answers = engine.length_log_probs(questions, head)
            ends = np.cumsum([len(requests[number].questions) for number in chosen])
            results.update(zip(chosen, np.split(answers, ends[:-1]), strict=True))
        return results

    def draw(self, requests: Sequence[Rows]) -> Generator[None, None, list[Row]]:
        """Draw the rows of requests, in batches with the same route and sampling options; yield after each step."""
        everything = [(request, i) for request in requests for i in range(len(request.queries))]
        groups: dict[tuple[Route, Sampling], list[int]] = {}
        for number, (request, i) in enumerate(everything):
            groups.setdefault((request.routes[i], request.sampling), []).append(number)
        results: dict[int, Row] = {}
        for (route, sampling), numbers in groups.items():
            numbers.sort(key=lambda number: len(everything[number][0].queries[everything[number][1]].asked_at))
            for start in range(0, len(numbers), self.engine.most_rows):
                batch = numbers[start : start + self.engine.most_rows]
                members = [everything[number] for number in batch]
                request_of = {id(r.guides[i]): r for r, i in members}
                with self.inference(route) as engine:
                    decoding = self.router.method(route).decoding(engine, sampling, route.future)
                    rows = decoding.prefill(
                        [r.queries[i] for r, i in members],
                        [r.samples[i] for r, i in members],
                        guides=[r.guides[i] for r, i in members],
                    )
                drawn = rows
                while True:
                    members[0][0].notice(len(drawn))
                    for row in drawn:
                        request_of[id(row.guide)].progress(row)
                    yield
                    ended = [row for row in decoding.rows if row.done or request_of[id(row.guide)].stopped(row)]
                    decoding.release(ended)
                    if not decoding.rows:
                        break
                    with self.inference(route, stepping=True):
                        drawn = decoding.step()
                results.update(zip(batch, rows, strict=True))
        return [results[number] for number in range(len(everything))]
