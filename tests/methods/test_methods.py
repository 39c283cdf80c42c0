"""Methods: what each can answer, and that what it answers is exact, against a dense mask and against enumeration."""

from __future__ import annotations

import json
import math
import operator
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from models import expected_log_probs, finished, random_query, tiny_tokenizer, twins
from tolerance import EXACT
from toys import (
    all_fillings,
    batch_of,
    conditional,
    counted,
    engine_of,
    every_query,
    learner_of,
    mask_of,
    p_value,
    total_probability,
    toy,
)
from toys import answer as log_probs_of
from toys import query as query_of
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.cli.methods import COLUMNS
from acgpt.engine import attention
from acgpt.engine.engine import Engine
from acgpt.errors import ModelError, QueryError
from acgpt.methods import METHODS, method_of
from acgpt.methods.fim import as_read
from acgpt.methods.sigma_gpt import SigmaGptRandom, in_order
from acgpt.models.card import card
from acgpt.models.metadata import Metadata, model_method
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling
from acgpt.query.template import parse
from acgpt.query.text import encode
from acgpt.report.paper import paper
from acgpt.training.recipe import Recipe


def answer(name, model, queries, *, bos=0, mask=1, budget=10**6):
    with torch.inference_mode():
        scores = method_of(name).log_probs(Engine(model, bos=bos, mask=mask, backend="dense", budget=budget), queries)
    return [torch.tensor(score, dtype=torch.float64) for score in scores]


def test_a_model_has_the_method_that_its_metadata_names_and_is_gpt_if_it_says_nothing():
    assert [model_method(Metadata(method=name)).name for name in METHODS] == list(METHODS)
    assert set(METHODS) == set(get_args(Recipe.types()["method"]))
    assert method_of("ac-gpt") is model_method(Metadata(method="ac-gpt"))
    assert method_of(None).name == model_method(None).name == "gpt"


def test_a_method_that_this_version_does_not_have_is_refused_by_name():
    for unknown in (lambda: method_of("sigma-gpt"), lambda: model_method(Metadata(method="sigma-gpt"))):
        with pytest.raises(ModelError, match=r"'sigma-gpt'.*ac-gpt, gpt"):
            unknown()


def test_metadata_and_methods_agree_on_who_reads_the_future():
    """Checked for the methods that can read copies: AC-GPT, and GPT with `future=True`."""
    for name in ("ac-gpt", "gpt"):
        assert Metadata(method=name).reads_copies is METHODS[name].reads_future


@pytest.mark.parametrize("name", list(METHODS))
def test_the_examples_of_a_card_are_answered(name):
    method, tokenizer = METHODS[name], tiny_tokenizer()
    score, sample = (encode(parse(example), tokenizer, example).query for example in method.examples)
    assert method.answers(score) and method.can_sample(sample, True)
    assert all(example in card("mine", Metadata(method=name), {}, None) for example in method.examples)


def test_methods_have_the_titles_of_the_papers_tables_and_colours_of_their_own():
    titles = paper("from_scratch")["methods"]
    assert {name: METHODS[name].title for name in titles} == titles
    assert len({METHODS[name].colour for name in titles}) == len(titles)


def test_what_methods_make_of_a_query_is_the_same_tokens_in_their_order():
    shuffled = SigmaGptRandom("random")
    moved = 0
    for seed in range(60):
        query = random_query(seed, 1 + seed % 9, unknown=0.2 * (seed % 2))
        roles = list(zip(query.tokens, query.given, query.asked, strict=True))
        for method in (METHODS["sigma-gpt-temporal"], shuffled):
            order = method.order(query, 0)
            made = in_order(query, order)
            assert list(zip(made.tokens, made.given, made.asked, strict=True)) == [roles[p - 1] for p in order]
            assert made == Query(made.tokens, made.given, made.asked)  # which would refuse what contradicts itself
            moved += made != query
        read = METHODS["ac-gpt"].left_to_right(query)
        assert read == Query(query.tokens, [False] * len(query), [g or a for _, g, a in roles])
        whole = as_read(query, 1, whole=True)
        mask = (1, True, False)
        assert list(zip(whole.tokens, whole.given, whole.asked, strict=True)) == [mask, mask, *roles]
        if METHODS["fim"].answers(query):
            gap = as_read(query, 1)
            first, last = query.asked_positions[0] - 1, query.asked_positions[-1]
            wanted = [*roles[:first], mask, *roles[last:], mask, *roles[first:last]]
            assert list(zip(gap.tokens, gap.given, gap.asked, strict=True)) == wanted
    assert moved > 40


def test_without_the_future_a_text_can_be_drawn_if_all_of_it_could_be_asked():
    for seed in range(40):
        query = random_query(seed, 6, unknown=0.2 * (seed % 2))
        for name in ("ac-gpt", "gpt", "sigma-gpt-temporal", "fim"):
            method = METHODS[name]
            assert method.can_sample(query, False) is method.answers(method.left_to_right(query)), (name, query)
            assert method.can_sample(query, True) is method.answers(query)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_ac_gpt_answers_any_query_as_the_dense_mask_does(architecture):
    reference, ours = twins(architecture)
    queries = [random_query(seed, n, unknown=0.15) for seed, n in enumerate((17, 1, 30, 2, 9))]
    assert all(map(method_of("ac-gpt").answers, queries))
    for query, got in zip(queries, answer("ac-gpt", ours, queries), strict=True):
        torch.testing.assert_close(got, expected_log_probs(reference, query), **EXACT)


