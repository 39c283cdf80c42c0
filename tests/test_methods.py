"""Methods: what each can answer, and that what it answers is exact, against a dense mask and against enumeration."""

from __future__ import annotations

import math
from itertools import product
from typing import get_args, get_type_hints

import pytest
import torch
from models import expected_log_probs, random_query, twins

from acgpt.errors import ModelError, QueryError
from acgpt.metadata import Metadata
from acgpt.methods import METHODS, method_of
from acgpt.query import Query
from acgpt.recipe import Recipe

EXACT = {"rtol": 0, "atol": 1e-9}


def answer(name, model, queries, *, bos=0, mask=1, budget=10**6):
    with torch.inference_mode():
        scores = method_of(name).log_probs(model, queries, bos=bos, mask=mask, backend="dense", budget=budget)
    return [torch.tensor(score, dtype=torch.float64) for score in scores]


def test_a_model_has_the_method_that_its_metadata_names_and_is_gpt_if_it_says_nothing():
    assert [method_of(Metadata(method=name)).name for name in METHODS] == list(METHODS)
    assert set(METHODS) == set(get_args(get_type_hints(Recipe)["method"]))
    assert method_of("ac-gpt") is method_of(Metadata(method="ac-gpt"))
    assert method_of(None).name == "gpt"


def test_a_method_that_this_version_does_not_have_is_refused_by_name():
    for unknown in ("sigma-gpt", Metadata(method="sigma-gpt")):
        with pytest.raises(ModelError, match=r"'sigma-gpt'.*ac-gpt, gpt"):
            method_of(unknown)


def test_metadata_and_methods_agree_on_who_reads_the_future():
    """Of those that are shown copies: AC-GPT, and GPT by those who insist."""
    for name in ("ac-gpt", "gpt"):
        assert Metadata(method=name).reads_copies is METHODS[name].reads_future


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_ac_gpt_answers_any_query_as_the_dense_mask_does(architecture):
    reference, ours = twins(architecture)
    queries = [random_query(seed, n, unknown=0.15) for seed, n in enumerate((17, 1, 30, 2, 9))]
    assert all(map(method_of("ac-gpt").answers, queries))
    for query, got in zip(queries, answer("ac-gpt", ours, queries), strict=True):
        torch.testing.assert_close(got, expected_log_probs(reference, query), **EXACT)


def conditional(joint, query):
    """log p(asked | given) from the probabilities of all texts, whatever the roles: sums, and nothing else."""

    def mass(known):
        return sum(p for text, p in joint.items() if all(text[place] == query.tokens[place] for place in known))

    given = [place for place in range(len(query)) if query.given[place]]
    asked = [place for place in range(len(query)) if query.asked[place]]
    return math.log(mass(given + asked) / mass(given))


def test_gpt_answers_all_queries_that_reading_left_to_right_answers_and_no_others():
    reference, ours = twins("gpt2", vocabulary=3)
    truth = (2, 0, 1, 1)
    joint = {}
    for text in product(range(3), repeat=4):
        with torch.no_grad():
            scores = reference(torch.tensor([[0, *text]])).logits[0].log_softmax(-1)
        joint[text] = math.exp(sum(scores[i, token].item() for i, token in enumerate(text)))
    assert sum(joint.values()) == pytest.approx(1)
    gpt, answered = method_of("gpt"), 0
    for roles in product("gau", repeat=4):
        if "a" not in roles:
            continue
        query = Query(truth, [role == "g" for role in roles], [role == "a" for role in roles])
        want = conditional(joint, query)
        if gpt.answers(query):
            answered += 1
            assert answer("gpt", ours, [query], mask=None)[0].sum().item() == pytest.approx(want, abs=1e-9), roles
        else:
            naive = expected_log_probs(reference, query, future=False, mask=0).sum().item()
            assert abs(naive - want) > 1e-4, roles
            with pytest.raises(QueryError, match="query 1 of 1"):
                gpt.log_probs(ours, [query], bos=0, mask=1, backend="dense", budget=100)
    assert answered == 4 + 3 + 2 + 1  # given up to some place, then asked up to some place, then unknown


def test_gpt_reads_no_copies():
    reference, ours = twins()
    query = Query([5, 6, 7, 8], [True, True, False, False])
    want = expected_log_probs(reference, query, future=False)
    torch.testing.assert_close(answer("gpt", ours, [query])[0], want, **EXACT)
    assert (answer("ac-gpt", ours, [query])[0] - want).abs().max() > 1e-3  # what copies would have made of it
