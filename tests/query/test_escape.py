"""Text that a program puts into a template means itself, whatever it holds."""

from __future__ import annotations

import pytest
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import acgpt
from acgpt import InputError
from acgpt.query.template import Given, Slot, parse

TEXTS = st.text(alphabet=st.sampled_from("ab{}|_?\\ \n"), max_size=12) | st.text(max_size=12)


@settings(max_examples=examples(120), deadline=None)
@given(before=TEXTS, asked=st.lists(TEXTS, min_size=1, max_size=4).filter(any), after=TEXTS)
def test_text_escaped_for_its_place_means_itself(before, asked, after):
    slot = "{{" + "|".join(map(acgpt.escape_slot, asked)) + "}}"
    lead = acgpt.escape(before, before_slot=True)
    want = [Given(before), Slot(tuple(asked), None, len(lead)), Given(after)]
    assert parse(lead + slot + acgpt.escape(after)) == [part for part in want if part != Given("")]


@pytest.mark.parametrize("text", ["a|b", "_4", "?"])
def test_text_escaped_for_outside_of_slots_does_not_serve_inside(text):
    try:
        (slot,) = parse("{{" + acgpt.escape(text) + "}}")
    except InputError:
        return
    assert slot.alternatives != (text,)
