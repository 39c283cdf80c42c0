"""Pretrained models that learn the layout, whole or through an adapter, in the same loop."""

from __future__ import annotations

import json
import signal
from dataclasses import replace as replaced

import pytest
import torch
from models import ARCHITECTURES, tiny_model
from runs import (
    LORA,
    SMALL,
    Command,
    ended,
    kill_self,
    loss_of,
    ranks,
    read_rows,
    recipe_of,
    replace,
    results_of,
    write_base,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, OPTConfig
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.engine.peft import add_lora
from acgpt.errors import InputError, ModelError
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata, weights_hash
from acgpt.training.learner import Work
from acgpt.training.networks import disable_dropout, load_pretrained
from acgpt.training.plan import settle
from acgpt.training.train import train

pytestmark = pytest.mark.usefixtures("without_curves")

NEW = {"dropout": 0.0, "targets": None, "start": None}  # the other keys of an adapter


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"), corpus)


@pytest.fixture(scope="module")
def run(corpus, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(recipe_of(corpus, folder, base=base), quiet=True)
    return folder


# ---- an adapter -----------------------------------------------------------------------------------------------------


def test_the_dropout_of_an_adapter_acts_in_training(corpus, base, tmp_path):
    """Pretrained networks are loaded in evaluation mode."""
    losses = []
    for rate in (0.0, 0.5):
        folder = tmp_path / str(rate)
        keys = {"lora": LORA | {"dropout": rate}, "steps": 3, "log_every": 1, "eval_every": 0, "final_texts": 1}
        train(recipe_of(corpus, folder, base=base, **keys), quiet=True)
        losses.append(loss_of(folder))
    assert losses[0][1] == losses[1][1]  # a new adapter adds nothing yet
    assert losses[0][3] != losses[1][3]


def test_an_adapter_and_a_checkpoint_of_it_are_what_peft_opens_and_acgpt_asks(run, base):
    from peft import PeftModel

    assert sorted(path.name for path in (run / "adapter").iterdir() if "token" not in path.name) == [
        "README.md", "acgpt.json", "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    assert len({path.stat().st_mode for path in (run / "adapter").iterdir()}) == 1
    lm = acgpt.load(str(base), adapter=str(run / "adapter"))
    assert lm.metadata.method == "ac-gpt" and lm.metadata.conditioning["parts"][0]["r_max"] == 0.6
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "adapter")
    ids = torch.tensor([[1, 5, 7, 9]])
    with torch.no_grad():
        both = [model(input_ids=ids).logits for model in (lm.model, peft.eval())]
        bare = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits
    assert torch.allclose(*both, atol=1e-6) and not torch.allclose(both[0], bare, atol=1e-4)
    with_its_own_base, checkpoint = acgpt.load(str(run / "adapter")), run / "checkpoints" / "checkpoint-12"
    want = lm.log_prob("The {{cat}} sat on the mat.").log_prob
    for other in (with_its_own_base, acgpt.load(str(base), adapter=str(checkpoint))):
        assert other.log_prob("The {{cat}} sat on the mat.").log_prob == pytest.approx(want, abs=1e-6)
    assert not (checkpoint / "model.safetensors").exists()


def test_the_results_are_those_of_the_adapter_that_was_written(run, base, corpus):
    words = ["evaluate", str(base), str(corpus), "--adapter", str(run / "adapter"), "--length", "31", "--limit", "6"]
    done = CliRunner().invoke(app, [*words, "--r-max", "0.6", "--json"])
    assert done.exit_code == 0, done.stderr
    measured, results = json.loads(done.stdout), results_of(run)["evaluation"]
    assert measured["set"]["hash"] == results["set"]["hash"]
    for mode, answer in measured["modes"].items():
        assert results["modes"][mode]["perplexity"] == pytest.approx(answer["perplexity"], rel=1e-4)


def test_an_adapter_learns_and_its_base_stays_as_it_was(run, base, corpus):
    losses = [float(row["loss"]) for row in read_rows(run)]
    assert losses[-1] < losses[0] - 0.05
    metadata = Metadata.read(run / "adapter")
    assert metadata.base_hash == weights_hash(AutoModelForCausalLM.from_pretrained(base))
    assert metadata.tokenizer_hash == Corpus.open(corpus).manifest["tokenizer_hash"]
    assert results_of(run)["parameters"] == sum(
        weight.numel() for weight in load_file(run / "adapter" / "adapter_model.safetensors").values()
    )


def test_the_card_names_the_base_and_the_perplexities(run, base):
    card = (run / "adapter" / "README.md").read_text()
    assert base.name in card and str(base.parent) not in card.replace(base.name, "")
    assert "a PEFT adapter" in card and "| training |" in card and '"r_max": 0.6' in card


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_layer_of_the_blocks_is_a_target_by_default_and_the_head_is_none(architecture):
    model = tiny_model(architecture)
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = {name for name, weight in model.named_parameters() if weight.ndim == 2 and id(weight) not in tables}
    matrices -= {name for name in matrices if "wpe" in name}  # GPT-2's positions
    adapted, _ = add_lora(model, rank=2, alpha=4)
    trained = {name.partition(".lora_A")[0] for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert {name for name in trained if ".lora_B" not in name} == {name.removesuffix(".weight") for name in matrices}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("lora", [LORA, None])
def test_every_architecture_learns_the_layout(architecture, lora, corpus, tmp_path):
    folder = write_base(tmp_path / "base", corpus, architecture)
    results = train(recipe_of(corpus, tmp_path / "run", base=folder, lora=lora, steps=4, eval_every=0), quiet=True)
    path = tmp_path / "run" / ("adapter" if lora else "model")
    assert results["model"] == str(path)
    lm = acgpt.load(str(folder), adapter=str(path)) if lora else acgpt.load(str(path))
    assert lm.metadata.reads_copies and isinstance(lm.log_prob("The {{cat}} sat.").log_prob, float)


def test_dropout_that_a_model_brings_is_switched_off_however_it_is_applied():
    config = OPTConfig(
        vocab_size=50, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
    )  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(9)[None]
    disable_dropout(model)
    one, other = (model.train()(input_ids=ids).logits for _ in range(2))
    assert torch.equal(one, other)


def test_dropout_that_cannot_be_switched_off_is_refused(monkeypatch):
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, inputs, logits: torch.dropout(logits, 0.5, module.training))
    with pytest.raises(ModelError, match="cannot be switched off"):
        disable_dropout(model)


def test_the_same_seed_gives_the_same_adapter_and_another_another():
    def first(seed):
        adapted, _ = add_lora(tiny_model(), rank=2, alpha=4, seed=seed)
        return next(weight for name, weight in adapted.named_parameters() if "lora_A" in name)

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


# ---- all weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_full_tuning_writes_a_plain_model_whatever_is_tied(tied, corpus, tmp_path):
    folder = write_base(tmp_path / "base", corpus, tie_word_embeddings=tied)
    train(recipe_of(corpus, tmp_path / "run", base=folder, lora=None), quiet=True)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "run" / "model"))
    assert (after.get_output_embeddings().weight is after.get_input_embeddings().weight) == tied
    moved = {name for name, weight in after.named_parameters() if not torch.equal(weight, before.get_parameter(name))}
    assert moved == {name for name, _ in after.named_parameters()}
    last = load_file(tmp_path / "run" / "checkpoints" / "checkpoint-12" / "model.safetensors")
    assert all(torch.equal(last[name], weight) for name, weight in after.state_dict().items() if name in last)


