from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acgpt.errors import TemplateError
from acgpt.query.template import Gap, Given, Part, Slot, check_slots, escape, escape_slot, fillings, parse, rendered

# Mostly the characters that mean something, so that short texts meet the hard cases.
tricky = st.text(st.sampled_from("\\{}|_?4a \n") | st.characters(exclude_categories=["Cs"]), max_size=12)


def asks(*texts: str, at: int = 0) -> Slot:
    return Slot(texts, None, at)


def blank(length: int, at: int = 0) -> Slot:
    return Slot((), length, at)


def gap(least: int = 0, most: int | None = None, pattern: str | None = None, at: int = 0) -> Slot:
    return Slot((), None, at, gap=Gap(least, most, pattern))


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("plain }} text", [Given("plain }} text")]),
        ("The capital of France is {{Paris}}.", [Given("The capital of France is "), asks("Paris", at=25), Given(".")]),
        ("{{_4}}", [blank(4)]),
        ("{{_04}}", [blank(4)]),
        ("{{a|_4}}", [asks("a", "_4")]),
        ("{{ _4 }}", [asks(" _4 ")]),
        ("{{a}}{{b}}{{_1}}{{_2}}", [asks("a"), asks("b", at=5), blank(1, at=10), blank(2, at=16)]),
        ("{{a}b}}", [asks("a}b")]),
        ("{{a{b}}", [asks("a{b")]),
        ("{{a}}}", [asks("a"), Given("}")]),
        ("a }} b {{c}}", [Given("a }} b "), asks("c", at=7)]),
        # gaps, ranges, patterns and unknown tokens
        ("{{_}}", [gap()]),
        ("a{{_}}b{{_}}", [Given("a"), gap(at=1), Given("b"), gap(at=7)]),
        ("{{_}}{{_}}", [gap(), gap(at=5)]),
        ("{{_}}}", [gap(), Given("}")]),
        ("{{_}}}}", [gap(), Given("}}")]),
        ("{{_3-12}}", [gap(3, 12)]),
        ("{{_03-012}}", [gap(3, 12)]),
        ("{{_0-2}}", [gap(0, 2)]),
        ("{{_0-0}}", [gap(0, 0)]),
        ("{{_4-4}}", [gap(4, 4)]),
        (r"{{_:\d{4}}}", [gap(pattern=r"\d{4}")]),
        (r"{{_:\d{4}}} {{_}}", [gap(pattern=r"\d{4}"), Given(" "), gap(at=12)]),
        (r"{{_:x{2}y{3}}}.", [gap(pattern="x{2}y{3}"), Given(".")]),
        ("{{_2-5:[a-z]+}}", [gap(2, 5, "[a-z]+")]),
        ("{{_2:[a-z]+}}", [gap(2, 2, "[a-z]+")]),
        (r"{{_:a|b\|c_?}}", [gap(pattern=r"a|b\|c_?")]),
        ("{{_:a\nb}}", [gap(pattern="a\nb")]),
        ("{{_:}}", [gap()]),
        ("{{_1-2:}}", [gap(1, 2)]),
        ("{{?3}}", [Slot((), None, 0, unknown=3)]),
        ("{{?03}}a", [Slot((), None, 0, unknown=3), Given("a")]),
        (r"\{{_}}", [Given("{{_}}")]),
        ("{{ _}}", [asks(" _")]),
        ("{{a|?3}}", [asks("a", "?3")]),
        # before an opening, two backslashes are one and an odd one makes it text
        (r"\{{a}}", [Given("{{a}}")]),
        (r"\\{{a}}", [Given("\\"), asks("a", at=2)]),
        (r"\\\{{a}}", [Given(r"\{{a}}")]),
        (r"\\\\{{a}}", [Given(r"\\"), asks("a", at=4)]),
        (r"a\\b\{{", [Given(r"a\\b{{")]),
        (r"x\{{y{{z}}", [Given("x{{y"), asks("z", at=5)]),
        # braces pair up from the right
        (r"\frac{{{1}}}{2}", [Given(r"\frac{"), asks("1", at=6), Given("}{2}")]),
        (r"\{{{a}}", [Given(r"\{"), asks("a", at=2)]),
        (r"\{{{{a}}", [Given("{{"), asks("a", at=3)]),
        (r"{\{{{{a}}", [Given("{{{"), asks("a", at=4)]),
        (r"{\{{", [Given("{{{")]),
        # inside a slot, a backslash takes the meaning from marks only
        (r"{{a\|b}}", [asks("a|b")]),
        (r"{{\_4}}", [asks("_4")]),
        (r"{{\?}}", [asks("?")]),
        (r"{{\{x\}}}", [asks("{x}")]),
        (r"{{\{{}}", [asks("{{")]),
        (r"{{a\\}}", [asks("a\\")]),
        (r"{{\n\\n}}", [asks(r"\n\n")]),
        (r"{{C:\dir}}", [asks(r"C:\dir")]),
    ],
)
def test_slots_and_text_are_told_apart(template: str, parts: list[Part]) -> None:
    assert parse(template) == parts


