"""The layout against the definition in the paper, written out slot by slot in `models.by_definition`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import by_definition, random_query

from acgpt.engine.layout import Layout, batches, body_tokens, build, neighbours, visible
from acgpt.errors import QueryError
from acgpt.query.query import Query

roles = st.text("gau", min_size=1, max_size=9).filter(lambda text: "a" in text)


def query_of(roles, first=10):
    """Tokens first, first + 1, …, each in the role that its letter says: given, asked, unknown."""
    return Query(range(first, first + len(roles)), [r == "g" for r in roles], [r == "a" for r in roles])


EDGES = ["a", "aaaa", "gggga", "agggg", "gagag", "ggaggg", "uau", "uuua", "auuu", "gua", "aug"]


# ---- queries -------------------------------------------------------------------------------------------------------


def test_positions_and_blanks_of_a_query_count_from_one():
    query = query_of("gaagua")
    assert query.given_positions == (1, 4)
    assert query.asked_positions == (2, 3, 6)
    assert query.blanks == ((2, 3), (6, 6))
    assert query.has_unknown and not query_of("gag").has_unknown
    assert len(query) == 6


@pytest.mark.parametrize(
    ("roles", "needs"), [("a", False), ("gga", False), ("ag", True), ("gaua", False), ("auuug", True), ("gaga", True)]
)
def test_the_future_is_needed_only_if_something_given_follows_something_asked(roles, needs):
    assert query_of(roles).needs_future is needs


@pytest.mark.parametrize("roles", ["gaagua", "a", "auuug"])
def test_what_has_been_checked_makes_the_same_query_without_a_check(roles):
    query = query_of(roles)
    again = Query.trusted(list(query.tokens), iter(query.given), list(query.asked))
    assert again == query and hash(again) == hash(query)
    assert (again.given_positions, again.asked_positions) == (query.given_positions, query.asked_positions)
    assert again.given_at.tolist() == list(query.given_positions)
    assert again.asked_at.tolist() == list(query.asked_positions)


def test_the_ids_of_a_query_are_its_own():
    query = Query([4, None, 6], [True, False, False], [False, True, False])
    assert query.ids.tolist() == [4, -1, 6]
    with pytest.raises(ValueError, match="read-only"):
        query.ids[0] = 5
    assert body_tokens(query, 9).tolist() == [4, -1, 9]
    assert query.ids.tolist() == [4, -1, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [True]), "one entry per token; they have 2, 1 and 1"),
        (([1, 2], [True, True]), "nothing is asked"),
        (([], []), "nothing is asked"),
        (([1, 2], [True, False], [True, True]), "position 1 is both given and asked"),
        (([1, None, 3], [True, True, False]), "position 2 is given but has no id"),
        (([1, -3], [True, False]), "position 2 has the negative id -3"),
        (([0, -3, None, -4], [True, False, False, False]), "position 2 has the negative id -3"),
    ],
)
def test_queries_that_contradict_themselves_are_refused(arguments, message):
    with pytest.raises(QueryError, match=message):
        Query(*arguments)


# ---- one query -----------------------------------------------------------------------------------------------------


def check_one(query, future):
    """A layout of one query shows the definition's slots, as far as the last prediction needs them."""
    ids, positions, sees, predictions = by_definition(query, future=future)
    layout = build([query], bos=0, mask=1, future=future)
    slots = predictions[-1][0] + 1
    assert layout.ids.tolist() == ids[:slots]
    assert layout.positions.tolist() == positions[:slots]
    assert list(zip(layout.rows.tolist(), layout.targets.tolist(), strict=True)) == predictions
    assert layout.asked == (len(predictions),)
    copies = len(query.given_positions) if future else 0
    assert (layout.copies, layout.texts) == ((copies,), (slots - copies,))
    assert visible(torch.tensor(layout.copies), slots)[0].tolist() == [row[:slots] for row in sees[:slots]]


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("roles", EDGES)
def test_ids_positions_targets_and_mask_at_the_edges_are_those_of_the_definition(roles, future):
    check_one(query_of(roles), future)


