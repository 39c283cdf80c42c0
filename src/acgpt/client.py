"""Clients of `acgpt serve`: the questions of `LanguageModel`, answered by a server.

    lm = acgpt.Client("http://localhost:8080")
    lm.fill("The capital of {{_}} is Paris.", n=1)[0].text

    async with acgpt.AsyncClient("http://localhost:8080") as lm:
        score = await lm.log_prob("The capital of {{Italy}} is Rome.")

The answers are the same dataclasses as those of `LanguageModel`. Neither torch nor transformers are imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, Self, TypeVar, overload

from acgpt.errors import InputError, QueryError, ServerError, TemplateError
from acgpt.models.answer_json import (
    fill_of,
    lengths_of,
    piece_of,
    query_of,
    ranking_of,
    sample_of,
    score_of,
)
from acgpt.models.answers import Fill, Lengths, Piece, Ranking, Sample, Score
from acgpt.query.query import Query
from acgpt.query.template import escape
from acgpt.version import __version__

try:
    import httpx
except ModuleNotFoundError as error:
    raise InputError("a client needs the package httpx: pip install 'acgpt[client]'") from error

Question = str | Query
Result = TypeVar("Result")
HttpClient = TypeVar("HttpClient", httpx.Client, httpx.AsyncClient)

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


def payloads(field: str, questions: Any, options: Mapping[str, Any], batch: int = BATCH) -> list[dict[str, Any]]:
    """Return the bodies of the requests for one question or a list of them, of which a request has at most `batch`."""
    set_options = {name: value for name, value in options.items() if value is not None}
    if "adapter" in set_options and set_options["adapter"] is False:
        set_options["adapter"] = "none"
    if isinstance(set_options.get("stop"), tuple):
        set_options["stop"] = list(set_options["stop"])
    entries = [to_question(question) for question in as_list(questions)]
    return [{field: entries[i : i + batch], **set_options} for i in range(0, len(entries), batch)]


def as_list(questions: Any) -> list[Any]:
    """Return a list of questions: of one, or of those in a sequence."""
    return [questions] if isinstance(questions, str | Query) or not isinstance(questions, Iterable) else list(questions)


def to_question(question: Any) -> Any:
    """Return a question as JSON."""
    if isinstance(question, Query):
        return {name: value for name, value in asdict(question).items() if value is not None}
    if not isinstance(question, str):
        raise QueryError(
            f"a question must be a template (a string) or a Query, not {type(question).__name__}: {question!r}."
        )
    return question


def each(read: Callable[[Any], Result]) -> Callable[[Any], list[Result]]:
    """Return a function that reads a list of answers."""
    return lambda answers: [read(answer) for answer in answers]


def with_seed(seed: int | None) -> int:
    """Return a seed, the same for all questions of a list."""
    return secrets.randbits(32) if seed is None else seed


# ---- replies --------------------------------------------------------------------------------------------------------


def error_fields(content: bytes) -> tuple[str, str] | None:
    """Return the message and the code of an error; `None` if it has another shape than those of a server of acgpt."""
    try:
        fields = json.loads(content)["error"]
        return str(fields["message"]), str(fields["code"])
    except (ValueError, KeyError, TypeError):
        return None


def try_again(status: int, content: bytes) -> bool:
    """Return whether a request that got this reply may be answered later."""
    return status in RETRIED and (error_fields(content) or ("", ""))[1] not in FINAL


def raise_error(status: int, content: bytes) -> None:
    """Raise the error of a reply.

    Raises:
        InputError: The request is invalid; a `TemplateError` or `QueryError` where the server raised one.
        ServerError: Any other error.
    """
    message, code = error_fields(content) or (f"the server has answered with status {status}.", "")
    raise error_of(message, code, status)


def error_of(message: str, code: str, status: int | None) -> Exception:
    """Return the exception for an error of the server."""
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


def pause(headers: Mapping[str, str], attempt: int) -> float:
    """Return the seconds to wait before a request is sent again: as the server says, or longer each time."""
    try:
        return min(LONGEST_PAUSE, max(0.0, float(headers["retry-after"])))
    except (KeyError, ValueError):
        return min(LONGEST_PAUSE, float(2**attempt) / 2)


def unreachable(url: str, error: Exception) -> ServerError:
    """Return the error for a request without a reply."""
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"the server at {url} has not answered in time.")
    return ServerError(f"cannot reach the server at {url}: {error or type(error).__name__}. Start it with acgpt serve.")


class Events:
    """Reads server-sent events, line by line."""

    def __init__(self) -> None:
        self.name = "message"

    def piece(self, line: str) -> Piece | None:
        """Return the piece of a line, if it has one.

        Raises:
            InputError, ServerError: The line is an error.
        """
        key, _, value = line.partition(": ")
        if not line:
            self.name = "message"
        elif key == "event":
            self.name = value
        elif key == "data":
            fields = json.loads(value)
            if self.name == "error" or "error" in fields:
                raise error_of(fields["error"]["message"], fields["error"]["code"], None)
            return piece_of(fields)
        return None


# ---- clients --------------------------------------------------------------------------------------------------------


class Connection(Generic[HttpClient]):
    """What both clients share: the address, the key, and how often a request is sent again."""

    def __init__(
        self, make: type[HttpClient], base_url: str, api_key: str | None, timeout: float, retries: int, options: Any
    ) -> None:
        key = os.environ.get("ACGPT_API_KEY") if api_key is None else api_key
        headers = {"User-Agent": f"acgpt/{__version__}"} | ({"Authorization": f"Bearer {key}"} if key else {})
        url = base_url if "://" in base_url else f"http://{base_url}"
        self.base_url, self.retries = url.rstrip("/").removesuffix("/v1"), retries  # OpenAI's clients want the /v1
        try:
            self.http: HttpClient = make(base_url=self.base_url, headers=headers, timeout=timeout, **options)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise InputError(f"{base_url} is not the address of a server: {error}.") from error


class Client:
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

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        timeout: float = 180.0,
        retries: int = 3,
        **options: Any,
    ) -> None:
        self.connection = Connection(httpx.Client, base_url, api_key, timeout, retries, options)
        self._info: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Client({self.connection.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.connection.http.close()

    # ---- questions ------------------------------------------------------------------------------------------------

    @overload
    def log_prob(  # type: ignore[overload-overlap]
        self, query: Question, *, future: bool | None = None, adapter: Any = None
    ) -> Score: ...
    @overload
    def log_prob(
        self, query: Sequence[Question], *, future: bool | None = None, adapter: Any = None
    ) -> list[Score]: ...
    def log_prob(
        self, query: Question | Sequence[Question], *, future: bool | None = None, adapter: Any = None
    ) -> Score | list[Score]:
        """Return the log-probability of the asked tokens, see `LanguageModel.log_prob`."""
        answers: Score | list[Score] = self._ask("log_prob", score_of, "query", query, future=future, adapter=adapter)
        return answers

    @overload
    def sample(self, query: Question, n: int = 1, **options: Any) -> list[Sample]: ...
    @overload
    def sample(self, query: Sequence[Question], n: int = 1, **options: Any) -> list[list[Sample]]: ...
    def sample(
        self,
        query: Question | Sequence[Question],
        n: int = 1,
        *,
        seed: int | None = None,
        notice: Callable[[int], object] | None = None,
        **options: Any,
    ) -> list[Sample] | list[list[Sample]]:
        """Sample the asked tokens, see `LanguageModel.sample`.

        Args:
            query: A template, a `Query`, or a list of these.
            n: Number of samples per query.
            seed: Seed of the samples.
            notice: Without effect.
            **options: Other options of `LanguageModel.sample`.
        """
        answers: list[Sample] | list[list[Sample]] = self._ask(
            "sample", each(sample_of), "query", query, n=n, seed=with_seed(seed), **options
        )
        return answers

    @overload
    def fill(self, template: str, n: int = 5, **options: Any) -> list[Fill]: ...
    @overload
    def fill(self, template: Sequence[str], n: int = 5, **options: Any) -> list[list[Fill]]: ...
    def fill(
        self,
        template: str | Sequence[str],
        n: int = 5,
        *,
        seed: int | None = None,
        notice: Callable[[int], object] | None = None,
        **options: Any,
    ) -> list[Fill] | list[list[Fill]]:
        """Fill the gaps of a template, see `LanguageModel.fill`.

        Args:
            template: A template with gaps, or a list of these.
            n: Number of fills.
            seed: Seed of the candidates that are drawn at random.
            notice: Without effect.
            **options: Other options of `LanguageModel.fill`.
        """
        answers: list[Fill] | list[list[Fill]] = self._ask(
            "fill", each(fill_of), "template", template, n=n, seed=with_seed(seed), **options
        )
        return answers

    def infill(self, prefix: str, suffix: str, n: int = 1, **options: Any) -> list[Fill]:
        """Fill the gap between two strings, see `LanguageModel.infill`."""
        return self.fill(escape(prefix, before_slot=True) + "{{_}}" + escape(suffix), n, **options)

    def stream(self, template: str, **options: Any) -> Iterator[Piece]:
        """Fill the gaps of a template and yield the text as it is made, see `LanguageModel.stream`.

        If the iterator is closed, the server stops.
        """
        (body,) = payloads("template", [template], options)
        return self._pieces({**body, "template": body["template"][0], "stream": True})

    @overload
    def rank(self, template: str, *, future: bool | None = None, adapter: Any = None) -> Ranking: ...  # type: ignore[overload-overlap]
    @overload
    def rank(self, template: Sequence[str], *, future: bool | None = None, adapter: Any = None) -> list[Ranking]: ...
    def rank(
        self, template: str | Sequence[str], *, future: bool | None = None, adapter: Any = None
    ) -> Ranking | list[Ranking]:
        """Rank the alternatives of a template, or of each of a list, see `LanguageModel.rank`."""
        answers: Ranking | list[Ranking] = self._ask(
            "rank", ranking_of, "template", template, future=future, adapter=adapter
        )
        return answers

    @overload
    def lengths(self, template: str, known: Sequence[int] = (), **options: Any) -> Lengths: ...
    @overload
    def lengths(self, template: Sequence[str], known: Sequence[int] = (), **options: Any) -> list[Lengths]: ...
    def lengths(
        self, template: str | Sequence[str], known: Sequence[int] = (), **options: Any
    ) -> Lengths | list[Lengths]:
        """Return the probability of each length of a gap, see `LanguageModel.lengths`."""
        answers: Lengths | list[Lengths] = self._ask(
            "lengths", lengths_of, "template", template, known=list(known), **options
        )
        return answers

    def query(self, template: str) -> Query:
        """Tokenize a template, see `LanguageModel.query`."""
        query: Query = self._ask("query", query_of, "template", template)
        return query

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token contributes, see `LanguageModel.pieces`."""
        texts: list[str] = self._post("pieces", {"tokens": list(tokens)})["results"]
        return texts

    # ---- the model ------------------------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What the server says of its model: name, method, adapters, positions, limits."""
        if self._info is None:
            self._info = self._send("GET", "model", None).json()
        return self._info

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

    # ---- internals ------------------------------------------------------------------------------------------------

    def _ask(self, method: str, read: Callable[[Any], Any], field: str, questions: Any, **options: Any) -> Any:
        """Ask one question or a list of them, in as many requests as it takes."""
        results: list[Any] = []
        questions = questions if isinstance(questions, str | Query) else as_list(questions)
        batch = batch_size(self.info) if isinstance(questions, list) and len(questions) > 1 else BATCH
        for body in payloads(field, questions, options, batch):
            results += [read(answer) for answer in self._post(method, body)["results"]]
        return results[0] if isinstance(questions, str | Query) else results

    def _post(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = self._send("POST", method, body).json()
        return reply

    def _send(self, verb: str, method: str, body: dict[str, Any] | None) -> httpx.Response:
        """Send a request; if the server is busy, again."""
        attempt = 0
        while True:
            try:
                response = self.connection.http.request(verb, f"/v1/{method}", json=body)
            except httpx.HTTPError as error:
                raise unreachable(self.connection.base_url, error) from error
            if response.status_code == 200:
                return response
            if not try_again(response.status_code, response.content) or attempt == self.connection.retries:
                raise_error(response.status_code, response.content)
            time.sleep(pause(response.headers, attempt))
            attempt += 1

    def _pieces(self, body: dict[str, Any]) -> Iterator[Piece]:
        attempt = 0
        while True:
            try:
                with self.connection.http.stream("POST", "/v1/fill", json=body) as response:
                    if response.status_code == 200:
                        yield from pieces_in(response.iter_lines())
                        return
                    content = response.read()
            except httpx.HTTPError as error:
                raise unreachable(self.connection.base_url, error) from error
            if not try_again(response.status_code, content) or attempt == self.connection.retries:
                raise_error(response.status_code, content)
            time.sleep(pause(response.headers, attempt))
            attempt += 1


def pieces_in(lines: Iterable[str]) -> Iterator[Piece]:
    """Yield the pieces in the lines of a stream."""
    events = Events()
    for line in lines:
        if (piece := events.piece(line)) is not None:
            yield piece


class AsyncClient:
    """`Client` for asyncio: the same methods as coroutines.

    Args:
        base_url: Address of the server, such as "http://localhost:8080".
        api_key: API key. Default: the environment variable ACGPT_API_KEY.
        timeout: Seconds to wait for a reply.
        retries: How often a request is sent again if the server is busy, see `Client`.
        **options: Options of `httpx.AsyncClient`.

    Raises:
        InputError: A question is invalid, as for `LanguageModel`.
        ServerError: The server cannot be reached, or cannot answer; `status` is that of its reply.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        timeout: float = 180.0,
        retries: int = 3,
        **options: Any,
    ) -> None:
        self.connection = Connection(httpx.AsyncClient, base_url, api_key, timeout, retries, options)
        self._info: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"AsyncClient({self.connection.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.connection.http.aclose()

    # ---- questions ------------------------------------------------------------------------------------------------

    async def log_prob(self, query: Question | Sequence[Question], **options: Any) -> Any:
        """Return the log-probability of the asked tokens, see `LanguageModel.log_prob`."""
        return await self._ask("log_prob", score_of, "query", query, **options)

    async def sample(
        self,
        query: Question | Sequence[Question],
        n: int = 1,
        *,
        seed: int | None = None,
        notice: Callable[[int], object] | None = None,
        **options: Any,
    ) -> Any:
        """Sample the asked tokens, see `LanguageModel.sample`; `notice` is without effect."""
        return await self._ask("sample", each(sample_of), "query", query, n=n, seed=with_seed(seed), **options)

    async def fill(
        self,
        template: str | Sequence[str],
        n: int = 5,
        *,
        seed: int | None = None,
        notice: Callable[[int], object] | None = None,
        **options: Any,
    ) -> Any:
        """Fill the gaps of a template, see `LanguageModel.fill`; `notice` is without effect."""
        return await self._ask("fill", each(fill_of), "template", template, n=n, seed=with_seed(seed), **options)

    async def infill(self, prefix: str, suffix: str, n: int = 1, **options: Any) -> list[Fill]:
        """Fill the gap between two strings, see `LanguageModel.infill`."""
        template = escape(prefix, before_slot=True) + "{{_}}" + escape(suffix)
        fills: list[Fill] = await self.fill(template, n, **options)
        return fills

    async def stream(self, template: str, **options: Any) -> AsyncIterator[Piece]:
        """Fill the gaps of a template and yield the text as it is made, see `LanguageModel.stream`."""
        (body,) = payloads("template", [template], options)
        body = {**body, "template": body["template"][0], "stream": True}
        attempt = 0
        while True:
            try:
                async with self.connection.http.stream("POST", "/v1/fill", json=body) as response:
                    if response.status_code == 200:
                        events = Events()
                        async for line in response.aiter_lines():
                            if (piece := events.piece(line)) is not None:
                                yield piece
                        return
                    content = await response.aread()
            except httpx.HTTPError as error:
                raise unreachable(self.connection.base_url, error) from error
            if not try_again(response.status_code, content) or attempt == self.connection.retries:
                raise_error(response.status_code, content)
            await asyncio.sleep(pause(response.headers, attempt))
            attempt += 1

    async def rank(self, template: str | Sequence[str], **options: Any) -> Any:
        """Rank the alternatives of a template, or of each of a list, see `LanguageModel.rank`."""
        return await self._ask("rank", ranking_of, "template", template, **options)

    async def lengths(self, template: str | Sequence[str], known: Sequence[int] = (), **options: Any) -> Any:
        """Return the probability of each length of a gap, see `LanguageModel.lengths`."""
        return await self._ask("lengths", lengths_of, "template", template, known=list(known), **options)

    async def query(self, template: str) -> Query:
        """Tokenize a template, see `LanguageModel.query`."""
        query: Query = await self._ask("query", query_of, "template", template)
        return query

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token contributes, see `LanguageModel.pieces`."""
        texts: list[str] = (await self._send("POST", "pieces", {"tokens": list(tokens)})).json()["results"]
        return texts

    async def info(self) -> dict[str, Any]:
        """Return what the server says of its model: name, method, adapters, positions, limits."""
        if self._info is None:
            self._info = (await self._send("GET", "model", None)).json()
        return self._info

    # ---- internals ------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, read: Callable[[Any], Any], field: str, questions: Any, **options: Any) -> Any:
        """Ask one question or a list of them, in as many requests as it takes."""
        results: list[Any] = []
        questions = questions if isinstance(questions, str | Query) else as_list(questions)
        batch = batch_size(await self.info()) if isinstance(questions, list) and len(questions) > 1 else BATCH
        for body in payloads(field, questions, options, batch):
            reply = await self._send("POST", method, body)
            results += [read(answer) for answer in reply.json()["results"]]
        return results[0] if isinstance(questions, str | Query) else results

    async def _send(self, verb: str, method: str, body: dict[str, Any] | None) -> httpx.Response:
        """Send a request; if the server is busy, again."""
        attempt = 0
        while True:
            try:
                response = await self.connection.http.request(verb, f"/v1/{method}", json=body)
            except httpx.HTTPError as error:
                raise unreachable(self.connection.base_url, error) from error
            if response.status_code == 200:
                return response
            if not try_again(response.status_code, response.content) or attempt == self.connection.retries:
                raise_error(response.status_code, response.content)
            await asyncio.sleep(pause(response.headers, attempt))
            attempt += 1
