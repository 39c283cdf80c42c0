"""FIM: fill in the middle (Bavarian et al., 2022), what practice does about infilling: a causal model of texts whose
middle has been moved to the end.

    text     [The cat] sat on [the mat]        given: the two ends          asked: the middle

    read     BOS  The  cat  MASK  the  mat  MASK  sat  (on)
    position  0    1    2     3    4    5    6     7                        those of the text as it is read
    predicts                                 sat   on

MASK stands for the two tokens that others call SUF and MID: where the first one is, the suffix begins, and where the
second one is, the middle. As no text has a MASK, nothing is ambiguous, and it is never predicted. Everything else is a
causal model, scored exactly and in one pass, sampled with a cache.

It answers queries with one run of asked tokens and everything else given, and no others. It is trained on such: where a
recipe gives blocks, as many tokens are given at the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedModel

from acgpt.engine import score
from acgpt.engine.decode import Answer, Sampler, Sampling
from acgpt.errors import InputError, QueryError
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.methods.slots import Slots
from acgpt.query.conditioning import ASKED, Blocks, Conditioning, Infilling
from acgpt.query.query import Query


@register
class Fim(Method):
    """p(a gap | all that is around it), exactly and in one pass."""

    name: ClassVar[str] = "fim"
    title: ClassVar[str] = "FIM"
    sort_order: ClassVar[int] = 70
    colour: ClassVar[str] = "#56b4e9"
    says: ClassVar[str] = "a causal language model that answers p(a gap | all that is around it)"
    abilities: ClassVar[Abilities] = Abilities(
        False, False, True, True, True, note="one gap only; not in the paper's table, which cites it as related work"
    )
    reads_future: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = True
    overhead: ClassVar[int] = 2
    refusal: ClassVar[str] = (
        "it asks for something else than one run of tokens with everything around it given. Read it from left to "
        "right with future=False (--no-future), or use a model that was trained with ac-gpt."
    )

    def answers(self, query: Query) -> bool:
        """One run of asked tokens, and nothing unknown."""
        return len(query.blanks) == 1 and not query.has_unknown

    def can_sample(self, query: Query, future: bool) -> bool:
        """With the future what it answers; without, whatever has nothing unknown, as the whole text is the middle."""
        return self.answers(query) if future else not query.has_unknown

    def check(self, queries: Sequence[Query]) -> None:
        """As `Method.check` says; what is unknown is named, for reading from left to right does not help there."""
        for number, query in enumerate(queries, start=1):
            if query.has_unknown:
                raise QueryError(
                    f"a model of method {self.name} cannot answer query {number} of {len(queries)}: a token of it is "
                    "neither given nor asked, and nothing stands for that. Give it or ask for it, or use a model that "
                    "was trained with ac-gpt on unknown tokens."
                )
        super().check(queries)

    def score(self, model: PreTrainedModel, queries: Sequence[Query], **how: Any) -> list[list[float]]:
        """As `Method.score` says, in one causal pass."""
        return score.log_probs(
            model, [middle_last(query, how["mask"]) for query in queries], future=False, never=how["mask"], **how
        )

    def stream(
        self, sampler: Sampler, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """As `Method.stream` says, with a cache; without the future, the whole text is the middle."""
        mask = self.mask(sampler.mask)
        assert mask is not None
        if not all(self.can_sample(query, future) for query in queries):
            self.check(queries if future else [self.left_to_right(query) for query in queries])
        moved = [middle_last(query, mask, all_of_it=not future) for query in queries]
        yield from sampler.stream(moved, n, sampling, future=False, never=mask)

    def conditioning(self, distribution: Conditioning) -> Conditioning:
        """Infilling sets of the same sizes."""
        if distribution.hides:
            raise InputError("a model of method fim cannot leave a token unknown: leave out conditioning.unknown.")
        parts = tuple(
            Infilling(r_min=part.r_min, r_max=part.r_max) if isinstance(part, Blocks) else part
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
    ) -> Slots:
        """BOS, prefix, MASK, suffix, MASK, and the middle but for its last token."""
        count, length = tokens.shape
        slots = length + 2
        ids = np.full((count, slots), mask)
        ids[:, 0] = bos
        predicts = np.zeros((count, slots), dtype=bool)
        targets = []
        for text, row, asked, rows in zip(tokens, ids, roles == ASKED, predicts, strict=True):
            (places,) = np.nonzero(asked)
            first, last = places[0], places[-1] + 1
            if last - first != len(places):
                raise InputError("a text for fim has one run of asked tokens, and everything else given.")
            row[1 : first + 1] = text[:first]
            row[first + 2 : first + 2 + length - last] = text[last:]
            row[slots - len(places) + 1 :] = text[first : last - 1]
            rows[slots - len(places) :] = True
            targets.append(text[first:last])
        return Slots(
            copy_ids=tokens[:0, 0],
            copy_positions=np.zeros(0, dtype=np.int64),
            n_copies=np.zeros(count, dtype=np.int64),
            text_ids=ids.ravel(),
            text_positions=np.tile(np.arange(slots), count),
            n_texts=np.full(count, slots),
            rows=np.flatnonzero(predicts),
            targets=np.concatenate(targets),
            asked=int((roles == ASKED).sum()),
        )

    def longest(self, length: int) -> int:
        """Every token but the last, BOS, and MASK twice."""
        return length + 2


def middle_last(query: Query, mask: int, *, all_of_it: bool = False) -> Query:
    """The query as FIM reads it; `all_of_it` makes the whole text its middle, whatever is given there."""
    ((first, last),) = ((1, len(query)),) if all_of_it else query.blanks
    head, middle, tail = slice(first - 1), slice(first - 1, last), slice(last, None)

    def moved(values: tuple[Any, ...], between: Any) -> tuple[Any, ...]:
        return (*values[head], between, *values[tail], between, *values[middle])

    return Query.trusted(moved(query.tokens, mask), moved(query.given, True), moved(query.asked, False))
