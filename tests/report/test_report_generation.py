"""Reports of generations: the paper's MAUVE, rows over seeds, bold values, the page of samples."""

from __future__ import annotations

import json
import re
import statistics
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from elements import Elements
from generations import write_generations
from test_report_scratch import scratch
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.evaluation.generations import Generations
from acgpt.report.page import template
from acgpt.report.samples_page import EDGE, LONG
from acgpt.report.write import make_report


def score(path: Path, mean: float, *, asked: bool = False, std: float | None = 0.01, **more: Any) -> Path:
    """Write a result of acgpt mauve with a chosen score beside generations."""
    generated = Generations.open(path)
    measured = {"distinct_1": 0.25, "distinct_2": 0.5, "distinct_3": 0.75, "repetition": mean / 10, "loops": 0.0}
    results = {"kind": "mauve", "name": generated.name, "generated": str(path), "hash": generated.hash}
    results |= {"record": dict(generated.record), "scored": "asked part" if asked else "whole text", "texts": 12}
    results |= {"mauve": {"mean": mean, "std": std}, "features": {"model": "gpt2-large", "hash": "f"}, "judge": None}
    results |= {"reference": {"hash": "r", "texts": 12, "corpus": "wiki", "split": "test", "rule": "windows"}}
    results |= {"companions": {"generated": measured, "original": measured | {"repetition": 0.5}}, "perplexity": 8.0}
    file = path.with_name(f"{generated.name}{'.asked' if asked else ''}.mauve.json")
    file.write_text(json.dumps(results | more), encoding="utf-8")
    return file


def drawn(folder: Path, corpus: Path, method: str, seed: int, scores: dict[str, float], **more: Any) -> Path:
    """A run from scratch with generations in its folder, and their scores."""
    run = scratch(folder / f"{method}-{seed}", method=method, seed=seed, output=f"{method}-{seed}")
    for mode, mean in scores.items():
        about = {"method": method, "model": str(run / "model"), "sampling": {"temperature": 0.8, "seed": seed}}
        score(write_generations(run / "generations" / "test", corpus, mode, texts=3, **about), mean, **more)
    return run


def rows(report: Any, name: str = "mauve", size: str = "small") -> list[dict[str, Any]]:
    return report.content["generation"]["sizes"][size][name]


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_their_seed_are_one_row_and_the_best_is_bold(corpus: Path, tmp_path: Path):
    runs = [
        drawn(tmp_path, corpus, "ac-gpt", 0, {"training": 0.90, "unconditional": 0.80}, std=0.01),
        drawn(tmp_path, corpus, "ac-gpt", 1, {"training": 0.94, "unconditional": 0.82}, std=0.03),
        drawn(tmp_path, corpus, "gpt", 0, {"unconditional": 0.85}, std=None),
    ]
    report = make_report(runs, tmp_path / "report")
    ours, twin = rows(report)
    for mode, values in {"training": (0.90, 0.94), "unconditional": (0.80, 0.82)}.items():
        assert ours[mode]["mean"] == pytest.approx(statistics.mean(values))
        assert ours[mode]["std"] == pytest.approx(statistics.stdev(values))
    assert (ours["noise"], ours["seeds"], ours["infilling"]) == (0.03, 2, None)
    assert (twin["noise"], twin["seeds"], twin["training"]) == (None, 1, None)
    text = (tmp_path / "report" / "generation" / "small" / "mauve.md").read_text(encoding="utf-8")
    lines = {line.split(" | ")[3]: line for line in text.splitlines() if line.startswith("| here")}
    assert "| 0.810 ± 0.014 |" in lines["AC-GPT"] and "**0.850**" in lines["GPT"]
    assert "**0.920" not in lines["AC-GPT"]  # it stands alone
    paper = [line for line in text.splitlines() if line.startswith("| paper")]
    assert len(paper) == 6 and "**0.923 ± 0.046**" in paper[-1]  # r_max 0.6 of the small model
    assert "samples.html" in report.content["files"] and "generation/small/mauve.tex" in report.content["files"]


