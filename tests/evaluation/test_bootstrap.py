"""The paired bootstrap against closed forms and simulation; the file that keeps what is known of each text."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
import scipy.stats
from perplexities import measured, perplexity_of

from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import (
    DOCUMENTS,
    Difference,
    MeasuredPerplexity,
    PerText,
    TextSums,
    paired_difference,
    student_quantile,
)
from acgpt.evaluation.per_text import ENDING, as_dict, from_dict, per_text_path, read_per_text, write_per_text

Z = NormalDist().inv_cdf(0.975)


def kept(nats: np.ndarray, tokens: np.ndarray | int = 100, mode: str = "training", name: str = "set") -> PerText:
    """An evaluation in one mode."""
    counts = np.broadcast_to(np.asarray(tokens, dtype=float), nats.shape).copy()
    return PerText(name, {mode: TextSums(np.asarray(nats, dtype=float), counts)})


def interval(ours: PerText | list[PerText], theirs: PerText | list[PerText]) -> Difference:
    sides = (each if isinstance(each, list) else [each] for each in (ours, theirs))
    return paired_difference(*(measured(side, "training") for side in sides))


def pair(rng: np.random.Generator, texts: int, effect: float = 0.03, spread: float = 4.0) -> tuple[PerText, PerText]:
    """Two models on texts that are easy or hard for both: the first needs `effect` nats a token less on average."""
    hard = rng.normal(300, 60, texts)
    return kept(hard - 100 * effect + rng.normal(0, spread, texts)), kept(hard + rng.normal(0, spread, texts))


# ---- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [np.full(400, 100), np.arange(400) % 7 * 30 + 20])
def test_the_interval_is_the_normal_one_of_the_delta_method(lengths):
    # The logarithm of the ratio is a difference of two ratios of sums; linearised, a mean of one number for each text.
    rng = np.random.default_rng(1)
    ours, theirs = (
        TextSums(lengths * (3 + rng.normal(0, 0.2, 400) + shift), lengths.astype(float)) for shift in (0, 0.01)
    )
    result = interval(PerText("set", {"training": ours}), PerText("set", {"training": theirs}))
    log_ratio = ours.nats.sum() / ours.tokens.sum() - theirs.nats.sum() / theirs.tokens.sum()
    influence = ours.nats - theirs.nats - log_ratio * lengths
    error = influence.std(ddof=1) * math.sqrt(len(lengths)) / lengths.sum()
    assert result.percent == pytest.approx(100 * (1 - math.exp(log_ratio)))
    wanted = sorted(100 * (1 - math.exp(log_ratio + sign * Z * error)) for sign in (-1, 1))
    assert result.interval == pytest.approx(wanted, abs=0.12 * (wanted[1] - wanted[0]))  # 1,000 resamples: 5 % each


def test_intervals_hold_the_true_difference_as_often_as_they_say():
    trials, effect = 300, 0.03
    rng = np.random.default_rng(2)
    intervals = [interval(*pair(rng, 100, effect)).interval for _ in range(trials)]
    true = 100 * (1 - math.exp(-effect))
    held = sum(low <= true <= high for low, high in intervals) / trials
    assert held == pytest.approx(0.95, abs=0.04)  # three standard errors of 300 trials


def test_a_difference_is_clear_in_both_directions():
    rng = np.random.default_rng(3)
    assert interval(*pair(rng, 100, effect=0.1)).clear and interval(*pair(rng, 100, effect=-0.1)).clear


def test_sums_over_other_units_are_not_compared():
    ours, theirs = pair(np.random.default_rng(5), 40)
    documents = PerText("set", theirs.modes, DOCUMENTS)
    assert interval(ours, theirs).interval is not None
    assert interval(ours, documents).interval is None and interval([ours, documents], theirs).interval is None
    assert interval(PerText("set", ours.modes, DOCUMENTS), documents).interval == interval(ours, theirs).interval


def test_pairing_matters():
    ours, theirs = pair(np.random.default_rng(4), 200)
    sums = theirs.modes["training"]
    order = np.random.default_rng(5).permutation(200)
    shuffled = PerText("set", {"training": TextSums(sums.nats[order], sums.tokens[order])})
    paired, unpaired = interval(ours, theirs), interval(ours, shuffled)
    assert paired.percent == pytest.approx(unpaired.percent)
    widths = [high - low for low, high in (paired.interval, unpaired.interval)]
    # By hand: a text differs by sqrt(2) · 4 nats where it is paired, and by sqrt(2 · (60² + 4²)) where it is not.
    assert widths[1] / widths[0] == pytest.approx(math.sqrt(60**2 + 4**2) / 4, rel=0.25)
    assert paired.clear and not unpaired.clear


def test_equal_runs_differ_by_exactly_nothing():
    ours, _ = pair(np.random.default_rng(6), 50)
    same = from_dict(as_dict(ours))
    result = interval(same, from_dict(as_dict(ours)))
    assert result == Difference(0.0, (0.0, 0.0)) and not result.clear
    assert interval([same] * 3, same).interval == pytest.approx((0.0, 0.0), abs=1e-12)


def test_means_over_seeds_are_those_of_perplexities():
    rng = np.random.default_rng(7)
    runs = [kept(rng.normal(300, 5, 80)) for _ in range(3)]
    other = kept(rng.normal(305, 5, 80))
    values = [perplexity_of(run.modes["training"]) for run in runs]
    assert interval(runs, other).percent == pytest.approx(
        100 * (1 - np.mean(values) / perplexity_of(other.modes["training"]))
    )
    low, high = interval(runs, other).interval
    assert low < interval(runs, other).percent < high
    assert high - low < np.subtract(*interval(runs[0], other).interval[::-1])  # three seeds average out


def test_evaluations_of_different_sets_are_refused():
    ours, theirs = pair(np.random.default_rng(9), 10)
    with pytest.raises(InputError, match="different datasets, other and set"):
        interval(ours, PerText("other", theirs.modes))


@pytest.mark.parametrize("missing", ["ours", "theirs", "one seed"])
def test_without_sums_of_each_text_there_is_a_difference_and_no_interval(missing):
    ours, theirs = pair(np.random.default_rng(10), 10)
    first = {"ours": (None,), "theirs": (ours,), "one seed": (ours, None)}[missing]
    second = (None,) if missing == "theirs" else (theirs,)
    result = paired_difference(MeasuredPerplexity(9.0, "training", first), MeasuredPerplexity(10.0, "training", second))
    assert result.percent == pytest.approx(10) and result.interval is None and not result.clear


def test_fewer_than_eight_texts_and_impossible_texts_have_no_interval():
    for texts, known in ((1, False), (7, False), (8, True)):
        ours, theirs = (kept(np.arange(1.0, texts + 1) * factor) for factor in (1, 2))
        assert (interval(ours, theirs).interval is not None) is known
    impossible = kept(np.array([300.0, math.inf, 310.0]))
    assert interval(impossible, kept(np.array([300.0, 305.0, 310.0]))).interval is None


# ---- the file -------------------------------------------------------------------------------------------------------


def results(per_text: PerText) -> dict:
    """Return the results of the same evaluation."""
    modes = {
        mode: {"perplexity": p if math.isfinite(p := perplexity_of(sums)) else None, "tokens": int(sums.tokens.sum())}
        for mode, sums in per_text.modes.items()
    }
    texts = len(next(iter(per_text.modes.values())).nats)
    return {"set": {"hash": per_text.set_hash, "texts": texts}, "modes": {**modes, "infilling": None}}


def test_what_is_written_is_read_to_a_thousandth(tmp_path):
    rng = np.random.default_rng(11)
    result = kept(rng.normal(3000, 100, 276), rng.integers(1, 1023, 276))
    write_per_text(tmp_path / "test.json", result)
    path = per_text_path(tmp_path / "test.json")
    assert path.name == f"test{ENDING}" and path.stat().st_size < 276 * 15
    back = read_per_text(tmp_path / "test.json", results(result))
    assert back.set_hash == "set" and np.array_equal(back.modes["training"].tokens, result.modes["training"].tokens)
    assert np.abs(back.modes["training"].nats - result.modes["training"].nats).max() <= 5.1e-4
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_what_is_infinite_is_null_in_the_file(tmp_path):
    result = kept(np.array([300.0, math.inf]))
    write_per_text(tmp_path / "test.json", result)
    assert json.loads(per_text_path(tmp_path / "test.json").read_text())["nats"]["training"] == [300.0, None]
    assert math.isinf(read_per_text(tmp_path / "test.json", results(result)).modes["training"].nats[1])


def test_results_without_the_file_are_read(tmp_path):
    assert read_per_text(tmp_path / "test.json", results(kept(np.array([300.0, 310.0])))) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"set": {"hash": "other"}}, "of the evaluation dataset other, not set"),
        ({"nats": {"training": [300.0, 310.1]}}, "do not match"),
        ({"tokens": {"training": [100, 99]}}, "do not match"),
        ({"nats": {"training": [300.0]}}, "do not match"),
        ({"nats": {}}, "do not match"),
        ({"nats": None}, "does not belong"),
        ({"tokens": {}}, "does not belong"),
        ({"set": "other"}, "does not belong"),
        ({"unit": "documents"}, "do not match"),
        ({"unit": "lines"}, "do not match"),
        ({"kind": "mauve"}, "kind per-text"),
        ({"format_version": 2}, "version 1"),
    ],
)
def test_a_file_of_another_evaluation_is_refused(tmp_path, change, message):
    result = kept(np.array([300.0, 310.0]))
    per_text_path(tmp_path / "test.json").write_text(json.dumps(as_dict(result) | change))
    with pytest.raises(InputError, match=message):
        read_per_text(tmp_path / "test.json", results(result))


@pytest.mark.parametrize("texts", [8, 12, 20, 100])
def test_many_and_few_texts_are_called_different_by_chance_no_more_often_than_5_percent(texts):
    rng = np.random.default_rng(texts)
    clear = sum(interval(*pair(rng, texts, effect=0.0)).clear for _ in range(400))
    assert clear / 400 == pytest.approx(0.05, abs=0.035)


@pytest.mark.parametrize("degrees", [7, 8, 19, 63, 275])
def test_the_quantile_is_students(degrees):
    assert student_quantile(0.975, degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), abs=1e-3)
