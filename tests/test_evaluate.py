"""Evaluation: the sets that all methods share, perplexity against a dense mask by hand, and the command."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from models import expected_log_probs, tiny_model, tiny_tokenizer, twins
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import acgpt
from acgpt.attention import check_model
from acgpt.cli import app
from acgpt.commands.evaluate import print_perplexities
from acgpt.conditioning import ASKED, GIVEN, Conditioning
from acgpt.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluate import Evaluation, evaluate, percentiles, resampled_means
from acgpt.evaluation_set import LENGTH, EvaluationSet, set_of_corpus
from acgpt.language_model import LanguageModel
from acgpt.metadata import Metadata, tokenizer_hash
from acgpt.methods import AcGpt, method_of
from acgpt.modes import MODES, WITHOUT_FUTURE
from acgpt.query import Query
from acgpt.show import Page

CONDITIONAL = ("training", "infilling")


def tokens(count, vocabulary=50):
    return np.random.default_rng(7).integers(2, vocabulary, size=count)


def small_set(texts=6, length=20, **how):
    return EvaluationSet.build(tokens(texts * length + 3), tokenizer_hash="t", length=length, **how)


def ask(model, evaluation_set, method="ac-gpt", **how):
    return evaluate(method_of(method), model, evaluation_set, **{"bos": 0, "mask": 1, **how})


def by_hand(reference, evaluation_set, mode):
    """All log-probabilities of a mode from its definition, text by text: a dense mask, and no code of acgpt."""
    drawn = {"unconditional": None}.get(mode, evaluation_set.drawn.get(mode.removesuffix("-no-future")))
    found = []
    for number, text in enumerate(evaluation_set.tokens.tolist()):
        roles = np.full(len(text), ASKED) if drawn is None else drawn[number]
        query = Query(text, (roles == GIVEN).tolist(), (roles == ASKED).tolist())
        found.extend(expected_log_probs(reference, query, future=not mode.endswith("no-future")).tolist())
    return found


# ---- evaluation sets ------------------------------------------------------------------------------------------------


def test_texts_are_the_chunks_of_the_split_without_its_tail():
    split = tokens(67)
    assert EvaluationSet.build(split, tokenizer_hash="t", length=20).tokens.tolist() == [
        split[start : start + 20].tolist() for start in (0, 20, 40)
    ]


def test_a_limit_changes_nothing_in_the_texts_that_are_left():
    whole, limited = small_set(), small_set(limit=4)
    assert len(whole) == 6 and len(limited) == 4
    assert (limited.tokens == whole.tokens[:4]).all()
    for name in CONDITIONAL:
        assert (limited.drawn[name] == whole.drawn[name][:4]).all()
    assert whole.head(4).hash == limited.hash != whole.hash
    assert small_set(limit=100).hash == whole.hash


def test_a_set_is_a_function_of_its_seed_and_each_seed_and_mode_has_its_own():
    sets = {seed: small_set(seed=seed) for seed in (0, 1, 2**32 - 1)}
    assert small_set(seed=0).hash == sets[0].hash
    assert len({s.hash for s in sets.values()}) == 3
    sizes = [tuple((s.drawn[name] == GIVEN).sum(axis=1)) for s in sets.values() for name in CONDITIONAL]
    assert len(set(sizes)) == 6


def test_roles_depend_on_a_texts_number_and_not_on_its_tokens():
    one = small_set()
    other = EvaluationSet.build(tokens(123)[::-1], tokenizer_hash="t", length=20)
    assert one.hash != other.hash
    assert all((one.drawn[name] == other.drawn[name]).all() for name in CONDITIONAL)


def test_evaluation_draws_other_sets_than_training_under_the_same_seed():
    from acgpt.conditioning import generator

    drawn = small_set().drawn["training"]
    for epoch in range(3):
        trained = np.stack([Conditioning().roles(20, generator(0, epoch, item)) for item in range(6)])
        assert not (trained == drawn).all(axis=1).all()


def test_a_set_survives_its_file_and_the_file_is_the_same_each_time(tmp_path):
    training = Conditioning.from_dict({"b_max": 2, "unknown": 0.2})
    saved = small_set(training=training, r_max=0.5, seed=3, corpus_hash="c", split="test")
    saved.save(tmp_path / "new folder" / "set.safetensors")
    saved.save(tmp_path / "again.safetensors")
    loaded = EvaluationSet.load(tmp_path / "new folder" / "set.safetensors")
    assert loaded.as_dict() == saved.as_dict() and loaded.hash == saved.hash
    assert (loaded.tokens == saved.tokens).all()
    assert all((loaded.drawn[name] == saved.drawn[name]).all() for name in CONDITIONAL)
    assert (tmp_path / "new folder" / "set.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["again.safetensors", "new folder", "set.safetensors"]
    assert Conditioning.from_dict(loaded.origin.conditioning) == training


def test_a_set_that_could_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    small_set().save(tmp_path / "set.safetensors")
    before = (tmp_path / "set.safetensors").read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        small_set(seed=1).save(tmp_path / "set.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["set.safetensors"]
    assert (tmp_path / "set.safetensors").read_bytes() == before


def test_the_hash_is_that_of_what_is_asked_given_what_and_not_of_where_it_came_from():
    base = small_set()
    assert small_set(corpus_hash="another", split="validation").hash == base.hash
    assert EvaluationSet.build(tokens(123), tokenizer_hash="u", length=20).hash != base.hash
    changed = base.tokens.copy()
    changed[2, 5] += 1
    assert EvaluationSet(changed, base.drawn, base.origin).hash != base.hash
    for name in CONDITIONAL:
        roles = base.drawn[name].copy()
        roles[0, np.flatnonzero(roles[0] == ASKED)[0]] = GIVEN
        assert EvaluationSet(base.tokens, {**base.drawn, name: roles}, base.origin).hash != base.hash
    swapped = {"training": base.drawn["infilling"], "infilling": base.drawn["training"]}
    assert EvaluationSet(base.tokens, swapped, base.origin).hash != base.hash


def test_the_hash_of_a_set_made_by_hand_stays_what_it_was():
    """Results that were published under a hash must remain comparable: the format of what is hashed may not change."""
    texts = np.array([[5, 6, 7], [8, 9, 70000]], dtype=np.int32)
    roles = np.array([[1, 0, 0], [0, 2, 1]], dtype=np.int8)
    origin = small_set().origin
    made = EvaluationSet(texts, {"training": roles, "infilling": roles[::-1]}, origin)
    header = b'["acgpt_evaluation_set", "t", 2, 3, "infilling", "training"]'
    words = b"".join(token.to_bytes(4, "little") for token in (5, 6, 7, 8, 9, 70000))
    content = header + words + bytes([0, 2, 1, 1, 0, 0]) + bytes([1, 0, 0, 0, 2, 1])
    assert made.hash == hashlib.sha256(content).hexdigest()


def test_the_conditioning_sets_of_a_seed_stay_what_they_were():
    """If this fails, a change (of numpy's perhaps) draws other sets; saved ones stay comparable, new ones are not."""
    drawn = EvaluationSet.build(np.arange(100), tokenizer_hash="t", length=20, r_max=0.6, seed=0)
    assert drawn.hash == "4565646735e60e8e6b149f85f776b98511c007adb55992c4c0a0e3f832160d1e"


def rewritten(path, *, arrays=None, **content):
    """The file with some of its metadata replaced; or some of its arrays, by one who knows how to hash them."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        metadata = json.loads(file.metadata()["acgpt_evaluation_set"]) | content
    if arrays is not None:
        held = load_file(path) | arrays
        drawn = {name: held[f"roles.{name}"] for name in CONDITIONAL}
        metadata["hash"] = EvaluationSet(held["tokens"], drawn, small_set().origin).hash
    save_file(load_file(path) | (arrays or {}), path, {"acgpt_evaluation_set": json.dumps(metadata)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "there is no evaluation set"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_text("a shopping list"), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x02"), "damaged"),
        (lambda path: save_file(load_file(path), path), "not an evaluation set"),
        (lambda path: rewritten(path, hash="0" * 64), "damaged"),
        (lambda path: rewritten(path, tokenizer_hash="another"), "damaged"),
        (lambda path: rewritten(path, format_version=2), "format version 2.*Upgrade"),
        (lambda path: rewritten(path, format_version="1"), "damaged"),
        (lambda path: rewritten(path, arrays={"tokens": np.zeros((6, 19), np.int32)}), "the shape"),
        (lambda path: rewritten(path, arrays={"tokens": np.zeros((6, 20), np.int64)}), "of type int64"),
        (lambda path: rewritten(path, arrays={"tokens": np.full((6, 20), -1, np.int32)}), "negative"),
        (lambda path: rewritten(path, arrays={"roles.training": np.ones((6, 20), np.int8)}), "roles of training"),
        (lambda path: rewritten(path, arrays={"roles.training": np.full((6, 20), 3, np.int8)}), "roles of training"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "set.safetensors"
    small_set().save(path)
    damage(path)
    with pytest.raises(InputError, match=message):
        EvaluationSet.load(path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"length": 0}, "at least 1"),
        ({"limit": 0}, "at least 1"),
        ({"length": 200}, "123 tokens.*--length"),
        ({"r_max": 1.5}, "r_max"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
    ],
)
def test_a_set_that_cannot_be_built_is_refused_with_the_reason(how, message):
    with pytest.raises(InputError, match=message):
        EvaluationSet.build(tokens(123), tokenizer_hash="t", **{"length": 20, **how})


def test_another_tokenizer_is_refused():
    small_set().require_tokenizer("t")
    with pytest.raises(InputError, match="another tokenizer"):
        small_set().require_tokenizer("u")


# ---- perplexity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_perplexities_are_those_of_a_dense_mask_by_hand(architecture):
    reference, ours = twins(architecture)
    evaluation_set = small_set()
    evaluation = ask(ours, evaluation_set)
    assert list(evaluation.modes) == list(MODES)
    for mode, result in evaluation.modes.items():
        want = by_hand(reference, evaluation_set, mode)
        assert result.tokens == len(want) and result.texts == 6
        assert result.mean_nll == pytest.approx(-sum(want) / len(want), abs=1e-9)
        assert result.perplexity == pytest.approx(math.exp(-sum(want) / len(want)), rel=1e-9)
        assert evaluation.records()[f"{mode}.log_prob"].tolist() == pytest.approx(want, abs=1e-9)
    for mode, without in WITHOUT_FUTURE.items():
        ratio = evaluation.modes[mode].perplexity / evaluation.modes[without].perplexity
        assert evaluation.gains[mode].percent == pytest.approx(100 * (1 - ratio))


def test_modes_without_the_future_are_a_left_to_right_evaluation_of_the_same_places():
    reference, ours = tiny_model().double(), twins()[1]
    evaluation_set = small_set()
    texts = torch.from_numpy(evaluation_set.tokens).long()
    with torch.no_grad():  # the plain model, as anybody would run it
        logits = reference(torch.cat([torch.zeros(6, 1, dtype=torch.long), texts], dim=1)).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(2, texts[:, :, None])[:, :, 0].numpy()
    for method in ("ac-gpt", "gpt"):
        results = ask(ours, evaluation_set, method).modes
        assert results["unconditional"].mean_nll == pytest.approx(-plain.mean(), abs=1e-9)
        for name in CONDITIONAL:
            want = -plain[evaluation_set.drawn[name] == ASKED].mean()
            assert results[f"{name}-no-future"].mean_nll == pytest.approx(want, abs=1e-9)


def test_unknown_tokens_are_hidden_with_and_without_the_future():
    reference, ours = twins()
    evaluation_set = small_set(training=Conditioning.from_dict({"unknown": 0.3}))
    evaluation = ask(ours, evaluation_set)
    for mode, result in evaluation.modes.items():
        want = by_hand(reference, evaluation_set, mode)
        assert (result.tokens, result.mean_nll) == (len(want), pytest.approx(-sum(want) / len(want), abs=1e-9))
    assert ask(ours, evaluation_set, "gpt").modes["training-no-future"] is None  # GPT has no MASK
    with pytest.raises(InputError, match="MASK"):
        ask(ours, evaluation_set, mask=None)


@pytest.mark.parametrize("budget", [1, 30, 100])
def test_the_batch_size_changes_no_result(budget):
    _, ours = twins()
    want, got = ask(ours, small_set(), budget=10**6), ask(ours, small_set(), budget=budget)
    for mode in MODES:
        assert got.modes[mode].mean_nll == pytest.approx(want.modes[mode].mean_nll, abs=1e-12)
        assert got.modes[mode].interval == pytest.approx(want.modes[mode].interval, rel=1e-9)


class Counting(AcGpt):
    """AC-GPT that notes how many queries it was asked at a time."""

    def __init__(self):
        self.asked = []

    def log_probs(self, model, queries, **how):
        self.asked.append(len(queries))
        return super().log_probs(model, queries, **how)


def test_one_unconditional_pass_serves_three_modes():
    _, ours = twins()
    without = [name for name, mode in MODES.items() if not mode.future]
    for modes, passes in ([(), 3], [without, 1], [["training"], 1], [["training", "training-no-future"], 2]):
        method, seen = Counting(), []
        how = {"bos": 0, "mask": 1, "modes": modes, "progress": lambda *step: seen.append(step)}  # noqa: B023
        assert list(evaluate(method, ours, small_set(), **how).modes) == list(modes or MODES)
        assert sum(method.asked) == 6 * passes
        assert seen[0] == (0, 6 * passes) and seen[-1] == (6 * passes, 6 * passes)


def test_batches_are_filled_up_to_the_budget():
    method = Counting()
    how = {"bos": 0, "mask": 1, "modes": ["unconditional"]}
    evaluate(method, twins()[1], small_set(7), budget=60, **how)
    assert method.asked == [3, 3, 1]  # 20 slots a text


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
    evaluation_set = small_set()
    evaluation = ask(twins()[1], evaluation_set)
    columns = evaluation.records()
    for mode, result in evaluation.modes.items():
        text, place, token, log_prob = (columns[f"{mode}.{name}"] for name in ("text", "position", "token", "log_prob"))
        assert len(text) == result.tokens
        assert (token == evaluation_set.tokens[text, place - 1]).all()
        assert (evaluation_set.roles(MODES[mode])[text, place - 1] == ASKED).all()
        assert len(set(zip(text.tolist(), place.tolist(), strict=True))) == result.tokens
        assert -log_prob.mean() == pytest.approx(result.mean_nll)


def test_texts_that_do_not_fit_the_model_are_refused():
    ours = tiny_model(positions=20)
    with pytest.raises(InputError, match=r"20 tokens.*20 positions.*--length 19"):
        ask(ours, small_set())
    beyond = EvaluationSet.build(np.full(20, 50), tokenizer_hash="t", length=19)
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


def test_intervals_hold_the_true_perplexity_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = []
    for trial in range(200):
        counts = rng.integers(5, 30, size=60).astype(float)  # texts differ in length and in difficulty
        nlls = counts * rng.normal(3, 0.5, size=60) + rng.normal(0, np.sqrt(counts))
        low, high = percentiles(resampled_means({"m": (nlls, counts)}, seed=trial)["m"])
        held.append(low <= 3 <= high)
    assert 0.90 <= np.mean(held) <= 0.985


def test_an_interval_is_that_of_resampling_by_hand():
    rng = np.random.default_rng(1)
    counts, nlls = rng.integers(1, 30, size=25).astype(float), rng.gamma(9, 1, size=25)
    means = []
    for _ in range(4000):
        drawn = rng.integers(25, size=25)
        means.append(nlls[drawn].sum() / counts[drawn].sum())
    got = percentiles(resampled_means({"m": (nlls, counts)}, seed=0)["m"])
    want = np.quantile(means, [0.025, 0.975])
    assert got == pytest.approx(want, abs=0.1 * (want[1] - want[0]))


def test_intervals_are_a_function_of_the_seed():
    _, ours = twins()
    one, same, other = (ask(ours, small_set(), seed=seed, modes=["training"]) for seed in (0, 0, 1))
    assert one.as_dict() == same.as_dict()
    assert one.modes["training"].perplexity == other.modes["training"].perplexity
    assert one.modes["training"].interval != other.modes["training"].interval
    low, high = one.modes["training"].interval
    assert low < one.modes["training"].perplexity < high


def test_a_gain_is_compared_on_the_same_texts():
    evaluation_set = small_set()
    past = np.where(evaluation_set.drawn["training"] == ASKED, -5 * np.random.default_rng(0).random((6, 20)), np.nan)
    both = {"training-no-future": past, "training": past + 0.1}  # every token a tenth of a nat likelier
    evaluation = Evaluation("ac-gpt", evaluation_set, both, (), seed=0)
    gain = evaluation.gains["training"]
    assert (gain.percent, *gain.interval) == pytest.approx([100 * (1 - math.exp(-0.1))] * 3)
    low, high = evaluation.modes["training"].interval
    assert high - low > 1  # the texts themselves differ by much more
    assert evaluation.gains["infilling"] is None


def test_many_texts_are_resampled_in_parts():
    sums = {"m": (np.arange(10_000.0), np.ones(10_000))}
    means = resampled_means(sums, seed=0)["m"]
    assert means.shape == (1000,) and len(set(means.tolist())) > 990
    assert means.std() == pytest.approx(np.arange(10_000.0).std() / 100, rel=0.1)


def test_one_text_has_no_interval():
    result = ask(twins()[1], small_set(limit=1))
    assert result.modes["training"].interval is None and result.gains["training"].interval is None


def test_an_impossible_token_makes_an_infinite_perplexity_which_json_has_not():
    log_probs = np.full((6, 20), -1.0)
    log_probs[3, 3] = -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = Evaluation("gpt", small_set(), {"unconditional": log_probs}, (), seed=0)
        assert evaluation.modes["unconditional"].perplexity == math.inf
        plain = evaluation.as_dict()["modes"]["unconditional"]
    assert plain["perplexity"] is plain["mean_nll"] is plain["interval"] is None
    assert plain["tokens"] == 120


# ---- the command ----------------------------------------------------------------------------------------------------

TEXT = "The cat sat on the mat. The dog sat on the log, and the bird saw the capital of France. "


def write_corpus(folder, tokenizer, **splits):
    """A corpus as `acgpt prepare` leaves it: a manifest, and a shard a split."""
    folder.mkdir(exist_ok=True)
    entries = {}
    for name, text in splits.items():
        ids = np.array(tokenizer(text)["input_ids"], dtype="<u2")
        (folder / f"{name}-00000.bin").write_bytes(ids.tobytes())
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        shard = {"file": f"{name}-00000.bin", "tokens": len(ids), "sha256": digest}
        entries[name] = {"documents": 1, "tokens": len(ids), "bytes": len(text), "shards": [shard]}
    manifest = {
        "format_version": 1,
        "dtype": "uint16",
        "convention": "documents",
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "splits": entries,
    }
    (folder / "corpus.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders with the same weights: one says that it reads the future, the other says nothing."""
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    folders = {}
    for name, metadata in (("reads", Metadata()), ("plain", None)):
        folders[name] = str(tmp_path_factory.mktemp(name))
        model = tiny_model(vocabulary=len(tokenizer), positions=40)
        LanguageModel(model, tokenizer, metadata=metadata).save_pretrained(folders[name])
    Path(folders["plain"], "acgpt.json").unlink()
    config = Path(folders["plain"], "config.json")
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "acgpt"}))
    return folders


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", tiny_tokenizer(), test=TEXT * 12, validation=TEXT * 5)


