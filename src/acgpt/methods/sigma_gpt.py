"""σ-GPT (Pannatier et al., 2024): a causal model of texts in any order, given tokens first.

    query      The   [cat]   sat   [on]            given: The, sat     asked: [cat], [on]

    slot       BOS    The    sat    cat            one causal mask over the reordered text
    position    0      1      3      2             of the token that is read: keys are rotated to it
    predicts    1      3      2      4             position that is predicted: queries are rotated to it
    token       –      –     cat    on             (see `sigma_network`)

Given tokens come first, then asked ones: in the *temporal* variant of the paper both from left to right, in the
*random* variant each in a random order, new for every text and epoch. Either way a query is scored exactly and in one
pass, by the chain rule along the order. Unknown tokens are left out, without a placeholder.

A model trained on random orders can be queried in any order. The default is from left to right. The paper
does not say which order it uses: its numbers suggest random on the training distribution and left to right elsewhere.
`order=random` takes a random one, a function of `seed` and the query. `orders=K` averages the
*probability* of the asked tokens over K random orders, which is a better model of them than any single order. A sample
is then drawn in one of the K orders, chosen uniformly, which is a draw from that mean; its log-probabilities are those
in its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from acgpt.errors import InputError, ModelError
from acgpt.methods.base import Abilities, Method, imported
from acgpt.methods.registry import register
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN
from acgpt.query.query import Query

if TYPE_CHECKING:
    from transformers import GPTNeoXForCausalLM, PreTrainedModel

    from acgpt.engine.decode import Answer
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.query.sampling import Sampling

RANK = np.array([1, 0, 2])  # by role: given tokens come first, then asked ones, then unknown ones, which are not read


@register
class SigmaGptTemporal(Method):
    """Any conditional, exactly and in one pass: given tokens from left to right, then asked ones from left to right."""

    name: ClassVar[str] = "sigma-gpt-temporal"
    title: ClassVar[str] = "σ-GPT-temporal"
    sort_order: ClassVar[int] = 30
    colour: ClassVar[str] = "#3a6ea5"
    description: ClassVar[str] = "a language model of texts in any order that answers p(any tokens | any other tokens)"
    abilities: ClassVar[Abilities] = Abilities(
        True, True, True, True, False,
        note="the paper's row is for random orders, of which this variant uses only the one from left to right",
    )  # fmt: skip
    reads_future: ClassVar[bool] = True
    network: ClassVar[type[GPTNeoXForCausalLM]] = imported("acgpt.methods.sigma_network", "SigmaGPTForCausalLM")
    training_options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "loss": ("asked", "all"),
        "target_positions": ("rotary", "table"),
    }
    shuffles: ClassVar[bool] = False  # whether training texts are read in random orders
    learns_given: bool = False  # whether given tokens are predicted too

    def answers(self, query: Query) -> bool:
        """Return true: it answers every query."""
        return True

    def order(self, query: Query, number: int) -> np.ndarray:
        """Return the positions of the given tokens, then of the asked ones, in the order of reading.

        Args:
            query: The query.
            number: Index of the order, for a method with several.
        """
        return np.concatenate([query.given_at, query.asked_at])

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Score queries in one pass."""
        return self.score_in_order(engine, queries, 0)

    def score_in_order(self, engine: Engine, queries: Sequence[Query], number: int) -> list[list[float]]:
        """Score queries in the order with this index; the results are from left to right."""
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
        """Sample with a cache; without the future, given tokens are forced when they are reached."""
        check_network(engine.model)
        groups: dict[tuple[int, int], list[int]] = {}  # indices of samples, by query and order
        for number, query in enumerate(queries):
            for sample in range(n):
                order = self.draw_order(query, sampling.first + sample, sampling.seed) if future else 0
                groups.setdefault((number, order), []).append(sample)
        questions = [queries[number] for number, _ in groups]

        def restored(group: int, values: np.ndarray) -> np.ndarray:
            return from_left_to_right(questions[group], orders[group], values)

        if future:
            orders = [self.order(queries[number], order) for number, order in groups]
        else:
            orders = [self.left_to_right(query).asked_at for query in questions]
        ordered = [in_order(query, order) for query, order in zip(questions, orders, strict=True)]
        numbers = [number for number, _ in groups]
        for answers in engine.stream(ordered, list(groups.values()), sampling, future=False, orders=orders):
            yield [
                (numbers[group], sample, (restored(group, tokens), restored(group, scores)))
                for group, sample, (tokens, scores) in answers
            ]

    def draw_order(self, query: Query, sample: int, seed: int) -> int:
        """Return the index of the order in which a sample is drawn."""
        return 0

    def with_loss(self, loss: str) -> Method:
        """Return the method with a loss over asked tokens, or over "all": given tokens are predicted as well."""
        method = copy(super().with_loss(loss))
        assert isinstance(method, SigmaGptTemporal)
        method.learns_given = loss == "all"
        return method

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return no copies, and one prediction per token in the loss."""
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
        """Lay out BOS and the reordered text without its last token; each slot has the next position as its target.

        Unknown tokens come last, where no prediction sees them.
        """
        length = tokens.shape[1]
        rank = RANK[roles] + (np.stack([rng.random(length) for rng in rngs]) if self.shuffles else 0.0)
        order = rank.argsort(axis=1, kind="stable")  # (B, T) indices, from 0
        ordered = np.take_along_axis(tokens, order, axis=1)
        kinds = np.take_along_axis(roles, order, axis=1)
        if self.learns_given:
            kinds = np.where(kinds == UNKNOWN, UNKNOWN, ASKED)
        kinds = np.where(kinds == UNKNOWN, GIVEN, kinds)  # unmasked, because no prediction attends to it
        from acgpt.engine.layout import Sequences, lay_out

        return lay_out(Sequences.rows(ordered, kinds, order + 1), bos=bos, mask=mask, copies=False)


@register
class SigmaGptRandom(SigmaGptTemporal):
    """Any conditional, exactly for an order of the asked tokens, for a model that was trained on random orders.

    Args:
        order: "left-to-right", or "random": shuffled within the given and within the asked tokens, as in training.
        orders: Number of orders over which the probability of the asked tokens is averaged; random if more than one.
        seed: Seed of the random orders.
    """

    name: ClassVar[str] = "sigma-gpt-random"
    title: ClassVar[str] = "σ-GPT-random"
    sort_order: ClassVar[int] = 40
    colour: ClassVar[str] = "#d1495b"
    abilities: ClassVar[Abilities] = Abilities(True, True, False, True, False)
    shuffles: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {
        "order": "left-to-right or random",
        "orders": "number of random orders to average over",
        "seed": "seed of random orders",
    }

    def __init__(self, order: str = "left-to-right", orders: int = 1, seed: int = 0) -> None:
        if order not in ("left-to-right", "random"):
            raise InputError(f"order must be left-to-right or random, not {order!r}.")
        if orders < 1 or seed < 0:
            raise InputError(f"orders must be at least 1 and seed at least 0, not {orders} and {seed}.")
        self.random, self.orders, self.seed = order == "random" or orders > 1, orders, seed

    def configured(self, options: Mapping[str, str]) -> Method:
        """Return the method with other orders."""
        super().configured({name: value for name, value in options.items() if name not in self.options})
        numbers = {name: whole_number(name, options[name]) for name in ("orders", "seed") if name in options}
        return SigmaGptRandom(options.get("order", "left-to-right"), **numbers)

    @property
    def chain(self) -> bool:
        """Whether log-probabilities factorise from left to right: only in that order."""
        return not self.random

    def order(self, query: Query, number: int) -> np.ndarray:
        """Return the order of `SigmaGptTemporal`, or one shuffled within the given and within the asked tokens."""
        if not self.random:
            return super().order(query, number)
        from acgpt.engine.decode import randomness

        rng = randomness(query, number, self.seed, "order")
        return np.concatenate([rng.permutation(part.copy()) for part in (query.given_at, query.asked_at)])

    def draw_order(self, query: Query, sample: int, seed: int) -> int:
        """Return a uniformly random index: a sample from a mean of distributions is a sample from a random one."""
        if self.orders == 1:
            return 0
        from acgpt.engine.decode import randomness

        return int(randomness(query, sample, seed, "which order").integers(self.orders))

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Score queries, with one pass per order.

        With several orders only the sum over a query is meaningful: the log of the mean probability. Each token gets
        the mean of its log-probabilities, plus an equal share of the difference between that sum and theirs.
        """
        answers = [self.score_in_order(engine, queries, number) for number in range(self.orders)]
        return [log_mean_exp(np.array(scores)).tolist() for scores in zip(*answers, strict=True)]


