"""`acgpt draw` shows the conditioning sets that training would sample."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from imports import run_commands
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.display.conditioning import COLOURS, REGIMES, Panel, draw_conditioning, read_conditioning, terminal
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Conditioning, generator

MIXED = "{r_max: 0.7, infilling: 0.3, unknown: 0.2}"
LETTERS = {GIVEN: "g", ASKED: "a", UNKNOWN: "u"}
DRAWS = 2000


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr("acgpt.display.conditioning.DRAWS", DRAWS)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["draw", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def sets_of(conditioning, length, rows, seed):
    """The sets of the first items, as texts of letters."""
    drawn = (conditioning.roles(length, generator(seed, 0, item)) for item in range(rows))
    return ["".join(LETTERS[int(role)] for role in roles) for roles in drawn]


# ---- what is drawn --------------------------------------------------------------------------------------------------


def test_the_regimes_are_those_of_the_paper_and_four_more():
    answer = json.loads(run("conditioning", "--json", "--length", 24, "--rows", 3, "--seed", 5).stdout)
    assert (answer["length"], answer["seed"], answer["draws"]) == (24, 5, DRAWS)
    drawn = {each["title"]: each for each in answer["distributions"]}
    assert list(drawn) == list(REGIMES)
    for each in drawn.values():
        conditioning = Conditioning.from_dict(each["conditioning"])
        assert conditioning == read_conditioning(each["notation"])
        assert each["sets"] == sets_of(conditioning, 24, 3, seed=5)
    # What the figure is there to show, with five standard deviations for the estimate.
    noise = 5 * 0.5 / DRAWS**0.5
    arbitrary, between, stretches, structured, infilling, empty, unknown = (
        np.array(each["given"]) for each in drawn.values()
    )
    assert abs(arbitrary - arbitrary.mean()).max() < noise
    for share in (between, structured, unknown):
        assert share[[0, -1]].max() + noise < share[8:16].min()
    assert stretches[[0, -1]].min() > between[[0, -1]].max() + noise
    assert infilling[[0, -1]].min() > 0.8 and infilling[11:13].max() < noise and not empty.any()
    hidden = {title: np.mean(each["unknown"]) for title, each in drawn.items()}
    assert [title for title, share in hidden.items() if share > 0] == ["With unknown tokens"]


def test_a_distribution_of_ones_own_is_drawn_instead():
    answer = json.loads(
        run("conditioning", "-c", MIXED, "-c", "{empty: 1}", "--json", "--rows", 5, "--length", 9).stdout
    )
    mixed, empty = answer["distributions"]
    assert (mixed["notation"], empty["notation"]) == (MIXED, "{empty: 1}")
    conditioning = Conditioning.from_dict({"r_max": 0.7, "infilling": 0.3, "unknown": 0.2})
    assert mixed["sets"] == sets_of(conditioning, 9, 5, seed=0)
    sets = [list(text) for text in sets_of(conditioning, 9, DRAWS, seed=0)]
    for role in ("given", "unknown"):
        assert mixed[role] == pytest.approx((np.array(sets) == role[0]).mean(axis=0))


def test_in_the_terminal_each_set_is_a_line_of_squares_and_its_size():
    drawn = Panel("Mine", MIXED, length=9, rows=4, seed=2, draws=50)
    title, *lines, bars, _, legend = terminal([drawn]).splitlines()
    assert title == f"Mine  {MIXED}"
    sets = sets_of(drawn.conditioning, 9, 4, seed=2)
    assert lines == [text.translate(str.maketrans("gau", "■□·")) + f" {text.count('g'):3}" for text in sets]
    assert bars == "".join(" ▁▂▃▄▅▆▇█"[round(8 * share)] for share in drawn.share(GIVEN))
    assert "■ given   □ asked   · unknown" in legend
    shown = run("conditioning", "-c", MIXED, "--length", 9, "--rows", 4, "--seed", 2).stdout.splitlines()
    assert shown[1:5] == lines


def test_neither_torch_nor_matplotlib_is_imported_without_need():
    watched = ("torch", "transformers", "matplotlib")
    done = run_commands([["draw", "conditioning", "-c", "{empty: 1}", "--json"]], watched)
    assert done.stdout.splitlines()[-2:] == ["code 0", "imported []"], done.stderr


# ---- as a picture ---------------------------------------------------------------------------------------------------


def test_the_squares_of_the_picture_are_the_sets(tmp_path):
    panels = [Panel(title, MIXED, length=11, rows=6, seed=seed, draws=20) for title, seed in (("One", 1), ("Two", 2))]
    draw_conditioning(tmp_path / "sets.svg", panels)
    picture = (tmp_path / "sets.svg").read_text()
    names = {COLOURS[role]: letter for role, letter in LETTERS.items()}
    for drawn, part in zip(panels, picture.split('<g id="QuadMesh')[1:], strict=True):
        squares = re.findall(r'<path[^>]*?style="fill: (#\w+)', part.split("</g>")[0])
        text = "".join(names[colour] for colour in squares)
        assert [text[i : i + 11] for i in range(0, len(text), 11)] == drawn.as_dict()["sets"]
    for word in ("One", "Two", MIXED, "given", "asked", "unknown"):
        assert f"<!-- {word} -->" in picture


@pytest.mark.parametrize(("ending", "starts"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_says_the_format(tmp_path, ending, starts):
    path = tmp_path / f"sets.{ending}"
    result = run("conditioning", "-c", r"{unknown: 0.1} # $\x$", "--rows", 2, "--length", 3, "-o", path)
    assert path.read_bytes().startswith(starts)
    assert result.stdout == "" and f"wrote {path}" in result.stderr


def test_the_picture_in_the_documentation_is_small():
    picture = Path(__file__).resolve().parents[2] / "docs" / "conditioning.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 300_000
