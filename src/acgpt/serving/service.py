"""What all routes of the server share: asking the model, with a limit of time, until the client hangs up.

make       reads the request, in a worker thread: tokenizing a text of megabytes must not stop the event loop
submit     hands the search to the scheduler, which may refuse it
wait       until the answer, the deadline, or the client's disconnection; the latter two cancel the search

A request has one deadline, which `middleware.Observed` sets when it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.requests import Request
from starlette.responses import StreamingResponse

from acgpt.errors import Draining, QueryError, log_failure
from acgpt.models.adapters import BARE
from acgpt.models.ask import Choice, Piece, Score
from acgpt.models.executor import Search
from acgpt.models.language_model import LanguageModel
from acgpt.models.scheduler import Job, Scheduler
from acgpt.serving.errors import (
    DISCONNECTED,
    TIME_EXCEEDED,
    UNEXPECTED,
    InvalidField,
    Rejected,
    UnknownModel,
    error_body,
    kind_of,
)
from acgpt.serving.options import LimitOptions
from acgpt.serving.patterns import Patterns

Result = TypeVar("Result")
Item = TypeVar("Item")


@runtime_checkable
class Counted(Protocol):
    """An answer that says how many tokens were drawn for it."""

    drawn_tokens: int


# Of the request that is being answered:
USAGE: ContextVar[list[int]] = ContextVar("usage")  # numbers of tokens in its answers, drawn or scored
DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)  # by time.monotonic()


def note_usage(answer: Any) -> None:
    """Note the tokens of an answer, or of each of several, for the access log."""
    if isinstance(answer, list):
        for each in answer:
            note_usage(each)
    elif isinstance(answer, Piece):
        note_usage(answer.fill)
    elif isinstance(answer, Score | Counted):
        USAGE.get([]).append(len(answer.tokens) if isinstance(answer, Score) else answer.drawn_tokens)


class Service:
    """Asks a model on behalf of requests.

    Args:
        lm: The model.
        scheduler: Answers the searches.
        limits: Limits of requests.
        name: Name of the model, as clients see it.
    """

    def __init__(
        self,
        lm: LanguageModel,
        scheduler: Scheduler,
        *,
        limits: LimitOptions | None = None,
        name: str = "acgpt",
    ) -> None:
        self.lm, self.scheduler, self.name = lm, scheduler, name
        self.limits = limits or LimitOptions()
        self.seconds = self.limits.timeout
        # One thread: a tokenizer cannot be used by several at a time.
        self.worker = ThreadPoolExecutor(1, "acgpt-prepare")
        self.patterns = Patterns()

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

    @property
    def models(self) -> list[str]:
        """The names that a request may have as its model: the served one, its adapters, and "none"."""
        adapters = self.lm.adapters
        return list(dict.fromkeys([self.name, *adapters, *([BARE] if adapters else [])]))

    def adapter_of(self, model: str | None) -> Choice:
        """Return the adapter that the name of a model selects: the served name, an adapter, or "none".

        Raises:
            InvalidField: There is no model of this name.
        """
        if model is None or model == self.name:
            return None
        if model not in self.models:
            problem = f"there is no model {model!r}. This server has {', '.join(self.models)}."
            raise InvalidField("model", UnknownModel(problem))
        return model

    def stop(self) -> None:
        """Refuse new searches and fail accepted ones, without waiting for the pass that is being computed."""
        self.scheduler.close(drain=False, timeout=0)
        for job in list(self.scheduler.jobs):  # a copy: the thread of the scheduler changes it
            with contextlib.suppress(InvalidStateError):
                job.future.set_exception(Draining("the server has stopped."))

    @property
    def deadline(self) -> float:
        """When the request that is being answered must be answered, by `time.monotonic()`, which asyncio uses, too."""
        deadline = DEADLINE.get()
        return time.monotonic() + self.seconds if deadline is None else deadline

    async def prepare(self, make: Callable[[], Result]) -> Result:
        """Call a function that tokenizes text, in a worker thread; one at a time.

        Raises:
            Rejected: The time is over. A function that has begun goes on, but nobody waits for it.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                return await asyncio.wrap_future(self.worker.submit(make))
        except TimeoutError as error:
            raise too_slow(self.seconds) from error

    async def submit(self, make: Callable[[], Search[Result]]) -> Job[Result]:
        """Make a search in a worker thread, and submit it."""
        return self.scheduler.submit(await self.prepare(make))

    async def wait(self, work: Awaitable[Result], request: Request) -> Result:
        """Return the result of some work; at the deadline, or if the client hangs up, the work is cancelled.

        Args:
            work: The work.
            request: The request whose client waits.

        Raises:
            Rejected: The time is over, or the client has hung up.
        """
        task = asyncio.ensure_future(work)
        task.add_done_callback(seen)
        waits: list[asyncio.Future[Any]] = [task, asyncio.ensure_future(disconnection(request))]
        try:
            async with asyncio.timeout_at(self.deadline):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            raise too_slow(self.seconds) from error
        finally:
            done = task.done()
            for each in waits:
                each.cancel()
        if not done:
            raise Rejected(DISCONNECTED, "the client has hung up.")
        return task.result()

    async def ask_all(self, makes: list[Callable[[], Search[Result]]], request: Request) -> list[Result]:
        """Return the results of several searches, in their order; if one fails, the others are cancelled.

        Args:
            makes: Make the searches; errors of the input are raised by them.
            request: The request whose client waits; its disconnection cancels the searches.

        Raises:
            Refused: The scheduler does not accept a search.
            Rejected: The time is over, or the client has hung up.
        """
        answers = await self.wait(self._answers(makes), request)
        note_usage(answers)
        return answers

    async def _answers(self, makes: list[Callable[[], Search[Result]]]) -> list[Result]:
        jobs: list[Job[Result]] = []
        try:
            for make in makes:
                jobs.append(await self.submit(make))
            results = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
            results.add_done_callback(seen)
            await asyncio.wait([results])
            if any(job.future.cancelled() for job in jobs):
                raise Draining("the server has stopped.")
            return list(results.result())
        finally:
            for job in jobs:
                if not job.future.done():
                    job.cancel()

    async def stream(self, make: Callable[[Callable[[Item], object]], Search[Any]]) -> AsyncGenerator[Item]:
        """Yield what a search reports while it runs. If the consumer stops, the search is cancelled.

        Args:
            make: Makes the search; it is passed a function that reports an item, from any thread.

        Raises:
            Refused: The scheduler does not accept the search. Raised at the first item, as all errors are.
            Rejected: The time is over.
        """
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()
        ended = object()

        def report(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(items.put_nowait, item)

        deadline, timer, job = self.deadline, None, None
        try:
            job = await self.submit(lambda: make(report))
            timer = loop.call_at(deadline, job.cancel)  # also if nobody takes the items
            job.future.add_done_callback(lambda _: report(ended))
            while True:
                async with asyncio.timeout_at(deadline):
                    item = await items.get()
                if item is ended:
                    break
                note_usage(item)
                yield item
            if job.future.cancelled():
                raise too_slow(self.seconds) if loop.time() >= deadline else Draining("the server has stopped.")
            job.future.result()
        except TimeoutError as error:
            raise too_slow(self.seconds) from error
        finally:
            if timer is not None:
                timer.cancel()
            if job is not None and not job.future.done():
                job.cancel()

    async def event_stream(
        self,
        make: Callable[[Callable[[Any], object]], Search[Any]],
        request: Request,
        encode: Callable[[AsyncGenerator[Any]], AsyncGenerator[Any]],
        last: str = "",
    ) -> StreamingResponse:
        """Return a reply that sends what a search reports as server-sent events, see `event`.

        Errors before the first event are replies with a status of their own; later ones are an event, the last one. If
        the client hangs up, the search is cancelled.

        Args:
            make: Makes the search; it is passed a function that reports an item.
            request: The request.
            encode: Makes objects for JSON from the items, one for each event.
            last: What is sent at the end, if nothing has failed.
        """
        items: AsyncGenerator[Any] = self.stream(make)
        objects = encode(items)
        first = await self.wait(anext(objects), request)

        async def events() -> AsyncIterator[str]:
            try:
                yield event(first)
                async for fields in objects:
                    yield event(fields)
                if last:
                    yield last
            except Exception as error:
                if kind_of(error) is UNEXPECTED:
                    log_failure(error)
                yield event(error_body(error), "error")
            finally:
                await objects.aclose()
                await items.aclose()

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def event(fields: Any, name: str | None = None) -> str:
    r"""Return one server-sent event: `data: {"text": " Fr", …}`, after its name (`event: error`) if it has one."""
    data = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def too_slow(seconds: float) -> Rejected:
    """Return the error for a request that took longer than it may."""
    return Rejected(
        TIME_EXCEEDED,
        f"the request took longer than {seconds:g} seconds, which is the limit. Ask for a shorter text or fewer "
        "tokens, or start the server with a larger --timeout.",
    )


def seen(results: asyncio.Future[Any]) -> None:
    """Look at the error of a future that nobody may wait for any more; otherwise asyncio logs it."""
    if not results.cancelled():
        results.exception()


async def disconnection(request: Request) -> None:
    """Return when the client has hung up; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