@pytest.fixture
def cli(models):
    """Run the command in this process; everything is short, and on the CPU."""

    def run(*arguments, model="reads", code=0, length="30"):
        how = ["--device", "cpu", *(["--length", length] if length else [])]
        result = CliRunner().invoke(
            app, ["evaluate", models[model], *map(str, arguments), *how], env={"COLUMNS": "150", "NO_COLOR": "1"}
        )
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def object_of(result):
    (line,) = result.stdout.splitlines()
    return json.loads(line, parse_constant=pytest.fail)


def test_the_command_says_in_json_what_the_api_says(cli, models, corpus, tmp_path, monkeypatch):
    output, records = tmp_path / "out" / "results.json", tmp_path / "records.safetensors"
    monkeypatch.setattr(sys, "argv", ["/x/bin/acgpt", "evaluate", "words"])
    before = datetime.now(UTC).replace(microsecond=0)
    got = object_of(cli(corpus, "--json", "-o", output, "--records", records))
    lm = acgpt.load(models["reads"], device="cpu")
    evaluation_set, path = set_of_corpus(Corpus.open(corpus), split="test", length=30)
    want = evaluate(method_of("ac-gpt"), lm.model, evaluation_set, bos=lm.bos, mask=None)
    plain = json.loads(json.dumps(want.as_dict()))
    assert len(evaluation_set) >= 3
    for mode in MODES:
        assert got["modes"][mode] == {key: pytest.approx(value) for key, value in plain["modes"][mode].items()}
    assert got["set"] == {**plain["set"], "path": str(path)}
    assert got["set"]["hash"] == evaluation_set.hash and got["set"]["split"] == "test"
    assert path == corpus / "evaluation" / "test-30-r0.6-seed0.safetensors"
    assert set(got) == {
        "model", "adapter", "corpus", "method", "options", "bound", "modes", "gains", "set", "bootstrap", "metadata",
        "bos_token_id", "mask_token_id", "device", "dtype", "batch_tokens", "seconds", "versions",
        "date", "command",
    }  # fmt: skip
    assert got["command"] == ["acgpt", "evaluate", "words"]
    assert before <= datetime.fromisoformat(got["date"]) <= datetime.now(UTC)
    assert (got["method"], got["device"], got["dtype"], got["metadata"]["method"]) == (
        "ac-gpt", "cpu", "float32", "ac-gpt",
    )  # fmt: skip
    assert got["versions"]["torch"] == torch.__version__ and got["bootstrap"] == {
        "resamples": 1000,
        "level": 0.95,
        "seed": 0,
    }
    assert json.loads(output.read_text()) == got
    columns = load_file(records)
    for mode, result in got["modes"].items():
        assert math.exp(-columns[f"{mode}.log_prob"].mean()) == pytest.approx(result["perplexity"])


