"""σ-GPT (Pannatier et al., 2024): a causal model of texts in any order, given tokens first.

    query      The   [cat]   sat   [on]            given: The, sat     asked: [cat], [on]

    slot       BOS    The    sat    cat            one causal mask over the text as it is ordered
    position    0      1      3      2             of the token that is read: keys are rotated to it
    predicts    1      3      2      4             of the token that is predicted: queries are (see `sigma_network`)
    token       –      –     cat    on

Given tokens come first, then asked ones: in the *temporal* variant of the paper both from left to right, in the
*random* one each in a random order, new for every text and epoch. Either way a query is answered in one pass and
exactly, by the chain rule along the order; tokens that are unknown are left out of it, and nothing stands for them.

A model of random orders can be asked in any. The default is left to right. The paper does not say which it uses: its
numbers suggest random on the training distribution and left to right elsewhere. `order=random` takes one at random, a
function of `seed` and the query; `orders=K` averages the *probability* of the asked tokens over K such orders, which is
a better model of them than any single one. A sample is then drawn in one of the K, each as likely, which is a draw from
that mean; its log-probabilities are those of its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import ClassVar

import numpy as np
from transformers import GPTNeoXForCausalLM, PreTrainedModel

from acgpt.engine.decode import Answer, Sampling, randomness
from acgpt.engine.engine import Engine
from acgpt.engine.layout import Layout, Sequences, lay_out
from acgpt.errors import InputError, ModelError
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.methods.sigma_network import SigmaGPTForCausalLM
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN
from acgpt.query.query import Query

RANK = np.array([1, 0, 2])  # by role: given tokens come first, then asked ones, then those that nobody needs


@register
class SigmaGptTemporal(Method):
    """Any conditional, exactly and in one pass: given tokens from left to right, then asked ones from left to right."""

    name: ClassVar[str] = "sigma-gpt-temporal"
    title: ClassVar[str] = "σ-GPT-temporal"
    sort_order: ClassVar[int] = 30
    colour: ClassVar[str] = "#3a6ea5"
    says: ClassVar[str] = "a language model of texts in any order that answers p(any tokens | any other tokens)"
    abilities: ClassVar[Abilities] = Abilities(
        True, True, True, True, False,
        note="the paper's row is of random orders, of which this variant keeps the one from left to right",
    )  # fmt: skip
    reads_future: ClassVar[bool] = True
    network: ClassVar[type[GPTNeoXForCausalLM]] = SigmaGPTForCausalLM
    training_options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "loss": ("asked", "all"),
        "target_positions": ("rotary", "table"),
    }
    shuffles: ClassVar[bool] = False  # in training
    learns_given: bool = False  # are given tokens predicted, too?

    def answers(self, query: Query) -> bool:
        """Every query."""
        return True

    def order(self, query: Query, number: int) -> np.ndarray:
        """The positions of the given tokens, then of the asked ones, in the order in which they are read."""
        return np.concatenate([query.given_at, query.asked_at])

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """As `Method.score` says, in one pass."""
        return self.score_in_order(engine, queries, 0)

    def score_in_order(self, engine: Engine, queries: Sequence[Query], number: int) -> list[list[float]]:
        """The same, in the order of this number."""
        check_network(engine.model)
        orders = [self.order(query, number) for query in queries]
        ordered = [in_order(query, order) for query, order in zip(queries, orders, strict=True)]
        answers = engine.log_probs(ordered, future=False, orders=orders)
        return [
            from_left_to_right(query, order, np.array(answer)).tolist()
            for query, order, answer in zip(queries, orders, answers, strict=True)
        ]

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """As `Method.stream` says, with a cache; without the future, given tokens are forced when they are reached."""
        check_network(engine.model)
        ways: dict[tuple[int, int], list[int]] = {}  # by query and order, the samples that are drawn so
        for number, query in enumerate(queries):
            for sample in range(n):
                order = self.draw_order(query, sampling.first + sample, sampling.seed) if future else 0
                ways.setdefault((number, order), []).append(sample)
        asked = [queries[number] for number, _ in ways]

        def turned(way: int, values: np.ndarray) -> np.ndarray:
            return from_left_to_right(asked[way], orders[way], values)

        if future:
            orders = [self.order(queries[number], order) for number, order in ways]
        else:
            orders = [self.left_to_right(query).asked_at for query in asked]
        ordered = [in_order(query, order) for query, order in zip(asked, orders, strict=True)]
        numbers = [number for number, _ in ways]
        for answers in engine.stream(ordered, list(ways.values()), sampling, future=False, orders=orders):
            yield [
                (numbers[way], sample, (turned(way, tokens), turned(way, scores)))
                for way, sample, (tokens, scores) in answers
            ]

    def draw_order(self, query: Query, sample: int, seed: int) -> int:
        """The number of the order in which a sample is drawn."""
        return 0

    def learning_from(self, loss: str) -> Method:
        """Given tokens are predicted along the order as well as asked ones, if wanted."""
        method = copy(super().learning_from(loss))
        assert isinstance(method, SigmaGptTemporal)
        method.learns_given = loss == "all"
        return method

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """No copies; a prediction for each token that is learnt from."""
        return np.zeros_like(given), asked + given * self.learns_given

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """BOS and the text in its order but for the last token; each slot is told the next position.

        What is unknown comes last, where no prediction sees it.
        """
        length = tokens.shape[1]
        rank = RANK[roles] + (np.stack([rng.random(length) for rng in rngs]) if self.shuffles else 0.0)
        order = rank.argsort(axis=1, kind="stable")  # (B, T) places, from 0
        ordered = np.take_along_axis(tokens, order, axis=1)
        kinds = np.take_along_axis(roles, order, axis=1)
        if self.learns_given:
            kinds = np.where(kinds == UNKNOWN, UNKNOWN, ASKED)
        kinds = np.where(kinds == UNKNOWN, GIVEN, kinds)  # read as it is, by nothing that predicts
        return lay_out(Sequences.rows(ordered, kinds, order + 1), bos=bos, mask=mask, copies=False)


@register
class SigmaGptRandom(SigmaGptTemporal):
    """Any conditional, exactly for an order of the asked tokens; of a model that was trained on random orders.

    Args:
        order: "left-to-right", or "random": shuffled within the given and within the asked tokens, as in training.
        orders: Over how many orders, all random if more than one, the probability of the asked tokens is averaged.
        seed: Of the random orders.
    """

    name: ClassVar[str] = "sigma-gpt-random"
    title: ClassVar[str] = "σ-GPT-random"
    sort_order: ClassVar[int] = 40
    colour: ClassVar[str] = "#d1495b"
    abilities: ClassVar[Abilities] = Abilities(True, True, False, True, False)
    shuffles: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {
        "order": "left-to-right or random",
        "orders": "a number of random orders to average over",
        "seed": "of random orders",
    }

    def __init__(self, order: str = "left-to-right", orders: int = 1, seed: int = 0) -> None:
        if order not in ("left-to-right", "random"):
            raise InputError(f"order is left-to-right or random, not {order!r}.")
        if orders < 1 or seed < 0:
            raise InputError(f"orders is at least 1 and seed at least 0, not {orders} and {seed}.")
        self.random, self.orders, self.seed = order == "random" or orders > 1, orders, seed

    def configured(self, options: Mapping[str, str]) -> Method:
        """With other orders."""
        super().configured({name: value for name, value in options.items() if name not in self.options})
        numbers = {name: whole_number(name, options[name]) for name in ("orders", "seed") if name in options}
        return SigmaGptRandom(options.get("order", "left-to-right"), **numbers)

    @property
    def chain(self) -> bool:
        """Only if it is asked from left to right."""
        return not self.random

    def order(self, query: Query, number: int) -> np.ndarray:
        """As in `SigmaGptTemporal`, or shuffled within the two parts."""
        if not self.random:
            return super().order(query, number)
        rng = randomness(query, number, self.seed, "order")
        return np.concatenate([rng.permutation(part.copy()) for part in (query.given_at, query.asked_at)])

    def draw_order(self, query: Query, sample: int, seed: int) -> int:
        """Any of them, each as likely: a sample of the mean of distributions is one of a distribution at random."""
        if self.orders == 1:
            return 0
        return int(randomness(query, sample, seed, "which order").integers(self.orders))

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """As `Method.score` says, a pass an order.

        Of several orders only the sum over a query means something, the log of the mean probability. Each token has
        the mean of its log-probabilities, and an equal share of what that sum has more than theirs.
        """
        answers = [self.score_in_order(engine, queries, number) for number in range(self.orders)]
        return [log_mean_exp(np.array(of_query)).tolist() for of_query in zip(*answers, strict=True)]


def log_mean_exp(scores: np.ndarray) -> np.ndarray:
    """(A,) numbers whose sum is the log of the mean of exp of the sums of the rows of `scores`, (K, A)."""
    sums = scores.sum(axis=1)
    best = sums.max()
    total = best + math.log(np.exp(sums - best).mean()) if np.isfinite(best) else best
    mean: np.ndarray = scores.mean(axis=0) if len(scores) > 1 else scores[0]
    if len(scores) > 1 and np.isfinite(mean).all():
        mean += (total - mean.sum()) / len(mean)
    return mean


def whole_number(name: str, text: str) -> int:
    """The value of an option."""
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name} is a whole number, not {text!r}.") from error


def check_network(model: PreTrainedModel) -> None:
    """Refuse a network that would not hear what it is to predict."""
    if not isinstance(model, SigmaGPTForCausalLM):
        raise ModelError(
            f"σ-GPT needs a network that is told which position to predict, and {type(model).__name__} is not: ask it "
            "by its own method."
        )


def in_order(query: Query, order: np.ndarray) -> Query:
    """The query with its tokens in this order of their positions; those that are not in it are left out."""
    if len(order) == len(query) and (np.diff(order) > 0).all():
        return query  # as it stands
    first, *others = (order - 1).tolist()
    chosen = itemgetter(first, *others, first)  # of one place alone it would take no tuple
    return Query.trusted(chosen(query.tokens)[:-1], chosen(query.given)[:-1], chosen(query.asked)[:-1])


def from_left_to_right(query: Query, order: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of the asked tokens, in the order of their positions; they came in `order`."""
    asked = np.zeros(len(query) + 1, dtype=bool)
    asked[query.asked_at] = True
    sorted_values: np.ndarray = values[order[asked[order]].argsort()]
    return sorted_values
