"""Running queries on the network: what is between the public methods of `LanguageModel` and a method's passes.

    searches ──► requests (`Rows`, `Scores`, …) ──► tasks, one a query ──► groups ──► passes, pools ──► answers

A search is a generator that yields requests and is sent their results (`models.searches` makes them). A request is
split into tasks. Tasks of one group share a pass, whatever search they are of: they have the same route, because a pass
has one adapter, and the same options. Rows of one route are decoded together, in a `Pool`. During a pass the network is
locked, see `engine.modules`.

Two policies run searches with these parts: `Executor` runs those of one call to their ends, all in step;
`models.scheduler` runs those of many clients, as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from acgpt.common.options import ignore
from acgpt.engine.engine import Engine
from acgpt.engine.length_head import LengthHead
from acgpt.engine.modules import evaluating, turn, unchanged
from acgpt.engine.peft import Switch
from acgpt.engine.steps import Guide, Row
from acgpt.errors import ModelError, QueryError
from acgpt.models.adapters import BARE
from acgpt.models.router import Route, Router, lookup
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

# ---- what a search asks for -----------------------------------------------------------------------------------------


@dataclass
class Rows:
    """A request to draw candidates. Its result is a list of rows that have ended.

    Args:
        sampling: Temperature, truncation and seed.
        stopped: Tells whether a row ends early, after it has drawn a token.
        notice: Called with the number of new tokens whenever some are drawn.
        progress: Called with a row whenever it has drawn a token.
        rows: The query of each row, its route, the number of the sample, and a guide.
    """

    shared: ClassVar = ("sampling",)
    sampling: Sampling
    stopped: Callable[[Row], object] = ignore
    notice: Callable[[int], object] = ignore
    progress: Callable[[Row], object] = ignore
    rows: list[tuple[Query, Route, int, Guide | None]] = field(default_factory=list)

    def add(self, query: Query, sample: int, route: Route, guide: Guide | None = None) -> None:
        """Add a row."""
        self.rows.append((query, route, sample, guide))

    def tasks(self, owner: Any) -> Sequence[RowTask]:
        """Return a task for each row."""
        return [RowTask(owner, self, *row) for row in self.rows]

    def result(self, answers: list[Row]) -> Any:
        """Return the result, from the rows that were drawn."""
        return answers


@dataclass
class Queries:
    """A request for something about each of some queries. Its result is a list with an answer to each of them.

    Args:
        queries: The queries.
        routes: What answers each query.

    Attributes:
        shared: Names of the options that requests must have in common for their queries to be answered in one batch.
    """

    shared: ClassVar[tuple[str, ...]] = ()
    queries: list[Any]
    routes: list[Route]

    def tasks(self, owner: Any) -> Sequence[Task]:
        """Return a task for each query."""
        return [Task(owner, self, query, route) for query, route in zip(self.queries, self.routes, strict=True)]

    def result(self, answers: list[Any]) -> Any:
        """Return the result, from the answers to all queries."""
        return answers


@dataclass
class Samples(Queries):
    """A request for a list of n samples of each query.

    Args:
        n: Number of samples per query.
        sampling: Temperature, truncation and seed.
        notice: Called with the number of new tokens whenever some are drawn.
    """

    shared = ("n", "sampling", "notice")
    n: int
    sampling: Sampling
    notice: Callable[[int], object] = ignore


@dataclass
class Scores(Queries):
    """A request for a list of the log-probabilities of the asked tokens of each query."""


@dataclass
class Top(Scores):
    """`Scores` with the k most probable tokens in each place. Its result has a list of `TopScore` for each query."""

    shared = ("k",)
    k: int


@dataclass
class LengthRequest(Queries):
    """A request for (CLASSES,) log-probabilities of lengths, for each `LengthQuestion`.

    Args:
        head: The head of the routes, see `Executor.length_head`.
    """

    head: LengthHead


@dataclass
class SampleRows(Rows):
    """`Samples` as rows, n for each query, with the same result."""

    n: int = 1

    @classmethod
    def of(cls, request: Samples) -> SampleRows:
        """Return the rows of a request."""
        rows = cls(request.sampling, notice=request.notice, n=request.n)
        for query, route in zip(request.queries, request.routes, strict=True):
            for sample in range(request.n):
                rows.add(query, sample, route)
        return rows

    def result(self, answers: list[Row]) -> Any:
        """Return n samples for each query."""
        ids = [np.array([token for _, token, _ in row.drawn]) for row in answers]
        log_probs = [np.array([log_prob for *_, log_prob in row.drawn]) for row in answers]
        samples = list(zip(ids, log_probs, strict=True))
        return [samples[first : first + self.n] for first in range(0, len(samples), self.n)]


@dataclass(eq=False, slots=True)
class Task:
    """One query of a request.

    Args:
        owner: What the request belongs to, for the policy that runs the search.
        request: The request.
        query: The query.
        route: What answers it.
        answer: The answer, once it is known.
    """

    owner: Any
    request: Rows | Queries
    query: Any
    route: Route
    answer: Any = field(default=None, init=False)

    @property
    def group(self) -> Hashable:
        """What tasks have in common that are computed in one batch."""
        request = self.request
        return type(request), self.route, *[getattr(request, name) for name in request.shared]

    @property
    def slots(self) -> int:
        """Upper bound of the slots that it takes in a batch; BOS is not counted."""
        return 2 * len(self.query)


@dataclass(eq=False, slots=True)
class RowTask(Task):
    """One row of a request. It has a `row` once it has joined a pool."""

    request: Rows
    sample: int
    guide: Guide | None
    row: Row = field(init=False)

    def ended(self) -> bool:
        """Report the token that the row has drawn, and return whether the row has ended."""
        self.request.notice(1)
        self.request.progress(self.row)
        return self.row.done or bool(self.request.stopped(self.row))


Result = TypeVar("Result")
AnyTask = TypeVar("AnyTask", bound=Task)
Request = Rows | Queries
Search = Generator[Request, Any, Result]


# ---- how it is computed ---------------------------------------------------------------------------------------------


def grouped(tasks: Iterable[AnyTask], key: Callable[[AnyTask], Hashable]) -> Iterable[list[AnyTask]]:
    """Return lists of the tasks with the same key, in the order of the first ones."""
    groups: dict[Hashable, list[AnyTask]] = {}
    for task in tasks:
        groups.setdefault(key(task), []).append(task)
    return groups.values()


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

    def answers(self, tasks: Sequence[Task]) -> Sequence[Any]:
        """Return the answers to tasks of one group, in one batch. Rows are drawn by a `Pool` instead."""
        request, route, queries = tasks[0].request, tasks[0].route, [task.query for task in tasks]
        method, future = self.router.method(route), route.future
        with self.inference(route) as engine:
            match request:
                case Top():
                    return method.top_log_probs(engine, queries, request.k, future=future)
                case Scores():
                    return method.log_probs(engine, queries, future=future)
                case LengthRequest():
                    return list(engine.length_log_probs(queries, request.head))
                case Samples():
                    return method.sample(
                        engine.with_notice(request.notice), queries, request.n, request.sampling, future
                    )
        raise AssertionError(request)

    def draws_by_steps(self, request: Samples) -> bool:
        """Return whether samples can be drawn step by step; if not, `answers` draws them, or raises what is wrong."""
        for query, route in zip(request.queries, request.routes, strict=True):
            method = self.router.method(route)
            try:
                method.decoding(self.engine, request.sampling, route.future)
            except QueryError:
                return False
            if not method.can_sample(query, route.future) or not len(query.asked_at):
                return False
        return True

    # ---- the searches of one call -----------------------------------------------------------------------------------

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
            answers = yield from self.results(requests)
        return [results[i] for i in range(len(searches))]

    def results(self, requests: Mapping[int, Request]) -> Generator[None, None, dict[int, Any]]:
        """Return the results of requests, by number; tasks of one group are computed together."""
        tasks = [task for number, request in requests.items() for task in request.tasks(number)]
        for members in grouped(tasks, attrgetter("group")):
            rows = [task for task in members if isinstance(task, RowTask)]
            if rows:
                yield from self.draw(rows)
                continue
            for task, answer in zip(members, self.answers(members), strict=True):
                task.answer = answer
        answers: dict[int, list[Any]] = {number: [] for number in requests}
        for task in tasks:
            answers[task.owner].append(task.answer)
        return {number: request.result(answers[number]) for number, request in requests.items()}

    def draw(self, tasks: list[RowTask]) -> Generator[None, None, None]:
        """Draw the rows of a group, those of about the same length together; yield after each step."""
        tasks.sort(key=lambda task: len(task.query.asked_at))
        for start in range(0, len(tasks), self.engine.most_rows):
            drawn = batch = tasks[start : start + self.engine.most_rows]
            pool = Pool(self, batch[0].route, batch[0].request.sampling)
            pool.join(batch)
            while True:
                ended = [task for task in drawn if task.ended()]
                yield
                pool.release(ended)
                if not pool.tasks:
                    break
                drawn = pool.step()
            for task in batch:
                task.answer = task.row


class Pool:
    """Rows of one route that are decoded together.

    Args:
        executor: Runs the passes.
        route: What answers the queries of the rows.
        sampling: Sampling options that are likely for the rows; each row has its own.

    Attributes:
        tasks: The rows, by the id of the active row.
    """

    def __init__(self, executor: Executor, route: Route, sampling: Sampling) -> None:
        self.executor, self.route = executor, route
        engine = executor.engine.with_mask(executor.mask(route.adapter))
        self.decoding = executor.router.method(route).decoding(engine, sampling, route.future)
        self.tasks: dict[int, RowTask] = {}

    @property
    def bytes(self) -> int:
        """Size of the cache of keys and values."""
        rows, slots = self.decoding.decoder.size[:2] if self.decoding.decoder is not None else (0, 0)
        return rows * slots * self.decoding.engine.slot_bytes

    def join(self, tasks: Sequence[RowTask]) -> Sequence[Row]:
        """Add rows, in one batch, and draw the first token of each; return the rows."""
        same: dict[Query, Query] = {}  # equal queries share a prefill
        with self.executor.inference(self.route):
            rows = self.decoding.prefill(
                [same.setdefault(task.query, task.query) for task in tasks],
                [task.sample for task in tasks],
                samplings=[task.request.sampling for task in tasks],
                guides=[task.guide for task in tasks],
            )
        for task, row in zip(tasks, rows, strict=True):
            task.row, self.tasks[id(row)] = row, task
        return rows

    def step(self) -> list[RowTask]:
        """Advance all rows by one step; return those that drew a token."""
        with self.executor.inference(self.route, stepping=True):
            return [self.tasks[id(row)] for row in self.decoding.step()]

    def release(self, tasks: Sequence[RowTask]) -> None:
        """Remove rows, whether they have ended or not."""
        self.decoding.release([task.row for task in tasks])
        for task in tasks:
            del self.tasks[id(task.row)]
