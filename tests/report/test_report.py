"""Reports: the paper's numbers reproduced by the formula, causal twins, errors, and all output formats."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.display.table import escape_latex, plain_markdown
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import MeasuredPerplexity, paired_difference
from acgpt.query.modes import MODES
from acgpt.report import finetuning, from_scratch, generation, write
from acgpt.report.entries import ADVANTAGES
from acgpt.report.paper import paper
from acgpt.report.runs import find_runs, read_runs, short_names
from acgpt.report.tables import Column, Row, Table
from acgpt.report.write import make_report

AC = (7.5, 6.85, 6.17, 7.12, 7.38)  # the paper's, of Qwen3-8B
CAUSAL = (7.25, None, None, 6.95, 7.25)
LORA = {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": None}


def evaluation(method: str, perplexities: tuple[float | None, ...], **about: Any) -> dict[str, Any]:
    """Return an evaluation as `acgpt evaluate` writes it; the dataset's hash is that of its description."""
    described = {"texts": 4, "length": 31, "r_max": 0.6, "split": "validation", **about}
    set_hash = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    answers = [p if p is None else {"perplexity": p, "interval": None, "tokens": 9} for p in perplexities]
    modes = dict(zip(MODES, answers, strict=True))
    return {"method": method, "set": {"hash": set_hash, **described}, "modes": modes, "gains": {}}


