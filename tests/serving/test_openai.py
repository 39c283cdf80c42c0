"""OpenAI's completions, asked by the `openai` package."""

from __future__ import annotations

import codecs
import json
import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from models import tiny_model
from servers import serving
from tolerance import exactly

from acgpt import LanguageModel, Metadata
from acgpt.query.text import encode_text
from acgpt.query.vocabulary import ByteVocabulary
from acgpt.serving.completions import Completer, CompletionAsk

openai = pytest.importorskip("openai", reason="needs the openai package")

PROMPT, SUFFIX = "The cat sat on the", " and the dog sat."


@pytest.fixture(scope="module")
def url(lm):
    with serving(lm) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def ask(client, prompt=PROMPT, **more):
    return client.completions.create(model="tiny", prompt=prompt, **more)


def forward(lm, ids):
    """(len, V) log-probabilities of what follows each token, by the model of transformers alone."""
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[0].log_softmax(-1)


def greedy(lm, ids, count):
    """The continuation of token ids, one pass per token, with tokens that the tokenizer has."""
    drawn = []
    for _ in range(count):
        drawn.append(int(forward(lm, [*ids, *drawn])[-1, : len(lm.tokenizer)].argmax()))
    return drawn


def text_of(lm, ids):
    """The text of tokens, without half a character at its end."""
    data = b"".join(ByteVocabulary.of(lm.tokenizer).tokens[i] or b"" for i in ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


# ---- models -----------------------------------------------------------------------------------------------------


def test_the_served_model_is_listed(client):
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="other", prompt="a")
    assert found.value.code == "model_not_found" and found.value.param == "model" and "tiny" in str(found.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_model_may_be_an_adapter_or_none(shelf):
    lm = shelf.load({"fill": shelf.folder / "fill", "any": shelf.folder / "any"})
    with serving(lm) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        assert [each.id for each in client.models.list()] == ["tiny", "fill", "any", "none"]
        found = {}
        for name in ("tiny", "fill", "any", "none"):
            more = {"max_tokens": 0, "echo": True, "logprobs": 0}
            answer = client.completions.create(model=name, prompt="The cat sat on the mat.", **more)
            assert answer.model == name
            found[name] = answer.choices[0].logprobs.token_logprobs[1:]
            adapter = None if name == "tiny" else name
            score = lm.log_prob("{{The cat sat on the mat.}}", future=False, adapter=adapter)
            assert found[name] == exactly([token.log_prob for token in score.tokens[1:]], lm.model.dtype)
        assert found["fill"] != found["any"] != found["none"]


# ---- continuations ----------------------------------------------------------------------------------------------


def test_a_text_is_continued_greedily_as_the_model_itself_does(lm, client):
    ids = encode_text(PROMPT, lm.tokenizer)
    drawn = greedy(lm, [lm.bos, *ids], 12)
    answer = ask(client, max_tokens=12, temperature=0)
    assert answer.choices[0].text == text_of(lm, drawn)
    assert answer.choices[0].finish_reason == "length" and answer.object == "text_completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 12, len(ids) + 12)


def test_token_ids_are_continued_as_they_are_sent_without_bos(lm, client):
    prompts = [[30, 40, 50, 60], [41], [lm.bos, 30, 40]]
    answer = ask(client, prompts, max_tokens=6, temperature=0)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text == text_of(lm, greedy(lm, prompt, 6))
    assert answer.usage.prompt_tokens == 8
    assert ask(client, prompts[0], max_tokens=6, temperature=0).choices[0].text == answer.choices[0].text


def test_prompts_and_n_give_choices_in_order(client):
    answer = ask(client, ["The cat", "A dog"], n=3, max_tokens=4, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = ask(client, "A dog", n=3, max_tokens=4, seed=5)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in answer.choices[3:]]
    assert len({choice.text for choice in alone.choices}) == 3


def test_a_seed_repeats_a_sample(client):
    texts = [ask(client, max_tokens=8, temperature=0.9, top_p=0.9, seed=3).choices[0].text for _ in range(2)]
    assert texts[0] == texts[1] != ask(client, max_tokens=8, temperature=0.9, top_p=0.9, seed=4).choices[0].text


def test_best_of_returns_the_most_probable(client):
    everything = ask(client, n=8, max_tokens=5, seed=3, logprobs=0)
    best = ask(client, n=2, best_of=8, max_tokens=5, seed=3)

    def mean(choice):
        return math.fsum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ordered = sorted(everything.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ordered[:2]]
    assert best.usage.completion_tokens == 40


def test_stop_strings_end_a_text_and_are_left_out(client):
    whole = ask(client, max_tokens=20, temperature=0).choices[0].text
    stop = whole[5:8]
    for stops in (stop, [stop, "never seen"]):
        answer = ask(client, max_tokens=20, temperature=0, stop=stops, logprobs=1)
        (choice,) = answer.choices
        assert choice.text == whole[: whole.find(stop)] and choice.finish_reason == "stop"
        assert answer.usage.completion_tokens < 20 and len(choice.logprobs.tokens) < 20
        assert choice.logprobs.text_offset[-1] < len(PROMPT) + len(choice.text)


def test_requests_at_a_time_get_what_each_gets_alone(client):
    kinds = [
        {"prompt": PROMPT, "max_tokens": 9},
        {"prompt": [30, 40, 50], "max_tokens": 4, "logprobs": 2, "echo": True},
        {"prompt": PROMPT, "suffix": SUFFIX, "max_tokens": 3, "temperature": 0},
        {"prompt": [[60, 70], [80]], "max_tokens": 0, "logprobs": 1, "echo": True},
    ]
    requests = [{**kinds[i % 4], "seed": i} for i in range(24)]
    alone = [ask(client, **request) for request in requests]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda request: ask(client, **request), requests))
    for one, other in zip(alone, together, strict=True):
        assert [choice.text for choice in one.choices] == [choice.text for choice in other.choices]
        for mine, its in zip(one.choices, other.choices, strict=True):
            if mine.logprobs is not None:
                assert mine.logprobs.token_logprobs[1:] == exactly(its.logprobs.token_logprobs[1:])


