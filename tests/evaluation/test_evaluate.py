"""Perplexity against a dense mask by hand, and its intervals."""

from __future__ import annotations

import itertools
import json
import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from models import expected_log_probs, tiny_model, twins
from test_evaluation_set import small_set

from acgpt.engine.architecture import check_model
from acgpt.engine.engine import Engine
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.bootstrap import percentiles, resampled_means
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.distance import LABELS, bins, next_given, run_lengths
from acgpt.evaluation.perplexity import Evaluation, evaluate
from acgpt.methods import method_of
from acgpt.methods.ac_gpt import AcGpt
from acgpt.query.conditioning import ASKED, GIVEN, Conditioning
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.query.query import Query


def ask(model, evaluation_dataset, method="ac-gpt", *, mask=1, budget=2**13, **how):
    return evaluate(method_of(method), Engine(model, bos=0, mask=mask, budget=budget), evaluation_dataset, **how)


def by_hand(reference, evaluation_dataset, mode):
    """All log-probabilities of a mode from its definition, text by text: a dense mask, and no code of acgpt."""
    drawn = {"unconditional": None}.get(mode, evaluation_dataset.sampled_roles.get(mode.removesuffix("-no-future")))
    results = []
    for number, text in enumerate(evaluation_dataset.tokens.tolist()):
        roles = np.full(len(text), ASKED) if drawn is None else drawn[number]
        query = Query(text, (roles == GIVEN).tolist(), (roles == ASKED).tolist())
        results.extend(expected_log_probs(reference, query, future=not mode.endswith("no-future")).tolist())
    return results


# ---- perplexity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "method"), [("gpt2", "ac-gpt"), ("llama", "ac-gpt"), ("llama", "gpt")])
def test_perplexities_are_those_of_a_dense_mask_by_hand(architecture, method):
    reference, ours = twins(architecture)
    evaluation_dataset = small_set()
    evaluation = ask(ours, evaluation_dataset, method)
    assert list(evaluation.modes) == list(MODES)
    for mode, result in evaluation.modes.items():
        if result is None:
            assert method == "gpt" and MODES[mode].future
            continue
        want = by_hand(reference, evaluation_dataset, mode)
        assert result.tokens == len(want) and result.texts == 6
        assert result.mean_nll == pytest.approx(-sum(want) / len(want), abs=1e-9)
        assert result.perplexity == pytest.approx(math.exp(-sum(want) / len(want)), rel=1e-9)
        assert evaluation.records()[f"{mode}.log_prob"].tolist() == pytest.approx(want, abs=1e-9)
    for mode, without in WITHOUT_FUTURE.items():
        if method == "ac-gpt":
            ratio = evaluation.modes[mode].perplexity / evaluation.modes[without].perplexity
            assert evaluation.gains[mode].percent == pytest.approx(100 * (1 - ratio))


def test_unknown_tokens_are_hidden_with_and_without_the_future():
    reference, ours = twins()
    evaluation_dataset = small_set(training=Conditioning.from_dict({"unknown": 0.3}))
    evaluation = ask(ours, evaluation_dataset)
    for mode, result in evaluation.modes.items():
        want = by_hand(reference, evaluation_dataset, mode)
        assert (result.tokens, result.mean_nll) == (len(want), pytest.approx(-sum(want) / len(want), abs=1e-9))
    assert ask(ours, evaluation_dataset, "gpt").modes["training-no-future"] is None  # GPT has no MASK
    with pytest.raises(InputError, match="MASK"):
        ask(ours, evaluation_dataset, mask=None)


@pytest.mark.parametrize("budget", [1, 30, 100])
def test_the_batch_size_changes_no_result(budget):
    _, ours = twins()
    want, got = ask(ours, small_set(9), budget=10**6), ask(ours, small_set(9), budget=budget)
    for mode in MODES:
        assert got.modes[mode].mean_nll == pytest.approx(want.modes[mode].mean_nll, abs=1e-12)
        assert got.modes[mode].interval == pytest.approx(want.modes[mode].interval, rel=1e-9)


