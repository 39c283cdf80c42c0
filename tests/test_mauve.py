"""MAUVE and its companions: features against transformers' own, references and measures against brute force."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generations import LENGTH, write_generations
from models import expected_log_probs, tiny_model, tiny_tokenizer
from runs import SPECIAL, write_corpus
from test_generate import model_of, set_of
from typer.testing import CliRunner

from acgpt import companions, mauve_score, reference
from acgpt.cli import app
from acgpt.commands.mauve import Work, load_judge
from acgpt.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation_set import set_of_corpus
from acgpt.features import Featurizer
from acgpt.generate import Generator
from acgpt.generated import Generation, Generations, find_generations, runs
from acgpt.language_model import LanguageModel
from acgpt.metadata import Metadata
from acgpt.methods import METHODS
from acgpt.modes import MODES
from acgpt.query import Query
from acgpt.report.write import make_report

TEXTS = ["The cat sat on the mat.", "A dog", "The capital of France is Paris. " * 12, "x"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("mauve") / "corpus", splits=("train", "validation", "test"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of features."""
    folder = tmp_path_factory.mktemp("mauve") / "features"
    tiny_model("gpt2", vocabulary=340).save_pretrained(folder)
    tiny_tokenizer(**SPECIAL).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def acgpt(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["mauve", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def sample(tokens: list[int], roles: str | None = None, **more: Any) -> Generation:
    roles = roles or "a" * len(tokens)
    about = {"log_probs": None, "prompt": "", "fills": ("",) * len(runs(roles)), "text": ""} | more
    return Generation(0, 0, roles, tuple(tokens), **about)


# ---- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_feature_is_the_last_hidden_state_at_the_last_token(architecture: str, monkeypatch: pytest.MonkeyPatch):
    network, tokenizer = tiny_model(architecture, vocabulary=340), tiny_tokenizer(**SPECIAL)
    monkeypatch.setattr("acgpt.features.BUDGET", {"cpu": 70})  # several batches, padded
    found = Featurizer("x", network, tokenizer).features(TEXTS)
    for text, feature in zip(TEXTS, found, strict=True):
        ids = tokenizer(text)["input_ids"][:64]  # it has 64 positions
        with torch.no_grad():
            expected = network(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert feature == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)
    assert len(tokenizer(TEXTS[2])["input_ids"]) > 64


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
    assert np.array_equal(one.features(TEXTS[:2], longer=TEXTS), first[:2]) and len(calls) == 1
    assert np.allclose(one.features(TEXTS[1:], longer=TEXTS), first[1:], atol=1e-5) and len(calls) == 2
    assert len(list(cache.iterdir())) == 3
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
        for place in range(61):  # by definition: a document begins after each 0, and at the beginning
            if place == 60 or tokens[place] == 0:
                if start >= begin and (place < 60 or start < 60):
                    expected.append(tokens[start:place].tolist())
                start = place + 1
        assert [each.tolist() for each in reference.documents(tokens, 0, begin)] == expected


def test_windows_follow_each_other_and_leave_out_where_the_prompts_are_from(corpus: Path, tmp_path: Path):
    opened = Corpus.open(corpus)
    tokens, tokenizer = opened.tokens("validation"), opened.tokenizer()
    generated = Generations.open(write_generations(tmp_path, corpus, texts=5))
    found = reference.of_corpus(opened, "validation", length=20, generated=[generated])
    begin = 5 * LENGTH
    assert found.texts[0] == tokenizer.decode(tokens[begin : begin + 20])
    assert found.texts[1] == tokenizer.decode(tokens[begin + 20 : begin + 40])
    assert len(found.texts) == (len(tokens) - begin) // 20
    assert (found.about["skip"], found.about["overlaps_prompts"]) == (begin, False)
    again = reference.of_corpus(opened, "validation", length=20, generated=[generated], skip=0, count=3)
    assert len(again.texts) == 3 and again.about["overlaps_prompts"]
    assert again.texts[0] == tokenizer.decode(tokens[:20])
    assert reference.of_corpus(opened, "test", length=20, generated=[generated]).about["skip"] == 0
    with pytest.raises(InputError, match="--skip 0"):
        reference.of_corpus(opened, "validation", length=len(tokens) - begin + 1, generated=[generated])


def test_fewer_windows_than_there_are_lie_all_over_the_split():
    tokens = np.arange(103)
    for count, expected in {2: [3, 53], 3: [3, 33, 63], 10: range(3, 103, 10), 99: range(3, 103, 10)}.items():
        found = [each.tolist() for each in reference.windows(tokens, 10, 3, count)]
        assert found == [list(range(start, start + 10)) for start in expected]
    assert not list(reference.windows(tokens, 10, 94, 5))


def test_documents_of_a_corpus_are_long_enough_and_cut(corpus: Path):
    opened = Corpus.open(corpus)
    tokens, tokenizer = opened.tokens("test"), opened.tokenizer()
    found = reference.of_corpus(opened, "test", length=19, rule="documents")
    eos = tokenizer.eos_token_id
    lengths = [[]]
    for token in tokens[0 : len(tokens)].tolist():
        lengths.append([]) if token == eos else lengths[-1].append(token)
    expected = [tokenizer.decode(each[:19]) for each in lengths if len(each) >= 19]
    assert found.texts == expected and 0 < len(expected) < len(lengths)


def test_texts_of_a_file(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\n two \n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"story": "one"}\n{"story": "two"}\n', encoding="utf-8")
    assert reference.of_file(tmp_path / "a.txt").texts == ["one", " two "]
    assert reference.of_file(tmp_path / "a.jsonl", "story", count=1).texts == ["one"]
    with pytest.raises(InputError, match=r"a.jsonl, line 1: it has no field 'text'"):
        reference.of_file(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="neither"):
        reference.of_file(tmp_path / "a.csv")


def test_originals_are_the_tokens_of_the_corpus_where_something_was_drawn(corpus: Path, tmp_path: Path):
    opened = Corpus.open(corpus)
    path = write_generations(tmp_path, corpus, texts=4, samples=2, noise=1.0)
    tokens, tokenizer = opened.tokens("validation"), opened.tokenizer()
    found = reference.originals(Generations.open(path), opened)
    assert len(found) == 4  # each question once
    for item, each in enumerate(found):
        own = tokens[item * LENGTH : (item + 1) * LENGTH].tolist()
        assert list(each.tokens) == own
        asked = [tokenizer.decode(own[a:b]) for a, b in runs(each.roles)]
        assert list(each.fills) == asked
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    given = lines[0]["roles"].index("g")
    lines[0]["tokens"][given] += 1
    with pytest.raises(InputError, match="what is given of text 0"):
        reference.originals(Generations.open(write_generations(tmp_path, corpus, lines=lines)), opened)


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
    assert all(found == expected for found, expected in verdicts)
    assert {True, False} == {found for found, _ in verdicts}


def test_unknown_tokens_are_no_loop():
    assert not companions.ends_in_loop([None, 5] * 8) and not companions.ends_in_loop([None] * 20)
    assert companions.ends_in_loop([None, *[5] * 16])


def test_a_loop_is_seen_at_the_last_asked_token():
    tokens = [5] * 20
    assert companions.loops([sample([*tokens, 1, 2], "a" * 20 + "gg"), sample([*tokens, 1, 2])]) == 0.5


@pytest.mark.parametrize("future", [True, False])
def test_a_judge_says_what_the_definition_says(future: bool):
    """One that reads the future: log p(fills | given). A causal one: log p(whole text)."""
    network = tiny_model("llama", vocabulary=340)
    samples = [sample([5, 9, 30, 4, 8, 77], "gaagag"), sample([60, 61, 62, 63], "aagg")]
    expected = []
    for each in samples:
        asked = [role == "a" for role in each.roles]
        query = Query(each.tokens, [not a for a in asked]) if future else Query(each.tokens, [False] * len(asked))
        expected += expected_log_probs(network, query, future=future).tolist()
    lm = LanguageModel(network, tiny_tokenizer(**SPECIAL), metadata=Metadata("ac-gpt" if future else "gpt"))
    found = companions.judged(lm, samples, same_tokens=True)
    assert found["tokens"] == len(expected) == (5 if future else 10)
    assert found["log_prob"] == pytest.approx(sum(expected), abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert found["measures"] == ("fills given the rest" if future else "whole text")
    if future:
        with pytest.raises(InputError, match="another tokenizer"):
            companions.judged(lm, samples, same_tokens=False)
        with pytest.raises(InputError, match="texts of 63 tokens, and the generations have 64"):
            companions.judged(lm, [sample([5] * 64)], same_tokens=True)
    assert found["cut"] == 0


def test_what_a_causal_judge_has_no_positions_for_is_counted():
    lm = LanguageModel(tiny_model("llama", vocabulary=340), tiny_tokenizer(**SPECIAL), metadata=Metadata("gpt"))
    found = companions.judged(lm, [sample([5] * 70), sample([6] * 20), sample([7] * 65)], same_tokens=True)
    assert lm.positions == 64 and (found["tokens"], found["cut"]) == (63 + 20 + 63, 7 + 2)


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
        found = mauve_score.scores(p, q, range(3))
        for seed, score in zip(found["seeds"], found["scores"], strict=True):
            seen = package.compute_mauve(p_features=p, q_features=q, seed=seed, **mauve_score.SETTINGS)
            assert len(seen.p_hist) == found["clusters"] == 12
            assert score == pytest.approx(area(list(seen.p_hist), list(seen.q_hist), 5, 25), abs=1e-6)
        assert found["mean"] == pytest.approx(sum(found["scores"]) / 3)
        assert found["std"] == pytest.approx(np.std(found["scores"], ddof=1))
        assert mauve_score.scores(p, q, range(3)) == found
    assert mauve_score.scores(p, p, range(2))["scores"] == pytest.approx([1.0, 1.0])


def test_too_few_texts_are_refused():
    few, many = np.zeros((9, 4), "f4"), np.zeros((10, 4), "f4")
    for sides in ((few, many), (many, few)):
        with pytest.raises(InputError, match="there are 9"):
            mauve_score.scores(*sides, [0])


def test_only_the_word_of_k_means_is_kept_from_standard_error(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ZeroDivisionError), mauve_score.quiet():
        os.write(
            2, b"WARNING clustering 36 points to 2 centroids: please provide at least 78 training points\nfor you\n"
        )
        print("for all", file=sys.stderr)
        raise ZeroDivisionError
    os.write(2, b"after\n")
    assert sorted(capfd.readouterr().err.splitlines()) == ["after", "for all", "for you"]


def test_nothing_imports_the_package_but_scoring():
    source = Path(mauve_score.__file__).parent
    found = [
        path.name for path in source.rglob("*.py")
        if re.search(r'^\s*(import mauve|from mauve\b)|import_module\("mauve', path.read_text("utf-8"), re.MULTILINE)
    ]  # fmt: skip
    assert found == ["mauve_score.py"]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mauve() -> Callable[[np.ndarray, np.ndarray, int], float]:
    """The package's own score of features."""
    package = pytest.importorskip("mauve")

    def score(p: np.ndarray, q: np.ndarray, seed: int) -> float:
        return package.compute_mauve(p_features=p, q_features=q, seed=seed, **mauve_score.SETTINGS).mauve

    return score


def test_every_file_of_a_folder_is_scored_and_says_with_what(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    folder = tmp_path / "generated"
    for mode in ("training", "unconditional"):
        write_generations(folder, corpus, mode)
    result = acgpt(folder, corpus, "--split", "validation", "--features", model, "--seeds", 3, "--json")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["record"]["mode"] for each in answers] == ["training", "unconditional"]
    for each in answers:
        assert json.loads(next(folder.glob(f"{each['name']}.*.mauve.json")).read_text()) == each
        assert each["mauve"]["seeds"] == [0, 1, 2]
        assert each["mauve"]["settings"]["kmeans_max_iter"] == 500 and each["mauve"]["settings"]["kmeans_num_redo"] == 5
        assert (each["texts"], each["scored"]) == (12, "whole text")
        assert each["reference"]["skip"] == 12 * LENGTH and each["reference"]["length"] == LENGTH
        assert each["companions"]["original"]["distinct_1"] < each["companions"]["generated"]["distinct_1"]
        assert "fewer than 100 texts" in each["notes"][0]
    features = Featurizer.load(str(model), "cpu")
    opened, path = Corpus.open(corpus), folder / "training.jsonl"
    ours = features.features([each.text for each in Generations.open(path).samples])
    texts = reference.of_corpus(opened, "validation", length=LENGTH, generated=[Generations.open(path)]).texts
    expected = [mauve(ours, features.features(texts), seed) for seed in range(3)]
    assert answers[0]["mauve"]["scores"] == pytest.approx(expected, abs=1e-6)
    assert answers[0]["features"] == features.about()
    whole = [opened.tokenizer().decode(opened.tokens("validation")[i * LENGTH : (i + 1) * LENGTH]) for i in range(12)]
    real = mauve(features.features(whole), features.features(texts), 0)
    assert answers[0]["original"]["scores"][0] == answers[1]["original"]["scores"][0] == pytest.approx(real, abs=1e-6)


def test_the_asked_part_is_scored_against_what_stood_there(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    path = write_generations(tmp_path, corpus, "infilling", noise=0.9, samples=2)
    acgpt(path, corpus, "--asked-only", "--features", model, "--seeds", 1)
    found = json.loads(next(tmp_path.glob("*.mauve.json")).read_text())
    features, opened = Featurizer.load(str(model), "cpu"), Corpus.open(corpus)
    fills = ["\n".join(json.loads(line)["fills"]) for line in path.read_text().splitlines()[::2]]
    real = [
        opened.tokenizer().decode(opened.tokens("validation")[i * LENGTH + 8 : (i + 1) * LENGTH - 8]) for i in range(12)
    ]
    assert (found["scored"], found["texts"], found["reference"]["texts"]) == ("asked part", 12, 12)
    expected = mauve(features.features(fills), features.features(real), 0)
    assert found["mauve"]["scores"] == [pytest.approx(expected, abs=1e-6)] and found["mauve"]["std"] is None


def test_several_samples_of_a_text_are_scored_as_one_is(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    scored = {}
    for samples in (1, 3):
        folder = tmp_path / str(samples)
        path = write_generations(folder, corpus, samples=samples)
        scored[samples] = json.loads(acgpt(path, corpus, "--features", model, "--seeds", 1, "--json").stdout)
    one, three = scored.values()
    assert one["mauve"] == three["mauve"] and one["original"] == three["original"] and three["texts"] == 12
    assert any("of the first of each" in note for note in three["notes"]) and len(three["notes"]) > len(one["notes"])


def test_the_first_texts_are_scored_as_a_file_of_fewer_is(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    opened = Corpus.open(corpus)

    def drawn(texts: int) -> Path:
        made, _ = set_of_corpus(opened, tmp_path / f"{texts}.set", split="validation", length=LENGTH, limit=texts)
        return write_generations(tmp_path / str(texts), corpus, texts=texts, samples=2, set=made.as_dict())

    fewer, more = drawn(11), drawn(14)
    ways = (("--features", model, "--seeds", 1), ("--no-mauve",), ("--asked-only", "--features", model, "--seeds", 1))
    for way in ways:
        one = json.loads(acgpt(fewer, corpus, *way, "--json").stdout)
        limited = json.loads(acgpt(more, corpus, *way, "--limit", 11, "--json").stdout)
        assert limited["record"]["set"] == one["record"]["set"] and (one["limit"], limited["limit"]) == (None, 11)
        for key in ("texts", "mauve", "original", "companions", "perplexity", "reference"):
            assert limited[key] == one[key], key
        whole = json.loads(acgpt(more, corpus, *way, "--json").stdout)
        assert whole["texts"] == 14 and whole["companions"] != limited["companions"]
        again = acgpt(more, corpus, *way, "--limit", 11, "--resume", "--json").stdout
        assert json.loads(again) == limited  # with the date of the first
    assert len(list(more.parent.glob("*.mauve.json"))) == 2 * len(ways)
    said = acgpt(more, corpus, "--no-mauve", "--limit", 15, code=2).stderr
    assert "is of 14 texts, and the limit is 15: name at most 14, or leave this file out" in said
    other = write_generations(tmp_path / "other", corpus)  # whose set is none that acgpt makes
    assert "cannot be told" in acgpt(other, corpus, "--no-mauve", "--limit", 11, code=2).stderr


def test_no_result_replaces_one_of_another_kind(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    path = write_generations(tmp_path / "drawn", corpus)
    other = tmp_path / "other"
    tiny_model("gpt2", vocabulary=340, seed=1).save_pretrained(other)
    tiny_tokenizer(**SPECIAL).save_pretrained(other)
    ways = [
        ("--features", model), ("--features", other), ("--features", model, "--split", "validation"),
        ("--features", model, "--asked-only"), ("--features", model, "--judge", other),
        ("--no-mauve",), ("--no-mauve", "--judge", model), ("--no-mauve", "--judge", other),
        ("--no-mauve", "--split", "validation"),
    ]  # fmt: skip
    for way in ways:
        acgpt(path, corpus, *way, *(() if "--no-mauve" in way else ("--seeds", 1)))
    files = sorted(path.parent.glob("training.*.mauve.json"))
    assert len(files) == len(ways)
    acgpt(path, corpus, "--features", model, "--seeds", 2)  # the same again: it takes its own place
    assert sorted(path.parent.glob("training.*.mauve.json")) == files
    found = [json.loads(each.read_text())["mauve"] for each in files]
    assert [each["seeds"] for each in found if each].count([0, 1]) == 1


def test_a_judges_result_goes_where_it_is_told_and_nothing_goes_elsewhere(corpus: Path, model: Path, tmp_path: Path):
    path = write_generations(tmp_path / "drawn", corpus, texts=3)
    there, words = set(tmp_path.rglob("*")), (path, corpus, "--no-mauve", "--judge", model)
    for place in ("one.json", "new/one.mauve.json", "folder"):
        acgpt(*words, "-o", tmp_path / place)
        made = [each for each in set(tmp_path.rglob("*")) - there if each.is_file()]
        assert len(made) == 1 and made[0].is_relative_to(tmp_path / place)
        assert json.loads(made[0].read_text())["judge"]["model"] == str(model)
        there |= set(tmp_path.rglob("*"))
    acgpt(*words, "-o", tmp_path / "one.json")  # a result takes the place of a result, and of nothing else
    record = path.with_suffix(".json")
    before = record.read_bytes()
    assert f"{record} is no result of acgpt mauve" in acgpt(*words, "-o", record, code=2).stderr
    assert record.read_bytes() == before and set(tmp_path.rglob("*")) == there


def test_a_command_that_was_stopped_goes_on_and_its_index_comes_last(
    corpus: Path, model: Path, tmp_path: Path, mauve: Any, monkeypatch: pytest.MonkeyPatch
):
    folder, index, real = tmp_path / "drawn", tmp_path / "drawn" / "scores.json", Work.result
    for mode in ("infilling", "training", "unconditional"):
        write_generations(folder, corpus, mode)
    computed: list[str] = []

    def counted(self: Work, each: Generations, progress: Any) -> dict[str, Any]:
        computed.append(each.name)
        if len(computed) == stop:
            raise KeyboardInterrupt
        return real(self, each, progress)

    monkeypatch.setattr(Work, "result", counted)

    def score(*more: object, code: int = 0) -> list[str]:
        """Which of them were computed."""
        computed.clear()
        words = (folder, corpus, "--features", model, "--resume", "--index", index, *(more or ("--seeds", 1)))
        acgpt(*words, code=code)
        return list(computed)

    stop = 2
    assert score(code=130) == ["infilling", "training"] and not index.exists()
    (kept,) = folder.glob("*.mauve.json")
    before, stop = kept.read_bytes(), 0
    assert score() == ["training", "unconditional"] and kept.read_bytes() == before
    found = json.loads(index.read_text())
    assert found["kind"] == "scores" and [each["mode"] for each in found["results"]] == [
        "infilling", "training", "unconditional",
    ]  # fmt: skip
    assert {each["result"] for each in found["results"]} == set(map(str, folder.glob("*.mauve.json")))
    assert score() == []
    assert len(score("--seeds", 2)) == 3  # other scores under the same name
    write_generations(folder, corpus, "training", noise=0.5)  # drawn again
    assert score("--seeds", 2) == ["training"]
    kept.write_text('{"kind": "mauve"}')
    assert score("--seeds", 2) == ["infilling"]
    result = json.loads(acgpt(kept.with_name("infilling.jsonl"), corpus, "--features", model, "--json").stdout)
    assert computed == ["infilling"] * 2 and result["mauve"]["seeds"] == [0, 1, 2, 3, 4]  # replaced without --resume


def test_an_index_of_nothing_and_one_that_is_somebody_elses(corpus: Path, tmp_path: Path):
    """A method that answers in none of the modes that were wanted leaves a folder with an index alone."""
    (tmp_path / "index.json").write_text('{"kind": "index", "modes": {"training": null}}')
    assert "there are no generations" in acgpt(tmp_path, corpus, "--no-mauve", code=2).stderr
    assert "passed over" in acgpt(tmp_path, corpus, "--index", tmp_path / "scores.json").stderr
    assert json.loads((tmp_path / "scores.json").read_text())["results"] == []
    path = write_generations(tmp_path, corpus)
    wrong = acgpt(path, corpus, "--no-mauve", "--index", tmp_path / "index.json", code=2)
    assert "index.json is no index of scores" in wrong.stderr
    for places in (
        ("-o", tmp_path / "one.json", "--index", tmp_path / "one.json"),
        ("-o", tmp_path / "one.json", "--index", tmp_path / "x" / ".." / "one.json"),
        ("--index", tmp_path / "all.mauve.json"),  # a report would take it for a result
    ):
        said = acgpt(path, corpus, "--no-mauve", *places, code=2).stderr
        assert "is where a result would be: name another file with --index" in said
        assert not (tmp_path / "one.json").exists()
    assert not list(tmp_path.glob("*.mauve.json")) and "training" in (tmp_path / "index.json").read_text()


def test_a_judge_that_is_not_there_yet_is_named(corpus: Path, tmp_path: Path):
    path, missing = write_generations(tmp_path, corpus), tmp_path / "cell" / "model"
    said = acgpt(path, corpus, "--no-mauve", "--judge", missing, code=2).stderr
    assert f"the judge cannot be loaded: there is no folder {missing}" in said


def test_a_result_of_a_judge_that_was_trained_again_is_not_kept(corpus: Path, tmp_path: Path):
    path, judge = write_generations(tmp_path, corpus, texts=3), tmp_path / "judge"
    tiny_tokenizer(**SPECIAL).save_pretrained(judge)
    results = []
    for seed in (0, 0, 1):
        tiny_model("gpt2", vocabulary=340, seed=seed).save_pretrained(judge)
        said = acgpt(path, corpus, "--no-mauve", "--judge", judge, "--resume", "--json").stdout
        results.append(json.loads(said))
    first, same, other = results
    assert same == first and other["judge"]["hash"] != first["judge"]["hash"]
    assert other["judge"]["model"] == first["judge"]["model"]
    assert other["judge"]["perplexity"] != first["judge"]["perplexity"]
    (kept,) = tmp_path.glob("*.mauve.json")  # under the same name
    assert json.loads(kept.read_text())["judge"] == other["judge"]
    Metadata("ac-gpt").write(judge)  # the same weights, asked as another kind of model
    again = json.loads(acgpt(path, corpus, "--no-mauve", "--judge", judge, "--json").stdout)
    assert again["judge"]["hash"] != other["judge"]["hash"]
    earlier = {**again, "judge": {key: value for key, value in again["judge"].items() if key != "hash"}}
    kept.write_text(json.dumps({**earlier, "seconds": -1.0}))  # of a version that did not say it
    last = json.loads(acgpt(path, corpus, "--no-mauve", "--judge", judge, "--resume", "--json").stdout)
    assert last["judge"] == again["judge"] and last["seconds"] >= 0


@pytest.mark.parametrize("files", [1, 3])
def test_a_file_is_read_once_to_be_checked_and_once_to_be_scored(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
):
    """One alone is read once in all: what was read last is kept."""
    for mode in ("infilling", "training", "unconditional")[:files]:
        write_generations(tmp_path, corpus, mode)
    read, real = [], reference.originals
    monkeypatch.setattr(reference, "originals", lambda each, corpus: read.append(each.name) or real(each, corpus))
    acgpt(tmp_path, corpus, "--no-mauve", "--resume")
    assert len(read) == (1 if files == 1 else 2 * files)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.mauve.json")]
    assert {each["name"]: each["hash"] for each in results} == {
        each.name: each.hash for each in find_generations([tmp_path])
    }
    assert len({json.dumps(each["companions"]["original"]) for each in results}) == files  # each its own


def test_the_embedded_model_judges_without_its_adapter(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("acgpt.loading.load", lambda *named: asked.append(named))
    for name in ("default", "a/folder"):
        load_judge(name, "cpu")
    assert asked == [("default", False, "cpu"), ("a/folder", None, "cpu")]


def test_without_mauve_a_corpus_need_not_leave_a_reference(corpus: Path, tmp_path: Path):
    texts = len(Corpus.open(corpus).tokens("test")) // LENGTH
    path = write_generations(tmp_path, corpus, texts=texts, split="test")  # prompts from all of the split
    assert "no windows of 31 tokens, after the" in acgpt(path, corpus, "--features", "x", code=2).stderr
    assert not list(tmp_path.glob("*.mauve.json"))
    result = json.loads(acgpt(path, corpus, "--no-mauve", "--json").stdout)
    assert result["reference"]["texts"] == 0 and not result["reference"]["overlaps_prompts"] and not result["notes"]
    other = json.loads(acgpt(path, corpus, "--no-mauve", "--split", "validation", "--json").stdout)
    assert other["reference"]["texts"] > 0 and other["companions"] == result["companions"]
    assert make_report([tmp_path], tmp_path / "report").parts[-1].tables
    assert "tset" in acgpt(path, corpus, "--no-mauve", "--split", "tset", code=2).stderr  # that is still an error


def test_the_bound_of_diffusion_is_no_perplexity(corpus: Path, tmp_path: Path):
    for method in ("diffusion", "mlm", "another"):
        path = write_generations(tmp_path / method, corpus, method=method)
        answer = json.loads(acgpt(path, corpus, "--no-mauve", "--json").stdout)
        assert (answer["perplexity"] is None) == (method == "diffusion")


def test_what_cannot_be_measured_is_found_before_any_model_runs(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mauve_score, "package", lambda: None)
    monkeypatch.setattr(Featurizer, "load", None)
    monkeypatch.setattr(LanguageModel, "log_prob", None)
    good, few = write_generations(tmp_path / "a", corpus), write_generations(tmp_path / "b", corpus, texts=9)
    assert f"{few}: there are 9 generated texts" in acgpt(good, few, corpus, code=2).stderr
    lines = [json.loads(line) for line in good.read_text().splitlines()]
    lines[-1]["tokens"][lines[-1]["roles"].index("g")] += 1
    moved = write_generations(tmp_path / "c", corpus, lines=lines)
    assert f"{moved}: what is given of text 11" in acgpt(good, moved, corpus, code=2).stderr
    strange = write_generations(tmp_path / "d", corpus, tokenizer_hash="x")
    (tmp_path / "texts.txt").write_text("a\n" * 20)
    network, tokenizer = tiny_model("gpt2", vocabulary=340), tiny_tokenizer(**SPECIAL)
    monkeypatch.setattr(
        "acgpt.loading.load", lambda *_, **__: LanguageModel(network, tokenizer, metadata=Metadata("ac-gpt"))
    )
    result = acgpt(good, strange, tmp_path / "texts.txt", "--no-mauve", "--judge", model, code=2)
    assert f"{strange}: the judge has another tokenizer" in result.stderr
    assert not list(tmp_path.rglob("*.mauve.json"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--asked-only --rule windows --count 5", "--rule, --count can do nothing with --asked-only"),
        ("--asked-only --skip 0", "--skip can do nothing with --asked-only"),
        ("--asked-only --no-mauve", "--no-mauve can do nothing with --asked-only"),
        ("--no-mauve --seeds 5", "--seeds can do nothing with --no-mauve"),
        ("--no-mauve --features default", "--features can do nothing with --no-mauve"),
        ("--no-mauve --features-only", "--features-only can do nothing with --no-mauve"),
        ("--features-only --json --judge x", "--judge, --json can do nothing with --features-only"),
        ("--features-only --resume --index i.json", "--resume, --index can do nothing with --features-only"),
        ("--field story", "--field can do nothing with a corpus"),
        ("FILE --limit 9", "--limit can do nothing with a file of texts"),
        ("FILE --split test --length 9", "--split, --length can do nothing with a file of texts"),
    ],
)
def test_options_that_can_do_nothing_are_refused(corpus: Path, tmp_path: Path, options: str, named: str):
    (tmp_path / "texts.txt").write_text("a\n" * 20)
    path = write_generations(tmp_path, corpus)
    words = options.split()
    against = tmp_path / "texts.txt" if words[0] == "FILE" else corpus
    assert named in acgpt(path, against, *(word for word in words if word != "FILE"), code=2).stderr


def test_features_of_one_machine_serve_another(
    corpus: Path, model: Path, tmp_path: Path, mauve: Any, monkeypatch: pytest.MonkeyPatch
):
    path = write_generations(tmp_path, corpus)
    acgpt(path, corpus, "--features", model, "--features-only")
    assert not list(tmp_path.glob("*.mauve.json"))
    monkeypatch.setattr(Featurizer, "compute", None)
    acgpt(path, corpus, "--features", model)
    assert len(list(tmp_path.glob("*.mauve.json"))) == 1


def test_a_result_says_in_what_precision_its_features_were_computed(
    corpus: Path, model: Path, tmp_path: Path, mauve: Any, monkeypatch: pytest.MonkeyPatch
):
    one, other = (write_generations(tmp_path, corpus, mode) for mode in ("training", "infilling"))

    def products(path: Path) -> str:
        return str(json.loads(acgpt(path, corpus, "--features", model, "--json").stdout)["features"]["products"])

    with monkeypatch.context() as gpu:
        gpu.setattr("acgpt.features.PRODUCTS", {"cpu": "tf32"})
        there = Featurizer.load(str(model)).about()
        acgpt(one, corpus, "--features", model, "--features-only")
    assert Featurizer.load(str(model)).about() == {**there, "products": "fp32"} and there["products"] == "tf32"
    assert products(one) == "tf32"
    assert products(other) == "fp32, tf32"  # the reference is from there
    both = acgpt(other, one, corpus, "--features", model, "--json").stdout.splitlines()
    assert [json.loads(each)["features"]["products"] for each in both] == ["fp32, tf32", "tf32"]


def test_without_the_package_the_rest_is_measured(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_generations(tmp_path, corpus)
    found = importlib.import_module

    def missing(name: str) -> Any:
        if name == "mauve":
            raise ImportError(name)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "pip install 'acgpt[mauve]'" in acgpt(path, corpus, "--features", model, code=2).stderr
    result = acgpt(path, corpus, "--no-mauve", "--judge", model, "-o", tmp_path / "out.json")
    assert "whole text" in result.stdout and "repeated 4-grams" in result.stdout
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["mauve"] is None and answer["judge"]["measures"] == "whole text"
    assert answer["judge"]["original"]["tokens"] == answer["judge"]["tokens"] == 12 * LENGTH
    own = [x for each in Generations.open(path).samples for x in each.log_probs]
    assert answer["perplexity"] == pytest.approx(math.exp(-sum(own) / len(own)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"roles": "ga"}, "line 1: its 'roles' are not a letter"),
        ({"tokens": ["x"] * LENGTH}, "line 1: its 'tokens' hold 'x'"),
        ({"log_probs": [0.0]}, "line 1: its 'log_probs' are not a number for each"),
        *(
            ({"roles": "a" * LENGTH, "fills": [""], "log_probs": [bad] * LENGTH}, "line 1: its 'log_probs'")
            for bad in (10**400, -(10**400), 1e308, -1e308, math.inf, -math.inf, math.nan, 0.5, True, "0")
        ),
        *(({"tokens": [bad] * LENGTH}, "line 1: its 'tokens' hold") for bad in (10**30, 2**31, -1, True, 1.0, None)),
        ({"item": -1}, "line 1: its 'item'"),
        ({"sample": 10**30}, "line 1: its 'item' or its 'sample'"),
        *(({key: "\ud800"}, "line 1: 'utf-8' codec") for key in ("text", "prompt")),
        ({"fills": []}, "line 1: its 'fills' are not a text for each run"),
        ({"text": 3}, "line 1: its 'text' is of the wrong type"),
    ],
)
def test_a_line_that_is_none_is_named(corpus: Path, tmp_path: Path, change: dict[str, Any], words: str):
    path = write_generations(tmp_path, corpus, texts=1)
    line = json.loads(path.read_text()) | change
    write_generations(tmp_path, corpus, lines=[line])
    assert f"training.jsonl, {words}" in acgpt(path, corpus, "--no-mauve", code=2).stderr


def test_what_cannot_be_scored_is_refused_and_nothing_is_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_generations(tmp_path / "a", corpus)
    other = write_generations(tmp_path / "b", corpus)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "lonely.jsonl").write_text("{}\n")
    assert "keep the two files together" in acgpt(tmp_path / "lonely.jsonl", corpus, code=2).stderr
    (tmp_path / "lonely.jsonl").unlink()
    assert "there is no file" in acgpt(tmp_path / "none.jsonl", corpus, code=2).stderr
    assert "holds no generations" in acgpt(tmp_path, corpus, code=2).stderr
    both = (path, other, corpus, "--no-mauve", "-o")
    assert "there are 2 generations" in acgpt(*both, tmp_path / "x.json", code=2).stderr
    assert "the same name" in acgpt(*both, tmp_path / "x", code=2).stderr
    text = write_generations(tmp_path / "a", corpus).with_suffix(".json")
    monkeypatch.setattr(mauve_score, "package", lambda: None)
    assert "name the corpus of the prompts" in acgpt(path, text, "--asked-only", code=2).stderr
    assert "neither a prepared" in acgpt(path, tmp_path / "typo", "--split", "test", "--no-mauve", code=2).stderr
    assert "no rule 'pages'" in acgpt(path, corpus, "--rule", "pages", "--no-mauve", code=2).stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("method", list(METHODS))
def test_what_every_method_draws_is_read_as_it_was_written(method: str, tmp_path: Path):
    lm, asked = model_of(method), set_of()
    generator = Generator(lm, asked, samples=2, prompt=5)
    for mode in MODES:
        if generator.write(mode, tmp_path) is None:
            continue
        found = Generations.open(tmp_path / f"{mode}.jsonl")
        queries = generator.queries(mode)
        assert len(found.samples) == 2 * len(queries) and found.record["method"] == method
        for each in found.samples:
            query = queries[each.item]
            assert [role == "a" for role in each.roles] == list(query.asked)
            assert [each.tokens[p - 1] for p in query.given_positions] == [
                query.tokens[p - 1] for p in query.given_positions
            ]
            assert sum(map(len, each.runs)) == len(each.log_probs or ()) == len(query.asked_positions)
        assert companions.own_perplexity(found.samples) > 1
    assert {each.path.suffix for each in find_generations([tmp_path])} == {".jsonl"}


@pytest.mark.parametrize(
    "change",
    [
        {"set": {"hash": "h", "texts": 1}},
        {"set": {"hash": "h", "texts": 1, "length": True}},
        {"set": {"hash": "h", "texts": 1, "length": 9, "corpus_hash": "c"}},
        {"options": ["x"]},
        {"sampling": 3},
        {"model": "a\0b"},
        {"mode": None},
    ],
)
def test_a_record_that_lacks_something_is_named(corpus: Path, tmp_path: Path, change: dict[str, Any]):
    path = write_generations(tmp_path, corpus, texts=1)
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(record | change))
    with pytest.raises(InputError, match=r"training.json does not say w"):
        Generations.open(path)


@pytest.mark.parametrize("content", ["[" * 200_000, "{", '{"kind": "generations", "x": "\\ud800"}', "[1]", "\x00"])
def test_a_file_beside_it_that_cannot_be_read_is_somebody_elses(corpus: Path, tmp_path: Path, content: str):
    path = write_generations(tmp_path, corpus)
    (tmp_path / "stray.jsonl").write_text("{}\n")
    (tmp_path / "stray.json").write_text(content)
    assert [each.path for each in find_generations([tmp_path])] == [path]
    with pytest.raises(InputError, match=r"stray.jsonl has no record of generations"):
        Generations.open(tmp_path / "stray.jsonl")


def test_a_line_without_an_end_is_not_read_whole(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_generations(tmp_path, corpus, texts=1)
    assert len(Generations.open(path).samples) == 1
    monkeypatch.setattr("acgpt.generated.LONGEST", 100)
    with pytest.raises(InputError, match="line 1: it is too long"):
        list(Generations.open(path))


def test_a_folder_of_which_nothing_could_be_drawn_is_passed_over(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path / "ac", corpus)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "index.json").write_text('{"kind": "index", "modes": {"training": null}}')
    result = acgpt(tmp_path / "ac", tmp_path / "gpt", corpus, "--no-mauve")
    assert (
        "gpt holds an index, but no generations" in result.stderr and len(list(path.parent.glob("*.mauve.json"))) == 1
    )
    assert "there are no generations in" in acgpt(tmp_path / "gpt", corpus, "--no-mauve", code=2).stderr


def test_each_of_several_is_found_once(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path, corpus)
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert [each.path for each in find_generations([path, tmp_path, path])] == [path]
