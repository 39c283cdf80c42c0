"""Completions, as all protocols ask for them: what editors ask for is answered, within the limits."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from servers import MASK, local_client, service_of, tiny_lm
from tolerance import exactly

from acgpt.query.query import Query
from acgpt.query.text import encode_text
from acgpt.serving.app import create_app
from acgpt.serving.completions import CANDIDATES, Completer, CompletionAsk, Completions
from acgpt.serving.llama_cpp import InfillRequest
from acgpt.serving.mistral import FimRequest
from acgpt.serving.openai import CompletionRequest

PREFIX, SUFFIX = "The cat sat on", " and the dog sat."
SAMPLED = {"temperature": 0.7, "top_p": 0.9}
ASKED = [
    (CompletionRequest(prompt="a"), {"max_tokens": 16}),
    (CompletionRequest(prompt="a", suffix="b"), {"suffix": "b", "temperature": 0.0, "max_tokens": 16}),
    (CompletionRequest(prompt="a", suffix="b", n=2, best_of=4, seed=-3, logprobs=2, **SAMPLED),
     {"suffix": "b", "n": 2, "best_of": 4, "top": 2, "max_tokens": 16, **SAMPLED}),
    (FimRequest(prompt="a"), {"heal": True, "temperature": 0.0}),
    (FimRequest(prompt="a", suffix="b", random_seed=4, stop="c", min_tokens=2, max_tokens=3, **SAMPLED),
     {"heal": True, "suffix": "b", "seed": 4, "stop": ("c",), "min_tokens": 2, "max_tokens": 3, **SAMPLED}),
    (InfillRequest(prompt="a"), {"heal": True, "temperature": 0.0}),
    (InfillRequest(prompt="a", n_predict=999, top_k=0, top_p=2, temperature=-1, model="x", n_cmpl=2, stream=True),
     {"heal": True, "temperature": 0.0, "max_tokens": 48}),
    (InfillRequest(input_prefix="", prompt="a", input_suffix="b", n_predict=3, seed=4, stop=["", "c"], top_k=5,
                   n_cmpl=2, t_max_predict_ms=500, model="none", **SAMPLED),
     {"heal": True, "suffix": "b", "max_tokens": 3, "seed": 4, "stop": ("c",), "top_k": 5, "n": 2, "seconds": 0.5,
      **SAMPLED}),
]  # fmt: skip
ORDINARY = [
    ("/v1/fim/completions", {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 2048, "temperature": 0.01}),
    ("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 1024, "temperature": 0.1}),
    ("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 1024, "temperature": 0.2, "n": 2}),
]


@pytest.mark.parametrize(("request_", "asked"), ASKED)
def test_a_request_of_a_protocol_asks_for_what_its_fields_say(service, request_, asked):
    ask = request_.ask(service)
    assert ask == CompletionAsk(["a"], **{"seed": ask.seed, **asked})


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


@pytest.mark.parametrize("suffix", ["", SUFFIX])
def test_each_of_the_texts_to_choose_from_counts_as_its_most_tokens(served_lm, suffix):
    given = len(encode_text(PREFIX + suffix, served_lm.tokenizer))
    body = {"prompt": PREFIX, "suffix": suffix, "n": 2, "max_tokens": 5, "temperature": 0}
    with service_of(served_lm, max_tokens_per_request=given + 3 * 5) as service:
        http = local_client(create_app(service))
        assert http.post("/v1/completions", json={**body, "best_of": 3}).status_code == 200
        error = http.post("/v1/completions", json={**body, "best_of": 4}).json()["error"]
        assert (error["code"], error["param"]) == ("limit_exceeded", "max_tokens")
        error = http.post("/v1/completions", json={**body, "best_of": 3, "prompt": f"{PREFIX} on"}).json()["error"]
        assert error["code"] == "limit_exceeded"


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


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "temperature"), [(4, 0.0), (4, 1.0), (CANDIDATES + 1, 1.0)])
def test_a_gap_is_filled_with_all_options_of_its_request(both, stream, max_tokens, temperature):
    """As the library fills it: by a search, from candidates, or after its length."""
    sampling = {"temperature": temperature, "top_p": 0.9, "top_k": 3, "seed": 5}
    common = {"max_tokens": max_tokens, "adapter": "other"}
    template, executor, completer = f"{PREFIX}{{{{_3-{max_tokens}}}}}{SUFFIX}", both.searches.executor, Completer(both)

    def filled(**more):
        if stream or max_tokens > CANDIDATES:
            *_, last = both.stream(template, **common, **sampling, **more)
            return last.fill
        (fill,) = (both.sample if temperature else both.fill)(template, 1, **common, **sampling, **more)
        return fill

    stop = (filled().fills[0][1:3],)
    expected = filled(stop=stop)
    assert stop[0] not in expected.fills[0]
    ask = CompletionAsk([PREFIX], suffix=SUFFIX, top=1, stop=stop, min_tokens=3, **sampling, **common)
    searches = [completer.stream(ask, lambda item: None)] if stream else [make() for make in completer.complete(ask)]
    (found,) = executor.run(searches)
    (text,) = found.texts
    assert (text.text, text.ids) == (expected.fills[0], tuple(token.id for token in expected.tokens))
    assert math.fsum(text.log_probs["token_logprobs"]) == exactly(expected.log_prob)


@pytest.mark.parametrize("more", [{"n": 4}, {"n": 2, "best_of": 8}])
def test_several_best_fills_of_a_gap_are_those_of_the_library(served_lm, more):
    """Also beyond the likeliest text of each length, which are few: the others are drawn at random."""
    ask = CompletionAsk([PREFIX], suffix=SUFFIX, max_tokens=2, temperature=0.0, top_p=0.5, top_k=1, seed=5, **more)
    (found,) = served_lm.searches.executor.run([make() for make in Completer(served_lm).complete(ask)])
    expected = served_lm.fill(PREFIX + "{{_}}" + SUFFIX, max_tokens=2, seed=5, **more)
    assert [text.text for text in found.texts] == [fill.fills[0] for fill in expected]
    assert len({text.text for text in found.texts}) == ask.n


def completed(lm, prompt, **how):
    """Return the texts that complete a prompt."""
    (found,) = lm.searches.executor.run([make() for make in Completer(lm).complete(CompletionAsk([prompt], **how))])
    return found.texts


@pytest.mark.parametrize("gap", [{}, {"suffix": SUFFIX, "min_tokens": 1}], ids=["continuation", "gap"])
def test_the_texts_with_the_largest_mean_log_probability_are_chosen(served_lm, gap):
    how = {"best_of": 12, "temperature": 1.0, "seed": 5, "max_tokens": 6, "stop": ("e", "a"), **gap}
    prompt = encode_text(PREFIX, served_lm.tokenizer)

    def mean(text):
        if gap:
            return math.fsum(text.log_probs["token_logprobs"]) / len(text.ids)
        tokens = [*prompt, *text.ids]
        score = served_lm.log_prob(Query(tokens, [i < len(prompt) for i in range(len(tokens))]), future=False)
        return score.log_prob / len(text.ids)

    texts = completed(served_lm, PREFIX, n=12, top=1, **how)
    best = sorted(texts, key=mean, reverse=True)[:3]
    assert best != sorted(texts, key=lambda text: mean(text) * len(text.ids), reverse=True)[:3]  # lengths differ
    assert [text.ids for text in completed(served_lm, PREFIX, n=3, **how)] == [text.ids for text in best]


def test_a_continuation_does_not_end_before_its_least_number_of_tokens():
    lm = tiny_lm()
    (free,) = completed(lm, PREFIX, max_tokens=6, temperature=0.0)
    head, end = lm.model.get_output_embeddings().weight.data, lm.tokenizer.eos_token_id
    head[end] = 2 * head[free.ids[0]]
    assert completed(lm, PREFIX, max_tokens=6, temperature=0.0)[0].ids == (end,)
    (text,) = completed(lm, PREFIX, max_tokens=6, min_tokens=3, temperature=0.0)
    assert len(text.ids) > 3 and end not in text.ids[:3]


def test_mask_is_not_drawn_however_likely_it_is():
    lm = tiny_lm()
    (search,) = Completer(lm).complete(CompletionAsk([PREFIX], max_tokens=3, temperature=0.0))

    def drawn():
        ((completion,),) = (completions.texts for completions in lm.searches.executor.run([search()]))
        return completion.ids

    expected = drawn()
    head = lm.model.get_output_embeddings().weight.data
    head[MASK] = 2 * head[expected[0]]
    with torch.no_grad():
        logits = lm.model(torch.tensor([[lm.bos, *encode_text(PREFIX, lm.tokenizer)]])).logits[0, -1]
    assert logits.argmax() == MASK and drawn() == expected


# ---- streams of gaps ------------------------------------------------------------------------------------------------


def check_stream(lm, ask):
    """Check that the parts of a stream are those of its texts, and return the texts."""
    reported = []
    lm.searches.executor.run([Completer(lm).stream(ask, reported.append)])
    *deltas, last = reported
    assert isinstance(last, Completions) and all(delta.text for delta in deltas)
    texts = [text.text for text in last.texts]
    assert ["".join(delta.text for delta in deltas if delta.index == i) for i in range(len(texts))] == texts
    return texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gap", [{"suffix": SUFFIX}, {"heal": True}], ids=["before a suffix", "at the end"])
def test_the_parts_of_a_stream_of_gaps_are_those_of_its_texts(served_lm, temperature, gap):
    ask = CompletionAsk([PREFIX, "A dog"], **gap, max_tokens=4, stop=(" the",), temperature=temperature, seed=4)
    texts = check_stream(served_lm, ask)
    assert len(texts) == 2 and any(texts)


def test_the_parts_of_a_stream_that_the_time_limit_ends_are_those_of_its_text(served_lm, monkeypatch):
    """The clock moves a second a look, so that the time is over at each of the looks in turn."""
    ask = CompletionAsk([PREFIX], heal=True, max_tokens=4, stop=("never seen, and long",), temperature=1.0, seed=4)
    (whole,) = check_stream(served_lm, ask)
    texts = set()
    for seconds in range(1, 12):
        clock = itertools.count()
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: float(next(clock)))
        texts.update(check_stream(served_lm, replace(ask, seconds=seconds)))
    assert len(texts) > 2 and whole in texts and all(map(whole.startswith, texts))