class Counting(AcGpt):
    """AC-GPT that notes how many queries it was asked at a time."""

    def __init__(self):
        self.asked = []

    def log_probs(self, engine, queries, **how):
        self.asked.append(len(queries))
        return super().log_probs(engine, queries, **how)


def test_one_unconditional_pass_serves_three_modes():
    _, ours = twins()
    without = [name for name, mode in MODES.items() if not mode.future]
    for modes, passes in ([(), 3], [without, 1], [["training"], 1], [["training", "training-no-future"], 2]):
        method, seen = Counting(), []
        options = {"modes": modes, "progress": lambda *step: seen.append(step)}  # noqa: B023
        assert list(evaluate(method, Engine(ours, bos=0, mask=1), small_set(), **options).modes) == list(modes or MODES)
        assert sum(method.asked) == 6 * passes
        total = 6 * passes * small_set().length
        assert seen[0] == (0, total, 0) and seen[-1] == (total, total, total)


def test_batches_are_filled_up_to_the_budget():
    method = Counting()
    evaluate(method, Engine(twins()[1], bos=0, mask=1, budget=60), small_set(7), modes=["unconditional"])
    assert method.asked == [3, 3, 1]  # 20 slots a text


def test_on_a_cpu_progress_moves_at_least_every_thousand_tokens():
    seen = []
    options = {"modes": ["training"], "progress": lambda *step: seen.append(step)}
    evaluate(method_of("ac-gpt"), Engine(twins()[1], bos=0, mask=1, budget=2**14), small_set(200), **options)
    steps = [after[0] - before[0] for before, after in itertools.pairwise(seen)]
    assert sum(steps) == seen[-1][1] > 3000 and max(steps) <= 1024


def test_what_a_method_cannot_answer_has_no_result_and_no_guess():
    _, ours = twins()
    evaluation = ask(ours, small_set(), "gpt")
    assert [mode for mode, result in evaluation.modes.items() if result is None] == ["infilling", "training"]
    assert evaluation.unanswered == ("infilling", "training")
    assert evaluation.gains == {"infilling": None, "training": None}
    assert "training.log_prob" not in evaluation.records()
    plain = json.loads(json.dumps(evaluation.as_dict(), allow_nan=False))
    assert plain["modes"]["training"] is None and plain["modes"]["unconditional"]["tokens"] == 120


def test_with_nothing_given_all_modes_are_the_same_for_every_method():
    _, ours = twins()
    for method in ("ac-gpt", "gpt"):
        results = ask(ours, small_set(r_max=0.0), method).modes
        assert len(set(results.values())) == 1 and None not in results.values()


def test_a_model_in_training_is_evaluated_without_dropout_and_left_in_training():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    check_model(model)
    want = ask(model, small_set()).as_dict()
    model.train()
    model.transformer.h[0].eval()
    assert ask(model, small_set()).as_dict() == want
    assert model.training and model.transformer.h[1].training and not model.transformer.h[0].training
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()  # and can be trained on


def test_records_hold_every_asked_token_with_its_place():
    evaluation_dataset = small_set()
    evaluation = ask(twins()[1], evaluation_dataset)
    columns = evaluation.records()
    for mode, result in evaluation.modes.items():
        text, place, token, log_prob = (columns[f"{mode}.{name}"] for name in ("text", "position", "token", "log_prob"))
        assert len(text) == result.tokens
        assert (token == evaluation_dataset.tokens[text, place - 1]).all()
        assert (evaluation_dataset.roles(MODES[mode])[text, place - 1] == ASKED).all()
        assert len(set(zip(text.tolist(), place.tolist(), strict=True))) == result.tokens
        assert -log_prob.mean() == pytest.approx(result.mean_nll)


