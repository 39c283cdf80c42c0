"""`acgpt generate` as a command: its output and exit codes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from generators import LENGTH, model_of
from runs import write_corpus
from typer.testing import CliRunner

from acgpt.cli.generate import resume_hint
from acgpt.cli.main import app
from acgpt.cli.ui import stoppable
from acgpt.evaluation import generator as module


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
    monkeypatch.setattr("acgpt.cli.ui.PAUSE", 0.0)
    words = ["generate", model, corpus, "--length", LENGTH, "--limit", 2, "--modes", "infilling", "-o", tmp_path / "o"]
    result = CliRunner().invoke(app, [*map(str, words), "--device", "cpu", *flag], env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert ("infilling: " in result.stderr) == (not flag)
    assert "infilling" in result.stdout and (tmp_path / "o" / "infilling.jsonl").exists()


# ---- stopped --------------------------------------------------------------------------------------------------------


@pytest.fixture
def survives() -> Iterator[None]:
    """Turn an unhandled SIGTERM into a test failure, so that pytest itself survives."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody handles SIGTERM"))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 3, "stopped"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_ends_it_with_words_on_how_to_go_on_and_it_goes_on(
    corpus, model, tmp_path, monkeypatch, survives, number, code, word
):
    words = ["generate", model, corpus, "--length", LENGTH, "--limit", 4, "--modes", "infilling", "-o", tmp_path / "o"]
    words += ["--device", "cpu", "--batch-tokens", 1]  # a text at a time
    drawn: list[int] = []
    kept = module.line_of

    def line_of(*arguments: Any) -> Any:
        drawn.append(1)
        if len(drawn) == 3:
            os.kill(os.getpid(), number)
        return kept(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "line_of", line_of)
        result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == code and result.stdout == ""
    assert f"{word}. The same command resumes from {tmp_path / 'o'}." in result.stderr
    assert (tmp_path / "o" / "infilling.jsonl.part").exists()
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "o" / "infilling.jsonl").read_text().splitlines()) == 4


def test_a_signal_before_anything_was_drawn_says_so(tmp_path, survives):
    with pytest.raises(typer.Exit) as stopped, stoppable(lambda: resume_hint(tmp_path)):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert stopped.value.exit_code == 3 and resume_hint(tmp_path).startswith("Nothing was sampled yet")
    with pytest.raises(pytest.fail.Exception, match="nobody"):  # the handler before it is back
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