def test_a_tuned_model_is_written_in_the_dtype_of_its_base(corpus, tmp_path):
    folder = write_base(tmp_path / "base", corpus)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7)
    model.save_pretrained(folder)
    train(recipe_of(corpus, tmp_path / "run", base=folder, lora=None, steps=3, save_every=3), quiet=True)
    assert {w.dtype for w in load_file(tmp_path / "run" / "model" / "model.safetensors").values()} == {torch.bfloat16}
    assert GenerationConfig.from_pretrained(tmp_path / "run" / "model").temperature == 0.7
    words = ["evaluate", str(tmp_path / "run" / "model"), str(corpus), "--length", "31", "--limit", "6", "--json"]
    measured = json.loads(CliRunner().invoke(app, [*words, "--r-max", "0.6", "--dtype", "float32"]).stdout)
    results = results_of(tmp_path / "run")["evaluation"]
    for mode, answer in measured["modes"].items():
        assert results["modes"][mode]["perplexity"] == pytest.approx(answer["perplexity"], rel=1e-5)
    kept = load_file(tmp_path / "run" / "checkpoints" / "checkpoint-3" / "model.safetensors")
    assert {weight.dtype for weight in kept.values()} == {torch.float32}


# ---- twins, memory, going on ----------------------------------------------------------------------------------------