def test_the_table_has_a_row_for_every_mode_and_dashes_where_there_is_no_answer(cli, corpus):
    reads, plain = (cli(corpus, model=model).stdout for model in ("reads", "plain"))
    for name, mode in MODES.items():
        ours, gpts = (
            next(line for line in text.splitlines() if line.startswith(f"{name}  ")).split() for text in (reads, plain)
        )
        assert "--" not in ours
        assert ours[-1].endswith(")") is mode.future  # the gain and its interval
        assert gpts == ([name, *["--"] * 4] if mode.future else ours)  # the same weights, the same numbers
    assert "method ac-gpt" in reads and "cannot be answered" not in reads
    assert "method gpt" in plain and "--: cannot be answered by a model of method gpt" in plain


def test_the_set_is_made_once_and_used_by_every_model(cli, corpus):
    first = object_of(cli(corpus, "--json"))
    saved = Path(first["set"]["path"])
    before = saved.stat().st_mtime_ns
    second = object_of(cli(corpus, "--json", model="plain"))
    assert second["set"] == first["set"] and saved.stat().st_mtime_ns == before
    assert second["modes"]["unconditional"] == first["modes"]["unconditional"]
    others = [
        ["--seed", "1"], ["--r-max", "0.3"], ["--limit", "2"], ["--split", "validation"],
        ["--conditioning", "{b_max: 1}"], ["--conditioning", '{"b_max": 1, "unknown": 0.1}', "--method", "gpt"],
    ]  # fmt: skip
    hashes = {object_of(cli(corpus, "--json", *other, "--modes", "unconditional"))["set"]["hash"] for other in others}
    assert len(hashes | {first["set"]["hash"]}) == 7
    assert len(list(saved.parent.iterdir())) == 7


