"""Training as a whole, on a CPU: what it learns from, what it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import sys
from datetime import timedelta
from itertools import pairwise
from unittest.mock import Mock, call

import pytest
import torch
from matplotlib.figure import Figure
from perplexities import measured
from runs import SMALL, loss_of, read_rows, recipe_of, results_of, write_corpus
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import paired_difference
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.per_text import read_per_text
from acgpt.evaluation.perplexity import evaluate
from acgpt.methods import method_of
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Conditioning
from acgpt.training.batches import Batches
from acgpt.training.log import draw_curve
from acgpt.training.optimizer import rate
from acgpt.training.plan import accelerator_for, settle
from acgpt.training.recipe import make
from acgpt.training.run_folder import SITTING
from acgpt.training.train import train


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run with every feature: Muon, dropout, a mixture with unknown tokens, two batches per step."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    keys = {"optimizer": "muon", "dropout": 0.1, "micro_batch": 4, "workers": 1, "schedule": "linear", "cooldown": 0.5}
    conditioning = {"r_max": 0.6, "empty": 0.2, "unknown": 0.1}
    train(recipe_of(corpus, folder, conditioning=conditioning, **keys), quiet=True)
    return folder


def gradients_of(run, step=1):
    """AdamW's first moments after the first step are a tenth of the gradient."""
    state = torch.load(run / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)["state"]
    return [held["exp_avg"] * 10 for held in state.values()]


# ---- what it writes -------------------------------------------------------------------------------------------------


def test_a_finished_run_holds_what_is_documented_and_nothing_half_done(run):
    names = {path.name for path in run.iterdir()}
    assert names - {"tensorboard"} == {
        "config.json", "log.csv", "loss.png", "checkpoints", "model", "results.per-text.json", "results.json"
    }  # fmt: skip
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"checkpoint-8", "checkpoint-12"}  # keep: 2
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_is_a_plain_hugging_face_folder_without_pickles(run, corpus):
    names = {path.name for path in (run / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "acgpt.json", "README.md"} <= names
    assert len({path.stat().st_mode for path in (run / "model").iterdir()}) == 1
    for path in (run / "model").iterdir():
        assert path.suffix in (".json", ".safetensors", ".txt", ".jinja", ".md"), path
        assert path.suffix == ".safetensors" or path.read_text()
    lm, tokenizer = acgpt.load(str(run / "model")), AutoTokenizer.from_pretrained(run / "model")
    plain = AutoModelForCausalLM.from_pretrained(run / "model", trust_remote_code=False)
    assert plain.config.vocab_size == len(tokenizer) == len(lm.tokenizer) < 384
    assert plain.config.architectures == ["GPTNeoXForCausalLM"]
    ids = torch.tensor([tokenizer("The cat sat on the mat.")["input_ids"]])
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids).logits for model in (lm.model.float(), plain.float()))
    assert ours.shape[-1] == len(tokenizer)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    metadata, recipe = lm.metadata, results_of(run)["recipe"]  # which say how it was trained
    assert metadata.method == "ac-gpt" and lm.reads_future
    assert Conditioning.from_dict(metadata.conditioning) == Conditioning.from_dict(recipe["conditioning"])
    assert (metadata.bos_token_id, metadata.mask_token_id) == (tokenizer.bos_token_id, tokenizer.mask_token_id)


def test_a_checkpoint_is_a_plain_hugging_face_folder_too(run):
    last = run / "checkpoints" / "checkpoint-12"
    assert AutoModelForCausalLM.from_pretrained(last).config.vocab_size % 64 == 0
    one, other = acgpt.load(str(last)), acgpt.load(str(run / "model"))
    question = "The {{cat}} sat on the mat."
    assert one.metadata.method == "ac-gpt"
    assert one.log_prob(question).log_prob == pytest.approx(other.log_prob(question).log_prob, abs=0.2)  # less padding
    trained, exported = (load_file(path / "model.safetensors") for path in (last, run / "model"))
    for name, weight in exported.items():
        assert torch.equal(trained[name][: len(weight)], weight), name


def perplexities_of(run, corpus, limit):
    held, lm = Corpus.open(corpus), acgpt.load(str(run / "model"))
    evaluation_dataset = EvaluationDataset.build(
        held.tokens("validation"), tokenizer_hash=held.manifest["tokenizer_hash"], length=31, limit=limit, r_max=0.6
    )
    evaluation = evaluate(method_of("ac-gpt"), lm.engine(lm.mask), evaluation_dataset)
    return evaluation_dataset.hash, {mode: answer.perplexity for mode, answer in evaluation.modes.items()}


