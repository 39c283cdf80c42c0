"""Completions, as all protocols ask for them: what editors ask for is answered, within the limits."""

from __future__ import annotations

import pytest
from servers import local_client, service_of, tiny_lm

from acgpt.serving.app import create_app
from acgpt.serving.completions import CANDIDATES

PREFIX, SUFFIX = "The cat sat on", " and the dog sat."
ORDINARY = [
    ("/v1/fim/completions", {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 2048, "temperature": 0.01}),
    ("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 1024, "temperature": 0.1}),
    ("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 1024, "temperature": 0.2, "n": 2}),
]


@pytest.fixture(scope="module", params=[False, True], ids=["searched", "predicted"])
def long_lm(request):
    """A tiny model with as many positions as those that editors use; with lengths that are searched, or predicted."""
    return tiny_lm(lengths=request.param, positions=4096)


@pytest.mark.parametrize(("path", "body"), ORDINARY)
@pytest.mark.parametrize("stream", [False, True])
def test_a_small_temperature_and_many_tokens_are_answered(long_lm, path, body, stream):
    with service_of(long_lm) as service:
        reply = local_client(create_app(service)).post(path, json={**body, "stream": stream})
        assert reply.status_code == 200, reply.text
        assert service.scheduler.counts.drawn < 20_000  # not a candidate of each length


@pytest.mark.parametrize(("path", "body"), ORDINARY)
def test_more_tokens_than_the_limit_are_refused_with_the_field_that_asks_for_them(long_lm, path, body):
    with service_of(long_lm, max_tokens_per_request=1000) as service:
        error = local_client(create_app(service)).post(path, json=body).json()["error"]
        assert error["code"] == "limit_exceeded" and error["param"] in ("max_tokens", "n_predict")
        assert error["param"] in body
        body = {**body, "prompt": "The cat sat. " * 300, "max_tokens": 16}
        if path != "/infill":  # which cuts the text
            error = local_client(create_app(service)).post(path, json=body).json()["error"]
            assert error["code"] == "limit_exceeded" and error["param"] == "prompt"


def test_the_texts_of_long_gaps_are_those_of_streams(long_lm):
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": CANDIDATES + 1, "temperature": 0.9, "n": 2, "seed": 3}
    with service_of(long_lm) as service:
        http = local_client(create_app(service))
        texts = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
    expected = []
    for seed in (3, 4):
        *_, last = long_lm.stream(PREFIX + "{{_}}" + SUFFIX, max_tokens=CANDIDATES + 1, temperature=0.9, seed=seed)
        expected.append(last.fill.fills[0])
    assert texts == expected
