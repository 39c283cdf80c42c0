"""`--conditioning model` evaluates a model as it was trained; other r_max values are noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from models import tiny_model, tiny_tokenizer
from runs import SMALL, SPECIAL, write_corpus
from typer.testing import CliRunner

from acgpt import LanguageModel
from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation.dataset import trained_conditioning, trained_r_max
from acgpt.methods import method_of
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Conditioning, Infilling
from acgpt.training.recipe import load_recipe
from acgpt.training.train import build_evaluation_sets

TRAINED = {"r_max": 0.4, "b_max": 2, "empty": 0.3, "unknown": 0.1}
MIXED = {"parts": [{"kind": "blocks", "r_max": 0.2}, {"kind": "infilling", "r_max": 0.8}, {"kind": "empty"}]}
COMMANDS = pytest.mark.parametrize("command", ["evaluate", "generate"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by what their acgpt.json states: one conditioning, a mixture, none; or no acgpt.json."""
    tokenizer = tiny_tokenizer(**SPECIAL)
    metadata = {
        "tells": Metadata(conditioning=Conditioning.from_dict(TRAINED).as_dict()),
        "mixed": Metadata(conditioning=Conditioning.from_dict(MIXED).as_dict()),
        "gpt": Metadata(method="gpt"),
    }
    folders = {}
    for name in ("tells", "mixed", "gpt", "silent"):
        folders[name] = tmp_path_factory.mktemp(name)
        network = tiny_model(vocabulary=len(tokenizer), positions=40)
        LanguageModel(network, tokenizer, metadata=metadata.get(name)).save_pretrained(folders[name])
    (folders["silent"] / "acgpt.json").unlink()
    config = json.loads((folders["silent"] / "config.json").read_text())
    (folders["silent"] / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "acgpt"}))
    return folders


def run(command: str, model: Path, corpus: Path, folder: Path, *words: str, code: int = 0) -> Any:
    """Run a command on six texts of 31 tokens."""
    output = ["-o", str(folder / "out")] if command == "generate" else []
    asked = ["--split", "validation", "--length", "31", "--limit", "6", "--device", "cpu", "--modes", "training"]
    result = CliRunner().invoke(app, [command, str(model), str(corpus), *asked, *output, *words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@COMMANDS
def test_the_set_is_that_of_the_evaluation_at_the_end_of_training(command, corpus, models, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**SMALL, "conditioning": TRAINED}))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), [f"corpus={corpus}", f"output={tmp_path / 'run'}"])
    expected = build_evaluation_sets(recipe, Corpus.open(corpus), method_of("ac-gpt"))["final"]
    result = run(command, models["tells"], corpus, tmp_path, "--conditioning", "model", "--json")
    answer = json.loads(result.stdout)
    assert answer["set"]["hash"] == expected.hash
    assert (answer["set"]["r_max"], answer["trained_r_max"]) == (0.4, 0.4)
    assert "trained with" not in result.stderr


@COMMANDS
def test_another_r_max_than_the_models_own_is_said_and_json_stays_one_object(command, corpus, models, tmp_path):
    result = run(command, models["tells"], corpus, tmp_path, "--json")
    (line,) = result.stdout.splitlines()
    answer = json.loads(line)
    assert (answer["set"]["r_max"], answer["trained_r_max"]) == (0.6, 0.4)
    assert "note: asked at r_max 0.6, but the model was trained with r_max 0.4" in result.stderr
    assert "--conditioning model" in result.stderr


@COMMANDS
@pytest.mark.parametrize(
    ("model", "words", "shown"),
    [
        ("tells", ["--r-max", "0.4"], "r_max 0.4 as in training, set"),
        ("tells", ["--r-max", "0.2"], "r_max 0.2 (trained with 0.4), set"),
        ("mixed", ["--conditioning", "model"], "r_max 0.2, the first part of the training mixture, set"),
        ("mixed", ["--r-max", "0.4"], "r_max 0.4 (trained with a mixture of r_max 0.2 to 0.8), set"),
        ("gpt", ["--modes", "training-no-future"], "r_max 0.6, set"),
        ("silent", ["--modes", "training-no-future"], "r_max 0.6, set"),
    ],
)
def test_the_r_max_is_printed_beside_the_models_own(command, corpus, models, tmp_path, model, words, shown):
    result = run(command, models[model], corpus, tmp_path, *words)
    assert shown in result.stdout
    assert ("trained with" in result.stderr) == ("trained with" in shown)


@COMMANDS
@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("silent", [], "the model has no acgpt.json that states what was given in training: use --r-max"),
        ("gpt", [], "the model has no acgpt.json that states what was given in training: use --r-max"),
        ("tells", ["--r-max", "0.4"], "--conditioning model takes r_max from the model: omit --r-max 0.4."),
    ],
)
def test_a_model_that_cannot_say_it_and_an_r_max_beside_it_are_errors(
    command, corpus, models, tmp_path, model, words, message
):
    result = run(command, models[model], corpus, tmp_path, "--conditioning", "model", *words, code=2)
    assert message in result.stderr and result.stdout == "" and not (tmp_path / "out").exists()


def test_a_set_that_was_made_in_another_way_is_refused(corpus, models, tmp_path):
    path = tmp_path / "set.safetensors"
    arguments = ["--dataset", str(path), "--conditioning", "model"]
    run("evaluate", models["tells"], corpus, tmp_path, *arguments)
    run("evaluate", models["tells"], corpus, tmp_path, *arguments)  # it is there now, and is the model's
    path.unlink()
    run("evaluate", models["tells"], corpus, tmp_path, "--dataset", str(path))
    assert "omit --conditioning" in run("evaluate", models["tells"], corpus, tmp_path, *arguments, code=2).stderr


def test_the_first_part_with_a_size_is_asked():
    parts = {"parts": [{"kind": "empty"}, {"kind": "infilling", "r_max": 0.3, "unknown": 0.5}, {"kind": "blocks"}]}
    assert trained_conditioning(Metadata(conditioning=parts)) == Conditioning((Infilling(r_max=0.3),))
    with pytest.raises(InputError, match="states what was given in training"):
        trained_conditioning(Metadata(conditioning={"parts": [{"kind": "empty"}]}))


def test_a_conditioning_that_cannot_be_read_says_no_r_max():
    results = [trained_r_max(metadata) for metadata in (None, Metadata(), Metadata(conditioning={"rmax": 1}))]
    assert results == [None, None, None]
