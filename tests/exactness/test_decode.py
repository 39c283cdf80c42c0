"""Sampling: what the cache decodes step by step is what one pass scores, and it is drawn as often as it should be."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    ARCHITECTURES,
    by_definition,
    expected_log_probs,
    finished,
    masked_logits,
    random_query,
    truncated,
    twins,
)
from scipy import stats
from tolerance import EXACT

import acgpt.engine.decoding
import acgpt.engine.passes
import acgpt.engine.steps
from acgpt.engine.attention import Dense, Recorder, run
from acgpt.engine.decode import Rows, noise, prefill_tokens
from acgpt.engine.engine import Engine
from acgpt.engine.layout import build
from acgpt.engine.steps import WIDTHS, Row, StepCost, choose_width, few_shapes, schedule, steps_of
from acgpt.errors import ModelError
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling


def sampler(model, *, budget=10_000, most_rows=None):
    made = Engine(model, bos=0, mask=1, backend="dense", budget=budget)
    if most_rows is not None:
        made.most_rows = most_rows
    return made


def sample(model, queries, n=1, sampling=None, future=True, **how):
    with torch.inference_mode():
        return sampler(model, **how).sample(queries, n, sampling or Sampling(), future)


def ragged(unknown=0.1):
    queries = [random_query(seed, n, unknown=unknown) for seed, n in enumerate((25, 1, 60, 3, 12))]
    queries.append(Query([None] * 9, [False] * 9))  # nothing given
    queries.append(Query([7] * 30 + [None], [True] * 30 + [False]))  # one blank, at the end
    queries.append(Query([None, *range(5, 35), None], [False, *[True] * 30, False]))  # a long run of given tokens
    return queries


def same_tokens(one, other):
    return all(
        np.array_equal(a, b) for x, y in zip(one, other, strict=True) for (a, _), (b, _) in zip(x, y, strict=True)
    )


def check_scores(reference, queries, drawn, future, **tolerance):
    for query, samples in zip(queries, drawn, strict=True):
        for tokens, log_probs in samples:
            assert len(tokens) == len(log_probs) == len(query.asked_positions)
            want = expected_log_probs(reference, finished(query, tokens), future=future)
            torch.testing.assert_close(torch.from_numpy(log_probs), want, **tolerance)


HOW = {
    "plain": Sampling(seed=1),
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.6, seed=2),
    "top-k": Sampling(top_k=4, seed=3),
    "top-p": Sampling(top_p=0.8, seed=4),
    "all": Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=5),
}


# ---- cached decoding and one pass agree ----------------------------------------------------------------------------


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize(
    ("architecture", "how"),
    [*((a, how) for a in ARCHITECTURES for how in ("plain", "greedy")), *(("llama", how) for how in [*HOW][2:])],
)
def test_a_samples_log_probs_are_those_of_one_pass(architecture, future, how):
    reference, ours = twins(architecture)
    queries = ragged()
    drawn = sample(ours, queries, 2, HOW[how], future)
    check_scores(reference, queries, drawn, future, **EXACT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_decoding_agrees_with_one_pass_to_rounding(architecture):
    reference, ours = twins(architecture, torch.float32)
    queries = ragged()
    check_scores(reference, queries, sample(ours, queries, 2), True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_width_of_a_step_changes_nothing(width, monkeypatch):
    reference, ours = twins("llama")
    queries = ragged()
    usual = sample(ours, queries, 2)
    monkeypatch.setattr(acgpt.engine.decoding, "choose_width", lambda *_: width)
    drawn = sample(ours, queries, 2)
    assert same_tokens(drawn, usual)
    check_scores(reference, queries, drawn, True, **EXACT)


@pytest.mark.parametrize("how", [{"budget": 1}, {"budget": 70}, {"most_rows": 1}, {"most_rows": 3}, {"most_rows": 5}])
def test_small_budgets_and_few_rows_at_a_time_change_nothing(how):
    reference, ours = twins("gpt_neox")
    queries = ragged()
    drawn = sample(ours, queries, 3, **how)
    assert same_tokens(drawn, sample(ours, queries, 3))
    check_scores(reference, queries, drawn, True, **EXACT)


@pytest.mark.parametrize("grain", [1, 7, 128])
def test_how_much_of_the_cache_is_read_changes_nothing(grain):
    reference, ours = twins("qwen3")
    queries = ragged()
    made = sampler(ours)
    made.grain = grain
    with torch.inference_mode():
        drawn = made.sample(queries, 2, Sampling(), True)
    check_scores(reference, queries, drawn, True, **EXACT)


@pytest.mark.parametrize("width", [1, 4, 128])
@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
def test_a_kernel_that_reads_a_row_as_far_as_it_reaches_changes_nothing(architecture, width, monkeypatch):
    reference, ours = twins(architecture)
    queries = ragged()
    usual = sample(ours, queries, 2)
    sizes = []

    def row_by_row(q, k, v, slots, spare, scale):  # row by row, and not a slot more than a row has
        sizes.append(k.shape[2])
        out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype)
        for r, w in product(range(q.shape[0]), range(q.shape[2])):
            if slots[r, w] < spare:
                seen = slice(0, int(slots[r, w]) + 1)
                keys, values = (x[r, :, seen].repeat_interleave(q.shape[1] // k.shape[1], dim=0) for x in (k, v))
                weights = (keys @ q[r, :, w, :, None] * scale).softmax(1)
                out[r, w] = (weights * values).sum(1)
        return out

    monkeypatch.setattr(acgpt.engine.passes, "can_decode_ragged", lambda model: True)
    monkeypatch.setattr(acgpt.engine.decoding, "choose_width", lambda *_: width)
    monkeypatch.setattr(acgpt.engine.kernels.decode, "attention", row_by_row)
    drawn = sample(ours, queries, 2)
    assert same_tokens(drawn, usual)
    check_scores(reference, queries, drawn, True, **EXACT)
    assert len(set(sizes)) == 1  # a step of one shape serves all


def test_where_the_decoding_kernel_cannot_be_used_a_mask_does(monkeypatch):
    monkeypatch.setattr(acgpt.engine.kernels.attention, "available", lambda: True)
    monkeypatch.setattr(acgpt.engine.kernels.decode, "attention", lambda *_: 1 / 0)
    _, ours = twins("llama")
    monkeypatch.setattr(acgpt.engine.attention, "possible_backends", lambda model: ["varlen", "dense", "fused"])
    assert not acgpt.engine.attention.can_decode_ragged(ours)  # it is on a CPU
    monkeypatch.setattr(type(ours), "device", torch.device("cuda"))
    acgpt.engine.kernels.decode.works.cache_clear()
    with pytest.warns(UserWarning, match="decoding kernel cannot be used here, so sampling is slower"):
        assert not acgpt.engine.attention.can_decode_ragged(ours)
    acgpt.engine.kernels.decode.works.cache_clear()


@pytest.mark.parametrize(
    ("programs", "capacity", "parts"),
    [(2400, 1664, 1), (768, 1664, 2), (192, 1664, 2), (12, 1664, 8), (12, 100, 1), (1, 10**6, 16), (0, 1664, 8)],
)
def test_few_rows_are_cut_into_parts_and_many_are_not(programs, capacity, parts):
    assert acgpt.engine.kernels.decode.parts_of(programs, capacity) == parts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_memory_of_a_row_is_what_its_cache_takes(architecture):
    _, ours = twins(architecture)
    layout = build([random_query(0, 9)], bos=0, mask=1, future=True)
    recorder = Recorder()
    with torch.inference_mode():
        run(ours, layout.ids[None], layout.positions[None], Dense(layout), 1, recorder)
    assert Rows(recorder.states, 3, 5).nbytes == 3 * 5 * sampler(ours).slot_bytes


def test_rows_are_as_many_as_fit_into_memory_and_at_least_one():
    made = sampler(twins()[1])
    assert made.rows_at_once(10) == made.most_rows == 32
    assert made.rows_at_once(2**40) == 1
    made.slot_bytes = 2**26  # two gibibytes hold 32 such slots
    assert made.rows_at_once(4) == 8
    assert made.rows_at_once(0) == 32


def test_nothing_to_do_gives_nothing():
    assert sample(twins()[1], [], 3) == []


def test_what_is_sampled_does_not_depend_on_the_answer_that_was_there():
    _, ours = twins()
    blank = Query([5, None, 7, None], [True, False, True, False])
    filled = Query([5, 30, 7, 31], [True, False, True, False])
    assert same_tokens(sample(ours, [blank], 4), sample(ours, [filled], 4))


def test_an_unknown_token_is_read_as_mask_whatever_it_was():
    reference, ours = twins()
    roles = [True, False, False, True, False], [False, False, True, False, True]
    one, other = (Query([5, t, None, 8, None], *roles) for t in (None, 33))
    drawn = sample(ours, [one, other], 3)
    assert same_tokens(drawn[:1], drawn[1:])
    check_scores(reference, [one, other], drawn, True, **EXACT)


@pytest.mark.parametrize("future", [True, False])
def test_greedy_takes_the_likeliest_token_at_each_place(future):
    reference, ours = twins()
    query = random_query(3, 20)
    (tokens, _), (again, _) = sample(ours, [query], 2, Sampling(temperature=0), future)[0]
    assert np.array_equal(tokens, again)
    ids, positions, sees, predictions = by_definition(finished(query, tokens), future=future)
    best = masked_logits(reference, ids, positions, sees).argmax(-1)
    assert tokens.tolist() == [best[slot].item() for slot, _ in predictions]


# ---- the same seed, the same sample --------------------------------------------------------------------------------


def test_a_sample_is_the_same_alone_in_a_batch_and_in_another_order():
    _, ours = twins()
    queries = ragged()
    together = sample(ours, queries, 3, HOW["all"])
    for query, samples in zip(queries, together, strict=True):
        assert same_tokens(sample(ours, [query], 3, HOW["all"]), [samples])
        assert same_tokens(sample(ours, [query], 1, HOW["all"]), [samples[:1]])  # sample 0 of 1 is sample 0 of 3
    order = list(range(len(queries)))
    random.Random(0).shuffle(order)
    shuffled = sample(ours, [queries[i] for i in order], 3, HOW["all"])
    assert same_tokens(shuffled, [together[i] for i in order])


def test_the_same_query_twice_in_a_batch_is_answered_alike():
    _, ours = twins()
    query = random_query(5, 20)
    one, other = sample(ours, [query, query], 2)
    assert same_tokens([one], [other])


def test_noise_differs_between_samples_seeds_positions_and_queries():
    query = Query([5, None, 7, None], [True, False, True, False])
    base = noise(query, 0, 0)
    assert base.shape == (5,) and (base >= 0).all() and (base < 1).all()
    others = [
        noise(query, 1, 0),
        noise(query, 0, 1),
        noise(Query([6, None, 7, None], query.given), 0, 0),  # another given token
        noise(Query([5, None, 7, None], query.given, [False, False, False, True]), 0, 0),  # fewer asked
        noise(Query([None, 5, 7, None], [False, True, True, False]), 0, 0),  # the same tokens elsewhere
    ]
    values = np.concatenate([base, *others])
    assert len(set(values)) == len(values)
    assert np.array_equal(base, noise(query, 0, 0))
    assert np.array_equal(base, noise(Query([5, 1, 7, 2], query.given), 0, 0))  # what is asked has no say


def test_noise_is_uniform_over_samples_seeds_and_positions():
    query = Query([None] * 4, [False] * 4)
    by_sample = np.array([noise(query, i, 0) for i in range(2000)])
    by_seed = np.array([noise(query, 0, i) for i in range(2000)])
    for values in (*by_sample.T, *by_seed.T):
        assert stats.kstest(values, "uniform").pvalue > 1e-4
    between = np.corrcoef(by_sample.T)[~np.eye(5, dtype=bool)]
    assert np.abs(between).max() < 0.1


def test_other_seeds_and_sample_numbers_give_other_samples():
    _, ours = twins()
    query = Query([None] * 12, [False] * 12)
    drawn = [tuple(t) for seed in range(3) for t, _ in sample(ours, [query], 4, Sampling(seed=seed))[0]]
    assert len(set(drawn)) == 12


# ---- the schedule --------------------------------------------------------------------------------------------------


def walk(asked, width):
    """The steps after the first draw, walked: read up to the next asked place, in chunks that end there."""
    steps = []
    for last, following in pairwise(asked):
        run = list(range(last, following))  # the token just drawn, and the run up to the next blank
        chunks = []
        while run:
            chunks.insert(0, run[-width:])
            run = run[:-width]
        for i, chunk in enumerate(chunks):
            steps.append(([-1] * (width - len(chunk)) + chunk, following if i == len(chunks) - 1 else -1))
    return steps


@settings(max_examples=examples(60), deadline=None)
@given(st.sets(st.integers(1, 60), min_size=1), st.sampled_from(WIDTHS))
def test_the_schedule_is_the_walk_from_blank_to_blank(places, width):
    asked = sorted(places)
    query = Query([5] * 60, [p not in places for p in range(1, 61)])
    plan = schedule(query, width)
    assert [(r, d) for r, d in zip(plan.reads.tolist(), plan.draws.tolist(), strict=True)] == walk(asked, width)
    read = plan.reads[plan.reads >= 0].tolist()
    assert read == list(range(asked[0], asked[-1]))  # every place between first and last blank, once and in order
    assert [d for d in plan.draws.tolist() if d >= 0] == asked[1:]


def test_the_width_chosen_is_one_of_those_known_and_fits_the_work():
    dense = Query([None] * 60, [False] * 60)
    sparse = Query([None, *[5] * 58, None], [False, *[True] * 58, False])

    def chosen(cost, *queries, samples=1):
        return choose_width([Row(q, number, n) for number, q in enumerate(queries) for n in range(samples)], cost)

    assert chosen(StepCost(16, 1), dense) == 1  # nothing but single tokens to read
    assert chosen(StepCost(1000, 1), sparse) == 64  # one run, read at one go
    assert chosen(StepCost(1, 1), sparse, samples=1000) < 64  # tokens count more than steps
    assert chosen(StepCost(16, 1), dense, sparse) == 1  # the many steps of one decide for both
    assert chosen(StepCost(16, 1, row=1000), dense, sparse) == 32  # unless a row that is done early saves more
    assert chosen(StepCost(16, 1), Query([None], [False])) in WIDTHS  # no step at all


def test_the_drawing_of_the_steps_is_what_they_are():
    drawn = re.findall(r"step \d +reads ([\d, ]+?)(?: +draws (\d))?\n", acgpt.engine.steps.__doc__)
    roles = "gaggaga"  # The [cat] on the [mat] and [sat]
    plan = schedule(Query([5] * 7, [role == "g" for role in roles]), 2)
    assert [[p for p in reads if p > 0] for reads in plan.reads.tolist()] == [
        [int(p) for p in reads.split(",")] for reads, _ in drawn
    ]
    assert plan.draws.tolist() == [int(draws or -1) for _, draws in drawn]


def test_the_steps_of_a_batch_are_the_schedules_of_its_rows_the_longest_first():
    dense = Query([None] * 9, [False] * 9)
    sparse = Query([5, None, *[5] * 6, None], [True, False, *[True] * 6, False])
    one = Query([5, None], [True, False])
    rows = [Row(query, number, 0) for number, query in enumerate((one, sparse, dense))]
    steps = steps_of(rows, 4, future=True)
    assert [row.query for row in steps.rows] == [dense, sparse, one]
    assert steps.copies.tolist() == [0, 7, 1]
    assert steps.slots == 7 + 9  # copies, and BOS with all but the last of its tokens
    assert steps.working.tolist() == [2] * 2 + [1] * 6
    for r, query in enumerate((dense, sparse, one)):
        alone = schedule(query, 4)
        assert steps.reads[: len(alone.draws), r].tolist() == alone.reads.tolist()
        assert steps.draws[: len(alone.draws), r].tolist() == alone.draws.tolist()
        assert (steps.draws[len(alone.draws) :, r] == -1).all() and (steps.reads[len(alone.draws) :, r] == -1).all()
    assert steps_of(rows, 4, future=False).copies.tolist() == [0, 0, 0]


def test_a_gpu_captures_few_numbers_of_rows():
    assert few_shapes(np.array([200, 200, 129, 128, 65, 3, 1])).tolist() == [200, 200, 200, 128, 128, 4, 1]
    assert few_shapes(np.array([], dtype=int)).tolist() == []


# ---- what is run, and how often ------------------------------------------------------------------------------------


@pytest.fixture
def spied(request):
    """A model, and the list of its forward calls: (kind, ids, positions)."""
    _, ours = twins("llama")
    calls = []

    def spy(_, args, kwargs):
        assert not args
        kind = {Recorder: "prefill", Rows: "step"}.get(type(kwargs["past_key_values"]), "pass")
        calls.append((kind, kwargs["input_ids"].clone(), kwargs["position_ids"].clone()))

    hook = ours.register_forward_pre_hook(spy, with_kwargs=True)
    yield ours, calls
    hook.remove()


def kinds(calls):
    return Counter(kind for kind, _, _ in calls)


def test_under_a_dense_mask_the_padding_of_a_prefill_counts(spied):
    model, calls = spied
    queries = [Query([5] * n + [None], [True] * n + [False]) for n in (29, 4, 4)]  # slots: 30, 5 and 5, without copies
    sample(model, queries, future=False, budget=59)
    assert kinds(calls)["prefill"] == 2  # two of 30 would take 60


def test_a_prefill_has_a_budget_of_its_own(spied):
    model, calls = spied
    made = Engine(model, bos=0, mask=1, backend="dense", budget=1, prefill_budget=1000)
    with torch.inference_mode():
        made.sample(ragged(unknown=0), 1, Sampling(), True)
    assert kinds(calls)["prefill"] == 1
    assert Engine(model, bos=0, mask=1, backend="dense", budget=7).prefill_budget == 7


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_memory_of_a_prefill_is_what_its_tokens_take(architecture):
    model = twins(architecture)[1]
    config, size = model.config, model.dtype.itemsize
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    a_token = sampler(model).slot_bytes + (8 * config.hidden_size + 4 * inner) * size
    assert [prefill_tokens(model, n * a_token - 1) for n in (1, 8)] == [0, 7]


@pytest.mark.parametrize("future", [True, False])
def test_all_samples_of_a_query_share_one_prefill(spied, future):
    model, calls = spied
    queries = ragged()
    sample(model, queries, 3, future=future)
    assert kinds(calls)["prefill"] == 1
    layout = build(queries, bos=0, mask=1, future=future, first_only=True)
    assert calls[0][1].shape == (1, len(layout.ids))  # each query once, not three times
    assert sorted(calls[0][1][0].tolist()) == sorted(layout.ids.tolist())


def test_a_small_budget_prefills_in_several_groups(spied):
    model, calls = spied
    queries = ragged()
    sample(model, queries, 2, budget=1)
    assert kinds(calls)["prefill"] == len(queries)


@pytest.mark.parametrize(("future", "run"), [(False, 3), (True, 6)])  # BOS and two tokens; and three copies
def test_of_a_prefill_only_what_it_runs_counts_towards_the_budget(spied, future, run):
    model, calls = spied
    queries = [Query([5, i, *[None] * 30, 7], [True, True, *[False] * 30, True]) for i in range(6)]
    sample(model, queries, future=future, budget=6 * run)
    assert [ids.shape[1] for kind, ids, _ in calls if kind == "prefill"] == [6 * run]


def test_wide_steps_are_one_less_than_the_most_asked_tokens(spied, monkeypatch):
    model, calls = spied
    monkeypatch.setattr(acgpt.engine.decoding, "choose_width", lambda *_: 64)
    queries = ragged()
    sample(model, queries, 2)
    assert kinds(calls) == {"prefill": 1, "step": max(len(query.asked_positions) for query in queries) - 1}


def test_rows_that_are_done_cost_nothing_more(spied, monkeypatch):
    model, calls = spied
    monkeypatch.setattr(acgpt.engine.decoding, "choose_width", lambda *_: 64)
    sample(model, [Query([None] * n, [False] * n) for n in (2, 6, 4)])
    assert [ids.shape[0] for kind, ids, _ in calls if kind == "step"] == [3, 2, 2, 1, 1]


def test_one_blank_takes_no_step_at_all(spied):
    model, calls = spied
    sample(model, [Query([5, None, *[7] * 40], [True, False, *[True] * 40])], 4)
    assert kinds(calls) == {"prefill": 1}


@pytest.mark.parametrize(("width", "steps"), [(1, 11), (4, 3), (8, 2), (16, 1)])
def test_runs_of_given_tokens_are_forced_in_chunks(spied, monkeypatch, width, steps):
    model, calls = spied
    monkeypatch.setattr(acgpt.engine.decoding, "choose_width", lambda *_: width)
    query = Query([None, *range(20, 30), None], [False, *[True] * 10, False])
    (tokens, _), = sample(model, [query])[0]  # fmt: skip
    assert kinds(calls) == {"prefill": 1, "step": steps}
    fed = [
        (p, i)
        for kind, ids, at in calls
        if kind == "step"
        for p, i in zip(at[0].tolist(), ids[0].tolist(), strict=True)
    ]
    fed = [(p, i) for p, i in fed if p > 0]  # position 0 is where nothing is read
    assert fed == [(1, tokens[0]), *zip(range(2, 12), range(20, 30), strict=True)]


@pytest.mark.parametrize("future", [True, False])
def test_nothing_after_the_last_asked_token_is_run(spied, future):
    model, calls = spied
    for seed in range(4):
        query = random_query(seed, 20, share=0.3)
        last = seed * 3 + 3
        asked = [a and p <= last for p, a in enumerate(query.asked, start=1)]
        asked[0] = True
        given_ = [not a for a in asked]
        query = Query([7] * 20, given_, asked)
        calls.clear()
        sample(model, [query], 2, future=future)
        copies = len(query.given_positions) if future else 0
        for kind, _, positions in calls:
            text = positions[0, copies:] if kind == "prefill" else positions
            assert text.max() < query.asked_positions[-1]


# ---- drawn as often as it should be --------------------------------------------------------------------------------

BLANKS = Query([None, 2, None, None, 1], [False, True, False, False, True])  # the future of every blank is given


def chain(reference, query, future=True):
    """Each completion's probability at each of its places: {completion: (conditional distributions, …)}."""
    table = {}
    places = len(query.asked_positions)
    for completion in product(range(3), repeat=places):
        log_probs = expected_log_probs(reference, finished(query, completion), future=future)
        for i in range(places):
            table.setdefault(completion[:i], np.zeros(3))[completion[i]] = log_probs[i].exp().item()
    return table


