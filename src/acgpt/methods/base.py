"""`Method`, the interface of all methods: how a network is trained, and how it answers queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from acgpt.errors import InputError, QueryError
from acgpt.query.conditioning import Conditioning
from acgpt.query.query import Query

if TYPE_CHECKING:
    from transformers import GPTNeoXForCausalLM

    from acgpt.engine.decode import Answer, Drawn
    from acgpt.engine.decoding import Decoding
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.engine.score import TopScore
    from acgpt.query.sampling import Sampling


@dataclass(frozen=True)
class Abilities:
    """Abilities of a method: its row in table 1 of the paper.

    Args:
        evaluates_any: Computes p(asked | given) exactly for any asked and given tokens.
        samples_any: Samples from p(asked | given) for any asked and given tokens.
        left_to_right: In training, predicts each asked token only from the given tokens and the asked tokens before it.
        single_pass: Scores a query in one forward pass.
        fine_tunes: A pretrained causal model can be fine-tuned to it; `None`: a pretrained causal model is one already.
        note: A remark on the row, if any.
    """

    evaluates_any: bool
    samples_any: bool
    left_to_right: bool
    single_pass: bool
    fine_tunes: bool | None
    note: str = ""


class Imported:
    """A class attribute that is imported each time it is read: torch and transformers take seconds to import."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(import_module(self.module), self.name)


def imported(module: str, name: str) -> Any:
    """Return a class attribute that stands for a name of a module, which is imported when the attribute is read."""
    return Imported(module, name)


