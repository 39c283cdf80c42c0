"""Pages from kept runs: which rows a table has and what its caption says of them, figures that are up to date."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from runs import write_corpus
from test_report import evaluation
from test_report_generation import drawn
from test_report_scratch import AC, GPT, scratch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NOTHING = (None,) * 5


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tables of result files."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("result_tables")


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program, in a temporary repository."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("render")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    return program


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Two methods evaluated at r_max 0.6 on 40 texts and on 8, a third on 8 only; one of them also at 0.2."""
    folder = tmp_path / "benchmarks" / "results" / "mine"

    def asked(method: str, shift: float, texts: int, r_max: float = 0.6) -> dict:
        values = tuple(x and x + shift for x in (GPT if method == "gpt" else AC))
        return evaluation(method, values, texts=texts, r_max=r_max, split="test")

    for number, (method, r_max, texts) in enumerate(
        [("ac-gpt", 0.6, (40, 8)), ("gpt", 0.6, (40, 8)), ("mlm", 0.6, (8,)), ("ac-gpt", 0.2, (40,))]
    ):
        name = f"{method}-{r_max}"
        further = {f"test-{n}": asked(method, number + n / 100, n, r_max) for n in texts}
        command = ["acgpt", "train", "small", "steps=9", f"method={method}", f"output=runs/{name}", "--resume"]
        command += ["--minutes", f"{number}.5"]
        about = {"command": command, "date": "2026-01-01", "tokens_per_second": 1000.0 * (number + 1)}
        scratch(folder / name, NOTHING, r_max, method=method, output=name, further=further, about=about)
    return folder


