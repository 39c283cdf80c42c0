"""What may be drawn in the regions of a text with gaps (`query.gaps`): their constraints, and the guide of a row.

Building a constraint takes longer than using it, so the newest ones are kept with the tokenizer's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from acgpt.engine.decoding import all_tokens
from acgpt.query.constraint import Constraint
from acgpt.query.query import Query
from acgpt.query.vocabulary import ByteVocabulary

MOST_BYTES = 2**28  # of constraints kept per tokenizer


class RegionGuide:
    """Lets a row draw only tokens that fulfil the constraints of its regions; see `decoding.Guide`.

    Args:
        query: The query of the row.
        spans: The positions of the regions' first and last tokens.
        constraints: The constraint of each region.
        vocabulary: Size of the vocabulary; asked tokens outside of regions are free.
        ends: For a region that ends the text: tokens that end it early.
        least: Minimum number of tokens before such an end.
    """

    def __init__(
        self,
        query: Query,
        spans: Sequence[tuple[int, int]],
        constraints: Sequence[Constraint],
        vocabulary: int,
        ends: Sequence[int] = (),
        least: int = 0,
    ) -> None:
        self.positions = iter(query.asked_positions)
        self.position = next(self.positions)
        self.spans, self.constraints, self.ends, self.least = list(spans), list(constraints), tuple(ends), least
        self.states = [constraint.start for constraint in constraints]
        self.free = all_tokens(vocabulary)
        self.ended = False

    def _region(self) -> int | None:
        """Return the index of the region of the next token; `None` if it is in none."""
        inside = (i for i, (first, last) in enumerate(self.spans) if first <= self.position <= last)
        return next(inside, None)

    def allowed(self) -> np.ndarray:
        """Return which tokens may come next."""
        region = self._region()
        if region is None:
            return self.free
        constraint, state, (first, last) = self.constraints[region], self.states[region], self.spans[region]
        if not (self.ends and region == len(self.spans) - 1):
            return constraint.allowed(state, last - self.position + 1)
        drawn, left = self.position - first, last - self.position + 1
        allowed = constraint.allowed_between(state, self.least - drawn, left)
        if constraint.accepts(state) and drawn >= self.least:
            allowed = allowed.copy()
            allowed[list(self.ends)] = True
        return allowed

    def advance(self, token: int) -> None:
        """Note that a token has been drawn."""
        region = self._region()
        if region is not None:
            if self.ends and token in self.ends and region == len(self.spans) - 1:
                self.ended = True
            else:
                self.states[region] = self.constraints[region].advance(self.states[region], token)
        self.position = next(self.positions, self.position + 1)


def constraint_of(
    vocabulary: ByteVocabulary, literals: tuple[bytes, ...], patterns: tuple[str | None, ...] | None = None
) -> Constraint:
    """Return the constraint of literals with patterns between them; those used last are kept with the vocabulary.

    Threads share them. While one makes a constraint, the others go on: if two make the same, one of them is kept.
    """
    cache: dict[Any, Constraint] = vocabulary.cache
    key = literals, patterns
    existing = cache.get(key)
    made = Constraint(vocabulary.table, literals, patterns) if existing is None else existing
    with vocabulary.lock:
        constraint = cache.pop(key, made)
        cache[key] = constraint  # the newest comes last
        size = sum(other.nbytes for other in cache.values())  # they grow as they are used
        while size > MOST_BYTES and len(cache) > 1:
            size -= cache.pop(next(iter(cache))).nbytes
    return constraint