def test_texts_are_as_long_as_the_model_takes_unless_told(cli, corpus):
    assert object_of(cli(corpus, "--json", length=None))["set"]["length"] == 39  # of 40 positions, one is for BOS
    assert (LENGTH, object_of(cli(corpus, "--json"))["set"]["length"]) == (1023, 30)


def test_infilling_gives_as_much_as_the_training_distribution_unless_told(cli, corpus):
    for options, r_max in (
        (["--conditioning", "{r_max: 0.2}"], 0.2),
        (["--conditioning", "{parts: [{kind: empty}, {kind: blocks, r_max: 0.3}]}"], 0.3),
        (["--conditioning", "{b_max: 2}", "--r-max", "0.4"], 0.4),
        (["--conditioning", "{r_max: 0.2}", "--r-max", "0.4"], 0.4),
        (["--conditioning", "{empty: 1}"], 0.6),
    ):
        made = object_of(cli(corpus, "--json", *options, "--modes", "infilling"))["set"]
        drawn = EvaluationSet.load(made["path"]).drawn["infilling"]
        assert made["r_max"] == r_max
        assert (drawn == GIVEN).mean(axis=1).max() <= r_max


def test_a_call_that_fails_leaves_no_set_behind(cli, corpus, tmp_path):
    other = write_corpus(tmp_path / "other", tiny_tokenizer(pad_token="<another>"), test=TEXT * 12)
    for folder, length in ((corpus, "40"), (corpus, "4000"), (other, "30")):
        cli(folder, length=length, code=2)
        cli(folder, "--sets", tmp_path / "mine.safetensors", length=length, code=2)
        assert not (folder / "evaluation").exists() and not (tmp_path / "mine.safetensors").exists()


