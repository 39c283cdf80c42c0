"""Reports of training from scratch: the paper's numbers, rows over seeds, bold values, the page."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from elements import Elements
from test_report import evaluation, write_run

from acgpt.errors import InputError
from acgpt.methods import METHODS
from acgpt.methods.ac_gpt import AcGpt
from acgpt.query.modes import MODES
from acgpt.report import pictures
from acgpt.report.entries import Entry
from acgpt.report.paper import paper
from acgpt.report.tables import Mean
from acgpt.report.write import make_report

AC = (24.0, 22.0, 19.0, 23.0, 23.5)
GPT = (23.0, None, None, 22.5, 23.0)


class Other(AcGpt):
    """A method that acgpt does not have."""

    name = title = "other"
    sort_order = 100


@pytest.fixture(autouse=True)
def other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "other", Other())


def scratch(folder: Path, perplexities: tuple[float | None, ...] = AC, r_max: float = 0.6, **options: Any) -> Path:
    """Write a run from scratch that was evaluated at the r_max of its training."""
    recipe = {"base": "", "lora": None, "model": "small", "conditioning": {"r_max": r_max}}
    options["measured"] = {"r_max": r_max} | options.get("measured", {})
    return write_run(folder, perplexities, **(recipe | options))


def figure(part: Any, stem: str) -> Any:
    """Return what a figure shows: panels, or curves."""
    return part.pictures[stem][0].args[0]


def rows(report: Any, size: str = "small", split: str = "validation") -> list[dict[str, Any]]:
    return report.content["from-scratch"]["splits"][split][size]


def lines(folder: Path, size: str = "small") -> dict[str, str]:
    """The lines of the Markdown table of the runs, by r_max and method."""
    text = (folder / "from-scratch" / "validation" / f"{size}.md").read_text(encoding="utf-8")
    results = [line for line in text.splitlines() if line.startswith("| here")]
    return {f"{cells[1]} {cells[3]}": line for line in results for cells in [line.split(" | ")]}


# ---- the paper's own numbers ----------------------------------------------------------------------------------------


# Sums over the tables' LaTeX with another program (awk): means, then deviations, mode by mode.
SUMS = {
    ("from_scratch", "WikiText-103", "small"): (
        1557.5, 1684.7, 644.9, 1466.0, 1536.3, 418.5, 660.9, 22.0, 450.6, 431.3,
    ),
    ("from_scratch", "WikiText-103", "base"): (
        2559.2, 3944.2, 491.0, 2746.4, 2579.9, 613.0, 1309.3, 13.3, 837.0, 659.7,
    ),
    ("from_scratch", "WikiText-103", "medium"): (
        2930.5, 4380.8, 437.9, 3351.4, 2987.0, 1163.3, 1270.4, 9.7, 1505.9, 1208.3,
    ),
    ("from_scratch", "FineWeb", "base"): (678.83, 859.45, 100.18, 732.89, 687.1, 224.89, 371.04, 0.67, 305.02, 236.62),
    ("mauve", "WikiText-103", "small"): (14.754, 22.104, 16.891, 27.595, 16.606, 1.515, 0.684, 1.749, 0.812, 2.211),
    ("mauve", "WikiText-103", "base"): (17.689, 22.682, 17.166, 27.811, 17.728, 1.348, 0.745, 1.134, 0.963, 1.990),
    ("mauve", "WikiText-103", "medium"): (17.420, 22.393, 17.118, 27.724, 17.846, 1.192, 1.017, 1.366, 1.072, 2.056),
    ("mauve", "FineWeb", "base"): (0.259, 2.700, 1.760, 3.590, 1.072, 0.065, 0.052, 0.041, 0.101, 0.171),
}  # fmt: skip


@pytest.mark.parametrize(("name", "corpus", "size"), SUMS)
def test_the_papers_columns_have_the_sums_that_its_tables_have(name, corpus, size):
    table = paper(name)["perplexities" if name == "from_scratch" else name]
    rows = [row for row in table if (row["corpus"], row["model"]) == (corpus, size)]
    columns = [sum(row[mode][i] for row in rows if row[mode]) for i in (0, 1) for mode in MODES]
    assert columns == pytest.approx(SUMS[name, corpus, size], abs=1e-6)
    missing = {(row["method"], mode) for row in rows for mode in MODES if row[mode] is None}
    assert missing == {("gpt", "infilling"), ("gpt", "training")}
    assert len(table) == 3 * 5 * (6 if name == "mauve" else 5) + 4


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_says_how_far_other_texts_might_take_it(tmp_path):
    for seed, spans in enumerate([((6.0, 9.0), None, (5.0, 7.0)), ((7.0, 8.0), None, (6.0, 9.0))]):
        folder = scratch(tmp_path / str(seed), (7.5, 6.85, 6.25, 7.12, 7.38), seed=seed)
        results = json.loads((folder / "results.json").read_text())
        for mode, span in zip(MODES, spans, strict=False):
            results["evaluation"]["modes"][mode]["interval"] = span
        (folder / "results.json").write_text(json.dumps(results))
    scratch(tmp_path / "gpt", (7.25, None, None, 6.95, 7.25), method="gpt")  # without intervals, as of a single text
    by_method = {
        row["method"]: row for row in rows(make_report([tmp_path], tmp_path / "report")) if row["from"] == "here"
    }
    assert (by_method["AC-GPT"]["chance"], by_method["GPT"]["chance"]) == (pytest.approx(50 * 3 / 6.25), None)
    for damaged in ([1.0], "wide", ["a", "b"], 3):
        results["evaluation"]["modes"]["infilling"]["interval"] = damaged
        (folder / "results.json").write_text(json.dumps(results))
        with pytest.raises(InputError, match=r"1/results\.json is (damaged|not an evaluation of acgpt)"):
            make_report([tmp_path], tmp_path / "again")


def test_a_mean_and_its_deviation_are_those_of_a_sample():
    values = [18.4, 18.9, 17.2, 18.0]
    result = Mean.of(values)
    assert (result.mean, result.std) == pytest.approx((statistics.mean(values), statistics.stdev(values)))
    assert (Mean.of([3.0]).std, Mean.of([3.0]).runs) == (None, 1)
    infinite = Mean.of([3.0, float("inf")])
    assert infinite.mean == float("inf") and infinite.std is None


@pytest.mark.parametrize("change", [{"lr": 2e-4}, {"about": {"texts": 900}}, {"about": {"corpus_hash": "web"}}])
def test_runs_that_differ_in_anything_else_are_rows_of_their_own(tmp_path, change):
    runs = [scratch(tmp_path / "one"), scratch(tmp_path / "two", seed=1, **change)]
    results = rows(make_report(runs, tmp_path / "report"))
    assert [row["seeds"] for row in results] == [1, 1]
    if "lr" in change:
        assert [row["method"] for row in results] == ["AC-GPT, lr 0.0001", "AC-GPT, lr 0.0002"]


def test_what_tells_runs_apart_is_said_of_them_whichever_texts_they_were_asked(tmp_path):
    runs = [
        scratch(tmp_path / "one", method="other"),
        scratch(tmp_path / "two", method="other", lr=2e-4, measured={"texts": 2}),
        scratch(tmp_path / "wide", method="other", lr=3e-4, r_max=1.0),
    ]
    results = rows(make_report(runs, tmp_path / "report"))
    assert sorted(row["method"] for row in results) == ["other", "other, lr 0.0001", "other, lr 0.0002"]


def test_what_changes_nothing_that_is_learnt_makes_no_row(tmp_path):
    free = {"workers": 7, "keep": 1, "eval_every": 3, "corpus": "elsewhere/wiki", "micro_batch": 2}
    runs = [scratch(tmp_path / "one"), scratch(tmp_path / "two", seed=1, **free)]
    runs += [scratch(tmp_path / f"g{i}", GPT, method="gpt", seed=i, conditioning={"r_max": i / 2}) for i in (0, 1)]
    results = rows(make_report(runs, tmp_path / "report"))
    assert [(row["method"], row["seeds"]) for row in results] == [("AC-GPT", 2), ("GPT", 2)]


def test_a_key_that_an_earlier_version_had_not_is_as_it_was(tmp_path):
    runs = [scratch(tmp_path / "earlier"), scratch(tmp_path / "now", seed=1, loss="asked")]
    (row,) = rows(make_report(runs, tmp_path / "report"))
    assert row["seeds"] == 2


def test_a_seed_counts_once(tmp_path):
    runs = [scratch(tmp_path / "one"), scratch(tmp_path / "again", (9.0,) * 5)]
    made = make_report(runs, tmp_path / "report")
    (row,) = rows(made)
    assert row["seeds"] == 1 and row["training"]["mean"] == 19.0
    assert any("again repeats one" in note for note in made.notes)


def test_another_way_of_asking_is_another_row(tmp_path):
    shuffled = {**evaluation("other", (90.0,) * 5, r_max=0.6), "options": {"order": "random"}}
    run = scratch(tmp_path / "one", method="other", further={"shuffled": shuffled})
    results = rows(make_report([run], tmp_path / "report"))
    assert {row["method"]: row["training"]["mean"] for row in results} == {"other": 19.0, "other, order=random": 90.0}


def test_a_mode_that_some_seeds_lack_says_so(tmp_path):
    runs = [scratch(tmp_path / "one"), scratch(tmp_path / "two", (24.0, None, 19.0, 23.0, 23.5), seed=1)]
    (row,) = rows(make_report(runs, tmp_path / "report"))
    assert row["infilling"]["runs"] == 1 and row["note"] == "infilling: 1 of 2 seeds."


# ---- who may be compared --------------------------------------------------------------------------------------------


def test_the_best_is_bold_among_those_that_were_asked_the_same(tmp_path):
    runs = [scratch(tmp_path / "ac"), scratch(tmp_path / "gpt", GPT, method="gpt")]
    runs += [scratch(tmp_path / "other", (1.0,) * 5, method="other", measured={"texts": 9})]  # another set
    runs += [scratch(tmp_path / "base", (2.0,) * 5, model="base")]  # another size
    runs += [scratch(tmp_path / "longer", (3.0,) * 5, method="other", about={"texts": 1600})]  # another budget
    make_report(runs, tmp_path / "report")
    results = lines(tmp_path / "report")
    assert "| 24.00 | 22.00 | 19.00 | 23.00 | 23.50 |" in results["0.6 AC-GPT"]
    assert "| **23.00** | -- | -- | **22.50** | **23.00** |" in results["0.6 GPT"]
    assert "**" not in results["0.6 other"] and "**" not in lines(tmp_path / "report", "base")["0.6 AC-GPT"]


def test_a_bound_is_marked_and_never_ranked(tmp_path):
    low = evaluation("other", (None, 2.0, 1.0, None, None), r_max=0.6)
    bound = scratch(tmp_path / "bound", method="other", about={"evaluation": {**low, "bound": True}})
    exact = scratch(tmp_path / "exact", (24.0, 22.0, 20.0, 23.0, 23.5), method="ac-gpt", seed=3, lr=1)
    made = make_report([scratch(tmp_path / "ac"), exact, bound], tmp_path / "report")
    results = lines(tmp_path / "report")
    assert "| -- | ≤ 2.00 | ≤ 1.00 | -- | -- |" in results["0.6 other"]
    compared = made.content["from-scratch"]["differences"]["validation"]["small"]
    assert {row["method"] for row in compared} == {"AC-GPT, lr 0.0001", "AC-GPT, lr 1"}
    assert "**19.00**" in results["0.6 AC-GPT, lr 0.0001"] and "**" not in results["0.6 other"]


def test_a_causal_run_stands_at_every_r_max_that_it_was_asked(tmp_path):
    more = {f"r{r}": evaluation("gpt", GPT, r_max=r) for r in (0.2, 1.0)}
    runs = [scratch(tmp_path / f"ac{r}", r_max=r) for r in (1.0, 0.2)]
    runs.append(scratch(tmp_path / "gpt", GPT, r_max=0.6, method="gpt", about={"evaluation": None}, further=more))
    results = rows(make_report(runs, tmp_path / "report"))
    assert [(row["r_max"], row["method"]) for row in results] == [
        (0.2, "AC-GPT"), (0.2, "GPT"), (1.0, "AC-GPT"), (1.0, "GPT"),
    ]  # fmt: skip
    assert len({row["set"] for row in results}) == len({(row["set"], row["r_max"]) for row in results}) == 2


def test_a_run_that_is_asked_at_another_r_max_than_its_own_is_marked(tmp_path):
    run = scratch(tmp_path / "ac", further={"cross": evaluation("ac-gpt", AC, r_max=0.2)})
    results = rows(make_report([run], tmp_path / "report"))
    assert [(row["r_max"], row["note"]) for row in results] == [(0.2, "trained with r_max 0.6."), (0.6, None)]


def test_the_main_picture_is_of_those_that_read_the_future(tmp_path):
    runs = [scratch(tmp_path / "ac", r_max=0.4), scratch(tmp_path / "gpt", GPT, method="gpt", r_max=0.6)]
    (part,) = make_report(runs).parts
    caption = part.pictures["validation/main"][1].partition("in the five modes (")[2].partition("Lower")[0]
    assert "r_max 0.4" in caption and "r_max 0.6" not in caption


def test_what_was_asked_more_texts_stands_first_and_has_the_curve(tmp_path):
    runs = []
    for r_max in (0.2, 0.6):
        asked = [evaluation("ac-gpt", (float(n),) * 5, r_max=r_max, texts=n) for n in (8, 40)]
        further = {str(number): result for number, result in enumerate(asked)}
        runs.append(scratch(tmp_path / f"r{r_max}", (99.0,) * 5, r_max, further=further, measured={"texts": 2}))
    (part,) = make_report(runs, tmp_path / "report").parts
    own = [row.cells for row in part.tables["validation/small"].rows if not row.paper]
    assert [(row["r_max"], row["asked"]) for row in own] == [(r_max, n) for r_max in (0.2, 0.6) for n in (40, 8, 2)]
    ((_, (ours, *_)),) = figure(part, "validation/r_max")
    assert [(entry.r_max, entry.modes["training"].mean) for entry in ours] == [(0.2, 40.0), (0.6, 40.0)]


def test_of_two_sets_a_picture_has_that_of_most_methods_it_shows(tmp_path):
    for method, sizes in (("ac-gpt", (8, 40)), ("sigma-gpt-temporal", (8, 40)), ("mlm", (8,))):
        shift = 100.0 if method == "mlm" else 0.0
        asked = {f"{n}": evaluation(method, (20 + shift,) * 5, texts=n, split="test") for n in sizes}
        scratch(tmp_path / method, method=method, output=method, further=asked)
    (part,) = make_report([tmp_path], tmp_path / "out").parts
    titles = [figure(part, stem)[0][0] for stem in ("test/main", "test/future")]
    assert "8 texts" in titles[0] and "40 texts" in titles[1]


@pytest.mark.parametrize(
    ("few", "many", "shown"),
    [
        (["ac-gpt", "mlm"], ["sigma-gpt-temporal", "fim"], 40),
        (["ac-gpt", "mlm"], ["sigma-gpt-temporal", "fim", "other"], 40),
        (["ac-gpt", "mlm"], ["ac-gpt", "ac-gpt", "ac-gpt"], 8),
    ],
    ids=["as many methods", "more methods", "more rows"],
)
def test_of_two_sets_a_picture_has_that_of_most_methods_then_that_of_most_texts(tmp_path, few, many, shown):
    for n, methods in ((8, few), (40, many)):
        for number, method in enumerate(methods):  # those of one method differ in their rate: rows of their own
            name, asked = f"{n}-{number}", {"t": evaluation(method, AC, texts=n, split="test")}
            scratch(tmp_path / name, method=method, output=name, further=asked, lr=0.001 * (1 + number))
    (part,) = make_report([tmp_path], tmp_path / "out").parts
    assert f"{shown} texts" in figure(part, "test/main")[0][0]


def test_the_label_of_a_bar_says_if_it_is_a_bound():
    means = {"exact": Mean(20.0), "bounded": Mean(30.0, bound=True)}
    drawn = pictures.methods(
        [("a", [Entry(name, name, 0.6, dict.fromkeys(MODES, mean)) for name, mean in means.items()])]
    )
    labels = [text.get_text() for text in drawn.axes[0].texts]
    assert labels.count("20.0") == labels.count("≤30.0") == len(MODES) and len(labels) == 2 * len(MODES)


def test_a_picture_has_a_method_as_it_is_asked_by_default_if_it_was(tmp_path):
    shuffled = {
        split: {**evaluation("other", (90.0,) * 5, r_max=0.6, split=split), "options": {"order": "random"}}
        for split in ("validation", "test")
    }
    run = scratch(tmp_path / "run", method="other", further=shuffled)
    (part,) = make_report([run], tmp_path / "out").parts
    assert len(rows(make_report([run], tmp_path / "out"))) == 2
    for split, expected in (("validation", [24.0]), ("test", [90.0])):
        _, entries = figure(part, f"{split}/main")[0]
        assert [entry.modes["unconditional"].mean for entry in entries] == expected


def test_sets_of_other_texts_have_curves_of_their_own(tmp_path):
    for r_max in (0.2, 0.6):
        asked = {f"{n}": evaluation("ac-gpt", AC, r_max=r_max, length=n, split="test") for n in (15, 31)}
        scratch(tmp_path / f"{r_max}", (None,) * 5, r_max, output=f"{r_max}", further=asked)
    (part,) = make_report([tmp_path], tmp_path / "out").parts
    ((_, curves),) = figure(part, "test/r_max")
    assert [curve[0].method for curve in curves] == ["ac-gpt"] * 3  # two of ours, and the paper's


def test_the_papers_rows_stand_beside_ours_of_the_same_size_and_r_max(tmp_path):
    runs = [scratch(tmp_path / "ac"), scratch(tmp_path / "tiny", model="tiny")]
    runs.append(scratch(tmp_path / "own", model={"layers": 2, "width": 32, "heads": 4}))
    (part,) = make_report(runs).parts
    r_maxes = {name: [row.cells["r_max"] for row in table.rows if row.paper] for name, table in part.tables.items()}
    assert [r_maxes[f"validation/{size}"] for size in ("small", "tiny", "2x32")] == [[0.6] * 5, [], []]


# ---- every form -----------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_can_be_read_by_everybody(tmp_path, figures):
    runs = [scratch(tmp_path / f"ac{r}{seed}", r_max=r, seed=seed) for r in (0.2, 0.6) for seed in (0, 1)]
    runs.append(scratch(tmp_path / "a<b>&'\"", GPT, method="gpt"))
    runs.append(scratch(tmp_path / "worse", (99.0, None, None, None, None), method="other"))
    runs.append(write_run(tmp_path / "tuned", measured={"split": "test"}))
    made = make_report(runs, tmp_path / "report")
    drawn = {Path(file).stem for file in made.content["files"] if file.endswith(".png")}
    assert drawn == {"main", "future", "r_max"}
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("title")) == len(page.all("h1")) == 1
    for image in page.all("img"):
        assert image["src"].startswith("data:image/svg+xml;base64,") and image["alt"]
    assert len(page.all("img")) == sum(name.endswith(".svg") for name in made.content["files"]) == 3
    outside = re.sub(r"base64,[\w+/=]+", "", text)
    assert "http" not in outside and "url(" not in outside and "<script" not in outside and "<link" not in outside
    tables = page.all("table")
    assert len(tables) == len(page.all("caption")) == sum(name.endswith(".tex") for name in made.content["files"])
    assert all(cell.get("scope") in ("row", "col") for cell in page.all("th"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    links = [link["href"] for link in page.all("a")] + [f"#{each['aria-labelledby']}" for each in page.all("section")]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    assert "a&lt;b&gt;&amp;&#39;&#34;" in text and "<strong>19.00</strong>" not in text
    assert "<strong>23.00</strong>" in text and "15.2 ± 0.2" in text
