"""AC-GPT: given tokens are copied to the front, so that every prediction attends to all of them (see `layout`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.query.query import Query

if TYPE_CHECKING:
    from acgpt.engine.decode import Answer
    from acgpt.engine.decoding import Decoding
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.engine.score import TopScore
    from acgpt.query.sampling import Sampling


@register
class AcGpt(Method):
    """Any conditional, exactly and in one pass, for a model that was trained on copies."""

    name: ClassVar[str] = "ac-gpt"
    title: ClassVar[str] = "AC-GPT"
    sort_order: ClassVar[int] = 10
    colour: ClassVar[str] = "#1b7f5c"
    description: ClassVar[str] = "a causal language model that answers p(any tokens | any other tokens)"
    drawable: ClassVar[bool] = True
    abilities: ClassVar[Abilities] = Abilities(True, True, True, True, True)
    reads_future: ClassVar[bool] = True
    reads_copies: ClassVar[bool] = True
    any_start: ClassVar[bool] = True

    def answers(self, query: Query) -> bool:
        """Return true: it answers every query."""
        return True

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Score queries in one pass, with a copy of every given token."""
        return engine.log_probs(queries, future=True)

    def log_probs(self, engine: Engine, queries: Sequence[Query], *, future: bool = True) -> list[list[float]]:
        """Score queries, without copies if `future` is false."""
        return engine.log_probs(queries, future=future)

    def top_log_probs(
        self, engine: Engine, queries: Sequence[Query], k: int, *, future: bool = True
    ) -> list[list[TopScore]]:
        """Score queries, with the most probable tokens; without copies if `future` is false."""
        return engine.top_log_probs(queries, k, future=future)

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """Sample with a cache. Copies are read once, in the prefill; given tokens are forced when they are reached."""
        yield from engine.stream(queries, n, sampling, future)

    def decoding(self, engine: Engine, sampling: Sampling, future: bool) -> Decoding:
        """Return a `Decoding` with copies of given tokens, unless `future` is false."""
        from acgpt.engine.decoding import Decoding

        return Decoding(engine, sampling, future=future)

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """Lay out copies of the given tokens, then BOS and the text."""
        from acgpt.engine.layout import Sequences, lay_out

        return lay_out(Sequences.rows(tokens, roles), bos=bos, mask=mask, copies=True)

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return one copy per given token and one prediction per asked token."""
        return given, asked
