"""Intervals of differences in reports: where they come from, what is bold, and what is said where there are none."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perplexities import measured, perplexity_of
from test_report import LORA, twin_of, write_run
from test_report_scratch import AC, GPT, scratch
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.evaluation.bootstrap import Difference, PerText, TextSums, paired_difference
from acgpt.evaluation.per_text import as_dict, per_text_path
from acgpt.query.modes import MODES
from acgpt.report.entries import ADVANTAGES
from acgpt.report.runs import RunEvaluation, describe_set
from acgpt.report.tables import Column, Row, Table
from acgpt.report.write import make_report

TEXTS, TOKENS = 200, 31


def add_texts(run: Path, seed: int, name: str = "results", noise: float = 1.0, unit: str = "texts") -> PerText:
    """Give a run's evaluation sums of each text, or document; its perplexities become theirs, near what they were.

    Texts are easy or hard for all runs alike; `noise` nats of a text are a run's own.
    """
    path = run / f"{name}.json"
    content = json.loads(path.read_text())
    result = content["evaluation"] if name == "results" else content
    hard, own = np.random.default_rng(0).normal(0, 8, TEXTS), np.random.default_rng(seed)
    modes = {}
    for mode, answer in result["modes"].items():
        if answer is not None:
            centred = own.normal(0, noise, TEXTS)
            nats = TOKENS * np.log(answer["perplexity"]) + hard - hard.mean() + centred - centred.mean()
            modes[mode] = TextSums(np.round(nats, 3), np.full(TEXTS, float(TOKENS)))
            answer |= {"perplexity": perplexity_of(modes[mode]), "tokens": TEXTS * TOKENS}
    result["set"]["texts"] = TEXTS
    result["bootstrap"] = {"unit": unit, "units": TEXTS}
    kept = PerText(result["set"]["hash"], modes, unit)
    path.write_text(json.dumps(content))
    per_text_path(path).write_text(json.dumps(as_dict(kept)))
    return kept


def expected(ours: PerText | list[PerText], mode: str, theirs: PerText | list[PerText], other: str) -> Any:
    """Return the expected difference in JSON form, from `paired_difference`, which has its own tests."""
    sides = ([each] if isinstance(each, PerText) else each for each in (ours, theirs))
    result = paired_difference(*(measured(runs, name) for runs, name in zip(sides, (mode, other), strict=True)))
    return pytest.approx([result.percent, *result.interval], rel=1e-9)


def told(row: dict[str, Any], key: str) -> list[float]:
    return [row[key], *row[f"{key}_interval"]]


def test_advantages_have_the_interval_of_the_paired_bootstrap_in_every_form(tmp_path):
    ac, gpt = write_run(tmp_path / "ac", (7.5, 6.94, 6.17, 7.12, 7.38)), twin_of(tmp_path / "gpt")
    ours, theirs = add_texts(ac, 1, noise=0.5), add_texts(gpt, 2, noise=0.5)
    ran = CliRunner().invoke(app, ["report", str(ac), str(gpt), "-o", str(tmp_path / "report"), "--json"])
    assert ran.exit_code == 0, ran.output
    content = json.loads(ran.stdout)
    (row,) = content["finetuning"]["splits"]["validation"]["advantages"]
    for mode, other in ADVANTAGES.items():
        assert told(row, mode) == expected(ours, mode, theirs, other)
    # The first is a cost, the second is within noise, the third is an advantage.
    low, high = row["infilling_interval"]
    assert row["unconditional_interval"][1] < 0 and low < 0 < high and row["training_interval"][0] > 0
    folder = tmp_path / "report" / "finetuning" / "validation"
    cells = (folder / "advantages.md").read_text(encoding="utf-8").splitlines()[2].split(" | ")
    number = r"[+-]\d+\.\d\d"
    shown = [cell for cell in cells if re.fullmatch(rf"(\*\*)?{number}% \({number} to {number}\)(\*\*)?", cell)]
    assert [cell.startswith("**") for cell in shown] == [True, False, True]
    tex = (folder / "advantages.tex").read_text(encoding="utf-8")
    assert len(re.findall(rf"\$\\mathbf{{{number}\\%}}\$ {{\\scriptsize \(\${number}\$ to \${number}\$\)}}", tex)) == 2
    assert f"{row['infilling']:+.2f}" in tex and "\\mathbf{" + f"{row['infilling']:+.2f}" not in tex
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(rf"<strong>{number}% \({number} to {number}\)</strong>", page)) == 2
    frame = make_report([ac, gpt]).tables["finetuning/validation/advantages"].iloc[0]
    assert [frame["training"], frame["training_low"], frame["training_high"]] == told(row, "training")


@pytest.mark.parametrize("missing", ["ac", "gpt"])
def test_without_sums_of_texts_there_is_no_interval_and_no_bold(tmp_path, missing):
    runs = {"ac": write_run(tmp_path / "ac"), "gpt": twin_of(tmp_path / "gpt")}
    for seed, run in enumerate(runs.values()):
        add_texts(run, seed)
    per_text_path(runs[missing] / "results.json").unlink()
    made = make_report(list(runs.values()), tmp_path / "report")
    (row,) = made.content["finetuning"]["splits"]["validation"]["advantages"]
    assert row["training"] == pytest.approx(100 * (1 - 6.17 / 7.25), abs=0.5) and row["training_interval"] is None
    assert "**" not in (tmp_path / "report" / "finetuning" / "validation" / "advantages.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["finetuning", "from-scratch"])
def test_sums_over_texts_and_over_documents_give_no_interval(tmp_path, kind):
    if kind == "finetuning":
        ac, gpt = write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")
    else:
        ac, gpt = scratch(tmp_path / "ac", AC), scratch(tmp_path / "gpt", GPT, method="gpt")
    add_texts(ac, 1, unit="documents")
    for unit, mixed in (("documents", False), ("texts", True)):
        add_texts(gpt, 2, unit=unit)
        report = make_report([ac, gpt], tmp_path / "report")
        tables = [table for stem, table in report.tables.items() if stem.endswith(("differences", "advantages"))]
        assert all(table["unconditional_low"].iloc[:1].isna().all() == mixed for table in tables) and tables
        page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
        assert "intervals over 200 documents" in page and ("intervals over texts" in page) == mixed


def test_a_caption_tells_evaluation_datasets_apart(tmp_path):
    parts = [{}, {"b_min": "size"}, {"b_max": 3}, {"placement": "stretches"}]
    described = [
        describe_set(evaluation_of({"r_max": 0.4, "parts": [{"kind": "blocks", "r_max": 0.4, **part}]}))
        for part in parts
    ]
    assert [text.partition("r_max 0.4")[2] for text in described] == [
        ")", ", b_min size)", ", b_max 3)", ", placement stretches)",
    ]  # fmt: skip


def evaluation_of(conditioning: dict[str, Any]) -> RunEvaluation:
    dataset = {"hash": "abcdefgh", "texts": 9, "length": 31, "r_max": conditioning.pop("r_max")}
    return RunEvaluation(None, "test", {"set": {**dataset, "conditioning": conditioning}, "modes": {}})


def test_a_lead_over_a_row_of_other_units_is_not_tested_against_its_resamples():
    column = Column("training", "training", form=".2f", best=min)
    noise = np.random.default_rng(0).normal(0, 9, TEXTS)

    def row(nats: np.ndarray, unit: str) -> Row:
        sums = PerText("set", {"training": TextSums(nats, np.full(TEXTS, float(TOKENS)))}, unit)
        perplexity = measured([sums], "training")
        return Row({"training": perplexity.value}, 0, measured={"training": perplexity})

    def bold(unit: str) -> bool:
        rows = (row(70.0 + noise, "documents"), row(70.1 - noise, unit))
        first = min(rows, key=lambda each: each.cells["training"])
        return Table("", "", (column,), rows, "training").is_bold(first, column)

    assert not bold("documents") and bold("texts")


def test_sums_of_another_evaluation_are_not_used_and_that_is_said(tmp_path):
    ac, gpt = write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")
    add_texts(ac, 1), add_texts(gpt, 2)
    path = per_text_path(ac / "results.json")
    content = json.loads(path.read_text())
    content["nats"]["training"][0] += 1
    path.write_text(json.dumps(content))
    made = make_report([ac, gpt])
    (row,) = made.content["finetuning"]["splits"]["validation"]["advantages"]
    assert row["training_interval"] is None
    assert [note for note in made.notes if str(path) in note and "do not match" in note]


def test_of_two_evaluations_on_one_set_the_one_with_sums_of_texts_is_taken(tmp_path):
    ac, gpt = write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")
    for seed, run in enumerate((ac, gpt)):
        add_texts(run, seed)
        content = json.loads((run / "results.json").read_text())["evaluation"]
        (run / "again.json").write_text(json.dumps(content))
        per_text_path(run / "results.json").rename(per_text_path(run / "again.json"))
    made = make_report([ac, gpt])
    (row,) = made.content["finetuning"]["splits"]["validation"]["advantages"]
    assert row["training_interval"] is not None and not [note for note in made.notes if "left out" in note]


def test_the_best_is_bold_only_where_its_lead_lies_outside_noise(tmp_path):
    values = (7.5, 6.9, 6.2, 7.1, 7.4)
    ahead, close = (write_run(tmp_path / name, values, lora=LORA | {"alpha": a}) for a, name in ((1, "a"), (2, "b")))
    far = write_run(tmp_path / "c", (*values[:2], 1.3 * values[2], *values[3:]))
    for seed, run in enumerate((ahead, close, far)):
        add_texts(run, seed)
    assert not any(bold_cells([ahead, close, far]).values())  # in training too, `b` is as good as `a`
    without_close = bold_cells([ahead, far])
    assert without_close["a"] == ["training"] and without_close["c"] == []
    per_text_path(far / "results.json").unlink()  # what is not known does not keep the best from being bold
    assert "training" in bold_cells([ahead, far])["a"]


def bold_cells(runs: list[Path]) -> dict[str, list[str]]:
    """Return the modes in which each run's perplexity is bold."""
    (part,) = make_report(runs).parts
    table = part.tables["validation/perplexities"]
    own = [row for row in table.rows if not row.paper]
    columns = [column for column in table.columns if column.key in MODES]
    return {row.cells["run"]: [c.key for c in columns if table.is_bold(row, c)] for row in own}


