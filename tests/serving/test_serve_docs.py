"""The examples of docs/how-to/serve.md run against a server, and its tables name what the code has."""

from __future__ import annotations

import re
import shutil

import pytest
from servers import running, service_of
from snippets import PAGES, Snippet, assert_succeeds, commands, snippets

from acgpt.serving.app import create_app
from acgpt.serving.errors import STATUS

PAGE, HERE = "docs/how-to/serve.md", "tests/serving/test_serve_docs.py"
EXAMPLES = [snippet for snippet in snippets(PAGE) if HERE in snippet.reason]


@pytest.fixture(scope="module")
def server(served_lm):
    with service_of(served_lm) as service, running(service) as server:
        yield server


@pytest.mark.parametrize("snippet", EXAMPLES, ids=lambda snippet: f"line {snippet.line}")
def test_the_examples_of_the_page_run(server, snippet: Snippet):
    code = snippet.code.replace("http://localhost:8080", server.url)
    if snippet.language == "python":
        exec(compile(code, PAGE, "exec"), {})
        return
    for line in commands(code):
        if line.startswith("curl") and shutil.which("curl") is None:
            pytest.skip("there is no curl")
        assert assert_succeeds(snippet, line)


def test_there_are_examples():
    assert len(EXAMPLES) == 3


def test_the_page_lists_every_route_and_every_error(service):
    text = PAGES[PAGE].read_text("utf-8")
    listed = set(re.findall(r"`(?:GET|POST) (/\S+)`", text))
    schema = create_app(service).openapi()
    native = {path for path, methods in schema["paths"].items()
              if any({"native", "server"} & set(method.get("tags", ())) for method in methods.values())}  # fmt: skip
    assert len(native) > 8 and native <= listed
    rows = re.findall(r"^\| (\d+(?:, \d+)?) \| (.*?) \|", text, re.M)
    codes = {code for _, names in rows for code in re.findall(r"`(\w+)`", names)}
    assert STATUS.keys() - {"disconnected"} <= codes
    assert {str(status) for status in STATUS.values() if status != 499} <= {s for n, _ in rows for s in n.split(", ")}
