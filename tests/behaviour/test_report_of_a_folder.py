"""The report of a fixed folder of runs: its tables and pages as text, its data, its output, its figures by name."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from record import check
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.report import write
from acgpt.report.write import make_report
from acgpt.version import __version__

MODES = ("unconditional", "infilling", "training", "infilling-no-future", "training-no-future")
LORA = {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": None}
# What a run is: its folder, method, base, seed, r_max, and its perplexities in the five modes.
RUNS: list[tuple[str, str, str, int, float, tuple[float | None, ...]]] = [
    ("ac-0", "ac-gpt", "", 0, 0.6, (24.0, 22.0, 19.0, 23.0, 23.5)),
    ("ac-1", "ac-gpt", "", 1, 0.6, (24.6, 22.5, 19.1, 23.2, 23.9)),
    ("ac-wide", "ac-gpt", "", 0, 0.8, (25.0, 23.0, 18.0, 24.0, 24.5)),
    ("gpt-0", "gpt", "", 0, 0.6, (23.0, None, None, 22.5, 23.0)),
    ("sigma", "sigma-gpt-random", "", 0, 0.6, (30.0, 29.0, 27.0, 29.5, 29.9)),
    ("diffusion", "diffusion", "", 0, 0.6, (60.0, 50.0, 40.0, None, None)),
    ("tuned", "ac-gpt", "Qwen/Qwen3-8B", 0, 0.6, (7.5, 6.85, 6.17, 7.12, 7.38)),
    ("twin", "gpt", "Qwen/Qwen3-8B", 0, 0.6, (7.25, None, None, 6.95, 7.25)),
]


def write_run(folder: Path, method: str, base: str, seed: int, r_max: float, perplexities: tuple[Any, ...]) -> None:
    """Write the folder of a finished run, as docs/how-to/train.md describes it."""
    recipe = {
        "corpus": "data/wiki", "output": folder.name, "method": method, "conditioning": {"r_max": r_max},
        "base": base, "lora": LORA if base else None, "model": "small", "length": 31, "batch": 8, "lr": 1e-4,
        "eval_split": "validation", "seed": seed,
    }  # fmt: skip
    described = {"texts": 4, "length": 31, "r_max": r_max, "split": "validation"}
    described["hash"] = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    answers = [p and {"perplexity": p, "interval": [p - 0.5, p + 0.75], "tokens": 9} for p in perplexities]
    evaluation = {"method": method, "set": described, "modes": dict(zip(MODES, answers, strict=True)), "gains": {}}
    evaluation["bound"] = method == "diffusion"
    results = {
        "recipe": recipe, "steps": 100, "texts": 800, "tokens": 24800, "seconds": 12.5, "hardware": "a CPU",
        "versions": {"acgpt": "0", "torch": "1", "transformers": "2"}, "command": ["acgpt", "train", folder.name],
        "corpus_hash": "wiki", "evaluation": evaluation,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"recipe": recipe}))
    (folder / "results.json").write_text(json.dumps(results))


def write_scores(folder: Path, mode: str, seed: int, mean: float) -> None:
    """Write generations of a run, and the result of `acgpt mauve` for them."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder.parents[1]
    method = json.loads((run / "config.json").read_text())["recipe"]["method"]
    line = {
        "item": 0, "sample": 0, "seed": seed, "roles": "gga", "tokens": [5, 6, 7], "log_probs": [-1.5],
        "prompt": "The cat____", "fills": [f" sat {seed}"], "text": f"The cat sat {seed}",
    }  # fmt: skip
    lines = (json.dumps(line) + "\n").encode()
    (folder / f"{mode}.jsonl").write_bytes(lines)
    about = {
        "kind": "generations", "method": method, "options": {}, "model": f"{run.name}/model", "adapter": None,
        "corpus": "data/wiki", "mode": mode, "r_max": 0.6, "samples": 1, "tokenizer_hash": "t",
        "set": {"hash": "drawn", "texts": 1, "length": 3, "r_max": 0.6, "seed": 0, "split": "validation"},
        "sampling": {"temperature": 0.8, "top_p": 0.95, "seed": seed}, "sha256": hashlib.sha256(lines).hexdigest(),
    }  # fmt: skip
    (folder / f"{mode}.json").write_text(json.dumps(about))
    measured = {"distinct_1": 0.25, "distinct_2": 0.5, "distinct_3": 0.75, "repetition": mean / 10, "loops": 0.0}
    result = {
        "kind": "mauve", "name": mode, "generated": f"{mode}.jsonl", "hash": hashlib.sha256(lines).hexdigest(),
        "record": about, "scored": "whole text", "texts": 12, "mauve": {"mean": mean, "std": 0.01},
        "features": {"model": "gpt2-large", "hash": "f"}, "judge": None, "perplexity": 8.0 + seed,
        "reference": {"hash": "r", "texts": 12, "corpus": "wiki", "split": "test", "rule": "windows"},
        "companions": {"generated": measured, "original": measured | {"repetition": 0.5}},
    }  # fmt: skip
    (folder / f"{mode}.x.mauve.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "runs"
    for name, *about in RUNS:
        write_run(folder / name, *about)
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.json").write_text((folder / "ac-0" / "config.json").read_text())
    for name, seed, mean in (("ac-0", 0, 0.9), ("ac-1", 1, 0.94), ("gpt-0", 0, 0.85)):
        write_scores(folder / name / "generations" / "validation", "unconditional", seed, mean)
    return folder


@pytest.fixture(autouse=True)
def only_tables(monkeypatch):
    """Draw no figures, which takes many seconds. `test_render` draws them."""
    monkeypatch.setattr(write, "find_spec", lambda name: None)


def lines_of(path: Path, folder: Path) -> list[str]:
    """Return the lines of a file, without the style of a page, places and versions."""
    text = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = text.replace(str(folder), "FOLDER").replace(__version__, "VERSION").splitlines()
    return [line for line in lines if line.strip()]


def test_a_report_of_a_fixed_folder_is_that_of_the_record(runs, tmp_path):
    folder = tmp_path / "report"
    result = CliRunner().invoke(app, ["report", str(runs), "-o", str(folder)], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    data = json.loads("\n".join(lines_of(files.pop("report.json"), runs.parent)))
    check("report-data", data, 1e-9)
    pages = {name: lines_of(files.pop(name), runs.parent) for name in ("report.html", "samples.html")}
    check("report-pages", pages)
    check("report-tables", {name: lines_of(path, runs.parent) for name, path in files.items()})
    printed = [line.rstrip().replace(str(tmp_path), "FOLDER") for line in result.stdout.splitlines()]
    check("report-printed", [line.replace(str(runs.parent), "FOLDER") for line in printed])


def test_the_figures_of_a_report_are_those_of_the_record(runs):
    pictures = {part.name: list(part.pictures) for part in make_report([runs]).parts}
    check("report-figures", pictures)
