"""The snippets of the pages about clients and editors, run with a server of the embedded model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from servers import serving
from snippets import run_python, snippets

import acgpt

pytest.importorskip("openai", reason="needs the openai package")
pytest.importorskip("mistralai.client", reason="needs the mistralai package, 2 or newer")
pytestmark = pytest.mark.slow

PAGES = ["docs/how-to/openai-client.md", "docs/how-to/editors.md"]


@pytest.fixture(scope="module")
def address():
    with serving(acgpt.load(device="cpu"), name="default") as (address, _):
        yield address


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_print_what_it_says(page, address):
    names = {"__name__": "__main__"}
    chosen = [each for each in snippets(page) if each.language == "python"]
    assert chosen
    for each in chosen:
        run_python(replace(each, code=re.sub(r"http://127\.0\.0\.1:\d+", address, each.code)), names)
