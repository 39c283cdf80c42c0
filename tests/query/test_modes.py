"""The five modes: roles and contexts against what section 4.1 of the paper says of them."""

from __future__ import annotations

import numpy as np
import pytest

from acgpt.errors import InputError
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
