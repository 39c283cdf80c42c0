"""The documents say what the code does: their examples are run, their tables come from the result files."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from programs import program

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_examples_of_the_readme_print_what_it_says():
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False, verbose=False)
    assert results.attempted > 5
    assert results.failed == 0


def test_the_examples_in_docstrings_print_what_they_say():
    import acgpt.common.files
    import acgpt.common.options
    import acgpt.display.table
    import acgpt.query.query
    import acgpt.query.template
    import acgpt.report.left_out
    import acgpt.report.tables

    common, query, report = acgpt.common, acgpt.query, acgpt.report
    for module in (
        common.files, common.options, query.query, query.template, acgpt.display.table, report.left_out, report.tables,
    ):  # fmt: skip
        results = doctest.testmod(module)
        assert results.attempted > 0 and results.failed == 0, module.__name__


def test_what_the_pages_import_is_there():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [
        line for page in pages for line in re.findall(r"\bfrom acgpt\S* import [\w, ]+\w", page.read_text("utf-8"))
    ]
    assert len(lines) > 5
    for line in lines:
        exec(line, {})


def test_the_tables_of_the_benchmarks_page_come_from_the_result_files():
    check = program("render.py", "--check")
    assert check.returncode == 0, check.stderr


def test_the_tables_of_options_are_those_that_the_code_declares():
    check = program("option_tables.py", "--check", folder=ROOT / "docs")
    assert check.returncode == 0, check.stderr


def test_every_relative_link_of_the_documents_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))]
    local = [(page, link) for page, link in links if "://" not in link and not link.startswith("mailto:")]
    assert len(local) > 50
    assert [(page.name, link) for page, link in local if not (page.parent / link).exists()] == []