def test_a_result_that_cannot_be_written_ends_with_code_1(cli, corpus, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("acgpt.files.write_whole", full)
    said = cli(corpus, "-o", tmp_path / "results.json", code=1).stderr
    assert f"error: cannot write {tmp_path}/results.json: No space left on device. Make the folder, make room" in said


def test_zero_has_no_sign_in_the_table(capsys):
    answer = {"perplexity": 1.0, "interval": (1.0, 1.0), "mean_nll": 0.0, "tokens": 1, "texts": 2}
    gains = {"training": {"percent": -0.01, "interval": (-0.04, -0.0)}}
    print_perplexities(Page(), {"modes": {"training": answer}, "gains": gains, "method": "ac-gpt"})
    assert "0.0 % (0.0 to 0.0)" in (said := capsys.readouterr().out) and "-0.0" not in said


def test_a_terminal_without_the_characters_still_gets_the_table(models, corpus):
    env = os.environ | {"PYTHONPATH": str(Path(acgpt.__file__).parents[1]), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "acgpt", "evaluate", models["reads"], str(corpus), "--device", "cpu"]
    done = subprocess.run(command, env=env, capture_output=True, encoding="ascii")
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"training +[\d.,]+ +[\d.,]+-[\d.,]+ ", done.stdout)  # a hyphen for the dash