@pytest.mark.parametrize("name", ["llama", "gpt2_trimmed"])
def test_the_text_of_a_continuation_follows_its_prompt(request, monkeypatch, name):
    """Also with tokenizers that drop a space before the first token. Parts of characters are left out here."""
    tokenizer = request.getfixturevalue(name)
    network = tiny_model("llama", vocabulary=len(tokenizer), scale=0.15, positions=96).double().eval()
    lm = LanguageModel(network, tokenizer, metadata=Metadata())
    completer, prompt = Completer(lm), "The cat sat"
    ascii_tokens = np.array([completer.bytes_of(i).isascii() for i in range(lm.vocabulary)])
    monkeypatch.setattr(completer, "drawable", lambda route: ascii_tokens)
    search = completer.continuation(CompletionAsk([prompt], max_tokens=30, n=8, seed=1))
    (found,) = lm.searches.executor.run([search])
    ids = encode_text(prompt, tokenizer)
    for text in found.texts:
        drawn = [i for i in text.ids if i not in completer.ends]
        whole = tokenizer.decode([*ids, *drawn], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert prompt + text.text == whole


# ---- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_log_probabilities_of_token_ids_are_those_of_the_model_itself(lm, client, max_tokens):
    prompts = [[30, 40, 50, 60, 70], [41, 9], [77]]
    answer = ask(client, prompts, max_tokens=max_tokens, temperature=0, logprobs=2, echo=True)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        ids = [*prompt, *greedy(lm, prompt, max_tokens)]
        table, found = forward(lm, ids), choice.logprobs
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1:] == exactly([table[i, token].item() for i, token in enumerate(ids[1:])])
        assert len(found.tokens) == len(ids) == len(found.text_offset)
        for i, token in enumerate(ids[1:]):
            best = table[i].topk(2).values.tolist()
            values = sorted(found.top_logprobs[i + 1].values(), reverse=True)
            assert values[:2] == exactly(best)
            is_greedy = found.token_logprobs[i + 1] == max(found.top_logprobs[i + 1].values())
            assert is_greedy == (int(table[i].argmax()) == token)
            assert found.top_logprobs[i + 1][found.tokens[i + 1]] == found.token_logprobs[i + 1]
        assert choice.text == lm.tokenizer.decode(prompt) + text_of(lm, ids[len(prompt) :])


def test_log_probabilities_of_a_text_have_offsets_and_begin_with_null(lm, client):
    answer = ask(client, max_tokens=4, temperature=0, logprobs=0, echo=True)
    choice, ids = answer.choices[0], encode_text(PROMPT, lm.tokenizer)
    found = choice.logprobs
    assert choice.text.startswith(PROMPT) and found.token_logprobs[0] is None
    table = forward(lm, [lm.bos, *ids])
    assert found.token_logprobs[1 : len(ids)] == exactly(
        [table[i + 1, token].item() for i, token in enumerate(ids[1:])]
    )
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)
    assert all(len(top) == 1 for top in found.top_logprobs[1:])
    without = ask(client, max_tokens=4, temperature=0, logprobs=0).choices[0]
    assert without.logprobs.token_logprobs == exactly(found.token_logprobs[len(ids) :])
    assert without.logprobs.text_offset == found.text_offset[len(ids) :]


def test_the_token_that_ends_a_text_leaves_no_trace_in_it_and_has_a_log_probability(client):
    """Sample until some texts end. Clients take the last entry for the generated token, whatever it is."""
    answer = ask(client, n=48, max_tokens=60, seed=1, temperature=1.5, logprobs=1)
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert all("<eos>" not in choice.text and "<bos>" not in choice.text for choice in answer.choices)
    assert ended and answer.usage.completion_tokens < 48 * 60
    assert all(choice.logprobs.tokens[-1] in ("<eos>", "<bos>") for choice in ended)
    assert sum(len(choice.logprobs.tokens) for choice in answer.choices) == answer.usage.completion_tokens