class Method(ABC):
    """A method: how a model is trained, and how it answers queries.

    Decorate a subclass with `registry.register` to make it available everywhere in acgpt. A method has no state: the
    model, its BOS and its MASK are passed to every call. The `name` of a model's method is in its `acgpt.json`.

        tokens      The   [cat]  [sat]   on    the   [mat]        given: The, on, the     asked: [cat], [sat], [mat]
        position     1      2      3      4     5      6

        answers      whether the method can compute p(cat, sat, mat | The, on, the)
                     AC-GPT: yes. GPT: no, because "on the" comes after "cat"; yes if "on the" is asked as well.
        log_probs    [log p(cat | The, on, the), log p(sat | The, cat, on, the), log p(mat | The, cat, sat, on, the)]
                     their sum is log p(cat, sat, mat | The, on, the)
        sample       tokens for [cat], [sat] and [mat] from that distribution, through `stream`
        lay_out      the layout of a training batch, for this query and many others (see `layout`)
    """

    name: ClassVar[str]  # in acgpt.json and recipes
    title: ClassVar[str]  # in tables and figures, as in the paper
    sort_order: ClassVar[int] = 100  # position in lists of methods: the smallest first
    colour: ClassVar[str] = "#6c757d"  # in figures
    abilities: ClassVar[Abilities]
    reads_future: ClassVar[bool]  # whether it answers any query with a given token after an asked one
    reads_copies: ClassVar[bool] = False  # whether its network is trained on copies of the given tokens
    bound: ClassVar[bool] = False  # whether its log-probabilities are lower bounds instead of exact
    needs_mask: ClassVar[bool] = False  # whether it needs a MASK token, which it then never predicts
    any_start: ClassVar[bool] = False  # whether it scores and draws texts that begin without BOS (`Query.start`)
    compiles: ClassVar[bool] = False  # whether torch.compile pays off: it needs many passes over whole texts
    texts_at_once: ClassVar[int | None] = None  # for slow methods: an evaluation saves its progress after this many
    description: ClassVar[str]  # description of a model, for its card
    examples: ClassVar[tuple[str, str]] = (  # for its card: templates it can score and sample
        "The capital of {{Italy}} is Rome.",
        "The cat {{_3}}",
    )
    drawable: ClassVar[bool] = False  # whether `acgpt show` can draw its layout
    network: ClassVar[type[GPTNeoXForCausalLM]] = imported("transformers", "GPTNeoXForCausalLM")  # to train
    overhead: ClassVar[int] = 1  # positions of a text besides those of its tokens: BOS
    options: ClassVar[Mapping[str, str]] = {}  # names and descriptions of the options of `configured`
    # Recipe keys of the method, with their allowed values, the default first. `loss` is passed to `with_loss`,
    # `target_positions` to the config of a new `network`; there are no others.
    training_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"loss": ("asked",)}

    @property
    def chain(self) -> bool:
        """Whether `log_probs` factorise from left to right.

        Only then are single log-probabilities meaningful: with nothing given, each is that of a token given its past.
        """
        return True

    def configured(self, options: Mapping[str, str]) -> Method:
        """Return the method with options, if there is a choice in how it answers queries.

        Args:
            options: Values as text, by name; see `options`.

        Raises:
            InputError: The method has no such option, or the option does not allow this value.
        """
        if options:
            has = f"it has {', '.join(self.options)}" if self.options else "it has none"
            raise InputError(f"the method {self.name} has no option {', '.join(options)}: {has}.")
        return self

    # ---- queries ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def answers(self, query: Query) -> bool:
        """Return whether the method can answer a query. It depends only on the roles of the tokens."""

    @abstractmethod
    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Return what `log_probs` does with `future=True`, for queries that `answers` accepts."""

    def log_probs(self, engine: Engine, queries: Sequence[Query], *, future: bool = True) -> list[list[float]]:
        """Return log p(asked token | given tokens, asked tokens before it) of each query, from left to right, in nats.

        The numbers are exact unless the method is a `bound`. Batching does not change them, up to rounding. The caller
        switches off gradients and dropout, if they are not wanted.

        Args:
            engine: The model, its BOS and MASK.
            queries: Queries of any lengths that `answers` accepts. Every asked token has an id.
            future: Whether given tokens are known from the start. If not, the text is read from left to right, as if
                all of it were asked.

        Raises:
            QueryError: `answers` does not accept a query.
        """
        self.mask(engine.mask)
        if future:
            self.check(queries)
            return self.score(engine, queries)
        read = [self.left_to_right(query) for query in queries]
        self.check(read)
        answers = self.score(engine, read)
        return [
            [score for score, position in zip(scores, full.asked_positions, strict=True) if query.asked[position - 1]]
            for query, full, scores in zip(queries, read, answers, strict=True)
        ]

    def top_log_probs(
        self, engine: Engine, queries: Sequence[Query], k: int, *, future: bool = True
    ) -> list[list[TopScore]]:
        """Return what `log_probs` does, each with the k most probable tokens in its place.

        Raises:
            QueryError: The method does not predict one token after the other.
        """
        raise QueryError(
            f"a model of method {self.name} has no most probable tokens. Leave them out, or use a model that was "
            "trained with ac-gpt."
        )

    @abstractmethod
    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """Draw n samples of each query, and yield them as they are ready, in any order.

        The caller iterates with gradients (`torch.inference_mode`) and dropout switched off. As with any generator,
        errors are raised when iteration starts, not by the call.

        Args:
            engine: The model, its BOS and MASK.
            queries: Queries that `can_sample` accepts. Asked tokens need no ids.
            n: Number of samples per query.
            sampling: Temperature, truncation and seed.
            future: Whether given tokens are known from the start, see `log_probs`.

        Yields:
            Lists of samples. A sample is the index of its query, its own index (both from 0), and the ids and
            log-probabilities of the asked tokens.

        Raises:
            QueryError: `can_sample` does not accept a query.
        """

    def sample(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> list[list[Drawn]]:
        """Return n samples of each query; see `stream` for the arguments."""
        from acgpt.engine.decode import gather_samples

        return gather_samples(self.stream(engine, queries, n, sampling, future), queries, n)

    def decoding(self, engine: Engine, sampling: Sampling, future: bool) -> Decoding:
        """Return an empty `Decoding`, which draws samples token by token, under constraints if wanted.

        Raises:
            QueryError: The method does not draw from left to right with a cache.
        """
        raise QueryError(
            f"a model of method {self.name} cannot fill gaps of any length or text. Ask for a number of tokens, "
            "{{_4}}, or use a model that was trained with ac-gpt."
        )

    def can_sample(self, query: Query, future: bool) -> bool:
        """Return whether the method can sample a query. Default: if `log_probs` can score it."""
        if future:
            return self.answers(query)
        return self.chain and self.answers(self.left_to_right(query))

    def rows_at_once(self, engine: Engine, length: int) -> int:
        """Return the best number of samples of `length` tokens for one call of `sample`."""
        return engine.most_rows

    def with_copies(self) -> Method:
        """Return the method to use if the user asks for `future=True` and the model was not trained to read it."""
        return self

    def check(self, queries: Sequence[Query]) -> None:
        """Raise an error if `answers` does not accept a query."""
        for number, query in enumerate(queries, start=1):
            if not self.answers(query):
                raise QueryError(
                    f"a model of method {self.name} cannot answer query {number} of {len(queries)}: {self.refusal}"
                )

    refusal: ClassVar[str] = "use a model that was trained with ac-gpt."  # end of the error: the reason and the remedy

    def left_to_right(self, query: Query) -> Query:
        """Return the query that reads the same text from left to right: given tokens are asked as well."""
        if not self.chain:
            raise QueryError(
                f"a model of method {self.name} cannot score a text from left to right. Leave out `future=False`, or "
                "use a model that was trained with ac-gpt."
            )
        asked = map(or_, query.given, query.asked) if query.has_unknown else (True,) * len(query)
        return Query.trusted(query.tokens, (False,) * len(query), asked)

    def mask(self, mask: int | None) -> int | None:
        """Return the id of the MASK token; raise an error if the method needs one and there is none."""
        if mask is None and self.needs_mask:
            raise QueryError(
                f"method {self.name} needs a MASK token, and the model has none. Use a model that was trained with "
                f"{self.name}, or set the token in Python: LanguageModel(…, mask=ID)."
            )
        return mask

    # ---- training ---------------------------------------------------------------------------------------------------

    def with_loss(self, loss: str) -> Method:
        """Return the method with another training loss.

        Args:
            loss: "asked": over asked tokens; "all": over asked and given tokens.

        Raises:
            InputError: The method cannot learn given tokens, because it reads them before it could predict them.
        """
        if loss not in self.training_options.get("loss", ("asked",)):
            raise InputError(
                f"method={self.name} reads the given tokens, so it cannot learn to predict them: leave out loss."
            )
        return self

    def conditioning(self, distribution: Conditioning) -> Conditioning:
        """Return the distribution of conditioning sets to train on, for the one that a recipe names."""
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
        """Return the layout of a training batch.

        Args:
            tokens: (B, T) token ids.
            roles: (B, T) `GIVEN`, `ASKED` or `UNKNOWN`.
            rngs: The random generator of each text.
            bos: Id of the token at position 0.
            mask: Id of the token that stands for unknown tokens.
        """

    def longest(self, length: int) -> int:
        """Return an upper bound on both the copies and the text slots of a training text of `length` tokens."""
        return length

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of copies, and the maximum number of predictions, of training texts.

        Args:
            length: T, the number of tokens of every text.
            given: (n,) numbers of given tokens.
            asked: (n,) numbers of asked tokens.
        """
        return np.zeros_like(given), asked
