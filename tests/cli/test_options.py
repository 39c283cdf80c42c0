"""Options are declared once, as fields of a dataclass: their ranges, and how the command line spells them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from acgpt.cli.ui import with_options
from acgpt.common.options import Options, for_command_line, keywords, option, split_keywords
from acgpt.errors import InputError


@dataclass(frozen=True)
class Some(Options):
    limit: int | None = option("The first N texts only.", metavar="N", minimum=1)
    share: float = option("Of the texts that `limit` leaves.", 0.5, minimum=0, maximum=1)
    modes: tuple[str, ...] = option("With commas.", (), metavar="NAMES", flags=("--modes", "--mode"), form="names")
    adapter: str | bool | None = option("none: no adapter.", form="adapter")
    place: str | Path | None = option("A folder.", flags=("--place", "-p"))
    quiet: bool = option("Print nothing.", False)
    by: Literal["lines", "documents"] | None = option("One of two words.", metavar="NAME")
    only: tuple[str, ...] = option("May be repeated.", (), form="list")
    size: int = option("", 3 << 20, python="In bytes.", shell="In MB.", flags=("--size",), form="megabytes")


def test_a_command_gets_the_options_that_the_fields_declare():
    got, app = [], typer.Typer()

    @app.command()
    @with_options(Some)
    def command(text: str, options: Some, as_json: bool = False) -> None:
        got.append((text, options, as_json))

    def run(*words: str) -> int:
        return CliRunner().invoke(app, list(words)).exit_code

    assert run("a") == 0 and run("b", "--limit", "2", "--mode", "x, y", "--adapter", "none", "-p", "q", "--quiet") == 0
    assert got.pop(0) == ("a", Some(modes=[]), False)
    assert got.pop() == ("b", Some(limit=2, modes=["x", "y"], adapter=False, place=Path("q"), quiet=True), False)
    assert run("c", "--limit", "0") == 2 and run("c", "--share", "2") == 2 and run("c", "--by", "pages") == 2
    assert run("c", "--size", "inf") == 2 and not got
    assert run("d", "--by", "lines", "--only", "1", "--only", "x-*", "--size", "0.5") == 0
    assert got == [("d", Some(modes=[], by="lines", only=("1", "x-*"), size=1 << 19), False)]
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "NO_COLOR": "1"}).stdout
    assert "Of the texts that --limit leaves." in text and "x>=1" in text and "In MB." in text


def test_only_names_in_backticks_that_are_options_are_respelled():
    flags = {"limit": "--limit", "no_mauve": "--no-mauve"}
    assert for_command_line("limit=3 in runs/limit=3: `limit=3`, `no_mauve=True`", flags) == (
        "limit=3 in runs/limit=3: --limit 3, --no-mauve"
    )
    assert for_command_line("`seed=1`, `limit='a b'`", flags) == "`seed=1`, --limit a b"


def test_keywords_are_documented_as_the_fields_are():
    @keywords(Some)
    def function(text: str, *, note: bool = False, **keywords: object) -> None:
        """Do it.

        Args:
            text: A text.
            **keywords: See `Some`.
            note: A note.
        """

    assert "limit: The first N texts only.\n" in function.__doc__ and "keywords" not in function.__doc__


def test_a_function_that_takes_other_keywords_too_keeps_its_own_parameters():
    @keywords(Some)
    def function(place: str | None = None, *, note: bool = False, **changes: object) -> dict[str, object]:
        """Do it.

        Args:
            **keywords: See `Some`.
            note: A note.
            **changes: All else.
        """
        options, others = split_keywords(Some, changes | {"place": place})
        return vars(options) | {"others": others}

    names = list(inspect.signature(function).parameters)
    assert names[0] == "place" and names.count("place") == 1 and names[-2:] == ["note", "changes"]
    assert "place: A folder.\n" in function.__doc__ and "size: In bytes.\n" in function.__doc__
    assert "**changes: All else." in function.__doc__
    result = function("here", limit=2, steps=None)
    assert (result["place"], result["limit"], result["others"]) == ("here", 2, {"steps": None})
    with pytest.raises(InputError, match="limit must be"):
        function(limit=0, steps=3)
