"""Over a real connection: a client that hangs up frees its rows, pieces come as they are made, requests share steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from servers import MASK, running, service_of, tiny_lm, until

from acgpt import LanguageModel, Metadata
from acgpt.engine.modules import turn
from acgpt.models.ask import StreamAsk
from acgpt.models.scheduler import Scheduler
from acgpt.serving.app import create_app
from acgpt.serving.errors import Rejected
from acgpt.serving.server import Gate, Server

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


def connected(url):
    """Return a socket that is connected to a server."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.settimeout(10)
    return connection


def connect(url, path, body):
    """Send a request over a socket, and return the socket."""
    connection, data = connected(url), json.dumps(body).encode()
    kind = "Host: localhost\r\nContent-Type: application/json"
    head = f"POST {path} HTTP/1.1\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sample", {**LONG, "n": 4}),
        ("/v1/fill", {"template": "The {{_400-500}}", "max_tokens": 500, "stream": True}),
        ("/v1/completions", {"prompt": "The", "max_tokens": 500, "n": 8, "stream": True}),
    ],
)
def test_a_client_that_hangs_up_frees_its_rows(server, slow_steps, path, body):
    scheduler = server.service.scheduler
    connection = connect(server.url, path, body)
    assert until(lambda: scheduler.active_rows > 0)
    if body.get("stream"):
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    steps = scheduler.counts.steps
    assert until(lambda: scheduler.active_rows == 0)
    assert scheduler.counts.steps - steps < 100, "the rows were not freed but finished"
    assert until(lambda: scheduler.counts.cancelled == 1)
    reply = httpx.post(f"{server.url}/v1/log_prob", json={"query": "The {{cat}}"})
    assert reply.status_code == 200


@pytest.mark.parametrize("end", ["hang-up", "timeout", "stop"])
def test_an_answer_that_nobody_waits_for_is_not_logged(long_lm, slow_steps, caplog, end):
    with service_of(long_lm, timeout=1.5 if end == "timeout" else 60) as service, running(service) as server:
        connection = connect(server.url, "/v1/sample", {**LONG, "n": 2})
        assert until(lambda: service.scheduler.active_rows > 0)
        if end == "hang-up":
            connection.close()
        elif end == "stop":
            service.stop()
        if end != "hang-up":
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
    head = b"POST /v1/log_prob HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with service_of(long_lm, timeout=0.3) as service, running(service) as server, connected(server.url) as connection:
        connection.sendall(head + b"{")
        assert b" 504 " in connection.recv(4096)


WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def received(connection):
    """Return all that comes until the server closes the connection."""
    connection.settimeout(10)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while parts[-1:] != [b""]:
            parts.append(connection.recv(4096))
    return b"".join(parts)


@pytest.mark.parametrize(("before", "sent"), [(b"", b""), (b"", WHOLE[:8]), (b"", WHOLE[:-2]), (WHOLE, WHOLE[:8])])
def test_a_connection_without_a_whole_head_is_closed(server, monkeypatch, before, sent):
    monkeypatch.setattr("acgpt.serving.server.HEAD_SECONDS", 0.5)
    with connected(server.url) as connection:
        if before:
            connection.sendall(before)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
        for byte in sent:  # one by one: what comes slowly is no exception
            connection.sendall(bytes([byte]))
        assert received(connection) == b""
    assert until(lambda: not server.server.server_state.connections)


def test_the_time_for_a_head_is_not_that_of_the_answer(server, slow_steps, monkeypatch):
    monkeypatch.setattr("acgpt.serving.server.HEAD_SECONDS", 0.5)
    with httpx.Client(timeout=60) as client:
        for _ in range(2):
            assert client.post(f"{server.url}/v1/sample", json={**LONG, "query": "The {{_120}}"}).status_code == 200


def test_too_many_connections_are_told_so(long_lm, monkeypatch):
    monkeypatch.setattr("acgpt.serving.server.MOST_CONNECTIONS", 2)
    with service_of(long_lm) as service, running(service) as server:
        state = server.server.server_state
        idle = [connected(server.url) for _ in range(2)]
        assert until(lambda: len(state.connections) == 2)
        reply = httpx.get(f"{server.url}/health")
        assert reply.status_code == 503 and reply.headers["connection"] == "close" and "retry-after" in reply.headers
        assert reply.json()["error"]["code"] == "too_many_connections" and reply.json()["error"]["param"] is None
        many = [connected(server.url) for _ in range(80)]
        assert until(lambda: 2 < len(state.connections) <= 2 + 64)
        for connection in idle + many:
            connection.close()
        assert until(lambda: not state.connections)
        assert httpx.get(f"{server.url}/health").status_code == 200


