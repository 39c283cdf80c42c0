"""What every request passes through, from the outside in: log and deadline, the host, the API key, the body.

`Metrics` counts requests, in the text format of Prometheus.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from acgpt.errors import LOG, InputError, reason
from acgpt.models.scheduler import Scheduler
from acgpt.serving.errors import Rejected, error_reply, log_unexpected
from acgpt.serving.page import pages
from acgpt.serving.service import DEADLINE, USAGE, Service

OPEN = frozenset({"/health", *pages()})  # paths that need no key: the page asks for one
UNMATCHED = "unmatched"  # route of requests that no route has
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, math.inf)  # seconds
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"})


# ---- metrics --------------------------------------------------------------------------------------------------------


class Metrics:
    """Counts requests. All methods are called in the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Counter[float]] = {}  # by route: requests that took at most so many seconds
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self.requests[method, route, status] += 1
        counts = self.durations.setdefault(route, Counter())
        counts.update(bound for bound in BUCKETS if seconds <= bound)
        self.seconds[route] += seconds

    def render(self, scheduler: Scheduler) -> str:
        """Return all metrics as text.

        Args:
            scheduler: Has counts of its own.
        """
        counts = scheduler.counts
        plain = [
            ("queue_length", "gauge", "Questions that wait for their first pass.", scheduler.queued),
            ("active_rows", "gauge", "Texts that are being generated.", scheduler.active_rows),
            ("questions_total", "counter", "Questions that were accepted.", counts.jobs),
            ("failed_total", "counter", "Questions that failed.", counts.failed),
            ("cancelled_total", "counter", "Questions that were given up.", counts.cancelled),
            ("refused_total", "counter", "Questions refused by a full queue.", counts.refused),
            ("steps_total", "counter", "Decoding steps.", counts.steps),
            ("tokens_drawn_total", "counter", "Tokens drawn.", counts.drawn),
            ("tokens_scored_total", "counter", "Tokens scored.", counts.scored),
            ("busy_seconds_total", "counter", "Time that the model has run.", counts.busy_seconds),
        ]
        families = [
            ("requests_total", "counter", "Requests by route and status.", self._requests()),
            ("request_seconds", "histogram", "Duration of requests.", self._durations()),
            *((name, kind, help, [("", value)]) for name, kind, help, value in plain),
        ]
        return "".join(
            f"# HELP acgpt_{name} {help}\n# TYPE acgpt_{name} {kind}\n"
            + "".join(f"acgpt_{name}{labels} {value!r}\n" for labels, value in samples)
            for name, kind, help, samples in families
        )

    def _requests(self) -> Iterator[tuple[str, float]]:
        for (method, route, status), count in sorted(self.requests.items()):
            yield f'{{method="{method}",route="{route}",status="{status}"}}', count

    def _durations(self) -> Iterator[tuple[str, float]]:
        for route, counts in sorted(self.durations.items()):
            for bound in BUCKETS:
                yield f'_bucket{{route="{route}",le="{"+Inf" if bound == math.inf else bound}"}}', counts[bound]
            yield f'_sum{{route="{route}"}}', self.seconds[route]
            yield f'_count{{route="{route}"}}', counts[math.inf]


# ---- middleware -----------------------------------------------------------------------------------------------------


class Observed:
    """Logs and counts requests, sets their deadlines, and answers those that raise an unexpected error.

    Args:
        app: The application.
        metrics: Counts the requests.
        seconds: Time that a request may take, from its arrival to its answer.
        paths: Paths of all routes.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, seconds: float, paths: Collection[str]) -> None:
        self.app, self.metrics, self.seconds, self.paths = app, metrics, seconds, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status, usage = time.perf_counter(), None, list[int]()
        token, deadline = USAGE.set(usage), DEADLINE.set(time.monotonic() + self.seconds)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as error:
            log_unexpected(error)
            if status is not None:  # a part of the reply has been sent: end the connection
                raise ConnectionAbortedError("the reply has failed.") from None
            await error_reply(error)(scope, receive, sending)
        finally:
            USAGE.reset(token)
            DEADLINE.reset(deadline)
            seconds = time.perf_counter() - start
            method = scope["method"] if scope["method"] in METHODS else "other"
            # A path of the server, so that the number of metrics is bounded. What a check refuses has no route yet.
            path = scope["route"].path if "route" in scope else scope["path"]
            route = path if path in self.paths else UNMATCHED
            self.metrics.add(method, route, status or 499, seconds)
            log_request(method, route, status or 499, seconds, sum(usage) if usage else None)


def log_request(method: str, route: str, status: int, seconds: float, tokens: int | None) -> None:
    """Log a request that was answered: one JSON object per line, with neither prompts nor keys."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"time": stamp, "method": method, "route": route, "status": status, "ms": round(1000 * seconds, 1)}
    LOG.info(json.dumps({**fields, "tokens": tokens}))


