"""What all routes of the server share: asking the model within limits, until the client hangs up.

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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import fields
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.requests import Request
from starlette.responses import StreamingResponse

from acgpt.errors import Draining, InputError, QueryError, TemplateError
from acgpt.models.adapters import BARE
from acgpt.models.ask import MAX_TOKENS, Choice, DrawingOptions, FillAsk, LengthsAsk, Piece, SampleAsk, Score
from acgpt.models.executor import Search
from acgpt.models.language_model import LanguageModel
from acgpt.models.scheduler import Job, Scheduler
from acgpt.models.searches import parse_gaps
from acgpt.query.lengths import LONGEST
from acgpt.query.query import Query
from acgpt.query.template import Given, Part, parse
from acgpt.query.text import encode_text
from acgpt.serving.errors import InvalidField, LimitExceeded, Rejected, error_body, log_unexpected
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


FIELDS = {item.name for kind in (FillAsk, SampleAsk, LengthsAsk) for item in fields(kind)}


@contextlib.contextmanager
def naming(param: str) -> Iterator[None]:
    """Let errors name the field that is wrong.

    Args:
        param: The field of the question. Errors in other arguments begin with the name of these.
    """
    try:
        yield
    except InvalidField:
        raise
    except (TemplateError, QueryError, LimitExceeded) as error:
        raise InvalidField(param, error) from error
    except InputError as error:
        name = str(error).split(" ", 1)[0]
        raise InvalidField(name if name in FIELDS else param, error) from error


class Service:
    """Asks a model on behalf of requests.

    Args:
        lm: The model.
        scheduler: Answers the searches.
        limits: Limits of requests.
        name: Name of the model, as clients see it.
    """

    def __init__(
        self, lm: LanguageModel, scheduler: Scheduler, *, limits: LimitOptions | None = None, name: str = "acgpt"
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
            raise InvalidField("model", Rejected("model_not_found", problem))
        return model

    def parsed(self, question: str | Query) -> list[Part]:
        """Parse a template, and check that its text is not so long that it need not be tokenized."""
        if isinstance(question, Query):
            return []
        slots = question.count("{{") - question.count("\\{{")
        if slots > self.lm.positions:
            raise QueryError(f"the template has {slots} slots; the model has {self.lm.positions} positions.")
        parts = parse(question)
        texts = ([part.text] if isinstance(part, Given) else part.alternatives for part in parts)
        self.check_characters(sum(max(map(len, own), default=0) for own in texts))  # with the longest alternatives
        return parts

    def gaps_of(self, template: str) -> list[Part]:
        """Parse a template that must have gaps, as `parsed`."""
        self.parsed(template)
        return parse_gaps(template)

    def check_questions(self, field: str, entries: Sequence[Any]) -> None:
        """Check that a list does not have too many questions."""
        if len(entries) > (most := self.limits.max_questions):
            error = LimitExceeded(f"{field} has {len(entries)} entries; at most {most} are allowed (max_questions).")
            raise InvalidField(field, error)

    def check_numbers(self, numbers: Mapping[str, int | None]) -> None:
        """Check the numbers of samples, fills and candidates of a request, by field."""
        for name, number in numbers.items():
            if (number or 0) > (most := self.limits.max_n):
                raise InvalidField(name, LimitExceeded(f"{name} is {number}; at most {most} is allowed (max_n)."))

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

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Cancel what is awaited inside at the deadline.

        Raises:
            Rejected: The time is over.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                yield
        except TimeoutError as error:
            raise self.too_slow() from error

    def too_slow(self) -> Rejected:
        """Return the error for a request that took longer than it may."""
        return Rejected(
            "time_exceeded",
            f"the request took longer than {self.seconds:g} seconds, which is the limit. Ask for a shorter text or "
            "fewer tokens, or start the server with a larger --timeout.",
        )

    async def prepare(self, make: Callable[[], Result]) -> Result:
        """Call a function that tokenizes text, in a worker thread; one at a time.

        Raises:
            Rejected: The time is over. A function that has begun goes on, but nobody waits for it.
        """
        async with self.in_time():
            return await asyncio.wrap_future(self.worker.submit(make))

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
            async with self.in_time():
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = task.done()
            for each in waits:
                each.cancel()
        if not done:
            raise Rejected("disconnected", "the client has hung up.")
        return task.result()

    async def ask_all(self, makes: Sequence[Callable[[], Search[Result]]], request: Request) -> list[Result]:
        """Return the results of several searches, in their order; if one fails, the others are cancelled.

        Args:
            makes: Make the searches; errors of the input are raised by them.
            request: The request whose client waits; its disconnection cancels the searches.

        Raises:
            Refused: The scheduler does not accept a search.
            Rejected: The time is over, or the client has hung up.
        """
        jobs: list[Job[Result]] = []

        async def answers() -> list[Result]:
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

        found = await self.wait(answers(), request)
        note_usage(found)
        return found

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
                async with self.in_time():
                    item = await items.get()
                if item is ended:
                    break
                note_usage(item)
                yield item
            if job.future.cancelled():
                raise self.too_slow() if loop.time() >= deadline else Draining("the server has stopped.")
            job.future.result()
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
                log_unexpected(error)
                yield event(error_body(error), "error")
            finally:
                await objects.aclose()
                await items.aclose()

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class Budget:
    """Counts the tokens of a request, up to the limit of the server.

    Args:
        service: Has the limits, and the model that tokenizes.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.tokens = service, 0

    def spend(self, tokens: int, param: str | None = None) -> None:
        """Count tokens.

        Args:
            tokens: Number of tokens.
            param: The field that asks for them, for errors. Default: that of the question.

        Raises:
            LimitExceeded: The request has too many of them; an `InvalidField` if it is known of which field.
        """
        self.tokens += tokens
        if self.tokens > (most := self.service.limits.max_tokens_per_request):
            error = LimitExceeded(
                f"the request has {self.tokens} tokens, those that it asks for included; at most {most} are allowed "
                "(max_tokens_per_request)."
            )
            raise error if param is None else InvalidField(param, error)

    def spend_on_gaps(
        self, parts: Sequence[Part], ask: DrawingOptions | LengthsAsk, n: int = 1, param: str | None = None
    ) -> None:
        """Count the tokens of a template with gaps: those of its text, and the most that it can ask for.

        Args:
            parts: The parsed template.
            ask: Has the maximum number of tokens of a gap.
            n: Number of candidates.
            param: The field that asks for so many tokens, for errors. Default: that of the question.
        """
        lm, asked, texts = self.service.lm, 0, []
        longest = ask.max_tokens or (LONGEST if self.service.scheduler.executor.heads else MAX_TOKENS)
        for part in parts:
            if isinstance(part, Given):
                texts.append(part.text)
            elif part.gap is not None:
                most = max(longest, part.gap.least) if part.gap.most is None else part.gap.most
                asked += min(most, lm.positions)
            else:
                texts += part.alternatives[:1]
                asked += part.tokens or 0
        self.spend(len(encode_text("".join(texts), lm.tokenizer)))
        self.spend(n * asked, param)


def event(fields: Any, name: str | None = None) -> str:
    r"""Return one server-sent event: `data: {"text": " Fr", …}`, after its name (`event: error`) if it has one."""
    data = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def seen(results: asyncio.Future[Any]) -> None:
    """Look at the error of a future that nobody may wait for any more; otherwise asyncio logs it."""
    if not results.cancelled():
        results.exception()


async def disconnection(request: Request) -> None:
    """Return when the client has hung up; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
