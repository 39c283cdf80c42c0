"""Options are declared once, as fields of a dataclass: their ranges, and how the command line spells them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from acgpt.cli.ui import takes
from acgpt.common.options import Options, keywords, option, spelled
from acgpt.errors import InputError


@dataclass(frozen=True)
class Some(Options):
    limit: int | None = option("The first N texts only.", metavar="N", minimum=1)
    share: float = option("Of the texts that `limit` leaves.", 0.5, minimum=0, maximum=1)
    modes: tuple[str, ...] = option("With commas.", (), metavar="NAMES", flags=("--modes", "--mode"), form="names")
    adapter: str | bool | None = option("none: no adapter.", form="adapter")
    place: str | Path | None = option("A folder.", flags=("--place", "-p"))
    quiet: bool = option("Print nothing.", False)


def test_a_value_outside_of_its_range_is_refused_by_its_name():
    assert Some(limit=1, share=1).share == 1
    for wrong, words in [
        ({"limit": 0}, "limit must be a whole number, at least 1, not 0"),
        ({"limit": 1.5}, "limit must be a whole number, at least 1, not 1.5"),
        ({"share": 1.1}, "share must be a number, from 0 to 1, not 1.1"),
        ({"share": float("nan")}, "share must be a number"),
        ({"share": "x"}, "share must be a number, from 0 to 1, not 'x'"),
    ]:
        with pytest.raises(InputError, match=words):
            Some(**wrong)


def test_a_command_gets_the_options_that_the_fields_declare():
    got, app = [], typer.Typer()

    @app.command()
    @takes(Some)
    def command(text: str, options: Some, as_json: bool = False) -> None:
        got.append((text, options, as_json))

    def run(*words: str) -> int:
        return CliRunner().invoke(app, list(words)).exit_code

    assert run("a") == 0 and run("b", "--limit", "2", "--mode", "x, y", "--adapter", "none", "-p", "q", "--quiet") == 0
    assert got[0] == ("a", Some(modes=[]), False)
    assert got[1] == ("b", Some(limit=2, modes=["x", "y"], adapter=False, place=Path("q"), quiet=True), False)
    assert run("c", "--limit", "0") == 2 and run("c", "--share", "2") == 2 and len(got) == 2
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "NO_COLOR": "1"}).stdout
    assert "Of the texts that --limit leaves." in text and "x>=1" in text


def test_only_names_in_backticks_that_are_options_are_respelled():
    flags = {"limit": "--limit", "no_mauve": "--no-mauve"}
    assert spelled("limit=3 in runs/limit=3: `limit=3`, `no_mauve=True`", flags) == (
        "limit=3 in runs/limit=3: --limit 3, --no-mauve"
    )
    assert spelled("`seed=1`, `limit='a b'`", flags) == "`seed=1`, --limit a b"


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