def test_gpt_answers_all_queries_that_reading_left_to_right_answers_and_no_others():
    reference, ours = twins("gpt2", vocabulary=3)
    joint = {}
    for text in product(range(3), repeat=4):
        with torch.no_grad():
            scores = reference(torch.tensor([[0, *text]])).logits[0].log_softmax(-1)
        joint[text] = math.exp(sum(scores[i, token].item() for i, token in enumerate(text)))
    assert sum(joint.values()) == pytest.approx(1)
    gpt, answered = method_of("gpt"), 0
    for query in every_query(4, "gau"):
        want = conditional(joint, query)
        if gpt.answers(query):
            answered += 1
            assert answer("gpt", ours, [query], mask=None)[0].sum().item() == pytest.approx(want, abs=1e-9), query
        else:
            naive = expected_log_probs(reference, query, future=False, mask=0).sum().item()
            assert abs(naive - want) > 1e-4, query
            with pytest.raises(QueryError, match="query 1 of 1"):
                gpt.log_probs(Engine(ours, bos=0, mask=1), [query])
    assert answered == 4 + 3 + 2 + 1  # given up to some place, then asked up to some place, then unknown


def test_gpt_reads_no_copies():
    reference, ours = twins()
    query = Query([5, 6, 7, 8], [True, True, False, False])
    want = expected_log_probs(reference, query, future=False)
    torch.testing.assert_close(answer("gpt", ours, [query])[0], want, **EXACT)
    assert (answer("ac-gpt", ours, [query])[0] - want).abs().max() > 1e-3  # what copies would have made of it


# ---- table 1: every tick is exercised, and every cross ---------------------------------------------------------------


def asked_of(name, model, question, **options):
    with torch.inference_mode():
        return method_of(name).configured(options).log_probs(engine_of(model, name), [question])[0]


@pytest.mark.parametrize("name", list(METHODS))
def test_who_evaluates_any_conditional_gives_a_distribution_for_each_and_others_refuse_or_bound(name):
    model, method = toy(name, vocabulary=3, length=3), method_of(name)
    whole = 0
    for question in every_query(3, "ga" if name == "ac-gpt" else "gau"):  # there is no MASK here
        if not method.answers(question):
            with pytest.raises(QueryError, match=f"{name} cannot answer"):
                asked_of(name, model, question)
        elif not method.bound:
            assert total_probability(name, model, question, 3) == pytest.approx(1, abs=1e-9)
            whole += all(map(operator.or_, question.given, question.asked))
    assert (whole == 7) is method.abilities.evaluates_any


@pytest.mark.parametrize("name", list(METHODS))
def test_who_samples_any_conditional_does_and_others_refuse(name):
    model, method, done = toy(name, length=3), method_of(name), 0
    for question in every_query(3):
        try:
            with torch.inference_mode():
                ((drawn, _),) = method.sample(engine_of(model, name), [question], 1, Sampling(seed=1))[0]
        except QueryError:
            continue
        assert len(drawn) == len(question.asked_positions) and (drawn < 4).all()  # never MASK
        done += 1
    assert (done == 7) is method.abilities.samples_any


ANY = ["sigma-gpt-temporal", SigmaGptRandom("random", seed=4), "mlm"]


@pytest.mark.parametrize(
    ("name", "own"), [("mlm", {}), ("fim", {}), *product(ANY[:1], [{}, {"target_positions": "table"}])]
)
def test_without_the_future_a_token_has_what_reading_the_whole_text_gives_it(name, own):
    model = toy(name, **own)
    (whole,) = log_probs_of(name, model, [query_of("aaaaa")])
    for question in every_query(5):
        want = [whole[position - 1] for position in question.asked_positions]
        assert log_probs_of(name, model, [question], future=False)[0] == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("method", "roles", "future"),
    [*product(ANY, ["agaga"], [True]), *product([ANY[0], "mlm", "fim"], ["agaga"], [False]), ("fim", "gaaag", True)],
)
def test_samples_come_as_often_as_their_probability_says(method, roles, future):
    chosen = method_of(method) if isinstance(method, str) else method
    model, question = toy(chosen.name, vocabulary=3, scale=0.3), query_of(roles, [1, 2, 0, 1, 2])
    with torch.inference_mode():
        (samples,) = chosen.sample(engine_of(model, chosen.name), [question], 3000, Sampling(seed=3), future)
    scores = log_probs_of(chosen, model, list(all_fillings(question, 3)), future=future)
    probabilities = [math.exp(sum(each)) for each in scores]
    assert sum(probabilities) == pytest.approx(1)
    assert p_value(counted(samples, 3), probabilities) > 1e-3