def test_the_results_are_those_of_the_exported_model_on_the_set_that_evaluate_makes(run, corpus):
    results, (set_hash, perplexities) = results_of(run), perplexities_of(run, corpus, SMALL["final_texts"])
    assert results["evaluation"]["set"]["hash"] == set_hash
    for mode, perplexity in perplexities.items():
        assert results["evaluation"]["modes"][mode]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    kept = read_per_text(run / "results.json", results["evaluation"])  # which compares all sums with the results
    assert kept.set_hash == set_hash and len(kept.modes) == 5
    gain = paired_difference(*(measured([kept], mode) for mode in ("training", "training-no-future")))
    recorded = results["evaluation"]["gains"]["training"]
    assert gain.percent == pytest.approx(recorded["percent"], abs=0.01)
    assert gain.interval is None and recorded["interval"] is None  # there are too few texts


def test_results_and_config_say_all_that_it_takes_to_repeat_the_run(run, corpus):
    results, config = results_of(run), json.loads((run / "config.json").read_text())
    assert make(config["recipe"], "again").as_dict() == config["recipe"] == results["recipe"]
    assert set(config["versions"]) == {"acgpt", "torch", "transformers", "accelerate", "numpy", "python"}
    assert config["corpus_hash"] == Corpus.open(corpus).hash
    assert config["evaluation_sets"]["final"]["hash"] == results["evaluation"]["set"]["hash"]
    weights = load_file(run / "model" / "model.safetensors")
    assert results["parameters"] == sum(weight.numel() for weight in weights.values())
    assert (results["steps"], results["texts"], results["tokens"]) == (12, 96, 96 * 31)
    assert results["loss"] == list(loss_of(run).values())[-1]
    assert config["sittings"] == results["sittings"] == [{"after_step": 0} | {name: config[name] for name in SITTING}]


def test_the_log_has_a_row_a_step_with_its_rate_and_its_perplexities(run, corpus):
    rows = read_rows(run)
    assert [int(row["step"]) for row in rows] == [1, 2, 4, 6, 8, 10, 12]
    for row in rows:
        step = int(row["step"])
        share = rate(step - 1, steps=12, warmup=2, shape="linear", final=0.1, cooldown=0.5)
        assert float(row["learning_rate"]) == pytest.approx(SMALL["lr"] * share)
        assert (int(row["texts"]), int(row["tokens"])) == (8 * step, 8 * step * 31)
        assert 0 < float(row["grad_norm"]) < 100
    assert [int(row["step"]) for row in rows if row["unconditional"] and row["training"]] == [6, 12]
    assert not any(row["unconditional"] or row["training"] for row in rows if int(row["step"]) not in (6, 12))
    set_hash, perplexities = perplexities_of(run, corpus, SMALL["eval_texts"])
    assert results_of(run)["evaluation_sets"]["during"]["hash"] == set_hash
    assert float(rows[-1]["training"]) == pytest.approx(perplexities["training"], abs=1e-3)
    with (run / "log.csv").open(newline="") as file:  # as other programs read it
        rows = list(csv.DictReader(file))
    assert all(math.isfinite(float(row["loss"])) and 0 <= float(row["wait"]) <= 1 for row in rows)
    assert all(float(one["seconds"]) < float(two["seconds"]) for one, two in pairwise(rows))
    assert (run / "log.csv").read_bytes().count(b"\r") == 0


def test_both_optimizers_follow_the_schedule(run):
    state = torch.load(run / "checkpoints" / "checkpoint-8" / "optimizer.pt", weights_only=True)
    share = rate(7, steps=12, warmup=2, shape="linear", final=0.1, cooldown=0.5)  # of the step that was taken last
    adamw, muon = state["optimizers"]
    assert [group["lr"] for group in adamw["param_groups"]] == pytest.approx([3e-3 * share] * 2)
    assert [group["lr"] for group in muon["param_groups"]] == pytest.approx([2e-3 * share])


def test_tensorboard_gets_the_log_where_it_is_installed(corpus, tmp_path, monkeypatch):
    tensorboard = Mock(spec_set=["SummaryWriter"])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    train(recipe_of(corpus, tmp_path / "run", steps=3, warmup=0), quiet=True)
    tensorboard.SummaryWriter.assert_called_once_with(str(tmp_path / "run" / "tensorboard"), purge_step=1)
    *written, closed = tensorboard.SummaryWriter.return_value.mock_calls
    assert closed == call.close() and {each[0] for each in written} == {"add_scalar"}
    losses = {step: value for _, (name, value, step), _ in written if name == "loss"}
    assert losses == loss_of(tmp_path / "run")