def test_a_corpus_that_has_changed_has_another_set(cli, corpus):
    first = object_of(cli(corpus, "--json"))
    write_corpus(corpus, tiny_tokenizer(), test=TEXT[4:] * 12)
    result = cli(corpus, "--json")
    assert "it is made again" in result.stderr
    assert object_of(result)["set"]["hash"] != first["set"]["hash"]
    assert cli(corpus, "--json").stderr == ""


def test_a_named_set_needs_no_corpus_and_is_not_overwritten(cli, corpus, tmp_path):
    path = tmp_path / "mine.safetensors"
    made = object_of(cli(corpus, "--sets", path, "--r-max", "0.4", "--json"))
    assert made["set"]["path"] == str(path) and not (corpus / "evaluation").exists()
    before = path.read_bytes()
    again = object_of(cli("--sets", path, "--json", length=None))
    assert again["modes"] == made["modes"] and again["set"] == made["set"] and again["corpus"] is None
    limited = object_of(cli("--sets", path, "--json", "--limit", "2", length=None))
    assert limited["set"]["texts"] == 2 and limited["set"]["hash"] != made["set"]["hash"]
    assert "r_max 0.4, not 0.6: leave out --r-max" in cli("--sets", path, "--r-max", "0.6", code=2).stderr
    assert "leave out --length" in cli(corpus, "--sets", path, length="20", code=2).stderr
    assert "conditioning" in cli("--sets", path, "--conditioning", "{b_max: 1}", code=2).stderr
    with pytest.raises(InputError, match="name another"):
        set_of_corpus(Corpus.open(corpus), path, split="test", length=30)
    assert path.read_bytes() == before


