"""Over a real connection: a client that hangs up frees its rows, pieces come as they are made, requests share steps."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from servers import running, service_of, tiny_lm, until

from acgpt.serving.scheduler import Scheduler

LONG = {"query": "The {{_500}}", "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def long_lm():
    """A tiny model with many positions, so that a request can take long."""
    return tiny_lm(positions=600)


@pytest.fixture
def server(long_lm):
    with service_of(long_lm) as service, running(service) as server:
        yield server


@pytest.fixture
def slow_steps(monkeypatch):
    """Let each decoding step take 5 ms."""
    step = Scheduler._step

    def slow(self, route):
        time.sleep(0.005)
        return step(self, route)

    monkeypatch.setattr(Scheduler, "_step", slow)


def connect(url, path, body):
    """Send a request over a socket, and return the socket."""
    parts, data = urlsplit(url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sample", {**LONG, "n": 4}),
        ("/v1/fill", {"template": "The {{_400-500}}", "max_tokens": 500, "stream": True}),
    ],
)
def test_a_client_that_hangs_up_frees_its_rows(server, slow_steps, path, body):
    scheduler = server.service.scheduler
    connection = connect(server.url, path, body)
    assert until(lambda: scheduler.active_rows > 0)
    if body.get("stream"):
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    start, steps = time.monotonic(), scheduler.counts.steps
    assert until(lambda: scheduler.active_rows == 0, seconds=5)
    assert scheduler.counts.steps - steps < 100, "the rows were not freed but finished"
    assert time.monotonic() - start < 2
    assert until(lambda: scheduler.counts.cancelled == 1)
    reply = httpx.post(f"{server.url}/v1/log_prob", json={"query": "The {{cat}}"})
    assert reply.status_code == 200


@pytest.mark.parametrize("end", ["hang-up", "timeout", "stop"])
def test_an_answer_that_nobody_waits_for_is_not_logged(long_lm, slow_steps, caplog, end):
    with service_of(long_lm, timeout=0.5 if end == "timeout" else 60) as service, running(service) as server:
        connection = connect(server.url, "/v1/sample", {**LONG, "n": 2})
        assert until(lambda: service.scheduler.active_rows > 0)
        if end == "hang-up":
            connection.close()
        elif end == "stop":
            service.stop()
        if end != "hang-up":
            connection.settimeout(10)
            assert {"timeout": b" 504 ", "stop": b" 503 "}[end] in connection.recv(4096)
        assert until(lambda: not service.scheduler.jobs)
        time.sleep(0.1)  # for the callbacks of the futures
        gc.collect()
        time.sleep(0.1)
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text


def test_a_client_that_hangs_up_before_a_stream_begins_is_noticed(server, monkeypatch):
    gate, advance = threading.Event(), Scheduler._advance

    def held(self, job, answer):
        gate.wait(20)
        return advance(self, job, answer)

    monkeypatch.setattr(Scheduler, "_advance", held)
    connection = connect(server.url, "/v1/fill", {"template": "The {{_}} sat.", "stream": True})
    assert until(lambda: server.service.scheduler.jobs)
    connection.close()
    assert until(lambda: all(job.cancelled for job in list(server.service.scheduler.jobs)))
    gate.set()
    assert until(lambda: not server.service.scheduler.jobs)


def test_a_body_that_does_not_come_is_given_up(long_lm):
    with service_of(long_lm, timeout=0.3) as service, running(service) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(b"POST /v1/log_prob HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            connection.settimeout(10)
            assert b" 504 " in connection.recv(4096)


def test_a_chunked_body_that_is_too_large_is_refused_while_it_is_read(long_lm):
    with service_of(long_lm, max_body_bytes=10_000) as service, running(service) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(b"POST /v1/log_prob HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(11):  # the body does not end
                connection.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
            connection.settimeout(10)
            assert b" 413 " in connection.recv(4096)


def test_pieces_arrive_before_the_fill_is_finished(server, slow_steps):
    body = {"template": "The {{_100-200}}", "max_tokens": 200, "stream": True, "temperature": 1.0, "seed": 3}
    times = []
    with httpx.stream("POST", f"{server.url}/v1/fill", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
    assert len(times) > 20 and times[-1] - times[0] > 0.2


def test_many_clients_are_answered_together(server, slow_steps):
    def ask(seed):
        body = {"query": "The {{_60}}", "seed": seed}
        return httpx.post(f"{server.url}/v1/sample", json=body, timeout=60).json()["results"][0][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(12)))
    assert server.service.scheduler.counts.steps < 12 * 60 / 2
    assert texts == [server.service.lm.sample("The {{_60}}", seed=seed)[0].text for seed in range(12)]
