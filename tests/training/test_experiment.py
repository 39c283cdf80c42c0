"""Experiments: what a file comes to, what is refused in it, and those that come with acgpt."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from runs import write_corpus
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.errors import InputError
from acgpt.experiments.experiment import BUILT_IN, Experiment, load_experiment, make
from acgpt.training.recipe import built_in, differences

ROOT = Path(__file__).resolve().parents[2]


NAMES = sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def made(output: Path | str = "out", **keys: Any) -> Experiment:
    content = {"recipe": "tiny-cpu", "output": str(output), "grid": {"seed": [0, 1]}}
    keys["set"] = {"conditioning": {"r_max": 0.6}} | keys.get("set", {})
    return make(content | keys, "mine.yaml")


def names(experiment: Experiment) -> list[str]:
    return [cell.name for cell in experiment.cells]


def run_cli(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["experiment", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


# ---- what a file comes to -------------------------------------------------------------------------------------------


def test_every_combination_is_a_cell_with_its_own_recipe_and_folder():
    grid = {"model": ["tiny", "small"], "conditioning.r_max": [0.2, 1.0], "seed": [0, 1, 2]}
    experiment = made(grid=grid, set={"corpus": "data/x", "steps": 50})
    assert len(experiment.cells) == 12 and len(set(names(experiment))) == 12
    assert names(experiment)[:4] == [f"tiny-r_max{r}-seed{s}" for r, s in ((0.2, 0), (0.2, 1), (0.2, 2), (1.0, 0))]
    last = experiment.cells[-1]
    assert (last.number, last.name, str(last.folder)) == (12, "small-r_max1.0-seed2", "out/small-r_max1.0-seed2")
    recipe = last.recipe
    assert (recipe.model, recipe.conditioning, recipe.seed) == ("small", {"r_max": 1.0}, 2)
    assert (recipe.corpus, recipe.steps, recipe.muon_lr) == ("data/x", 50, 0.005)


def test_the_command_of_a_cell_gives_its_recipe():
    from acgpt.training.recipe import load_recipe

    grid = {"model": [{"layers": 2, "width": 32, "heads": 4}], "lr": [1e-5], "mask": [None, "true"], "base": [""]}
    for cell in made(grid=grid, set={"corpus": "data/my corpus: 1", "conditioning": {"r_max": 0.3}}).cells:
        program, command, recipe, *changes, resume = shlex.split(cell.commands[0])
        assert (program, command, recipe, resume) == ("acgpt", "train", "tiny-cpu", "--resume")
        assert load_recipe(recipe, changes) == cell.recipe
        assert cell.recipe.lr == 1e-5 and cell.recipe.corpus == "data/my corpus: 1"


def test_a_key_may_depend_on_a_value_of_the_grid():
    (cell,) = made(grid={"optimizer": ["muon"]}, set={"muon_lr": 1e-3}).cells
    assert (cell.recipe.optimizer, cell.recipe.muon_lr) == ("muon", 1e-3)


def test_a_method_that_reads_no_future_is_trained_once_and_asked_at_every_r_max():
    grid = {"method": ["ac-gpt", "gpt"], "conditioning.r_max": [0.8, 0.2], "seed": [0]}
    experiment = made(grid=grid, set={"corpus": "c"}, evaluate={"splits": ["test", "validation"], "limit": 9})
    assert names(experiment) == ["ac-gpt-r_max0.8-seed0", "ac-gpt-r_max0.2-seed0", "gpt-seed0"]
    files = [[path.name for path in cell.outputs_of("evaluate")] for cell in experiment.cells]
    assert files[0] == ["test-r_max0.8-first9.json", "validation-r_max0.8-first9.json"]
    assert files[2] == [f"{split}-r_max{r}-first9.json" for split in ("test", "validation") for r in (0.2, 0.8)]
    command = experiment.cells[1].commands[1]
    assert command == (
        "acgpt evaluate out/ac-gpt-r_max0.2-seed0/model c --split test --r-max 0.2 --length 127 --seed 0 --limit 9 "
        "-o out/ac-gpt-r_max0.2-seed0/test-r_max0.2-first9.json"
    )
    base = made(grid={"seed": [0]}, set={"method": "gpt"}, evaluate={})
    assert [path.name for path in base.cells[0].outputs_of("evaluate")] == ["test-r_max0.6.json"]


def test_what_decides_an_evaluation_set_is_in_the_name_of_its_file():
    ways = [{}, {"limit": 5}, {"seed": 1}, {"conditioning": [{"b_max": 4}, {"b_max": 5}]}]
    paths = [path for way in ways for path in made(grid={"seed": [0]}, evaluate=way).cells[0].outputs_of("evaluate")]
    assert len(set(paths)) == len(paths) == 5
    (cell,) = made(grid={"seed": [0]}, evaluate={"splits": ["a/b"], "r_max": [1]}).cells
    assert [path.name for path in cell.outputs_of("evaluate")] == ["a_b-r_max1.json"]


def test_a_cell_is_evaluated_with_every_distribution():
    distributions = [None, {"placement": "stretches"}]
    base = made(grid={"seed": [0, 1]}, evaluate={"conditioning": distributions})
    paper, stretches = base.cells[0].commands[1:]
    assert "--conditioning" not in paper
    assert "--r-max 0.6" in stretches and """--conditioning '{"placement": "stretches"}'""" in stretches
    assert len(base.cells[1].outputs_of("evaluate")) == 2


def test_a_method_can_be_asked_in_further_ways():
    ways = {"sigma-gpt-random": ["order=random,seed=1", "orders=8"]}
    first, second = made(grid={"method": ["sigma-gpt-random", "gpt"]}, evaluate={"method_options": ways}).cells
    name = "test-r_max0.6-order_random_seed_1"
    assert [path.stem for path in first.outputs_of("evaluate")] == ["test-r_max0.6", name, "test-r_max0.6-orders_8"]
    options = "--method-option order=random --method-option seed=1"
    assert f" {options} -o out/sigma-gpt-random/{name}.json" in first.commands[2]
    assert len(second.outputs_of("evaluate")) == 1


def test_cells_of_methods_that_take_many_passes_can_be_compiled_and_others_are_not():
    grid, compiled = {"method": ["mlm", "ac-gpt", "diffusion"]}, {"compile": True}
    cells = made(grid=grid, evaluate=compiled, generate=compiled).cells
    for cell, times in zip(cells, (2, 0, 2), strict=True):
        assert sum(" --compile " in command for command in cell.commands) == times


def test_a_cell_draws_from_what_it_has_trained_at_the_r_max_it_is_evaluated_at():
    grid = {"method": ["ac-gpt", "gpt"], "conditioning.r_max": [0.8, 0.2]}
    wanted = {"splits": ["a", "b"], "limit": 200, "dtype": "bfloat16", "batch_tokens": 4096}
    experiment = made(grid=grid, set={"corpus": "c"}, evaluate={}, generate=wanted)
    folders = [[str(path) for path in cell.outputs_of("generate")] for cell in experiment.cells]
    assert folders[0] == [f"out/ac-gpt-r_max0.8/generations/{s}-r_max0.8-first200/index.json" for s in ("a", "b")]
    assert len(folders[2]) == 4  # one that reads no future, at every r_max
    assert experiment.cells[0].commands[2] == (
        "acgpt generate out/ac-gpt-r_max0.8/model c --split a --r-max 0.8 --length 127 --samples 1 "
        "--prompt 20 --top-p 0.95 --temperature 0.8 --seed 0 --set-seed 0 --limit 200 --dtype bfloat16 "
        "--batch-tokens 4096 "
        "-o out/ac-gpt-r_max0.8/generations/a-r_max0.8-first200"
    )
    (cell,) = made(grid={"seed": [0]}, generate={"modes": ["training", "infilling"], "seed": 10**7}).cells
    assert "--modes infilling,training --if-possible " in cell.commands[1] and "--seed 10000000 " in cell.commands[1]
    ways = [
        {}, {"limit": 5}, {"samples": 2}, {"prompt": 5}, {"top_p": 0.9}, {"temperature": 1}, {"seed": 1},
        {"set_seed": 1}, {"conditioning": [{"b_max": 4}, {"b_max": 5}]},
        {"modes": ["training"]}, {"modes": ["infilling"]},
    ]  # fmt: skip
    paths = [path for way in ways for path in made(grid={"seed": [0]}, generate=way).cells[0].outputs_of("generate")]
    assert len(set(paths)) == len(paths) == len(ways) + 1
    fast = load_experiment("wikitext103-fast").cells[0]  # all modes: no names of any
    assert [path.parent.name for path in fast.outputs_of("generate")] == ["validation-r_max0.6-first200"]


def test_what_a_cell_draws_is_scored_folder_by_folder_in_every_way():
    wanted = {"split": "test", "count": 200, "features": "a/b", "asked_only": True, "judge": "out/gpt/model"}
    drawn = {"splits": ["a", "b"], "limit": 10}
    experiment = made(grid={"method": ["ac-gpt"]}, set={"corpus": "c", "device": "cpu"}, generate=drawn, mauve=wanted)
    (cell,) = experiment.cells
    folders = [index.parent for index in cell.outputs_of("generate")]
    assert [path.parent for path in cell.outputs_of("mauve")] == [folder for folder in folders for _ in range(2)]
    whole, asked = cell.commands[3:5]
    folder = "out/ac-gpt/generations/a-r_max0.6-first10"
    judge, features = (hashlib.sha256(name.encode()).hexdigest()[:8] for name in ("out/gpt/model", "a/b"))
    index = f"{folder}/scores-split_test-count_200-judge_model-{judge}-features_b-{features}.json"
    assert whole == (
        f"acgpt mauve {folder} c --split test --count 200 --judge out/gpt/model --features a/b --device cpu --resume "
        f"--index {index}"
    )
    asked_index = f"{folder}/scores-asked_only-features_b-{features}.json"
    assert asked == f"acgpt mauve {folder} c --asked-only --features a/b --device cpu --resume --index {asked_index}"
    ways: list[dict[str, Any]] = [
        {}, {"split": "test"}, {"rule": "windows"}, {"length": 9}, {"skip": 0}, {"count": 10}, {"features": "a"},
        {"features": "x/a"}, {"features": "y/a"}, {"seeds": 1}, {"judge": "a"}, {"no_mauve": True},
    ]  # fmt: skip
    cells = [made(grid={"seed": [0]}, generate={}, mauve=way).cells[0] for way in ways]
    assert len({path for cell in cells for path in cell.outputs_of("mauve")}) == len(ways)


def test_an_adapter_is_evaluated_on_its_base_and_a_tuned_model_as_it_is():
    keys = {"recipe": "finetune-lora", "set": {"base": "me/base", "corpus": "c"}, "evaluate": {}}
    grids = ({"seed": [0]}, {"lora": [None]})
    (_, adapter), (_, whole) = (made(grid=grid, **keys).cells[0].commands for grid in grids)
    assert adapter.startswith("acgpt evaluate me/base c --adapter out/seed0/adapter --split test")
    assert whole.startswith("acgpt evaluate out/loranull/model c --split test")


def test_several_grids_are_one_experiment_and_a_cell_that_is_in_two_is_one():
    grid = [{"method": ["ac-gpt"], "seed": [0, 1]}, {"method": ["gpt", "ac-gpt"], "seed": [1]}]
    assert names(made(grid=grid)) == ["ac-gpt-seed0", "ac-gpt-seed1", "gpt-seed1"]


def test_more_values_leave_the_names_of_the_others_as_they_are():
    assert set(names(made())) < set(names(made(grid={"seed": [2, 1, 0]})))


@pytest.mark.parametrize(
    ("scored", "words"),
    [
        ({"split": "tset"}, "tset"),
        ({"features": "nowhere"}, "mauve.features: cannot load nowhere"),
        ({}, "pip install 'acgpt[mauve]'"),
    ],
)
def test_what_could_not_be_scored_is_found_before_training(tmp_path, monkeypatch, scored, words):
    corpus = write_corpus(tmp_path / "corpus")
    file = tmp_path / "mine.yaml"
    # mauve-text is there but in the last case: to Python, None is a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "mauve", None if "pip" in words else ModuleType("mauve"))
    content = {
        "recipe": "tiny-cpu", "output": str(tmp_path / "out"), "grid": {"seed": [0]}, "mauve": scored,
        "set": {"corpus": str(corpus), "length": 31}, "generate": {"splits": ["validation"], "limit": 10},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(content))
    output = run_cli(file, code=2).stderr
    assert words in output and not (tmp_path / "out").exists()
    if "pip" in words:
        assert "no_mauve" in output and "--no-scoring" in output
        (cell,) = json.loads(run_cli(file, "--no-scoring", "--list", "--json").stdout)["cells"]
        assert (cell["generations"], cell["scores"]) == (1, 0)
        assert run_cli(file, "--no-scoring", "--print-commands").stdout.endswith("--no-scoring --only seed0\n")


def test_a_recipe_beside_the_file_is_found_from_anywhere(tmp_path):
    (tmp_path / "base.yaml").write_text("steps: 7\nwarmup: 1\n")
    (tmp_path / "mine.yaml").write_text("recipe: base.yaml\noutput: out\ngrid: {seed: [0]}\n")
    (cell,) = load_experiment(tmp_path / "mine.yaml", ["corpus=x: y"], tmp_path / "other").cells
    assert (cell.recipe.steps, cell.recipe.corpus, cell.folder) == (7, "x: y", tmp_path / "other" / "seed0")


def test_cells_are_chosen_by_number_name_and_pattern():
    experiment = made(grid={"method": ["ac-gpt", "gpt"], "seed": [0, 1]})
    assert [cell.name for cell in experiment.chosen(["2", "gpt-*"])] == ["ac-gpt-seed1", "gpt-seed0", "gpt-seed1"]
    assert [cell.name for cell in experiment.chosen(["gpt-seed1"])] == ["gpt-seed1"]
    assert len(experiment.chosen()) == 4
    with pytest.raises(InputError, match="there is no cell 0"):
        experiment.chosen(["0"])


# ---- those that come with acgpt -------------------------------------------------------------------------------------


def test_the_experiments_are_there():
    coverage = {"coverage-arbitrary", "coverage-infilling", "coverage-sigma-loss"}
    papers = {"wikitext103-ablation", "fineweb-from-scratch", "finetuning-r-max", "paper-table"}
    assert set(built_in(BUILT_IN)) == papers | coverage | {"wikitext103-fast", "tiny-cpu"}
    assert all(20 < len(words) <= 115 for words in built_in(BUILT_IN).values())
    assert json.loads(run_cli("--list", "--json").stdout) == built_in(BUILT_IN)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_says_how_its_corpus_is_made_and_its_cells_can_be_trained(name):
    text, experiment = (BUILT_IN / f"{name}.yaml").read_text(), load_experiment(name)
    (command,) = (line for line in text.splitlines() if line.startswith("#     acgpt prepare "))
    made = command.split("-o ")[1]
    words = f" corpus={made}" if made == "data/mine" else ""  # any corpus of one's own
    assert {cell.recipe.corpus for cell in experiment.cells} == {"" if words else made}
    assert f"#     acgpt experiment {name}{words}" in text and experiment.output == f"results/{name}"
    assert all(len(line) <= 120 for line in text.splitlines())
    assert experiment.cells and all(cell.outputs_of("evaluate") for cell in experiment.cells)
    assert f"`{name}`" in (ROOT / "docs" / "how-to" / "compare.md").read_text()


def test_the_ablation_is_the_papers():
    paper = paper_numbers("from_scratch")
    rows = [row for row in paper["perplexities"] if row["corpus"] == "WikiText-103"]
    grid = yaml.safe_load((BUILT_IN / "wikitext103-ablation.yaml").read_text())["grid"]
    for key, name in (("model", "model"), ("conditioning.r_max", "r_max"), ("method", "method")):
        assert {row[name] for row in rows} <= set(grid[key])
    assert grid["seed"] == [0, 1, 2] and set(grid["method"]) == set(paper["methods"])
    experiment = load_experiment("wikitext103-ablation")
    causal = [cell for cell in experiment.cells if cell.recipe.method == "gpt"]
    assert len(causal) == 9 and all(len(cell.outputs_of("evaluate")) == 2 * 5 for cell in causal)
    assert all((len(cell.outputs_of("generate")), len(cell.outputs_of("mauve"))) == (5, 2 * 5) for cell in causal)
    drawn, scored = experiment.generate, experiment.mauve
    assert (drawn.splits, drawn.limit, drawn.prompt, drawn.top_p, drawn.temperature) == (
        ("validation",), None, 20, 0.95, 0.8,
    )  # fmt: skip
    assert (scored.split, scored.count, scored.features) == ("test", 200, None)


def paper_numbers(name: str) -> Any:
    return json.loads((ROOT / "src" / "acgpt" / "report" / "paper" / f"{name}.json").read_text())


def test_the_experiment_on_fineweb_is_the_papers_table():
    experiment = load_experiment("fineweb-from-scratch")
    for table in ("perplexities", "mauve"):
        numbers = paper_numbers("from_scratch" if table == "perplexities" else table)
        rows = [row for row in numbers[table] if row["corpus"] == "FineWeb"]
        assert {(row["method"], row["model"], row["r_max"]) for row in rows} == {
            (cell.recipe.method, cell.recipe.model, cell.recipe.distribution.r_max) for cell in experiment.cells
        }
    methods = ["ac-gpt", "sigma-gpt-temporal", "sigma-gpt-random", "gpt"]
    assert names(experiment) == [f"{method}-seed{seed}" for method in methods for seed in range(3)]
    drawn, scored = experiment.generate, experiment.mauve
    assert (experiment.evaluate.limit, drawn.limit, scored.count, scored.rule) == (1000, 1000, 1000, "documents")
    assert scored.skip == 1000 * 1024 and scored.asked_only  # of other documents than the prompts
    assert [len(cell.outputs_of("evaluate")) for cell in experiment.cells] == [1] * 6 + [2] * 3 + [1] * 3  # both orders


def test_the_experiment_on_finetuning_is_the_papers_curve():
    experiment, paper = load_experiment("finetuning-r-max"), paper_numbers("finetuning")["sweep"]
    *tuned, twin = experiment.cells
    r_maxes = [cell.recipe.distribution.r_max for cell in tuned]
    assert r_maxes == [0.2, 0.4, 0.6, 0.8, 1.0] and {row["r_max"] for row in paper} <= set(r_maxes)
    for row in paper:
        assert all(cell.recipe.base == f"Qwen/{row['backbone']}" for cell in experiment.cells)
        assert all(f"LoRA r={cell.recipe.lora['rank']}" == row["adapter"] for cell in experiment.cells)
    for cell in tuned:
        assert set(differences(cell.recipe.as_dict(), twin.recipe.as_dict())) <= {"method", "conditioning", "output"}
    assert [path.name for path in twin.outputs_of("evaluate")] == [
        f"{split}-r_max{r_max:g}.json" for split in ("validation", "test") for r_max in r_maxes
    ]


def test_every_key_of_an_experiment_is_in_the_documentation_with_its_meaning():
    text = (ROOT / "docs" / "reference" / "experiments.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text.partition("\n## ")[0], flags=re.MULTILINE)
    meanings = " ".join(f"{key}: {meaning}" for key, meaning in rows)
    assert [key for key, _ in rows] == [each.name for each in fields(Experiment)]
    assert meanings == " ".join(Experiment.__doc__.partition("Args:")[2].split())