def joint(table, places, sampling):
    probabilities = {}
    for completion in product(range(3), repeat=places):
        p = 1.0
        for i, token in enumerate(completion):
            p *= truncated(table[completion[:i]], sampling)[token]
        probabilities[completion] = p
    return probabilities


def counted(architecture, sampling, future=True):
    """Return a model of transformers, and how often each completion of BLANKS is drawn from its twin."""
    reference, ours = twins(architecture, vocabulary=3, scale=0.15)
    drawn = sample(ours, [BLANKS], 3000, sampling, future, most_rows=500)[0]
    return reference, Counter(tuple(tokens.tolist()) for tokens, _ in drawn)


def fit(counts, probabilities):
    """The chi-square test's p-value; outcomes that are expected fewer than five times are pooled."""
    n = counts.total()
    assert all(probabilities[outcome] > 0 for outcome in counts), "drawn, but impossible"
    common = [o for o, p in probabilities.items() if p * n >= 5]
    observed, wanted = [counts[o] for o in common], [probabilities[o] * n for o in common]
    if n - sum(wanted) > 1e-6:
        observed.append(n - sum(observed))
        wanted.append(n - sum(wanted))
    assert len(wanted) >= 3
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=11),
        Sampling(temperature=0.7, seed=12),
        Sampling(temperature=0.7, top_k=2, seed=13),
        Sampling(temperature=0.7, top_p=0.8, seed=14),
        Sampling(temperature=1.3, top_k=2, top_p=0.9, seed=15),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
