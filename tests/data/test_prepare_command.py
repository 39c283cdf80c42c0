"""`acgpt prepare`: what it prints, and how it ends."""

from __future__ import annotations

import gzip
import json
import re

import pytest
from texts import GOOD, TEXTS, by_lines, jsonl, tokens
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.cli.prepare import show_progress
from acgpt.data.corpus import Corpus
from acgpt.data.prepare import Progress


@pytest.fixture
def command(named, tmp_path):
    def run(*arguments, code=0):
        arguments = ["prepare", "-o", str(tmp_path / "corpus"), "-w", "1", *map(str, arguments)]
        result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "COLUMNS": "100"})
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def test_the_command_prints_a_table_and_then_that_it_is_already_prepared(command, named, tokenizer, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS * 30)
    options = (file, "-t", named, "--convention", "lines", "--shard-size", "0.01")
    first, second = command(*options), command(*options)
    expected = by_lines(tokenizer, TEXTS * 30)
    row = ["train", f"{len(TEXTS) * 30 * 6 // 8:,}", f"{len(expected):,}", str(-(-len(expected) // 5243))]
    for result in (first, second):
        assert row in [line.split() for line in result.stdout.splitlines()]
        assert result.stderr == ""  # no bar where nobody watches
    assert "prepared in" in first.stdout and "already" not in first.stdout
    assert "already prepared, checked" in second.stdout
    assert tokens(Corpus.open(tmp_path / "corpus")) == expected


@pytest.mark.parametrize("one_file", [True, False])
def test_the_table_counts_documents_only_where_they_are_known(command, named, tmp_path, monkeypatch, one_file):
    monkeypatch.setattr("acgpt.data.prepare.PIECE", 20)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS * 30), encoding="utf-8")
    file = tmp_path / "a.txt" if one_file else jsonl(tmp_path / "a.jsonl", TEXTS * 30)
    printed = command(file, "-t", named, "--validation", "0.3", "--convention", "documents").stdout
    known = Corpus.open(tmp_path / "corpus").document_starts("validation", 1000) is not None
    assert known is not one_file
    assert printed.split()[:2] == ["split", "documents" if known else "pieces"]
    assert ("documents begin" in printed) is one_file


def test_json_is_the_summary_of_the_manifest(command, named, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [f"text {number}" for number in range(50)])
    options = (file, "-t", named, "--json", "--validation", "0.2", "--mask-token", "--skip-bad")
    content = json.loads(command(*options).stdout)
    corpus = Corpus.open(tmp_path / "corpus")
    manifest = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    assert content["hash"] == corpus.hash and content["reused"] is False and content["seconds"] > 0
    same = ("tokenizer_hash", "vocabulary_size", "mask_token_id", "dtype", "documents", "tokens", "bytes", "skipped")
    assert [content[key] for key in same] == [manifest[key] for key in same]
    split = manifest["splits"]["validation"]
    assert content["splits"]["validation"] == {**split, "shards": len(split["shards"])}
    assert json.loads(command(*options).stdout)["reused"] is True


def test_the_command_says_what_was_skipped_of_which_source_and_what_is_lost(command, named, tmp_path):
    bad, cut = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    bad.write_bytes(GOOD + b"{\n")
    cut.write_bytes(gzip.compress(GOOD * 3)[:-8])
    result = command(bad, cut, "-t", named, code=2)
    assert re.search(r"error: .*a\.jsonl, line 2: it is not JSON", result.stderr.replace("\n", " "))
    output = command(bad, cut, "-t", named, "--skip-bad").stdout.replace("\n", " ")
    assert "a.jsonl: 1 unusable rows skipped" in output and "b.jsonl.gz: 1 unusable rows skipped" in output
    assert "b.jsonl.gz, line 4: the file is damaged from here on: it ends too early; the rest of the file is" in output


@pytest.mark.parametrize("pause", [0.0, 9e9])
def test_where_nobody_watches_a_line_now_and_then_says_how_far_it_is(monkeypatch, capsys, pause):
    monkeypatch.setattr("acgpt.cli.ui.PAUSE", pause)
    with show_progress() as show:
        show(Progress("sources"))
        show(Progress("tokens", done=1e6, total=4_000_000, tokens=1234))
        show(Progress("tokens", done=2e6, tokens=5678))
        show(Progress("prepared"))
    captured = capsys.readouterr()
    lines = ["checking the sources: 0", "tokenizing, MB: 1 of 4", "tokenizing, MB: 2"]
    assert captured.out == "" and captured.err.splitlines() == ([] if pause else lines)