def test_an_adapter_learns_to_fill_in_the_middle(base, corpus, tmp_path):
    results = train(recipe_of(corpus, tmp_path / "run", base=base, method="fim", mask="<mask>", steps=30), quiet=True)
    assert [mode for mode, result in results["evaluation"]["modes"].items() if result is None] == ["training"]
    losses = list(loss_of(tmp_path / "run").values())
    assert losses[-1] < losses[0] - 0.3
    lm = acgpt.load(str(base), adapter=str(tmp_path / "run" / "adapter"))
    assert lm.metadata.method == "fim" and lm.log_prob("a {{b}} c", future=True).future


@pytest.mark.parametrize("lora", [LORA, None])
def test_checkpointing_changes_nothing_but_memory(lora, corpus, base, tmp_path):
    runs = {}
    for checkpointing in (False, True):
        folder = tmp_path / str(checkpointing)
        train(recipe_of(corpus, folder, base=base, lora=lora, steps=4, checkpointing=checkpointing), quiet=True)
        (file,) = (folder / ("adapter" if lora else "model")).glob("*.safetensors")
        runs[checkpointing] = load_file(file)
    assert all(torch.allclose(weight, runs[False][name], atol=1e-6) for name, weight in runs[True].items())


def words_of(recipe, folder):
    """Write a recipe; return the command of its run with --resume, as in a job that may be restarted."""
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(recipe.as_dict() | {"output": str(folder)}))
    return ("finetune", path, "--resume", "--quiet")


def run_to_the_end(recipe, folder):
    command = Command(*words_of(recipe, folder), output=folder.with_suffix(".said"))
    with ended(command):
        assert command.wait() == 0, command.printed()
    return load_file(next(folder.glob("[am]*/*.safetensors")))


def die_at_step_7(_):
    def make(before):
        def should_stop(self):
            return kill_self() if self.step == 7 else before(self)

        return should_stop

    replace("acgpt.training.loop:Loop.should_stop", make)


