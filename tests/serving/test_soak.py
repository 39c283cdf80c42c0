"""A server under good and bad requests, disconnections and cancelled streams: nothing lost, no wrong answer."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from servers import until
from test_serve_command import metric

import acgpt

THREADS = 8
LIMITS = ["--dtype", "float64", "--queue", "16", "--timeout", "60"]
BAD = [
    ("/v1/log_prob", {"query": "The {{_4}} sat."}, 422),
    ("/v1/log_prob", {"query": "The {{cat"}, 422),
    ("/v1/log_prob", {}, 422),
    ("/v1/sample", {"query": "The {{_4}}", "temperature": -1}, 422),
    ("/v1/sample", {"query": "cat " * 700 + "{{_4}}"}, 422),
    ("/v1/fill", {"template": "no gap"}, 422),
    ("/v1/fill", {"template": "The {{_}} sat.", "adapter": "/etc/passwd"}, 422),
    ("/v1/rank", {"template": "The {{cat|cat}}"}, 422),
    ("/v1/nothing", {}, 404),
]


def good(rng):
    """Return a route, a body, and how `LanguageModel` is asked the same."""
    words = " ".join(rng.choice(["cat", "dog", "mat", "sat"]) for _ in range(rng.randint(1, 6)))
    seed = rng.randint(0, 5)
    kind = rng.choice(["log_prob", "sample", "fill", "rank"])
    if kind == "log_prob":
        return "/v1/log_prob", {"query": f"The {{{{{words}}}}} sat."}, kind
    if kind == "sample":
        return "/v1/sample", {"query": f"{words} {{{{_5}}}} on the mat.", "seed": seed, "n": rng.randint(1, 3)}, kind
    if kind == "fill":
        return "/v1/fill", {"template": f"{words} {{{{_}}}} mat.", "max_tokens": 3, "seed": seed, "n": 1}, kind
    return "/v1/rank", {"template": f"{words} {{{{cat|dog}}}} sat."}, kind


class Soak:
    """Threads that ask a server until the time is over, and what they saw."""

    def __init__(self, url, lm, seconds):
        self.url, self.lm, self.end = url, lm, time.monotonic() + seconds
        self.counts, self.problems = Counter(), []
        self.known, self.lock = {}, threading.Lock()

    def expected(self, body, kind):
        """Return what the model answers by itself."""
        key = repr((kind, sorted(body.items())))
        with self.lock:
            if key not in self.known:
                how = dict(body)
                question = how.pop("query", None) or how.pop("template")
                answer = getattr(self.lm, kind)(question, **how)
                if kind == "log_prob":
                    self.known[key] = [token.log_prob for token in answer.tokens]
                else:
                    self.known[key] = [each.text for each in answer]
            return self.known[key]

    def run(self, number):
        rng, actions = random.Random(number), [self.ask, self.fail, self.hang_up, self.cancel]
        action = actions[number % len(actions)]  # each occurs, however slow the machine is
        with httpx.Client(base_url=self.url, timeout=90) as client:
            while time.monotonic() < self.end and not self.problems:
                try:
                    action(client, rng)
                    self.counts[action.__name__] += 1
                except Exception as error:
                    self.problems.append(f"{action.__name__}: {error!r}")
                action = rng.choices(actions, [6, 2, 1, 1])[0]

    def ask(self, client, rng):
        route, body, kind = good(rng)
        reply = client.post(route, json=body)
        if reply.status_code == 429:
            assert "Retry-After" in reply.headers
            self.counts["refused"] += 1
            return
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()["results"]
        expected = self.expected(body, kind)
        if kind == "log_prob":
            assert [token["log_prob"] for token in answer["tokens"]] == pytest.approx(expected, abs=1e-6)
        else:
            found = answer["alternatives"] if kind == "rank" else answer
            assert [each["text"] for each in found] == expected

    def fail(self, client, rng):
        route, body, status = rng.choice(BAD)
        reply = client.post(route, json=body)
        assert reply.status_code == status and reply.json()["error"]["message"], reply.text

    def hang_up(self, client, rng):
        """Send a request and close the connection before the answer, or in the middle of the request."""
        body = b'{"query": "The cat {{_60}}", "n": 4}'
        sent = body if rng.random() < 0.7 else body[:10]
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            kind = "Host: localhost\r\nContent-Type: application/json"
            head = f"POST /v1/sample HTTP/1.1\r\n{kind}\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + sent)
            time.sleep(rng.random() * 0.05)

    def cancel(self, client, rng):
        """Read a part of a stream."""
        body = {"template": "The cat {{_}} mat.", "max_tokens": 8, "stream": True}
        with client.stream("POST", "/v1/fill", json=body) as reply:
            assert reply.status_code in (200, 429)
            for i, _ in enumerate(reply.iter_lines()):
                if i >= rng.randint(0, 4):
                    break


def resident(process):
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def soak(server, folder, seconds):
    url, process = server.url, server.process
    work = Soak(url, acgpt.load(folder, dtype="float64"), seconds)
    threads = [threading.Thread(target=work.run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 4)
    early = resident(process)
    for thread in threads:
        thread.join(seconds + 120)
        assert not thread.is_alive()
    assert not work.problems, work.problems[:3]
    assert until(lambda: metric(url, "acgpt_active_rows") == metric(url, "acgpt_queue_length") == 0, 30)
    late = resident(process)
    print(f"{dict(work.counts)}; memory {early:.0f} MB after a quarter of the time, {late:.0f} MB at the end")
    server.interrupt(signal.SIGTERM)
    assert server.wait(60) == 0
    return work.counts, early, late


def test_a_few_seconds_under_load(start, folder):
    counts, _, _ = soak(start(*LIMITS), folder, 6)
    assert counts["ask"] > 5 and counts["fail"] and counts["hang_up"] and counts["cancel"]


@pytest.mark.soak
def test_ten_minutes_under_load(start, folder):
    counts, early, late = soak(start(*LIMITS), folder, float(os.environ.get("ACGPT_TEST_SOAK_SECONDS", "600")))
    assert min(counts[name] for name in ("ask", "fail", "hang_up", "cancel")) > 50
    assert late < 1.1 * early + 20  # MB
