"""Measure the server: requests per second, time to the first text, and latency, for 1, 8 and 64 clients.

    python benchmarks/serving.py                                  # starts `acgpt serve` on the embedded default
    python benchmarks/serving.py --url http://127.0.0.1:8000      # a server that is running
    python benchmarks/serving.py --in-process --device cuda       # the scheduler alone, without HTTP

Clients send a mixture of requests about short texts: 30 % fills of a gap of unknown length (streamed), 30 % samples of
12 tokens with text after them, 20 % samples of 24 tokens from left to right, 20 % scores.

*Closed loop*: every client sends its next request when it has the answer to the last one. Throughput is compared with
that of one client, which is what a server without batching would give any number of them. *Open loop*: requests arrive
at random times (Poisson) at a share of the throughput of the closed loop, whether others are answered or not; latencies
are those of a server that is loaded so much. Before each load, as many clients as it has send requests that are not
counted, for code, caches and captured steps. With `--seconds` a load ends after so many, with what was answered.
`--profile` ends with one more load of the most clients, and says how often each function was on the scheduler's stack.
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
from typing import TYPE_CHECKING, Any

import numpy as np
from common import Parser, machine, report
from profiler import Profile
from result_tables import serving_rows

if TYPE_CHECKING:
    from acgpt.serving.scheduler import Scheduler

SUBJECTS = ["cat", "teacher", "old captain", "train", "committee", "river", "second engine", "garden", "painter"]
PLACES = ["in the harbour", "behind the school", "near the border", "on the third floor", "at the end of the street"]
ENDS = ["before anyone had noticed it.", "because it was raining.", "and nobody asked why.", "for the last time."]
PROGRESS = 10  # seconds between two lines of progress
PARTS = {"fill": 0.3, "sample": 0.3, "continue": 0.2, "score": 0.2}


@dataclass
class Request:
    """One request: the name of a route, and its body."""

    kind: str
    body: dict[str, Any]


@dataclass
class Load:
    """What was measured under one load."""

    loop: str
    clients: int
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first text of streamed fills
    failed: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the figures of the load, in seconds."""
        p50, p95, p99 = (float(x) for x in np.percentile(self.latencies, [50, 95, 99]))
        first = float(np.median(self.first)) if self.first else None
        return {
            "loop": self.loop, "clients": self.clients, "requests": len(self.latencies), "failed": self.failed,
            "requests_per_second": len(self.latencies) / self.seconds, "first_text": first,
            "p50": p50, "p95": p95, "p99": p99,
        }  # fmt: skip


def request(number: int) -> Request:
    """Return the request of this number; the same numbers give the same requests."""
    rng = random.Random(number)
    subject, place, end = rng.choice(SUBJECTS), rng.choice(PLACES), rng.choice(ENDS)
    before = f"The {subject} {place} was seen by {rng.randint(2, 99)} people. It"
    kind = rng.choices(list(PARTS), list(PARTS.values()))[0]
    if kind == "fill":
        return Request(kind, {"template": f"{before} {{{{_}}}} {end}", "max_tokens": 8})
    if kind == "sample":
        return Request(kind, {"template": f"{before} {{{{_12}}}} {end}", "seed": number, "temperature": 0.8})
    if kind == "continue":
        return Request(kind, {"template": f"{before} {{{{_24}}}}", "seed": number, "temperature": 0.8})
    return Request(kind, {"template": f"{before} {{{{stopped}}}} {end}"})


Ask = Callable[[Request], Awaitable[float | None]]  # returns the seconds to the first text of a streamed fill


async def closed(ask: Ask, clients: int, count: int, start: int, most_seconds: float | None = None) -> Load:
    """Let clients send requests one after the other, `count` in all, or as many as are answered in time."""
    load, numbers = Load("closed", clients), iter(range(start, start + count))

    async def client() -> None:
        for number in numbers:
            await timed(ask, number, load)

    return await bounded(load, asyncio.gather(*(client() for _ in range(clients))), count, most_seconds)


async def opened(
    ask: Ask, rate: float, count: int, start: int, clients: int, most_seconds: float | None = None
) -> Load:
    """Let requests arrive at random times, `rate` a second on average, until `count` have or the time is over."""
    load, rng = Load("open", clients), random.Random(start)

    async def arrivals() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(start, start + count):
                tasks.create_task(timed(ask, number, load))
                await asyncio.sleep(rng.expovariate(rate))

    return await bounded(load, asyncio.ensure_future(arrivals()), count, most_seconds)


async def bounded(load: Load, work: asyncio.Future[Any], count: int, most_seconds: float | None) -> Load:
    """Wait for the end of a load, at most so many seconds or for its first answer; meanwhile print how far it is."""
    began = time.perf_counter()
    while not work.done():
        left = math.inf if most_seconds is None else began + most_seconds - time.perf_counter()
        over = left <= 0 and bool(load.latencies)
        if over:
            work.cancel()
        await asyncio.wait([work], timeout=min(PROGRESS, max(left, 1)))
        load.seconds = load.seconds if over else time.perf_counter() - began
        done = f"{len(load.latencies)} of {count} requests in {load.seconds:.1f} s"
        print(f"{load.loop}, {load.clients or 'any number of'} clients: {done}", file=sys.stderr, flush=True)
    with suppress(asyncio.CancelledError):  # the time was over
        work.result()
    if not load.latencies:
        raise SystemExit(f"{load.loop}, {load.clients} clients: all requests have failed.")
    return load


