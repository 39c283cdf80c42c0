"""llama.cpp's infill, asked as the editor plugins llama.vim and llama.vscode do."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from servers import local_client, service_of, serving, tiny_lm

from acgpt.models.fill_by_search import FillBySearch
from acgpt.query.text import encode_text
from acgpt.serving import llama_cpp
from acgpt.serving.app import create_app

PREFIX, LINE, SUFFIX = "The cat sat.\n", "The dog", " on the mat.\nA bird.\n"
TIMINGS = [
    "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
]  # fmt: skip


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(positions=128)


@pytest.fixture(scope="module")
def client(lm):
    with serving(lm) as (address, _), httpx.Client(base_url=address, timeout=60) as client:
        yield client


def ask(client, **more):
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": LINE, "n_predict": 4, **more}
    reply = client.post("/infill", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def vim(**more):
    """The request of llama.vim."""
    fields = ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached"]
    return {
        "input_prefix": PREFIX,
        "input_suffix": SUFFIX,
        "input_extra": [{"text": "def f():\n    pass\n", "time": [1, 2], "filename": "a.py"}],
        "prompt": LINE,
        "n_predict": 8,
        "stop": [],
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.90,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 5000,
        "response_fields": fields,
        **more,
    }


def test_a_request_of_llama_vim(lm, client):
    reply = client.post("/infill", json=vim()).json()
    before = "a.py\ndef f():\n    pass\n\n\n" + PREFIX + LINE
    assert reply["content"] == lm.infill(before, SUFFIX, max_tokens=8)[0].fills[0]
    assert reply["truncated"] is False and reply["tokens_cached"] == 0
    assert reply["timings/prompt_n"] > 0 and reply["timings/predicted_n"] > 0
    assert reply["timings/prompt_ms"] > 0 and reply["timings/predicted_ms"] > 0  # from the first token on
    for name in TIMINGS:  # Vim's printf refuses whole numbers for %.2f
        assert isinstance(reply[f"timings/{name}"], int if name.endswith("_n") else float)
    assert set(reply) == set(vim()["response_fields"])


def test_a_request_of_llama_vim_that_warms_up(client):
    warm = vim(input_prefix="", input_suffix="", prompt="", n_predict=0, temperature=0.0, samplers=[],
               t_max_prompt_ms=1, t_max_predict_ms=1, response_fields=[""])  # fmt: skip
    assert client.post("/infill", json=warm).json() == {}


def test_a_request_of_llama_vscode(lm, client):
    body = {
        "input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": LINE, "n_predict": 8, "top_k": 40, "top_p": 0.99,
        "input_extra": [{"text": "x = 1\n", "time": 17, "filename": "b.py"}], "stream": False,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 2500, "n_indent": 0, "lora": [{"id": 0, "scale": 0.5}],
    }  # fmt: skip
    reply = client.post("/infill", json=body).json()
    assert reply["content"] == lm.infill("b.py\nx = 1\n\n\n" + PREFIX + LINE, SUFFIX, max_tokens=8)[0].fills[0]
    assert reply["generation_settings"]["n_ctx"] == 128 and reply["truncated"] is False
    assert set(reply["timings"]) == set(TIMINGS) and reply["stop"] is True
    assert reply["stop_type"] in ("eos", "word", "limit") and reply["tokens_evaluated"] > 0
    warm = {**body, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    reply = client.post("/infill", json=warm).json()
    assert reply["content"] == "" and reply["tokens_predicted"] == 0 and reply["stop"] is True


def test_the_context_and_defaults_are_told(client):
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 128 and props["total_slots"] > 0


def test_several_texts_come_as_a_list(lm, client):
    replies = ask(client, n_cmpl=3)
    assert [reply["content"] for reply in replies] == [
        fill.fills[0] for fill in lm.infill(PREFIX + LINE, SUFFIX, 3, max_tokens=4)
    ]
    assert [reply["index"] for reply in replies] == [0, 1, 2]


def test_nothing_at_all_is_answered(client):
    assert isinstance(ask(client, input_prefix="", input_suffix="", prompt="")["content"], str)


def test_stop_strings_cut_the_text(client):
    whole = ask(client, input_suffix="", n_predict=20)["content"]
    reply = ask(client, input_suffix="", n_predict=20, stop=[whole[3:5], ""])
    assert reply["content"] == whole[: whole.find(whole[3:5])]
    assert reply["stop_type"] == "word" and reply["stopping_word"] == whole[3:5]


@pytest.mark.parametrize("more", [{}, {"input_suffix": "", "n_predict": 20}])
def test_a_stream_is_the_text_in_parts(client, more):
    whole = ask(client, **more)
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": LINE, "n_predict": 4, **more, "stream": True}
    text = client.post("/infill", json=body).text
    events = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == whole["tokens_predicted"]


@pytest.mark.parametrize(("text", "expected"), [
    ("a\n    b\n  c", "a\n    b"),
    ("a\n\n    b\n\nc", "a\n\n    b\n"),
    ("a\n    b\n    ", "a\n    b\n    "),
    ("  a", "  a"),
])  # fmt: skip
def test_a_text_ends_before_a_line_that_is_indented_less(text, expected):
    from acgpt.serving.completions import Completion
    from acgpt.serving.llama_cpp import indented

    assert indented(Completion(text, (), "eos"), 4).text == expected
    assert indented(Completion(text, (), "eos"), 0).text == text


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stream_holds_back_a_line_until_its_indentation_is_known(size):
    from acgpt.serving.completions import Completion, Completions, Delta
    from acgpt.serving.llama_cpp import InfillRequest, chunked

    text = "a\n    b\n\n    c\n  d\n    e"

    async def items():
        for begin in range(0, len(text), size):
            yield Delta(0, text[begin : begin + size])
        yield Completions((Completion(text, (), "eos"),), 0, 0)

    async def read():
        return [
            event
            async for event in chunked(
                items(), InfillRequest(n_indent=4), lambda result: {"content": result.texts[0].text}
            )
        ]

    *events, last = asyncio.run(read())
    assert "".join(event["content"] for event in events) == "a\n    b\n\n    c" and last["content"] == ""


def test_null_stands_for_a_default_and_unknown_fields_are_ignored(client):
    more = {"n_indent": None, "seed": None, "stop": None, "input_extra": None, "mirostat": 2, "n_keep": "x"}
    assert ask(client, **more)["content"] == ask(client)["content"]


def test_a_model_that_predicts_lengths_fills_without_a_search(lengths_lm):
    with serving(lengths_lm) as (address, _), httpx.Client(base_url=address, timeout=60) as client:
        reply = ask(client, n_predict=6, t_max_predict_ms=1)
        assert reply["content"] == lengths_lm.infill(PREFIX + LINE, SUFFIX, max_tokens=6)[0].fills[0]
        assert ask(client, n_predict=-1)["content"] == lengths_lm.infill(PREFIX + LINE, SUFFIX)[0].fills[0]
        assert isinstance(ask(client, input_suffix="")["content"], str)


# ---- contexts that are too long -----------------------------------------------------------------------------------


def test_a_context_that_is_too_long_is_cut_around_the_gap(lm, client):
    prefix, suffix = "".join(f"cat {i}. " for i in range(200)), "".join(f" dog {i}." for i in range(200))
    reply = ask(client, input_prefix=prefix, prompt="", input_suffix=suffix)
    assert reply["truncated"] is True and reply["tokens_evaluated"] <= 127
    kept = reply["prompt"]
    assert prefix.endswith(kept) and 60 < len(encode_text(kept, lm.tokenizer)) < 110
    short = ask(client, input_prefix=prefix, prompt="", input_suffix=" dog.")
    assert short["truncated"] is True and len(short["prompt"]) > len(kept)  # the suffix leaves its room


def test_a_context_is_cut_so_that_all_texts_are_within_the_limit_of_a_request(lm):
    body = {"input_prefix": "cat " * 200, "input_suffix": SUFFIX, "n_predict": 8, "n_cmpl": 4}
    with service_of(lm, max_tokens_per_request=80) as service:
        reply = local_client(create_app(service)).post("/infill", json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()) == 4 and reply.json()[0]["truncated"] is True


def test_a_long_suffix_leaves_a_short_prefix_whole(client):
    reply = ask(client, input_prefix="A cat ", prompt="", input_suffix=" dog." * 400)
    assert reply["truncated"] is True and reply["prompt"] == "A cat "


def test_further_context_takes_the_room_that_is_left(client):
    chunks = [{"text": f"chunk {i} " * 3, "filename": f"{i}.py"} for i in range(40)]
    reply = ask(client, input_extra=chunks)
    assert reply["truncated"] is False
    assert reply["prompt"].endswith(PREFIX + LINE) and "39.py\nchunk 39" in reply["prompt"]
    assert "0.py\nchunk 0 " not in reply["prompt"].replace("10.py", "").replace("20.py", "").replace("30.py", "")
    assert reply["tokens_evaluated"] <= 127


@pytest.mark.parametrize("character", ["é", "😀"])
def test_a_cut_does_not_break_a_character(client, character):
    reply = ask(client, input_prefix=character * 500, prompt="", input_suffix=character * 500)
    assert set(reply["prompt"]) == {character} and reply["truncated"] is True


def test_no_more_of_a_large_text_is_tokenized_than_can_be_used(client, monkeypatch):
    tokenized, real = [], llama_cpp.token_starts

    def token_starts(completer, text):
        tokenized.append(len(text))
        return real(completer, text)

    monkeypatch.setattr(llama_cpp, "token_starts", token_starts)
    assert ask(client, input_prefix="cat " * 250_000)["truncated"] is True
    assert sum(tokenized) < 2 * 128 * llama_cpp.CHARACTERS


# ---- time ---------------------------------------------------------------------------------------------------------


def test_a_time_limit_ends_the_search_with_the_best_fill_so_far(lm, client, monkeypatch):
    waves, real = [], FillBySearch.score

    def score(self, gapped, candidates):
        waves.append(len(candidates))
        time.sleep(0.2)
        return (yield from real(self, gapped, candidates))

    monkeypatch.setattr(FillBySearch, "score", score)
    monkeypatch.setattr("acgpt.models.fill_by_search.BONUS", 100.0)  # longer is always better
    short = ask(client, n_predict=24, t_max_predict_ms=1)
    assert short["content"] and len(waves) == 1 and short["tokens_predicted"] <= 8
    waves.clear()
    assert len(ask(client, n_predict=24)["content"]) > len(short["content"]) and len(waves) > 1


def test_a_time_limit_ends_a_continuation(lm, client, monkeypatch):
    from acgpt.engine.decoding import Decoding

    real = Decoding.step

    def step(self):
        time.sleep(0.05)
        return real(self)

    monkeypatch.setattr(Decoding, "step", step)
    whole = ask(client, input_suffix="", n_predict=40)["content"]
    cut = ask(client, input_suffix="", n_predict=40, t_max_predict_ms=300)
    assert cut["content"] and len(cut["content"]) < len(whole) and whole.startswith(cut["content"])
    body = {"input_prefix": PREFIX, "prompt": LINE, "n_predict": 40, "t_max_predict_ms": 300, "stream": True}
    events = client.post("/infill", json={**body, "stop": ["never seen, and long"]}).text.strip().split("\n\n")
    streamed = "".join(json.loads(event.removeprefix("data: "))["content"] for event in events)
    assert streamed and len(streamed) < len(whole) and whole.startswith(streamed)