def write_run(
    folder: Path,
    perplexities: tuple[float | None, ...] = AC,
    *,
    method: str = "ac-gpt",
    further: dict[str, dict[str, Any]] | None = None,
    about: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
    **recipe: Any,
) -> Path:
    """A finished run's folder, as documented in docs/how-to/train.md.

    Args:
        folder: It.
        perplexities: In the five modes, at the end.
        method: Of the recipe.
        further: More evaluations, by file name.
        about: Changes to results.json.
        measured: Changes to what describes the evaluation set.
        recipe: Changes to the recipe.
    """
    recipe = {
        "corpus": "data/wiki", "output": str(folder), "method": method, "conditioning": {"r_max": 0.6},
        "base": "Qwen/Qwen3-8B", "lora": LORA, "model": "small", "length": 31, "batch": 8, "lr": 1e-4,
        "eval_split": "validation", "seed": 0, **recipe,
    }  # fmt: skip
    results = {
        "recipe": recipe, "steps": 100, "texts": 800, "tokens": 24800, "seconds": 12.5, "hardware": "a CPU",
        "versions": {"acgpt": "0", "torch": "1", "transformers": "2"}, "command": ["acgpt", "train", "it"],
        "corpus_hash": "wiki",
        "evaluation": evaluation(method, perplexities, **(measured or {})), **(about or {}),
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"recipe": recipe}))
    (folder / "results.json").write_text(json.dumps(results))
    for name, content in (further or {}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def twin_of(folder: Path, perplexities: tuple[float | None, ...] = CAUSAL, **options: Any) -> Path:
    return write_run(folder, perplexities, method="gpt", **options)


def swept(folder: Path) -> list[Path]:
    """Runs at two values of r_max, and a twin that was asked the same: a sweep, which is a figure."""
    runs = [write_run(folder / f"r{x}", measured={"r_max": x}, conditioning={"r_max": x}) for x in (0.2, 0.6)]
    asked = {f"at{r_max}": evaluation("gpt", CAUSAL, r_max=r_max) for r_max in (0.2, 0.6)}
    return [*runs, twin_of(folder / "gpt", further=asked)]


def table(folder: Path, name: str, split: str = "validation") -> list[dict[str, str]]:
    """Return the rows of runs in a table's CSV file."""
    text = (folder / "finetuning" / split / f"{name}.csv").read_text(encoding="utf-8")
    return [row for row in csv.DictReader(io.StringIO(text)) if row["source"] == "run"]


def run_cli(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


# ---- the paper's own numbers ----------------------------------------------------------------------------------------

PAPER_DATA = paper("finetuning")


def pairs() -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Every row of the paper's table of advantages, with its run's and its baseline's perplexities."""
    results = []
    for row in PAPER_DATA["advantages"]:
        same = [each for each in PAPER_DATA["perplexities"] if all(each[k] == row[k] for k in ("backbone", "corpus"))]
        (ours,) = [
            each for each in same
            if each["method"] == "AC-GPT" and (each["adapter"], each["mix"]) == (row["adapter"], row["mix"])
        ]  # fmt: skip
        (baseline,) = [each for each in same if each["method"] == "Baseline"]
        results.append((row, ours, baseline))
    return results


def test_all_of_the_papers_rows_are_there():
    assert [len(PAPER_DATA[name]) for name in ("perplexities", "advantages", "sweep")] == [16, 11, 3]
    causal = [row for row in PAPER_DATA["perplexities"] if row["method"] == "Baseline"]
    assert len(causal) == 5 and all(row["infilling"] is row["training"] is None for row in causal)
    assert all(row[mode] for row in PAPER_DATA["perplexities"] for mode in MODES if row not in causal)


@pytest.mark.parametrize(("row", "ours", "baseline"), pairs())
def test_the_formula_gives_the_papers_percentages_to_rounding(row, ours, baseline):
    for mode, other in ADVANTAGES.items():
        worst, best = (
            paired_difference(
                MeasuredPerplexity(ours[mode] + x, mode, ()), MeasuredPerplexity(baseline[other] - x, other, ())
            ).percent - x
            for x in (0.005, -0.005)
        )  # fmt: skip
        assert worst <= row[mode] <= best, mode
        # The other ratio that one might take would not.
        if mode == "training":
            assert not worst <= 100 * (baseline[other] / ours[mode] - 1) <= best


# ---- who is compared with whom --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base": "Qwen/Qwen3-14B"}, "has this base"),
        ({"about": {"corpus_hash": "web"}}, "the same corpus"),
        ({"about": {"texts": 1600, "tokens": 49600}}, "800 texts, 24,800 tokens"),
        ({"about": {"tokens": 12400}}, "has the same budget"),
        ({"measured": {"texts": 5}}, "--split validation --r-max 0.6 --length 31"),
        ({"measured": {"r_max": 0.4}}, "evaluated on this dataset"),
    ],
)
def test_no_other_run_is_taken_for_a_twin(tmp_path, change, reason):
    make_report([write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt", **change)], tmp_path / "report")
    (row,) = table(tmp_path / "report", "advantages")
    assert [row[key] for key in ("unconditional", "infilling", "training", "twin")] == [""] * 4
    assert reason in row["note"]
    page = (tmp_path / "report" / "finetuning" / "validation" / "advantages.md").read_text(encoding="utf-8")
    assert "Qwen3-8B<sup>1</sup> | LoRA r=8 | wiki | 0.6 | 0 | -- | -- | -- | --" in page


def test_the_twin_with_the_same_adapter_goes_before_others_and_then_the_one_that_differs_least(tmp_path):
    runs = [write_run(tmp_path / "ac", seed=3)]
    runs += [twin_of(tmp_path / name, **options) for name, options in {
        "full": {"lora": None, "seed": 3}, "alpha": {"lora": LORA | {"alpha": 32}, "seed": 3},
        "seed": {"seed": 1, "lr": 1e-4}, "both": {"seed": 1, "lr": 2e-4},
    }.items()]  # fmt: skip
    make_report(runs, tmp_path / "report")
    (row,) = table(tmp_path / "report", "advantages")
    assert row["twin"] == "seed" and row["note"] == "The causal baseline differs in seed."


def test_a_twin_with_another_adapter_is_used_and_marked(tmp_path):
    lora = LORA | {"rank": 64}
    runs = [write_run(tmp_path / "full", lora=None), write_run(tmp_path / "ac", lora=lora)]
    make_report([*runs, twin_of(tmp_path / "gpt", lora=lora)], tmp_path / "report")
    rows = {row["run"]: row for row in table(tmp_path / "report", "advantages")}
    assert rows["ac"]["note"] == ""
    assert rows["full"]["training"] == rows["ac"]["training"] != ""
    assert "No causal baseline has Full FT: compared with LoRA r=64" in rows["full"]["note"]
    tex = (tmp_path / "report" / "finetuning" / "validation" / "advantages.tex").read_text(encoding="utf-8")
    assert r"full & Qwen3-8B\textsuperscript{1} & Full FT" in tex and r"\textsuperscript{1}\,No causal" in tex
    assert r"ac & Qwen3-8B & LoRA r=64" in tex


def test_mixtures_have_their_share_of_the_empty_set_and_baselines_none(tmp_path):
    runs = [
        write_run(tmp_path / "mixed", conditioning={"r_max": 0.4, "empty": 0.3}),
        write_run(tmp_path / "parts", conditioning={"parts": [
            {"kind": "blocks", "weight": 6, "r_max": 0.6}, {"kind": "empty", "weight": 1},
            {"kind": "infilling", "weight": 3, "r_max": 0.8},
        ]}),
        twin_of(tmp_path / "gpt", conditioning={"r_max": 0.6, "empty": 0.3}),
    ]  # fmt: skip
    make_report(runs, tmp_path / "report")
    rows = {row["run"]: (row["r_max"], row["mix"], row["method"]) for row in table(tmp_path / "report", "perplexities")}
    assert rows == {
        "gpt": ("0.0", "0.0", "Baseline"), "mixed": ("0.4", "0.3", "AC-GPT"), "parts": ("0.8", "0.1", "AC-GPT")
    }  # fmt: skip


def test_each_split_has_tables_of_its_own_and_any_file_name_will_do(tmp_path):
    test = {"split": "test", "texts": 7}
    ac = write_run(
        tmp_path / "ac",
        further={"test": evaluation("ac-gpt", (9.0, 8.0, 6.0, 8.5, 9.0), **test), "mauve": {"score": 1}},
    )
    gpt = twin_of(tmp_path / "gpt", further={"other": evaluation("gpt", (8.0, None, None, 7.5, 8.0), **test)})
    made = make_report([ac, gpt], tmp_path / "report")
    assert list(made.content["finetuning"]["splits"]) == ["validation", "test"]
    (row,) = table(tmp_path / "report", "advantages", "test")
    assert [float(row[mode]) for mode in ADVANTAGES] == pytest.approx([-12.5, 100 * (1 - 8 / 7.5), 25.0])
    (other,) = table(tmp_path / "report", "advantages")
    assert float(other["training"]) == pytest.approx(100 * (1 - 6.17 / 7.25))


def test_the_sweep_takes_each_run_at_its_own_r_max(tmp_path, figures):
    twin, runs = {}, []
    for r_max, ours in ((1.0, 5.0), (0.2, 7.0), (0.6, 6.0)):
        about = {"r_max": r_max}
        conditioning = {"r_max": r_max}
        more = {"cross": evaluation("ac-gpt", (8.0, 1.0, 1.0, 1.0, 1.0), r_max=0.3)}  # at another r_max: in no sweep
        runs.append(
            write_run(
                tmp_path / f"r{r_max}",
                (8.0, 7.5, ours, 8.0, 8.0),
                measured=about,
                conditioning=conditioning,
                further=more,
            )
        )
        twin[f"at{r_max}"] = evaluation("gpt", (8.0, None, None, 8.0, 8.0), r_max=r_max)
    twin["at0.3"] = evaluation("gpt", (8.0, None, None, 8.0, 8.0), r_max=0.3)
    mixed = {"r_max": 0.6, "infilling": 0.5}  # given otherwise than the others: no point of their curve
    runs.append(write_run(tmp_path / "mixed", (8.0, 7.5, 7.9, 8.0, 8.0), conditioning=mixed))
    runs.append(twin_of(tmp_path / "gpt", (8.0, None, None, 8.0, 8.0), further=twin))
    make_report(runs, tmp_path / "report")
    rows = table(tmp_path / "report", "sweep")
    assert [(row["r_max"], float(row["advantage"])) for row in rows] == [("0.2", 12.5), ("0.6", 25.0), ("1.0", 37.5)]
    text = (tmp_path / "report" / "finetuning" / "validation" / "sweep.csv").read_text(encoding="utf-8")
    paper = [row for row in csv.DictReader(io.StringIO(text)) if row["source"] == "paper"]
    assert [(row["r_max"], row["advantage"]) for row in paper] == [("0.2", "1.2"), ("0.6", "7.4"), ("1.0", "11.6")]


def test_a_baseline_stands_beside_the_runs_that_were_asked_the_same_and_else_alone(tmp_path):
    more = {"more": evaluation("gpt", CAUSAL, r_max=0.2)}
    runs = [write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt", further=more)]
    runs.append(twin_of(tmp_path / "alone", measured={"r_max": 0.3}))
    make_report(runs, tmp_path / "report")
    assert [row["run"] for row in table(tmp_path / "report", "perplexities")] == ["gpt", "ac", "gpt", "alone"]


def test_there_is_no_sweep_of_one_r_max(tmp_path):
    made = make_report([write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")], tmp_path / "report")
    assert not any("sweep" in name for name in made.content["files"])


def test_an_evaluation_of_another_model_is_refused_and_the_fuller_of_two_is_taken(tmp_path):
    part = evaluation("ac-gpt", (7.0, None, None, None, None)) | {"modes": {"unconditional": {"perplexity": 7.0}}}
    ac = write_run(tmp_path / "ac", further={"aa": part})
    make_report([ac, twin_of(tmp_path / "gpt")], tmp_path / "report")
    assert table(tmp_path / "report", "advantages")[0]["training"]
    foreign = evaluation("gpt", CAUSAL) | {"model": "some/base", "adapter": None}
    gpt = twin_of(tmp_path / "other", further={"zz": foreign})
    with pytest.raises(InputError, match=r"zz.json is an evaluation of some/base, not of this run"):
        make_report([ac, gpt], tmp_path / "second")
    own = evaluation("gpt", CAUSAL) | {"model": "some/base", "adapter": str(tmp_path / "third" / "adapter")}
    make_report([ac, twin_of(tmp_path / "third", further={"zz": own})], tmp_path / "fourth")


def test_an_infinite_perplexity_is_shown_and_not_compared(tmp_path, figures):
    ac = write_run(tmp_path / "ac")
    content = json.loads((ac / "results.json").read_text())
    content["evaluation"]["modes"]["training"]["perplexity"] = None  # as JSON writes infinity
    (ac / "results.json").write_text(json.dumps(content))
    make_report([ac, twin_of(tmp_path / "gpt")], tmp_path / "report")
    assert ">∞<" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    (row,) = table(tmp_path / "report", "advantages")
    assert row["training"] == "" and row["infilling"] != ""


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(runs: list[Path], output: Path, *words: str) -> None:
    """Check that the command fails with this message and writes nothing."""
    before = sorted(output.parent.rglob("*"))
    with pytest.raises(InputError) as caught:
        make_report(runs, output)
    assert all(word in str(caught.value) for word in words), caught.value
    assert sorted(output.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"results.json": "{"}, ["results.json"]),
        ({"results.json": "[]"}, ["results.json"]),
        ({"results.json": "{}"}, ["results.json", "damaged"]),
        ({"results.json": {"recipe": {"method": "ac-gpt"}, "evaluation": 3}}, ["results.json"]),
        ({"test.json": "no JSON"}, ["test.json"]),
        ({"test.json": {"modes": {}, "set": {}}}, ["test.json", "evaluate again"]),
        ({"test.json": evaluation("gpt", CAUSAL, split="test")}, ["test.json", "evaluate it without a method"]),
        ({"model/config.json": "{}"}, ["name {run}"]),
        ({"about": {"evaluation": None}}, ["has no evaluation", "acgpt evaluate"]),
        ({"method": "gpt"}, ["nothing to compare", "method=ac-gpt"]),
    ],
)
def test_what_is_no_run_or_no_evaluation_of_it_is_named(tmp_path, change, words):
    files = {name: content for name, content in change.items() if "." in name}
    run = named = write_run(tmp_path / "run", **{key: value for key, value in change.items() if key not in files})
    for name, content in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(content if isinstance(content, str) else json.dumps(content))
        named = (run / name).parent
    refused([named], tmp_path / "report", *(word.format(run=run) for word in words))


def test_a_folder_with_other_things_is_not_replaced_but_an_earlier_report_is(tmp_path):
    out, runs = tmp_path / "report", [write_run(tmp_path / "ac"), twin_of(tmp_path / "gpt")]
    refused(runs, tmp_path / "ac", "not part of a report")
    make_report(runs, out)
    made = make_report(runs[:1], out)
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == made.content["files"]
    (out / "finetuning" / "mine.txt").write_text("keep me")
    refused(runs, out, "mine.txt")


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    out, ac = tmp_path / "report", write_run(tmp_path / "ac")
    make_report([ac], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "commit", full)
    result = run_cli(ac, twin_of(tmp_path / "gpt"), "-o", out, code=1)
    assert "cannot write" in result.stderr and "No space left" in result.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ac", "gpt", "report"]


# ---- every form -----------------------------------------------------------------------------------------------------


def test_the_same_runs_give_the_same_bytes_in_every_form(tmp_path, figures):
    runs = swept(tmp_path)
    contents = []
    for name in ("one", "two"):
        made = make_report(runs, tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        assert [path.relative_to(tmp_path / name).as_posix() for path in files] == made.content["files"]
        contents.append([path.read_bytes() for path in files])
    assert contents[0] == contents[1]
    stems = ["validation/advantages", "validation/perplexities", "validation/sweep"]
    written = {Path(name).with_suffix("").as_posix() for name in made.content["files"] if name.startswith("finetuning")}
    assert written == {f"finetuning/{stem}" for stem in stems}
    path = tmp_path / "one" / "finetuning" / "validation" / "sweep"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(path.with_suffix(".svg"))


def test_without_matplotlib_the_tables_are_written_and_it_is_said(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    runs = swept(tmp_path)
    result = run_cli(*runs, "-o", tmp_path / "report")
    assert "acgpt[plot]" in result.stdout
    assert "matplotlib" not in sys.modules
    assert {path.suffix for path in (tmp_path / "report").rglob("*") if path.is_file()} == {
        ".md", ".html", ".csv", ".tex", ".json",
    }  # fmt: skip


def test_names_are_shown_as_they_are_in_latex_and_markdown(tmp_path, figures):
    nasty = r"50%_of$x&y#{z}~^\|*"
    ac = write_run(tmp_path / "a_b&c", corpus=f"data/{nasty}", base="me/x_1|y")
    make_report([ac], tmp_path / "report")
    folder = tmp_path / "report" / "finetuning" / "validation"
    tex = (folder / "perplexities.tex").read_text(encoding="utf-8")
    escaped = r"50\%\_of\$x\&y\#\{z\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textbar{}*"
    assert rf"a\_b\&c & AC-GPT & x\_1\textbar{{}}y & LoRA r=8 & {escaped} &" in tex
    widths = {line.count(" & ") for line in tex.splitlines() if line.endswith(r" \\")}
    assert len(widths) == 1  # no cell has broken a row
    lines = (folder / "perplexities.md").read_text(encoding="utf-8").splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")}) == 1
    assert tex.count("{") - tex.count(r"\{") == tex.count("}") - tex.count(r"\}")
    assert escape_latex("--r_max") == r"-{}-r\_max" and plain_markdown("a|b*") == r"a\|b\*"


def test_a_name_that_begins_a_row_is_not_taken_for_an_argument_of_the_line_before():
    names = ("[x]", "*", "plain")
    rows = tuple(Row({"name": name}, name) for name in names)
    lines = Table("Title", "Words.", (Column("name", "name"),), rows, "name").latex("tab:x").splitlines()
    assert [line for line in lines if line.endswith(r" \\")][1:] == [r"{}[x] \\", r"{}* \\", r"plain \\"]


def test_a_table_that_is_longer_than_a_page_goes_on_in_further_floats():
    rows = tuple(Row({"name": f"{group}.{row}"}, group, "a note") for group in range(25) for row in range(4))
    text = Table("Title", "Words.", (Column("name", "name"),), rows, "name").latex("tab:x")
    floats = text.split(r"\begin{table}")[1:]
    results = [re.findall(r"^(\d+)\.\d.* \\\\$", each, re.M) for each in floats]
    assert [name for each in results for name in each] == [str(row.group) for row in rows]  # all of them, in order
    assert [len(each) for each in results] == [44, 44, 12]
    assert not set(results[0]) & set(results[1])  # groups stay whole
    assert [r"\caption" in each for each in floats] == [True, False, False]
    assert [r"\tablename~\ref{tab:x}, continued" in each for each in floats] == [False, True, True]
    assert [r"\,a note" in each for each in floats] == [False, False, True]
    assert all(each.count(r"\toprule") == each.count(r"\end{table}") == 1 for each in floats)


def test_two_hyphens_are_a_dash_where_they_stand_alone_and_hyphens_elsewhere():
    shown = {"--": "--", "(-- is nothing)": "(-- is nothing)", "--limit": "-{}-limit", "a---b": "a-{}-{}-b"}
    assert {text: escape_latex(text) for text in shown} == shown


def test_latex_says_what_it_takes_to_compile_it():
    def comments(name):
        columns, rows = (Column("name", "name"),), (Row({"name": name}, 0),)
        text = Table("Title", "Of r_max ≤ 0.6 and my_r_max.", columns, rows, "name").latex("tab:x")
        assert r"\caption[{Title}]{\textbf{Title.} Of $r_{\max}$ $\le$ 0.6 and my\_r\_max.}" in text
        return [line for line in text.splitlines() if line.startswith("%")]

    packages = r"% \usepackage{booktabs,graphicx}"
    assert comments("σ-GPT × ∞ ± … é") == [packages]
    assert comments("語 β «x»") == [packages, "% lualatex or xelatex, and a font that has « » β 語: pdflatex has not"]


def test_all_that_reports_say_by_themselves_is_ascii_in_latex():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    places = [results / "methods-h200", results / "finetuning-h200"]
    runs = read_runs(find_runs(places)[0])
    parts = [from_scratch.make(runs), finetuning.make(runs), generation.make(places, runs)]
    texts = [table.latex("tab:x") for part in parts for table in part.tables.values()]
    assert any(r"$\sigma$" in text for text in texts) and any(r"$\le$" in text for text in texts)
    assert all(text.isascii() for text in texts)


def test_runs_are_named_by_as_much_of_their_path_as_it_takes():
    assert short_names([Path("/a/x/ac"), Path("/a/y/ac"), Path("/a/y/gpt")]) == ["x/ac", "y/ac", "gpt"]


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    ac = write_run(tmp_path / "ac")
    make_report([ac, tmp_path / "." / "ac", ac], tmp_path / "report")
    assert len(table(tmp_path / "report", "perplexities")) == 1
