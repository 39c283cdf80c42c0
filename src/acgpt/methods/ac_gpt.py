"""AC-GPT: given tokens are copied to the front, so that every prediction reads all of them (see `layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedModel

from acgpt import score
from acgpt.methods.base import Method
from acgpt.query import Query


class AcGpt(Method):
    """Any conditional, exactly and in one pass; of a model that was trained on copies."""

    name: ClassVar[str] = "ac-gpt"
    reads_future: ClassVar[bool] = True

    def answers(self, query: Query) -> bool:
        """Every query."""
        return True

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
        """As `Method.log_probs` says, with a copy of every given token."""
        return score.log_probs(model, queries, bos=bos, mask=mask, future=True, backend=backend, budget=budget)
