"""Queries that share keys and values get the answers that they get without sharing, and share all that they can."""

from __future__ import annotations

import pytest
import torch
from models import tiny_model
from tolerance import same_draws

from acgpt.engine.engine import Engine
from acgpt.engine.prefixes import LEAST, Prefixes
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

LENGTH = 30
ARCHITECTURES = ["gpt2", "llama", "gpt_neox"]


def engine_of(architecture, most_bytes=2**24):
    model = tiny_model(architecture).double().eval()
    from acgpt.engine.architecture import check_model

    check_model(model)
    engine = Engine(model, bos=0, mask=5, backend="dense")
    engine.prefixes = Prefixes(model, most_bytes)
    return engine


def query(blank, *, edit=None, future=True, length=LENGTH):
    """A text with one blank of two tokens; with `edit`, the token at this index is another one."""
    tokens = [7 + (3 * i) % 40 for i in range(length)]
    if edit is not None:
        tokens[edit] = 6
    given = [not blank <= i < blank + 2 and (future or i < blank) for i in range(length)]
    size = length if future else blank + 2
    return Query([t if g else None for t, g in zip(tokens[:size], given[:size], strict=True)], given=given[:size])


@torch.inference_mode()
def drawn(engine, queries, *, future):
    return engine.sample(queries, 2, Sampling(seed=3), future)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("future", [True, False])
def test_samples_are_those_without_sharing(architecture, future):
    engine = engine_of(architecture)
    alone = engine.with_mask(5)
    alone.prefixes = None
    queries = [
        query(20, future=future), query(20, future=future), query(22, future=future), query(20, edit=3, future=future),
        query(20, edit=28, future=future), query(12, future=future), query(0, future=future),
    ]  # fmt: skip
    for one in queries:
        found, expected = drawn(engine, [one], future=future)[0], drawn(alone, [one], future=future)[0]
        assert all(same_draws(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert engine.prefixes.hits
    together, expected = drawn(engine, queries, future=future), drawn(alone, queries, future=future)
    for found, other in zip(together, expected, strict=True):
        assert all(same_draws(mine, theirs) for mine, theirs in zip(found, other, strict=True))


def shared_by(first, second, *, future):
    """Return the number of slots that the second query shares with the first."""
    engine = engine_of("llama")
    drawn(engine, [first], future=future)
    assert engine.prefixes.hits == 0
    drawn(engine, [second], future=future)
    return engine.prefixes.shared


def test_from_left_to_right_the_common_beginning_is_shared():
    assert shared_by(query(20, future=False), query(20, future=False), future=False) == 20  # BOS and all but the last
    assert shared_by(query(20, future=False), query(24, future=False), future=False) == 21
    assert shared_by(query(24, future=False), query(20, future=False), future=False) == 20
    assert shared_by(query(20, future=False), query(20, edit=12, future=False), future=False) == 13  # BOS and 12 tokens
    assert shared_by(query(20, future=False), query(20, edit=2, future=False), future=False) == 0  # too little


def test_copies_are_shared_as_a_whole_or_not_at_all():
    assert shared_by(query(20), query(20), future=True) == (LENGTH - 2) + 20
    assert shared_by(query(20), query(20, edit=LENGTH - 1), future=True) == 0
    assert shared_by(query(20), query(21), future=True) == 0
    # The same given tokens, of which the first one blanks more.
    more = query(20)
    unknown = Query(more.tokens, more.given, [a and i != 20 for i, a in enumerate(more.asked)])
    assert shared_by(more, unknown, future=True) >= LENGTH - 2 + 20


def test_copies_at_other_positions_are_not_shared():
    """The same given tokens around a longer blank."""
    shorter = query(20)
    longer = Query(
        (*shorter.tokens[:20], None, *shorter.tokens[20:]), (*shorter.given[:20], False, *shorter.given[20:])
    )
    assert shared_by(shorter, longer, future=True) == shared_by(longer, shorter, future=True) == 0


def test_queries_with_and_without_copies_share_nothing():
    engine = engine_of("llama")
    drawn(engine, [query(20)], future=True)
    drawn(engine, [query(20, future=False)], future=False)
    assert engine.prefixes.hits == 0


def test_memory_is_bounded_and_the_oldest_goes_first():
    engine = engine_of("llama")
    drawn(engine, [query(20, future=False)], future=False)
    size = engine.prefixes.nbytes
    engine.prefixes.most_bytes = int(2.5 * size)
    for edit in (1, 2, 3):  # each differs from the others nearly from the beginning
        drawn(engine, [query(20, edit=edit, future=False)], future=False)
        assert engine.prefixes.nbytes <= engine.prefixes.most_bytes
    assert len(engine.prefixes.kept) == 2
    drawn(engine, [query(20, edit=3, future=False)], future=False)
    assert engine.prefixes.hits == 1
    drawn(engine, [query(20, future=False)], future=False)  # forgotten
    assert engine.prefixes.hits == 1


def test_what_is_larger_than_the_memory_is_not_kept():
    engine = engine_of("llama", most_bytes=100)
    drawn(engine, [query(20, future=False)], future=False)
    assert not engine.prefixes.kept and engine.prefixes.nbytes == 0


def test_what_is_extended_is_kept_once():
    engine = engine_of("llama")
    for blank in range(LEAST, LENGTH - 2):
        drawn(engine, [query(blank, future=False)], future=False)
    assert len(engine.prefixes.kept) == 1
    engine.prefixes.clear()
    assert engine.prefixes.nbytes == 0


def test_a_query_that_is_too_short_to_share_is_prefilled_with_the_others():
    engine = engine_of("llama")
    engine.prefixes = Prefixes(engine.model, 2**24, least=2 * LENGTH)
    drawn(engine, [query(20), query(22)], future=True)
    drawn(engine, [query(20), query(22)], future=True)
    assert not engine.prefixes.kept and not engine.prefixes.hits
