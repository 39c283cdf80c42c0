"""`acgpt.Client` and `acgpt.AsyncClient` answer as `LanguageModel` does, and raise its errors."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from imports import run_commands
from servers import running, service_of
from tolerance import exactly, same_scores
from typer.testing import CliRunner

import acgpt
from acgpt import Query
from acgpt.cli.main import app

SCORE, GAP, RANK = "The {{cat}} sat on the mat.", "The {{_}} sat on the mat.", "The {{cat|dog|bird}} sat."


@pytest.fixture(scope="module")
def server(lengths_lm):
    with service_of(lengths_lm) as service, running(service, keys=["key"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with acgpt.Client(server.url, api_key="key") as client:
        yield client


@pytest.fixture(scope="module")
def lm(lengths_lm):
    return lengths_lm


def test_answers_are_those_of_the_model(client, lm):
    query = Query([264, None, 285], given=[True, False, True])
    assert same_scores(client.log_prob(SCORE), lm.log_prob(SCORE))
    many = ["The {{cat}} sat.", "A {{dog}}"] * 20  # more than one request
    assert all(map(same_scores, client.log_prob(many, future=False), lm.log_prob(many, future=False)))
    for question in ("The {{_4}} mat.", query):
        sampling = {"seed": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 50}
        ours, theirs = (each.sample(question, 2, **sampling) for each in (client, lm))
        assert all(map(same_scores, ours, theirs)) and type(ours[0]) is type(theirs[0])
    ours, theirs = (each.sample([query, GAP], 2, seed=3, max_tokens=3, stop=("x",)) for each in (client, lm))
    assert [[one.text for one in some] for some in ours] == [[one.text for one in some] for some in theirs]
    ours, theirs = (each.fill(GAP, 3, seed=3, max_tokens=4) for each in (client, lm))
    options = {"best_of": 8, "stop": ["."], "patience": 2, "distinct": False, "seed": 3, "max_tokens": 5}
    for some, others in zip(*(each.fill([GAP, "A {{_}} dog"], 3, **options) for each in (client, lm)), strict=True):
        assert [fill.text for fill in some] == [fill.text for fill in others]
    assert [fill.text for fill in ours] == [fill.text for fill in theirs]
    assert ours[0].score == exactly(theirs[0].score) and ours[0].lengths == theirs[0].lengths
    assert ours[0].length_log_prob == exactly(theirs[0].length_log_prob)
    ours, theirs = (each.infill("The {{ ", " sat\\", seed=1, max_tokens=3) for each in (client, lm))
    assert ours[0].text == theirs[0].text
    ours, theirs = (each.rank(RANK) for each in (client, lm))
    assert [one.choice for one in ours] == [one.choice for one in theirs] and ours.compared == theirs.compared
    ours, theirs = (each.lengths(GAP, max_tokens=5) for each in (client, lm))
    assert ours.log_probs == exactly(theirs.log_probs)
    assert client.query(SCORE) == lm.query(SCORE) and client.pieces([5, 6]) == lm.pieces([5, 6])
    assert client.log_prob([]) == [] and client.reads_future and client.adapters == [] and not client.router


def test_a_stream_has_the_pieces_of_the_model(client, lm):
    ours, theirs = (list(each.stream(GAP, max_tokens=4, seed=2)) for each in (client, lm))
    assert "".join(piece.text for piece in ours) == "".join(piece.text for piece in theirs)
    assert ours[-1].fill.text == theirs[-1].fill.text


def test_the_async_client_answers_the_same(server, client):
    async def ask():
        async with acgpt.AsyncClient(server.url, api_key="key") as lm:
            score, fills, ranking, info, samples, lengths = await asyncio.gather(
                lm.log_prob(SCORE), lm.fill(GAP, 2, seed=1, max_tokens=3), lm.rank(RANK), lm.info(),
                lm.sample(["The {{_2}}"] * 2, 3, seed=1), lm.lengths(GAP, max_tokens=3),
            )  # fmt: skip
            pieces = [piece async for piece in lm.stream(GAP, max_tokens=3, seed=1)]
            infilled = await lm.infill("The ", " sat", seed=1, max_tokens=3)
            return score, fills, ranking, info, samples, lengths, pieces, infilled, await lm.pieces([5]), await lm.query(SCORE)  # fmt: skip  # noqa: E501

    score, fills, ranking, info, samples, lengths, pieces, infilled, texts, query = asyncio.run(ask())
    assert same_scores(score, client.log_prob(SCORE)) and info == client.info and len(samples) == 2
    assert [fill.text for fill in fills] == [fill.text for fill in client.fill(GAP, 2, seed=1, max_tokens=3)]
    assert ranking[0].choice == client.rank(RANK)[0].choice and lengths.most_probable() and texts == client.pieces([5])
    assert pieces[-1].fill is not None and infilled[0].text.startswith("The ") and query == client.query(SCORE)


def asked(url, question, **options):
    """Return what a `Client` answers."""
    return question(acgpt.Client(url, **options))


def asked_asynchronously(url, question, **options):
    """Return what an `AsyncClient` answers."""

    async def ask():
        async with acgpt.AsyncClient(url, **options) as lm:
            return await question(lm)

    return asyncio.run(ask())


both_clients = pytest.mark.parametrize("ask", [asked, asked_asynchronously])


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_invalid_questions_raise_the_errors_of_the_model(client, lm):
    for ask, error in (
        (lambda each: each.log_prob("The {{cat"), acgpt.TemplateError),
        (lambda each: each.log_prob("a " * 200 + "{{b}}"), acgpt.QueryError),
        (lambda each: each.fill("no gap"), acgpt.TemplateError),
        (lambda each: list(each.stream("no gap")), acgpt.TemplateError),
        (lambda each: each.log_prob(3), acgpt.QueryError),
        (lambda each: each.log_prob([3]), acgpt.QueryError),
    ):
        with pytest.raises(error) as ours:
            ask(client)
        with pytest.raises(error) as theirs:
            ask(lm)
        assert str(ours.value).splitlines()[0].split(":")[0] == str(theirs.value).splitlines()[0].split(":")[0]
    with pytest.raises(acgpt.QueryError):
        client.stream(7)  # at the call, not at the first piece
    with pytest.raises(acgpt.InputError, match="top_p"):
        client.sample("The {{_1}}", top_p=2)
    with pytest.raises(TypeError, match=r"sample\(\) got an unexpected keyword argument 'topp'. Did you mean 'top_p'"):
        client.sample("The {{_1}}", topp=2)


def test_a_wrong_key_and_a_server_that_is_not_there_are_server_errors(server, monkeypatch):
    with pytest.raises(acgpt.ServerError, match="API key") as error:
        acgpt.Client(server.url, api_key="other").log_prob(SCORE)
    assert error.value.status == 401 and error.value.code == "invalid_api_key"
    assert "ACGPT_API_KEY" in str(error.value) and "Bearer" not in str(error.value)
    monkeypatch.setenv("ACGPT_API_KEY", "key")
    assert acgpt.Client(server.url.removeprefix("http://")).log_prob(SCORE)
    with pytest.raises(acgpt.ServerError, match="cannot reach the server") as error:
        acgpt.Client("http://127.0.0.1:9").log_prob(SCORE)
    assert error.value.status is None


@both_clients
@pytest.mark.parametrize("limits", [{"max_questions": 3}, {"queue": 2}])
def test_a_list_is_asked_in_as_many_requests_as_the_server_takes(lengths_lm, limits, ask):
    questions = [f"The {{{{cat}}}} sat {i}." for i in range(20)]
    with service_of(lengths_lm, **limits) as service, running(service) as server:
        assert len(ask(server.url, lambda lm: lm.log_prob(questions))) == 20


@both_clients
def test_a_list_has_one_seed_however_many_requests_it_takes(server, ask):
    samples = ask(server.url, lambda lm: lm.sample(["The {{_1}} sat."] * 20), api_key="key")
    assert len(samples) == 20 and len({sample.seed for some in samples for sample in some}) == 1


@pytest.mark.usefixtures("offline")
def test_an_adapter_or_none_of_them_answers_as_in_the_library(both):
    with service_of(both) as service, running(service) as server:
        for adapter in ("other", False):
            ours, theirs = (
                each.log_prob(SCORE, adapter=adapter, future=True) for each in (acgpt.Client(server.url), both)
            )
            assert same_scores(ours, theirs) and ours.adapter == (adapter or None)


@both_clients
def test_a_function_that_is_told_of_progress_is_not_sent(server, ask):
    assert len(ask(server.url, lambda lm: lm.fill(GAP, 1, max_tokens=2, notice=print), api_key="key")) == 1
    assert len(ask(server.url, lambda lm: lm.sample("The {{_1}}", notice=print), api_key="key")) == 1


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_with_v1(server, suffix):
    assert acgpt.Client(server.url + suffix, api_key="key").base_url == server.url
    assert acgpt.Client(server.url + suffix, api_key="key").log_prob(SCORE)


def busy(times, status=429, headers=(("Retry-After", "0"),), code="queue_full"):
    """Return options of httpx for a server that is busy for some time, and the list of its requests."""
    requests = []

    def answer(request):
        requests.append(request)
        if len(requests) <= times:
            body = {"error": {"message": "busy", "type": "x", "param": None, "code": code}}
            return httpx.Response(status, json=body, headers=dict(headers))
        return httpx.Response(200, json={"results": ["a"]})

    return {"transport": httpx.MockTransport(answer)}, requests


@both_clients
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(status, ask):
    options, requests = busy(2, status)
    assert ask("http://x", lambda lm: lm.pieces([1]), **options) == ["a"] and len(requests) == 3


def test_a_server_that_stays_busy_is_given_up():
    options, requests = busy(99)
    with pytest.raises(acgpt.ServerError, match="busy") as error:
        acgpt.Client("http://x", retries=2, **options).pieces([1])
    assert error.value.status == 429 and len(requests) == 3
    with pytest.raises(acgpt.ServerError, match="busy"):
        list(acgpt.Client("http://x", retries=0, **options).stream(GAP))


@pytest.mark.parametrize("code", ["out_of_memory", "broken"])
def test_what_would_fail_again_is_not_asked_again(code):
    options, requests = busy(99, 503, code=code)
    for ask in (asked, asked_asynchronously):
        with pytest.raises(acgpt.ServerError, match="busy") as error:
            ask("http://x", lambda lm: lm.pieces([1]), **options)
        assert error.value.code == code
    with pytest.raises(acgpt.ServerError, match="busy"):
        list(acgpt.Client("http://x", **options).stream(GAP))
    assert len(requests) == 3


def test_the_time_that_a_server_asks_for_is_kept(monkeypatch):
    pauses = []
    monkeypatch.setattr("acgpt.client.time.sleep", pauses.append)
    options, _ = busy(2, headers=(("Retry-After", "7"),))
    acgpt.Client("http://x", **options).pieces([1])
    options, _ = busy(2, headers=())
    acgpt.Client("http://x", **options).pieces([1])
    assert pauses == [7, 7, 0.5, 1]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"error": 3}', b"[]"])
def test_an_error_without_the_shape_is_a_server_error(body):
    transport = httpx.MockTransport(lambda request: httpx.Response(502, content=body))
    with pytest.raises(acgpt.ServerError, match="status 502"):
        acgpt.Client("http://x", transport=transport).pieces([1])


# ---- the command line -----------------------------------------------------------------------------------------------


def command(*words, **env):
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "80", "NO_COLOR": "1", **env})


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    """The folder of the model that the server has."""
    folder = tmp_path_factory.mktemp("model")
    lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["score", SCORE],
        ["score", SCORE, "--json"],
        ["score", SCORE, "--no-future", "--json"],
        ["rank", RANK],
        ["rank", RANK, "--json"],
        ["infill", GAP, "--max-tokens", 3, "--seed", 1],
        ["infill", "The {{_3}} mat.", "-n", 2, "--seed", 1],
        ["infill", GAP, "--max-tokens", 3, "--seed", 1, "--stop", ".", "--json"],
    ],
)
def test_commands_print_the_same_with_a_server(server, folder, words):
    ours = command(*words, "--server", server.url, ACGPT_API_KEY="key")
    theirs = command(*words, "-m", folder, "--dtype", "float64")
    assert ours.exit_code == theirs.exit_code == 0, ours.output + theirs.output
    if "--json" not in words:  # the digits of log-probabilities depend on the batch
        assert ours.stdout == theirs.stdout
    else:
        assert ours.stdout[:60] == theirs.stdout[:60]


def test_a_command_without_a_key_or_its_server_says_so(server):
    done = command("score", SCORE, "--server", server.url, ACGPT_API_KEY="")
    assert done.exit_code == 1 and "environment variable ACGPT_API_KEY" in done.stderr
    done = command("score", SCORE, "--server", "http://127.0.0.1:9")
    assert done.exit_code == 1 and "error: cannot reach the server at http://127.0.0.1:9" in done.stderr


def test_asking_a_server_imports_no_torch(server):
    asked = ["score", SCORE], ["rank", RANK, "--json"], ["infill", GAP, "--max-tokens", "3"]
    commands = [[*words, "--server", server.url] for words in asked]
    done = run_commands(commands, ("torch", "transformers", "fastapi"), ACGPT_API_KEY="key")
    assert done.stdout.splitlines()[-1] == "imported []" and not done.stderr, done.stderr
