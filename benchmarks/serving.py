"""Serving: requests per second, time to the first text, and latency, by number of clients.

    python benchmarks/serving.py                                  # starts `acgpt serve` on the embedded default
    python benchmarks/serving.py --url http://127.0.0.1:8000 --clients 1 16      # a server that is running
    python benchmarks/serving.py --in-process --seconds 11 --requests 4000       # the scheduler alone, without HTTP

Clients send a mixture of requests about short texts: 30 % fills of a gap of unknown length (streamed), 30 % samples of
12 tokens with text after them, 20 % samples of 24 tokens from left to right, 20 % scores.

*Closed loop*: every client sends its next request when it has the answer to the last one. "ratio" compares throughput
with that of the fewest clients; with one client that is what a server without batching would give any number of them.
*Open loop*: requests arrive at random times (Poisson) at a share of the highest throughput of the closed loop, whether
others are answered or not; latencies are those of a server that is loaded so much. Before each load, as many clients
as it has send requests that are not counted, for code, caches and captured steps. With `--seconds` a load ends after so
many, with what was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from common import Parser, print_record

import acgpt
from acgpt.models.ask import SampleAsk, ScoreAsk, StreamAsk
from acgpt.models.scheduler import Scheduler
from acgpt.serving.warm_up import warm_up

SUBJECTS = ["cat", "teacher", "old captain", "train", "committee", "river", "second engine", "garden", "painter"]
PLACES = ["in the harbour", "behind the school", "near the border", "on the third floor", "at the end of the street"]
ENDS = ["before anyone had noticed it.", "because it was raining.", "and nobody asked why.", "for the last time."]
PARTS = {"fill": 0.3, "sample": 0.3, "continue": 0.2, "score": 0.2}
ROUTES = {"fill": "/v1/fill", "sample": "/v1/sample", "continue": "/v1/sample", "score": "/v1/log_prob"}
WARM_UP = 8  # requests, at least


@dataclass
class Load:
    """What was measured under one load."""

    name: str
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first text of streamed fills
    failed: int = 0

    def row(self) -> dict[str, Any]:
        """Return the figures of the load."""
        p50, p95, p99 = np.percentile(self.latencies, [50, 95, 99]).tolist()
        return {
            "row": self.name,
            "requests": len(self.latencies),
            "failed": self.failed,
            "requests_per_second": len(self.latencies) / self.seconds,
            "first_text_seconds": float(np.median(self.first)) if self.first else None,
            "p50_seconds": p50,
            "p95_seconds": p95,
            "p99_seconds": p99,
        }


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Return the kind and the body of a request; the same numbers give the same requests."""
    rng = random.Random(number)
    subject, place, end = rng.choice(SUBJECTS), rng.choice(PLACES), rng.choice(ENDS)
    before = f"The {subject} {place} was seen by {rng.randint(2, 99)} people. It"
    kind = rng.choices(list(PARTS), list(PARTS.values()))[0]
    if kind == "fill":
        return kind, {"template": f"{before} {{{{_}}}} {end}", "max_tokens": 8}
    if kind == "score":
        return kind, {"query": f"{before} {{{{stopped}}}} {end}"}
    query = f"{before} {{{{_12}}}} {end}" if kind == "sample" else f"{before} {{{{_24}}}}"
    return kind, {"query": query, "seed": number, "temperature": 0.8}


Ask = Callable[[str, dict[str, Any]], Awaitable[float | None]]  # returns the seconds to a streamed fill's first text


# ---- loads ----------------------------------------------------------------------------------------------------------


async def closed(ask: Ask, clients: int, count: int, start: int, seconds: float) -> Load:
    """Let clients send requests one after the other, `count` in all, or as many as are answered in time."""
    load, numbers = Load(f"{clients} client{'s' if clients > 1 else ''}"), iter(range(start, start + count))

    async def client() -> None:
        for number in numbers:
            await timed(ask, number, load)

    return await bounded(load, asyncio.gather(*(client() for _ in range(clients))), seconds)


async def opened(ask: Ask, share: float, best: float, count: int, start: int, seconds: float) -> Load:
    """Let requests arrive at random times, at a share of the best rate, until `count` have or the time is over."""
    load, rng = Load(f"open, {share:.0%} of the highest rate"), random.Random(start)

    async def arrivals() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(start, start + count):
                tasks.create_task(timed(ask, number, load))
                await asyncio.sleep(rng.expovariate(share * best))

    return await bounded(load, asyncio.ensure_future(arrivals()), seconds)