def test_what_the_original_texts_have_stands_below_and_is_never_the_best(corpus: Path, tmp_path: Path):
    real = {"original": {"mean": 0.99, "std": 0.02}}
    runs = [drawn(tmp_path, corpus, method, 0, {"training": 0.9}, **real) for method in ("ac-gpt", "mlm")]
    table = make_report(runs, tmp_path / "report").parts[-1].tables["small/mauve"]
    own = [row for row in table.rows if not row.paper]
    assert [row.cells["method"] for row in own] == ["AC-GPT", "MLM (BERT)", "original"]
    assert own[-1].cells["training"].mean == 0.99 and [is_bold(table, row) for row in own] == [True, True, False]
    assert "The row original" in table.caption
    without = make_report([drawn(tmp_path / "other", corpus, "mlm", 0, {"training": 0.9})], tmp_path / "other report")
    assert "original" not in {row.cells["method"] for row in without.parts[-1].tables["small/mauve"].rows}
    assert "The row original" not in without.parts[-1].tables["small/mauve"].caption


def test_what_is_the_same_file_at_two_r_max_stands_at_both(corpus: Path, tmp_path: Path):
    run = scratch(tmp_path / "gpt", method="gpt", output="gpt")
    for r_max in (0.2, 0.6):
        where = write_generations(run / "generations" / str(r_max), corpus, "unconditional", texts=3, method="gpt")
        record = json.loads(where.with_suffix(".json").read_text())
        record |= {"r_max": r_max, "set": record["set"] | {"hash": f"{r_max}" * 4, "r_max": r_max}}
        where.with_suffix(".json").write_text(json.dumps(record))
        score(where, 0.9)
    report = make_report([run], tmp_path / "report")
    assert [row["r_max"] for row in rows(report)] == [0.2, 0.6]
    methods = [(row["r_max"], row["method"]) for row in rows(report, "companions")]
    assert methods == [(r_max, name) for r_max in (0.2, 0.6) for name in ("GPT", "original")]


def test_only_what_was_asked_and_compared_in_the_same_way_is_ranked(corpus: Path, tmp_path: Path):
    one = drawn(tmp_path, corpus, "ac-gpt", 0, {"training": 0.9})
    other = drawn(tmp_path, corpus, "sigma-gpt-temporal", 0, {"training": 0.8})
    score(one / "generations" / "test" / "training.jsonl", 0.7, asked=True)
    table = make_report([one, other], tmp_path / "report").parts[-1].tables["small/mauve"]
    best = [(row.cells["method"], row.cells["scored"]) for row in table.rows if not row.paper and is_bold(table, row)]
    assert best == [("AC-GPT", "whole text")]
    assert [row.cells["scored"] for row in table.rows if not row.paper] == ["whole text", "whole text", "asked part"]
    path = other / "generations" / "test" / "training.mauve.json"
    content = json.loads(path.read_text())
    for key, value in {
        "reference": content["reference"] | {"hash": "x"},
        "features": {"model": "y", "hash": "y"},
    }.items():
        path.write_text(json.dumps(content | {key: value}))
        table = make_report([one, other], tmp_path / "report").parts[-1].tables["small/mauve"]
        assert not any(is_bold(table, row) for row in table.rows if not row.paper), key
    path.write_text(json.dumps(content))
    results = json.loads((other / "results.json").read_text())
    for key, value in {"corpus_hash": "x", "texts": results["texts"] + 1}.items():  # what the other was trained on
        (other / "results.json").write_text(json.dumps(results | {key: value}))
        table = make_report([one, other], tmp_path / "report").parts[-1].tables["small/mauve"]
        assert not any(is_bold(table, row) for row in table.rows if not row.paper), key


def is_bold(table: Any, row: Any) -> bool:
    return any(table.is_bold(row, column) for column in table.columns)


def test_what_else_was_measured_stands_beside_the_original(corpus: Path, tmp_path: Path):
    judge_scores = {"model": "J", "measures": "whole text", "perplexity": 30.0, "tokens": 93, "bound": False}
    judge = judge_scores | {"original": judge_scores | {"perplexity": 20.0}}
    runs = [drawn(tmp_path, corpus, "ac-gpt", seed, {"training": 0.8 + seed / 10}, judge=judge) for seed in (0, 1)]
    report = make_report(runs, tmp_path / "report")
    ours, original = rows(report, "companions")
    assert (ours["method"], original["method"]) == ("AC-GPT", "original")
    assert ours["repetition"]["mean"] == pytest.approx(8.5) and original["repetition"]["mean"] == pytest.approx(50)
    assert ours["distinct_3"]["mean"] == 75 and ours["own"]["mean"] == 8.0 and original["own"] is None
    assert ours["judged"]["mean"] == 30 and original["judged"]["mean"] == 20
    assert "It scores: whole text" in ours["note"]


