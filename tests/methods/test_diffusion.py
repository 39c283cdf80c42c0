"""Diffusion: the bound, enumerated over unmasking orders, is one; estimator, loss and sampler agree with it."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from models import masked_logits
from tolerance import same_draws
from toys import BOS, all_fillings, answer, batch_of, counted, engine_of, learner_of, mask_of, p_value, query, toy

from acgpt.errors import QueryError
from acgpt.methods import method_of
from acgpt.methods.diffusion import Diffusion
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

MODEL = toy("diffusion", vocabulary=3, scale=3.0, seed=2)  # one in which what is read, and when, makes a difference
MASK = mask_of(MODEL, "diffusion")
QUESTIONS = [query("gaag"), query("aaa"), query("augaa"), query("agaga")]


@cache
def scores_of(text):
    """(T + 1, V) log-probabilities at every place of a text, all of which see all: transformers' own attention."""
    logits = masked_logits(MODEL, list(text), list(range(len(text))), [[True] * len(text)] * len(text))
    logits[:, MASK] = -math.inf
    return logits.log_softmax(-1)


def shown(question, revealed):
    """The text with the given tokens and those asked ones that have been unmasked."""
    known = zip(question.tokens, question.given, range(1, len(question) + 1), strict=True)
    return (BOS, *(token if given or position in revealed else MASK for token, given, position in known))


def along_orders(question):
    """log p of the asked tokens for every order of unmasking them one by one."""
    sums = []
    for order in itertools.permutations(question.asked_positions):
        steps = (scores_of(shown(question, order[:i]))[p, question.tokens[p - 1]] for i, p in enumerate(order))
        sums.append(float(sum(steps)))
    return np.array(sums)


def masked_sum(question, hidden):
    """Σ log p of the masked tokens, all predicted at once."""
    scores = scores_of(shown(question, set(question.asked_positions) - set(hidden)))
    return sum(scores[p, question.tokens[p - 1]].item() for p in hidden)


def by_time(question):
    """MDLM's bound as it is written: an integral over time, the masks of every time enumerated."""
    asked, (nodes, weights) = question.asked_positions, np.polynomial.legendre.leggauss(20)
    total = 0.0
    for time, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        for size in range(1, len(asked) + 1):
            for hidden in itertools.combinations(asked, size):
                chance = time**size * (1 - time) ** (len(asked) - size)
                total += weight * chance / time * masked_sum(question, hidden)
    return total


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_bound_is_one_and_is_the_same_by_orders_and_by_time(question):
    sums = along_orders(question)
    likelihood = math.log(np.exp(sums).mean())
    assert sums.mean() < likelihood - 1e-6  # -bound ≥ the negative log-likelihood, and not by rounding
    assert by_time(question) == pytest.approx(sums.mean(), abs=1e-9)
    total = sum(np.exp(along_orders(filled)).mean() for filled in all_fillings(question, 3))
    assert total == pytest.approx(1)  # it is a likelihood


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_estimate_agrees_with_the_enumerated_bound(question):
    n = len(question.asked_positions)
    got = answer(Diffusion(draws=3000), MODEL, [question])[0]
    spread = [
        n / size * masked_sum(question, hidden)
        for size in range(1, n + 1)
        for hidden in itertools.combinations(question.asked_positions, size)
    ]
    assert abs(sum(got) - along_orders(question).mean()) < 4 * np.std(spread) / math.sqrt(3000) + 1e-9
    assert len(got) == n and all(value < 0 for value in got)


def test_an_estimate_is_unbiased_at_any_number_of_draws_and_a_function_of_seed_and_query():
    question = QUESTIONS[0]
    want = along_orders(question).mean()
    for draws in (1, 3):
        each = [sum(answer(Diffusion(draws=draws, seed=seed), MODEL, [question])[0]) for seed in range(400)]
        assert abs(np.mean(each) - want) < 4 * np.std(each) / math.sqrt(400)
    together = answer(Diffusion(draws=5), MODEL, QUESTIONS, budget=30)
    for question, got in zip(QUESTIONS, together, strict=True):
        assert answer(Diffusion(draws=5), MODEL, [question])[0] == pytest.approx(got, abs=1e-12)


def test_texts_of_which_nothing_is_given_have_masks_of_their_own():
    method = Diffusion(draws=8)
    one, other = (method.masked_sets(Query([5, 6, 7, 8, 9, token], [False] * 6)) for token in (1, 2))
    assert (one != other).any()
    assert (one == method.masked_sets(Query([5, 6, 7, 8, 9, 1], [False] * 6))).all()