def test_a_named_set_of_another_corpus_is_refused(cli, corpus, tmp_path):
    path, other = tmp_path / "mine.safetensors", tmp_path / "other"
    cli(corpus, "--sets", path)
    write_corpus(other, tiny_tokenizer(), test=TEXT[4:] * 12)
    assert "is not an evaluation set of" in cli(other, "--sets", path, code=2).stderr
    assert object_of(cli(corpus, "--sets", path, "--json"))["corpus"] == str(corpus)


def test_a_corpus_that_cannot_be_written_to_is_evaluated_all_the_same(cli, corpus):
    want = object_of(cli(corpus, "--json"))["modes"]
    for file in (corpus / "evaluation").iterdir():
        file.unlink()
    (corpus / "evaluation").rmdir()
    (corpus / "evaluation").write_text("in the way")
    result = cli(corpus, "--json")
    assert "cannot be kept" in result.stderr and "--sets" in result.stderr
    assert object_of(result)["modes"] == want


def test_a_method_can_be_forced_and_copies_to_an_untrained_model_are_warned_of(cli, corpus):
    reads = object_of(cli(corpus, "--json"))
    forced = cli(corpus, "--json", "--method", "ac-gpt", model="plain")
    assert "warning: the model does not say that it was trained with ac-gpt" in forced.stderr
    assert object_of(forced)["modes"] == reads["modes"] and object_of(forced)["metadata"] is None
    as_gpt = cli(corpus, "--json", "--method", "gpt")
    assert as_gpt.stderr == "" and object_of(as_gpt)["modes"]["training"] is None


