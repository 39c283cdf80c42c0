"""The record of bad requests to the server: status and body of each reply, for all protocols.

A case is a path and a body, or a method, a path, headers and a body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from record import check
from servers import local_client, service_of, tiny_lm

from acgpt.serving.app import create_app

LIMITS = {"max_body_bytes": 150_000, "max_questions": 3, "max_n": 4, "max_tokens_per_request": 300}
KEY = "a-key"

NATIVE = [
    '/v1/log_prob {}',
    '/v1/log_prob {"query": 3}',
    '/v1/log_prob {"query": []}',
    '/v1/log_prob {"query": ["The {{cat}} sat.", null]}',
    '/v1/log_prob {"query": ["The {{cat}} sat.", "The {{cat"]}',
    '/v1/log_prob {"query": ["a{{b}}", "a{{b}}", "a{{b}}", "a{{b}}"]}',
    '/v1/log_prob {"query": "The {{_}} sat."}',
    '/v1/log_prob {"query": "The {{cat}} sat.", "temprature": 1}',
    '/v1/log_prob {"query": "The {{cat}} sat.", "zzz": 1, "yyy": 2}',
    '/v1/log_prob {"query": "The {{cat}} sat.", "future": "true"}',
    '/v1/log_prob {"query": "The {{cat}} sat.", "adapter": "mine"}',
    '/v1/log_prob {"query": {"tokens": ["5"], "given": [true]}}',
    '/v1/log_prob {"query": {"tokens": [5], "given": [0]}}',
    '/v1/log_prob {"query": {"tokens": [5], "given": []}}',
    '/v1/log_prob {"query": {"tokens": [5], "given": [true], "more": 1}}',
    '/v1/log_prob {"query": {"tokens": [5000], "given": [false]}}',
    '/v1/log_prob {"query": {"tokens": [5, 6], "given": [true, false], "start": -1}}',
    '/v1/log_prob {"query": {"given": [true]}}',
    '/v1/log_prob {"query": "\\ud800 {{cat}}"}',
    '/v1/sample {"query": "{{_1}}", "n": 0}',
    '/v1/sample {"query": "{{_1}}", "n": true}',
    '/v1/sample {"query": "{{_1}}", "n": 1.0}',
    '/v1/sample {"query": "{{_1}}", "n": 5}',
    '/v1/sample {"query": "{{_1}}", "n": 3000000000}',
    '/v1/sample {"query": "{{_}}", "candidates": 5}',
    '/v1/sample {"query": "{{_90}}", "n": 4}',
    '/v1/sample {"query": "{{_99}}"}',
    '/v1/sample {"query": "{{_1}}", "temperature": NaN}',
    '/v1/sample {"query": "{{_1}}", "temperature": 1e999}',
    '/v1/sample {"query": "{{_1}}", "temperature": -1}',
    '/v1/sample {"query": "{{_1}}", "temperature": "0.5"}',
    '/v1/sample {"query": "{{_1}}", "temperature": true}',
    '/v1/sample {"query": "{{_1}}", "top_p": 0}',
    '/v1/sample {"query": "{{_1}}", "top_k": 0}',
    '/v1/sample {"query": "{{_1}}", "seed": -1}',
    '/v1/sample {"query": "{{_1}}", "seed": 9999999999999999999999}',
    '/v1/fill {"template": "no gap"}',
    '/v1/fill {"template": "The {{_:[}} sat."}',
    '/v1/fill {"template": ["The {{_}} sat.", 3]}',
    '/v1/fill {"template": "The {{_}} sat.", "stop": [""]}',
    '/v1/fill {"template": "The {{_}} sat.", "stop": 3}',
    '/v1/fill {"template": "The {{_}} sat.", "distinct": 1}',
    '/v1/fill {"template": "The {{_}} sat.", "patience": 0}',
    '/v1/fill {"template": "The {{_}} sat.", "best_of": 100}',
    '/v1/fill {"template": "The {{_}} sat.", "stream": true, "n": 2}',
    '/v1/fill {"template": ["The {{_}} sat."], "stream": true}',
    '/v1/fill {"template": "The {{_}} sat.", "stream": true, "patience": 2}',
    '/v1/fill {"template": "The {{_}} sat.", "stream": true, "best_of": 3}',
    '/v1/fill {"template": "The {{_}} sat.", "stream": true, "distinct": true}',
    '/v1/fill {"template": "The {{_", "stream": true}',
    '/v1/rank {"template": "no alternatives"}',
    '/v1/rank {"template": "{{a|a}}"}',
    '/v1/lengths {"template": "The {{_}} sat."}',
    '/v1/lengths {"template": "The {{_}} sat.", "known": [-1]}',
    '/v1/query {"template": "The {{_}} sat."}',
    '/v1/query {"template": ["{{a}}", "{{b}}", "{{c}}", "{{d}}"]}',
    '/v1/pieces {"tokens": [99999]}',
    '/v1/pieces {"tokens": [5, null]}',
    '/v1/surprise {"text": ""}',
    '/v1/surprise {"text": "The cat", "positions": [50]}',
    '/v1/surprise {"text": "The cat", "top": 21}',
    '/v1/surprise {}',
    '/v1/surprise {"text": "The cat", "positions": [0]}',
    '/v1/surprise {"text": "The cat", "adapter": "mine", "top": 2}',
    '/v1/surprise {"text": "The cat", "more": 1}',
    '/v1/layout {"template": "The {{_}} sat."}',
    '/v1/layout {"template": "The {{_"}',
    '/v1/layout {"template": "The {{_70}} sat on the {{_40}}"}',
    '/v1/layout {"template": ["The {{cat}} sat."]}',
]  # fmt: skip
OPENAI = [
    '/v1/completions {}',
    '/v1/completions {"prompt": 3}',
    '/v1/completions {"prompt": []}',
    '/v1/completions {"prompt": [1, "a"]}',
    '/v1/completions {"prompt": [-1]}',
    '/v1/completions {"prompt": [99999]}',
    '/v1/completions {"prompt": [[]]}',
    '/v1/completions {"prompt": [true]}',
    '/v1/completions {"prompt": [5, 6], "suffix": "x"}',
    '/v1/completions {"prompt": "The", "model": "gpt-4"}',
    '/v1/completions {"prompt": "The", "max_tokens": 0}',
    '/v1/completions {"prompt": "The", "max_tokens": -1}',
    '/v1/completions {"prompt": "The", "max_tokens": 16.0}',
    '/v1/completions {"prompt": "The", "n": 5}',
    '/v1/completions {"prompt": "The", "n": 3, "best_of": 2}',
    '/v1/completions {"prompt": "The", "best_of": 2, "stream": true}',
    '/v1/completions {"prompt": "The", "logprobs": 21}',
    '/v1/completions {"prompt": "The", "logprobs": true}',
    '/v1/completions {"prompt": "The", "suffix": "sat", "echo": true, "logprobs": 1}',
    '/v1/completions {"prompt": "The", "stop": ["a", "b", "c", "d", "e"]}',
    '/v1/completions {"prompt": "The", "stop": [""]}',
    '/v1/completions {"prompt": "The", "temperature": NaN}',
    '/v1/completions {"prompt": "The", "temperature": -0.1}',
    '/v1/completions {"prompt": "The", "top_p": 1.1}',
    '/v1/completions {"prompt": "The", "presence_penalty": 0.5}',
    '/v1/completions {"prompt": "The", "frequency_penalty": -1}',
    '/v1/completions {"prompt": "The", "logit_bias": {"5": 1}}',
    '/v1/completions {"prompt": "The", "stream_options": {"usage": true}}',
    '/v1/completions {"prompt": "The", "max_token": 3}',
    '/v1/completions {"prompt": "The", "max_tokens": 90, "n": 4}',
    '/v1/completions {"prompt": ["a", "b", "c", "d"]}',
    '/v1/completions {"prompt": "a {{b}}", "seed": 1.5}',
    'GET /v1/models/gpt-4',
]  # fmt: skip
MISTRAL = [
    '/v1/fim/completions {}',
    '/v1/fim/completions {"prompt": ["The"]}',
    '/v1/fim/completions {"prompt": "The", "suffix": 3}',
    '/v1/fim/completions {"prompt": "The", "model": "codestral"}',
    '/v1/fim/completions {"prompt": "The", "max_tokens": 0}',
    '/v1/fim/completions {"prompt": "The", "max_tokens": 2, "min_tokens": 3}',
    '/v1/fim/completions {"prompt": "The", "temperature": "hot"}',
    '/v1/fim/completions {"prompt": "The", "top_p": Infinity}',
    '/v1/fim/completions {"prompt": "The", "random_seed": -1}',
    '/v1/fim/completions {"prompt": "The", "seed": 1}',
    '/v1/fim/completions {"prompt": "The", "stream": "yes"}',
    '/v1/fim/completions {"prompt": "The", "metadata": []}',
]  # fmt: skip
LLAMA_CPP = [
    '/infill {"input_prefix": 3}',
    '/infill {"input_prefix": "The", "input_extra": {}}',
    '/infill {"input_prefix": "The", "input_extra": [{"text": 3}]}',
    '/infill {"input_prefix": "The", "n_predict": "many"}',
    '/infill {"input_prefix": "The", "n_predict": 2.5}',
    '/infill {"input_prefix": "The", "n_cmpl": 0}',
    '/infill {"input_prefix": "The", "n_cmpl": 5}',
    '/infill {"input_prefix": "The", "n_indent": -1}',
    '/infill {"input_prefix": "The", "temperature": NaN}',
    '/infill {"input_prefix": "The", "temperature": "hot"}',
    '/infill {"input_prefix": "The", "seed": null, "stop": [3]}',
    '/infill {"input_prefix": "The", "stream": "maybe"}',
    '/infill {"input_prefix": "The", "response_fields": "content"}',
    '/infill [1]',
]  # fmt: skip
BODIES = [
    '/v1/fill ',
    '/v1/fill null',
    '/v1/fill [1]',
    '/v1/fill "text"',
    '/v1/fill {',
    '/v1/fill {"template": "a{{_}}",\n "n" 1}',
    '/v1/fill {"template": "a{{_}}", "nn": 1}',
    '/v1/fill {"template": "a{{_}}", "n": "1", "top_k": "2", "top_p": 2, "seed": "s", "stop": 3, "stream": 1}',
]  # fmt: skip
LONG = '{"query": "' + "x" * 150_000 + '{{y}}"}'
OK = '{"query": "The {{cat}} sat."}'
JSON = {"content-type": "application/json"}
HTTP: dict[str, tuple[str, str, dict[str, str], str | bytes]] = {
    "too many bytes": ("POST", "/v1/log_prob", JSON, LONG),
    "a length that is no number": ("POST", "/v1/log_prob", JSON | {"content-length": "x"}, OK),
    "not UTF-8": ("POST", "/v1/log_prob", JSON, b"\xff"),
    "nested too deeply": ("POST", "/v1/log_prob", JSON, "[" * 100_000),
    "too long a number": ("POST", "/v1/log_prob", JSON, '{"query": ' + "9" * 5000 + "}"),
    "no media type": ("POST", "/v1/log_prob", {}, OK),
    "plain text": ("POST", "/v1/log_prob", {"content-type": "text/plain"}, OK),
    "a form": ("POST", "/v1/completions", {"content-type": "application/x-www-form-urlencoded"}, OK),
    "another host": ("POST", "/v1/log_prob", JSON | {"host": "example.org"}, OK),
    "another host of the page": ("GET", "/", {"host": "example.org:8080"}, ""),
    "no such path": ("GET", "/v1/nothing", {}, ""),
    "a path that is like another": ("POST", "/v1/fil", JSON, "{}"),
    "a path without its version": ("POST", "/fill", JSON, "{}"),
    "a path with its version twice": ("POST", "/v1/v1/fill", JSON, "{}"),
    "chats": ("POST", "/v1/chat/completions", JSON, "{}"),
    "GET for POST": ("GET", "/v1/fill", {}, ""),
    "POST for GET": ("POST", "/v1/model", JSON, "{}"),
    "PUT": ("PUT", "/v1/models/a", {}, ""),
    "POST to the page": ("POST", "/", JSON, "{}"),
}
KEYED: dict[str, tuple[str, str, dict[str, str], str | bytes]] = {
    "no key": ("POST", "/v1/log_prob", JSON, OK),
    "a wrong key": ("POST", "/v1/log_prob", JSON | {"authorization": "Bearer wrong"}, OK),
    "another scheme": ("GET", "/v1/model", {"authorization": f"Basic {KEY}"}, ""),
    "a bad request with the key": ("POST", "/v1/log_prob", JSON | {"authorization": f"Bearer {KEY}"}, "{}"),
}
TABLES = {"native": NATIVE, "openai": OPENAI, "mistral": MISTRAL, "llama-cpp": LLAMA_CPP, "bodies": BODIES}


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, TestClient]]:
    """Clients of a server without keys and of one with a key."""
    with service_of(tiny_lm(), **LIMITS) as service:
        yield {
            "open": local_client(create_app(service)),
            "keyed": local_client(create_app(service, keys=[KEY])),
        }


def reply_to(client: TestClient, method: str, path: str, headers: dict[str, str], body: str | bytes) -> dict[str, Any]:
    """Return the status and the body of a reply."""
    content = body.encode() if isinstance(body, str) else body
    reply = client.request(method, path, headers=headers, content=content)
    return {"status": reply.status_code, "body": reply.json()}


def check_all(name: str, replies: dict[str, Any]) -> None:
    """Compare replies with the record, after checking that each is a refusal."""
    assert [case for case, reply in replies.items() if reply["status"] < 400] == []
    check(name, replies)


@pytest.mark.parametrize("table", TABLES)
def test_replies_to_bad_requests(table: str, clients: dict[str, TestClient]) -> None:
    replies = {}
    for case in TABLES[table]:
        first, _, rest = case.partition(" ")
        method, path, body = ("GET", rest, "") if first == "GET" else ("POST", first, rest)
        replies[case] = reply_to(clients["open"], method, path, JSON, body)
    check_all(f"requests-{table}", replies)


@pytest.mark.parametrize(("table", "client"), [("http", "open"), ("keys", "keyed")])
def test_replies_to_requests_that_are_refused_whatever_they_ask(
    table: str, client: str, clients: dict[str, TestClient]
) -> None:
    cases = {"http": HTTP, "keys": KEYED}[table]
    check_all(f"requests-{table}", {case: reply_to(clients[client], *words) for case, words in cases.items()})
