"""What a method is: a way to put queries to a network. The rest of the package knows methods by this class only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedModel

from acgpt.query import Query


class Method(ABC):
    """How a query is put to a model that was trained in one particular way.

    A method is a stateless object; the model, its BOS and its MASK come with every call. What the model was trained on
    is in its `acgpt.json`, the method's `name` first of all.

        tokens      The   [cat]  [sat]   on    the   [mat]        given: The, on, the     asked: [cat], [sat], [mat]
        position     1      2      3      4     5      6

        answers      can p(cat, sat, mat | The, on, the) be had from such a model at all, exactly?
                     AC-GPT: yes. GPT: no, for "on the" stands after "cat"; with "on the" asked as well, yes.
        log_probs    [log p(cat | The, on, the), log p(sat | The, cat, on, the), log p(mat | The, cat, sat, on, the)]
                     so that their sum is log p(cat, sat, mat | The, on, the)
    """

    name: ClassVar[str]  # as in acgpt.json
    reads_future: ClassVar[bool]  # can it answer any query in which a given token stands after an asked one?

    @abstractmethod
    def answers(self, query: Query) -> bool:
        """Can this query be answered exactly? What it depends on is the roles of the tokens alone."""

    @abstractmethod
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
        """log p(asked token | given tokens, asked tokens before it), for each query from left to right, in nats.

        Exact: each query gets what it would get alone, to rounding. Whether gradients are kept and whether dropout is
        off is for the caller to say.

        Args:
            model: A model of this method that `attention.check_model` has accepted.
            queries: Of any lengths, all of which `answers` accepts; every asked token has its id.
            bos: Id of the token at position 0.
            mask: Id of the token that stands for unknown ones; needed only if a query has any.
            backend: How attention is computed, see `attention.BACKENDS`.
            budget: At most this many tokens go through the model at a time (a longer text still goes alone).

        Raises:
            QueryError: `answers` does not accept a query; nothing is guessed.
        """
