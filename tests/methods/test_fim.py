"""FIM: a causal model of rearranged texts; exact on gaps, refuses other queries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from toys import BOS, answer, batch_of, engine_of, every_query, learner_of, mask_of, query, toy

from acgpt.errors import InputError, QueryError
from acgpt.methods import method_of
from acgpt.query.conditioning import Blocks, Conditioning, Empty, Infilling
from acgpt.query.sampling import Sampling


def by_hand(model, prefix, middle, suffix):
    """log p of the middle, from a plain causal pass of transformers over the moved text."""
    mask = mask_of(model, "fim")
    ids = [BOS, *prefix, mask, *suffix, mask, *middle]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    logits[:, mask] = -math.inf
    scores = logits.log_softmax(-1)
    start = len(ids) - len(middle)
    return [scores[start - 1 + position, token].item() for position, token in enumerate(middle)]


def split(question):
    ((first, last),) = question.blanks
    tokens = list(question.tokens)
    return tokens[: first - 1], tokens[first - 1 : last], tokens[last:]


@pytest.mark.parametrize("roles", ["ggaag", "aaagg", "gggaa", "aaaaaa", "gag"])
def test_a_gap_is_scored_as_the_moved_text_is(roles):
    model = toy("fim")
    assert answer("fim", model, [query(roles)])[0] == pytest.approx(by_hand(model, *split(query(roles))), abs=1e-9)


def test_it_answers_one_gap_with_everything_around_it_given_and_nothing_else():
    model, answered = toy("fim"), 0
    for question in every_query(4, "gau"):
        runs = "".join("a" if a else "u" if not g else "g" for a, g in zip(question.asked, question.given, strict=True))
        wanted = "u" not in runs and len(runs.replace("g", " ").split()) == 1
        assert method_of("fim").answers(question) is wanted
        answered += wanted
        if not wanted:
            why = "not given" if "u" in runs else "one run"
            with pytest.raises(QueryError, match=rf"query 1 of 1.*{why}.*ac-gpt"):
                answer("fim", model, [question])
            with pytest.raises(QueryError, match=why):
                method_of("fim").sample(engine_of(model, "fim"), [question], 1, Sampling())
    assert answered == 4 + 3 + 2 + 1


def test_what_is_unknown_is_refused_from_left_to_right_too():
    model, questions = toy("fim"), [query("gag"), query("gaug")]
    for ask in (
        lambda: answer("fim", model, questions, future=False),
        lambda: method_of("fim").sample(engine_of(model, "fim"), questions, 1, Sampling(), future=False),
    ):
        with pytest.raises(QueryError, match=r"query 2 of 2.*Leave none unknown"):
            ask()


def test_the_loss_is_that_of_the_moved_text():
    model, words = toy("fim"), ["ggaaag", "aaaaaa", "aggggg", "ggggga"]
    tokens, _, batch = batch_of(method_of("fim"), words, mask=mask_of(model, "fim"))
    expected = 0.0
    for text, word in zip(tokens.tolist(), words, strict=True):
        expected -= sum(by_hand(model, *split(query(word, text))))
    assert learner_of(model, "fim")(batch).item() == pytest.approx(expected, rel=1e-10)
    assert (batch.asked, batch.slots) == ("".join(words).count("a"), 4 * 8)


def test_it_is_trained_on_gaps_of_the_sizes_that_a_recipe_names():
    mixed = Conditioning((Blocks(r_min=0.1, r_max=0.4), Infilling(r_max=0.9, f_max=0.5), Empty()), (2.0, 1.0, 1.0))
    got = method_of("fim").conditioning(mixed)
    assert got.parts == (Infilling(r_min=0.1, r_max=0.4), Infilling(r_max=0.9, f_max=0.5), Empty())
    assert got.weights == mixed.weights
    with pytest.raises(InputError, match="unknown"):
        method_of("fim").conditioning(Conditioning((Blocks(unknown=0.1),)))
    with pytest.raises(InputError, match="one run"):
        method_of("fim").lay_out(np.zeros((1, 3), dtype=int), np.array([[0, 1, 0]]), [], bos=BOS, mask=5)
