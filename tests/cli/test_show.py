"""The drawing of a layout: it shows what the model is run on, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys

import pytest
import torch
from models import random_query, tiny_model
from rich.cells import cell_len
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.display.reader import choose_reader
from acgpt.display.show import BLANK, Page, figure, label, picture, printable, query_of, terminal
from acgpt.engine.layout import build, visible
from acgpt.errors import InputError
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata
from acgpt.query.query import Query
from acgpt.query.text import pieces

TEMPLATES = [
    "The capital of {{Italy}} is Rome.",
    "The cat {{_3}} on the {{_1}}.",
    "{{Hello}}",
    "日本 {{naïve}}\n\tcafé {{x}}",
]


@pytest.fixture(scope="module")
def folder(gpt2, tmp_path_factory):
    """A model folder that names its own BOS."""
    folder = tmp_path_factory.mktemp("model")
    LanguageModel(tiny_model(vocabulary=len(gpt2)), gpt2, metadata=Metadata(), bos=7, mask=9).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_drawing_is_the_layout_that_is_computed(tokenizer, template, future):
    query = query_of(template, tokenizer)
    layout = build([query], bos=3, mask=None, future=future)
    drawn = figure(query, tokenizer, bos=3, future=future)
    shown = drawn.as_dict()
    count = len(layout.ids)
    assert shown["ids"] == [None if i < 0 else i for i in layout.ids.tolist()]
    assert shown["positions"] == layout.positions.tolist()
    assert shown["copies"] == layout.copies[0]
    mask = visible(torch.tensor(layout.copies), count)[0]
    assert [[cell == "1" for cell in row] for row in shown["mask"]] == mask.tolist()
    predicting = {slot: target for slot, target in enumerate(shown["predicts"]) if target}
    assert list(predicting) == layout.rows.tolist()
    assert [target["id"] for target in predicting.values()] == [None if t < 0 else t for t in layout.targets.tolist()]
    # And these are the asked tokens, each read off one position before its own.
    assert [target["position"] for target in predicting.values()] == list(query.asked_positions)
    assert [shown["positions"][slot] + 1 for slot in predicting] == list(query.asked_positions)


def test_roles_and_texts_are_those_of_the_query(gpt2):
    drawn = figure(query_of("The cat {{_2}} on {{the}} mat.", gpt2), gpt2, bos=50256)
    rows = [(slot.text, slot.position, slot.role, slot.predicts and slot.predicts.text) for slot in drawn.slots]
    assert rows == [
        ("The", 1, "copy", None),
        (" cat", 2, "copy", None),
        (" on", 5, "copy", None),
        (" mat", 7, "copy", None),
        (".", 8, "copy", None),
        ("<|endoftext|>", 0, "BOS", None),
        ("The", 1, "given", None),
        (" cat", 2, "given", BLANK),
        (BLANK, 3, "asked", BLANK),
        (BLANK, 4, "asked", None),
        (" on", 5, "given", " the"),
    ]


def test_unknown_tokens_are_shown_as_the_mask_that_is_read_there(gpt2):
    query = Query([464, 3797, 3332], given=[True, False, False], asked=[False, False, True])
    drawn = figure(query, gpt2, bos=50256, mask=11)
    assert [(slot.role, slot.id, slot.text) for slot in drawn.slots][-1] == ("unknown", 11, ",")


@pytest.mark.parametrize("future", [True, False])
def test_the_terminal_shows_every_cell_of_the_mask_within_its_width(gpt2, future):
    for seed in range(5):
        drawn = figure(random_query(seed, 13), gpt2, bos=50256, future=future)
        lines = terminal(drawn, 100).plain.splitlines()
        assert max(map(cell_len, lines)) <= 100
        grid = [line for line in lines[:-1] if "■" in line]
        cells = [[cell == "■" for cell in line if cell in "■·"] for line in grid]
        assert cells == [list(row) for row in drawn.mask]


def test_a_grid_too_wide_for_the_terminal_says_what_is_left_out(gpt2):
    drawn = figure(query_of("x " * 100 + "{{y}} z", gpt2), gpt2, bos=50256)
    lines = terminal(drawn, 100).plain.splitlines()
    assert max(map(cell_len, lines[:-1])) <= 100
    grid = next(line for line in lines if "■" in line)
    kept = sum(grid.count(cell) for cell in "■·")
    assert lines[-1].startswith(f"{len(drawn.slots) - kept} of {len(drawn.slots)} columns are left out")


def test_no_character_of_a_token_can_steer_the_terminal(gpt2):
    nasty = "\x1b[2J\r\x07\x9b\x7f"
    query = query_of(f"The {nasty} {{{{cat}}}}", gpt2)
    shown = terminal(figure(query, gpt2, bos=50256)).plain + printable(nasty) + label(nasty)
    assert not [c for c in shown if c != "\n" and not c.isprintable()]


# ---- the tokenizer without the model --------------------------------------------------------------------------------


def test_the_weights_are_not_needed(folder, tmp_path):
    copy = tmp_path / "without weights"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    reader, lm = choose_reader("{{a}}", str(copy))[0], acgpt.load(folder, device="cpu")
    assert (reader.bos, reader.mask, reader.reads_future) == (lm.bos, lm.mask, lm.reads_future) == (7, 9, True)
    assert query_of(TEMPLATES[0], reader.tokenizer) == lm.query(TEMPLATES[0])
    (copy / "acgpt.json").unlink()  # the config says the same
    said = choose_reader("{{a}}", str(copy))[0]
    assert (said.bos, said.mask, said.reads_future) == (7, 9, True)


def test_a_model_that_says_nothing_gets_the_bos_of_its_tokenizer(gpt2, tmp_path):
    LanguageModel(tiny_model(vocabulary=len(gpt2)), gpt2).save_pretrained(tmp_path)
    reader, lm = choose_reader("{{a}}", str(tmp_path))[0], acgpt.load(tmp_path, device="cpu")
    assert (reader.bos, reader.mask, reader.reads_future) == (lm.bos, None, False)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--no-future"]])
def test_the_command_prints_the_drawing_for_programs_and_for_people(folder, gpt2, options):
    drawn = figure(query_of(TEMPLATES[0], gpt2), gpt2, bos=7, future=not options)
    command = ["show", TEMPLATES[0], "--model", str(folder), *options]
    answer = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert answer == {"template": TEMPLATES[0], "future": not options, **json.loads(json.dumps(drawn.as_dict()))}
    people = CliRunner().invoke(app, command, env={"COLUMNS": "100"}).stdout
    assert people.startswith(TEMPLATES[0])
    assert terminal(drawn, 100).plain in people
    assert "\x1b" not in people


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture_is_written_in_the_format_of_its_name(folder, tmp_path, ending, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"layout.{ending}"
    template = "日本 cost $5 {{or}} $6 $\\frac{1}{2}$."  # no font has it all, and dollars are no formula
    result = CliRunner().invoke(app, ["show", template, "--model", str(folder), "-o", str(path)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {path}\n")
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("before", [b"an earlier picture", None])
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free some space, or choose another path."),
        (errno.EROFS, "Choose another path."),
        (errno.EACCES, "Change its permissions, or choose another path."),
    ],
)
def test_a_picture_that_cannot_be_written_leaves_none_and_the_advice_fits(
    folder, tmp_path, monkeypatch, number, advice, before
):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layout.png"
    if before is not None:
        path.write_bytes(before)

    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("acgpt.common.files.sync", refuses)  # the last moment before it has its name
    result = CliRunner().invoke(app, ["show", TEMPLATES[0], "--model", str(folder), "-o", str(path)])
    assert result.exit_code == 1
    assert result.stderr == f"error: cannot write {path}: {os.strerror(number)}. {advice}\n"
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_picture_that_cannot_be_drawn_says_why(gpt2, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    small, large = (figure(Query([5] * n + [6], [True] * n + [False]), gpt2, bos=7) for n in (3, 300))
    with pytest.raises(InputError, match="at most"):
        picture(large, tmp_path / "layout.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'acgpt\[plot\]'"):
        picture(small, tmp_path / "layout.png")


def test_a_page_in_a_pipe_is_100_wide_unless_told(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Page().width == 100
    monkeypatch.setenv("COLUMNS", "60")
    assert Page().width == 60


def test_the_text_of_the_slots_is_the_text_of_the_template(tokenizer):
    query = query_of("John's {{naïve}} café — 日本語 🙂", tokenizer)
    drawn = figure(query, tokenizer, bos=3)
    by_position = {slot.position: slot.text for slot in drawn.slots if slot.position}
    by_position |= {slot.predicts.position: slot.predicts.text for slot in drawn.slots if slot.predicts}
    assert "".join(by_position[p] for p in sorted(by_position)) == "".join(pieces(query.tokens, tokenizer))