def table(page: str) -> list[list[str]]:
    """The cells of a Markdown table, its heading and rule left out."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_a_table_has_the_rows_that_were_chosen_and_its_caption_speaks_of_no_other(render, kept):
    page = "above\n<!-- report mine test/small r_max=0.6 asked=8 -->\nstale\n<!-- end -->\nbelow"
    made = render.rendered(page)
    assert made.startswith("above\n") and made.endswith("\nbelow") and "stale" not in made
    own = [row for row in table(made) if row[0] == "here"]
    assert [(row[1], row[2], row[3]) for row in own] == [("0.6", "8", name) for name in ("AC-GPT", "MLM (BERT)", "GPT")]
    assert own[0][6:11] == ["**24.08**", "**22.08**", "**19.08**", "**23.08**", "**23.58**"]
    assert {row[1] for row in table(made) if row[0] == "paper"} == {"0.6"}
    assert made.count(" texts of 31 tokens, r_max 0.6)") == 1 and "(8 texts" in made and "The paper's rows" in made
    assert render.rendered(made) == made
    bare = render.rendered("<!-- report mine test/small method=AC-GPT asked=40 paper -->\n<!-- end -->")
    assert [(row[1], row[2]) for row in table(bare)] == [("0.2", "40"), ("0.6", "40")]
    assert "The paper's rows" not in bare and "(8 texts" not in bare and bare.count("(40 texts") == 2
    short = render.rendered("<!-- report mine test/small asked=8 paper -corpus -chance -caption -->\n<!-- end -->")
    assert [len(row) for row in table(short)] == [12] * 3 and "\n\nEvaluation datasets: " in short
    for wanted, message in {
        "test/small asked=9 paper": "test/small of mine has no row with asked=9",
        "test/base": "mine has no test/base: it has validation/small, test/small",
        "test/small colour=9": "has no -colour: it has -from, -r_max",
        "test/small ac-gtp-0.6": "mine has no ac-gtp-0.6: it has .*-caption, paper, ac-gpt-0.2",
    }.items():
        with pytest.raises(SystemExit, match=message):
            render.rendered(f"<!-- report mine {wanted} -->\n<!-- end -->")


def test_scores_and_what_drawing_took_are_tables_too(render, kept, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    run = drawn(kept, corpus, "ac-gpt", 3, {"training": 0.75, "unconditional": 0.5})
    folder = run / "generations" / "test"
    took = {"texts": 3, "tokens": 60, "calls": 7, "seconds": 2.0, "hardware": "a CPU", "date": "2026-01-02T03:04"}
    took |= {"versions": {"torch": "1", "transformers": "2"}}
    modes = {"infilling": None}
    for mode in ("training", "unconditional"):
        command = ["acgpt", "generate", f"runs/{run.name}/model", "data/wiki", "--modes", mode]
        path = folder / f"{mode}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | took | {"command": command}))
        modes[mode] = {"file": f"{mode}.jsonl", **took}
    (folder / "index.json").write_text(json.dumps({"kind": "index", "set": {"r_max": 0.6}, "modes": modes}))
    made = table(render.rendered("<!-- report mine small/mauve paper 'scored=whole text' -->\n<!-- end -->"))
    assert [row[:7] for row in made] == [["here", "0.6", "3", "AC-GPT", "wiki", "whole text", "gpt2-large"]]
    assert made[0][7:12] == ["0.500", "--", "0.750", "--", "--"]
    result = render.rendered("<!-- report mine draws -->\n<!-- end -->")
    assert table(result) == [["ac-gpt-3", "0.6", "3 × 2", "120", "14", "4 s", "30"]]
    assert "`acgpt generate runs/RUN/model data/wiki --modes …`, a CPU, torch 1, transformers 2, 2026-01-02." in result


def test_what_commands_have_in_common_is_said_once(render, kept):
    page = render.rendered("<!-- report mine rates mlm-0.6 -->\n<!-- end -->")
    assert table(page) == [
        ["ac-gpt-0.2", "`method=ac-gpt`", "12 s", "4 k"],
        ["ac-gpt-0.6", "`method=ac-gpt`", "12 s", "1 k"],
        ["gpt-0.6", "`method=gpt`", "12 s", "2 k"],
    ]
    assert (
        "`acgpt train small steps=9 --resume output=runs/RUN KEYS`, a CPU, torch 1, transformers 2, 2026-01-01." in page
    )
    assert len(table(render.rendered("<!-- report mine commands -->\n<!-- end -->"))[0]) == 3
    for wrong, words in (("commands ac-gtp-0.6", "mine has no ac-gtp-0.6"), ("draws", "mine has no generations")):
        with pytest.raises(SystemExit, match=words):
            render.rendered(f"<!-- report mine {wrong} -->\n<!-- end -->")


def test_a_figure_is_drawn_once_and_a_check_sees_that_it_shows_other_numbers(render, kept, tmp_path):
    pytest.importorskip("matplotlib")
    page, picture = "<!-- report mine figure test/r_max -->\n<!-- end -->", tmp_path / "docs" / "mine-test-r_max.png"
    with pytest.raises(SystemExit, match=r"mine-test-r_max\.png is out of date"):
        render.rendered(page, check=True)
    assert not picture.exists()
    made = render.rendered(page)
    assert "](mine-test-r_max.png)\n\nPerplexity by r_max" in made and picture.read_bytes().startswith(b"\x89PNG")
    before = picture.stat().st_mtime_ns
    assert render.rendered(made, check=True) == made == render.rendered(made)
    assert picture.stat().st_mtime_ns == before
    path = kept / "ac-gpt-0.2" / "test-40.json"
    content = json.loads(path.read_text())
    content["modes"]["training"]["perplexity"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="is out of date"):
        render.rendered(made, check=True)
    render.rendered(made)
    render.rendered(made, check=True)


def test_generating_is_timed_beside_gpt_in_the_same_turn_and_mode(tables):
    def row(*times: float, **more: object) -> dict:
        return {
            "tokens": 9,
            "calls": 3,
            "seconds": times[0],
            "tokens_per_second": 9.0,
            "outside": 0.1,
            "times": times,
            **more,
        }

    records = {
        "gpt, training-no-future": row(1.0, 2.0, 3.0, prefill=0.2, model_times=(0.5, 0.5, 0.5)),
        "ac-gpt, training": row(1.5, 2.25, 4.0, prefill=0.3, keys=0.25, reading=0.26, model_times=(0.75, 0.75, 1.0)),
        "mlm, unconditional": row(5.0, 5.0, 5.0, model_times=(5.0, 5.0, 5.0)),
    }
    columns, (gpt, ours, other) = tables.generation_table(records)
    assert columns[4:9] == ["prefill", "keys", "reading", "tokens/s", "× GPT"]
    assert columns[9:11] == ["s longer", "in the model"]
    assert gpt[4:7] == ["0.20", "", ""] and gpt[9:11] == ["", ""]
    assert ours[4:7] == ["0.30", "0.25", "0.26"] and ours[9:11] == ["+0.50 (+0.25 to +1.00)", "+0.25 (+0.25 to +0.50)"]
    assert other[4:11] == ["", "", "", "9", "--", "", ""]  # GPT was not timed in this mode
    for key, left in (("times", {"in the model"}), ("model_times", {"s longer"})):
        once = {name: {**record, key: record[key][:1]} for name, record in records.items()}
        assert {"s longer", "in the model"} & set(tables.generation_table(once)[0]) == left


def test_what_reads_more_keys_than_gpt_is_set_beside_what_they_take(tables):
    def row(*times: float, **more: object) -> dict:
        return {"seconds": times[1], "tokens_per_second": 9 / times[1], "times": times, **more}

    records = {
        "gpt, infilling-no-future": row(1.0, 2.0, 6.0, model_times=(1.0, 1.5, 2.0)),
        "ac-gpt, infilling": row(2.0, 2.5, 9.0, keys=0.4, reading=0.25, model_times=(1.0, 2.2, 2.7)),
        "ac-gpt, infilling-no-future": row(1.0, 2.0, 3.0, keys=0.0, model_times=(1.0, 1.0, 1.0)),
    }
    columns, rows = tables.keys_table(records)
    assert columns == ["", "ac-gpt, infilling"]
    heads, cells = zip(*rows, strict=True)
    assert cells == (
        "0.8000", "0.8333", "0.8889", "0.6667", "0.8824",
        "0.500", "1.000 (0.750 to 2.000)", "1.500", "0.700", "0.400", "0.250",
    )  # fmt: skip
    about = [
        ("medians", "copy", "kernel", "means", "copy"),
        ("medians", "by turn, med", "by turn, mean", "in the model"),
    ]
    assert all(word in head for word, head in zip([*about[0], *about[1], "copy, s", "kernel"], heads, strict=True))
    for key in ("times", "model_times"):
        once = {name: {**record, key: record[key][:1]} for name, record in records.items()}
        assert tables.keys_table(once) is None
    del records["ac-gpt, infilling"]
    assert tables.keys_table(records) is None
