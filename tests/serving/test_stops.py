"""Stop strings: they are found as the text is drawn, and bounded in all protocols."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from fuzz import examples

from acgpt.serving.completions import CompletionAsk, Writer


@pytest.mark.parametrize("seed", range(examples(20)))
def test_a_text_ends_before_the_first_stop_string_and_nothing_of_it_is_shown(seed):
    rng = random.Random(seed)
    words, text = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(2)], "".join(rng.choices("ab", k=40))
    completer = SimpleNamespace(bytes_of=lambda token: text[token : token + 1].encode(), ends=[])
    writer = Writer(completer, CompletionAsk([], stop=words), np.ones(40, dtype=np.bool_), 0)
    shown = ""
    for token in range(len(text)):
        writer.advance(token)
        shown += writer.news(done=token == len(text) - 1)
        if writer.ended_by:
            break
    if ends := [text.index(word) + len(word) for word in words if word in text]:
        at, word = min((text.index(word), word) for word in words if text[: min(ends)].endswith(word))
        assert (writer.ended_by, writer.word, shown) == ("word", word, text[:at])
    else:
        assert (writer.ended_by, shown) == ("", text)


STOPPED = [
    ("/v1/completions", {"prompt": "The"}),
    ("/v1/fim/completions", {"prompt": "The"}),
    ("/infill", {"input_prefix": "The"}),
    ("/v1/fill", {"template": "The {{_}}"}),
    ("/v1/sample", {"query": "The {{_}}"}),
]


@pytest.mark.parametrize(("path", "body"), STOPPED)
@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 3000, "y" * 3000], "x" * 5000])
def test_too_many_or_too_long_stop_strings_are_refused(http, path, body, stop):
    reply = http.post(path, json={**body, "stop": stop})
    assert reply.status_code == 422 and reply.json()["error"]["param"] == "stop", reply.text
    assert "are allowed" in reply.json()["error"]["message"]
