"""Clients of `acgpt serve`: the questions of `LanguageModel`, answered by a server.

    lm = acgpt.Client("http://localhost:8080")
    lm.fill("The capital of {{_}} is Paris.", n=1)[0].text

    async with acgpt.AsyncClient("http://localhost:8080") as lm:
        score = await lm.log_prob("The capital of {{Italy}} is Rome.")

The answers are the same dataclasses as those of `LanguageModel`. Neither torch nor transformers are imported.

Both clients ask by the same generators, which yield requests and pauses (`Flow`); each client carries them out.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import count
from typing import Any, Generic, Self, TypeVar

from acgpt.errors import InputError, QueryError, ServerError, TemplateError
from acgpt.models.answer_json import read
from acgpt.models.ask import Ask, FillAsk, LengthsAsk, Piece, RankAsk, SampleAsk, ScoreAsk, StreamAsk, asks
from acgpt.query.query import Query
from acgpt.query.template import gap_between
from acgpt.version import __version__

try:
    import httpx
except ModuleNotFoundError as error:
    raise InputError("a client needs the package httpx: pip install 'acgpt[client]'") from error

Result = TypeVar("Result")
HttpClient = TypeVar("HttpClient", httpx.Client, httpx.AsyncClient)
Request = tuple[str, str, dict[str, Any] | None]  # verb, route and body
Flow = Generator[Request | float, Any, Result]  # yields requests and seconds to pause; is sent the replies

BATCH = 16  # questions of a list in one request, or as many as the server takes
RETRIED = (429, 503)  # status of replies after which a request is sent again
FINAL = ("out_of_memory", "broken")  # codes of such replies after which it would fail again
LONGEST_PAUSE = 30.0  # seconds between two attempts


# ---- requests -------------------------------------------------------------------------------------------------------


def batch_size(info: Mapping[str, Any]) -> int:
    """Return the number of questions of a list in one request to a server.

    Args:
        info: What the server says of its model and its limits.
    """
    limits = info.get("limits", {})
    return max(1, min(BATCH, *(int(limits.get(name, BATCH)) for name in ("max_questions", "queue"))))


def sent(ask: Ask) -> dict[str, Any]:
    """Return the fields of a question as JSON, without those that have their default."""
    body = {item.name: getattr(ask, item.name) for item in fields(ask) if item.name not in ("notice", ask.asks)}
    defaults = {item.name: item.default for item in fields(ask)}
    body = {name: value for name, value in body.items() if value is not None and value != defaults[name]}
    if body.get("adapter") is False:
        body["adapter"] = "none"
    return body


def to_question(question: str | Query) -> Any:
    """Return a question as JSON."""
    if isinstance(question, Query):
        return {name: value for name, value in asdict(question).items() if value is not None}
    return question


# ---- replies --------------------------------------------------------------------------------------------------------


def error_fields(content: bytes) -> tuple[str, str] | None:
    """Return the message and the code of an error; `None` if it has another shape than those of a server of acgpt."""
    try:
        fields = json.loads(content)["error"]
        return str(fields["message"]), str(fields["code"])
    except (ValueError, KeyError, TypeError):
        return None


def error_of(message: str, code: str, status: int | None) -> Exception:
    """Return the exception for an error of the server.

    An invalid request is an `InputError`, or a `TemplateError` or `QueryError` where the server raised one. All others
    are a `ServerError`.
    """
    if code == "invalid_template":
        problem, _, template = message.partition("\n")
        error = TemplateError(problem, template, 0)
        error.args = (message,)  # the server's message points at the character
        return error
    if code == "invalid_query":
        return QueryError(message)
    if code == "invalid_api_key":  # the server's message is for those who write headers
        message = "the API key is missing or wrong. Set the environment variable ACGPT_API_KEY"
        return ServerError(f"{message}, or in Python the argument api_key of the client.", status, code)
    if status == 422 or code in ("invalid_value", "limit_exceeded"):
        return InputError(message)
    return ServerError(message, status, code or None)


def unreachable(url: str, error: Exception) -> ServerError:
    """Return the error for a request without a reply."""
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"the server at {url} has not answered in time.")
    return ServerError(f"cannot reach the server at {url}: {error or type(error).__name__}. Start it with acgpt serve.")


def piece_in(line: str) -> Piece | None:
    """Return the piece in a line of server-sent events; `None` if it has none.

    Raises:
        InputError, ServerError: The line is an error.
    """
    key, _, value = line.partition(": ")
    if key != "data":
        return None
    fields = json.loads(value)
    if "error" in fields:
        raise error_of(fields["error"]["message"], fields["error"]["code"], None)
    piece: Piece = read(Piece, fields)
    return piece


# ---- clients --------------------------------------------------------------------------------------------------------


class Questions(ABC, Generic[HttpClient]):
    """What both clients share: the address, the key, and the methods of `LanguageModel`."""

    _make: Callable[..., HttpClient]  # the class of httpx

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        timeout: float = 180.0,
        retries: int = 3,
        **options: Any,
    ) -> None:
        key = os.environ.get("ACGPT_API_KEY") if api_key is None else api_key
        headers = {"User-Agent": f"acgpt/{__version__}"} | ({"Authorization": f"Bearer {key}"} if key else {})
        url = base_url if "://" in base_url else f"http://{base_url}"
        self.base_url, self.retries = url.rstrip("/").removesuffix("/v1"), retries  # OpenAI's clients want the /v1
        try:
            self._http: HttpClient = self._make(base_url=self.base_url, headers=headers, timeout=timeout, **options)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise InputError(f"{base_url} is not the address of a server: {error}.") from error
        self._info: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    # ---- questions ------------------------------------------------------------------------------------------------

    @asks(ScoreAsk)
    def log_prob(self, ask: ScoreAsk) -> Any:
        """Return the log-probability of the asked tokens, see `LanguageModel.log_prob`."""
        return self._run(self._ask(ask))

    @asks(SampleAsk)
    def sample(self, ask: SampleAsk) -> Any:
        """Sample the asked tokens, see `LanguageModel.sample`; its option `notice` is without effect."""
        return self._run(self._ask(ask))

    @asks(FillAsk)
    def fill(self, ask: FillAsk) -> Any:
        """Fill the gaps of a template, see `LanguageModel.fill`; its option `notice` is without effect."""
        return self._run(self._ask(ask))

    def infill(self, prefix: str, suffix: str, n: int = 1, **options: Any) -> Any:
        """Fill the gap between two strings, see `LanguageModel.infill`."""
        return self.fill(gap_between(prefix, suffix), n, **options)

    @asks(RankAsk)
    def rank(self, ask: RankAsk) -> Any:
        """Rank the alternatives of a template, or of each of a list, see `LanguageModel.rank`."""
        return self._run(self._ask(ask))

    @asks(LengthsAsk)
    def lengths(self, ask: LengthsAsk) -> Any:
        """Return the probability of each length of a gap, see `LanguageModel.lengths`."""
        return self._run(self._ask(ask))

    def query(self, template: str) -> Any:
        """Tokenize a template, see `LanguageModel.query`."""

        def flow() -> Flow[Query]:
            reply = yield from self._send("POST", "query", {"template": to_question(template)})
            query: Query = read(Query, reply["results"][0])
            return query

        return self._run(flow())

    def pieces(self, tokens: Sequence[int]) -> Any:
        """Return the text that each token contributes, see `LanguageModel.pieces`."""

        def flow() -> Flow[list[str]]:
            return list((yield from self._send("POST", "pieces", {"tokens": list(tokens)}))["results"])

        return self._run(flow())

    # ---- internals ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _run(self, flow: Flow[Any]) -> Any:
        """Carry out a flow, and return its result."""

    def _ask(self, ask: Ask) -> Flow[Any]:
        """Ask one question or a list of them, in as many requests as it takes."""
        entries = [to_question(one.question) for one in ask.each()]
        batch = batch_size((yield from self._known())) if len(entries) > 1 else BATCH
        results: list[Any] = []
        for start in range(0, len(entries), batch):
            reply = yield from self._send("POST", ask.name, {**sent(ask), ask.asks: entries[start : start + batch]})
            results += [read(ask.answer, answer) for answer in reply["results"]]
        return results[0] if ask.single else results

    def _known(self) -> Flow[dict[str, Any]]:
        """Ask the server once what it says of its model: name, method, adapters, positions, limits."""
        if self._info is None:
            self._info = yield from self._send("GET", "model", None)
        return self._info

    def _send(self, verb: str, method: str, body: dict[str, Any] | None) -> Flow[dict[str, Any]]:
        """Send a request, again while the server is busy, and return the JSON of the reply."""
        for attempt in count():
            response = yield verb, f"/v1/{method}", body
            if response.status_code == 200:
                break
            yield self._pause(response, attempt)
        reply: dict[str, Any] = response.json()
        return reply

    def _pause(self, response: httpx.Response, attempt: int) -> float:
        """Return the seconds to wait before a request is sent again: as the server says, or longer each time.

        Raises:
            InputError, ServerError: The reply is an error that another attempt would not end.
        """
        status, fields = response.status_code, error_fields(response.content)
        message, code = fields or (f"the server has answered with status {status}.", "")
        if status not in RETRIED or code in FINAL or attempt == self.retries:
            raise error_of(message, code, status)
        try:
            return min(LONGEST_PAUSE, max(0.0, float(response.headers["retry-after"])))
        except (KeyError, ValueError):
            return min(LONGEST_PAUSE, float(2**attempt) / 2)


class Client(Questions[httpx.Client]):
    """A model that a server has loaded (`acgpt serve`), with the methods of `LanguageModel`.

    Args:
        base_url: Address of the server, such as "http://localhost:8080".
        api_key: API key. Default: the environment variable ACGPT_API_KEY.
        timeout: Seconds to wait for a reply.
        retries: How often a request is sent again if the server is busy (status 429 or 503), after the time that it
            asks for.
        **options: Options of `httpx.Client`, such as `verify`.

    Raises:
        InputError: A question is invalid, as for `LanguageModel`.
        ServerError: The server cannot be reached, or cannot answer; `status` is that of its reply.
    """

    _make = httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @asks(StreamAsk)
    def stream(self, ask: StreamAsk) -> Iterator[Piece]:
        """Fill the gaps of a template and yield the text as it is made, see `LanguageModel.stream`.

        If the iterator is closed, the server stops.
        """
        body = {**sent(ask), "template": ask.question, "stream": True}
        for attempt in count():
            try:
                with self._http.stream("POST", "/v1/fill", json=body) as response:
                    if response.status_code == 200:
                        yield from filter(None, map(piece_in, response.iter_lines()))
                        return
                    response.read()
            except httpx.HTTPError as error:
                raise unreachable(self.base_url, error) from error
            time.sleep(self._pause(response, attempt))

    @property
    def info(self) -> dict[str, Any]:
        """What the server says of its model: name, method, adapters, positions, limits."""
        info: dict[str, Any] = self._run(self._known())
        return info

    @property
    def reads_future(self) -> bool:
        """Whether the model reads given tokens after a slot."""
        return bool(self.info["reads_future"])

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters."""
        return list(self.info["adapters"])

    @property
    def router(self) -> bool:
        """Whether the adapter is chosen for each query."""
        return bool(self.info["router"])

    def _run(self, flow: Flow[Any]) -> Any:
        reply: Any = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                return end.value
            if isinstance(step, float):
                time.sleep(step)
                continue
            verb, route, body = step
            try:
                reply = self._http.request(verb, route, json=body)
            except httpx.HTTPError as error:
                raise unreachable(self.base_url, error) from error