def test_samples_come_as_often_as_their_probability_says(architecture, sampling):
    reference, counts = counted(architecture, sampling)
    probabilities = joint(chain(reference, BLANKS), 3, sampling)
    assert sum(probabilities.values()) == pytest.approx(1)
    assert fit(counts, probabilities) > 1e-3


def test_the_frequency_test_can_tell_the_future_and_the_temperature_apart():
    reference, counts = counted("llama", Sampling(seed=11))
    assert fit(counts, joint(chain(reference, BLANKS, future=False), 3, Sampling())) < 1e-6
    assert fit(counts, joint(chain(reference, BLANKS), 3, Sampling(temperature=0.9))) < 1e-3


def test_left_to_right_samples_come_as_often_as_their_probability_says():
    reference, counts = counted("llama", Sampling(seed=3), future=False)
    assert fit(counts, joint(chain(reference, BLANKS, future=False), 3, Sampling())) > 1e-3


def test_decoding_also_notices_attention_changed_behind_our_back():
    _, ours = twins("mistral", torch.float32, seed=9)
    ours.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="0 of its 2 layers"):
        sample(ours, [Query([None, 5], [False, True])])


def test_samples_beyond_one_batch_share_the_prefill_too(monkeypatch):
    _, model = twins()
    sampler = Engine(model, bos=0, mask=1, backend="dense", budget=1000)
    sampler.most_rows = 4
    prefills = []

    def spy(*args, **how):
        prefills.extend(arg for arg in args if isinstance(arg, Recorder))
        return run(*args, **how)

    monkeypatch.setattr(acgpt.engine.passes, "run", spy)
    with torch.inference_mode():
        sampler.sample([random_query(0, 12), random_query(1, 9)], 11, Sampling(seed=0), True)
    assert len(prefills) == 2  # one a query, though the samples of each are drawn in several batches