@settings(max_examples=examples(24), deadline=None)
@given(roles, st.booleans())
def test_ids_positions_targets_and_mask_are_those_of_the_definition(roles, future):
    check_one(query_of(roles), future)


def test_the_example_in_the_documentation_is_laid_out_as_drawn():
    the, cat, sat, on, the2 = 5, 6, 7, 8, 9
    query = Query([the, cat, sat, on, the2], [True, False, False, True, True])
    layout = build([query], bos=0, mask=None, future=True)
    assert layout.ids.tolist() == [the, on, the2, 0, the, cat]
    assert layout.positions.tolist() == [1, 4, 5, 0, 1, 2]
    assert layout.rows.tolist() == [4, 5] and layout.targets.tolist() == [cat, sat]


def test_unknown_tokens_are_read_as_mask_and_never_as_themselves():
    layout = build([query_of("guaga", first=30)], bos=0, mask=1, future=True)
    assert layout.ids.tolist() == [30, 33, 0, 30, 1, 32, 33]
    assert 31 not in layout.ids.tolist() + layout.targets.tolist()


def test_unknown_tokens_without_a_mask_token_are_refused():
    with pytest.raises(QueryError, match=r"unknown tokens.*MASK.*mask=ID"):
        build([query_of("ga"), query_of("ua")], bos=0, mask=None, future=True)
    build([query_of("ga")], bos=0, mask=None, future=True)  # none is needed where nothing is unknown


def test_tokens_to_be_sampled_have_no_id_yet():
    query = Query([4, None, 6, None], [True, False, True, False])
    assert body_tokens(query, None).tolist() == [4, -1, 6, -1]
    assert build([query], bos=0, mask=None, future=True).targets.tolist() == [-1, -1]


@settings(max_examples=examples(24), deadline=None)
@given(st.lists(roles, min_size=1, max_size=4), st.booleans())
def test_prefill_runs_up_to_the_first_asked_token_and_predicts_it_alone(many, future):
    queries = [query_of(roles, first=10 + 10 * i) for i, roles in enumerate(many)]
    layout = build(queries, bos=0, mask=1, future=future, first_only=True)
    assert layout.asked == (1,) * len(queries)
    start = sum(layout.copies)
    for i, query in enumerate(queries):
        first = query.asked_positions[0]
        text = by_definition(query, future=False)[0]
        assert layout.texts[i] == first
        assert layout.copies[i] == (len(query.given_positions) if future else 0)  # all copies, also those behind
        assert layout.ids[start : start + first].tolist() == text[:first]
        assert layout.rows[i].item() == start + first - 1
        assert layout.targets[i].item() == text[first]
        start += first
    assert start == len(layout.ids)


# ---- batches -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(24), deadline=None)
@given(st.lists(roles, min_size=1, max_size=5), st.booleans())
def test_a_packed_batch_is_its_queries_copies_first_then_texts(many, future):
    queries = [query_of(roles, first=10 + 10 * i) for i, roles in enumerate(many)]
    alone = [build([query], bos=0, mask=1, future=future) for query in queries]
    layout = build(queries, bos=0, mask=1, future=future)
    copies = [one.copies[0] for one in alone]
    for field in ("ids", "positions"):
        parts = [getattr(one, field).tolist() for one in alone]
        packed = [x for part, c in zip(parts, copies, strict=True) for x in part[:c]]
        packed += [x for part, c in zip(parts, copies, strict=True) for x in part[c:]]
        assert getattr(layout, field).tolist() == packed
    assert layout.copies == tuple(copies)
    assert layout.texts == tuple(one.texts[0] for one in alone)
    assert layout.asked == tuple(one.asked[0] for one in alone)
    assert layout.targets.tolist() == [t for one in alone for t in one.targets.tolist()]
    # A prediction comes out behind the same slot as when its query is alone.
    rows, start = [], sum(copies)
    for one, c in zip(alone, copies, strict=True):
        rows += [start + row - c for row in one.rows.tolist()]
        start += one.texts[0]
    assert layout.rows.tolist() == rows