@pytest.mark.parametrize("lora", [LORA | {"dropout": 0.1}, pytest.param(None, marks=pytest.mark.soak)])
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_never_stopped(lora, corpus, base, tmp_path):
    recipe, folder = recipe_of(corpus, "", base=base, lora=lora, save_every=5, workers=1), tmp_path / "killed"
    whole = run_to_the_end(recipe, tmp_path / "whole")
    killed = Command(*words_of(recipe, folder), output=tmp_path / "said", before=die_at_step_7)
    with ended(killed):
        assert killed.wait() == -signal.SIGKILL, killed.printed()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-5"]
    again = run_to_the_end(recipe, folder)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    ("parallel", "lora", "precision"),
    [
        ("ddp", LORA, "fp32"),
        pytest.param("fsdp", LORA, "fp32", marks=pytest.mark.soak),
        ("fsdp", None, "fp32"),
        pytest.param("fsdp", LORA, "bf16", marks=pytest.mark.soak),  # slow on a CPU without bf16
    ],
)
def test_two_processes_learn_what_one_does(parallel, lora, precision, corpus, base, tmp_path):
    # Two texts per process and step. With bf16, frozen weights of it beside fp32 ones.
    keys = {"lora": lora, "eval_every": 0, "precision": precision, "batch": 4}
    alone = run_to_the_end(recipe_of(corpus, "", base=base, **keys), tmp_path / "alone")
    shared = recipe_of(corpus, "", base=base, **keys, parallel=parallel)
    both = ranks(2, *words_of(shared, tmp_path / "both"), output=tmp_path / "said")
    with ended(*both):
        assert [each.wait() for each in both] == [0, 0], both[0].printed() + both[1].printed()
    near = {"fp32": 1e-4, "bf16": 1e-2}[precision]
    assert loss_of(tmp_path / "both") == pytest.approx(loss_of(tmp_path / "alone"), rel=near)
    together = load_file(next((tmp_path / "both").glob("[am]*/*.safetensors")))
    assert together.keys() == alone.keys()
    assert all(torch.allclose(weight, alone[name], atol=30 * near) for name, weight in together.items())


def test_frozen_weights_need_fewer_operations():
    model, counts = tiny_model(), {"slots": 100, "pairs": 0, "asked": 0}
    free = Work.of(model).total(**counts)
    adapted, _ = add_lora(model, rank=2, alpha=4)
    added = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert Work.of(adapted).total(**counts) == pytest.approx(free * 4 / 6 + 6 * added * 100)


# ---- the command, and what it refuses -------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["finetune", *map(str, words)])


def small_words():
    keys = {name: value for name, value in SMALL.items() if name not in ("model", "steps", "lr")}
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--rank", "2"], {"method": "ac-gpt", "lora": NEW | {"rank": 2, "alpha": 4.0}}),
        (["--full"], {"lora": None}),
        (["--causal"], {"method": "gpt", "lora": NEW | {"rank": 16, "alpha": 32.0}}),
        (
            ["--r-max", "0.4", "--mix", "0.3", "--infilling", "0.2"],
            {"conditioning": {"r_max": 0.4, "empty": 0.3, "infilling": 0.2}},
        ),
    ],
)
def test_flags_are_short_for_keys_of_the_recipe(flags, expected, corpus, base, tmp_path):
    words = ("-b", base, "-c", corpus, "-o", tmp_path / "run", "--steps", "3", "--lr", "0.01", *flags)
    done = command(*words, *small_words(), "--json")
    assert done.exit_code == 0, done.stderr
    recipe = json.loads(done.stdout)["recipe"]
    assert {key: recipe[key] for key in expected} == expected
    assert (recipe["steps"], recipe["lr"], recipe["base"]) == (3, 0.01, str(base))