def test_texts_that_do_not_fit_the_model_are_refused():
    ours = tiny_model(positions=20)
    with pytest.raises(InputError, match=r"20 tokens.*20 positions.*`length=19`"):
        ask(ours, small_set())
    beyond = EvaluationDataset.build(np.full(20, 50), tokenizer_hash="t", length=19)
    with pytest.raises(InputError, match=r"token 50.*end at 49"):
        ask(ours, beyond)
    check_model(ours)
    ask(ours, small_set(length=19))


def test_a_model_whose_logits_are_no_numbers_is_refused():
    model = tiny_model()
    check_model(model)
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        ask(model, small_set())


# ---- intervals ------------------------------------------------------------------------------------------------------


def test_an_interval_is_that_of_resampling_by_hand():
    rng = np.random.default_rng(1)
    counts, nlls = rng.integers(1, 30, size=25).astype(float), rng.gamma(9, 1, size=25)
    means = []
    for _ in range(4000):
        drawn = rng.integers(25, size=25)
        means.append(nlls[drawn].sum() / counts[drawn].sum())
    got = percentiles(resampled_means({"m": (nlls, counts)}, seed=0)["m"], 25)
    tail = scipy.stats.norm.cdf(-math.sqrt(25 / 24) * scipy.stats.t.ppf(0.975, 24))
    want = np.quantile(means, [tail, 1 - tail])
    assert got == pytest.approx(want, abs=0.1 * (want[1] - want[0]))


def test_intervals_are_a_function_of_the_seed():
    _, ours = twins()
    one, same, other = (ask(ours, small_set(9), seed=seed, modes=["training"]) for seed in (0, 0, 1))
    assert one.as_dict() == same.as_dict()
    assert one.modes["training"].perplexity == other.modes["training"].perplexity
    assert one.modes["training"].interval != other.modes["training"].interval
    low, high = one.modes["training"].interval
    assert low < one.modes["training"].perplexity < high


def test_a_gain_is_compared_on_the_same_texts():
    evaluation_dataset = small_set(9)
    past = np.where(
        evaluation_dataset.sampled_roles["training"] == ASKED, -5 * np.random.default_rng(0).random((9, 20)), np.nan
    )
    both = {"training-no-future": past, "training": past + 0.1}  # every token a tenth of a nat likelier
    evaluation = Evaluation("ac-gpt", evaluation_dataset, both, (), seed=0)
    gain = evaluation.gains["training"]
    assert (gain.percent, *gain.interval) == pytest.approx([100 * (1 - math.exp(-0.1))] * 3)
    low, high = evaluation.modes["training"].interval
    assert high - low > 1  # the texts themselves differ by much more
    assert evaluation.gains["infilling"] is None


def test_sums_are_kept_for_each_document_and_texts_are_split_at_their_borders():
    starts = np.sort(np.random.default_rng(0).choice(np.arange(1, 400), size=34, replace=False))
    dataset = small_set(20, documents=np.array([0, *starts]))
    log_probs = np.where(dataset.sampled_roles["training"] == ASKED, -np.random.default_rng(1).random((20, 20)), np.nan)
    kept = Evaluation("gpt", dataset, {"training-no-future": log_probs}, (), seed=0).per_text
    assert (kept.unit, kept.units) == ("documents", 35)
    pieces = np.split(log_probs.ravel(), starts)
    sums = kept.modes["training-no-future"]
    assert sums.nats.tolist() == pytest.approx([-np.nansum(piece) for piece in pieces])
    assert sums.tokens.tolist() == [(~np.isnan(piece)).sum() for piece in pieces]


