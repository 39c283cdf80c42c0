"""What the methods of `LanguageModel` return: scores, samples, fills and rankings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from acgpt.query.query import Query


@dataclass(frozen=True)
class TokenScore:
    """One asked token and its log-probability.

    Attributes:
        text: The token as text.
        id: Token id.
        position: Position in the text, from 1; position 0 is BOS.
        log_prob: Natural logarithm of its probability, given the given tokens and the asked tokens before it.
    """

    text: str
    id: int
    position: int
    log_prob: float


@dataclass(frozen=True)
class Score:
    """The answer of `LanguageModel.log_prob`: log p(asked | given), token by token.

    Attributes:
        tokens: The asked tokens, from left to right.
        future: Whether every prediction saw all given tokens. If false, it saw only those before it.
        adapter: Name of the adapter that answered; `None` is the model without an adapter.
        bound: Whether the log-probability is a lower bound, estimated by sampling, instead of exact.
    """

    tokens: tuple[TokenScore, ...]
    future: bool
    adapter: str | None = field(default=None, kw_only=True)
    bound: bool = field(default=False, kw_only=True)

    @property
    def log_prob(self) -> float:
        """Log-probability of all asked tokens together, in nats: the sum over `tokens`."""
        return math.fsum(token.log_prob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """Perplexity per asked token: exp of the mean negative log-probability; 1 if there is none."""
        if not self.tokens:
            return 1.0
        try:
            return math.exp(-self.log_prob / len(self.tokens))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Sample(Score):
    """One sample of `LanguageModel.sample`: the completed text and its score.

    Log-probabilities are the model's own, at temperature 1 and without truncation, whatever the sampling options were.
    They are those of the distribution that the tokens were drawn from, rounding included.

    Attributes:
        text: The completed text.
        fills: The text sampled for each slot.
        seed: The seed that reproduces the sample.
        query: The completed query. Scoring it with `LanguageModel.log_prob` gives the log-probability of the sample, up
            to rounding (docs/explanation/footguns.md).
    """

    text: str
    fills: tuple[str, ...]
    seed: int
    query: Query


@dataclass(frozen=True)
class Fill(Sample):
    """One fill of `LanguageModel.fill`: a sample, and how good it is.

    `tokens` and `log_prob` are those that were drawn. They include given text next to a gap that was generated again,
    and what a stop string has cut off.

    Attributes:
        lengths: Number of tokens generated for each gap. Gaps without a kept token between them share their tokens.
        length_log_prob: Log-probability of these lengths; `None` if the model does not predict lengths. With `log_prob`
            it is that of lengths and tokens together, log p(fill, lengths | context).
        score: What fills are ordered by: the causal log-probability of the fill and of all that follows it, plus 0.5
            nats per generated token. For a model that predicts lengths: the mean of that log-probability and of
            `length_log_prob + log_prob`; of a sample, the latter alone.
    """

    lengths: tuple[int, ...] = ()
    length_log_prob: float | None = None
    score: float = -math.inf


@dataclass(frozen=True)
class Lengths:
    """The answer of `LanguageModel.lengths`: how long a gap is.

    Attributes:
        log_probs: Log-probability of each length that the gap may have, in tokens.
    """

    log_probs: Mapping[int, float]

    def log_prob(self, length: int) -> float:
        """Return the log-probability of a length in nats; minus infinity if the gap cannot have it."""
        return self.log_probs.get(length, -math.inf)

    def most_probable(self, n: int = 1) -> list[int]:
        """Return the n most probable lengths, the most probable first."""
        return sorted(self.log_probs, key=lambda length: -self.log_probs[length])[:n]


@dataclass(frozen=True)
class Piece:
    """A part of a fill, yielded by `LanguageModel.stream`.

    Attributes:
        text: New text of a gap.
        slot: Number of the slot, from 0.
        fill: The finished fill; `None` except in the last piece.
    """

    text: str
    slot: int
    fill: Fill | None = None


@dataclass(frozen=True)
class Ranked:
    """One alternative of a `Ranking`.

    Attributes:
        text: The whole text.
        choice: The alternative chosen in each slot.
        probability: Probability relative to the other alternatives; all of them sum to 1.
        log_prob: Log-probability in nats of what was compared, see `Ranking.compared`.
    """

    text: str
    choice: tuple[str, ...]
    probability: float
    log_prob: float


@dataclass(frozen=True)
class Ranking(Sequence[Ranked]):
    """The answer of `LanguageModel.rank`: a sequence of alternatives, the most probable first.

    Attributes:
        alternatives: The alternatives in order.
        compared: The event whose probability was compared: "asked | given" or "whole text".
        future: Whether every prediction saw all given tokens, see `Score`.
        adapter: Name of the adapter that answered; `None` is the model without an adapter.
    """

    alternatives: tuple[Ranked, ...]
    compared: str
    future: bool
    adapter: str | None = None

    def __len__(self) -> int:
        return len(self.alternatives)

    def __getitem__(self, index: Any) -> Any:
        return self.alternatives[index]


def token_scores(query: Query, texts: Sequence[str], log_probs: Sequence[float]) -> tuple[TokenScore, ...]:
    """Return the asked tokens of a complete query with their texts and log-probabilities.

    Args:
        query: The query; every asked token has an id.
        texts: The text of each token of the query.
        log_probs: The log-probability of each asked token.
    """
    tokens = [token for token, asked in zip(query.tokens, query.asked, strict=True) if asked and token is not None]
    scored = zip(query.asked_positions, tokens, log_probs, strict=True)
    return tuple(TokenScore(texts[position - 1], token, position, log_prob) for position, token, log_prob in scored)
