"""Recipes: those that come with acgpt work, and a mistake in one's own is found before anything is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from runs import write_base

from acgpt.errors import InputError
from acgpt.models.loading import DEFAULT_ADAPTER
from acgpt.query.conditioning import Blocks, Conditioning, Empty
from acgpt.training.learner import new_model
from acgpt.training.recipe import (
    BELONGS,
    BUILT_IN,
    SHAPES,
    Recipe,
    Shape,
    built_in,
    differences,
    load_recipe,
    make,
)
from acgpt.training.train import train

pytestmark = pytest.mark.usefixtures("without_curves")

NAMES = sorted(path.stem for path in BUILT_IN.glob("*.yaml"))
ROOT = Path(__file__).resolve().parents[2]


def made(**keys):
    return make({"steps": 1000} | keys, "mine.yaml")


def file_of(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


# ---- those that come with acgpt -------------------------------------------------------------------------------------


def test_the_recipes_are_there():
    scratch = {"wikitext103-small", "wikitext103-base", "wikitext103-medium", "wikitext103-small-fast", "fineweb-base"}
    qwen3 = {f"qwen3-{size}-lora" for size in ("1.7b", "8b", "14b", "32b")}
    llama = {f"llama-3.1-8b-{kind}" for kind in ("lora", "full", "lora-fineweb")}
    assert set(built_in()) == {
        *scratch, *qwen3, *llama, "tiny-cpu", "finetune-lora", "finetune-full", "default-adapter"
    }  # fmt: skip
    assert all(20 < len(words) <= 115 for words in built_in().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_how_its_corpus_is_made_and_names_it_or_asks_for_any(name):
    text, recipe = (BUILT_IN / f"{name}.yaml").read_text(), load_recipe(name)
    (command,) = (line for line in text.splitlines() if line.startswith("#     acgpt prepare "))
    made, words = command.split("-o ")[1], ""
    if made == "data/mine":  # any corpus of one's own
        words = f" -c {made}" if recipe.base else f" corpus={made}"
    assert recipe.corpus == ("" if words else made)
    assert f"#     acgpt {'finetune' if recipe.base else 'train'} {name}{words}\n" in text
    assert recipe.output == f"runs/{name}"
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("wikitext103-small", 81.1),
        ("wikitext103-small-fast", 81.1),
        ("wikitext103-base", 123.7),
        ("wikitext103-medium", 202.6),
        ("fineweb-base", 123.7),
    ],
)
def test_a_recipe_builds_a_model_of_the_size_that_it_states(name, millions):
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = new_model(recipe.shape, vocabulary=50257, positions=recipe.length + 1)
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert f"{millions} M parameters" in built_in()[name]


@pytest.mark.parametrize("name", ["wikitext103-small", "wikitext103-base", "wikitext103-medium", "fineweb-base"])
def test_the_reference_recipes_have_the_hyperparameters_of_the_reference(name):
    recipe = load_recipe(name)
    assert (recipe.optimizer, recipe.lr, recipe.betas, recipe.weight_decay, recipe.clip) == (
        "adamw", 5e-4, (0.9, 0.999), 0.1, 1.0
    )  # fmt: skip
    assert (recipe.warmup, recipe.schedule, recipe.lr * recipe.final_lr) == (2000, "cosine", pytest.approx(5e-5))
    assert (recipe.batch, recipe.length, recipe.steps, recipe.dropout) == (128, 1023, 18200, 0.1)
    assert recipe.distribution == Conditioning((Blocks(r_max=0.4 if name == "fineweb-base" else 0.6),))


@pytest.mark.parametrize(("name", "rank"), [("qwen3-8b-lora", 8), ("llama-3.1-8b-lora", 64), ("llama-3.1-8b-full", 0)])
def test_the_recipes_for_the_papers_backbones_are_the_papers_configurations(name, rank):
    recipe = load_recipe(name)
    assert recipe.distribution == Conditioning((Blocks(r_max=0.6),))
    assert (recipe.adapter.rank if recipe.adapter else 0) == rank
    assert "Memory, by arithmetic and not measured" in (BUILT_IN / f"{name}.yaml").read_text()


def test_fineweb_is_mixed_with_a_tenth_of_nothing_given():
    assert dict(load_recipe("llama-3.1-8b-lora-fineweb").conditioning) == {"r_max": 0.6, "empty": 0.1}


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"), corpus, "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_a_shrunken_copy_of_a_recipe_runs(name, corpus, pretrained, tmp_path):
    small = {
        "corpus": corpus, "output": tmp_path / "run", "model": "{layers: 1, width: 32, heads: 4}", "length": 31,
        "steps": 2, "batch": 4, "micro_batch": 2, "warmup": 1, "device": "cpu", "workers": 0, "eval_texts": 2,
        "final_texts": 2,
    }  # fmt: skip
    if load_recipe(name).base:
        small |= {"base": pretrained, "parallel": "ddp"}  # the latter of which is tested in test_finetune
    if load_recipe(name).adapter is not None and load_recipe(name).adapter.start:
        small["lora.start"] = "null"  # an adapter of another base
    if load_recipe(name).mask:
        small["mask"] = "null"  # this tokenizer has a MASK of its own
    results = train(load_recipe(name, [f"{key}={value}" for key, value in small.items()]), quiet=True)
    assert results["steps"] == 2
    assert math.isfinite(results["loss"])
    assert results["recipe"]["conditioning"] == dict(load_recipe(name).conditioning)


def test_the_recipe_of_the_embedded_adapter_is_the_one_that_it_was_made_with():
    recipe = load_recipe("default-adapter")
    content = json.loads((DEFAULT_ADAPTER / "acgpt.json").read_text())
    assert Conditioning.from_dict(content["conditioning"]) == recipe.distribution
    config = json.loads((DEFAULT_ADAPTER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (recipe.adapter.rank, recipe.adapter.alpha)


# ---- files and changes ----------------------------------------------------------------------------------------------


def test_fewer_steps_take_the_warm_up_along():
    assert load_recipe("wikitext103-small", ["steps=50"]).warmup == 5
    assert load_recipe("wikitext103-small", ["steps=5000"]).warmup == 2000


def test_the_log_and_the_end_of_the_laptop_recipe_measure_on_the_same_texts():
    recipe = load_recipe("tiny-cpu")
    assert recipe.eval_texts == recipe.final_texts and (recipe.steps or 0) % recipe.eval_every == 0


def test_a_recipe_is_found_by_its_name_or_as_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("tiny-cpu") == load_recipe("tiny-cpu.yaml") == load_recipe(BUILT_IN / "tiny-cpu.yaml")
    (tmp_path / "tiny-cpu").mkdir()  # a folder of that name, of a run say, is no recipe
    assert load_recipe("tiny-cpu").model == "tiny"
    assert load_recipe(file_of(tmp_path, "steps: 7\nwarmup: 1\nmodel: base")).steps == 7


def test_a_recipe_round_trips_through_yaml_and_json():
    for name in NAMES:
        recipe = load_recipe(name)
        assert make(yaml.safe_load(yaml.safe_dump(recipe.as_dict())), "again") == recipe


def test_changes_replace_values_and_reach_into_mappings(tmp_path):
    path = file_of(tmp_path, "steps: 700\nconditioning: {r_max: 0.6, empty: 0.1}\nlr: 1e-3")
    changes = ["conditioning.r_max=0.4", "lr=5e-4", "model.layers=2", "model.width=64", "betas=[0.8, 0.9]"]
    recipe = load_recipe(path, [*changes, "model.heads=4", "seed=3", "compile=false", "output=a=b"])
    assert recipe.distribution == Conditioning((Blocks(r_max=0.4), Empty()), (0.9, 0.1))
    assert (recipe.lr, recipe.shape, recipe.betas, recipe.seed) == (5e-4, Shape(2, 64, 4), (0.8, 0.9), 3)
    assert (recipe.compile, recipe.output, recipe.steps) == (False, "a=b", 700)


def test_a_change_takes_along_what_it_makes_meaningless(tmp_path):
    path = file_of(tmp_path, "epochs: 3\noptimizer: muon\nmuon_lr: 0.01\nschedule: linear\ncooldown: 0.5\nfinal_lr: 0")
    assert load_recipe(path).muon_lr == 0.01
    recipe = load_recipe(path, ["steps=900", "optimizer=adamw", "schedule=cosine"])
    assert (recipe.steps, recipe.epochs, recipe.muon_lr, recipe.cooldown, recipe.final_lr) == (900, None, None, None, 0)
    assert load_recipe(path, ["schedule=constant"]).final_lr is None
    assert load_recipe(path, ["optimizer=muon"]).muon_lr == 0.01
    path = file_of(tmp_path, "steps: 700\nmethod: sigma-gpt-random\ntarget_positions: table")
    kinds = [load_recipe(path, [f"method={name}"]).target_positions for name in ("sigma-gpt-temporal", "mlm")]
    assert kinds == ["table", None]


# ---- what a recipe may say ------------------------------------------------------------------------------------------


OUTSIDE = {
    "weight_decay": -1, "clip": -0.1, "warmup": -1, "workers": -1, "eval_every": -1, "steps": 0, "batch": 0,
    "micro_batch": 0, "log_every": 0, "save_every": 0, "keep": 0, "eval_texts": 0, "final_texts": 0, "length": 1,
    "epochs": 0, "lr": 0, "muon_lr": math.nan, "dropout": 1.0, "attention_dropout": -0.1, "betas": [0.9, 1.0],
    "final_lr": 1.1, "cooldown": 0, "seed": 2**32,
}  # fmt: skip


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_value_out_of_its_range_is_refused(key):
    beside = {"epochs": {"steps": None}, "muon_lr": {"optimizer": "muon"}, "cooldown": {"schedule": "linear"}}
    with pytest.raises(InputError, match=f"mine.yaml: {key} must be "):
        made(**({"warmup": 0} | beside.get(key, {}) | {key: OUTSIDE[key]}))


def test_every_number_has_a_range():
    numbers = {each.name for each in fields(Recipe) if "int" in str(each.type) or "float" in str(each.type)}
    assert numbers == {each.name for each in fields(Recipe) if str(each.metadata["range"])} == set(OUTSIDE)


def test_what_is_left_out_has_its_default_where_it_applies_and_none_where_not():
    plain = made()
    assert (plain.muon_lr, plain.cooldown, plain.final_lr) == (None, None, 0.1)
    assert (made(optimizer="muon").muon_lr, made(schedule="linear").cooldown) == (2e-3, 1.0)
    assert made(schedule="constant").final_lr is None
    assert plain.target_positions is None
    assert {made(method=f"sigma-gpt-{order}").target_positions for order in ("temporal", "random")} == {"rotary"}
    assert set(BELONGS) == {"muon_lr", "cooldown", "final_lr", "target_positions"}


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path):
    recipe = load_recipe(file_of(tmp_path, "steps: 1000\nlr: 5e-4\nbetas: [9e-1, 0.95]\nweight_decay: 1"))
    assert (recipe.lr, recipe.betas, recipe.weight_decay) == (5e-4, (0.9, 0.95), 1.0)


def test_shapes_have_names_and_can_be_written_out():
    assert made(model="base").shape == SHAPES["base"] == Shape(12, 768, 12)
    assert made(model={"layers": 3, "width": 48, "heads": 4}).shape == Shape(3, 48, 4)
    assert made(model={"layers": 3}).shape == Shape(3, 768, 12)


def test_a_resumed_run_may_differ_in_what_changes_neither_weights_nor_results():
    one = made(corpus="a", output="b", micro_batch=2, workers=1, log_every=3, save_every=4, keep=5)
    assert differences(one.as_dict(), made().as_dict()) == []
    assert differences(made(seed=1, lr=1e-3).as_dict(), made().as_dict()) == ["lr", "seed"]
    free = {"corpus", "output", "micro_batch", "workers", "log_every", "save_every", "keep"}
    for each in fields(Recipe):
        changed = made().as_dict() | {each.name: "otherwise"}
        assert differences(changed, made().as_dict()) == ([] if each.name in free else [each.name])


def test_the_documentation_names_every_recipe_and_every_configuration():
    text = (ROOT / "docs" / "reference" / "recipes.md").read_text()
    for name in NAMES:
        assert f"`{name}`" in text or f"`-{name.split('-')[1]}`" in text
        if load_recipe(name).base:
            assert f"`{name}`" in (ROOT / "docs" / "how-to" / "adapt.md").read_text()
    for path in (ROOT / "configs").iterdir():
        assert f"configs/{path.name}" in (ROOT / "docs" / "how-to" / "many-gpus.md").read_text()


def test_changes_by_key_come_to_the_recipe_that_the_same_changes_in_words_do():
    words = ["steps=20", "conditioning.r_max=0.4", "optimizer=adamw", "output=runs/1e3", "lr=5e-4"]
    values = {"steps": 20, "conditioning.r_max": 0.4, "optimizer": "adamw", "output": Path("runs/1e3"), "lr": 5e-4}
    assert load_recipe("tiny-cpu", values) == load_recipe("tiny-cpu", words)
