"""Input of commands: templates from files and pipes, and values out of range."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from acgpt import LanguageModel
from acgpt.cli.main import app
from acgpt.models.metadata import Metadata


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    network = tiny_model(vocabulary=len(tokenizer), positions=40)
    LanguageModel(network, tokenizer, metadata=Metadata()).save_pretrained(folder)
    return folder


# ---- nothing to answer ----------------------------------------------------------------------------------------------

NOTHING = pytest.mark.parametrize(
    ("content", "what"), [(b"", "is empty"), (b"\n \n\r\n\t\n", "has blank lines only")], ids=["empty", "blank"]
)


@NOTHING
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["people", "json"])
@pytest.mark.parametrize("command", ["score", "rank", "infill"])
def test_a_file_without_a_template_is_an_error_that_names_it_before_a_model_is_loaded(
    tmp_path, command, flags, content, what
):
    file = tmp_path / "templates.txt"
    file.write_bytes(content)
    words = [command, "--file", str(file), "--model", str(tmp_path / "no model"), *flags]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {file} {what}: write one template per line, such as The {{{{cat}}}}")


@NOTHING
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["people", "json"])
@pytest.mark.parametrize("words", [["-"], ["--file", "-"]], ids=["argument", "option"])
def test_standard_input_without_a_template_is_an_error(model, words, flags, content, what):
    result = CliRunner().invoke(app, ["score", *words, "--model", str(model), *flags], input=content)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: standard input {what}" in result.stderr


def test_blank_lines_around_a_template_are_no_error(model, tmp_path):
    file = tmp_path / "templates.txt"
    file.write_text("\n\nThe {{cat}} sat\n\n")
    result = CliRunner().invoke(app, ["score", "--file", str(file), "--model", str(model), "--json"])
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1


# ---- values that are out of range -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["infill", "generate"])
def test_the_help_does_not_offer_a_top_p_of_zero(command):
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    (line,) = [line for line in text.splitlines() if "--top-p" in line]
    assert "0<=x" not in line and "above 0" in line
