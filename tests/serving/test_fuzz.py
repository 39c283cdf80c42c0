"""Random requests: whatever is sent, the reply is an answer or an error of the one shape, and never status 500.

`make fuzz-server` sends ten thousand requests that Schemathesis generates from the OpenAPI schema, valid and invalid,
and five thousand with templates; by default a few hundred of the latter are sent.
"""

from __future__ import annotations

import json
import logging

import pytest
from fuzz import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import local_client, service_of, tiny_lm

from acgpt.serving.app import create_app

RELAXED = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
}  # generation takes as long as it takes
LIMITS = {"max_n": 4, "max_questions": 4, "max_tokens_per_request": 400, "max_body_bytes": 100_000}
PIECES = [
    "{{_}}", "{{_2}}", "{{_1-3}}", "{{_0-0}}", "{{_:[0-9]+}}", "{{_1-2:a|b}}", "{{_:(}}", "{{?2}}", "{{cat}}",
    "{{a|b}}", "{{|x}}", "{{", "}}", "{", "\\", "The cat", " sat", ".", "\n", "é", "日本", "🙂", "\x00", " ", "<eos>",
    "{{_999999}}",
]  # fmt: skip

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
plain = st.lists(st.sampled_from(["The cat", " sat", " on the", " mat", ".", "\n", "é", "日本"]), max_size=3).map(
    "".join
)
anything = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=6).map("".join)
GAPS = ["{{_}}", "{{_1-3}}", "{{_:[0-9]+}}", "{{_1-2:a|b}}", "{{_}} and {{_2}}"]


def texts(*slots):
    """Return templates with one of these slots or two, and any others."""
    slot = st.sampled_from(slots)
    valid = st.tuples(plain, slot, plain, st.just("") | slot, plain).map("".join)
    return st.one_of(valid, valid, valid, anything)


token_queries = st.lists(st.tuples(st.none() | st.integers(0, 345), st.sampled_from("gau")), max_size=6).map(
    lambda pairs: {
        "tokens": [token for token, _ in pairs],
        "given": [role == "g" for _, role in pairs],
        "asked": [role == "a" for _, role in pairs],
    }
)
scored, sampled = (texts(*slots) | token_queries for slots in (["{{cat}}", "{{ sat.}}"], ["{{_2}}", "{{cat}}", *GAPS]))
gapped, ranked, written = texts(*GAPS), texts("{{a|b}}", "{{ cat|dog|}}"), texts("{{cat}}", "{{_2}}", "{{?2}}{{x}}")
counts = st.integers(1, 3)
ASKING = {
    "future": st.booleans() | st.none(),
    "adapter": st.sampled_from([None, None, None, "none", "none", "none", "../x"]),
}
DRAWING = ASKING | {
    "temperature": st.sampled_from([0, 1e-300, 1e-3, 0.7, 1, 1e300]) | st.floats(0, 2),
    "top_p": st.sampled_from([1e-300, 0.5, 1]),
    "top_k": counts | st.just(2**31 - 1),
    "seed": st.sampled_from([0, 1, 2**32, 2**63 - 1]),
    "max_tokens": counts | st.just(2**31 - 1),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
}
LOCAL = {"Host": "127.0.0.1"}  # a server without a key answers no others
ROUTES = {
    "log_prob": ({"query": scored | st.lists(scored, max_size=3)}, ASKING),
    "sample": ({"query": sampled | st.lists(sampled, max_size=3)}, DRAWING | {"n": counts, "candidates": counts}),
    "fill": (
        {"template": gapped | st.lists(gapped, max_size=3)},
        DRAWING
        | {"n": counts, "best_of": counts, "patience": counts, "distinct": st.booleans(), "stream": st.booleans()},
    ),
    "rank": ({"template": ranked | st.lists(ranked, max_size=3)}, ASKING),
    "lengths": (
        {"template": gapped},
        ASKING | {"known": st.lists(st.integers(0, 3), max_size=1), "max_tokens": counts},
    ),
    "query": ({"template": written | st.lists(written, max_size=3)}, {}),
    "pieces": ({"tokens": st.lists(st.integers(0, 345), max_size=5)}, {}),
}  # fmt: skip


@st.composite
def requests(draw):
    """Draw a route and a body: mostly valid, sometimes with a field that is not."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    body = draw(st.fixed_dictionaries(ROUTES[route][0], optional=ROUTES[route][1]))
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(sorted(body)) | st.text(max_size=4))] = draw(junk)
    return route, body


@pytest.fixture(scope="module")
def fuzzed():
    """A server of a model that can do everything."""
    with service_of(tiny_lm(lengths=True), **LIMITS) as service:
        yield service


def check(reply):
    """Check that a reply is an answer or an error of the one shape."""
    assert reply.status_code in (200, 400, 404, 405, 406, 413, 415, 422), (reply.status_code, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    elif reply.headers["content-type"] == "application/json":
        json.loads(reply.content, parse_constant=pytest.fail)


def send(http, route, body):
    """Send a body, also if it has numbers that JSON does not."""
    reply = http.post(f"/v1/{route}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    check(reply)
    assert "event: error" not in reply.text or "internal_error" not in reply.text, reply.text
    return reply.status_code


def test_random_requests_are_answered_or_refused(fuzzed):
    http, statuses = local_client(create_app(fuzzed)), []

    @settings(max_examples=examples(250), **RELAXED)
    @given(requests())
    def run(request):
        statuses.append(send(http, *request))

    run()
    assert statuses.count(200) > 0.1 * len(statuses) and statuses.count(422) > 0.1 * len(statuses)
    assert not fuzzed.scheduler.jobs and not fuzzed.scheduler.active_rows


@pytest.mark.serverfuzz
def test_many_random_requests_are_answered_or_refused(fuzzed):
    http = local_client(create_app(fuzzed))

    @settings(max_examples=5000, **{**RELAXED, "derandomize": False})
    @given(requests())
    def run(request):
        send(http, *request)

    run()


@pytest.mark.serverfuzz
def test_ten_thousand_requests_from_the_schema_are_answered_or_refused(fuzzed, caplog):
    import schemathesis

    caplog.set_level(logging.ERROR)
    app = create_app(fuzzed)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=LOCAL)
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = sum(operation.method.lower() == "post" for operation in operations)
    statuses = []
    for operation in operations:
        post = operation.method.lower() == "post"
        for mode in schemathesis.GenerationMode if post else [schemathesis.GenerationMode.POSITIVE]:

            @settings(max_examples=10_000 // (2 * posts) + 1 if post else 5, **{**RELAXED, "derandomize": False})
            @given(operation.as_strategy(generation_mode=mode))
            def run(case):
                reply = case.call(headers=LOCAL)
                statuses.append(reply.status_code)
                assert reply.status_code < 500, (case.path, case.body, reply.text)

            run()
    print({status: statuses.count(status) for status in set(statuses)})
    assert len(statuses) >= 10_000
