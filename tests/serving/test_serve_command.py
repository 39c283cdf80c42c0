"""`acgpt serve`: what it refuses at the start, and how it starts, drains and stops."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
import torch
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from imports import run_commands
from runs import replace
from servers import until
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.serving.options import LimitOptions, ServeOptions, is_loopback, read_keys
from acgpt.serving.server import Gate

SOURCE = str(Path(acgpt.__file__).parents[1])


def requested(results, url, body):
    def ask():
        try:
            results.append(httpx.post(f"{url}/v1/sample", json=body, timeout=60).status_code)
        except httpx.HTTPError as error:
            results.append(type(error).__name__)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def metric(url, name):
    return float(re.search(rf"^{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.M)[1])


def test_a_signal_drains_and_accepted_requests_are_answered(start, folder):
    server, results = start(), []
    url = server.url
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    model = httpx.get(f"{url}/v1/model")
    assert model.json()["model"] == folder.name and set(model.json()["limits"]) == {
        f.name for f in fields(LimitOptions)
    }
    assert str(folder.parent) not in model.text, "a path has leaked"
    thread = requested(results, url, {"query": "The {{_500}}", "n": 2})
    assert until(lambda: metric(url, "acgpt_active_rows") > 0)
    server.interrupt(signal.SIGTERM)
    assert until(lambda: httpx.get(f"{url}/health").status_code == 503)
    assert not results
    reply = httpx.post(f"{url}/v1/log_prob", json={"query": "The {{cat}}"})
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down"
    assert server.wait() == 0
    thread.join(10)
    assert results == [200]
    assert {"/v1/sample", "/health", "/metrics"} <= {line["route"] for line in logged(server)}


def compute_for_long(_):
    """Let each round of the scheduler compute for five minutes, in C++: longer than the tests wait."""

    def computing(_):
        def round_(self, arrivals):
            matrix, end = torch.ones(1500, 1500), time.monotonic() + 300
            while time.monotonic() < end:
                matrix @ matrix

        return round_

    replace("acgpt.models.scheduler:Scheduler._round", computing)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_answers_with_503_although_the_model_computes(start, number):
    server, replies = start(before=compute_for_long), []
    url = server.url

    def ask(body):
        replies.append(httpx.post(f"{url}/v1/fill", json={"template": "The {{_}} sat.", **body}, timeout=60))

    threads = [threading.Thread(target=ask, args=(body,)) for body in ({"n": 1}, {"stream": True})]
    for thread in threads:
        thread.start()
    assert until(lambda: metric(url, "acgpt_questions_total") == 2)
    server.interrupt(number)
    assert until(lambda: httpx.get(f"{url}/health").status_code == 503)
    server.interrupt(number)
    assert server.wait(60) == 1
    for thread in threads:
        thread.join(30)
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [(503, "shutting_down")] * 2
    assert [line["status"] for line in logged(server) if line["route"] == "/v1/fill"] == [503, 503]
    assert "Traceback" not in server.printed()


def logged(server):
    """Return the lines of the log, one per request."""
    return [json.loads(line) for line in server.printed().splitlines() if line.startswith("{")]


def test_a_signal_while_the_model_is_loaded_ends_the_server(start):
    server = start(before=load_for_long)
    assert until(lambda: server.output.exists() and "loading" in server.printed())
    server.interrupt(signal.SIGTERM)
    assert server.wait(25) == 0
    assert "Traceback" not in server.printed()


def load_for_long(_):
    """Let the model be loaded for half a minute."""

    def loading(_):
        def load_model(options):
            until(lambda: signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)  # uvicorn handles it
            print("loading", flush=True)
            time.sleep(30)

        return load_model

    replace("acgpt.cli.serve:load_model", loading)


def test_a_key_from_the_environment_is_needed(start):
    server = start(ACGPT_API_KEY="the-key")
    url = server.url
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/model").status_code == 401
    assert acgpt.Client(url, api_key="the-key").info["positions"] == 600
    assert "the-key" not in server.printed()
    server.interrupt(signal.SIGINT)
    assert server.wait() == 0


# ---- refused at the start -------------------------------------------------------------------------------------------


def serve(*words, **env):
    return CliRunner().invoke(app, ["serve", *map(str, words)], env={"COLUMNS": "200", "ACGPT_API_KEY": "", **env})


def test_loopback_addresses_are_known():
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""]))


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = serve("-m", tmp_path, "--port", 0)
    assert done.exit_code == 2 and "error: " in done.stderr and "Traceback" not in done.output


def test_requests_are_refused_until_the_model_is_loaded():
    gate = Gate()
    http = TestClient(gate)
    health, model = http.get("/health"), http.get("/v1/model")
    completions = http.post("/v1/completions", json={"prompt": "The"})
    for reply in (health, model, completions):
        assert reply.status_code == 503 and "retry-after" in reply.headers
    assert health.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    for reply in (model, completions):
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == "loading"
    gate.app = JSONResponse({"status": "ok"})
    assert http.get("/health").json() == {"status": "ok"}


def test_what_is_refused_at_the_start_is_refused_before_the_imports(tmp_path):
    """Neither torch nor fastapi are imported, which would take seconds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, nothing, key = str(taken.getsockname()[1]), str(tmp_path / "nothing"), tmp_path / "key"
        key.write_text("a-key")
        refused = {
            f"error: port {port} of 127.0.0.1 is in use": ["--port", port],
            "cannot listen on ::2, port 8080": ["--host", "::2", "--api-key-file", str(key)],
            "needs an API key": ["--host", "0.0.0.0"],
            "cannot read": ["--api-key-file", nothing],
            "there is no folder": ["-m", nothing],
        }
        done = run_commands([["serve", *words] for words in refused.values()], ("torch", "fastapi", "uvicorn"))
    assert done.stdout.splitlines() == ["code 2"] * len(refused) + ["imported []"], done.stderr
    assert all(problem in done.stderr for problem in refused)