@pytest.mark.parametrize("steps", [1, 3])
def test_everything_in_a_picture_of_a_run_can_be_seen_also_where_it_is_one_point(steps, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: [drawn.append(self), path.touch()])
    rows = [{"step": n, "tokens": 100 * n, "loss": 5.0 / n} for n in range(1, steps + 1)]
    rows[-1] |= {"unconditional": 9.0, "training": 8.0, "training-no-future": 9.5}
    assert draw_curve(rows, tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    assert [len(line.get_xdata()) for line in axes.lines] == [steps, 1, 1, 1] and axes.get_xlim()[0] == 0
    for line in axes.lines:
        one = len(line.get_xdata()) == 1
        assert (line.get_marker() in "os^") is one and (line.get_linestyle() == "None") is one


# ---- what it learns -------------------------------------------------------------------------------------------------


def test_it_learns(corpus, tmp_path):
    train(recipe_of(corpus, tmp_path / "run", steps=60, lr=1e-2, save_every=100, eval_every=0), quiet=True)
    losses = list(loss_of(tmp_path / "run").values())
    assert losses[0] > 5.5  # near the logarithm of 384 tokens
    assert losses[-1] < 3


THREE = {"steps": 3, "warmup": 0, "clip": 0, "save_every": 1, "keep": 9, "eval_every": 0}


@pytest.fixture(scope="module")
def whole_step(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(recipe_of(corpus, folder, **THREE), quiet=True)
    return folder


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_step_is_the_same_however_many_batches_it_is_run_in(micro_batch, whole_step, corpus, tmp_path):
    """The loss is the mean over the tokens of a step, not over batches, which ask different numbers of tokens."""
    train(recipe_of(corpus, tmp_path / "run", micro_batch=micro_batch, **THREE), quiet=True)
    for one, other in zip(gradients_of(whole_step), gradients_of(tmp_path / "run"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert loss_of(tmp_path / "run") == pytest.approx(loss_of(whole_step), rel=1e-5)


def test_the_norm_of_a_gradient_is_limited_and_logged_as_it_was(whole_step, corpus, tmp_path):
    train(recipe_of(corpus, tmp_path / "run", **THREE | {"steps": 1, "clip": 0.01}), quiet=True)
    free, limited = (torch.cat([g.flatten() for g in gradients_of(run)]) for run in (whole_step, tmp_path / "run"))
    assert free.norm() > 1
    assert limited.norm() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(limited / limited.norm(), free / free.norm(), rtol=1e-4, atol=1e-6)
    for run in (whole_step, tmp_path / "run"):
        assert float(read_rows(run)[0]["grad_norm"]) == pytest.approx(free.norm().item(), rel=1e-4)


def test_evaluating_leaves_no_trace_in_the_weights(corpus, tmp_path):
    weights = []
    for every in (0, 2):
        keys = {"steps": 5, "dropout": 0.2, "eval_every": every, "save_every": 99}
        train(recipe_of(corpus, tmp_path / f"run{every}", **keys), quiet=True)
        weights.append((tmp_path / f"run{every}" / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_causal_twin_reads_the_same_texts_with_nothing_given_and_is_asked_the_same(corpus, tmp_path, monkeypatch):
    seen = []

    class Watched(Batches):
        def __init__(self, texts, **how):
            super().__init__(texts, **how)
            seen.append([self.items_of(number)[1].tolist() for number in range(len(self))])

    monkeypatch.setattr("acgpt.training.train.Batches", Watched)
    one, twin = (
        train(recipe_of(corpus, tmp_path / method, method=method, **THREE), quiet=True) for method in ("ac-gpt", "gpt")
    )
    assert seen[0] == seen[1] and len(seen[0]) == 3
    assert twin["evaluation"]["set"]["hash"] == one["evaluation"]["set"]["hash"]
    modes = twin["evaluation"]["modes"]
    assert [name for name, answer in modes.items() if answer is None] == ["infilling", "training"]
    assert Metadata.read(tmp_path / "gpt" / "model").method == "gpt"
    assert not acgpt.load(str(tmp_path / "gpt" / "model")).reads_future
    assert twin["conditioning"]["parts"] == [{"kind": "empty", "weight": 1.0}]


def test_a_mask_token_is_named_only_if_unknown_tokens_were_learnt(whole_step, run):
    assert Metadata.read(whole_step / "model").mask_token_id is None
    assert Metadata.read(run / "model").mask_token_id is not None


@pytest.mark.parametrize(
    "keys",
    [{"precision": "bf16"}, {"attention_dropout": 0.3}, {"dropout": 0.3}, {"optimizer": "muon"}, {"seed": 1}],
    ids=str,
)
def test_what_is_asked_for_takes_effect(keys, whole_step, corpus, tmp_path):
    """Nothing in a recipe is ignored: each of these changes the losses, a little or more."""
    train(recipe_of(corpus, tmp_path / "run", **THREE, **keys), quiet=True)
    one, other = loss_of(whole_step), loss_of(tmp_path / "run")
    assert one != other
    assert other == pytest.approx(one, rel=0.2)


def test_epochs_are_counted_in_steps(corpus, tmp_path):
    texts = Corpus.open(corpus).tokens("train").chunks(31)
    plan = settle(make({"epochs": 2.5, "batch": 8, "device": "cpu", "warmup": 1}, "x"), texts)
    assert plan.steps == round(2.5 * texts / 8)
    assert plan_of(texts=31, steps=None, epochs=1, batch=8, warmup=1).steps == 4  # 3.9 are nearer to 4 than to 3


# ---- what a recipe leaves to the machine ----------------------------------------------------------------------------


def plan_of(world=1, texts=1000, **keys):
    environment = {"WORLD_SIZE": str(world)} | keys.pop("environment", {})
    return settle(make({"steps": 1000, "device": "cpu"} | keys, "x"), texts, environment)


@pytest.mark.parametrize(
    ("world", "batch", "micro_batch", "expected"),
    [(1, 8, None, (8, 1)), (2, 8, None, (4, 1)), (1, 8, 3, (2, 4)), (2, 8, 100, (4, 1)), (8, 128, 32, (16, 1))],
)
def test_a_step_is_divided_among_processes_and_batches(world, batch, micro_batch, expected):
    plan = plan_of(world, batch=batch, micro_batch=micro_batch)
    assert (plan.micro_batch, plan.accumulation) == expected
    assert plan.parts * plan.micro_batch == batch


@pytest.mark.parametrize(
    ("world", "keys", "words"),
    [
        (3, {"batch": 8}, "batch .8. must be a multiple of the number of processes .3."),
        (1, {"parallel": "fsdp"}, "FSDP needs several processes"),
        (2, {"optimizer": "muon", "environment": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}}, "Muon does"),
        (2, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, "FSDP version 2 is required"),
        (1, {"steps": None, "epochs": 0.1, "warmup": 100}, "warmup .100. must be shorter than the run"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(world, keys, words):
    with pytest.raises(InputError, match=words):
        plan_of(world, **keys)


def test_a_device_that_is_not_there_is_refused():
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device=cuda is not available"):
            plan_of(device="cuda")


@pytest.mark.parametrize(("precision", "launched"), [("fp32", "bf16"), ("bf16", "no")])
def test_the_recipe_decides_precision_and_accumulation_not_the_launcher(precision, launched, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    recipe = make({"steps": 1000, "device": "cpu", "precision": precision, "output": str(tmp_path)}, "x")
    accelerator = accelerator_for(settle(recipe, 1000), ["GPTNeoXLayer"])
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.init_handler.timeout >= timedelta(minutes=30)  # in which a process may write a checkpoint
    assert accelerator.mixed_precision == {"fp32": "no", "bf16": "bf16"}[precision]


# ---- what it refuses ------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_says_so_saves_nothing_broken_and_is_unlocked_though_its_error_is_kept(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **THREE | {"steps": 12, "lr": 1e30, "workers": 1})
    with pytest.raises(InputError, match="training has diverged") as kept:
        train(recipe, quiet=True)
    with pytest.raises(InputError, match="training has diverged"):  # not: another process is training
        train(recipe, resume=True, quiet=True)
    assert kept.value.__traceback__ is not None
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"):
        assert all(weight.isfinite().all() for weight in load_file(checkpoint / "model.safetensors").values())
    assert not (tmp_path / "run" / "results.json").exists()


def test_unknown_tokens_need_a_corpus_with_a_mask_token(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", mask=False)
    with pytest.raises(InputError, match="prepare the corpus with a mask token"):
        train(recipe_of(corpus, tmp_path / "run", conditioning={"unknown": 0.1}), quiet=True)
