"""Reports name everything that a figure or a table leaves out."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from generations import write_generations
from test_report import evaluation
from test_report_generation import score
from test_report_scratch import GPT, figure, scratch
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.report import from_scratch, write
from acgpt.report.write import make_report

LONGER = {"texts": 1600, "tokens": 49600}  # read by a run that went on for twice as many steps


def shown_in(part: Any, stem: str) -> set[float]:
    """The unconditional perplexities of the runs in a figure's panels."""
    entries = [entry for _, entries in figure(part, f"validation/{stem}") for entry in entries]
    return {entry.modes["unconditional"].mean for entry in entries if entry.evaluations}


@pytest.mark.parametrize(
    "change",
    [{"measured": {"length": 63}}, {"measured": {"texts": 9}}, {"measured": {"seed": 3}}, {"about": LONGER}],
    ids=["length", "number of texts", "set", "longer run"],
)
def test_runs_that_cannot_be_compared_have_panels_that_can_be_told_apart(tmp_path, change):
    runs = [scratch(tmp_path / "one"), scratch(tmp_path / "two", (21.0, 20.0, 18.0, 22.0, 22.5), lr=1.0, **change)]
    (part,) = make_report(runs, tmp_path / "report").parts
    assert shown_in(part, "main") == shown_in(part, "future") == {24.0, 21.0}
    titles = [title for title, entries in figure(part, "validation/main") if entries[0].evaluations]
    assert len(set(titles)) == 2
    assert ("trained on 1,600 texts" in titles[1]) is ("about" in change)


def test_every_run_is_in_the_main_figure_or_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(from_scratch, "MAX_PANELS", 3)
    perplexity = {f"run{number}": 20.0 + number for number in range(8)}
    kinds: list[dict[str, Any]] = [
        {}, {"about": LONGER}, {"r_max": 0.2}, {"method": "gpt", "r_max": 0.4}, {"lr": 3e-4, "r_max": 0.8},
        {"conditioning": {"r_max": 0.4}}, {"about": {"texts": 7}}, {"about": {"texts": 8}},
    ]  # fmt: skip
    runs = [
        scratch(tmp_path / name, (value, 22.0, 19.0, 23.0, 23.5), **options)
        for (name, value), options in zip(perplexity.items(), kinds, strict=True)
    ]
    (part,) = make_report(runs, tmp_path / "report").parts
    shown, words = shown_in(part, "main"), part.pictures["validation/main"][1].partition("Not shown")[2]
    named = {name for name in perplexity if name in words}
    assert named == {name for name, value in perplexity.items() if value not in shown}
    assert len(named) == 5 and {"run2", "run3", "run4", "run5"} < named


def test_runs_on_no_curve_over_r_max_are_named(tmp_path):
    bound = evaluation("diffusion", (None, 22.0, 19.0, None, None), r_max=0.6) | {"bound": True}
    runs = [scratch(tmp_path / f"ac{r_max}", r_max=r_max) for r_max in (0.2, 0.6)]
    runs += [scratch(tmp_path / "alone", lr=1.0), scratch(tmp_path / "gpt", GPT, method="gpt")]
    runs += [scratch(tmp_path / "noisy", method="diffusion", about={"evaluation": bound})]
    (part,) = make_report(runs, tmp_path / "report").parts
    assert part.pictures["validation/r_max"][1].endswith(" Not shown: alone, gpt, noisy. See the tables.")


def test_no_figure_at_all_is_said(tmp_path):
    run = scratch(tmp_path / "ac", conditioning={"r_max": 0.2})  # and asked at 0.6
    made = make_report([run], tmp_path / "report")
    assert not made.parts[0].pictures
    assert "no figure of validation: no run was evaluated at the r_max of its training." in made.notes


def test_what_is_left_out_is_said_below_the_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "find_spec", lambda name: name)
    monkeypatch.setattr(write, "render_figure", lambda draw: {"png": b"", "svg": b"<svg/>"})
    runs = [scratch(tmp_path / "ac"), scratch(tmp_path / "low", (9.0,) * 5, r_max=0.2, lr=1.0)]
    result = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    page = unescape((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    captions = [each.partition("</figcaption>")[0] for each in page.split("<figcaption>")[1:]]
    assert ["Not shown: low. See the tables." in caption for caption in captions] == [True, False]


def test_of_several_evaluations_on_one_set_the_fullest_is_kept_and_the_others_are_named_with_it(tmp_path):
    partial = {
        str(count): evaluation("ac-gpt", (*(30.0 + count for _ in range(count)), *(None,) * (5 - count)), r_max=0.6)
        for count in (4, 3)
    }
    alike = evaluation("ac-gpt", (34.0, None, None, None, None), r_max=0.6)
    run = scratch(tmp_path / "run", (9.0, 9.0, None, None, None), further=partial | {"alike": alike})
    made = make_report([run], tmp_path / "report")
    (row,) = made.content["from-scratch"]["splits"]["validation"]["small"]
    assert [row[mode] and row[mode]["mean"] for mode in ("unconditional", "training-no-future")] == [34.0, None]
    kept = run / "4.json"
    assert [note.partition(" evaluates")[0] for note in made.notes if "left out" in note] == [
        f"{run / name} is left out: {kept}" for name in ("results.json", "3.json")
    ]


def test_of_two_scores_of_one_file_the_one_left_out_is_named_if_it_differs(tmp_path, corpus):
    path = write_generations(tmp_path / "drawn", corpus, method="ac-gpt", model="hub/ac")
    first = score(path, 0.9)
    first.with_name("training.again.mauve.json").write_text(first.read_text(encoding="utf-8"), encoding="utf-8")
    assert not [note for note in make_report([tmp_path / "drawn"], tmp_path / "one").notes if "left out" in note]
    again = json.loads(first.read_text(encoding="utf-8")) | {"mauve": {"mean": 0.5, "std": 0.1}}
    first.with_name("training.again.mauve.json").write_text(json.dumps(again), encoding="utf-8")
    notes = make_report([tmp_path / "drawn"], tmp_path / "two").notes
    assert [note for note in notes if "left out" in note and "with another result" in note]


def test_scores_whose_texts_are_elsewhere_are_named_beside_a_page_of_samples(tmp_path, corpus):
    drawn = tmp_path / "drawn"
    score(write_generations(drawn / "a", corpus, method="ac-gpt", model="hub/ac"), 0.9)
    bare: Path = score(write_generations(drawn / "b", corpus, method="mlm", model="hub/mlm", texts=2), 0.4)
    for path in (drawn / "b").glob("*.jsonl"):
        path.unlink()
    made = make_report([drawn], tmp_path / "report")
    assert any(note.startswith(f"samples.html lacks the texts of {bare}") for note in made.notes)


def test_the_tables_of_bare_folders_are_not_called_after_a_size(tmp_path, corpus):
    score(write_generations(tmp_path / "drawn", corpus, method="ac-gpt", model="hub/ac"), 0.9)
    (part,) = make_report([tmp_path / "drawn"], tmp_path / "bare").parts
    assert [table.title for table in part.tables.values()] == ["MAUVE", "Other measures"]
    run = scratch(tmp_path / "run", output="run")
    score(write_generations(run / "samples", corpus, method="ac-gpt", model=str(run / "model")), 0.8)
    *_, part = make_report([run, tmp_path / "drawn"], tmp_path / "both").parts
    titles = {table.title for stem, table in part.tables.items() if stem.endswith("mauve")}
    assert titles == {"MAUVE, GPT-2 Small (82M)", "MAUVE, models whose runs are not in this report"}
