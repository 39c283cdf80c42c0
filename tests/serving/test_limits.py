"""What a server refuses, with which status, and that the reply names the field or the limit."""

from __future__ import annotations

import asyncio
import json
import logging
import operator
import threading

import pytest
import torch
from servers import local_client, service_of, until

from acgpt.models.scheduler import Scheduler
from acgpt.serving import patterns
from acgpt.serving.app import create_app
from acgpt.serving.schemas import Lenient, Strict

GAP, SCORE = "The {{_}} sat on the mat.", "The {{cat}} sat."
SHAPE = {"message", "type", "param", "code"}


def refused(reply, status, code=None, param=None):
    """Check the status and the shape of a reply, and return the message."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == SHAPE and error["message"]
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error
    return error["message"]


# ---- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"\x00", b'{"query": "a{{b}}", "query\\udfff": 1}', b'{"query": "a{{_1}}", "future": NaN}']
)
def test_a_malformed_body_is_refused(http, body):
    refused(http.post("/v1/log_prob", content=body, headers={"Content-Type": "application/json"}), 422)


ROUTES = [
    ("/v1/fill", b'{"template": "The {{_}}", "n": 1, "max_tokens": 2}'),
    ("/v1/log_prob", b'{"query": "a{{b}}"}'),
    ("/v1/completions", b'{"prompt": "The", "max_tokens": 1}'),
    ("/v1/fim/completions", b'{"prompt": "The", "max_tokens": 1}'),
    ("/infill", b'{"input_prefix": "The", "n_predict": 0}'),
    ("/v1/layout", b'{"template": "a{{b}}"}'),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_body_that_is_not_declared_as_json_is_refused(http, path, body):
    """Pages of other sites could send it without asking first (CORS)."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", None):
        reply = http.post(path, content=body, headers={} if kind is None else {"Content-Type": kind})
        message = refused(reply, 415, "unsupported_media_type")
        assert "send Content-Type: application/json" in message
        assert ("no type" if kind is None else kind.partition(";")[0]) in message
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert http.post(path, content=body, headers={"Content-Type": kind}).status_code != 415


