"""What every request passes through, from the outside in: log and deadline, the host, the API key, the body.

`Metrics` counts requests, in the text format of Prometheus.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from acgpt.errors import LOG, InputError, log_failure, reason
from acgpt.models.scheduler import Scheduler
from acgpt.serving.errors import (
    UNEXPECTED,
    BodyTooLarge,
    Disconnected,
    NotJson,
    TimeExceeded,
    Unauthorized,
    WrongHost,
    error_reply,
    kind_of,
)
from acgpt.serving.page import pages
from acgpt.serving.service import DEADLINE, USAGE, Service, Usage

OPEN = frozenset({"/health", *pages()})  # paths that need no key: the page asks for one
UNMATCHED = "unmatched"  # route of requests that no route has
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"})


# ---- metrics --------------------------------------------------------------------------------------------------------


@dataclass
class Histogram:
    """Durations, counted by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Metrics:
    """Counts requests. All methods are called in the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Histogram] = {}

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self.requests[method, route, status] += 1
        self.durations.setdefault(route, Histogram()).add(seconds)

    def render(self, scheduler: Scheduler) -> str:
        """Return all metrics as text.

        Args:
            scheduler: Has counts of its own.
        """
        counts = scheduler.counts
        return "".join(
            [
                *family("acgpt_requests_total", "counter", "Requests by route and status.", self._requests()),
                *family("acgpt_request_seconds", "histogram", "Duration of requests.", self._durations()),
                *plain("acgpt_queue_length", "gauge", "Questions that wait for their first pass.", scheduler.queued),
                *plain("acgpt_active_rows", "gauge", "Texts that are being generated.", scheduler.active_rows),
                *plain("acgpt_questions_total", "counter", "Questions that were accepted.", counts.jobs),
                *plain("acgpt_failed_total", "counter", "Questions that failed.", counts.failed),
                *plain("acgpt_cancelled_total", "counter", "Questions that were given up.", counts.cancelled),
                *plain("acgpt_refused_total", "counter", "Questions refused by a full queue.", counts.refused),
                *plain("acgpt_steps_total", "counter", "Decoding steps.", counts.steps),
                *plain("acgpt_tokens_drawn_total", "counter", "Tokens drawn.", counts.drawn),
                *plain("acgpt_tokens_scored_total", "counter", "Tokens scored.", counts.scored),
                *plain("acgpt_busy_seconds_total", "counter", "Time that the model has run.", counts.busy_seconds),
            ]
        )

    def _requests(self) -> Iterator[tuple[str, Mapping[str, object], float]]:
        for (method, route, status), count in sorted(self.requests.items()):
            yield "", {"method": method, "route": route, "status": status}, count

    def _durations(self) -> Iterator[tuple[str, Mapping[str, object], float]]:
        for route, histogram in sorted(self.durations.items()):
            below = 0
            for bound, count in zip((*BUCKETS, "+Inf"), histogram.counts, strict=True):
                below += count
                yield "_bucket", {"route": route, "le": bound}, below
            yield "_sum", {"route": route}, histogram.total
            yield "_count", {"route": route}, below


def family(
    name: str, kind: str, help: str, samples: Iterable[tuple[str, Mapping[str, object], float]]
) -> Iterator[str]:
    """Yield the lines of a metric.

    Args:
        name: Its name.
        kind: Its type.
        help: What it counts.
        samples: For each value: the suffix of the name, the labels, and the value.
    """
    yield f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
        yield f"{name}{suffix}{{{inside}}} {value!r}\n" if inside else f"{name}{suffix} {value!r}\n"


def plain(name: str, kind: str, help: str, value: float) -> Iterator[str]:
    """Yield the lines of a metric with one value."""
    return family(name, kind, help, [("", {}, value)])


# ---- middleware -----------------------------------------------------------------------------------------------------


class Observed:
    """Logs and counts requests, sets their deadlines, and answers those that raise an unexpected error.

    Args:
        app: The application.
        metrics: Counts the requests.
        seconds: Time that a request may take, from its arrival to its answer.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, seconds: float) -> None:
        self.app, self.metrics, self.seconds = app, metrics, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status, usage = time.perf_counter(), None, Usage()
        token, deadline = USAGE.set(usage), DEADLINE.set(time.monotonic() + self.seconds)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as error:
            if kind_of(error) is UNEXPECTED:
                log_failure(error)
            if status is not None:  # a part of the reply has been sent: end the connection
                raise ConnectionAbortedError("the reply has failed.") from None
            await error_reply(error)(scope, receive, sending)
        finally:
            USAGE.reset(token)
            DEADLINE.reset(deadline)
            seconds = time.perf_counter() - start
            route, method = route_of(scope), scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.add(method, route, status or 499, seconds)
            log_request(method, route, status or 499, seconds, usage.tokens)


