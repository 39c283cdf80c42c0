"""Folders that version 0.1.0 wrote before its modules became packages still open, and work on them goes on.

`folders-of-0.1.0.tar.xz` holds, of one layer of width 8 on texts of 15 tokens:

    corpus/       acgpt prepare text.txt --validation 0.1 --train-tokenizer 280 -o corpus
    run/          acgpt train tiny-cpu …, finished, and acgpt evaluate run/model corpus --limit 4 -o run/validation.json
    stopped/      the same training, stopped by SIGTERM at its third step of six
    tuned/        acgpt finetune -b run/model lora.rank=2 …
    samples/      acgpt generate run/model corpus --limit 2 --prompt 4 --modes unconditional,infilling
    experiment/   acgpt experiment exp.yaml --only 2: one cell of two, done
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.training.recipe import make

ARCHIVE = Path(__file__).with_name("folders-of-0.1.0.tar.xz")
CLOSE = 1e-4  # relative; other CPUs round otherwise


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the folders into the current directory, because they name each other by relative paths."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def read(path: str) -> dict:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def perplexities(evaluation: dict) -> dict[str, float]:
    return {mode: result["perplexity"] for mode, result in evaluation["modes"].items()}


def test_a_corpus_of_before_opens_with_all_its_tokens(folders):
    corpus = Corpus.open("corpus")
    tokens = corpus.tokens("train")
    assert len(tokens) == read("corpus/corpus.json")["splits"]["train"]["tokens"] == 8770
    assert corpus.tokenizer().decode(tokens[:8].tolist())


def test_a_model_of_before_has_the_perplexities_that_were_measured_then(folders):
    content = json.loads(run("evaluate", "run/model", "corpus", "--limit", "4", "--json"))
    assert content["set"]["hash"] == read("run/validation.json")["set"]["hash"]
    assert perplexities(content) == pytest.approx(perplexities(read("run/validation.json")), rel=CLOSE)


def test_an_adapter_of_before_has_the_perplexities_that_were_measured_then(folders):
    words = ("evaluate", "run/model", "corpus", "--adapter", "tuned/adapter", "--limit", "4", "--json")
    assert perplexities(json.loads(run(*words))) == pytest.approx(
        perplexities(read("tuned/results.json")["evaluation"]), rel=CLOSE
    )


def test_a_run_stopped_before_ends_as_the_one_that_was_not(folders):
    recipe = make(read("stopped/config.json")["recipe"], "stopped")
    results = acgpt.train(recipe, resume=True, quiet=True)
    assert results["steps"] == 6
    assert results["loss"] == pytest.approx(read("run/results.json")["loss"], rel=CLOSE)
    assert perplexities(results["evaluation"]) == pytest.approx(
        perplexities(read("run/results.json")["evaluation"]), rel=CLOSE
    )


def test_generations_of_before_are_kept_and_the_missing_modes_are_drawn(folders):
    before = {path.name: path.read_bytes() for path in Path("samples").glob("*.jsonl")}
    assert set(before) == {"unconditional.jsonl", "infilling.jsonl"}
    words = ("--split", "validation", "--limit", "2", "--prompt", "4", "-o", "samples")
    run("generate", "run/model", "corpus", *words)
    after = {path.name: path.read_bytes() for path in Path("samples").glob("*.jsonl")}
    assert len(after) == 5 and {name: after[name] for name in before} == before


def test_an_experiment_of_before_has_its_cells_as_they_were(folders):
    listed = json.loads(run("experiment", "exp.yaml", "--list", "--json"))
    assert [(cell["cell"], cell["state"]) for cell in listed["cells"]] == [("ac-gpt", "waiting"), ("gpt", "done")]


def test_runs_of_before_can_be_reported(folders):
    run("report", "run", "experiment", "-o", "report")
    assert {each["name"] for each in read("report/report.json")["runs"]} == {"run", "gpt"}