def test_costs_and_gains_from_scratch_are_between_means_over_seeds(tmp_path):
    ours = [scratch(tmp_path / f"ac{seed}", AC, seed=seed) for seed in range(2)]
    theirs = [scratch(tmp_path / f"gpt{seed}", GPT, method="gpt", seed=seed) for seed in range(3)]
    kept = [[add_texts(run, 10 * side + i) for i, run in enumerate(runs)] for side, runs in enumerate((ours, theirs))]
    made = make_report([*ours, *theirs])
    (row,) = made.content["from-scratch"]["differences"]["validation"]["small"]
    assert (row["method"], row["seeds"], row["note"]) == ("AC-GPT", 2, None)
    for mode, other in ADVANTAGES.items():
        assert told(row, mode) == expected(kept[0], mode, kept[1], other)
    for mode in ("infilling", "training"):
        assert told(row, f"{mode}_gain") == expected(kept[0], mode, kept[0], f"{mode}-no-future")
    assert row["unconditional"] == pytest.approx(100 * (1 - 24 / 23), abs=0.1)


def test_without_sums_gains_have_no_interval_and_gpt_is_told_apart_by_its_keys(tmp_path):
    runs = [scratch(tmp_path / "ac"), scratch(tmp_path / "gpt", GPT, method="gpt", lr=2e-4)]
    (row,) = make_report(runs).content["from-scratch"]["differences"]["validation"]["small"]
    assert row["training_gain"] == pytest.approx(100 * (1 - 19 / 23.5)) and row["training_gain_interval"] is None
    assert row["note"] == "GPT differs in lr."