def test_of_what_is_judged_in_part_the_original_is_shown_and_no_mean(corpus: Path, tmp_path: Path):
    judge_scores = {"model": "J", "measures": "whole text", "perplexity": 30.0, "tokens": 93, "bound": False}
    judge = judge_scores | {"original": judge_scores | {"perplexity": 20.0}}
    runs = [drawn(tmp_path, corpus, "mlm", seed, {"training": 0.4}, judge=(None, judge)[seed]) for seed in (0, 1)]
    runs.append(drawn(tmp_path, corpus, "ac-gpt", 0, {"training": 0.8}))
    ours, other, original = rows(make_report(runs, tmp_path / "report"), "companions")
    assert (ours["judged"], other["judged"], other["note"]) == (None, None, None)
    assert original["judged"]["mean"] == 20 and "It scores: whole text" in original["note"]


def test_a_score_of_an_earlier_file_is_left_out(corpus: Path, tmp_path: Path):
    run = drawn(tmp_path, corpus, "ac-gpt", 0, {"training": 0.9, "infilling": 0.8})
    write_generations(run / "generations" / "test", corpus, "training", texts=2)
    report = make_report([run], tmp_path / "report")
    assert [row["training"] for row in rows(report)] == [None]
    assert any("scores an earlier training.jsonl" in note for note in report.notes)


def test_generations_without_a_run_have_a_report_of_their_own(corpus: Path, tmp_path: Path):
    for method, mean in (("ac-gpt", 0.9), ("mlm", 0.4)):
        about = {"method": method, "model": f"hub/{method}"}
        score(write_generations(tmp_path / "drawn" / method, corpus, **about), mean)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "drawn"), "-o", str(tmp_path / "report"), "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    actual = content["generation"]["sizes"]["models"]["mauve"]
    assert [(row["method"], row["training"]["mean"]) for row in actual] == [("AC-GPT", 0.9), ("MLM (BERT)", 0.4)]
    first = {path: (tmp_path / "report" / path).read_bytes() for path in content["files"]}
    report = make_report([tmp_path / "drawn"], tmp_path / "report")
    assert {path: (tmp_path / "report" / path).read_bytes() for path in content["files"]} == first
    assert report.measurements.empty and "perplexity" in report.measurements


def test_draws_of_one_model_are_averaged_before_its_seeds_are(corpus: Path, tmp_path: Path):
    runs = [drawn(tmp_path, corpus, "ac-gpt", seed, {"training": mean}) for seed, mean in ((0, 0.8), (1, 0.5))]
    about = {"method": "ac-gpt", "model": str(runs[0] / "model"), "sampling": {"temperature": 0.8, "seed": 9}}
    again = write_generations(runs[0] / "generations" / "again", corpus, texts=3, noise=0.3, **about)
    made = json.loads(again.with_suffix(".json").read_text())
    assert made["set"] == Generations.open(runs[0] / "generations" / "test" / "training.jsonl").record["set"]
    score(again, 0.6)
    report = make_report(runs, tmp_path / "report")
    (ours,) = rows(report)
    assert ours["training"]["mean"] == pytest.approx(0.6)  # of 0.7 and 0.5
    assert ours["training"]["std"] == pytest.approx(statistics.stdev([0.7, 0.5])) and ours["seeds"] == 2
    assert "of up to 2 generations" in ours["note"]
    (measured, _) = rows(report, "companions")
    assert measured["repetition"]["mean"] == pytest.approx(6) and measured["seeds"] == 2
    assert measured["repetition"]["std"] == pytest.approx(statistics.stdev([7, 5]))
    assert "2 generations" in measured["note"]