def test_the_sizes_of_a_querys_masked_sets_are_spread_evenly():
    sets = Diffusion(draws=8).masked_sets(query("aaaagaaaa"))
    assert sorted(sets.sum(axis=1).tolist()) == list(range(1, 9))


def test_a_part_of_a_bound_means_nothing_so_scores_from_the_past_alone_are_refused():
    with pytest.raises(QueryError, match=r"left to right.*ac-gpt"):
        answer("diffusion", MODEL, [query("gag")], future=False)


# ---- sampling -------------------------------------------------------------------------------------------------------


def drawn(steps, questions, n=1, seed=0, first=0, future=False, budget=2**13):
    sampler = engine_of(MODEL, "diffusion")
    sampler.budget = budget
    with torch.inference_mode():
        return Diffusion(steps=steps).sample(sampler, questions, n, Sampling(seed=seed, first=first), future)


def enumerated(question, shares, future=False):
    """The distribution of the sampler: every choice of tokens, and of a step for each token of a run.

    Args:
        question: What is given and asked.
        shares: Each run of asked positions, and its number of steps.
        future: Show all that is given; otherwise, what stands before the run.
    """
    chances = []
    for filled in all_fillings(question, 3):
        total = 1.0
        for run, steps in shares:
            past, chance = filled.tokens[: run[0] - 1], 0.0
            before = shown(filled, ()) if future else (BOS, *past, *[MASK] * (len(question) - len(past)))
            for times in itertools.product(range(steps), repeat=len(run)):
                p, text = steps ** -len(run), list(before)
                for now in range(steps):
                    due = [position for position, time in zip(run, times, strict=True) if time == now]
                    scores = scores_of(tuple(text))
                    for position in due:
                        text[position] = filled.tokens[position - 1]
                        p *= math.exp(scores[position, text[position]].item())
                chance += p
            total *= chance
        chances.append(total)
    return chances


def ancestral(question, steps):
    return enumerated(question, [(question.asked_positions, steps)], future=True)


@pytest.mark.parametrize("steps", [1, 3])
def test_samples_come_as_often_as_the_ancestral_process_says(steps):
    question = query("agaga", [1, 2, 0, 1, 2])
    (samples,) = drawn(steps, [question], 2000, seed=5, future=True)
    chances = ancestral(question, steps)
    assert sum(chances) == pytest.approx(1)
    assert p_value(counted(samples, 3), chances) > 1e-3


def test_steps_in_which_nothing_changes_take_no_pass():
    sampler, seen = engine_of(MODEL, "diffusion"), []
    hook = MODEL.register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        Diffusion(steps=10**6).sample(sampler, [query("agaga")], 4, Sampling(seed=1))
    hook.remove()
    assert len(seen) == sampler.meter.calls == 3  # a pass a token, whatever the number of steps


# ---- sampling from the past alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "shares"), [(1, (1, 1)), (6, (2, 4))])
def test_without_the_future_runs_come_as_often_as_the_past_of_each_says(steps, shares):
    question = query("agaag", [1, 0, 0, 1, 0])
    (samples,) = drawn(steps, [question], 4000, seed=5)
    counts, (one, two) = counted(samples, 3), shares
    chances = enumerated(question, [((1,), one), ((3, 4), two)])
    assert sum(chances) == pytest.approx(1)
    assert p_value(counts, chances) > 1e-3
    with_future, token_by_token = ancestral(question, 2), enumerated(question, [((1,), 1), ((3,), 1), ((4,), 1)])
    other_steps = enumerated(question, [((1,), 1), ((3, 4), 5 - two)])
    for other in (with_future, token_by_token, other_steps):
        assert p_value(counts, other) < 1e-4


def test_a_run_reads_what_is_given_before_it_and_nothing_that_is_given_after_it():
    plain, late, early = (query("agaag", tokens) for tokens in ([0, 1, 0, 0, 2], [0, 1, 0, 0, 0], [0, 2, 0, 0, 2]))
    first, same, other = drawn(3, [plain, late, early], 40)
    assert all(map(same_draws, first, same))  # what stands after all runs
    assert all(same_draws([x[:1] for x in one], [x[:1] for x in two]) for one, two in zip(first, other, strict=True))
    assert [tokens.tolist()[1:] for tokens, _ in first] != [tokens.tolist()[1:] for tokens, _ in other]