def test_differences_are_written_with_their_ends_and_without():
    columns = (Column("name", "name"), Column("gain", "gain", form="+z.1f%", interval=True))
    cells = [Difference(1.25, (0.5, 2.0)), Difference(-1.0, (-2.0, 0.5)), Difference(3.0), None, -0.04]
    table = Table("t", "c", columns, tuple(Row({"name": str(i), "gain": x}, 0) for i, x in enumerate(cells)), "name")
    column = [line.split(" | ")[1].rstrip(" |") for line in table.markdown().splitlines()[2:]]
    assert column == ["**+1.2% (+0.5 to +2.0)**", "-1.0% (-2.0 to +0.5)", "+3.0%", "--", "+0.0%"]
    assert table.cells.to_csv(index=False).splitlines()[1:3] == ["run,0,1.25,0.5,2.0,", "run,1,-1.0,-2.0,0.5,"]
    ends = [table.values(row)["gain_interval"] for row in table.rows]
    assert ends == [[0.5, 2.0], [-2.0, 0.5], None, None, None]


# ---- benchmarks -----------------------------------------------------------------------------------------------------

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_sums_of_texts_are_kept_with_the_runs_and_give_the_same_report(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("keep_runs")
    ac, gpt = write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")
    add_texts(ac, 1), add_texts(gpt, 2)
    kept = tmp_path / "kept"
    monkeypatch.setattr("sys.argv", ["keep_runs.py", str(ac), str(gpt), "--date", "2026-01-01", "-o", str(kept)])
    program.main()
    before, after = (make_report(runs).content["finetuning"] for runs in ([ac, gpt], [kept]))
    assert after == before and after["splits"]["validation"]["advantages"][0]["training_interval"]