@pytest.mark.parametrize(
    ("documents", "unit", "units"), [(29, "texts", 20), (30, "documents", 30), (None, "texts", 20)]
)
def test_fewer_than_thirty_documents_are_not_resampled_but_the_texts(documents, unit, units):
    dataset = small_set(20, documents=None if documents is None else np.arange(documents) * 13)
    evaluation = Evaluation("gpt", dataset, {"unconditional": np.full((20, 20), -1.0)}, (), seed=0)
    described = evaluation.as_dict()["bootstrap"]
    assert (described["unit"], described["units"]) == (unit, units)
    assert evaluation.modes["unconditional"].texts == 20


def test_intervals_over_documents_hold_where_those_over_their_windows_do_not():
    rng, held = np.random.default_rng(2), {"documents": [], "texts": []}
    datasets = {"documents": small_set(360, 10, documents=np.arange(60) * 60), "texts": small_set(360, 10)}
    for trial in range(150):
        easy = rng.normal(3, 0.5, size=60).repeat(6)[:, None]  # a document is six texts, alike in difficulty
        log_probs = -(easy + rng.normal(0, 0.5, size=(360, 1)) + rng.normal(0, 1, size=(360, 10)))
        for unit, dataset in datasets.items():
            evaluation = Evaluation("gpt", dataset, {"unconditional": log_probs}, (), seed=trial)
            low, high = evaluation.modes["unconditional"].interval
            assert evaluation.per_text.unit == unit
            held[unit].append(low <= math.exp(3) <= high)
    assert 0.89 <= np.mean(held["documents"]) <= 0.99 and np.mean(held["texts"]) < 0.85


# ---- gains by distance ----------------------------------------------------------------------------------------------


def lengths_by_hand(roles):
    """For each token the distance to the next given one, and the length of its run, found by walking."""
    distances, runs = np.zeros(roles.shape, int), np.zeros(roles.shape, int)
    for row, text in enumerate(roles.tolist()):
        for at in range(len(text)):
            if text[at] != GIVEN:
                following = [there for there in range(at, len(text)) if text[there] == GIVEN]
                distances[row, at] = following[0] - at if following else 0
                before, after = at, at
                while before > 0 and text[before - 1] != GIVEN:
                    before -= 1
                while after + 1 < len(text) and text[after + 1] != GIVEN:
                    after += 1
                runs[row, at] = after - before + 1
    return distances, runs


def test_distances_and_runs_are_those_found_by_walking():
    dataset = small_set(40, 50, training=Conditioning.from_dict({"unknown": 0.2, "r_max": 1}))
    for roles in dataset.sampled_roles.values():
        distances, runs = lengths_by_hand(roles)
        assert (next_given(roles)[roles != GIVEN] == distances[roles != GIVEN]).all()
        assert (run_lengths(roles) == runs).all()
    numbers = np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 1000])
    labels = ["none", "1", "2", "3–4", "3–4", "5–8", "5–8", "9–16", "9–16", "17–32", "17–32", "33+", "33+"]
    assert [LABELS[number] for number in bins(numbers)] == labels


def test_gains_by_distance_are_means_over_the_tokens_of_each_bin():
    dataset, rng = small_set(20, 60, documents=np.arange(40) * 30), np.random.default_rng(0)
    roles = dataset.sampled_roles["training"]
    past, both = (np.where(roles == ASKED, -rng.random(roles.shape), np.nan) for _ in range(2))
    evaluation = Evaluation("ac-gpt", dataset, {"training-no-future": past, "training": both}, (), seed=0)
    assert evaluation.by_distance["infilling"] is None
    gains = evaluation.by_distance["training"]
    for found, numbers in zip((gains["distance"], gains["run"]), lengths_by_hand(roles), strict=True):
        for label, entry in found.items():
            tokens = (roles == ASKED) & (np.array(LABELS)[bins(numbers)] == label)
            assert entry.tokens == tokens.sum()
            assert entry.nats == pytest.approx(-both[tokens].mean())
            assert entry.nats_without == pytest.approx(-past[tokens].mean())
            assert entry.gain == pytest.approx((both - past)[tokens].mean())
        total = sum(entry.gain * entry.tokens for entry in found.values()) / sum(e.tokens for e in found.values())
        assert 100 * (1 - math.exp(-total)) == pytest.approx(evaluation.gains["training"].percent)
    low, high = gains["distance"]["1"].interval
    assert low < gains["distance"]["1"].gain < high


