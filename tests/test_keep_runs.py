"""Runs that are kept: folders get other names, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from test_report import write_run

from acgpt.report.runs import read_runs

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "keep_runs.py"


def test_a_kept_run_is_one_that_a_report_reads_and_only_names_of_folders_are_others(tmp_path):
    run = write_run(tmp_path / "a")
    results = json.loads((run / "results.json").read_text())
    results["recipe"] |= {"output": "ac-gpt", "corpus": "k=v/data"}  # the one is a method's name, too
    command = ["/x/acgpt", "finetune", "corpus=k=v/data", "output=ac-gpt", "method=ac-gpt"]
    results |= {"command": command, "model": "ac-gpt/adapter", "data": "ac-gpt"}
    (run / "results.json").write_text(json.dumps(results))
    command = [sys.executable, str(PROGRAM), str(run), "--date", "2026-01-01", "-o", str(tmp_path / "kept")]
    subprocess.run(command, check=True)
    kept = json.loads((tmp_path / "kept" / "a" / "results.json").read_text())
    assert kept["command"] == ["acgpt", "finetune", "corpus=data/data", "output=runs/a", "method=ac-gpt"]
    assert (kept["model"], kept["data"], kept["date"]) == ("runs/a/adapter", "ac-gpt", "2026-01-01")
    recipe = results["recipe"] | {"output": "runs/a", "corpus": "data/data"}
    assert kept == results | {key: kept[key] for key in ("date", "command", "model")} | {"recipe": recipe}
    (read,) = read_runs([tmp_path / "kept" / "a"])
    assert read.budget == (results["texts"], results["tokens"])
