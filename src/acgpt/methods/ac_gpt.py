"""AC-GPT: given tokens are copied to the front, so that every prediction reads all of them (see `layout`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedModel

from acgpt.engine import score
from acgpt.engine.decode import Answer, Sampler, Sampling
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.methods.slots import Slots, copies_and_text
from acgpt.query.query import Query


@register
class AcGpt(Method):
    """Any conditional, exactly and in one pass; of a model that was trained on copies."""

    name: ClassVar[str] = "ac-gpt"
    title: ClassVar[str] = "AC-GPT"
    sort_order: ClassVar[int] = 10
    colour: ClassVar[str] = "#1b7f5c"
    says: ClassVar[str] = "a causal language model that answers p(any tokens | any other tokens)"
    drawn: ClassVar[bool] = True
    abilities: ClassVar[Abilities] = Abilities(True, True, True, True, True)
    reads_future: ClassVar[bool] = True
    reads_copies: ClassVar[bool] = True

    def answers(self, query: Query) -> bool:
        """Every query."""
        return True

    def score(self, model: PreTrainedModel, queries: Sequence[Query], **how: Any) -> list[list[float]]:
        """As `Method.score` says, with a copy of every given token."""
        return score.log_probs(model, queries, future=True, **how)

    def log_probs(
        self, model: PreTrainedModel, queries: Sequence[Query], *, future: bool = True, **how: Any
    ) -> list[list[float]]:
        """As `Method.log_probs` says; without the future nothing is copied."""
        return score.log_probs(model, queries, future=future, **how)

    def stream(
        self, sampler: Sampler, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """As `Method.stream` says, with a cache: copies are read once, given tokens forced when they are reached."""
        yield from sampler.stream(queries, n, sampling, future)

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Slots:
        """A copy of what is given, then BOS and the text."""
        return copies_and_text(tokens, roles, bos=bos, mask=mask)

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A copy for each given token, a prediction for each asked one."""
        return given, asked