class Checked:
    """Refuses requests that a check finds fault with.

    Args:
        app: The application.
        check: Raises the error, or returns how the application receives the request.
    """

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Receive], Awaitable[Receive]]) -> None:
        self.app, self.check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            if scope["type"] == "http":
                receive = await self.check(scope, receive)
        except (Rejected, InputError) as error:
            return await error_reply(error)(scope, receive, send)
        return await self.app(scope, receive, send)


async def check_host(scope: Scope, receive: Receive, hosts: Collection[str]) -> Receive:
    """Refuse requests for other hosts than this machine; one without a host is from no browser.

    A web page can let its own name point to this machine (DNS rebinding). The browser then takes the server for a part
    of the page, whose scripts may ask and read the answers. Without an API key, only the name tells such requests.

    Args:
        scope: The request.
        receive: Receives its body.
        hosts: Names and addresses of this machine.
    """
    for host in (value.decode("latin1") for name, value in scope["headers"] if name == b"host"):
        if host_of(host) not in hosts:
            names = " or ".join(sorted(hosts))
            message = (
                f"the server does not answer for the host {reason(host)}. Use {names}, or start it with an API key."
            )
            raise Rejected("wrong_host", message)
    return receive


def host_of(header: str) -> str:
    """Return the name or address in a header `Host`, without the port."""
    host = header.partition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
    return host.strip().lower()


async def check_key(scope: Scope, receive: Receive, keys: Sequence[bytes]) -> Receive:
    """Refuse requests without an API key, in a time that does not depend on how much of it is right.

    Args:
        scope: The request.
        receive: Receives its body.
        keys: The keys, one of which must be sent as `Authorization: Bearer KEY`.
    """
    header = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, given = header.partition(b" ")
    matches = [hmac.compare_digest(given.strip(), key) for key in keys]
    if scope["path"] not in OPEN and not (scheme.lower() == b"bearer" and any(matches)):
        raise Rejected("invalid_api_key", "the API key is missing or wrong. Send it as Authorization: Bearer KEY.")
    return receive


async def read_body(scope: Scope, receive: Receive, service: Service) -> Receive:
    """Read the body of a request, within limits of size and time, before anything else is done with it.

    Args:
        scope: The request.
        receive: Receives its body.
        service: Has the limits.

    Raises:
        Rejected: It says that it is too large, or it is; it does not come in time; or the client has hung up.
    """
    most, parts, size = service.limits.max_body_bytes, [], 0
    declared, more = dict(scope["headers"]).get(b"content-length", b"0"), True
    fits = declared.isdigit() and len(declared) <= 20 and int(declared) <= most
    try:
        async with asyncio.timeout_at(service.deadline):
            while fits and more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Rejected("disconnected", "the client has hung up.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                fits, more = size <= most, message.get("more_body", False)
    except TimeoutError as error:
        problem = f"the request was not sent within {service.seconds:g} seconds, the limit (timeout)."
        raise Rejected("time_exceeded", problem) from error
    if not fits:
        limit = f"the request has more than {most} bytes, which is the limit (max_body_bytes)."
        raise Rejected("body_too_large", limit)
    waiting = [b"".join(parts)]
    check_characters(waiting[0])

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


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
        Rejected: The body has another type, or none.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    kind, _, subtype = given.partition("/")
    is_json = kind == "application" and (subtype == "json" or subtype.endswith("+json"))
    if request.method == "POST" and not is_json and await request.body():
        kind = f"the type {reason(given)}" if given else "no type"
        raise Rejected("unsupported_media_type", f"the body has {kind}: send Content-Type: application/json.")
