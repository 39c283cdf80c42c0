"""`acgpt generate` as a command: how much it says, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_corpus
from test_generate import LENGTH, model_of
from typer.testing import CliRunner

from acgpt.cli.main import app


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), mask=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model_of("ac-gpt").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("flag", [[], ["--quiet"], ["-q"]])
def test_quiet_shows_no_progress_and_the_same_result(corpus, model, tmp_path, monkeypatch, flag):
    monkeypatch.setattr("acgpt.cli.evaluate.PAUSE", 0.0)
    words = ["generate", model, corpus, "--length", LENGTH, "--limit", 2, "--modes", "infilling", "-o", tmp_path / "o"]
    result = CliRunner().invoke(app, [*map(str, words), "--device", "cpu", *flag], env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert ("infilling: " in result.stderr) == (not flag)
    assert "infilling" in result.stdout and (tmp_path / "o" / "infilling.jsonl").exists()