async def timed(ask: Ask, number: int, load: Load) -> None:
    """Send one request, and note how long it took."""
    began = time.perf_counter()
    try:
        first = await ask(request(number))
    except Exception as error:
        print(f"request {number}: {error!r}", file=sys.stderr)
        load.failed += 1
        return
    load.latencies.append(time.perf_counter() - began)
    if first is not None:
        load.first.append(first)


def over_http(url: str) -> Ask:
    """Return a function that sends requests to a server."""
    import httpx

    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
    routes = {"fill": "/v1/fill", "sample": "/v1/sample", "continue": "/v1/sample", "score": "/v1/log_prob"}

    async def ask(one: Request) -> float | None:
        name = "template" if one.kind == "fill" else "query"
        body = {name: one.body["template"]} | {key: value for key, value in one.body.items() if key != "template"}
        if one.kind != "fill":
            reply = await client.post(routes[one.kind], json=body)
            reply.raise_for_status()
            return None
        began, first = time.perf_counter(), None
        async with client.stream("POST", routes["fill"], json=body | {"stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if first is None and line.startswith("data:"):
                    first = time.perf_counter() - began
        return first

    return ask


@contextmanager
def in_process(device: str) -> Iterator[tuple[Ask, Scheduler, float]]:
    """Yield a function that submits requests to a scheduler in this process, the scheduler, and its warm-up seconds."""
    from common import load_adapted

    from acgpt.serving.scheduler import Scheduler
    from acgpt.serving.warm_up import warm_up

    lm = load_adapted(None, None, device, "auto")
    scheduler = Scheduler(lm._executor)
    began = time.perf_counter()
    if scheduler.executor.engine.cuda:  # as a server does
        warm_up(lm, scheduler)
    seconds = time.perf_counter() - began

    async def ask(one: Request) -> float | None:
        body = dict(one.body)
        template, began, first = body.pop("template"), time.perf_counter(), []
        if one.kind == "fill":
            search: Any = lm.searches.stream(template, lambda _: first.append(time.perf_counter() - began), **body)
        elif one.kind == "score":
            search = lm.searches.log_prob([template])
        else:
            search = lm.searches.sample(template, **body)
        job = scheduler.submit(search)
        try:
            await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:  # the time of the load is over
            job.cancel()
            raise
        return first[0] if first else None

    try:
        yield ask, scheduler, seconds
    finally:
        scheduler.close(drain=False)


@contextmanager
def server(arguments: list[str]) -> Iterator[str]:
    """Start `acgpt serve` on a free port, and yield its address."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "acgpt", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"the server has ended with code {process.returncode}: {shlex.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def measure(ask: Ask, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all loads."""
    rows, best = [], 0.0
    for number, clients in enumerate(args.clients):
        await closed(ask, clients, max(args.warm_up, 2 * clients), (number + 100) * 10**4, args.seconds)
        count = args.requests if clients > 1 else max(8, args.requests // 3)
        load = (await closed(ask, clients, count, number * 10**4, args.seconds)).summary()
        rows.append(load)
        best = max(best, load["requests_per_second"])
        print(f"closed, {clients} clients: {load['requests_per_second']:.2f} requests/s", file=sys.stderr, flush=True)
    for number, share in enumerate(args.shares):
        load = (await opened(ask, share * best, args.requests, (number + 1) * 10**5, 0, args.seconds)).summary()
        rows.append(load | {"share": share})
        print(f"open, {share:.0%} of the throughput: p95 {load['p95']:.2f} s", file=sys.stderr, flush=True)
    alone = next(row["requests_per_second"] for row in rows if row["clients"] == 1)
    for row in rows:
        row["ratio"] = row["requests_per_second"] / alone
    return rows


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that is running; default: start one")
    parser.add_argument("--in-process", action="store_true", help="measure the scheduler without HTTP")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.5, 0.8], help="open loop: shares of the throughput"
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="in process: then sample what the scheduler does")
    parser.add_argument("--seconds", type=float, help="end each load after so many, with the requests answered so far")
    args = parser.parse_args()
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds} leaves nothing to measure: use a number above 0.")
    if 1 not in args.clients:
        parser.error("--clients must have 1: throughput is compared with that of one client.")
    if args.profile and not args.in_process:
        parser.error("--profile samples a thread of this process: use --in-process, too.")
    more: dict[str, Any] = {}
    if args.in_process:
        with in_process(args.device) as (ask, scheduler, seconds):
            rows = asyncio.run(measure(ask, args))
            more["warm_up_seconds"] = seconds
            if args.profile:
                profile, clients = Profile(), max(args.clients)
                with profile.of(scheduler.thread):
                    asyncio.run(closed(ask, clients, args.requests, 9 * 10**5, args.seconds))
                more["profile"] = {"clients": clients, "samples": profile.samples, "within": profile.shares()}
                print("\n".join(f"{share:7.1%}  {name}" for name, share in profile.shares(0.02).items()))
    elif args.url:
        rows = asyncio.run(measure(over_http(args.url), args))
    else:
        with server(["--device", args.device]) as url:
            rows = asyncio.run(measure(over_http(url), args))
    record = {"benchmark": "serving", "http": not args.in_process, "loads": rows, **more}
    record |= machine("cuda" if args.device.startswith("cuda") else "cpu")
    report("Serving", *serving_rows(rows), record)


if __name__ == "__main__":
    main()