def test_batch_tokens_change_no_result(cli, corpus):
    one, other = (object_of(cli(corpus, "--json", "--batch-tokens", n, "--dtype", "float64")) for n in (1, 10_000))
    assert one["batch_tokens"] == 1
    for mode in MODES:
        assert one["modes"][mode]["mean_nll"] == pytest.approx(other["modes"][mode]["mean_nll"], abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CORPUS"),
        (["{tmp}/nothing"], "not a prepared corpus"),
        (["{corpus}/corpus.json"], "corpus.json -o FOLDER"),
        (["--sets", "{tmp}/nothing.safetensors"], "no evaluation set"),
        (["{corpus}", "--modes", "training,sampling"], "no mode 'sampling'"),
        (["{corpus}", "--method", "bert"], "no method 'bert'"),
        (["{corpus}", "--split", "dev"], "no split 'dev'"),
        (["{corpus}", "--length", "40"], "--length 39"),
        (["{corpus}", "--length", "4000"], "--length"),
        (["{corpus}", "--conditioning", "{b_mx: 4}"], "did you mean 'b_max'"),
        (["{corpus}", "--conditioning", "{b_max: "], "not YAML"),
        (["{corpus}", "--conditioning", "4"], "must be a mapping"),
        (["{corpus}", "--records", "records.csv"], "safetensors"),
        (["{corpus}", "-o", "{tmp}"], "cannot write"),
        (["{corpus}", "-o", "{corpus}/corpus.json/results.json"], "cannot write"),
        (["{corpus}", "--seed", str(2**32)], "seed"),
        (["{other}"], "another tokenizer"),
    ],
)
def test_what_the_user_can_mend_ends_with_one_message_and_code_2(cli, corpus, tmp_path, arguments, message):
    other = write_corpus(tmp_path / "other", tiny_tokenizer(pad_token="<another>"), test=TEXT * 12)
    places = {"tmp": tmp_path, "corpus": corpus, "other": other}
    for name, path in places.items():
        arguments = [argument.replace(f"{{{name}}}", str(path)) for argument in arguments]
    result = cli(*arguments, length=None if "--length" in arguments else "30", code=2)
    assert message in result.stderr and result.stdout == ""


def test_the_command_is_listed_without_importing_torch():
    code = "import sys, acgpt.cli; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(acgpt.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
