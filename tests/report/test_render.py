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
        "test/small ac-gtp-0.6": "mine has no ac-gtp-0.6: it has .*-command, paper, ac-gpt-0.2",
    }.items():
        with pytest.raises(SystemExit, match=message):
            render.rendered(f"<!-- report mine {wanted} -->\n<!-- end -->")


def test_scores_are_tables_too(render, kept, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    drawn(kept, corpus, "ac-gpt", 3, {"training": 0.75, "unconditional": 0.5})
    made = table(render.rendered("<!-- report mine small/mauve paper 'scored=whole text' -command -->\n<!-- end -->"))
    assert [row[:7] for row in made] == [["here", "0.6", "3", "AC-GPT", "wiki", "whole text", "gpt2-large"]]
    assert made[0][7:12] == ["0.500", "--", "0.750", "--", "--"]


def test_the_command_of_runs_has_what_they_have_in_common(render, kept):
    page = render.rendered("<!-- report mine test/small -->\n<!-- end -->")
    made = "`acgpt train small steps=9 --resume output=runs/RUN KEYS`, a CPU, torch 1, transformers 2, 2026-01-01."
    assert page.count("`acgpt train") == 1 and made in page and "Perplexity; lower" in page
    bare = render.rendered("<!-- report mine test/small -caption -notes -command -->\n<!-- end -->")
    assert [line for line in bare.splitlines() if line[0] not in "|<"] == []
    one = "<!-- report mine test/small -notes ac-gpt-0.2 ac-gpt-0.6 mlm-0.6 -->\n<!-- end -->"
    assert "method=gpt output=runs/RUN`, a CPU" in render.rendered(one).replace(
        "steps=9 method=gpt --resume", "method=gpt"
    )


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


RECORDS = [
    {"benchmark": "sampling", "case": "82M, batch 1", "command": "python benchmarks/sampling.py --batch 1", "rows": [
        {"row": "acgpt", "seconds": 0.5, "rate": 12345.0, "share": 41.25, "share_interval": [38.0, 44.04]},
        {"row": "generate", "seconds": 2.0, "rate": 3000.0, "note": "compiled", "share": None}]},
    {"benchmark": "sampling", "case": "82M, batch 8", "command": "python benchmarks/sampling.py --batch 8", "rows": [
        {"row": "acgpt", "seconds": 0.75}]},
    {"benchmark": "scoring", "case": "82M, batch 1", "command": "python benchmarks/scoring.py", "rows": [
        {"row": "one pass", "seconds": 9.0}]},
]  # fmt: skip


@pytest.fixture
def written(render: ModuleType, tmp_path: Path) -> Path:
    """A file of three records."""
    path = tmp_path / "benchmarks" / "results.jsonl"
    path.parent.mkdir(exist_ok=True)
    about = {"hardware": "a CPU", "versions": {"torch": "1", "transformers": "2"}, "date": "2026-01-02"}
    path.write_text("".join(json.dumps({**record, **about}) + "\n" for record in RECORDS))
    return path


def test_a_table_has_the_columns_and_rows_of_its_marker(render, written):
    marker = "<!-- table sampling '82M, batch 1' seconds:.2f 'rate:,.0f=tokens/s' note share:.1f -->"
    page = render.rendered(f"above\n{marker}\nstale\n<!-- end -->\nbelow")
    assert table(page) == [
        ["acgpt", "0.50", "12,345", "--", "41.2 [38.0, 44.0]"],
        ["generate", "2.00", "3,000", "compiled", "--"],
    ]
    assert "|  | seconds | tokens/s | note | share |" in page and "stale" not in page
    assert (
        "`python benchmarks/sampling.py --batch 1`, a CPU, torch 1, transformers 2, 2026-01-02.\n<!-- end -->" in page
    )
    assert render.rendered(page, check=True) == page
    chosen = render.rendered(
        "<!-- table sampling '82M, batch 1' seconds rows=generate|acgpt without=command -->\n<!-- end -->"
    )
    assert [row[0] for row in table(chosen)] == ["generate", "acgpt"] and "`" not in chosen
    both = render.rendered("<!-- table sampling '82M, batch 1|82M, batch 8' seconds rows=acgpt -->\n<!-- end -->")
    assert table(both) == [["82M, batch 1: acgpt", "0.5"], ["82M, batch 8: acgpt", "0.75"]]
    assert "--batch 1`, a CPU, torch 1, transformers 2, 2026-01-02; `python" in both


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "sampling '82M, batch 9' seconds",
            "benchmark sampling has no 82M, batch 9: it has 82M, batch 1, 82M, batch 8",
        ),
        ("training '82M, batch 1' seconds", "benchmark training has no 82M, batch 1"),
        ("scoring '82M, batch 1' second:.2f", "82M, batch 1 has no second: it has row, seconds"),
        ("scoring '82M, batch 1' seconds 'rows=two passes'", "82M, batch 1 has no two passes: it has one pass"),
    ],
)
def test_what_a_record_does_not_have_is_named_with_what_it_has(render, written, wanted, message):
    with pytest.raises(SystemExit, match=message):
        render.rendered(f"<!-- table {wanted} -->\n<!-- end -->")


def test_two_records_of_one_case_are_refused(render, written):
    written.write_text(written.read_text() * 2)
    with pytest.raises(SystemExit, match="two records of sampling, 82M, batch 1: remove the older one"):
        render.rendered("<!-- table sampling '82M, batch 1' seconds -->\n<!-- end -->")


def test_tables_of_options_are_left_alone(render):
    page = "<!-- table acgpt.serving.options.LimitOptions option help -->\nkept\n<!-- end -->"
    assert render.rendered(page) == page
