"""Options are declared once, as fields of a dataclass: their ranges, and how the command line spells them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import acgpt
from acgpt.cli.ui import with_options
from acgpt.common.options import Options, for_command_line, keywords, option, split_keywords
from acgpt.errors import InputError
from acgpt.models.ask import FillAsk, RankAsk, ScoreAsk
from acgpt.models.options import InfillOptions, RankOptions, ScoreOptions


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


@dataclass(frozen=True)
class More(Some):
    pair: tuple[float, float] = option("Two numbers.", (0.0, 0.0), minimum=0, below=1)
    count: Literal["size"] | int = option("How many.", "size", minimum=1)
    table: Mapping[str, int] | None = option("Numbers by name.")
    base: Path | str | None = option("A folder, or a name.")


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
    for words, message in {
        ("--limit", "0"): "--limit must be a whole number, at least 1, not 0.",
        ("--limit", "1.5"): "--limit must be a whole number, at least 1, not '1.5'.",
        ("--share", "half"): "--share must be a number, from 0 to 1, not 'half'.",
        ("--share", "nan"): "--share must be a number, from 0 to 1, not nan.",
    }.items():
        refused = CliRunner().invoke(app, ["c", *words], env={"COLUMNS": "120", "NO_COLOR": "1"})
        assert refused.exit_code == 2 and message in refused.output
    assert run("d", "--by", "lines", "--only", "1", "--only", "x-*", "--size", "0.5") == 0
    assert got == [("d", Some(modes=[], by="lines", only=("1", "x-*"), size=1 << 19), False)]
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "NO_COLOR": "1"}).stdout
    assert "Of the texts that --limit leaves." in text and "x>=1" in text and "In MB." in text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"limit": True}, "a whole number, at least 1"),
        ({"limit": 2.0}, "a whole number, at least 1"),
        ({"limit": np.float64(2)}, "a whole number, at least 1"),
        ({"limit": np.int64(0)}, "a whole number, at least 1"),
        ({"limit": "2"}, "a whole number, at least 1"),
        ({"limit": np.arange(3)}, "a whole number, at least 1"),
        ({"share": "0.5"}, "a number, from 0 to 1"),
        ({"share": np.True_}, "a number, from 0 to 1"),
        ({"share": math.nan}, "a number, from 0 to 1"),
        ({"share": np.float32(2)}, "a number, from 0 to 1"),
        ({"share": 10**400}, "a number, from 0 to 1"),
        ({"share": None}, "a number, from 0 to 1"),
        ({"quiet": 1}, "true or false"),
        ({"quiet": "no"}, "true or false"),
        ({"by": "pages"}, "one of lines, documents"),
        ({"by": ["lines"]}, "one of lines, documents"),
        ({"only": "x-*"}, "a list"),
        ({"only": [3]}, "a list"),
        ({"adapter": 3}, "text or true or false"),
        ({"place": 3}, "text or a path"),
        ({"pair": [0.5]}, "a list of 2 numbers, from 0 to below 1"),
        ({"pair": [0.5, 1]}, "a list of 2 numbers, from 0 to below 1"),
        ({"count": "all"}, "'size' or a whole number, at least 1"),
        ({"count": 0}, "'size' or a whole number, at least 1"),
        ({"table": [1]}, "a mapping"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused(wrong, right):
    ((name, value),) = wrong.items()
    with pytest.raises(InputError) as error:
        More(**wrong)
    assert str(error.value) == f"{name} must be {right}, not {value!r}."


def test_numbers_of_numpy_become_pythons_and_lists_tuples():
    made = More(limit=np.int32(3), share=np.float32(0.25), quiet=np.True_, only=["a"], pair=[0, np.float64(0.5)])
    assert [made.limit, made.share, made.quiet, made.only, made.pair] == [3, 0.25, True, ("a",), (0.0, 0.5)]
    assert {type(value) for value in (made.limit, made.share, made.quiet)} == {int, float, bool}
    assert type(More(share=1).share) is float and More(count="size", table={"a": 1}) == More(table={"a": 1})
    assert More(adapter=Path("a")).adapter == "a" and More(place="a").place == "a"


def test_text_stays_text_and_a_path_a_path_where_both_are_accepted():
    assert [More(base=name).base for name in ("", "./a/", "org/name")] == ["", "./a/", "org/name"]
    assert More(place=Path("a")).place == Path("a") == More(base=Path("a")).base


def test_a_mapping_is_read_and_its_errors_have_the_key_before_the_name():
    assert More.read({"limit": 3}, "some") == More(limit=3)
    with pytest.raises(InputError, match=r"^some.limit must be a whole number, at least 1, not 0\.$"):
        More.read({"limit": 0}, "some")
    with pytest.raises(InputError, match=r"^some has no key 'limits': did you mean 'limit'"):
        More.read({"limits": 3}, "some")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: acgpt.prepare("a", "b", limits=3), r"^prepare\(\) got .* 'limits'. Did you mean 'limit'\?$"),
        (lambda: acgpt.evaluate("a", corpsu="b"), r"^evaluate\(\) got .* 'corpsu'. Did you mean 'corpus'\?$"),
        (
            lambda: acgpt.generate("a", "b", "c", smaples=2),
            r"^generate\(\) got .* 'smaples'. Did you mean 'samples'\?$",
        ),
        (lambda: acgpt.score_samples("a", "b", sedes=2), r"^score_samples\(\) got .* 'sedes'. Did you mean 'seeds'\?$"),
        (lambda: acgpt.merge("a", "b", "c", dtyp="auto"), r"^merge\(\) got .* 'dtyp'. Did you mean 'dtype'\?$"),
        (lambda: acgpt.push("a", "b/c", dryrun=True), r"^push\(\) got .* 'dryrun'. Did you mean 'dry_run'\?$"),
        (lambda: acgpt.Client().fill("{{_}}", pateince=3), r"^fill\(\) got .* 'pateince'. Did you mean 'patience'\?$"),
        (lambda: acgpt.Client().fill("{{_}}", zzz=3), r"^fill\(\) got an unexpected keyword argument 'zzz'$"),
    ],
)
def test_the_closest_keyword_is_suggested_for_an_unknown_one(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "ask"), [(ScoreOptions, ScoreAsk), (RankOptions, RankAsk), (InfillOptions, FillAsk)]
)
def test_every_setting_of_a_question_is_an_option_of_its_command(options, ask):
    not_settings = {ask.asks, "notice", "adapter"}  # the command loads its adapters
    assert {item.name for item in fields(ask)} - not_settings <= {item.name for item in fields(options)}


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
