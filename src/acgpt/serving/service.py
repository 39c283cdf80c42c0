"""What all routes of the server share: asking the model, with a limit of time, until the client hangs up.

make       reads the request, in a worker thread: tokenizing a text of megabytes must not stop the event loop
submit     hands the search to the scheduler, which may refuse it
wait       until the answer, the time limit, or the client's disconnection; the latter two cancel the search
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import InvalidStateError
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from acgpt.errors import QueryError
from acgpt.models.answers import Piece, Score
from acgpt.models.executor import Search
from acgpt.models.language_model import LanguageModel
from acgpt.serving.options import LimitOptions
from acgpt.serving.scheduler import Draining, Job, Scheduler

Result = TypeVar("Result")
Item = TypeVar("Item")


class TimeExceeded(Exception):
    """A request took longer than it may."""


class Disconnected(Exception):
    """The client has hung up, so that nobody waits for the answer."""


@runtime_checkable
class Counted(Protocol):
    """An answer that says how many tokens were drawn for it."""

    drawn_tokens: int


@dataclass
class Usage:
    """What a request has used, for the access log.

    Args:
        tokens: Number of tokens in its answers, drawn or scored; `None` if it asked no question.
    """

    tokens: int | None = None

    def add(self, answer: Any) -> None:
        """Count the tokens of an answer, or of each of several."""
        if isinstance(answer, list):
            for each in answer:
                self.add(each)
        elif isinstance(answer, Piece):
            self.add(answer.fill)
        elif isinstance(answer, Score):
            self.tokens = (self.tokens or 0) + len(answer.tokens)
        elif isinstance(answer, Counted):
            self.tokens = (self.tokens or 0) + answer.drawn_tokens


USAGE: ContextVar[Usage | None] = ContextVar("usage", default=None)  # of the request that is being answered


class Service:
    """Asks a model on behalf of requests.

    Args:
        lm: The model.
        scheduler: Answers the searches.
        seconds: Time that a request may take, from its arrival to its answer. Default: that of the limits.
        limits: Limits of requests.
        name: Name of the model, as clients see it.
    """

    def __init__(
        self,
        lm: LanguageModel,
        scheduler: Scheduler,
        *,
        seconds: float | None = None,
        limits: LimitOptions | None = None,
        name: str = "acgpt",
    ) -> None:
        self.lm, self.scheduler, self.name = lm, scheduler, name
        self.limits = limits or LimitOptions()
        self.seconds = self.limits.timeout if seconds is None else seconds
        self.preparing = threading.Lock()  # tokenizers and caches of constraints are used by one thread at a time

    @cached_property
    def most_characters(self) -> int:
        """Maximum number of characters of a text that the model can read: longer ones are not even tokenized."""
        return self.lm.positions * max(map(len, self.lm.tokenizer.get_vocab()))

    def check_characters(self, characters: int) -> None:
        """Check that a text is not so long that the model cannot read it, however it is tokenized.

        Raises:
            QueryError: It is.
        """
        if characters > self.most_characters:
            raise QueryError(
                f"the text has {characters} characters, more than fit into the model's {self.lm.positions} positions."
            )

    def stop(self) -> None:
        """Refuse new searches and fail accepted ones, without waiting for the pass that is being computed."""
        self.scheduler.close(drain=False, timeout=0)
        for job in list(self.scheduler.jobs):  # a copy: the thread of the scheduler changes it
            with contextlib.suppress(InvalidStateError):
                job.future.set_exception(Draining("the server has stopped."))

    async def prepare(self, make: Callable[[], Result]) -> Result:
        """Call a function that tokenizes text, in a worker thread."""

        def made() -> Result:
            with self.preparing:
                return make()

        return await run_in_threadpool(made)

    async def submit(self, make: Callable[[], Search[Result]]) -> Job[Result]:
        """Make a search in a worker thread, and submit it."""
        return self.scheduler.submit(await self.prepare(make))

    async def ask(
        self, make: Callable[[], Search[Result]], request: Request | None = None, *, seconds: float | None = None
    ) -> Result:
        """Return the result of one search.

        Args:
            make: Makes the search; errors of the input are raised by it.
            request: The request whose client waits; its disconnection cancels the search.
            seconds: Time limit. Default: that of the service.

        Raises:
            Refused: The scheduler does not accept the search.
            TimeExceeded: The time is over.
            Disconnected: The client has hung up.
        """
        (result,) = await self.ask_all([make], request, seconds=seconds)
        return result

    async def ask_all(
        self,
        makes: list[Callable[[], Search[Result]]],
        request: Request | None = None,
        *,
        seconds: float | None = None,
    ) -> list[Result]:
        """Return the results of several searches, in their order; if one fails, the others are cancelled."""
        jobs: list[Job[Result]] = []
        limit = self.seconds if seconds is None else seconds
        hung_up = None if request is None else asyncio.ensure_future(disconnection(request))
        try:
            async with asyncio.timeout(limit):
                for make in makes:
                    jobs.append(await self.submit(make))
                results = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
                results.add_done_callback(seen)
                waits: set[asyncio.Future[Any]] = {results} if hung_up is None else {results, hung_up}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not results.done():
                    results.cancel()
                    raise Disconnected("the client has hung up.")
                if any(job.future.cancelled() for job in jobs):
                    raise Draining("the server has stopped.")
                answers = list(await results)
                if usage := USAGE.get():
                    usage.add(answers)
                return answers
        except TimeoutError as error:
            raise too_slow(limit) from error
        finally:
            for job in jobs:
                if not job.future.done():
                    job.cancel()
            if hung_up is not None:
                hung_up.cancel()

    async def stream(
        self,
        make: Callable[[Callable[[Item], object]], Search[Any]],
        *,
        seconds: float | None = None,
    ) -> AsyncIterator[Item]:
        """Yield what a search reports while it runs. If the consumer stops, the search is cancelled.

        Args:
            make: Makes the search; it is passed a function that reports an item, from any thread.
            seconds: Time limit. Default: that of the service.

        Raises:
            Refused: The scheduler does not accept the search. Raised at the first item, as all errors are.
            TimeExceeded: The time is over.
        """
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()
        ended = object()

        def report(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(items.put_nowait, item)

        limit, job = self.seconds if seconds is None else seconds, None
        deadline, timer = loop.time() + limit, None
        try:
            job = await self.submit(lambda: make(report))
            timer = loop.call_at(deadline, job.cancel)  # also if nobody takes the items
            job.future.add_done_callback(lambda _: report(ended))
            while True:
                async with asyncio.timeout_at(deadline):
                    item = await items.get()
                if item is ended:
                    break
                if usage := USAGE.get():
                    usage.add(item)
                yield item
            if job.future.cancelled():
                raise too_slow(limit) if loop.time() >= deadline else Draining("the server has stopped.")
            job.future.result()
        except TimeoutError as error:
            raise too_slow(limit) from error
        finally:
            if timer is not None:
                timer.cancel()
            if job is not None and not job.future.done():
                job.cancel()


def too_slow(seconds: float) -> TimeExceeded:
    """Return the error for a request that took longer than it may."""
    return TimeExceeded(
        f"the request took longer than {seconds:g} seconds, which is the limit. Ask for a shorter text or fewer "
        "tokens, or start the server with a larger --timeout."
    )


def seen(results: asyncio.Future[Any]) -> None:
    """Look at the error of a future that nobody may wait for any more; otherwise asyncio logs it."""
    if not results.cancelled():
        results.exception()


async def disconnection(request: Request) -> None:
    """Return when the client has hung up; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
