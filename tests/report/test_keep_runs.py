"""Keeping runs: folder names change, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from programs import program
from test_report import write_run
from test_report_generation import drawn

from acgpt.report.generation import NO_SAMPLES
from acgpt.report.runs import read_runs
from acgpt.report.write import make_report


def keep(*runs: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return program("keep_runs.py", *runs, "--date", "2026-01-01", "-o", output)


def test_a_kept_run_is_one_that_a_report_reads_and_only_names_of_folders_are_others(tmp_path):
    run = write_run(tmp_path / "a")
    results = json.loads((run / "results.json").read_text())
    results["recipe"] |= {"output": "ac-gpt", "corpus": "k=v/data"}  # the one is a method's name, too
    command = ["/x/acgpt", "finetune", "corpus=k=v/data", "output=ac-gpt", "method=ac-gpt"]
    results |= {"command": command, "model": "ac-gpt/adapter", "data": "ac-gpt"}
    (run / "results.json").write_text(json.dumps(results))
    assert keep(run, output=tmp_path / "kept").returncode == 0
    kept = json.loads((tmp_path / "kept" / "a" / "results.json").read_text())
    assert kept["command"] == ["acgpt", "finetune", "corpus=data/data", "output=runs/a", "method=ac-gpt"]
    assert (kept["model"], kept["data"], kept["date"]) == ("runs/a/adapter", "ac-gpt", "2026-01-01")
    recipe = results["recipe"] | {"output": "runs/a", "corpus": "data/data"}
    assert kept == results | {key: kept[key] for key in ("date", "command", "model")} | {"recipe": recipe}
    (read,) = read_runs([tmp_path / "kept" / "a"])
    assert read.budget == (results["texts"], results["tokens"])


def test_of_generations_the_scores_are_kept_and_their_tables_stay_as_they_are(corpus, tmp_path):
    cells = tmp_path / "cells"
    runs = [drawn(cells, corpus, "ac-gpt", seed, {"training": 0.9 - seed / 10}, std=None) for seed in (0, 1)]
    (cells / "logs").mkdir()
    scores = [run / "generations" / "test" / "training.jsonl" for run in runs]
    for run in runs:  # trained on one machine, scored on another
        results = json.loads((run / "results.json").read_text())
        results["recipe"] |= {"output": f"/gpu/cells/{run.name}", "corpus": "/gpu/data/wiki"}
        results["command"] = ["/x/__main__.py", "train", "corpus=/gpu/data/wiki", f"output=/gpu/cells/{run.name}"]
        (run / "results.json").write_text(json.dumps(results))
        scored = run / "generations" / "test" / "training.mauve.json"
        content = json.loads(scored.read_text())
        content["record"] |= {"model": f"/gpu/cells/{run.name}/model"}
        content |= {"features": {"model": "/here/models/large", "hash": "f"}}
        content["reference"] |= {"corpus": "/here/wiki"}
        content["command"] = ["acgpt", "mauve", *map(str, scores), "/here/wiki", "--split", "test"]
        scored.write_text(json.dumps(content))
    before = make_report([cells], tmp_path / "before")
    assert keep(cells, output=tmp_path / "kept").returncode == 0
    kept = tmp_path / "kept"
    assert not [path for path in kept.rglob("*") if path.suffix == ".jsonl"]
    assert not [path for path in kept.rglob("*.json") if '"/' in path.read_text() or "=/" in path.read_text()]
    folder = kept / "ac-gpt-1" / "generations" / "test"
    assert [path.name for path in folder.iterdir()] == ["training.mauve.json"]
    scored = json.loads((folder / "training.mauve.json").read_text())
    assert scored["record"]["model"] == "runs/ac-gpt-1/model"
    named = [f"runs/ac-gpt-{seed}/generations/test/training.jsonl" for seed in (0, 1)]
    assert scored["command"] == ["acgpt", "mauve", *named, "data/wiki", "--split", "test"]
    assert (scored["generated"], scored["features"]["model"]) == (named[1], "large")
    after = make_report([kept], tmp_path / "after")
    for one, other in zip(before.parts, after.parts, strict=True):
        assert {name: (table.markdown(), table.full_caption) for name, table in one.tables.items()} == {
            name: (table.markdown(), table.full_caption) for name, table in other.tables.items()
        }
    assert "samples.html" in before.content["files"] and "samples.html" not in after.content["files"]
    assert [note for note in after.notes if note not in before.notes] == [NO_SAMPLES]


@pytest.mark.parametrize("place", ["judged/training.mauve.json", "scores/all/one.json", "one.json"])
def test_a_judges_result_of_one_mode_is_kept_wherever_in_the_run_it_was_written(corpus, tmp_path, place):
    run = drawn(tmp_path, corpus, "ac-gpt", 0, {"training": 0.9})
    scored, beside = run / place, run / "generations" / "test" / "training.mauve.json"
    scored.parent.mkdir(parents=True, exist_ok=True)
    judge_scores = {"measures": "whole text", "perplexity": 30.0, "tokens": 93, "bound": False, "original": None}
    content = json.loads(beside.read_text()) | {"judge": {"model": f"{run}/model", "hash": "j", **judge_scores}}
    options = [f"--judge={run}/model", f"--output={scored}"]
    content["command"] = ["/x/acgpt", "mauve", content["generated"], "/a/wiki", *options]
    scored.write_text(json.dumps(content))
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (run / "model" / "list.json").write_text("[]")
    (run / "model" / "half.json").write_text('{"kind": ')
    assert keep(run, output=tmp_path / "kept").returncode == 0
    kept = tmp_path / "kept" / run.name
    content = json.loads((kept / place).read_text())
    assert content["judge"] == {"model": f"runs/{run.name}/model", "hash": "j", **judge_scores}
    named = [f"--judge=runs/{run.name}/model", f"--output=runs/{run.name}/{place}"]
    assert content["command"][3:] == ["data/wiki", *named]
    assert (kept / "generations" / "test" / "training.mauve.json").exists() and not (kept / "model").exists()


def test_a_kept_log_has_every_tenth_row_and_all_evaluations(tmp_path):
    run = write_run(tmp_path / "a")
    evaluated = {7: "9.5,,", 13: ",8.5,", 45: ",,7.5"}
    rows = [f"{step},1.0,{evaluated.get(step, ',,')}\n" for step in range(48)]
    (run / "log.csv").write_text("step,loss,unconditional,training,training-no-future\n" + "".join(rows))
    assert keep(run, output=tmp_path / "kept").returncode == 0
    head, *kept = (tmp_path / "kept" / "a" / "log.csv").read_text().splitlines(keepends=True)
    assert kept == [rows[step] for step in (0, 7, 10, 13, 20, 30, 40, 45, 47)] and head.startswith("step,loss,")


def test_a_path_where_none_is_expected_is_not_kept(tmp_path):
    run = write_run(tmp_path / "a", about={"where": "/home/me/secret"})
    output = keep(run, output=tmp_path / "kept")
    assert output.returncode == 1 and "names /home/me/secret in an unexpected place" in output.stderr
    assert not (tmp_path / "kept").exists()


def test_two_runs_of_one_name_are_refused(tmp_path):
    runs = [write_run(tmp_path / name / "a") for name in ("one", "other")]
    output = keep(*runs, output=tmp_path / "kept")
    assert output.returncode == 1 and "two runs are called a" in output.stderr and not (tmp_path / "kept").exists()