async def bounded(load: Load, work: asyncio.Future[Any], seconds: float) -> Load:
    """Wait for the end of a load, at most so many seconds or for its first answer."""
    began = time.perf_counter()
    await asyncio.wait([work], timeout=None if math.isinf(seconds) else seconds)
    while not work.done() and not load.latencies:
        await asyncio.wait([work], timeout=1)
    load.seconds = time.perf_counter() - began
    work.cancel()
    with suppress(asyncio.CancelledError):  # the time was over
        await work
    if not load.latencies:
        raise SystemExit(f"{load.name}: all requests have failed.")
    print(f"{load.name}: {len(load.latencies)} requests in {load.seconds:.1f} s", file=sys.stderr, flush=True)
    return load


async def timed(ask: Ask, number: int, load: Load) -> None:
    """Send one request, and note how long it took."""
    began = time.perf_counter()
    try:
        first = await ask(*request(number))
    except Exception as error:
        print(f"request {number}: {error!r}", file=sys.stderr)
        load.failed += 1
        return
    load.latencies.append(time.perf_counter() - began)
    if first is not None:
        load.first.append(first)


async def measure(ask: Ask, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all loads."""
    rows: list[dict[str, Any]] = []
    for number, clients in enumerate(args.clients):
        await closed(ask, clients, max(WARM_UP, 2 * clients), (number + 100) * 10**4, args.seconds)
        count = args.requests if clients > 1 else max(8, args.requests // 3)
        rows.append((await closed(ask, clients, count, number * 10**4, args.seconds)).row())
    best = max(row["requests_per_second"] for row in rows)
    for number, share in enumerate(args.shares, 1):
        rows.append((await opened(ask, share, best, args.requests, number * 10**5, args.seconds)).row())
    return [row | {"ratio": row["requests_per_second"] / rows[0]["requests_per_second"]} for row in rows]


# ---- servers --------------------------------------------------------------------------------------------------------


def over_http(url: str) -> Ask:
    """Return a function that sends requests to a server."""
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)

    async def ask(kind: str, body: dict[str, Any]) -> float | None:
        if kind != "fill":
            (await client.post(ROUTES[kind], json=body)).raise_for_status()
            return None
        began, first = time.perf_counter(), None
        async with client.stream("POST", ROUTES[kind], json=body | {"stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if first is None and line.startswith("data:"):
                    first = time.perf_counter() - began
        return first

    return ask


@contextmanager
def in_process(device: str) -> Iterator[Ask]:
    """Yield a function that submits requests to a scheduler in this process."""
    lm = acgpt.load(device=device)
    scheduler = Scheduler(lm._executor)
    if device == "cuda":  # as a server does
        warm_up(lm, scheduler)

    async def ask(kind: str, body: dict[str, Any]) -> float | None:
        began, first = time.perf_counter(), []
        if kind == "fill":
            search: Any = lm.searches.stream(StreamAsk(**body), lambda _: first.append(time.perf_counter() - began))
        elif kind == "score":
            search = lm.searches.of(ScoreAsk(body["query"]))
        else:
            search = lm.searches.of(SampleAsk(body["query"], seed=body["seed"], temperature=body["temperature"]))
        job = scheduler.submit(search)
        try:
            await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:  # the time of the load is over
            job.cancel()
            raise
        return first[0] if first else None

    try:
        yield ask
    finally:
        scheduler.close(drain=False)


@contextmanager
def server(device: str) -> Iterator[Ask]:
    """Start `acgpt serve` on a free port, and yield a function that sends requests to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "acgpt", "serve", "--port", str(port), "--device", device]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"the server has ended with code {process.returncode}: {shlex.join(command)}")
            time.sleep(0.2)
        yield over_http(url)
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_device()
    parser.add_argument("--url", help="of a server that is running; default: start one")
    parser.add_argument("--in-process", action="store_true", help="measure the scheduler without HTTP")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.8], help="open loop: shares of the highest")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end each load after so many")
    args = parser.parse_args()
    if args.url:
        rows = asyncio.run(measure(over_http(args.url), args))
    else:
        with in_process(args.device) if args.in_process else server(args.device) as ask:
            rows = asyncio.run(measure(ask, args))
    place = args.url or ("in process" if args.in_process else f"HTTP, {args.device}")
    print_record("serving", place, rows, args.device)


if __name__ == "__main__":
    main()