def test_options_are_taken_as_they_are_and_a_rank_takes_its_alpha_along(corpus, base, tmp_path):
    odd = tmp_path / "run #1: odd"
    words = ("-b", base, "-c", corpus, "-o", odd, "--steps", "2", *(w for w in small_words() if "warmup" not in w))
    assert command(*words, "--rank", "0").exit_code == 2
    done = command(*words, "lora.rank=2", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(odd) and odd.is_dir()
    assert json.loads(done.stdout)["recipe"]["lora"]["alpha"] == 4


def test_four_bits_of_a_packed_file_are_refused(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", base=tmp_path / "model.gguf", quantize="4bit")
    with pytest.raises(InputError, match="is packed already"):
        plan = settle(replaced(recipe, quantize=None), 100)
        load_pretrained(str(tmp_path / "model.gguf"), plan, frozen=True, quantize="4bit")


def test_only_recipes_with_a_base_are_listed():
    listed = json.loads(command("--list", "--json").stdout)
    assert "finetune-lora" in listed and "qwen3-14b-lora" in listed and "tiny-cpu" not in listed


def test_a_layer_that_is_not_there_is_no_target(corpus, base, tmp_path):
    with pytest.raises(InputError, match="no_such_layer"):
        train(recipe_of(corpus, tmp_path / "run", base=base, lora=LORA | {"targets": ["no_such_layer"]}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_four_bits_without_bitsandbytes_are_refused_with_the_way_on(corpus, base, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run", base=base, quantize="4bit")
    plan = replaced(settle(replaced(recipe, quantize=None), 100), device="cuda")
    monkeypatch.setattr("acgpt.training.networks.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs the package bitsandbytes: pip install bitsandbytes"):
        load_pretrained(str(base), plan, frozen=True, quantize="4bit")


def test_a_corpus_of_another_tokenizer_is_refused_with_the_way_on(corpus, base, tmp_path):
    other = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(InputError, match=f"prepare it with acgpt prepare … --tokenizer {other}"):
        train(recipe_of(corpus, tmp_path / "run", base=other), quiet=True)


def test_an_adapter_can_be_trained_further(corpus, base, tmp_path):
    """With a learning rate of nearly nothing, it stays what it was: its weights, and its head for lengths."""
    keys = {"conditioning": {"parts": [{"kind": "gaps", "lengths": 0.5, "passages": 2}]}, "eval_every": 0}
    train(recipe_of(corpus, tmp_path / "first", base=base, **keys, steps=4), quiet=True)
    start = tmp_path / "first" / "adapter"
    keys |= {"steps": 3, "lr": 1e-12, "lora": LORA | {"start": str(start)}}
    train(recipe_of(corpus, tmp_path / "next", base=base, **keys), quiet=True)
    for file in start.glob("*.safetensors"):
        before, after = (load_file(folder / file.name) for folder in (start, tmp_path / "next" / "adapter"))
        assert before.keys() == after.keys() and any(weight.abs().max() > 0 for weight in before.values())
        for name, weight in before.items():
            torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)
    assert len(list(start.glob("*.safetensors"))) == 2
    config = json.loads((tmp_path / "next" / "config.json").read_text())
    assert config["recipe"]["lora"]["start"] == str(start)


def test_a_reserved_token_can_stand_for_what_is_unknown(corpus, base, tmp_path):
    keys = {"conditioning": {"r_max": 0.6, "unknown": 0.3}, "mask": "<mask>", "steps": 3}
    train(recipe_of(corpus, tmp_path / "run", base=base, **keys), quiet=True)
    lm = acgpt.load(str(base), adapter=str(tmp_path / "run" / "adapter"))
    assert lm.mask == AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<mask>")


def test_a_run_folder_in_place_of_its_adapter_is_named_for_what_it_is(run):
    with pytest.raises(ModelError, match=r"folder of a training run.*its model is .*adapter"):
        acgpt.load(str(run))


def test_a_model_that_was_tuned_before_keeps_its_bos(corpus, base, tmp_path):
    lm = acgpt.load(str(base), bos="<eos>")
    LanguageModel(lm.model, lm.tokenizer, bos="<eos>").save_pretrained(tmp_path / "base")
    train(recipe_of(corpus, tmp_path / "run", base=tmp_path / "base", steps=3), quiet=True)
    assert Metadata.read(tmp_path / "run" / "adapter").bos_token_id == lm.tokenizer.eos_token_id


def test_arguments_become_keys_of_the_recipe_and_changes_have_the_last_word(monkeypatch):
    got = []
    monkeypatch.setattr("acgpt.training.train.train", lambda recipe, **options: got.append((recipe, options)))
    acgpt.finetune("default", "c", "o", steps=None, epochs=2, rank=4, mix=0.5, resume=True, **{"lora.dropout": 0.1})
    ((recipe, options),) = got
    assert (recipe.base, recipe.corpus, recipe.output, recipe.steps, recipe.epochs) == ("default", "c", "o", None, 2)
    assert (recipe.lora["rank"], recipe.lora["dropout"], recipe.conditioning["empty"]) == (4, 0.1, 0.5)
    assert options == {"resume": True, "quiet": False, "minutes": None}