@settings(deadline=None)
@given(st.integers(0, 9999), st.integers(0, 9999))
def test_a_range_is_read_or_its_error_names_the_one_that_works(first: int, last: int) -> None:
    template = f"a {{{{_{first}-{last}}}}}"
    if first <= last:
        assert parse(template) == [Given("a "), gap(first, last, at=2)]
    else:
        with pytest.raises(TemplateError) as error:
            parse(template)
        suggested = f"{{{{_{last}-{first}}}}}"
        assert suggested in str(error.value) and parse(suggested) == [gap(last, first)]


def test_only_a_gap_has_a_pattern_and_unknown_tokens_alone_ask_nothing() -> None:
    slots = [part for part in parse("{{_}}{{_4}}{{?3}}{{a}}") if isinstance(part, Slot)]
    assert [slot.tokens for slot in slots] == [None, 4, 3, None]
    assert [slot.gap is not None for slot in slots] == [True, False, False, False]
    assert check_slots(parse("{{?3}}{{_}}"), "") == [Slot((), None, 0, unknown=3), gap(at=6)]
    with pytest.raises(TemplateError, match="nothing is asked"):
        check_slots(parse("a{{?3}}b"), "a{{?3}}b")


@pytest.mark.parametrize(
    "text", [r"\frac{1}{2} \\ \begin{x}", r"\d+\.\d{2}\\", "C:\\dir\\", r"\n \} \| \_", "{a}", r"\{", "}}"]
)
def test_backslashes_and_braces_of_plain_text_survive(text: str) -> None:
    assert parse(text) == [Given(text)]
    assert parse(text + " {{x}}") == [Given(text + " "), asks("x", at=len(text) + 1)]


@pytest.mark.parametrize(
    ("template", "at", "problem"),
    [
        ("a {{|}}", 2, "empty"),
        ("a {{b}", 2, "never closed"),
        (r"a {{b\}}", 2, "never closed"),
        ("{{{{a}}", 2, "opened at character 1"),
        ("a {{_00}}", 2, "at least 1"),
        ("a {{_x}}", 2, r"must be followed by }}, .* write {{\\_"),
        ("a {{_4|b}}", 2, "must be followed by }}"),
        ("a {{_4", 2, "must be followed by }}"),
        ("a {{_:[a-z]", 2, "must be followed by }}"),
        ("a {{_٤}}", 2, "must be followed by }}"),
        ("a {{_1-٤}}", 2, "must be followed by }}"),
        ("a {{_1-1000000}}", 2, "at most 999999"),
        ("a {{_" + "9" * 5000 + "}}", 2, "at most 999999"),
        ("a {{?x}}", 2, "must be followed by a number"),
        ("a {{?3-4}}", 2, "must be followed by a number"),
        ("a {{?3", 2, "must be followed by a number"),
        ("a {{?1000000}}", 2, "at most 999999"),
    ],
)
def test_a_malformed_slot_is_pointed_at(template: str, at: int, problem: str) -> None:
    with pytest.raises(TemplateError, match=problem) as error:
        parse(template)
    assert error.value.at == at


@settings(deadline=None)
@given(tricky)
def test_escaped_text_means_itself(text: str) -> None:
    assert parse(escape(text)) == ([Given(text)] if text else [])


@settings(deadline=None)
@given(tricky, st.lists(tricky, min_size=1, max_size=4).filter(any), tricky)
def test_escaped_text_means_itself_in_and_around_a_slot(before: str, inside: list[str], after: str) -> None:
    lead = escape(before, before_slot=True)
    expected: list[Part] = [Given(before), asks(*inside, at=len(lead)), Given(after)]
    template = lead + "{{" + "|".join(map(escape_slot, inside)) + "}}" + escape(after)
    assert parse(template) == [part for part in expected if part != Given("")]


@settings(deadline=None)
@given(tricky.filter(lambda text: not text.endswith("\\")))
def test_only_a_backslash_at_the_end_needs_to_know_of_the_slot_behind_it(text: str) -> None:
    assert escape(text) == escape(text, before_slot=True)


@settings(deadline=None)
@given(tricky)
def test_any_text_parses_or_is_an_error_that_points_into_it(text: str) -> None:
    try:
        parts = parse(text)
    except TemplateError as error:
        assert text.startswith("{{", error.at)
    else:
        assert all(text.startswith("{{", part.at) for part in parts if isinstance(part, Slot))
        assert not any(isinstance(a, Given) and isinstance(b, Given) for a, b in pairwise(parts))


@pytest.mark.parametrize("mark", ["{", "\\", "}", "\\{", "{}", "\\{{", "|"])
def test_long_runs_of_marks_are_parsed_in_little_time(mark: str) -> None:
    text = mark * 50_000 + "\\"
    assert parse(escape(text)) == [Given(text)]


def test_fillings_are_all_combinations_in_order() -> None:
    found = fillings("{{a|b}}-{{x}}-{{c||d}}")
    assert [rendered(parts) for parts in found] == ["a-x-c", "a-x-", "a-x-d", "b-x-c", "b-x-", "b-x-d"]
    assert found[1] == [asks("a"), Given("-"), asks("x", at=8), Given("-"), asks("", at=14)]


def test_too_many_fillings_are_counted_not_built() -> None:
    with pytest.raises(TemplateError, match=f"{2**100} ways, more than the cap of 256"):
        fillings("{{a|b}}" * 100)
    assert len(fillings("{{a|b}}" * 3, cap=8)) == 8
    with pytest.raises(TemplateError, match="8 ways, more than the cap of 7"):
        fillings("{{a|b}}" * 3, cap=7)
