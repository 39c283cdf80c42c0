"""FIM: fill in the middle (Bavarian et al., 2022), the common approach to infilling in practice.

It is a causal model of texts whose middle has been moved to the end.

    text     [The cat] sat on [the mat]        given: the two ends          asked: the middle

    read     BOS  The  cat  MASK  the  mat  MASK  sat  (on)
    position  0    1    2     3    4    5    6     7                        positions in the order of reading
    predicts                                 sat   on

MASK plays the role of the two tokens that are usually called SUF and MID: after the first one comes the suffix, after
the second one the middle. This is not ambiguous, because no text has a MASK; it is never predicted. Everything else is
a causal model: scored exactly and in one pass, sampled with a cache.

It answers only queries with one run of asked tokens and everything else given, and is trained on such queries: if a
recipe gives blocks, the same number of tokens is given at the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from acgpt.errors import InputError
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.query.conditioning import ASKED, GIVEN, Blocks, Conditioning, Gaps, Infilling
from acgpt.query.query import Query

if TYPE_CHECKING:
    from acgpt.engine.decode import Answer
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.query.sampling import Sampling


@register
class Fim(Method):
    """p(one gap | everything around it), exactly and in one pass."""

    name: ClassVar[str] = "fim"
    title: ClassVar[str] = "FIM"
    sort_order: ClassVar[int] = 70
    colour: ClassVar[str] = "#56b4e9"
    description: ClassVar[str] = "a causal language model that answers p(a gap | the text around it)"
    abilities: ClassVar[Abilities] = Abilities(
        False, False, True, True, True, note="one gap only; not in the paper's table, which cites it as related work"
    )
    reads_future: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = True
    overhead: ClassVar[int] = 2
    refusal: ClassVar[str] = (
        "it asks for something else than one run of tokens, or a token around it is not given. Leave none unknown and "
        "read it from left to right with `future=False`, or use a model that was trained with ac-gpt."
    )

    def answers(self, query: Query) -> bool:
        """Return whether the query has one run of asked tokens and nothing unknown."""
        return len(query.blanks) == 1 and not query.has_unknown

    def can_sample(self, query: Query, future: bool) -> bool:
        """Return whether it can sample: what it answers or, without the future, any query with nothing unknown.

        Without the future the whole text is the middle.
        """
        return self.answers(query) if future else not query.has_unknown

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Score queries in one causal pass."""
        mask = self.mask(engine.mask)
        assert mask is not None
        return engine.log_probs([as_read(query, mask) for query in queries], future=False, forbidden_token=mask)

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """Sample with a cache; without the future, the whole text is the middle."""
        mask = self.mask(engine.mask)
        assert mask is not None
        if not all(self.can_sample(query, future) for query in queries):
            self.check(queries if future else [self.left_to_right(query) for query in queries])
        moved = [as_read(query, mask, whole=not future) for query in queries]
        yield from engine.stream(moved, n, sampling, future=False, forbidden_token=mask)

    def conditioning(self, distribution: Conditioning) -> Conditioning:
        """Return infilling sets of the same sizes."""
        if distribution.has_unknown:
            raise InputError("a model of method fim cannot leave a token unknown: leave out conditioning.unknown.")
        parts = tuple(
            Infilling(r_min=part.r_min, r_max=part.r_max) if isinstance(part, Blocks | Gaps) else part
            for part in distribution.parts
        )
        return Conditioning(parts, distribution.weights)

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """Lay out BOS, prefix, MASK, suffix, MASK, and the middle without its last token."""
        from acgpt.engine.layout import Sequences, lay_out

        assert mask is not None
        read, read_roles = [], []
        for text, kinds in zip(tokens, roles, strict=True):
            (asked,) = np.nonzero(kinds == ASKED)
            first, end = asked[0], asked[-1] + 1
            if end - first != len(asked):
                raise InputError("a text for fim must have one run of asked tokens, and everything else given.")
            read.append(middle_last(text, first, end, mask))
            read_roles.append(middle_last(kinds, first, end, GIVEN))
        return lay_out(Sequences.rows(np.stack(read), np.stack(read_roles)), bos=bos, mask=mask, copies=False)

    def longest(self, length: int) -> int:
        """Return the number of slots: every token but the last, BOS, and MASK twice."""
        return length + 2


def middle_last(values: np.ndarray, first: int, end: int, between: int) -> np.ndarray:
    """Move the middle, `values[first:end]`, to the end, with the value `between` before the suffix and before it."""
    return np.concatenate([values[:first], [between], values[end:], [between], values[first:end]])


def as_read(query: Query, mask: int, *, whole: bool = False) -> Query:
    """Return the query in FIM's order; with `whole`, the whole text is the middle, whatever is given in it."""
    ((first, last),) = ((1, len(query)),) if whole else query.blanks
    ids, given, asked = (
        middle_last(np.array(values), first - 1, last, between).tolist()
        for values, between in ((query.ids, mask), (query.given, True), (query.asked, False))
    )
    return Query.trusted([None if token < 0 else token for token in ids], given, asked)
