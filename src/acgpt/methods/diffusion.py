"""Diffusion: a masked diffusion language model (MDLM, Sahoo et al., 2024), with given tokens that are never masked.

Noise masks each asked token independently; at time t it is masked with probability t (the log-linear schedule,
α = 1 - t). The network predicts the masked tokens from the rest, in both directions. It never predicts MASK, and what
is not masked stays as it is (the SUBS parameterisation); it is not told the time, which the share of MASK tells.

With n asked tokens the evidence lower bound is, for a text x and with S the masked ones,

    log p(x_e | x_c)  ≥  ∫₀¹ 1/t · E[ Σ_{i ∈ S} log p(x_i | x without S) ] dt
                      =  Σ_k 1/k · E[ Σ_{i ∈ S} log p(x_i | x without S) : S of size k, uniform ]

as the number of masked tokens at a uniform time is uniform from 0 to n, and 1/t is (n + 1)/k on average where k are
masked. So a text is trained on, and the bound estimated, with k uniform from 1 to n, S any k of the asked tokens, and
weight n/k: the same loss without the noise of the time and of texts that have nothing to learn.

The bound is also the mean of log-likelihoods over all orders in which tokens can be unmasked one by one, which is why
it is one: the model, so unmasked, has the mean of the *likelihoods*. It does not come apart from left to right, so it
cannot say what a token has from its past alone. But it can draw from the past alone, a run of asked tokens at a time:

    query     [a]  [b]   C   [d]  [e]   F          given: C, F       asked: [a], [b] and [d], [e]

    reads      –    –    –    –    –    –          while a and b are drawn, in any order
               a    b    C    –    –    –          while d and e are; F is never read
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from acgpt.engine.decode import Answer, Sampling, randomness, wanted
from acgpt.engine.engine import Engine
from acgpt.engine.layout import Layout
from acgpt.errors import InputError
from acgpt.methods import masked
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.methods.sigma_gpt import whole_number
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.query import Query


@register
class Diffusion(Method):
    """A bound on any conditional, estimated by chance; samples of any.

    Args:
        draws: How many sets of masked tokens the bound of a query is estimated from. Their sizes are spread evenly.
        steps: Of the time from all masked to none, in sampling. Tokens of one step are drawn independently.
        seed: Of the masked tokens of `draws`.
    """

    name: ClassVar[str] = "diffusion"
    title: ClassVar[str] = "Diffusion"
    sort_order: ClassVar[int] = 60
    colour: ClassVar[str] = "#7b5ea7"
    says: ClassVar[str] = "a masked diffusion language model that bounds p(any tokens | any other tokens)"
    abilities: ClassVar[Abilities] = Abilities(
        False, True, False, True, False,
        note="a pass gives one estimate of a bound, not the probability; and causal models have since been tuned to "
        "masked diffusion (DiffuLLaMA, Dream), with attention in both directions, which acgpt does not do",
    )  # fmt: skip
    reads_future: ClassVar[bool] = True
    bound: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {
        "draws": "passes that the bound of a text is estimated from",
        "steps": "steps of sampling",
        "seed": "of the draws",
    }

    def __init__(self, draws: int = 32, steps: int = 1000, seed: int = 0) -> None:
        for name, value, least in (("draws", draws, 1), ("steps", steps, 1), ("seed", seed, 0)):
            if value < least:
                raise InputError(f"{name} is at least {least}, not {value}.")
        self.draws, self.steps, self.seed = draws, steps, seed

    def configured(self, options: Mapping[str, str]) -> Method:
        """With another number of draws or steps."""
        super().configured({name: value for name, value in options.items() if name not in self.options})
        return Diffusion(**{name: whole_number(name, value) for name, value in options.items()})

    @property
    def chain(self) -> bool:
        """The bound does not come apart."""
        return False

    def answers(self, query: Query) -> bool:
        """Every query, by a bound."""
        return True

    def can_sample(self, query: Query, future: bool) -> bool:
        """Every query, from the past alone too."""
        return True

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Numbers whose sum over a query estimates its bound, without bias: what each token adds to it."""
        bos, mask = engine.bos, self.mask(engine.mask)
        assert mask is not None
        answers = [np.zeros(len(query.asked_positions)) for query in queries]
        parts = [masked.parts(query, bos=bos, mask=mask) for query in queries]
        sets = [self.masked_sets(query) for query in queries]
        passes = [(number, each) for number in range(len(queries)) for each in range(self.draws)]
        for group in masked.groups([len(queries[number]) for number, _ in passes], engine.budget):
            members = [passes[each] for each in group]
            texts, places, targets = [], [], []
            for number, each in members:
                (start, asked, tokens), hidden = parts[number], sets[number][each]
                text = start.copy()
                text[asked[~hidden]] = tokens[~hidden]
                texts.append(text)
                places.append(asked[hidden])
                targets.append(tokens[hidden])
            layout = masked.both_ways(texts, places, targets, bos=bos, text_slots=engine.backend == "fused")
            for (number, each), scores in zip(members, engine.score(layout, mask), strict=True):
                answers[number][sets[number][each]] += scores * len(answers[number]) / len(scores) / self.draws
        return [answer.tolist() for answer in answers]

    def masked_sets(self, query: Query) -> np.ndarray:
        """(draws, n) which of the n asked tokens are masked in each draw; a function of the seed and the text.

        Of the tokens that are asked, too: texts of which nothing is given would all have the same masks otherwise, and
        the mean of many such estimates the noise of one.
        """
        rng, n = randomness(query, 0, self.seed, f"masks of {query.tokens}"), len(query.asked_positions)
        times = (np.arange(self.draws) + rng.random()) / self.draws  # spread evenly: less noise than each by itself
        sizes = 1 + (times * n).astype(np.int64)
        ranks = rng.random((self.draws, n)).argsort(axis=1).argsort(axis=1)
        hidden: np.ndarray = ranks < np.minimum(sizes, n)[:, None]
        return hidden

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """As `Method.stream` says, by ancestral sampling: as time goes from 1 to 0, masked tokens are drawn.

        Without the future, given tokens are shown when they are reached: the runs of asked tokens between them are
        drawn one after the other, each from time 1 to 0.

        A token is unmasked in any of the steps with the same probability, whatever the others do, so which tokens are
        drawn in which step is known beforehand; a step in which none is drawn changes nothing, and takes no pass.
        The log-probabilities are those with which the tokens were drawn.
        """
        mask = self.mask(engine.mask)
        assert mask is not None
        rows = wanted(queries, n)
        for group in masked.groups([len(queries[number]) for number, _ in rows], engine.budget):
            members = [rows[each] for each in group]
            questions = [queries[number] for number, _ in members]
            texts = [masked.shown(query, bos=engine.bos, mask=mask, given=future) for query in questions]
            known = [masked.shown(query, bos=engine.bos, mask=mask) for query in questions]
            chances, turns, reached = [], [], []
            for query, (_, sample) in zip(questions, members, strict=True):
                rng = randomness(query if future else prompted(query), sampling.first + sample, sampling.seed)
                drawn_when, shown_when = self.schedule(query, rng.random(len(query.asked_positions)), future)
                chances.append(rng.random(len(query) + 1))
                turns.append(drawn_when)
                reached.append(shown_when)
            drawn = masked.fill(engine, texts, turns, chances, mask, sampling, known=known, reached=reached)
            yield masked.answers(members, questions, drawn)

    def schedule(self, query: Query, uniform: np.ndarray, future: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The positions that are drawn in each turn, and those of the given tokens that are shown from it on.

        Asked tokens with none to be shown between them are a run. The steps are shared out among runs by their
        numbers of tokens, at least one for each: all of them together take about as many as one would.

        Args:
            query: What is given and asked.
            uniform: For each asked token, when in the time of its run it is drawn, in [0, 1).
            future: Are all given tokens shown from the start?
        """
        asked = np.array(query.asked_positions)
        later = np.array(() if future else query.given_positions, dtype=np.int64)
        before = np.searchsorted(later, asked)  # how many of these must be shown
        _, run, sizes = np.unique(before, return_inverse=True, return_counts=True)
        steps = np.maximum(1, np.rint(self.steps * sizes / len(asked)).astype(np.int64))
        step = (steps.cumsum() - steps)[run] + (uniform * steps[run]).astype(np.int64)
        _, first = np.unique(step, return_index=True)
        return [asked[step == each] for each in step[first]], np.split(later, before[first])[:-1]

    def rows_at_once(self, engine: Engine, length: int) -> int:
        """As many as go through the model in one pass."""
        return max(1, engine.budget // (length + 2))

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """k of a text's n asked tokens are masked and predicted, with weight n/k; k is uniform from 1 to n."""
        assert mask is not None
        asked = roles == ASKED
        counts = asked.sum(axis=1)
        sizes = np.array([rng.integers(1, n, endpoint=True) for rng, n in zip(rngs, counts, strict=True)])
        chances = np.where(asked, np.stack([rng.random(tokens.shape[1]) for rng in rngs]), 2.0)
        predicted = chances.argsort(axis=1).argsort(axis=1) < sizes[:, None]
        hidden = predicted | ~(asked | (roles == GIVEN))
        weights = np.broadcast_to((counts / sizes)[:, None], tokens.shape)
        return masked.lay_out(tokens, hidden, predicted, bos=bos, mask=mask, weights=weights)

    def longest(self, length: int) -> int:
        """BOS and the text."""
        return length + 1

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The whole text in both directions; at most a prediction for each asked token."""
        return np.full_like(given, length + 1), asked


def prompted(query: Query) -> Query:
    """The query with nothing given but what stands before all that is asked: the same whatever comes later."""
    first = query.asked.index(True)
    return Query(query.tokens, [given and place < first for place, given in enumerate(query.given)], query.asked)
