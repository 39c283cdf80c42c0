"""`acgpt infill` on templates with gaps, on a tiny model: answers, options, progress and mistakes."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
from test_cli import named, objects

from acgpt.display.show import Page, print_samples
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata

GAP = "The capital of {{_}} is Paris."


@pytest.fixture(scope="module")
def lm(lms):
    return lms["reads"]


@pytest.fixture
def infill(cli):
    """Run `acgpt infill` in this process on the model."""
    return partial(cli, "infill", NO_COLOR="1")


# ---- answers --------------------------------------------------------------------------------------------------------


def test_a_gap_is_answered_in_json_as_fill_answers(infill, lm):
    words = ["-n", "3", "--best-of", "8", "--max-tokens", "4", "--stop", "q", "--stop", "zz", "--seed", "5"]
    words += ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "50"]
    (answer,) = objects(infill(GAP, "--json", *words))
    options = {"best_of": 8, "max_tokens": 4, "stop": ("q", "zz"), "seed": 5}
    fills = lm.fill(GAP, 3, temperature=0.9, top_p=0.95, top_k=50, **options)
    keys = ("text", "fills", "log_prob", "perplexity", "tokens", "lengths", "score")
    assert answer == {"template": GAP, "seed": 5, "future": True, "samples": [named(fill, *keys) for fill in fills]}
    assert len(fills) == 3 and [list(sample) for sample in answer["samples"]] == [list(keys)] * 3


def test_by_default_there_is_one_fill(infill):
    assert len(objects(infill(GAP, "--json", "--max-tokens", "3"))[0]["samples"]) == 1


def test_people_see_the_fill_marked_to_the_character_and_its_score(infill, lm):
    template = "The cap{{_}} of Fr{{_}}e is Paris."
    shown = infill(template, "--max-tokens", "6", "--seed", "1").stdout
    (fill,) = lm.fill(template, 1, max_tokens=6, seed=1)
    assert shown.startswith("seed 1\n") and f"score {fill.score:8.2f}" in shown
    assert "  The cap⟦" in shown and "⟧ of Fr⟦" in shown and "⟧e is Paris." in shown


def test_people_see_gaps_beside_a_blank(infill):
    shown = infill("The {{_2}} of {{_}} is Paris.", "--max-tokens", "3", "--seed", "1").stdout
    assert shown.count("⟦") >= 1 and "is Paris." in shown


def test_people_see_unknown_tokens_as_blanks(lm, capsys):
    masked = LanguageModel(lm.model, lm.tokenizer, metadata=Metadata(), mask=1)
    template = "The cat{{?3}} sat on {{_}} mat."
    print_samples(Page(), masked, template, masked.fill(template, 1, max_tokens=3, seed=1))
    print_samples(Page(), masked, "", masked.sample("The cat{{?3}} sat on{{_2}}", seed=1))
    filled, sampled = [line for line in capsys.readouterr().out.splitlines() if line]
    assert "The cat□□□ sat on ⟦" in filled and filled.endswith("⟧ mat.")
    assert "The cat□□□ sat on⟦" in sampled and sampled.endswith("⟧")


def test_lines_with_and_without_gaps_are_answered_in_order_up_to_a_bad_one(infill):
    lines = ["The {{_2}}.", "The {{_1}}.", "a{{_}}b", "The {{cat}}.", "{{_}}c", "{{_3-1}}", "The {{_1}}."]
    result = infill("-", "--json", "--max-tokens", "3", "--seed", "1", stdin="\n".join(lines), code=2)
    answers = objects(result)
    assert [answer["template"] for answer in answers] == lines[:5]
    assert ["score" in answer["samples"][0] for answer in answers] == [False, False, True, False, True]
    assert "standard input, line 6: " in result.stderr


# ---- progress -------------------------------------------------------------------------------------------------------


def test_progress_counts_tokens_and_is_silent_without_a_terminal(infill, monkeypatch):
    bars = []

    class Recorder:
        def __init__(self, quiet):
            self.quiet, self.updates = quiet, []
            bars.append(self)

        @contextmanager
        def __call__(self, what):
            yield lambda *numbers: self.updates.append(numbers)

    monkeypatch.setattr("acgpt.cli.infill.Bars", Recorder)
    infill("The {{_3}} of {{_1}}.", "-n", "2")
    infill(GAP, "--max-tokens", "3")
    sampled, filled = bars
    assert sampled.quiet and filled.quiet
    assert sampled.updates[-1] == (8, 8, 8)
    counts = [done for done, total, _ in filled.updates]
    assert counts == sorted(counts) and counts[-1] >= 3 and {total for _, total, _ in filled.updates} == {None}
