"""GPT: a plain causal language model, which reads from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedModel

from acgpt import score
from acgpt.errors import QueryError
from acgpt.methods.base import Method
from acgpt.query import Query


class Gpt(Method):
    """p(what follows | what stands before it). Any causal model; none of the queries that take more."""

    name: ClassVar[str] = "gpt"
    reads_future: ClassVar[bool] = False

    def answers(self, query: Query) -> bool:
        """A query with nothing given after an asked token, and nothing unknown before one."""
        last = query.asked_positions[-1]
        known = all(given or asked for given, asked in zip(query.given[:last], query.asked[:last], strict=True))
        return known and not query.needs_future

    def log_probs(
        self,
        model: PreTrainedModel,
        queries: Sequence[Query],
        *,
        bos: int,
        mask: int | None,
        backend: str,
        budget: int,
    ) -> list[list[float]]:
        """As `Method.log_probs` says, in one causal pass; MASK is never read."""
        for number, query in enumerate(queries, start=1):
            if not self.answers(query):
                raise QueryError(
                    f"a plain causal model cannot answer query {number} of {len(queries)}: it gives a token after an "
                    "asked one, or leaves one before it unknown. Use a model that was trained with ac-gpt."
                )
        mask = bos  # stands where nothing is read any more: after the last asked token
        return score.log_probs(model, queries, bos=bos, mask=mask, future=False, backend=backend, budget=budget)
