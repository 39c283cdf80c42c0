"""`acgpt.compare`: its tables match the files, it writes only to `output`, and it imports quickly."""

from __future__ import annotations

import ast
import doctest
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from test_report import AC, CAUSAL, twin_of, write_run
from test_report_scratch import scratch
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.query.modes import MODES
from acgpt.report.write import make_report

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two seeds from scratch, and a tuned model with its causal twin."""
    results = [scratch(tmp_path / f"seed{seed}", tuple(x + seed for x in AC), seed=seed) for seed in (0, 1)]
    return [*results, write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")]


def test_the_examples_of_the_page_on_reports_print_what_it_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    results = doctest.testfile(str(ROOT / "docs" / "how-to" / "report.md"), module_relative=False, verbose=False)
    assert results.attempted > 5 and results.failed == 0


def test_tables_hold_what_the_csv_files_hold(runs, tmp_path):
    report = acgpt.compare(runs, tmp_path / "report")
    files = {name.removesuffix(".csv") for name in report.files if name.endswith(".csv")}
    assert set(report.tables) == files > {"finetuning/validation/advantages"}
    for name, table in report.tables.items():
        text = (tmp_path / "report" / f"{name}.csv").read_text(encoding="utf-8")
        written = pd.read_csv(io.StringIO(text), dtype={"set": str})
        assert written.pop("note").dropna().tolist() == table.pop("note").dropna().tolist()
        pd.testing.assert_frame_equal(written, table, check_dtype=False)
    scratch = report.tables["from-scratch/validation/small"].query("source == 'run'")
    assert scratch[["training", "training_std", "seeds"]].values.tolist() == [[6.67, pytest.approx(0.5**0.5), 2]]


def test_without_a_folder_nothing_is_written_and_the_tables_are_the_same(runs, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    report = acgpt.compare(runs)
    assert sorted(tmp_path.rglob("*")) == before and report.files == ()
    written = acgpt.compare(runs, tmp_path / "report")
    assert list(written.tables) == list(report.tables)
    for name, table in report.tables.items():
        pd.testing.assert_frame_equal(table, written.tables[name])
    unwritten = {key: value for key, value in report.content.items() if key not in ("notes", "files")}
    assert unwritten.items() <= written.content.items()


def test_the_command_prints_the_content_of_the_same_comparison(runs, tmp_path):
    done = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(tmp_path / "one"), "--json"])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    written = json.loads((tmp_path / "one" / "report.json").read_text(encoding="utf-8"))
    assert json.loads(line) == {"folder": str(tmp_path / "one"), **written}
    acgpt.compare(runs, tmp_path / "two")
    for path in (tmp_path / "one").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_measurements_have_a_row_for_each_run_set_and_mode(runs):
    result = acgpt.compare(runs).measurements
    assert not result.duplicated(["run", "set", "options", "mode"]).any() and len(result) == len(runs) * len(MODES)
    pivot = result.pivot(index="run", columns="mode", values="perplexity")[list(MODES)]
    assert pivot.loc["ac"].tolist() == list(AC) and pivot.loc["seed1"].tolist() == [x + 1 for x in AC]
    assert [None if pd.isna(x) else x for x in pivot.loc["gpt"]] == list(CAUSAL)


SMALL = ("small", "small-differences")


def test_one_folder_may_be_named_by_itself(tmp_path):
    run = scratch(tmp_path / "run")
    for folder in (run, str(run), [run], (str(run),)):
        assert list(acgpt.compare(folder).tables) == [f"from-scratch/validation/{name}" for name in SMALL]
    assert repr(acgpt.compare(run)) == f"Report(runs=1, tables={[f'from-scratch/validation/{name}' for name in SMALL]})"


def test_a_table_does_not_depend_on_the_order_of_the_seeds(tmp_path):
    values = (10.1, 33.3, 20.7, 12.9)
    runs = [scratch(tmp_path / str(seed), (x,) * 5, seed=seed) for seed, x in enumerate(values)]
    one, other = (make_report(order).tables["from-scratch/validation/small"] for order in (runs, runs[::-1]))
    pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_pandas_and_jinja2_are_imported_by_reports_alone():
    for path in (ROOT / "src" / "acgpt").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        needed = {name.partition(".")[0] for name in names} & {"pandas", "jinja2"}
        assert not needed or path.parent.name == "report", path