@pytest.mark.parametrize("steps", [1, 4, 1000])
def test_where_nothing_is_given_after_an_asked_token_the_future_makes_no_difference(steps):
    questions = [query("ggaaaa"), query("aaa"), query("gaauu"), query("gauaa")]
    for with_it, without in zip(*(drawn(steps, questions, 5, future=f) for f in (True, False)), strict=True):
        for one, other in zip(with_it, without, strict=True):
            assert same_draws(one, other)


def test_samples_from_the_past_are_a_function_of_seed_query_and_number():
    questions = [query("agaaga"), query("gaag"), query("uagag")]
    together = drawn(5, questions, 6, seed=3)
    for question, samples in zip(questions, together, strict=True):
        (alone,) = drawn(5, [question], 2, seed=3, first=4, budget=1)
        assert [tokens.tolist() for tokens, _ in alone] == [tokens.tolist() for tokens, _ in samples[4:]]
    for samples, others in zip(together, drawn(5, questions, 6, seed=4), strict=True):
        assert [tokens.tolist() for tokens, _ in samples] != [tokens.tolist() for tokens, _ in others]


@pytest.mark.parametrize(("steps", "passes"), [(1, {3}), (2, {3}), (8, {3, 4}), (10**6, {4})])
def test_a_run_takes_its_share_of_the_steps_and_at_least_one_pass(steps, passes):
    seen = []
    hook = MODEL.register_forward_hook(lambda *_: seen.append(1))
    took = set()
    for number in range(30):
        seen.clear()
        drawn(steps, [query("aagaga")], first=number)
        took.add(len(seen))
    hook.remove()
    assert took == passes


@pytest.mark.parametrize("given", [0.1, 0.5])
def test_runs_together_take_about_as_many_passes_as_all_tokens_with_the_future(given):
    rng = np.random.default_rng(0)
    question = query("".join(rng.choice(["g", "a"], 1000, p=[given, 1 - given])))
    uniform = rng.random(len(question.asked_positions))
    (turns, reached), (with_it, _) = (Diffusion().schedule(question, uniform, future) for future in (False, True))
    assert 1 <= len(turns) / len(with_it) < 1.25
    shown, done = [], []
    for due, now in zip(turns, reached, strict=True):
        shown += now.tolist()
        assert shown == [position for position in question.given_positions if position < due[0]]
        assert all(position > shown[-1] for position in due) if shown else True
        done += due.tolist()
    assert sorted(done) == list(question.asked_positions)


# ---- training -------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_its_definition():
    words = ["gaggaa", "aaaaaa", "agauga", "ggggga"]
    tokens, slots, batch = batch_of(method_of("diffusion"), words, mask=MASK, vocabulary=3)
    expected = 0.0
    for text, word, seen in zip(tokens.tolist(), words, slots.ids[: 4 * 7].reshape(4, 7)[:, 1:].tolist(), strict=True):
        question = query(word, text)
        hidden = [p for p in question.asked_positions if seen[p - 1] == MASK]
        revealed = set(question.asked_positions) - set(hidden)
        assert tuple(seen) == shown(question, revealed)[1:] and hidden
        expected -= len(question.asked_positions) / len(hidden) * masked_sum(question, hidden)
    assert learner_of(MODEL, "diffusion")(batch).item() == pytest.approx(expected, rel=1e-6)
    assert batch.asked == "".join(words).count("a")


def test_the_loss_is_the_bound_on_average():
    question, texts = query("gaag"), 2000
    tokens = np.tile(np.array(question.tokens), (texts, 1))
    _, slots, batch = batch_of(method_of("diffusion"), ["gaag"] * texts, mask=MASK, tokens=tokens)
    with torch.no_grad():
        mean = learner_of(MODEL, "diffusion")(batch).item() / texts
    hidden = slots.ids[: 5 * texts].reshape(texts, 5).numpy() == MASK
    assert p_value(np.bincount(hidden.sum(1), minlength=3)[1:], [1 / 2, 1 / 2]) > 1e-3  # k is uniform
    spread = [2 / size * masked_sum(question, each) for size in (1, 2) for each in itertools.combinations((2, 3), size)]
    assert abs(mean + along_orders(question).mean()) < 4 * np.std(spread) / math.sqrt(texts)
