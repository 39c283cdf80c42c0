"""The native routes answer what `LanguageModel` answers, say all that its answers say, and run their own examples."""

from __future__ import annotations

import json
import math

import pytest
from servers import local_client, service_of
from tolerance import exactly, same_scores

from acgpt import Query
from acgpt.models.answer_json import read, to_json
from acgpt.models.ask import Fill, Lengths, Piece, Score, TokenScore
from acgpt.serving import native, page_routes
from acgpt.serving.app import create_app

CAPITAL, GAP, RANK = "The capital of {{Italy}} is Rome.", "The {{_}} sat on the mat.", "The {{cat|dog}} sat."
QUERY = {"tokens": [264, 273, None, 285], "given": [True, False, False, True], "asked": [False, True, False, False]}


def post(http, route, status=200, **body):
    reply = http.post(f"/v1/{route}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def of_query(fields):
    return Query(fields["tokens"], fields["given"], fields["asked"])


# ---- answers --------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model(http, served_lm):
    reply = post(http, "log_prob", query=[CAPITAL, QUERY, "The {{dog}}"], future=True)
    expected = served_lm.log_prob([CAPITAL, of_query(QUERY), "The {{dog}}"], future=True)
    for fields_, score in zip(reply["results"], expected, strict=True):
        assert same_scores(read(Score, fields_), score)
        assert fields_["log_prob"] == exactly(score.log_prob)
        assert fields_["perplexity"] == pytest.approx(score.perplexity)


def test_one_question_is_a_list_of_one(http):
    (one,), (other,) = (post(http, "log_prob", query=query)["results"] for query in (CAPITAL, [CAPITAL]))
    assert same_scores(read(Score, one), read(Score, other))


def test_the_model_says_what_it_can_do(http, served_lm):
    reply = http.get("/v1/model").json()
    native.ModelReply.model_validate(reply, strict=True)
    assert reply["reads_future"] and not reply["predicts_lengths"] and reply["method"] == "ac-gpt"
    assert reply["positions"] == served_lm.positions and reply["limits"]["max_n"] == 64 and reply["adapters"] == []


def test_the_adapter_of_a_request_answers(both):
    with service_of(both) as service:
        http = local_client(create_app(service))
        texts = {name: post(http, "log_prob", query="ab{{c}}d", adapter=name) for name in ("mine", "other", "none")}
        error = post(http, "log_prob", 422, query="ab{{c}}d", adapter="/etc/passwd")["error"]
    for name, reply in texts.items():
        expected = both.log_prob("ab{{c}}d", adapter=name)
        assert reply["results"][0]["adapter"] == (None if name == "none" else name)
        assert reply["results"][0]["log_prob"] == pytest.approx(expected.log_prob, rel=1e-5)
    assert error["param"] == "adapter" and "mine, other" in error["message"]


# ---- streams --------------------------------------------------------------------------------------------------------


def events_of(reply):
    return [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]


def test_a_stream_sends_pieces_and_then_the_fill(http, served_lm):
    body = {"template": "The {{_}} sat on {{_}} mat.", "max_tokens": 4, "seed": 1, "stream": True}
    reply = http.post("/v1/fill", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    pieces = [read(Piece, json.loads(line)) for line in events_of(reply)]
    expected = list(served_lm.stream(body["template"], max_tokens=4, seed=1))
    assert pieces[-1].fill is not None and pieces[-1].fill.text == expected[-1].fill.text
    assert all(piece.fill is None for piece in pieces[:-1])
    for slot, text in enumerate(pieces[-1].fill.fills):
        assert "".join(piece.text for piece in pieces if piece.slot == slot) == text


# ---- the schema -----------------------------------------------------------------------------------------------------


def test_every_example_of_the_schema_runs_and_its_reply_is_as_declared(lengths_lm, served_lm):
    sent = 0
    for lm in (lengths_lm, served_lm):
        with service_of(lm) as service:
            http = local_client(create_app(service))
            routes = [*native.router(service).routes, *page_routes.router(service).routes]
            models = {route.path: route.responses[200]["model"] for route in routes}
            schema = http.get("/openapi.json").json()
            for path, route in schema["paths"].items():
                post = route.get("post", {})
                if not {"native", "page"} & set(post.get("tags", [])) or (path == "/v1/lengths" and lm is served_lm):
                    continue
                reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                body = reference.rpartition("/")[2]
                examples = schema["components"]["schemas"][body]["examples"]
                assert examples
                for example in examples:
                    reply = http.post(path, json=example)
                    assert reply.status_code == 200, (path, example, reply.text)
                    if not example.get("stream"):
                        models[path].model_validate(reply.json(), strict=True)
                    sent += 1
    assert sent > 25


def test_numbers_that_are_not_finite_are_null_and_are_read_again():
    token = TokenScore("a", 1, 1, -math.inf)
    query = Query([1], [False])
    fill = Fill((token,), True, text="a", fills=("a",), seed=1, query=query, lengths=(1,), score=-math.inf)
    written = json.loads(json.dumps(to_json(fill), allow_nan=False))
    assert written["tokens"][0]["log_prob"] is written["log_prob"] is written["perplexity"] is written["score"] is None
    assert read(Fill, written) == fill
    lengths = Lengths({0: -math.inf, 2: -0.5})
    assert read(Lengths, json.loads(json.dumps(to_json(lengths), allow_nan=False))) == lengths
    piece = Piece("b", 0, fill)
    assert read(Piece, json.loads(json.dumps(to_json(piece), allow_nan=False))) == piece