def log_mean_exp(scores: np.ndarray) -> np.ndarray:
    """Return (A,) numbers whose sum is log mean exp of the K row sums of `scores`, (K, A)."""
    sums = scores.sum(axis=1)
    best = sums.max()
    total = best + math.log(np.exp(sums - best).mean()) if np.isfinite(best) else best
    mean: np.ndarray = scores.mean(axis=0) if len(scores) > 1 else scores[0]
    if len(scores) > 1 and np.isfinite(mean).all():
        mean += (total - mean.sum()) / len(mean)
    return mean


def whole_number(name: str, text: str) -> int:
    """Return the value of an option as an integer."""
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name} must be a whole number, not {text!r}.") from error


def check_network(model: PreTrainedModel) -> None:
    """Refuse a network that does not take target positions."""
    from acgpt.methods.sigma_network import SigmaGPTForCausalLM

    if not isinstance(model, SigmaGPTForCausalLM):
        raise ModelError(
            f"σ-GPT needs a network that takes target positions, and {type(model).__name__} is not one. Use the "
            "model's own method."
        )


def in_order(query: Query, order: np.ndarray) -> Query:
    """Return the query with its tokens at these positions, in this order; other tokens are left out."""
    if len(order) == len(query) and (np.diff(order) > 0).all():
        return query
    first, *others = (order - 1).tolist()
    select = itemgetter(first, *others, first)  # twice: with a single index, itemgetter would not return a tuple
    return Query.trusted(select(query.tokens)[:-1], select(query.given)[:-1], select(query.asked)[:-1])


def from_left_to_right(query: Query, order: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return values of the asked tokens, which are in `order`, sorted by position."""
    asked = np.zeros(len(query) + 1, dtype=bool)
    asked[query.asked_at] = True
    sorted_values: np.ndarray = values[order[asked[order]].argsort()]
    return sorted_values