def test_what_acgpt_mauve_has_noted_is_a_footnote(corpus: Path, tmp_path: Path):
    chance = {"notes": ["fewer than 100 texts on one side: MAUVE is mostly chance."]}
    run = drawn(tmp_path, corpus, "ac-gpt", 0, {"training": 0.9, "infilling": 0.9}, **chance)
    (ours,) = rows(make_report([run], tmp_path / "report"))
    assert ours["note"] == chance["notes"][0]
    score(run / "generations" / "test" / "training.jsonl", 0.9)
    (ours,) = rows(make_report([run], tmp_path / "report"))
    assert ours["note"] == f"infilling: {chance['notes'][0]}"
    assert "mostly chance" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_a_strangers_model_is_not_taken_for_a_run_of_the_same_name(corpus: Path, tmp_path: Path):
    run = scratch(tmp_path / "ac-gpt-0", method="ac-gpt", output="ac-gpt-0")
    score(write_generations(tmp_path / "drawn", corpus, model="elsewhere/ac-gpt-0/model"), 0.9)
    report = make_report([run, tmp_path / "drawn"], tmp_path / "report")
    assert list(report.content["generation"]["sizes"]) == ["models"]


def test_a_result_with_a_judge_and_one_without_are_one_score(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path / "drawn", corpus)
    judge_scores = {"model": "J", "measures": "whole text", "perplexity": 30.0, "tokens": 93, "bound": False, "cut": 4}
    for name, judge in (
        ("a", None),
        ("b", judge_scores),
        ("c", judge_scores | {"model": "K"}),
        ("d", judge_scores | {"model": "K"}),
    ):
        score(path, 0.7, judge=judge).rename(path.with_name(f"training.{name}.mauve.json"))
    report = make_report([tmp_path / "drawn"], tmp_path / "report")
    (ours,) = rows(report, size="models")
    assert (ours["training"]["mean"], ours["training"]["std"], ours["note"]) == (0.7, None, None)
    measured, _ = rows(report, "companions", "models")
    assert measured["judged"]["mean"] == 30 and "except for tokens beyond its last position" in measured["note"]
    assert "Judges: J, K. The first one" in report.parts[-1].tables["models/companions"].caption


@pytest.mark.parametrize("key", ["texts", "reference", "companions", "judge"])
def test_a_result_that_lacks_something_is_named(corpus: Path, tmp_path: Path, key: str):
    path = score(write_generations(tmp_path / "drawn", corpus), 0.5)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: value for name, value in content.items() if name != key}), encoding="utf-8")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "drawn"), "-o", str(tmp_path / "report")])
    assert result.exit_code == 2 and "training.mauve.json" in result.stderr and key in result.stderr, result.output
    assert not (tmp_path / "report").exists()


def test_strangers_files_do_not_stop_a_report(corpus: Path, tmp_path: Path):
    score(write_generations(tmp_path / "drawn", corpus), 0.5)
    (tmp_path / "drawn" / "deep.jsonl").write_text("{}\n")
    (tmp_path / "drawn" / "deep.json").write_text("[" * 200_000)
    assert rows(make_report([tmp_path / "drawn"], tmp_path / "report"), size="models")[0]["training"]["mean"] == 0.5


def test_tokens_that_the_tokenizer_has_not_are_no_hindrance(corpus: Path, tmp_path: Path):
    line = {"item": 0, "sample": 0, "seed": 0, "roles": "gag", "tokens": [4, 2**31 - 1, 6], "log_probs": [-1e9]}
    path = write_generations(
        tmp_path / "drawn", corpus, lines=[line | {"prompt": "a____b", "fills": ["x"], "text": "axb"}]
    )
    (card,) = page_of(path.parent, tmp_path / "report").cards
    assert card["titles"] == ["log p -1000000000.00"]


# ---- the page -------------------------------------------------------------------------------------------------------


def page_of(folder: Path, output: Path) -> Elements:
    make_report([folder], output)
    return Elements((output / "samples.html").read_text(encoding="utf-8"))


