"""MLM: conditionals against brute force with one pass per token, and the loss against its definition."""

from __future__ import annotations

import math

import pytest
from models import masked_logits
from toys import BOS, answer, batch_of, engine_of, every_query, learner_of, mask_of, query, toy

from acgpt.errors import QueryError
from acgpt.methods import method_of


def scores_of(model, text):
    """(T + 1, V) log-probabilities at every place of a text, all of which see all: transformers' own attention."""
    everything = [[True] * len(text)] * len(text)
    logits = masked_logits(model, text, list(range(len(text))), everything)
    logits[:, mask_of(model, "mlm")] = -math.inf
    return logits.log_softmax(-1)


def by_brute_force(model, question):
    """Unmask from left to right, with one pass per token."""
    mask = mask_of(model, "mlm")
    text = [BOS, *(token if given else mask for token, given in zip(question.tokens, question.given, strict=True))]
    results = []
    for position in question.asked_positions:
        token = question.tokens[position - 1]
        results.append(scores_of(model, text)[position, token].item())
        text[position] = token
    return results


def test_its_conditionals_are_those_of_brute_force_in_batches_of_any_budget():
    model, questions = toy("mlm"), [*every_query(4), *map(query, ["agugau", "a", "uaugaa", "aaaaaa"])]
    want = [by_brute_force(model, question) for question in questions]
    for budget in (1, 20, 10**6):
        for got, wanted in zip(answer("mlm", model, questions, budget=budget), want, strict=True):
            assert got == pytest.approx(wanted, abs=1e-9)


def test_it_cannot_be_asked_without_a_mask():
    with pytest.raises(QueryError, match=r"MASK.*mask=ID"):
        method_of("mlm").log_probs(engine_of(toy("mlm"), "mlm").with_mask(None), [query("ga")])


def test_the_loss_is_that_of_predicting_all_asked_tokens_at_once():
    model, words = toy("mlm"), ["gaggaa", "aaaaaa", "agauga", "ggggga"]
    mask = mask_of(model, "mlm")
    tokens, _, batch = batch_of(method_of("mlm"), words, mask=mask)
    expected = 0.0
    for text, word in zip(tokens.tolist(), words, strict=True):
        shown = [BOS, *(token if role == "g" else mask for token, role in zip(text, word, strict=True))]
        scores = scores_of(model, shown)
        expected -= sum(scores[p, text[p - 1]].item() for p in range(1, 7) if word[p - 1] == "a")
    assert learner_of(model, "mlm")(batch).item() == pytest.approx(expected, rel=1e-10)
    assert batch.asked == "".join(words).count("a")