def test_an_interval_of_a_bin_resamples_documents_in_pairs():
    dataset, rng = small_set(40, 60, documents=np.arange(80) * 30), np.random.default_rng(0)
    roles = dataset.sampled_roles["training"]
    past = np.where(roles == ASKED, -9 * rng.random(roles.shape), np.nan)
    both = past + np.where(next_given(roles) == 1, 0.7, 0.1)  # the same for every token of a bin: nothing to chance
    gains = Evaluation("ac-gpt", dataset, {"training-no-future": past, "training": both}, (), seed=0).by_distance
    belongs, units = np.array(LABELS)[bins(next_given(roles))], np.arange(80).repeat(30).reshape(40, 60)
    counted = {label: len(set(units[(belongs == label) & (roles == ASKED)])) for label in LABELS}
    assert min(counted.values()) < 8 < max(counted.values())
    for label, entry in gains["training"]["distance"].items():
        want = 0.7 if label == "1" else 0.1
        assert (entry.interval is None) == (counted[label] < 8)  # in some resamples no document has such a token
        assert (entry.gain, *(entry.interval or ())) == pytest.approx([want] * (3 if entry.interval else 1))


@pytest.mark.parametrize("holders", [7, 8])
def test_a_bin_that_few_texts_have_has_the_interval_of_so_few(holders):
    base, rng = small_set(40, 20), np.random.default_rng(0)
    roles = np.full((40, 20), ASKED, dtype=np.int8)
    roles[:holders, -1] = GIVEN  # the only texts with a token next to a given one
    dataset = EvaluationDataset(base.tokens, {**base.sampled_roles, "training": roles}, base.origin)
    past = np.where(roles == ASKED, -9 * rng.random(roles.shape), np.nan)
    both = np.where(roles == ASKED, past + rng.random((40, 1)), np.nan)
    log_probs = {"training-no-future": past, "training": both}
    entry = Evaluation("ac-gpt", dataset, log_probs, (), seed=0).by_distance["training"]["distance"]["1"]
    gains, counts = np.zeros(40), np.zeros(40)
    gains[:holders], counts[:holders] = (both - past)[:holders, -2], 1
    means = resampled_means({"gain": (gains, counts)}, 0)["gain"]
    assert entry.tokens == holders
    assert entry.interval == (None if holders < 8 else pytest.approx(percentiles(means[~np.isnan(means)], holders)))


def test_many_texts_are_resampled_in_parts():
    sums = {"m": (np.arange(10_000.0), np.ones(10_000))}
    means = resampled_means(sums, seed=0)["m"]
    assert means.shape == (1000,) and len(set(means.tolist())) > 990
    assert means.std() == pytest.approx(np.arange(10_000.0).std() / 100, rel=0.1)


def test_an_impossible_token_makes_an_infinite_perplexity_which_json_has_not():
    log_probs = np.full((6, 20), -1.0)
    log_probs[3, 3] = -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = Evaluation("gpt", small_set(), {"unconditional": log_probs}, (), seed=0)
        assert evaluation.modes["unconditional"].perplexity == math.inf
        plain = evaluation.as_dict()["modes"]["unconditional"]
        log_probs[small_set().sampled_roles["training"] != ASKED] = np.nan
        pair = {"training": log_probs, "training-no-future": log_probs}
        binned = Evaluation("ac-gpt", small_set(), pair, (), seed=0).as_dict()["by_distance"]["training"]
    assert plain["perplexity"] is plain["mean_nll"] is plain["interval"] is None
    assert json.loads(json.dumps(binned, allow_nan=False))
    assert plain["tokens"] == 120
