"""GPT: a plain causal language model, which reads from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import or_
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from acgpt.methods.ac_gpt import AcGpt
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.query.conditioning import Conditioning, Empty
from acgpt.query.query import Query

if TYPE_CHECKING:
    from acgpt.engine.decode import Answer
    from acgpt.engine.decoding import Decoding
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.engine.score import TopScore
    from acgpt.query.sampling import Sampling


@register
class Gpt(Method):
    """p(next tokens | tokens before them), for any causal model. It answers no other queries."""

    name: ClassVar[str] = "gpt"
    title: ClassVar[str] = "GPT"
    sort_order: ClassVar[int] = 20
    colour: ClassVar[str] = "#b5651d"
    description: ClassVar[str] = "a causal language model that answers p(later tokens | earlier tokens)"
    drawable: ClassVar[bool] = True
    abilities: ClassVar[Abilities] = Abilities(False, False, True, True, None)
    reads_future: ClassVar[bool] = False
    any_start: ClassVar[bool] = True
    examples: ClassVar[tuple[str, str]] = ("The capital of Italy is {{Rome}}", "The cat {{_3}}")
    refusal: ClassVar[str] = (
        "it gives a token after an asked one, or leaves one before it unknown. Use a model that was trained with "
        "ac-gpt."
    )

    def answers(self, query: Query) -> bool:
        """Return whether nothing is given after an asked token, and nothing before one is unknown."""
        last = query.asked_at[-1]
        return all(map(or_, query.given[:last], query.asked[:last])) and not query.needs_future

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Score queries in one causal pass; MASK is never read."""
        # Any token can be MASK here: unknown tokens come after the last asked one, where they are not read.
        return engine.with_mask(engine.bos).log_probs(queries, future=False)

    def log_probs(self, engine: Engine, queries: Sequence[Query], *, future: bool = True) -> list[list[float]]:
        """Score queries. If `future` is false, given tokens after an asked one are ignored instead of refused."""
        if future:
            return super().log_probs(engine, queries)
        return engine.log_probs(queries, future=False)

    def top_log_probs(
        self, engine: Engine, queries: Sequence[Query], k: int, *, future: bool = True
    ) -> list[list[TopScore]]:
        """Score queries in one causal pass, with the most probable tokens."""
        if future:
            self.check(queries)
        return engine.with_mask(engine.bos).top_log_probs(queries, k, future=False)

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """Sample with a cache; given tokens are forced when they are reached."""
        if future:
            self.check(queries)
        yield from engine.stream(queries, n, sampling, future=False)

    def with_copies(self) -> Method:
        """Return AC-GPT: the network accepts copies, although it was not trained on them."""
        return AcGpt()

    def conditioning(self, distribution: Conditioning) -> Conditioning:
        """Return empty conditioning sets: nothing is given, everything is asked."""
        return Conditioning((Empty(),))

    def decoding(self, engine: Engine, sampling: Sampling, future: bool) -> Decoding:
        """Return a `Decoding` without copies."""
        from acgpt.engine.decoding import Decoding

        return Decoding(engine, sampling, future=False)

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """Lay out BOS and the text."""
        from acgpt.engine.layout import Sequences, lay_out

        return lay_out(Sequences.rows(tokens, roles), bos=bos, mask=mask, copies=False)