@settings(max_examples=examples(24), deadline=None)
@given(st.lists(roles, min_size=1, max_size=5), st.booleans())
def test_a_rectangle_holds_each_query_in_its_row_and_marks_the_padding(many, future):
    queries = [query_of(roles, first=10 + 10 * i) for i, roles in enumerate(many)]
    layout = build(queries, bos=0, mask=1, future=future)
    packed, real = layout.rectangle()
    alone = [build([query], bos=0, mask=1, future=future) for query in queries]
    assert packed.shape == real.shape == (len(queries), max(len(one.ids) for one in alone))
    for row, (slots, is_real) in enumerate(zip(packed, real, strict=True)):
        one = alone[row]
        assert is_real.tolist() == [i < len(one.ids) for i in range(len(is_real))]
        assert layout.ids[slots[is_real]].tolist() == one.ids.tolist()
        assert layout.positions[slots[is_real]].tolist() == one.positions.tolist()
        assert all(slot == slots[is_real][-1] for slot in slots[~is_real])
    assert sorted(packed[real].tolist()) == list(range(len(layout.ids)))


def test_in_a_rectangle_of_copies_alone_padding_repeats_the_last_of_them():
    nothing = torch.zeros(0, dtype=torch.long)
    layout = Layout(torch.arange(4), torch.arange(4), (3, 1), (0, 0), nothing, nothing, (0, 0))
    packed, real = layout.rectangle()
    assert packed.tolist() == [[0, 1, 2], [3, 3, 3]] and real.tolist() == [[True] * 3, [True, False, False]]


def test_visible_draws_every_sequence_of_a_batch_with_its_own_copies():
    copies = [0, 1, 3, 5]
    drawn = visible(torch.tensor(copies), 5)
    for b, count in enumerate(copies):
        for q in range(5):
            for k in range(5):
                may = k < count or (q >= count and k <= q)
                assert drawn[b, q, k].item() is may, (count, q, k)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(roles, max_size=12), st.integers(1, 60), st.booleans(), st.booleans())
def test_batches_hold_every_query_once_and_keep_to_the_budget(many, budget, future, first_only):
    queries = {7 * i: query_of(roles) for i, roles in enumerate(many)}
    groups = batches(queries, budget, future, first_only=first_only)
    assert sorted(number for group in groups for number in group) == sorted(queries)
    cells = []
    for group in groups:
        members = [queries[n] for n in group]
        _, real = build(members, bos=0, mask=1, future=future, first_only=first_only).rectangle()
        cells.append(real.size)
        assert real.size <= budget or len(group) == 1  # a query that is too large goes alone
    longest = [cells[i] // len(group) for i, group in enumerate(groups)]
    assert longest == sorted(longest, reverse=True)
    for i in range(len(groups) - 1):  # and no group stops short of the budget
        assert longest[i] * (len(groups[i]) + 1) > budget


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 60))
def test_neighbours_are_as_many_as_the_budget_allows(sizes, budget):
    groups = list(neighbours(sizes, budget))
    assert [number for group in groups for number in group] == list(range(len(sizes)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(sizes[i] for i in group) <= budget
        larger = sizes[group.start : group.stop + 1]
        assert group.stop == len(sizes) or len(larger) * max(larger) > budget


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(roles, max_size=12), st.integers(1, 60), st.booleans(), st.booleans())
def test_packed_batches_count_no_padding(many, budget, future, first_only):
    queries = {7 * i: query_of(roles) for i, roles in enumerate(many)}
    groups = batches(queries, budget, future, first_only=first_only, packed=True)
    assert sorted(number for group in groups for number in group) == sorted(queries)

    def slots(numbers):
        return len(build([queries[n] for n in numbers], bos=0, mask=1, future=future, first_only=first_only).ids)

    for group, following in pairwise([*groups, []]):
        assert slots(group) <= budget or len(group) == 1  # a query that is too large goes alone
        assert not following or slots([*group, following[0]]) > budget  # and no group stops short of the budget


def test_a_layout_moves_whole():
    layout = build([random_query(0, 9)], bos=0, mask=1, future=True)
    moved = layout.to(torch.device("meta"))
    assert {x.device.type for x in (moved.ids, moved.positions, moved.rows, moved.targets)} == {"meta"}
    assert (moved.copies, moved.texts, moved.asked) == (layout.copies, layout.texts, layout.asked)