def log_request(method: str, route: str, status: int, seconds: float, tokens: int | None) -> None:
    """Log a request that was answered: one JSON object per line, with neither prompts nor keys."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"time": stamp, "method": method, "route": route, "status": status, "ms": round(1000 * seconds, 1)}
    LOG.info(json.dumps({**fields, "tokens": tokens}))


def route_of(scope: Scope) -> str:
    """Return the path of the route that answered a request, so that the number of metrics is bounded."""
    route: Any = scope.get("route")
    return UNMATCHED if route is None else str(route.path)


class HostChecked:
    """Refuses requests for other hosts than this machine.

    A web page can let its own name point to this machine (DNS rebinding). The browser then takes the server for a part
    of the page, whose scripts may ask and read the answers. Without an API key, only the name tells such requests.

    Args:
        app: The application.
        hosts: Names and addresses of this machine.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. One without a host is from no browser."""
        given = [value.decode("latin1") for name, value in scope.get("headers", ()) if name == b"host"]
        wrong = next((host for host in given if host_of(host) not in self.hosts), None)
        if scope["type"] == "http" and wrong is not None:
            names = " or ".join(sorted(self.hosts))
            error = WrongHost(
                f"the server does not answer for the host {reason(wrong)}. Use {names}, or start it with an API key."
            )
            return await error_reply(error)(scope, receive, send)
        return await self.app(scope, receive, send)


def host_of(header: str) -> str:
    """Return the name or address in a header `Host`, without the port."""
    host = header.partition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
    return host.strip().lower()


class KeyRequired:
    """Refuses requests without an API key.

    Args:
        app: The application.
        keys: The keys, one of which must be sent as `Authorization: Bearer KEY`. None: no key is needed.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and self.keys and scope["path"] not in OPEN and not self.allowed(scope):
            error = Unauthorized("the API key is missing or wrong. Send it as Authorization: Bearer KEY.")
            return await error_reply(error)(scope, receive, send)
        return await self.app(scope, receive, send)

    def allowed(self, scope: Scope) -> bool:
        """Return whether a request has one of the keys, in a time that does not depend on how much of it is right."""
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = header.partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return scheme.lower() == b"bearer" and any(matches)


class BodyRead:
    """Reads the bodies of requests, within limits of size and time, before anything else is done with them.

    Args:
        app: The application.
        service: Has the limits.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            async with asyncio.timeout_at(self.service.deadline):
                body = await self.read(scope, receive)
            check_characters(body)
        except TimeoutError:
            error = TimeExceeded(
                f"the request was not sent within {self.service.seconds:g} seconds, the limit (timeout)."
            )
            return await error_reply(error)(scope, receive, send)
        except (BodyTooLarge, Disconnected, InputError) as error:
            return await error_reply(error)(scope, receive, send)
        waiting = [body]

        async def replay() -> Message:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            return await receive()

        return await self.app(scope, replay, send)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request.

        Raises:
            BodyTooLarge: It says that it is too large, or it is.
            Disconnected: The client has hung up.
        """
        most, parts, size = self.service.limits.max_body_bytes, [], 0
        error = BodyTooLarge(f"the request has more than {most} bytes, which is the limit (max_body_bytes).")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 20 or int(declared) > most:
            raise error
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected("the client has hung up.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise error
            if not message.get("more_body", False):
                return b"".join(parts)


def check_characters(body: bytes) -> None:
    """Refuse JSON with half of a surrogate pair, which is no character and cannot be encoded.

    Raises:
        InputError: There is one.
    """
    if not SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError("the request has half of a surrogate pair, which is no character.") from error
    except (ValueError, RecursionError):  # malformed, which is found later
        return


async def check_content_type(request: Request) -> None:
    """Refuse a body that is not declared as JSON.

    Pages of other origins can send any body, but not with this type, unless the server allows their origin (CORS).

    Raises:
        NotJson: The body has another type, or none.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    kind, _, subtype = given.partition("/")
    is_json = kind == "application" and (subtype == "json" or subtype.endswith("+json"))
    if request.method == "POST" and not is_json and await request.body():
        raise NotJson(f"the body has {f'the type {reason(given)}' if given else 'no type'}: "
                      "send Content-Type: application/json.")  # fmt: skip