def test_a_method_that_a_path_does_not_have_is_told_with_the_right_one(http):
    reply = http.get("/v1/fill")
    refused(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(served_lm):
    """A server with low limits."""
    limits = {"max_body_bytes": 2000, "max_tokens_per_request": 60, "max_questions": 3, "max_n": 4}
    with service_of(served_lm, **limits) as service:
        yield local_client(create_app(service))


def test_a_body_in_chunks_is_read(small):
    chunks = iter([b'{"query": ', b'"a{{b}}"}'])
    reply = small.post("/v1/log_prob", content=chunks, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200 and "content-length" not in reply.request.headers


def test_too_many_questions_samples_and_tokens_are_refused(small):
    refused(small.post("/v1/log_prob", json={"query": [SCORE] * 4}), 422, "limit_exceeded", "query")
    for name in ("n", "best_of"):
        body = {"template": GAP, "max_tokens": 2, name: 5}
        assert "at most 4" in refused(small.post("/v1/fill", json=body), 422, "limit_exceeded", name)
    refused(small.post("/v1/sample", json={"query": "{{_1}}", "candidates": 5}), 422, "limit_exceeded", "candidates")
    for route, body, param in (
        ("log_prob", {"query": "a " * 60 + "{{b}}"}, "query"),
        ("log_prob", {"query": ["a " * 30 + "{{b}}"] * 3}, "query.1"),
        ("sample", {"query": "The {{_20}}", "n": 4}, "query"),
        ("sample", {"query": GAP, "candidates": 4}, "query"),
        ("fill", {"template": GAP}, "template"),
        ("fill", {"template": GAP, "n": 1, "best_of": 4, "max_tokens": 15}, "template"),
        ("fill", {"template": "The {{_1-60}}", "n": 1}, "template"),
        ("fill", {"template": GAP, "max_tokens": 80, "stream": True}, "template"),
        ("rank", {"template": "a|b " * 8 + "{{a|b|c|d|e|f|g}}"}, "template"),
        ("pieces", {"tokens": [5] * 61}, "tokens"),
        ("surprise", {"text": "The cat sat on the mat. " * 2, "future": True}, "text"),
    ):
        message = refused(small.post(f"/v1/{route}", json=body), 422, "limit_exceeded", param)
        assert "at most 60 are allowed (max_tokens_per_request)" in message
    assert small.post("/v1/fill", json={"template": GAP, "n": 2, "max_tokens": 4}).status_code == 200
    assert small.post("/v1/surprise", json={"text": "The cat sat on the mat. " * 2}).status_code == 200


SLOW = "In {{_:[ab]*a[ab]{24}}}."


def test_patterns_that_take_too_long_to_compile_are_refused(http):
    pytest.importorskip("outlines_core")
    for stream in (False, True):
        body = {"template": SLOW, "n": 1, "stream": stream}
        message = refused(http.post("/v1/fill", json=body), 422, "invalid_template", "template")
        assert "takes too long or too much memory to compile" in message
    assert http.post("/v1/fill", json={"template": "In {{_:[0-9]+}}.", "n": 1, "max_tokens": 3}).status_code == 200


@pytest.fixture
def endless(monkeypatch):
    """Let the check of a pattern take for ever; return the processes that have begun."""
    processes, begin = [], asyncio.create_subprocess_exec

    async def begun(*arguments, **options):
        processes.append(await begin(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(patterns, "PROGRAM", "import time\ntime.sleep(600)")
    monkeypatch.setattr(patterns, "SECONDS", 600)
    monkeypatch.setattr(patterns.asyncio, "create_subprocess_exec", begun)
    return processes


def test_the_check_of_a_pattern_is_part_of_the_time_of_a_request(served_lm, endless):
    def checked(http, **body):
        """Ask, and return whether a check has begun: on a slow machine the time may be over before."""
        before = len(endless)
        refused(http.post("/v1/fill", json={"template": SLOW, **body}), 504, "time_exceeded")
        return len(endless) > before

    with service_of(served_lm, timeout=1) as service, local_client(create_app(service)) as http:  # one event loop
        assert all(until(lambda stream=stream: checked(http, stream=stream)) for stream in (False, True))
        assert until(lambda: all(process.returncode is not None for process in endless))


def test_checks_of_patterns_end_if_nobody_waits_and_are_few_at_a_time(served_lm, endless):
    async def ask(service):
        tasks = [asyncio.ensure_future(service.patterns.compile_in_time(f"a{{{i}}}")) for i in range(6)]
        while len(endless) < patterns.MOST_AT_ONCE:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with service_of(served_lm) as service:
        asyncio.run(ask(service))
        assert len(endless) == patterns.MOST_AT_ONCE and all(process.returncode is not None for process in endless)
        assert not service.patterns.known


def test_a_check_that_takes_too_much_memory_fails(monkeypatch):
    assert asyncio.run(patterns.compiled(b'["[0-9]+"]'))
    program = patterns.PROGRAM.replace("        Index(", "        bytes(2**30)\n        Index(")
    monkeypatch.setattr(patterns, "PROGRAM", program)
    assert not asyncio.run(patterns.compiled(b'["[0-9]+"]'))


@pytest.mark.parametrize(
    "template",
    ["\\{{" * 200_000 + "{{a}}", "a" * 900_000 + "{{b}}", "{{a}}" * 180_000, "{{_}}" * 180_000, "{" * 900_000,
     "\\" * 400_000 + "{{a}}", "{{" + "\\|" * 200_000 + "}}", "{{" + "a|" * 400_000 + "}}"],
    ids=["escapes", "text", "slots", "gaps", "braces", "backslashes", "escapes in a slot", "alternatives"],
)  # fmt: skip
def test_a_huge_template_is_refused_before_the_time_of_the_request_is_over(http, template):
    for route, field in (("log_prob", "query"), ("fill", "template")):
        refused(http.post(f"/v1/{route}", json={field: template}), 422, param=field)


def list_schemas(schema):
    """Yield the schemas of all lists in a core schema of pydantic."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for value in schema.values():
            yield from list_schemas(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from list_schemas(value)


def subclasses(kind):
    """Yield a class and all that derive from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)


def test_the_first_invalid_entry_of_a_list_ends_its_check(service):
    """A list of a million wrong entries would otherwise be a million errors, each with the text of the entry."""
    models = [model for kind in (Strict, Lenient) for model in subclasses(kind)]
    lists = [(model, schema) for model in models for schema in list_schemas(model.__pydantic_core_schema__)]
    assert [(model.__name__, schema) for model, schema in lists if not schema.get("fail_fast")] == []
    bodies = {schema for schema in create_app(service).openapi()["components"]["schemas"] if schema.endswith("Request")}
    assert bodies <= {model.__name__ for model in models} and len(bodies) >= 12 and len(lists) >= 12


# ---- queue and time -------------------------------------------------------------------------------------------------


@pytest.fixture
def held(served_lm, monkeypatch, request):
    """A server whose scheduler does nothing until `release` is set, with a queue of 2. The parameter is its timeout."""
    release, wait = threading.Event(), Scheduler._advance

    def advance(self, job, answer):
        release.wait(30)
        return wait(self, job, answer)

    monkeypatch.setattr(Scheduler, "_advance", advance)
    with service_of(served_lm, queue=2, timeout=getattr(request, "param", 30)) as service:
        yield local_client(create_app(service)), service, release
        release.set()


def test_a_full_queue_is_429_and_says_when_to_try_again(held):
    http, service, release = held
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(http.post("/v1/log_prob", json={"query": SCORE})))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert until(lambda: service.scheduler.queued == 2)
    reply = http.post("/v1/log_prob", json={"query": SCORE})
    refused(reply, 429, "queue_full")
    assert float(reply.headers["retry-after"]) > 0
    assert "acgpt_queue_length 2\n" in http.get("/metrics").text
    release.set()
    for thread in threads:
        thread.join(30)
    assert [reply.status_code for reply in replies] == [200, 200]


@pytest.mark.parametrize("held", [0.5], indirect=True)
def test_a_request_that_takes_too_long_is_504(held):
    http, service, release = held
    message = refused(http.post("/v1/log_prob", json={"query": SCORE}), 504, "time_exceeded")
    assert "0.5 seconds" in message and "fewer tokens" in message and "--timeout" in message
    refused(http.post("/v1/fill", json={"template": GAP, "stream": True}), 504, "time_exceeded")
    release.set()
    assert until(lambda: not service.scheduler.jobs)


def test_a_stream_that_takes_too_long_ends_with_an_error_event(served_lm, monkeypatch):
    with service_of(served_lm, timeout=2) as service:
        step, stepped = Scheduler._step, threading.Event()

        def slow(self, route):
            if stepped.is_set():
                until(lambda: all(job.cancelled for job in list(self.jobs)))
            stepped.set()
            return step(self, route)

        monkeypatch.setattr(Scheduler, "_step", slow)
        body = {"template": "The {{_20-40}}", "max_tokens": 40, "stream": True}
        reply = local_client(create_app(service)).post("/v1/fill", json=body)
        assert reply.status_code == 200
        *pieces, last = [event for event in reply.text.split("\n\n") if event]
        assert pieces and last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["error"]["code"] == "time_exceeded"
        assert until(lambda: not service.scheduler.active_rows)


@pytest.mark.parametrize(
    ("path", "body", "called"),
    [
        ("/v1/query", {"template": SCORE}, "query"),
        ("/v1/pieces", {"tokens": [5]}, "pieces"),
        ("/v1/layout", {"template": SCORE}, "searches.encode"),
        ("/v1/completions", {"prompt": "The"}, "tokenizer.__call__"),
        ("/v1/log_prob", {"query": SCORE}, "searches.scorable"),
    ],
)
def test_reading_a_request_is_part_of_its_time(served_lm, monkeypatch, path, body, called):
    owner, _, name = called.rpartition(".")
    owner = operator.attrgetter(owner)(served_lm) if owner else served_lm
    release, real = threading.Event(), getattr(owner, name)

    def slow(*arguments, **options):
        release.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(type(owner), name, slow)
    with service_of(served_lm, timeout=0.3) as service:
        refused(local_client(create_app(service)).post(path, json=body), 504, "time_exceeded")
        release.set()


def test_a_request_has_one_deadline(served_lm, monkeypatch):
    deadlines, timeout_at = [], asyncio.timeout_at
    monkeypatch.setattr(asyncio, "timeout_at", lambda when: (deadlines.append(when), timeout_at(when))[1])
    with service_of(served_lm) as service:
        http = local_client(create_app(service))
        for stream in (False, True):
            deadlines.clear()
            assert http.post("/v1/fill", json={"template": GAP, "max_tokens": 2, "n": 1, "stream": stream}).is_success
            assert len(deadlines) >= 3 and len(set(deadlines)) == 1


def test_a_server_that_drains_refuses(served_lm):
    with service_of(served_lm) as service:
        http = local_client(create_app(service))
        assert http.get("/health").json() == {"status": "ok"}
        service.scheduler.close()
        reply = http.get("/health")
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "unavailable_error"
        reply = http.post("/v1/log_prob", json={"query": SCORE})
        refused(reply, 503, "shutting_down")
        assert "retry-after" in reply.headers


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_failure_is_500_leaks_nothing_and_harms_no_other_request(served_lm, monkeypatch, caplog):
    log_prob = type(served_lm.searches).log_prob

    def failing(self, ask):
        search = log_prob(self, ask)

        def fails():
            yield next(search)
            raise KeyError("secret prompt")

        return fails() if ask.question == "ab{{c}}" else search

    monkeypatch.setattr(type(served_lm.searches), "log_prob", failing)
    with service_of(served_lm) as service, caplog.at_level(logging.INFO, "acgpt.serving"):
        http = local_client(create_app(service))
        reply = http.post("/v1/log_prob", json={"query": "ab{{c}}"})
        message = refused(reply, 500, "internal_error")
        assert "secret" not in reply.text and "KeyError" not in reply.text and message
        assert http.post("/v1/log_prob", json={"query": SCORE}).status_code == 200
    assert "secret" not in caplog.text and "KeyError" in caplog.text
    assert caplog.records[-2].getMessage().count('"status": 500') == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
    ids=["Python", "GPU", "CPU", "Windows"],
)
def test_a_request_without_room_in_memory_is_503_and_harms_no_other(served_lm, monkeypatch, error):
    def scores(self, *arguments):
        raise error

    with service_of(served_lm) as service:
        http = local_client(create_app(service))
        with monkeypatch.context() as patch:
            patch.setattr(type(served_lm.searches.executor), "answers", scores)
            message = refused(http.post("/v1/log_prob", json={"query": SCORE}), 503, "out_of_memory")
            assert "no memory for this request" in message and "CUDA" not in message and "bytes" not in message
        assert http.post("/v1/log_prob", json={"query": SCORE}).status_code == 200


def test_a_failure_in_a_route_itself_is_500_in_the_same_shape(service, monkeypatch):
    monkeypatch.setattr("acgpt.serving.native.to_json", lambda answer: 1 / 0)
    http = local_client(create_app(service))
    refused(http.post("/v1/log_prob", json={"query": SCORE}), 500, "internal_error")


# ---- keys, origins, logs --------------------------------------------------------------------------------------------


def test_a_key_is_needed_for_all_but_health(service):
    http = local_client(create_app(service, keys=["first-key", "second-key"]))
    assert http.get("/health").status_code == 200
    wrong = [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer first"}, {"Authorization": "Basic first-key"},
             {"Authorization": "first-key"}, {"Authorization": "Bearer first-keyé".encode("latin1")}]  # fmt: skip
    for headers in wrong:
        for path in ("/v1/model", "/metrics", "/openapi.json", "/nothing"):
            reply = http.get(path, headers=headers)
            refused(reply, 401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        refused(http.post("/v1/log_prob", json={"query": SCORE}, headers=headers), 401)
    for key in ("first-key", "second-key"):
        reply = http.post("/v1/log_prob", json={"query": SCORE}, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200


def test_other_origins_are_allowed_only_if_they_are_named(service):
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    closed, opened = (
        local_client(create_app(service, keys=["key"], cors=cors)) for cors in ((), ("https://example.org",))
    )
    assert "access-control-allow-origin" not in closed.options("/v1/fill", headers=headers).headers
    reply = opened.options("/v1/fill", headers=headers)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://example.org"
    other = opened.options("/v1/fill", headers={**headers, "Origin": "https://example.com"})
    assert "access-control-allow-origin" not in other.headers


def test_the_log_has_one_line_per_request_without_prompts_or_keys(service, caplog):
    http = local_client(create_app(service, keys=["the-key"]))
    headers, most = {"Authorization": "Bearer the-key"}, service.limits.max_body_bytes
    with caplog.at_level(logging.INFO, "acgpt.serving"):
        http.post("/v1/log_prob?q=private", json={"query": ["The {{cat}} sat.", "My {{secret}}"]}, headers=headers)
        http.post("/v1/fill", json={"template": "My {{_}}", "max_tokens": 2, "stream": True}, headers=headers)
        http.get("/private", headers={"Authorization": "Bearer not-the-key"})
        http.get("/v1/model")
        http.post("/v1/rank", content=b'{"template": "' + b"x" * most + b'"}', headers=headers)
        http.post("/v1/rank", content=rb'{"template": "\ud800"}', headers=headers)
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "acgpt.serving"]
    assert [set(line) for line in lines] == [{"time", "method", "route", "status", "ms", "tokens"}] * 6
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/v1/log_prob", 200), ("POST", "/v1/fill", 200), ("GET", "unmatched", 401),
        ("GET", "/v1/model", 401), ("POST", "/v1/rank", 413), ("POST", "/v1/rank", 422),
    ]  # fmt: skip
    assert lines[0]["tokens"] > 1 and lines[1]["tokens"] >= 0 and lines[2]["tokens"] is None
    for word in ("secret", "private", "the-key"):
        assert word not in " ".join(record.getMessage() for record in caplog.records if record.name == "acgpt.serving")


def test_the_metrics_count_requests_and_tokens(served_lm):
    with service_of(served_lm) as service:
        http = local_client(create_app(service))
        http.post("/v1/log_prob", json={"query": SCORE})
        http.post("/v1/sample", json={"query": "The {{_5}}", "n": 2})
        for path in ("/a", "/b", "/c"):
            http.get(path)
        reply = http.get("/metrics")
    lines = reply.text.splitlines()
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'acgpt_requests_total{method="POST",route="/v1/log_prob",status="200"} 1' in lines
    assert 'acgpt_requests_total{method="GET",route="unmatched",status="404"} 3' in lines
    assert 'acgpt_request_seconds_bucket{route="/v1/sample",le="+Inf"} 1' in lines
    assert 'acgpt_request_seconds_count{route="/v1/sample"} 1' in lines
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert int(values["acgpt_tokens_drawn_total"]) == 10 and int(values["acgpt_tokens_scored_total"]) >= 1
    assert int(values["acgpt_questions_total"]) == 2 and values["acgpt_active_rows"] == "0"
    assert all(line.startswith(("# HELP ", "# TYPE ", "acgpt_")) for line in lines)
    float(values["acgpt_busy_seconds_total"])


@pytest.mark.parametrize("cors", [(), ("https://evil.example",)])
def test_without_a_key_only_requests_for_this_machine_are_answered(service, cors):
    """A page could let its name point to this machine, and read the answers (DNS rebinding)."""
    http = local_client(create_app(service, cors=cors, address="127.0.0.9"))
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8080", "127.0.0.9:80"):
        assert http.get("/v1/model", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::2]",
                 "10.0.0.1", "0.0.0.0"):  # fmt: skip
        for path in ("/v1/model", "/", "/health", "/metrics"):
            message = refused(http.get(path, headers={"Host": host}), 421, "wrong_host")
            assert "Use 127.0.0.1 or" in message and "API key" in message
        reply = http.post("/v1/log_prob", json={"query": SCORE}, headers={"Host": host})
        refused(reply, 421, "wrong_host")


def test_with_a_key_the_host_does_not_matter(service):
    http = local_client(create_app(service, keys=["key"]))
    headers = {"Host": "example.org", "Authorization": "Bearer key"}
    assert http.get("/v1/model", headers=headers).status_code == 200