class AsyncClient(Questions[httpx.AsyncClient]):
    """`Client` for asyncio: the same methods as coroutines. `**options` are those of `httpx.AsyncClient`."""

    _make = httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @asks(StreamAsk)
    async def stream(self, ask: StreamAsk) -> AsyncIterator[Piece]:
        """Fill the gaps of a template and yield the text as it is made, see `LanguageModel.stream`."""
        body = {**sent(ask), "template": ask.question, "stream": True}
        for attempt in count():
            try:
                async with self._http.stream("POST", "/v1/fill", json=body) as response:
                    if response.status_code == 200:
                        async for line in response.aiter_lines():
                            if (piece := piece_in(line)) is not None:
                                yield piece
                        return
                    await response.aread()
            except httpx.HTTPError as error:
                raise unreachable(self.base_url, error) from error
            await asyncio.sleep(self._pause(response, attempt))

    async def info(self) -> dict[str, Any]:
        """Return what the server says of its model: name, method, adapters, positions, limits."""
        info: dict[str, Any] = await self._run(self._known())
        return info

    async def _run(self, flow: Flow[Any]) -> Any:
        reply: Any = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                return end.value
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            verb, route, body = step
            try:
                reply = await self._http.request(verb, route, json=body)
            except httpx.HTTPError as error:
                raise unreachable(self.base_url, error) from error
