"""The five modes, and their picture: roles and contexts against what section 4.1 of the paper says of them."""

from __future__ import annotations

import numpy as np
import pytest

from acgpt.display.modes import EXAMPLE, draw_modes, panels
from acgpt.errors import InputError, OutputError
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Conditioning
from acgpt.query.modes import MODES, WITHOUT_FUTURE, distributions, modes_named


def test_the_modes_have_the_papers_names_and_order():
    assert [(mode.name, mode.title) for mode in modes_named()] == [
        ("unconditional", "Unconditional"),
        ("infilling", "Infilling"),
        ("training", "Training distribution"),
        ("infilling-no-future", "Infilling (no future)"),
        ("training-no-future", "Training distribution (no future)"),
    ]
    assert [mode.name for mode in modes_named(["training", "unconditional"])] == ["unconditional", "training"]
    with pytest.raises(InputError, match=r"'conditional'.*unconditional, infilling"):
        modes_named(["training", "conditional"])


def test_without_the_future_the_same_is_asked_and_nothing_is_given():
    roles = np.array([[GIVEN, ASKED, UNKNOWN, ASKED, GIVEN]], dtype=np.int8)
    for with_future, without in WITHOUT_FUTURE.items():
        assert MODES[with_future].conditioning == MODES[without].conditioning
        assert MODES[with_future].future and not MODES[without].future
        assert (MODES[with_future].model_roles(roles) == roles).all()
        assert MODES[without].model_roles(roles).tolist() == [[ASKED, ASKED, UNKNOWN, ASKED, ASKED]]
        assert MODES[without].model_roles(roles).dtype == roles.dtype


def test_distributions_are_those_of_the_papers_experiments():
    blocks = {"kind": "blocks", "weight": 1.0, "r_min": 0.0, "r_max": 0.4, "b_min": 1, "b_max": "size"}
    ends = {"kind": "infilling", "weight": 1.0, "r_min": 0.0, "r_max": 0.4, "f_min": 0.2, "f_max": 0.8}
    found = {name: conditioning.as_dict() for name, conditioning in distributions(0.4).items()}
    assert found == {
        "empty": {"parts": [{"kind": "empty", "weight": 1.0}], "unknown": 0.0},
        "infilling": {"parts": [ends], "unknown": 0.0},
        "training": {"parts": [blocks], "unknown": 0.0},
    }
    own = Conditioning.from_dict({"b_max": 4})
    assert distributions(0.4, own) == {**distributions(0.4), "training": own}


def test_what_is_drawn_is_what_the_mode_says():
    drawn = EvaluationDataset.build(np.arange(200 * 50), tokenizer_hash="", length=50, r_max=0.6)
    assert (drawn.roles(MODES["unconditional"]) == ASKED).all()
    sizes = {"infilling": [], "training": []}
    for name in sizes:
        roles = drawn.roles(MODES[name])
        assert (roles == drawn.roles(MODES[WITHOUT_FUTURE[name]])).all()
        sizes[name] = (roles == GIVEN).sum(axis=1)
        assert 0 <= sizes[name].min() <= 3 and 27 <= sizes[name].max() <= 30  # r_max T = 30
    for row in drawn.roles(MODES["infilling"]):  # the asked tokens are one run
        asked = np.flatnonzero(row == ASKED)
        assert (row[asked[0] : asked[-1] + 1] == ASKED).all()
    lefts = [np.flatnonzero(row == ASKED)[0] for row in drawn.roles(MODES["infilling"])]
    shares = [left / size for left, size in zip(lefts, sizes["infilling"], strict=True) if size >= 10]
    assert 0.15 <= min(shares) <= 0.3 and 0.7 <= max(shares) <= 0.85
    assert (sizes["infilling"] != sizes["training"]).mean() > 0.8  # drawn independently


# ---- the picture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [EXAMPLE, 0, 1, 2])
def test_the_picture_shows_what_the_definition_reads(seed):
    drawn = {panel.mode.name: panel for panel in panels(9, seed)}
    assert list(drawn) == list(MODES)
    for name, panel in drawn.items():
        asked = [p for p, role in enumerate(panel.roles, start=1) if role == "asked"]
        given = {p for p, role in enumerate(panel.roles, start=1) if role == "given"}
        assert list(panel.reads) == asked
        for position, read in panel.reads.items():
            past = set(range(1, position))
            assert read == (past | given if MODES[name].future else past)
    for with_future, without in WITHOUT_FUTURE.items():
        roles = [role.replace("given", "not scored") for role in drawn[with_future].roles]
        assert list(drawn[without].roles) == roles
    assert set(drawn["unconditional"].roles) == {"asked"}


def test_the_running_example_has_two_ends_and_two_blocks():
    roles = {panel.mode.name: "".join(role[0] for role in panel.roles) for panel in panels(7, EXAMPLE)}
    assert roles["infilling"] == "gaaaggg"
    assert roles["training"] == "aggagaa"
    assert roles["training-no-future"] == "annanaa"


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture_is_written_in_the_format_of_its_ending(tmp_path, ending):
    path = tmp_path / f"modes.{ending}"
    draw_modes(path)
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])


def test_a_picture_names_every_mode_and_every_word(tmp_path, monkeypatch):
    from matplotlib import rcParams

    monkeypatch.setitem(rcParams, "svg.fonttype", "none")  # letters as letters
    draw_modes(tmp_path / "modes.svg", "A $tiny <b> 猫 of extraordinarily-unremarkable size!")
    content = (tmp_path / "modes.svg").read_text(encoding="utf-8")
    for text in (*(mode.title for mode in MODES.values()), ">tiny<", ">$<", "&lt;", ">猫<", ">extraordinarily<"):
        assert text in content


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modes.docx", "one two three", "end the name in a format"),
        ("modes.png", "two words", "has 2 words"),
        ("modes.png", "word " * 15, "has 15 words"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_with_the_reason(tmp_path, file, text, message):
    with pytest.raises(InputError, match=message):
        draw_modes(tmp_path / file, text)


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"cannot write .*no/such/folder/modes\.png: No such file"):
        draw_modes(tmp_path / "no/such/folder/modes.png", "one two three")
