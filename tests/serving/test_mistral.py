"""Mistral's fill-in-the-middle completions, asked by the `mistralai` package."""

from __future__ import annotations

import pytest
from servers import serving

pytest.importorskip("mistralai", reason="needs the mistralai package")
mistral = pytest.importorskip("mistralai.client", reason="needs the mistralai package, 2 or newer")

PROMPT, SUFFIX = "The cat sat on the", " and the dog sat."


@pytest.fixture(scope="module")
def client(lm):
    with serving(lm) as (address, _), mistral.Mistral(api_key="unused", server_url=address) as client:
        yield client


def ask(client, **more):
    return client.fim.complete(**{"model": "tiny", "prompt": PROMPT, "suffix": SUFFIX, **more})


def test_the_best_fill_comes_as_a_message(lm, client):
    answer = ask(client, max_tokens=4)
    (fill,) = lm.infill(PROMPT, SUFFIX, n=1, max_tokens=4)
    assert answer.choices[0].message.content == fill.fills[0]
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == len(fill.tokens)


def test_a_text_has_at_least_min_tokens(client):
    answer = ask(client, min_tokens=9, max_tokens=12)
    assert answer.usage.completion_tokens >= 9
    assert ask(client, max_tokens=12).usage.completion_tokens < 9  # so that it made a difference


@pytest.mark.parametrize(
    "more", [{"max_tokens": 4}, {"suffix": None, "max_tokens": 12}, {"max_tokens": 3, "stop": "t"}]
)
def test_a_stream_is_the_text_in_parts(client, more):
    whole = ask(client, **more)
    fields = {"model": "tiny", "prompt": PROMPT, "suffix": SUFFIX, **more}
    with client.fim.stream(**fields) as events:
        chunks = [event.data for event in events]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