def test_the_server_may_open_as_many_files_as_the_system_allows():
    code = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "hard = 500 if hard == resource.RLIM_INFINITY else min(hard, 500)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from acgpt.serving.server import RESERVED_FILES, most_connections\n"
        "most = most_connections()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
        "print(most == hard - RESERVED_FILES)"
    )
    assert python(code).stdout == "True\n"


def test_the_server_answers_before_torch_is_imported():
    code = "import sys, acgpt.cli.serve, acgpt.serving.server\nprint('torch' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    monkeypatch.setenv("ACGPT_API_KEY", "three")
    assert read_keys(ServeOptions(api_key_file=keys)) == ["one", "two"]
    assert read_keys(ServeOptions()) == ["three"]
    monkeypatch.delenv("ACGPT_API_KEY")
    assert read_keys(ServeOptions()) == []
    for text, words in (("\n", "has no key"), ("with space", "characters"), ("é", "characters")):
        keys.write_text(text)
        with pytest.raises(acgpt.InputError, match=words):
            read_keys(ServeOptions(api_key_file=keys))


# ---- the extra ------------------------------------------------------------------------------------------------------


def python(code):
    return subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": SOURCE}, capture_output=True, text=True)


def test_without_the_extra_the_command_says_what_to_install():
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('fastapi', 'uvicorn', 'httpx', 'starlette'):\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.argv = ['acgpt', *COMMAND]\n"
        "from acgpt.cli.main import main\n"
        "main()\n"
    )
    done = python(code.replace("COMMAND", "['serve', '--port', '0']"))
    assert done.returncode == 2 and "pip install 'acgpt[serve]'" in done.stderr, done.stderr
    done = python(code.replace("COMMAND", "['score', 'a{{b}}', '--server', 'http://x']"))
    assert done.returncode == 2 and "pip install 'acgpt[client]'" in done.stderr, done.stderr