# ---- suffixes ---------------------------------------------------------------------------------------------------


def test_braces_in_a_prompt_are_text(lm, client):
    prompt, suffix = "a {{_}} \\", "{{cat|dog}} \\{{"
    answer = ask(client, prompt, suffix=suffix, max_tokens=3, temperature=0, echo=True)
    assert answer.choices[0].text.startswith(prompt)
    assert answer.choices[0].text[len(prompt) :] == lm.infill(prompt, suffix, max_tokens=3)[0].fills[0]


def test_a_fill_has_the_log_probabilities_of_the_model(lm, client):
    (fill,) = lm.infill(PROMPT, SUFFIX, n=1, max_tokens=4)
    choice = ask(client, suffix=SUFFIX, max_tokens=4, temperature=0, logprobs=3).choices[0]
    assert choice.logprobs.token_logprobs == exactly([token.log_prob for token in fill.tokens])
    assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs)
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert (PROMPT + choice.text + SUFFIX)[offset:].startswith(token)


# ---- streams ----------------------------------------------------------------------------------------------------


def streamed(chunks, count=1):
    """The texts and finish reasons of a stream."""
    texts, reasons = [""] * count, [None] * count
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return texts, reasons


@pytest.mark.parametrize("more", [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 1.2, "max_tokens": 24, "n": 3, "seed": 2},
    {"temperature": 0, "max_tokens": 24, "echo": True, "logprobs": 1},
    {"temperature": 0, "max_tokens": 4, "suffix": SUFFIX},
    {"prompt": ["The cat", "A dog"], "n": 2, "seed": 1, "max_tokens": 5},
    {"prompt": [[30, 40, 50], [60]], "temperature": 0, "max_tokens": 5},
])  # fmt: skip
def test_a_stream_is_the_text_in_parts(client, more):
    more = {"prompt": PROMPT, **more}
    whole = ask(client, **more)
    chunks = list(ask(client, **more, stream=True))
    texts, reasons = streamed(chunks, len(whole.choices))
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(chunks) > len(texts) and len({chunk.id for chunk in chunks}) == 1
    if "logprobs" in more:
        last = chunks[-1].choices[0].logprobs
        assert last.token_logprobs[1:] == exactly(whole.choices[0].logprobs.token_logprobs[1:])


def test_a_stream_tells_its_usage_if_asked(client):
    chunks = list(ask(client, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert not chunks[-1].choices and chunks[-1].usage == ask(client, max_tokens=6, temperature=0).usage


def test_no_part_of_a_stop_string_gets_into_a_stream(client):
    whole = ask(client, max_tokens=40, temperature=0).choices[0].text
    for begin in range(2, 20, 3):
        stop = whole[begin : begin + 6]
        chunks = [chunk.choices[0].text for chunk in ask(client, max_tokens=40, temperature=0, stop=stop, stream=True)]
        assert "".join(chunks) == whole[: whole.find(stop)]


def test_characters_are_not_broken_over_chunks(lm, client, monkeypatch):
    """The tiny vocabulary has single bytes: steer the model through a text of characters of two to four bytes."""
    from acgpt.serving.completions import Writer

    text = "é€😀ÿ"
    ids = iter(encode_text(text, lm.tokenizer))

    def allowed(self):
        mask = self.all.copy()
        mask[:] = False
        mask[next(ids)] = True
        return mask

    monkeypatch.setattr(Writer, "allowed", allowed)
    count = len(encode_text(text, lm.tokenizer))
    assert count == len(text.encode())  # one token per byte
    parts = [chunk.choices[0].text for chunk in ask(client, max_tokens=count - 1, stream=True)]
    assert [part for part in parts if part] == list(text[:-1])  # half a character at the end is left out


def test_the_events_of_a_stream_end_with_done(url):
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 2, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])
    assert json.loads(events[0][6:])["object"] == "text_completion"


# ---- errors -----------------------------------------------------------------------------------------------------


def test_neutral_values_of_unsupported_fields_are_accepted(client):
    answer = ask(client, max_tokens=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="me")
    assert len(answer.choices) == 1


@pytest.mark.parametrize(
    "more", [{"prompt": [5] * 97}, {"prompt": "cat " * 200}, {"prompt": [5] * 96, "max_tokens": 1}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_with_the_limit(client, more, stream):
    with pytest.raises(openai.UnprocessableEntityError, match=r"95 tokens|96 positions") as found:
        ask(client, **more, stream=stream)
    assert found.value.param == "prompt"


def test_a_prompt_that_fills_the_model_is_scored(client):
    answer = ask(client, [5] * 96, max_tokens=0, echo=True, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 96
    assert ask(client, [5] * 95, max_tokens=50, temperature=0).usage.completion_tokens == 1  # as far as there is room


def test_a_suffix_that_is_too_long_is_refused(client):
    with pytest.raises(openai.UnprocessableEntityError, match=r"95 tokens|96 positions"):
        ask(client, suffix="cat " * 200, temperature=0)