def test_samples_stand_side_by_side_with_what_was_given_and_every_log_probability(corpus: Path, tmp_path: Path):
    for method in ("mlm", "ac-gpt"):
        for mode in ("training", "infilling"):
            write_generations(
                tmp_path / "drawn" / method, corpus, mode, texts=5, samples=2, method=method, model=method
            )
    page = page_of(tmp_path / "drawn", tmp_path / "report")
    names = [f"{method}, {mode}" for mode in ("infilling", "training") for method in ("AC-GPT", "MLM (BERT)")]
    assert [card["name"] for card in page.cards] == names * 3  # of three texts, in the paper's order
    samples = Generations.open(tmp_path / "drawn" / "ac-gpt" / "training.jsonl").samples
    for item in range(3):
        card, sample = page.cards[4 * item + 2], samples[2 * item]
        assert card["text"] == sample.text.replace("<eos>", "¶\n")  # token by token: the corpus has the tokenizer
        shown = [number for words in card["titles"] for number in words.split(": ")[-1].removeprefix("log p ").split()]
        assert shown == [f"{each:.2f}" for each in sample.log_probs]
        given = "".join(part for part in sample.prompt.split("____"))
        assert card["given"] == given.replace("<eos>", "¶\n")


def test_the_first_texts_of_a_larger_and_of_a_smaller_set_stand_side_by_side(corpus: Path, tmp_path: Path):
    for method, texts in (("ac-gpt", 7), ("mlm", 2)):
        path = write_generations(tmp_path / "drawn" / method, corpus, texts=texts, method=method, model=method)
    page = page_of(tmp_path / "drawn", tmp_path / "report")
    methods = [card["name"].removesuffix(", training") for card in page.cards]
    assert methods == ["AC-GPT", "MLM (BERT)", "AC-GPT", "MLM (BERT)", "AC-GPT"]
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(record | {"set": record["set"] | {"seed": 1}}))  # other questions
    page = page_of(tmp_path / "drawn", tmp_path / "report")
    assert [card["name"].removesuffix(", training") for card in page.cards] == ["AC-GPT"] * 3 + ["MLM (BERT)"] * 2


def test_the_bound_of_diffusion_is_no_perplexity(corpus: Path, tmp_path: Path):
    for method, shown in (("ac-gpt", True), ("diffusion", False)):
        write_generations(tmp_path / method, corpus, texts=1, method=method)
        make_report([tmp_path / method], tmp_path / "report")
        assert ("; perplexity" in (tmp_path / "report" / "samples.html").read_text(encoding="utf-8")) == shown


@pytest.mark.parametrize("content", [None, "[" * 200_000, "[1]", '{"tokenizer_class": 3}'])
def test_without_a_readable_tokenizer_a_fill_has_its_log_probabilities_together(corpus, tmp_path, content):
    model = tmp_path / "model"
    if content is not None:
        model.mkdir()
        (model / "tokenizer_config.json").write_text(content)
    path = write_generations(tmp_path / "drawn", corpus, "infilling", texts=1, corpus=None, model=str(model))
    (card,) = page_of(tmp_path / "drawn", tmp_path / "report").cards
    (sample,) = Generations.open(path).samples
    assert card["text"] == sample.text
    words = " ".join(f"{each:.2f}" for each in sample.log_probs)
    assert card["titles"] == [f"log p {sum(sample.log_probs):.2f}, 15 tokens: {words}"]
    assert card["given"] == sample.prompt.replace("____", "")


def test_the_page_needs_nothing_else(corpus: Path, tmp_path: Path):
    write_generations(tmp_path / "drawn", corpus)
    page = page_of(tmp_path / "drawn", tmp_path / "report")
    assert not {"script", "link", "iframe", "img"} & page.names
    places, ids = [*page.values("href"), *page.values("src")], page.values("id")
    assert places and all(place.startswith("#") and place[1:] in ids for place in places)
    text = (tmp_path / "report" / "samples.html").read_text(encoding="utf-8")
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text


def test_a_long_run_of_given_text_unfolds_and_loses_nothing():
    text = "".join(chr(97 + i % 26) for i in range(LONG)) + "<b>"

    def given(text: str) -> str:
        return template("sample.html").module.given(text, LONG, EDGE)

    folded = given(text)
    assert "<details><summary>" in folded and "203 more characters" in folded
    whole = re.sub(r"<summary>.*?</summary>|</?(span|details)[^>]*>", "", folded)
    assert unescape(whole) == text and "<b>" not in whole
    assert "details" not in given(text[:LONG]) and given("") == ""
