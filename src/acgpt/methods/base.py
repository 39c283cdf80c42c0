"""What a method is: a way to train a network and to put queries to it. The rest of the package knows no more of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from typing import ClassVar

import numpy as np
from transformers import GPTNeoXForCausalLM

from acgpt.engine.decode import Answer, Drawn, Sampling, gathered
from acgpt.engine.engine import Engine
from acgpt.engine.layout import Layout
from acgpt.errors import InputError, QueryError
from acgpt.query.conditioning import Conditioning
from acgpt.query.query import Query


@dataclass(frozen=True)
class Abilities:
    """What a method can do: its row of table 1 of the paper, and a mark on it where there is something to add.

    Args:
        evaluates_any: Gives p(asked | given) exactly, whatever is asked and given.
        samples_any: Draws from p(asked | given), whatever is asked and given.
        left_to_right: Learns each asked token from what is given and the asked tokens before it, from no others.
        single_pass: Answers a query in one forward pass.
        fine_tunes: A pretrained causal model can be tuned to it; `None`: it is one already.
        note: The mark.
    """

    evaluates_any: bool
    samples_any: bool
    left_to_right: bool
    single_pass: bool
    fine_tunes: bool | None
    note: str = ""


class Method(ABC):
    """How a model is trained in one particular way, and how a query is put to it.

    A subclass is decorated with `registry.register`, which makes it known to all of acgpt.

    A method is an object without state; the model, its BOS and its MASK come with every call. What the model was
    trained on is in its `acgpt.json`, the method's `name` first of all.

        tokens      The   [cat]  [sat]   on    the   [mat]        given: The, on, the     asked: [cat], [sat], [mat]
        position     1      2      3      4     5      6

        answers      can p(cat, sat, mat | The, on, the) be had from such a model at all?
                     AC-GPT: yes. GPT: no, for "on the" stands after "cat"; with "on the" asked as well, yes.
        log_probs    [log p(cat | The, on, the), log p(sat | The, cat, on, the), log p(mat | The, cat, sat, on, the)]
                     so that their sum is log p(cat, sat, mat | The, on, the)
        sample       tokens for [cat], [sat] and [mat], drawn from that distribution; `stream` does it
        lay_out      the layout of a training batch, of this query and many others (see `layout`)
    """

    name: ClassVar[str]  # as in acgpt.json
    title: ClassVar[str]  # in tables and figures; as the paper's tables have it
    sort_order: ClassVar[int] = 100  # of methods in lists: the smallest first
    colour: ClassVar[str] = "#6c757d"  # in figures
    abilities: ClassVar[Abilities]
    reads_future: ClassVar[bool]  # is there any query with a given token after an asked one that it can answer?
    reads_copies: ClassVar[bool] = False  # was its network trained on copies of the given tokens?
    bound: ClassVar[bool] = False  # are its log-probabilities lower bounds, and not exact?
    needs_mask: ClassVar[bool] = False  # does it need a MASK token? It then never predicts one
    compiles: ClassVar[bool] = False  # does it take pass after pass over whole texts, which torch.compile speeds up?
    texts_at_once: ClassVar[int | None] = None  # in an evaluation, where one takes long: it can go on after so many
    says: ClassVar[str]  # what a model of it is, for its card
    examples: ClassVar[tuple[str, str]] = (  # templates to score and to sample that it answers, for its card
        "The capital of {{Italy}} is Rome.",
        "The cat {{_3}}",
    )
    drawn: ClassVar[bool] = False  # is its layout the one that `acgpt show` draws?
    network: ClassVar[type[GPTNeoXForCausalLM]] = GPTNeoXForCausalLM  # what is trained from scratch
    overhead: ClassVar[int] = 1  # positions that a text takes besides those of its tokens: BOS
    options: ClassVar[Mapping[str, str]] = {}  # what `configured` takes, and what it means
    # Recipe keys that concern the method, each with the values that it takes, the default first. `loss` goes to
    # `learning_from`, the others to the config of a new `network`.
    training_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"loss": ("asked",)}

    @property
    def chain(self) -> bool:
        """Do `log_probs` go from left to right?

        Only then does a part of them mean something: read with nothing given, they say what each token has from its
        past alone.
        """
        return True

    def configured(self, options: Mapping[str, str]) -> Method:
        """The method with these options, where it leaves a choice in how a query is answered.

        Raises:
            InputError: It has no such option, or not this value.
        """
        if options:
            has = f"it has {', '.join(self.options)}" if self.options else "it has none"
            raise InputError(f"the method {self.name} has no option {', '.join(options)}: {has}.")
        return self

    # ---- asking -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def answers(self, query: Query) -> bool:
        """Can this query be answered? What it depends on is the roles of the tokens alone."""

    @abstractmethod
    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """As `log_probs`, for queries that `answers` accepts, with the future in view."""

    def log_probs(self, engine: Engine, queries: Sequence[Query], *, future: bool = True) -> list[list[float]]:
        """log p(asked token | given tokens, asked tokens before it), for each query from left to right, in nats.

        Exact unless the method is a `bound`: each query gets what it would get alone, to rounding. Whether gradients
        are kept and whether dropout is off is for the caller to say.

        Args:
            engine: The model, its BOS and MASK.
            queries: Of any lengths, all of which `answers` accepts; every asked token has its id.
            future: Are given tokens known from the start? If not, they are read when they are reached: the text from
                left to right, as if all of it were asked.

        Raises:
            QueryError: `answers` does not accept a query; nothing is guessed.
        """
        self.mask(engine.mask)
        if future:
            self.check(queries)
            return self.score(engine, queries)
        read = [self.left_to_right(query) for query in queries]
        self.check(read)
        answers = self.score(engine, read)
        return [
            [score for score, position in zip(scores, all_.asked_positions, strict=True) if query.asked[position - 1]]
            for query, all_, scores in zip(queries, read, answers, strict=True)
        ]

    @abstractmethod
    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """Draw n samples of each query, and hand them over as they are ready, in whatever order.

        Whoever takes them does so without gradients (`torch.inference_mode`) and dropout, and gets errors from the
        first one on, not before.

        Args:
            engine: As in `log_probs`.
            queries: As in `log_probs`, but that asked tokens need no ids.
            n: How many samples of each.
            sampling: How a token is drawn.
            future: As in `log_probs`.

        Yields:
            Some samples, each with the number of its query and its own, from 0: the asked tokens and the
            log-probability of each as it was drawn.

        Raises:
            QueryError: `can_sample` does not accept a query.
        """

    def sample(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> list[list[Drawn]]:
        """As `stream`: n samples of each query, when all are there."""
        return gathered(self.stream(engine, queries, n, sampling, future), queries, n)

    def can_sample(self, query: Query, future: bool) -> bool:
        """Can samples of this query be drawn? By default wherever `log_probs` has an answer."""
        if future:
            return self.answers(query)
        return self.chain and self.answers(self.left_to_right(query))

    def rows_at_once(self, engine: Engine, length: int) -> int:
        """How many samples of so many tokens one call of `sample` is best asked for."""
        return engine.most_rows

    def with_copies(self) -> Method:
        """How a model of this method is asked by one who insists on the future, though it never learned to read it."""
        return self

    def check(self, queries: Sequence[Query]) -> None:
        """Refuse queries that `answers` does not accept."""
        for number, query in enumerate(queries, start=1):
            if not self.answers(query):
                raise QueryError(
                    f"a model of method {self.name} cannot answer query {number} of {len(queries)}: {self.refusal}"
                )

    refusal: ClassVar[str] = "use a model that was trained with ac-gpt."  # what it cannot do, and what can

    def left_to_right(self, query: Query) -> Query:
        """The query that reads the same text from left to right: what was given is asked as well."""
        if not self.chain:
            raise QueryError(
                f"{self.name} does not take a text apart from left to right, so it cannot say what a token has from "
                "its past alone: leave out `future=False`, or use a model that was trained with ac-gpt."
            )
        asked = map(or_, query.given, query.asked) if query.has_unknown else (True,) * len(query)
        return Query.trusted(query.tokens, (False,) * len(query), asked)

    def mask(self, mask: int | None) -> int | None:
        """The MASK token, without which some methods cannot be asked at all."""
        if mask is None and self.needs_mask:
            raise QueryError(
                f"a model of method {self.name} is asked with a MASK token, and this one names none: use one that was "
                f"trained with {self.name}, or name the token in Python, LanguageModel(…, mask=ID)."
            )
        return mask

    # ---- training ---------------------------------------------------------------------------------------------------

    def learning_from(self, loss: str) -> Method:
        """The method as it is trained on "asked" tokens, or on "all" that are not unknown.

        Raises:
            InputError: Given tokens are seen before they could be predicted.
        """
        if loss not in self.training_options.get("loss", ("asked",)):
            raise InputError(f"method={self.name} sees what is given, and cannot learn to predict it: leave out loss.")
        return self

    def conditioning(self, distribution: Conditioning) -> Conditioning:
        """The conditioning sets that it is trained on, where a recipe names this distribution."""
        return distribution

    @abstractmethod
    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """The layout of a training batch.

        Args:
            tokens: (B, T) token ids.
            roles: (B, T) `GIVEN`, `ASKED` or `UNKNOWN`.
            rngs: The randomness of each text.
            bos: The token at position 0.
            mask: The token that stands for unknown ones.
        """

    def longest(self, length: int) -> int:
        """The most copies, and the most text slots, that a text of so many tokens has in training."""
        return length

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many copies texts have in training, and at most how many predictions.

        Args:
            length: T, of every text.
            given: (n,) how many of its tokens are given.
            asked: (n,) how many are asked.
        """
        return np.zeros_like(given), asked
