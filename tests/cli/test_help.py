"""The help of every command fits a terminal of 80 columns, and a mistyped option is answered with the right one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from acgpt.cli.main import app

WIDTH = 80


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


FOUND = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize(("path", "command"), FOUND, ids=[" ".join(path) or "acgpt" for path, _ in FOUND])
def test_no_word_of_the_help_is_cut_at_80_columns(path, command):
    env = {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    text = CliRunner().invoke(app, [*path, "--help"], env=env).stdout
    lines = [line.strip() for line in text.splitlines()]
    assert max(map(cell_len, text.splitlines())) <= WIDTH
    _, _, body = inspect.cleandoc((command.callback and command.callback.__doc__) or "").partition("\n\n")
    for line in body.splitlines():
        assert line.strip() in lines, "a line of the text is wrapped"
    shown = set(text.split()) | set(text.replace(",-", " -").split())  # two names of an option stand as --modes,--mode
    for option in command.params:
        if getattr(option, "hidden", False):
            assert not set(option.opts) & shown, "a deprecated name is in the help"
            continue
        words = [*getattr(option, "opts", ()), *(getattr(option, "help", None) or "").split()]
        missing = [word for word in words if word not in shown and word != option.name]
        assert not missing, f"{option.name}: words that are cut: {missing}"
