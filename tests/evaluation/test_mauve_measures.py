"""Features against transformers' own; references, companions and the score against brute force."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generations import LENGTH, write_generations
from models import expected_log_probs, tiny_model, tiny_tokenizer
from runs import SPECIAL

from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation import mauve as mauve_score
from acgpt.evaluation import reference
from acgpt.evaluation import text_metrics as companions
from acgpt.evaluation.features import Featurizer
from acgpt.evaluation.generations import Generation, Generations, runs
from acgpt.evaluation.judge import Judge
from acgpt.evaluation.perplexity import PartialEvaluation
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata, tokenizer_hash
from acgpt.query.query import Query

pytestmark = pytest.mark.usefixtures("cache")

TEXTS = ["The cat sat on the mat.", "A dog", "The capital of France is Paris. " * 12, "x"]


def sample(tokens: list[int], roles: str | None = None, **more: Any) -> Generation:
    roles = roles or "a" * len(tokens)
    about = {"log_probs": None, "prompt": "", "fills": ("",) * len(runs(roles)), "text": ""} | more
    return Generation(0, 0, roles, tuple(tokens), **about)


# ---- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_feature_is_the_last_hidden_state_at_the_last_token(architecture: str, monkeypatch: pytest.MonkeyPatch):
    network, tokenizer = tiny_model(architecture, vocabulary=340), tiny_tokenizer(**SPECIAL)
    monkeypatch.setattr("acgpt.evaluation.features.BUDGET", {"cpu": 70})  # several batches, padded
    result = Featurizer("x", network, tokenizer).features(TEXTS)
    for text, feature in zip(TEXTS, result, strict=True):
        ids = tokenizer(text)["input_ids"][:64]  # it has 64 positions
        with torch.no_grad():
            expected = network(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert feature == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)
    assert len(tokenizer(TEXTS[2])["input_ids"]) > 64


def test_a_text_is_read_to_its_end_where_there_are_positions_for_it_and_else_counted(monkeypatch: pytest.MonkeyPatch):
    tokenizer = tiny_tokenizer(**SPECIAL)
    reader = Featurizer("x", tiny_model("llama", vocabulary=340, positions=64), tokenizer)
    longer = sum(len(tokenizer(text)["input_ids"]) > 64 for text in TEXTS)
    assert reader.length() == 64 and reader.count_truncated(TEXTS) == longer == 1
    wide = Featurizer("x", tiny_model("llama", vocabulary=340, positions=4096), tokenizer)
    assert wide.length() == 2048 and wide.count_truncated(TEXTS) == 0
    text, most = TEXTS[0], len(tokenizer(TEXTS[0])["input_ids"])
    for length, cut in ((most, 0), (most - 1, 1)):
        monkeypatch.setattr(Featurizer, "length", lambda self, length=length: length)
        assert reader.count_truncated([text]) == cut


def test_features_are_computed_once_and_known_by_texts_and_weights(cache: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = tiny_tokenizer(**SPECIAL)
    one, other = (Featurizer("x", tiny_model("gpt2", vocabulary=340, seed=seed), tokenizer) for seed in (0, 1))
    first = one.features(TEXTS)
    (kept,) = cache.iterdir()
    calls: list[int] = []
    compute = Featurizer.compute
    monkeypatch.setattr(Featurizer, "compute", lambda *args: calls.append(1) or compute(*args))
    assert np.array_equal(one.features(TEXTS), first) and not calls
    assert not np.allclose(other.features(TEXTS), first) and len(calls) == 1
    with monkeypatch.context() as gpu:
        gpu.setattr("acgpt.evaluation.features.PRODUCTS", {"cpu": "tf32"})
        assert np.allclose(one.features(TEXTS), first) and len(calls) == 2
        assert one.describe()["products"] == "tf32"
    assert one.describe()["products"] == "fp32" and len(list(cache.iterdir())) == 3
    kept.write_bytes(kept.read_bytes()[:-9])  # cut off
    calls.clear()
    assert np.allclose(one.features(TEXTS), first) and calls == [1]
    assert np.array_equal(one.features(TEXTS), first) and calls == [1]


# ---- references -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
def test_documents_are_what_stands_between_ends_of_text(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "BLOCK", block)
    tokens = np.random.default_rng(0).integers(0, 4, 60)
    tokens[[0, 20, 21]] = 0
    for begin in range(62):
        expected, start = [], 0
        for position in range(61):  # by definition: a document begins after each 0, and at the beginning
            if position == 60 or tokens[position] == 0:
                if start >= begin and (position < 60 or start < 60):
                    expected.append(tokens[start:position].tolist())
                start = position + 1
        assert [each.tolist() for each in reference.documents(tokens, 0, begin)] == expected


def test_windows_follow_each_other_and_leave_out_where_the_prompts_are_from(corpus: Path, tmp_path: Path):
    opened = Corpus.open(corpus)
    tokens, tokenizer = opened.tokens("validation"), opened.tokenizer()
    generated = Generations.open(write_generations(tmp_path, corpus, texts=5))
    result = reference.reference_from_corpus(opened, "validation", length=20, generated=[generated])
    begin = 5 * LENGTH
    assert result.texts[0] == tokenizer.decode(tokens[begin : begin + 20])
    assert result.texts[1] == tokenizer.decode(tokens[begin + 20 : begin + 40])
    assert len(result.texts) == (len(tokens) - begin) // 20
    assert (result.about["skip"], result.about["overlaps_prompts"]) == (begin, False)
    again = reference.reference_from_corpus(opened, "validation", length=20, generated=[generated], skip=0, count=3)
    assert len(again.texts) == 3 and again.about["overlaps_prompts"]
    assert again.texts[0] == tokenizer.decode(tokens[:20])
    assert reference.reference_from_corpus(opened, "test", length=20, generated=[generated]).about["skip"] == 0
    with pytest.raises(InputError, match="`skip=0`"):
        reference.reference_from_corpus(opened, "validation", length=len(tokens) - begin + 1, generated=[generated])


def test_fewer_windows_than_there_are_lie_all_over_the_split():
    tokens = np.arange(103)
    for count, expected in {2: [3, 53], 3: [3, 33, 63], 10: range(3, 103, 10), 99: range(3, 103, 10)}.items():
        results = [each.tolist() for each in reference.windows(tokens, 10, 3, count)]
        assert results == [list(range(start, start + 10)) for start in expected]
    assert not list(reference.windows(tokens, 10, 94, 5))


def test_documents_of_a_corpus_are_long_enough_and_cut(corpus: Path):
    opened = Corpus.open(corpus)
    tokens, tokenizer = opened.tokens("test"), opened.tokenizer()
    result = reference.reference_from_corpus(opened, "test", length=19, rule="documents")
    eos = tokenizer.eos_token_id
    lengths = [[]]
    for token in tokens[0 : len(tokens)].tolist():
        lengths.append([]) if token == eos else lengths[-1].append(token)
    expected = [tokenizer.decode(each[:19]) for each in lengths if len(each) >= 19]
    assert result.texts == expected and 0 < len(expected) < len(lengths)


def test_texts_of_a_file(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\n two \n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"story": "one"}\n{"story": "two"}\n', encoding="utf-8")
    assert reference.reference_from_file(tmp_path / "a.txt").texts == ["one", " two "]
    assert reference.reference_from_file(tmp_path / "a.jsonl", "story", count=1).texts == ["one"]
    with pytest.raises(InputError, match=r"a.jsonl, line 1: it has no field 'text'"):
        reference.reference_from_file(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="neither"):
        reference.reference_from_file(tmp_path / "a.csv")


def test_originals_are_the_tokens_of_the_corpus_where_something_was_drawn(corpus: Path, tmp_path: Path):
    opened = Corpus.open(corpus)
    path = write_generations(tmp_path, corpus, texts=4, samples=2, noise=1.0)
    tokens, tokenizer = opened.tokens("validation"), opened.tokenizer()
    result = reference.originals(Generations.open(path), opened)
    assert len(result) == 4  # each question once
    for item, each in enumerate(result):
        own = tokens[item * LENGTH : (item + 1) * LENGTH].tolist()
        assert list(each.tokens) == own
        asked = [tokenizer.decode(own[a:b]) for a, b in runs(each.roles)]
        assert list(each.fills) == asked


# ---- companions -----------------------------------------------------------------------------------------------------


def test_distinct_and_repetition_are_those_of_the_definition():
    samples = [sample([1, 2, 1, 2, 1, 2, 9, 1, 2], "aaaaaagaa"), sample([1, 2, 3, 4, 5]), sample([7])]
    # Pairs within runs: 12 21 12 21 12 | 12, then 12 23 34 45: four and one of them different, 12 21 23 34 45.
    assert companions.distinct(samples, 2) == 5 / 10
    assert companions.distinct(samples, 1) == len({1, 2, 3, 4, 5, 7}) / (8 + 5 + 1)
    # Fours: 1212 2121 1212, one of three repeated; then 1234 2345; then none.
    assert companions.repetition(samples) == pytest.approx((1 / 3 + 0) / 2)
    assert companions.distinct([sample([7])], 2) is None and companions.repetition([sample([7])]) is None


def test_several_samples_of_a_text_do_not_make_it_less_varied(corpus: Path, tmp_path: Path):
    paths = [write_generations(tmp_path / str(n), corpus, samples=n) for n in (1, 3)]
    one, three = (companions.companions(Generations.open(path).samples) for path in paths)
    assert {key: one[key] for key in ("distinct_1", "distinct_2", "distinct_3")}.items() <= three.items()


def test_loops_are_found_as_by_trying_every_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(companions, "BLOCK", 3)
    monkeypatch.setattr(companions, "LOOP", 4)

    def by_trying(tokens: tuple[int, ...]) -> bool:
        for period in (1, 2, 3):
            for size in range(max(3 * period, 4), len(tokens) + 1):
                end = tokens[-size:]
                if end == (end[:period] * size)[:size]:
                    return True
        return False

    verdicts = [
        (companions.ends_in_loop(each), by_trying(each))
        for size in range(1, 11)
        for each in itertools.product((0, 1), repeat=size)
    ]
    assert all(result == expected for result, expected in verdicts)
    assert {True, False} == {result for result, _ in verdicts}


def test_unknown_tokens_are_no_loop():
    assert not companions.ends_in_loop([None, 5] * 8) and not companions.ends_in_loop([None] * 20)
    assert companions.ends_in_loop([None, *[5] * 16])


def test_a_loop_is_seen_at_the_last_asked_token():
    tokens = [5] * 20
    assert companions.loops([sample([*tokens, 1, 2], "a" * 20 + "gg"), sample([*tokens, 1, 2])]) == 0.5


@pytest.mark.parametrize("future", [True, False])
def test_a_judge_says_what_the_definition_says(future: bool):
    """A judge that reads the future measures log p(fills | given); a causal one measures log p(whole text)."""
    network = tiny_model("llama", vocabulary=340)
    samples = [sample([5, 9, 30, 4, 8, 77], "gaagag"), sample([60, 61, 62, 63], "aagg")]
    expected = []
    for each in samples:
        asked = [role == "a" for role in each.roles]
        query = Query(each.tokens, [not a for a in asked]) if future else Query(each.tokens, [False] * len(asked))
        expected += expected_log_probs(network, query, future=future).tolist()
    lm = LanguageModel(network, tiny_tokenizer(**SPECIAL), metadata=Metadata("ac-gpt" if future else "gpt"))
    judge, tokenizer = Judge("judge", lm), tokenizer_hash(lm.tokenizer)
    judge.check(samples, tokenizer)
    result = judge.scores(samples, tokenizer)
    assert result["tokens"] == len(expected) == (5 if future else 10)
    assert result["log_prob"] == pytest.approx(sum(expected), abs=1e-4)
    assert result["perplexity"] == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert result["measures"] == ("fills given the rest" if future else "whole text")
    if future:
        with pytest.raises(InputError, match="another tokenizer"):
            judge.check(samples, "another")
        with pytest.raises(InputError, match="texts of 63 tokens, but the generations have 64"):
            judge.check([sample([5] * 64)], tokenizer)
    assert result["cut"] == 0


def test_what_a_causal_judge_has_no_positions_for_is_counted():
    lm = LanguageModel(tiny_model("llama", vocabulary=340), tiny_tokenizer(**SPECIAL), metadata=Metadata("gpt"))
    samples = [sample([5] * 70), sample([6] * 20), sample([7] * 65)]
    result = Judge("judge", lm).scores(samples, tokenizer_hash(lm.tokenizer))
    assert lm.positions == 64 and (result["tokens"], result["cut"]) == (63 + 20 + 63, 7 + 2)


@pytest.mark.parametrize(("what", "left"), [("features", 2), ("judge", 1)])
def test_scoring_that_is_stopped_goes_on_behind_the_last_texts_that_were_kept(what, left, tmp_path, monkeypatch):
    lm = LanguageModel(tiny_model("llama", vocabulary=340), tiny_tokenizer(**SPECIAL), metadata=Metadata("gpt"))
    if what == "features":
        monkeypatch.setenv("ACGPT_CACHE", str(tmp_path))
        monkeypatch.setattr("acgpt.evaluation.features.STORED", 2)
        reader = Featurizer("x", lm.model, lm.tokenizer)
        texts = ["The cat", "A dog sat on the mat", "of", "Paris is the capital of France", "a bird saw"]

        def score(progress=lambda done, all: None):
            return reader.features(texts, progress).tolist()
    else:
        monkeypatch.setattr("acgpt.evaluation.judge.BATCH", 2)
        judge, samples = Judge("judge", lm), [sample([5 + i, 9, 30 + i]) for i in range(5)]

        def score(progress=lambda done, all: None):
            with PartialEvaluation(tmp_path / "x.part", lambda: {"a": 1}) as unfinished:
                unfinished.pause = 0.0
                return judge.scores(samples, tokenizer_hash(lm.tokenizer), progress, unfinished)["log_prob"]

    def stop(done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(stop)
    passes: list[int] = []
    with lm.model.base_model.register_forward_pre_hook(lambda *_: passes.append(1)):
        resumed = score()
        assert len(passes) == left
        shutil.rmtree(tmp_path)
        assert resumed == score() and len(passes) == left + 3


# ---- the score ------------------------------------------------------------------------------------------------------


def area(p: list[float], q: list[float], scale: float, points: int) -> float:
    """The area under the divergence frontier of two histograms, from the paper's definition."""

    def divergence(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    frontier = [(1.0, 0.0)]
    for number in range(points):
        weight = 1e-6 + (1 - 2e-6) * number / (points - 1)
        mixed = [weight * x + (1 - weight) * y for x, y in zip(p, q, strict=True)]
        frontier.append((math.exp(-scale * divergence(q, mixed)), math.exp(-scale * divergence(p, mixed))))
    frontier.append((0.0, 1.0))

    def under(curve: list[tuple[float, float]]) -> float:
        curve = sorted(curve)
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(curve))

    return (under(frontier) + under([(y, x) for x, y in frontier])) / 2


def test_the_score_is_the_area_under_the_frontier_of_the_same_clusters():
    package = pytest.importorskip("mauve")
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.3, 3.0):
        p, q = rng.normal(size=(120, 8)).astype("f4"), rng.normal(shift, size=(150, 8)).astype("f4")
        result = mauve_score.scores(p, q, range(3))
        for seed, score in zip(result["seeds"], result["scores"], strict=True):
            seen = package.compute_mauve(p_features=p, q_features=q, seed=seed, **mauve_score.SETTINGS)
            assert len(seen.p_hist) == result["clusters"] == 12
            assert score == pytest.approx(area(list(seen.p_hist), list(seen.q_hist), 5, 25), abs=1e-6)
        assert result["mean"] == pytest.approx(sum(result["scores"]) / 3)
        assert result["std"] == pytest.approx(np.std(result["scores"], ddof=1))
        assert mauve_score.scores(p, q, range(3)) == result
    assert mauve_score.scores(p, p, range(2))["scores"] == pytest.approx([1.0, 1.0])
