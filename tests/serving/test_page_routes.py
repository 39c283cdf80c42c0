"""The page's files and routes: headers and policy, surprise against `log_prob`, layouts against `acgpt show`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from servers import local_client, service_of, tiny_lm
from tolerance import exactly

import acgpt
from acgpt import Query
from acgpt.display.show import figure
from acgpt.query.text import encode_text
from acgpt.serving.app import create_app
from acgpt.serving.page import pages
from acgpt.serving.server import Gate

FOLDER = Path(acgpt.__file__).parent / "serving" / "page"
TEXT = "The cat sat on the mat."


def post(http, route, status=200, **body):
    reply = http.post(f"/v1/{route}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_every_file_of_the_page_is_served_with_its_type_and_a_strict_policy(http):
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {path.name for path in FOLDER.iterdir()} == {p.rpartition("/")[2] or "index.html" for p in pages()}
    for path in pages():
        reply = http.get(path)
        name = path.rpartition("/")[2] or "index.html"
        assert reply.status_code == 200 and reply.content == (FOLDER / name).read_bytes()
        assert reply.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert reply.headers["x-content-type-options"] == "nosniff"
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy


def test_a_browser_that_has_a_file_is_not_sent_it_again(http):
    first = http.get("/")
    again = http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"") and first.headers["cache-control"] == "no-cache"
    assert http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_html_from_text():
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
        assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=\"|\sstyle=\"", text), path


def test_the_page_is_shown_without_a_key_and_the_routes_are_not(service):
    http = local_client(create_app(service, keys=["secret"]))
    assert all(http.get(path).status_code == 200 for path in pages())
    assert http.post("/v1/surprise", json={"text": TEXT}).status_code == 401
    assert http.post("/v1/layout", json={"template": "a{{b}}"}).status_code == 401


def test_the_page_is_shown_while_the_model_loads():
    http = TestClient(Gate())
    assert http.get("/").status_code == 200 and http.get("/page/main.js").status_code == 200
    assert http.get("/health").status_code == http.post("/v1/surprise", json={}).status_code == 503


def test_there_is_no_way_out_of_the_folder(http):
    for path in ("/page/../page.py", "/page/%2e%2e/page.py", "/page/", "/page/index.html", "/page/nothing.js"):
        assert http.get(path).status_code == 404


# ---- surprise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 3])
def test_surprise_from_left_to_right_is_that_of_log_prob(http, served_lm, top):
    reply = post(http, "surprise", text=TEXT, top=top)
    ids = encode_text(TEXT, served_lm.tokenizer)
    score = served_lm.log_prob(Query(ids, [False] * len(ids)), future=False)
    assert "".join(reply["pieces"]) == TEXT and not reply["future"]
    assert [t["id"] for t in reply["tokens"]] == ids and [t["position"] for t in reply["tokens"]] == [
        *range(1, len(ids) + 1)
    ]
    assert [t["log_prob"] for t in reply["tokens"]] == exactly([t.log_prob for t in score.tokens])
    assert all(len(t["expected"]) == top for t in reply["tokens"])


@pytest.mark.parametrize("top", [0, 2])
def test_surprise_with_the_future_is_given_all_other_tokens(http, served_lm, top):
    ids = encode_text(TEXT, served_lm.tokenizer)
    positions = [3, 1, len(ids)]
    reply = post(http, "surprise", text=TEXT, future=True, positions=positions, top=top)
    expected = [
        served_lm.log_prob(Query(ids, [other != p for other in range(1, len(ids) + 1)]), future=True).log_prob
        for p in positions
    ]
    assert reply["future"] and [t["position"] for t in reply["tokens"]] == positions
    assert [t["log_prob"] for t in reply["tokens"]] == exactly(expected)


def test_expected_tokens_are_the_most_probable_ones(http, served_lm):
    ids = encode_text(TEXT, served_lm.tokenizer)
    (token,) = post(http, "surprise", text=TEXT, future=True, positions=[2, 2], top=20)["tokens"]
    given = [True, False, *[True] * (len(ids) - 2)]
    every = [
        served_lm.log_prob(Query([ids[0], other, *ids[2:]], given), future=True).log_prob
        for other in range(served_lm.vocabulary)
    ]
    best = sorted(range(len(every)), key=lambda i: -every[i])[:20]
    assert [e["id"] for e in token["expected"]] == best
    assert [e["log_prob"] for e in token["expected"]] == exactly([every[i] for i in best])
    assert [e["text"] for e in token["expected"]] == [served_lm.pieces([i])[0] for i in best]


def test_some_positions_from_left_to_right_are_those_of_the_whole(http):
    whole = post(http, "surprise", text=TEXT, top=1)["tokens"]
    some = post(http, "surprise", text=TEXT, top=1, positions=[4, 2])["tokens"]
    assert [t["position"] for t in some] == [2, 4]
    assert [t["log_prob"] for t in some] == exactly([whole[1]["log_prob"], whole[3]["log_prob"]])


def test_braces_in_a_text_have_no_meaning(http):
    assert "".join(post(http, "surprise", text="a {{_}} \\{{ b")["pieces"]) == "a {{_}} \\{{ b"


def test_no_positions_are_no_tokens(http):
    for future in (False, True):
        assert post(http, "surprise", text=TEXT, positions=[], future=future)["tokens"] == []


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("template", ["The {{cat}} sat on the {{_2}}.", "{{_1}} dog {{?1}} bird"])
def test_a_layout_is_that_of_acgpt_show(http, served_lm, template, future):
    reply = post(http, "layout", template=template, future=future)
    query = served_lm.searches.encode(template).query
    drawn = figure(query, served_lm.tokenizer, bos=served_lm.bos, mask=served_lm.mask, future=future)
    expected = drawn.as_dict()
    assert {name: reply[name] for name in expected} == expected and reply["future"] == future
    assert reply["copies"] == (sum(query.given) if future else 0)


def test_a_large_layout_is_refused():
    with service_of(tiny_lm(positions=600)) as service:
        error = post(local_client(create_app(service)), "layout", 422, template="a{{_450}}")["error"]
    assert error["code"] == "limit_exceeded" and "453 slots" in error["message"]  # BOS, a, its copy, the blank