@pytest.mark.parametrize(("method", "own"), [*product(ANY, [{}]), *product(ANY[:2], [{"target_positions": "table"}])])
def test_a_sample_carries_its_log_probabilities_and_is_the_same_in_any_batch(method, own):
    chosen = method_of(method) if isinstance(method, str) else method
    model = toy(chosen.name, length=12, **own)
    questions = [query_of("gagaugaagaag"), query_of("a"), query_of("ggga"), query_of("aaaag")]
    with torch.inference_mode():
        drawn = chosen.sample(engine_of(model, chosen.name), questions, 2, Sampling(seed=9))
        (alone,) = chosen.sample(engine_of(model, chosen.name), questions[:1], 2, Sampling(seed=9))
    assert [tokens.tolist() for tokens, _ in drawn[0]] == [tokens.tolist() for tokens, _ in alone]
    for question, samples in zip(questions, drawn, strict=True):
        for tokens, scores in samples:
            (want,) = log_probs_of(chosen, model, [finished(question, tokens)])
            assert scores.tolist() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("name", list(METHODS))
def test_who_is_ticked_for_a_single_pass_runs_a_query_once(name, monkeypatch):
    model, question = toy(name), query_of("aaaaa")
    texts = []

    class Counting(attention.Dense):
        def __init__(self, layout):
            texts.extend(layout.texts)
            super().__init__(layout)

    monkeypatch.setitem(attention.BACKENDS, "dense", Counting)
    asked_of(name, model, question, **({"draws": "1"} if method_of(name).bound else {}))
    assert len(texts) == (1 if method_of(name).abilities.single_pass else 5)


@pytest.mark.parametrize("name", list(METHODS))
def test_who_is_ticked_for_left_to_right_learns_each_token_from_those_asked_before_it_and_no_others(name):
    """Change an asked token: the losses of later ones change, those of earlier ones do not."""
    method, model = method_of(name), toy(name, vocabulary=8)
    words = ["gaaaag" if method.answers(query_of("gaaaag")) else "aaaaaa"] * 8
    first = np.array([[1, 2, 3, 4, 5, 6]] * 8)  # a token tells its position
    changed = first.copy()
    changed[:, 2] = 7
    losses = []
    for tokens in (first, changed):
        _, slots, batch = batch_of(method, words, mask=mask_of(model, name), tokens=tokens)
        learner = learner_of(model, name)
        results = {}
        for number in range(len(slots.rows)):  # a loss of its own for every prediction
            row = slice(number, number + 1)
            one = replace(batch, rows=batch.rows[row], targets=batch.targets[row], weights=None)
            with torch.no_grad():
                results[number] = learner(one).item()
        losses.append(results)
    positions = [3 if token == 7 else int(token) for token in slots.targets]
    moved = {positions[n] for n in losses[0] if abs(losses[0][n] - losses[1][n]) > 1e-9} - {3}
    assert (moved == {position for position in positions if position > 3}) is method.abilities.left_to_right


def marks_of(method):
    return [{True: "✓", False: "✗", None: "–"}[getattr(method.abilities, column)] for column in COLUMNS]


def test_the_command_prints_the_table_from_what_the_methods_declare():
    content = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)["methods"]
    assert list(content) == list(METHODS)
    paper = {  # table 1
        "ac-gpt": (True, True, True, True, True),
        "gpt": (False, False, True, True, None),
        "sigma-gpt-random": (True, True, False, True, False),
        "mlm": (True, True, False, False, False),
        "diffusion": (False, True, False, True, False),
    }
    for name, row in paper.items():
        assert tuple(content[name][column] for column in COLUMNS) == row
    told = CliRunner().invoke(app, ["methods"])
    assert told.exit_code == 0
    for heading, meaning in COLUMNS.values():
        assert re.search(rf"^{re.escape(heading)} +{re.escape(meaning)}$", told.stdout, re.MULTILINE)
    for name, method in METHODS.items():
        (line,) = [line for line in told.stdout.splitlines() if line.startswith((f"{name} ", f"{name}\n"))]
        assert [mark for mark in line if mark in "✓✗–"] == marks_of(method)
        if method.abilities.note:
            assert method.abilities.note in told.stdout


def test_the_page_has_the_table_that_the_methods_declare():
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "methods.md").read_text(encoding="utf-8")
    table, notes = text.partition("<!-- methods -->")[2].partition("<!-- end -->")[0], iter("¹²³")
    for heading, meaning in COLUMNS.values():
        assert f"\n* **{heading}**: {meaning}." in table
    rows, below = [], []
    for name, method in METHODS.items():
        if not type(method).__module__.startswith("acgpt."):
            continue
        mark = next(notes) if method.abilities.note else ""
        rows.append(f"| `{name}`{' ' + mark if mark else ''} | {' | '.join(marks_of(method))} |")
        below += [f"{mark} {method.abilities.note}."] if mark else []
    assert [line for line in table.splitlines() if line.startswith("| `") and "method=" not in line] == rows
    assert [line for line in table.splitlines() if line[:1] in ("¹", "²", "³")] == below