def small_buffers(server):
    """Return a connection that holds a few kilobytes of a reply."""
    for listener in server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.servers[0].sockets[0].getsockname())
    return connection


def unread(server):
    """Return the number of bytes that clients have not taken yet."""
    return sum(connection.transport.get_write_buffer_size() for connection in server.server_state.connections)


def test_a_client_that_does_not_read_its_reply_is_dropped(server, monkeypatch):
    monkeypatch.setattr("acgpt.serving.server.STALL_SECONDS", 0.3)
    with small_buffers(server.server) as connection:
        connection.sendall(WHOLE.replace(b"/health", b"/openapi.json"))
        assert until(lambda: unread(server.server))
        assert until(lambda: not server.server.server_state.connections)


def test_a_client_that_reads_slowly_gets_its_reply(server, monkeypatch):
    monkeypatch.setattr("acgpt.serving.server.STALL_SECONDS", 1.0)
    with small_buffers(server.server) as connection:
        connection.sendall(WHOLE.replace(b"/health", b"/openapi.json").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))  # fmt: skip  # noqa: E501
        assert until(lambda: unread(server.server))
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(body)


def test_a_client_that_does_not_read_does_not_keep_the_server_from_ending(long_lm, monkeypatch):
    monkeypatch.setattr("acgpt.serving.server.DRAINED_SECONDS", 0.3)
    with service_of(long_lm) as service, socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate()
        gate.app = create_app(service)
        server = Server(gate, 10)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert until(lambda: server.started)
        with small_buffers(server) as connection:
            connection.sendall(WHOLE.replace(b"/health", b"/openapi.json"))
            assert until(lambda: unread(server))
            server.service = service
            server.drain(service)  # as a signal does
            thread.join(15)
            assert not thread.is_alive()


def test_a_stream_that_nobody_reads_ends_at_its_deadline(long_lm, slow_steps):
    async def read_one(service):
        items = service.stream(
            lambda report: long_lm.searches.stream(StreamAsk("The {{_400-500}}", max_tokens=500), report)
        )
        await anext(items)
        (job,) = service.scheduler.jobs
        while not job.cancelled:
            await asyncio.sleep(0.01)
        with pytest.raises(Rejected, match="took longer"):
            async for _ in items:
                pass

    with service_of(long_lm, timeout=1.5) as service:
        asyncio.run(asyncio.wait_for(read_one(service), 60))


def test_a_chunked_body_that_is_too_large_is_refused_while_it_is_read(long_lm):
    head = b"POST /v1/log_prob HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    limited = service_of(long_lm, max_body_bytes=10_000)
    with limited as service, running(service) as server, connected(server.url) as connection:
        connection.sendall(head)
        for _ in range(11):  # the body does not end
            connection.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert b" 413 " in connection.recv(4096)


def test_pieces_arrive_before_the_fill_is_finished(server, slow_steps):
    body = {"template": "The {{_100-200}}", "max_tokens": 200, "stream": True, "temperature": 1.0, "seed": 3}
    times = []
    with httpx.stream("POST", f"{server.url}/v1/fill", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
    assert len(times) > 20 and times[-1] - times[0] > 0.2


@pytest.mark.parametrize("adapted", [False, True])
def test_what_needs_no_pass_does_not_wait_for_one(adapted):
    lm = tiny_lm()
    if adapted:
        peft = pytest.importorskip("peft")
        network = peft.get_peft_model(lm.model, peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
        lm = LanguageModel(network, lm.tokenizer, metadata={"mine": Metadata(mask_token_id=MASK)})
    template = "The {{cat}} sat."
    switched = lm._executor.switch.to(None) if adapted else contextlib.nullcontext()
    with service_of(lm) as service, running(service) as server, turn(lm.model), switched:  # as if a pass went on
        model = httpx.get(f"{server.url}/v1/model", timeout=20).json()
        assert model["reads_future"] and model["adapters"] == (["mine"] if adapted else [])
        for path, body in (("query", {"template": template}), ("layout", {"template": template})):
            assert httpx.post(f"{server.url}/v1/{path}", json=body, timeout=20).status_code == 200
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
