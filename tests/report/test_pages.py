"""Pages of a report: values are escaped, and the packages that render them are optional."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from elements import Elements
from generations import write_generations
from test_report import write_run
from test_report_generation import score
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.report.page import environment, template
from acgpt.report.write import make_report

HOSTILE = '<script>alert(1)<!-- " onclick="x\' {{ 7*7 }}{% raw %}{# no #} <img src=x onerror=y> &amp;'
# A terminal's escape, and a blank that makes the positions of fills ambiguous.
MORE_HOSTILE = HOSTILE + " \x1b[31m ____"


def elements(path: Path) -> Elements:
    return Elements(path.read_text(encoding="utf-8"))


def check_is_text(page: Elements, count: int, hostile: str = HOSTILE) -> None:
    """Check that the hostile text occurs verbatim, at least this often."""
    text = page.text.replace("\x1b", "␛")  # as texts of samples show it
    assert text.count("alert(1)") == text.count(hostile.replace("\x1b", "␛")) >= count
    assert not page.names & {"script", "img"}
    assert not any(key.startswith("on") for _, attributes in page.found for key in attributes)


def test_hostile_names_of_runs_models_and_corpora_stay_text_on_the_report(tmp_path):
    run = write_run(tmp_path / HOSTILE, base=f"me/{HOSTILE}", corpus=f"data/{HOSTILE}")
    make_report([run], tmp_path / "report")
    # The run's name, its base and its corpus in a table; the name again among the runs.
    check_is_text(elements(tmp_path / "report" / "report.html"), 4)
    table = (tmp_path / "report" / "finetuning" / "validation" / "perplexities.md").read_text(encoding="utf-8")
    assert table.count(r"{{ 7\*7 }}") >= 3 and "<script" not in table.replace(r"\<", "")


@pytest.mark.parametrize("hostile", [HOSTILE, MORE_HOSTILE])
def test_hostile_methods_models_modes_and_texts_stay_text_on_the_page_of_samples(tmp_path, corpus, hostile):
    line = {"item": 0, "sample": 0, "seed": 0, "roles": "gag", "tokens": [4, 5, 6], "log_probs": [-1.0]}
    line |= {"prompt": f"{hostile}____{hostile}", "fills": [hostile], "text": hostile * 3}
    path = write_generations(tmp_path / "drawn", corpus, "training", lines=[line])
    record = json.loads(path.with_suffix(".json").read_text())
    record |= {"method": hostile, "model": hostile, "mode": hostile, "corpus": None}
    path.with_suffix(".json").write_text(json.dumps(record))
    score(path, 0.5)
    make_report([tmp_path / "drawn"], tmp_path / "report")
    page = elements(tmp_path / "report" / "samples.html")
    check_is_text(page, 6, hostile)
    assert ("␛" in page.text) == ("\x1b" in hostile)
    assert f"{hostile}, {hostile}" in page.values("aria-label")  # the method and the mode of the card
    check_is_text(elements(tmp_path / "report" / "report.html"), 2, hostile)


def test_every_template_escapes():
    names = environment().list_templates()
    assert {"report.html", "samples.html"} <= set(names)
    assert all(template(name).new_context().eval_ctx.autoescape for name in names)


@pytest.mark.parametrize("package", ["jinja2", "pandas"])
def test_without_a_package_of_the_extra_the_command_names_the_extra(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    run = write_run(tmp_path / "ac")
    done = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "report")])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == f"error: a report needs {package}: pip install 'acgpt[report]'\n"
    assert not (tmp_path / "report").exists()
