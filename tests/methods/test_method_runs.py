"""Every method through the same loop, exporter, loader, evaluator and command line."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from packing import shapes_of, tensors_of
from runs import SMALL, loss_of, read_rows, write_corpus
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, QueryError
from acgpt.evaluation.setup import choose_method
from acgpt.methods import METHODS, method_of
from acgpt.query.conditioning import Conditioning
from acgpt.query.modes import MODES
from acgpt.training.batches import Batches
from acgpt.training.recipe import make
from acgpt.training.train import train

pytestmark = pytest.mark.usefixtures("without_curves")

OTHERS = [name for name, method in METHODS.items() if not method.drawable]
UNANSWERED = {"diffusion": {"infilling-no-future", "training-no-future"}, "fim": {"training"}}
KEYS = SMALL | {"length": 15, "steps": 30, "save_every": 15, "eval_every": 15, "log_every": 1, "final_texts": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus whose tokenizer has no MASK, like GPT-2's."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), mask=False)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Return the finished run of a method, trained on first use."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in done:
            done[name] = train(recipe(name, corpus, folder / name), quiet=True)
        return folder / name, done[name]

    return run


def recipe(name, corpus, folder, **keys):
    return make(KEYS | {"corpus": str(corpus), "output": str(folder), "method": name} | keys, "a test")


@pytest.mark.parametrize("name", OTHERS)
def test_it_learns_and_its_folder_opens_and_says_what_it_is(name, runs):
    folder, results = runs(name)
    losses = list(loss_of(folder).values())
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    files = {path.suffix for path in (folder / "model").iterdir()}
    assert ".safetensors" in files and not files & {".bin", ".pt", ".pkl"}
    lm = acgpt.load(folder / "model", device="cpu")
    assert lm.metadata.method == name
    method = method_of(name)
    assert (lm.mask is not None) is method.needs_mask
    assert lm.vocabulary == len(lm.tokenizer) + method.needs_mask
    assert lm.reads_future and results["parameters"] == sum(p.numel() for p in lm.model.parameters())


def test_a_recipe_says_how_targets_are_told_and_the_folder_keeps_it(corpus, tmp_path):
    words = ["train", "tiny-cpu", f"corpus={corpus}", "steps=2", "batch=2", "length=15", "workers=0", "final_texts=1"]
    words += ["device=cpu", "target_positions=table", "--quiet"]
    done = CliRunner().invoke(app, [*words, "method=sigma-gpt-random", f"output={tmp_path / 'run'}"])
    assert done.exit_code == 0, done.output
    lm = acgpt.load(tmp_path / "run" / "model", device="cpu")
    assert lm.model.config.target_positions == "table"
    assert lm.model.gpt_neox.embed_target.weight.shape == (16, 64)


@pytest.mark.parametrize("name", OTHERS)
def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(name, corpus, runs, tmp_path, monkeypatch):
    whole, _ = runs(name)
    broken = tmp_path / "broken"
    asked = []

    def stop_half_way(self):
        asked.append(self.step)
        return self.step == 15

    with monkeypatch.context() as patch:
        patch.setattr("acgpt.training.loop.Loop.should_stop", stop_half_way)
        assert train(recipe(name, corpus, broken), quiet=True) is None
    assert max(asked) == 15 and not (broken / "model").exists()
    assert train(recipe(name, corpus, broken), resume=True, quiet=True) is not None
    one, other = ((each / "model" / "model.safetensors").read_bytes() for each in (whole, broken))
    assert one == other
    assert read_rows(whole) == read_rows(broken)


def evaluated(run, corpus, *words):
    """Evaluate three texts of the model of a run by the command, on a set that is kept beside it."""
    options = ["--limit", "3", "--length", "15", "--device", "cpu", "--split", "validation"]
    options += ["--dataset", str(run.parent / "set.safetensors")]
    return CliRunner().invoke(app, ["evaluate", str(run / "model"), str(corpus), *options, *words])


@pytest.mark.parametrize("name", OTHERS)
def test_the_command_evaluates_it_in_the_modes_that_it_can_answer(name, corpus, runs):
    folder, results = runs(name)
    got = evaluated(folder, corpus, "--json")
    assert got.exit_code == 0, got.output
    content = json.loads(got.stdout)
    method = method_of(name)
    assert content["method"] == name and content["bound"] is method.bound
    unanswered = {mode for mode in MODES if content["modes"][mode] is None}
    if name in UNANSWERED or method.abilities.evaluates_any:
        assert unanswered == UNANSWERED.get(name, set())
    assert content["set"]["hash"] == results["evaluation_sets"]["final"]["hash"]
    for mode, answer in results["evaluation"]["modes"].items():  # what training said of the network it exported
        if answer is None:
            assert content["modes"][mode] is None
        else:
            assert content["modes"][mode]["mean_nll"] == pytest.approx(answer["mean_nll"], abs=1e-4)
    table = evaluated(folder, corpus)
    assert ("≤" in table.stdout) is method.bound
    assert ("--" in table.stdout) is bool(unanswered)


def test_the_command_asks_as_it_is_told_to(corpus, runs):
    def perplexities(name, *options):
        folder, _ = runs(name)
        result = evaluated(folder, corpus, "--json", *(word for each in options for word in ("--method-option", each)))
        return {mode: answer and answer["perplexity"] for mode, answer in json.loads(result.stdout)["modes"].items()}

    plain, *others = (
        perplexities("sigma-gpt-random", *options)
        for options in ([], ["order=random"], ["order=random", "seed=1"], ["orders=4"])
    )
    assert all(plain.values())
    for result in others:  # some tokens have seen their future
        unanswered = {mode for mode, value in result.items() if value is None}
        assert unanswered == {"infilling-no-future", "training-no-future"}
    assert len({round(result["training"], 6) for result in (plain, *others)}) == 4
    assert perplexities("diffusion", "draws=4")["training"] != perplexities("diffusion")["training"]


def test_the_command_scores_with_a_model_that_only_bounds_and_says_so(runs):
    folder, _ = runs("diffusion")
    words = ["score", "The cat {{sat}} on the mat.", "-m", str(folder / "model"), "--device", "cpu"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0 and "bounds" in told.stdout
    assert "--: a model of method diffusion cannot score a text from left to right" in " ".join(told.stdout.split())
    assert re.search(r"␣sat +-- +\d+\.\d\d$", told.stdout, re.MULTILINE)
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["bound"] is True
    end = CliRunner().invoke(app, ["score", "The cat {{sat}}", *words[2:]])  # past only and with future: one question
    assert end.exit_code == 0 and "--" not in end.stdout and "with future" not in end.stdout
    assert re.search(r"␣sat +\d+\.\d\d$", end.stdout, re.MULTILINE) and "no future to read" in end.stdout
    shown = CliRunner().invoke(app, ["show", "The cat {{sat}}", "-m", str(folder / "model")])
    assert shown.exit_code == 2 and "diffusion" in shown.output


def test_the_command_scores_in_the_way_that_can_be_answered_and_says_of_the_other_that_it_cannot(runs, tmp_path):
    folder, _ = runs("fim")
    lm = acgpt.load(folder / "model", device="cpu")
    gap, gaps = "The {{cat}} sat.", "The {{cat}} sat on the {{mat}}."

    def bits(template, future):
        return [f"{-token.log_prob / math.log(2):.2f}" for token in lm.log_prob(template, future=future).tokens]

    def score(*words):
        return CliRunner().invoke(app, ["score", *words, "-m", str(folder / "model"), "--device", "cpu"])

    def column(said, number):  # of the table's rows: the text, past only, with future, …
        return [words[number] for line in said.splitlines() if (words := line.split())[:1] in (["␣cat"], ["␣mat"])]

    told = score(gap)
    assert told.exit_code == 0 and column(told.stdout, 1) == bits(gap, False) and "--" not in told.stdout
    assert column(told.stdout, 2) == bits(gap, True)
    told = score(gaps)
    assert column(told.stdout, 1) == bits(gaps, False) and column(told.stdout, 2) == ["--", "--"]
    assert "difference" not in told.stdout
    with pytest.raises(acgpt.QueryError) as refused:
        lm.log_prob(gaps, future=True)
    assert f"--: {refused.value}" in " ".join(told.stdout.split())  # in its own words
    (tmp_path / "both").write_text(f"{gap}\n{gaps}\n", encoding="utf-8")
    both = score("--file", str(tmp_path / "both"))
    assert column(both.stdout, 1) == bits(gap, False) + bits(gaps, False)
    assert column(both.stdout, 2) == [*bits(gap, True), "--", "--"]
    refused = score(gaps, "--future")
    assert refused.exit_code == 2 and "one run of tokens" in refused.output


@pytest.mark.parametrize("name", OTHERS)
def test_every_batch_of_a_run_has_one_shape_and_is_a_function_of_the_seed(name, corpus):
    texts, method = Corpus.open(corpus).tokens("train"), method_of(name)
    distribution = Conditioning.from_dict({"r_max": 0.8})

    def batches(fixed, seed=3):
        return Batches(
            texts, count=24, size=4, length=15, conditioning=method.conditioning(distribution), seed=seed, bos=0,
            mask=340 if method.needs_mask else None, fixed=fixed, balance=distribution, method=method,
        )  # fmt: skip

    shapes, filled, again, other = set(), batches(True), batches(True), batches(True, seed=4)
    for number in range(24):
        batch = filled[number]
        tensors, others = tensors_of(batch), tensors_of(again[number])
        shapes.add(shapes_of(batch))
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert torch.equal(tensor, tensors[name]), name
    assert len(shapes) == 1
    assert any(not torch.equal(filled[n].ids, other[n].ids) for n in range(4))


@pytest.mark.parametrize("name", OTHERS)
def test_filling_up_a_batch_teaches_nothing(name, corpus):
    from toys import learner_of, toy

    from acgpt.engine.layout import Budget
    from acgpt.query.conditioning import generator
    from acgpt.training.batches import Batch

    method, model, length = method_of(name), toy(name, vocabulary=12, length=9), 9
    distribution = method.conditioning(Conditioning.from_dict({"r_max": 0.8}))
    rngs = [generator(5, 0, item) for item in range(4)]
    tokens = np.random.default_rng(1).integers(1, 12, (4, length))
    roles = np.stack([distribution.roles(length, rng) for rng in rngs])
    slots = method.lay_out(tokens, roles, rngs, bos=0, mask=12 if method.needs_mask else None)
    learner = learner_of(model, name)
    gradients = []
    for budget in (None, Budget(sum(slots.copies) + 64 * any(slots.copies), 64)):
        learner.zero_grad()
        loss = learner(Batch.of(slots, longest=method.longest(length), bos=0, budget=budget))
        loss.backward()
        gradients.append((loss.item(), [weight.grad.clone() for weight in learner.parameters()]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-12)
    for one, two in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mlm", "diffusion", "fim"])
def test_a_mask_that_texts_have_is_refused(name, corpus, tmp_path):
    tokens = Corpus.open(corpus).tokens("train")
    tokenizer = Corpus.open(corpus).tokenizer()
    common = tokenizer.convert_ids_to_tokens(int(np.bincount(tokens.chunk(0, 15)).argmax()))
    for mask in (common, tokenizer.bos_token):
        with pytest.raises(InputError, match="that no text has"):
            train(recipe(name, corpus, tmp_path / "run", mask=mask), quiet=True)
    assert not (tmp_path / "run").exists()


def test_asking_by_another_method_than_its_own_is_refused(runs):
    folder, _ = runs("mlm")
    with pytest.raises(InputError, match="the model can only be asked with its own method, mlm"):
        choose_method(method_of("gpt"), acgpt.load(folder / "model", device="cpu"))


@pytest.mark.parametrize("name", OTHERS)
def test_a_language_model_asks_by_its_own_method(name, runs):
    folder, _ = runs(name)
    lm, method = acgpt.load(folder / "model", device="cpu"), method_of(name)
    question = lm.query("The cat {{sat}} on the mat.")
    if not method.answers(question):
        question = lm.query(method.examples[0])
    with torch.inference_mode():
        (want,) = method.log_probs(lm.engine(lm.mask), [question])
    score = lm.log_prob(question)
    assert score.log_prob == pytest.approx(sum(want), abs=1e-5)
    assert score.future and score.bound is method.bound
    blank = "The cat {{_2}} the mat." if method.answers(lm.query("The cat {{_2}} the mat.")) else method.examples[1]
    (sample,) = lm.sample(blank, seed=1)
    assert sample.text == lm.sample(blank, seed=1)[0].text
    assert not sample.bound  # the log-probabilities are those with which it was drawn
    before, after = re.split(r" *{{_\d}}", blank)
    assert sample.text.startswith(before) and sample.text.endswith(after)
    if method.bound:
        with pytest.raises(QueryError, match="bounds"):
            lm.rank("The {{cat|dog}} saw the mat.")
    else:
        assert sum(each.probability for each in lm.rank("{{The cat|The dog}} saw the mat.")) == pytest.approx(1)
    if not method.chain:
        with pytest.raises(QueryError, match="left to right"):
            lm.log_prob(question, future=False)
    else:
        assert lm.log_prob(question, future=False).log_prob != pytest.approx(score.log_prob, abs=1e-6)


@pytest.mark.parametrize("name", list(METHODS))
def test_only_methods_that_leave_a_causal_model_one_are_for_pretrained_ones(name, corpus, tmp_path):
    words = recipe(name, corpus, tmp_path / "run", base=str(tmp_path / "nowhere"), model="tiny")
    with pytest.raises(InputError) as caught:
        train(words, quiet=True)
    refused = "not for pretrained" in str(caught.value)
    assert refused is (method_of(name).abilities.fine_tunes is False)
