"""The public functions: imported when they are used, and the same as the commands of their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_model, tiny_tokenizer
from runs import SPECIAL, write_corpus
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app

OF_A_RUN = ("seconds", "date", "command")  # what differs from run to run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    acgpt.LanguageModel(
        tiny_model("gpt_neox", vocabulary=340, positions=32), tiny_tokenizer(**SPECIAL), metadata=acgpt.Metadata()
    ).save_pretrained(folder)
    return folder


def run(*words: object) -> dict:
    done = CliRunner().invoke(app, [*map(str, words), "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def lasting(result: dict) -> dict:
    kept = {key: value for key, value in result.items() if key not in OF_A_RUN}
    return json.loads(json.dumps(kept))


@pytest.mark.parametrize("name", acgpt.__all__)
def test_every_public_name_is_there(name):
    assert getattr(acgpt, name) is not None and name in dir(acgpt)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'evaluates'"):
        _ = acgpt.evaluates


def test_evaluate_returns_what_the_command_prints(model, corpus):
    printed = run("evaluate", model, corpus, "--limit", 3)
    assert lasting(acgpt.evaluate(model, corpus, limit=3, device="cpu")) == lasting(printed)


def test_a_model_that_is_loaded_is_evaluated_as_its_folder_is(model, corpus):
    named, loaded = (acgpt.evaluate(each, corpus, limit=3) for each in (model, acgpt.load(model)))
    assert loaded["modes"] == named["modes"] and loaded["model"] == str(model)


def test_evaluate_notes_an_r_max_that_is_not_the_models(model, corpus, tmp_path):
    network, tokenizer = tiny_model("gpt_neox", vocabulary=340, positions=32), tiny_tokenizer(**SPECIAL)
    trained = acgpt.Metadata(conditioning={"r_max": 0.4})
    notes: list[str] = []
    lm = acgpt.LanguageModel(network, tokenizer, metadata=trained)
    assert acgpt.evaluate(lm, corpus, limit=2, note=notes.append)["trained_r_max"] == 0.4
    assert len(notes) == 1 and "asked at r_max 0.6" in notes[0] and "r_max 0.4" in notes[0]


def test_generate_writes_what_the_command_writes(model, corpus, tmp_path):
    words = ("--limit", 2, "--prompt", 4, "--modes", "infilling", "-o", tmp_path / "command")
    printed = run("generate", model, corpus, *words)
    given = {"limit": 2, "prompt": 4, "modes": ["infilling"], "device": "cpu"}
    returned = acgpt.generate(model, corpus, tmp_path / "function", **given)
    samples = [(tmp_path / each / "infilling.jsonl").read_bytes() for each in ("command", "function")]
    assert samples[0] == samples[1] and list(printed["modes"]) == list(returned["modes"]) == ["infilling"]


def test_a_recipe_that_is_loaded_is_changed_as_a_named_one_is(corpus, tmp_path):
    from acgpt.training.recipe import load_recipe

    changes = {"output": tmp_path, "epochs": 1.0, "conditioning.r_max": 0.3}
    assert load_recipe(load_recipe("tiny-cpu"), changes) == load_recipe("tiny-cpu", changes)
    assert load_recipe(load_recipe("tiny-cpu"), {"steps": 5}) == load_recipe("tiny-cpu", {"steps": 5})


def test_finetune_teaches_a_model_through_an_adapter(corpus, tmp_path):
    tokenizer = acgpt.data.corpus.Corpus.open(corpus).tokenizer()
    base = tmp_path / "base"
    tiny_model("llama", vocabulary=len(tokenizer), positions=64).save_pretrained(base)
    tokenizer.save_pretrained(base)
    keys = {"length": 31, "steps": 2, "warmup": 1, "batch": 4, "workers": 0, "device": "cpu", "final_texts": 2}
    results = acgpt.finetune(base, corpus, tmp_path / "run", rank=2, r_max=0.4, quiet=True, **keys)
    assert results["recipe"]["lora"]["rank"] == 2 and results["recipe"]["conditioning"]["r_max"] == 0.4
    assert acgpt.load(base, adapter=tmp_path / "run" / "adapter").reads_future


@pytest.fixture
def samples(model, corpus, tmp_path) -> Path:
    options = {"split": "validation", "limit": 12, "prompt": 4, "modes": ["infilling"], "device": "cpu"}
    acgpt.generate(model, corpus, tmp_path / "samples", **options)
    return tmp_path / "samples"


def test_score_samples_returns_what_the_command_prints(samples, corpus):
    printed = run("mauve", samples, corpus, "--no-mauve", "--limit", 10)
    ((path, returned),) = acgpt.score_samples(samples, corpus, no_mauve=True, limit=10, device="cpu").items()
    assert lasting(returned) == lasting(printed) and lasting(json.loads(path.read_text())) == lasting(printed)


def test_an_error_about_the_seed_of_a_set_names_the_option_that_it_is(model, corpus, tmp_path):
    made = tmp_path / "set.safetensors"
    acgpt.evaluate(model, corpus, dataset=made, limit=2, device="cpu")
    with pytest.raises(acgpt.InputError, match="has seed 0, not 1: omit `seed`, or"):
        acgpt.evaluate(model, dataset=made, seed=1, device="cpu")
    with pytest.raises(acgpt.InputError, match="has seed 0, not 1: omit `set_seed`, or"):
        acgpt.generate(model, None, tmp_path / "samples", dataset=made, set_seed=1, device="cpu")
    words = ["generate", model, "--dataset", made, "--set-seed", 1, "-o", tmp_path / "samples", "--device", "cpu"]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 2 and "has seed 0, not 1: omit --set-seed, or" in " ".join(done.stderr.split())


# ---- threads of OpenMP -----------------------------------------------------------------------------------------------

SPINNING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment in which only these variables say how threads wait."""
    kept = {name: value for name, value in os.environ.items() if name not in SPINNING}
    env = kept | {"PYTHONPATH": str(Path(acgpt.__file__).parents[1])} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("env", "before", "after"),
    [
        ({}, "", {"GOMP_SPINCOUNT": "500", "KMP_BLOCKTIME": "0"}),
        ({"GOMP_SPINCOUNT": "7"}, "", {"GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "0"}),
        ({"KMP_BLOCKTIME": "7"}, "", {"GOMP_SPINCOUNT": "500", "KMP_BLOCKTIME": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, "", {"OMP_WAIT_POLICY": "active"}),
        ({}, "import sys; sys.modules['torch'] = object()", {}),
    ],
    ids=["nothing is set", "GNU's is set", "Intel's is set", "a policy is set", "torch is loaded"],
)
def test_importing_acgpt_limits_how_long_threads_spin_unless_that_is_decided(env, before, after):
    report = "import json, os; print(json.dumps(dict(os.environ)))"
    found = json.loads(python(f"{before}\nimport acgpt\n{report}", **env).stdout)
    assert {name: found[name] for name in SPINNING if name in found} == after


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another runtime")
def test_the_runtime_of_openmp_reads_the_limit():
    shown = python("import acgpt; import torch", OMP_DISPLAY_ENV="verbose").stderr  # it prints its settings when loaded
    assert "GOMP_SPINCOUNT = '500'" in shown
