"""Diffusion: a masked diffusion language model (MDLM, Sahoo et al., 2024), with given tokens that are never masked.

Noise masks each asked token independently; at time t it is masked with probability t (the log-linear schedule,
α = 1 - t). The network predicts the masked tokens from the rest, in both directions. It never predicts MASK, and tokens
that are not masked stay as they are (the SUBS parameterisation). The time is not an input: the share of MASK shows it.

For a text x with n asked tokens, and S the set of masked ones, the evidence lower bound is

    log p(x_e | x_c)  ≥  ∫₀¹ 1/t · E[ Σ_{i ∈ S} log p(x_i | x without S) ] dt
                      =  Σ_k 1/k · E[ Σ_{i ∈ S} log p(x_i | x without S) : S of size k, uniform ]

because the number of masked tokens at a uniform time is uniform from 0 to n, and the mean of 1/t is (n + 1)/k if k are
masked. So training, and the estimate of the bound, draw k uniformly from 1 to n, mask k random asked tokens, and weight
them by n/k. This is the same loss, without the noise of the time and of texts with nothing masked.

The bound is also the mean of the log-likelihoods over all orders in which tokens can be unmasked one by one. It is a
bound because the model, unmasked in a random order, has the mean of the *likelihoods*. It does not factorise from left
to right, so there is no log-probability of a token given its past alone. But samples can be drawn from the past alone,
one run of asked tokens at a time:

    query     [a]  [b]   C   [d]  [e]   F          given: C, F       asked: [a], [b] and [d], [e]

    reads      –    –    –    –    –    –          while a and b are drawn, in any order
               a    b    C    –    –    –          while d and e are drawn; F is never read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from acgpt.errors import InputError
from acgpt.methods.base import Abilities, Method
from acgpt.methods.mlm import BothWays
from acgpt.methods.registry import register
from acgpt.methods.sigma_gpt import whole_number
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.query import Query

if TYPE_CHECKING:
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.methods.masked import Plan


@register
class Diffusion(BothWays):
    """A Monte Carlo estimate of a bound on any conditional; samples of any conditional.

    Args:
        draws: Number of random sets of masked tokens that the bound of a query is estimated from. Their sizes are
            spread evenly.
        steps: Number of time steps of sampling, from all masked to none. Tokens of one step are drawn independently.
        seed: Seed of the sets of masked tokens.
    """

    name: ClassVar[str] = "diffusion"
    title: ClassVar[str] = "Diffusion"
    sort_order: ClassVar[int] = 60
    colour: ClassVar[str] = "#7b5ea7"
    description: ClassVar[str] = "a masked diffusion language model that bounds p(any tokens | any other tokens)"
    abilities: ClassVar[Abilities] = Abilities(
        False, True, False, True, False,
        note="a pass gives one estimate of a bound, not the probability; and causal models have since been tuned to "
        "masked diffusion (DiffuLLaMA, Dream), with attention in both directions, which acgpt does not do",
    )  # fmt: skip
    bound: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {
        "draws": "number of passes to estimate the bound of a text from",
        "steps": "number of sampling steps",
        "seed": "seed of the draws",
    }

    def __init__(self, draws: int = 32, steps: int = 1000, seed: int = 0) -> None:
        for name, value, least in (("draws", draws, 1), ("steps", steps, 1), ("seed", seed, 0)):
            if value < least:
                raise InputError(f"{name} must be at least {least}, not {value}.")
        self.draws, self.steps, self.seed = draws, steps, seed

    def configured(self, options: Mapping[str, str]) -> Method:
        """Return the method with another number of draws or steps, or another seed."""
        super().configured({name: value for name, value in options.items() if name not in self.options})
        return Diffusion(**{name: whole_number(name, value) for name, value in options.items()})

    @property
    def chain(self) -> bool:
        """Whether log-probabilities factorise from left to right: the bound does not."""
        return False

    def can_sample(self, query: Query, future: bool) -> bool:
        """Return true: it samples every query, also from the past alone."""
        return True

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Return the contribution of each asked token to the bound; the sum over a query is an unbiased estimate."""
        from acgpt.methods import masked

        bos, mask = engine.bos, self.mask(engine.mask)
        assert mask is not None
        answers = [np.zeros(len(query.asked_positions)) for query in queries]
        parts = [masked.parts(query, bos=bos, mask=mask) for query in queries]
        sets = [self.masked_sets(query) for query in queries]
        passes = [(number, index) for number in range(len(queries)) for index in range(self.draws)]
        for group in masked.groups([len(queries[number]) for number, _ in passes], engine.budget):
            members = [passes[i] for i in group]
            texts, positions, targets = [], [], []
            for number, index in members:
                (start, asked, tokens), hidden = parts[number], sets[number][index]
                text = start.copy()
                text[asked[~hidden]] = tokens[~hidden]
                texts.append(text)
                positions.append(asked[hidden])
                targets.append(tokens[hidden])
            layout = masked.both_ways(texts, positions, targets, bos=bos, text_slots=engine.backend == "fused")
            for (number, index), scores in zip(members, engine.score(layout, mask), strict=True):
                answers[number][sets[number][index]] += scores * len(answers[number]) / len(scores) / self.draws
        return [answer.tolist() for answer in answers]

    def masked_sets(self, query: Query) -> np.ndarray:
        """Return (draws, n) which of the n asked tokens are masked in each draw: a function of the seed and the text.

        It depends on the asked tokens too. Otherwise all texts with nothing given would have the same masks, and the
        mean of many such estimates would be as noisy as one.
        """
        from acgpt.engine.decode import randomness

        rng, n = randomness(query, 0, self.seed, f"masks of {query.tokens}"), len(query.asked_positions)
        times = (np.arange(self.draws) + rng.random()) / self.draws  # spread evenly: less noise than independent times
        sizes = 1 + (times * n).astype(np.int64)
        ranks = rng.random((self.draws, n)).argsort(axis=1).argsort(axis=1)
        hidden: np.ndarray = ranks < np.minimum(sizes, n)[:, None]
        return hidden

    def plan(self, query: Query, sample: int, seed: int, future: bool) -> Plan:
        """Draw by ancestral sampling: masked tokens are drawn as time goes from 1 to 0.

        Without the future, the runs of asked tokens between given ones are drawn one after the other, each from time 1
        to 0.

        Every token is unmasked in each of the steps with the same probability, independently of the others. So the step
        of each token can be drawn beforehand, and a step without tokens takes no pass. The log-probabilities are those
        with which the tokens were drawn.
        """
        from acgpt.engine.decode import randomness

        rng = randomness(query if future else prompted(query), sample, seed)
        turns, reached = self.schedule(query, rng.random(len(query.asked_positions)), future)
        return turns, reached, rng.random(len(query) + 1)

    def schedule(self, query: Query, uniform: np.ndarray, future: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the positions to draw in each turn, and the positions of given tokens to show from that turn on.

        A run is a sequence of asked tokens with no given token to be shown between them. The steps are divided among
        the runs in proportion to their numbers of tokens, with at least one each, so that all runs together take about
        as many steps as one would.

        Args:
            query: The query.
            uniform: For each asked token, the time within its run at which it is drawn, in [0, 1).
            future: Whether all given tokens are shown from the start.
        """
        asked = np.array(query.asked_positions)
        later = np.array(() if future else query.given_positions, dtype=np.int64)
        before = np.searchsorted(later, asked)  # number of given tokens to show before each asked one
        _, run, sizes = np.unique(before, return_inverse=True, return_counts=True)
        steps = np.maximum(1, np.rint(self.steps * sizes / len(asked)).astype(np.int64))
        step = (steps.cumsum() - steps)[run] + (uniform * steps[run]).astype(np.int64)
        _, first = np.unique(step, return_index=True)
        return [asked[step == turn] for turn in step[first]], np.split(later, before[first])[:-1]

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """Mask and predict k of the n asked tokens of each text, with weight n/k; k is uniform from 1 to n."""
        from acgpt.methods import masked

        assert mask is not None
        asked = roles == ASKED
        counts = asked.sum(axis=1)
        sizes = np.array([rng.integers(1, n, endpoint=True) for rng, n in zip(rngs, counts, strict=True)])
        keys = np.where(asked, np.stack([rng.random(tokens.shape[1]) for rng in rngs]), 2.0)  # asked tokens come first
        predicted = keys.argsort(axis=1).argsort(axis=1) < sizes[:, None]
        hidden = predicted | ~(asked | (roles == GIVEN))
        weights = np.broadcast_to((counts / sizes)[:, None], tokens.shape)
        return masked.lay_out(tokens, hidden, predicted, bos=bos, mask=mask, weights=weights)


def prompted(query: Query) -> Query:
    """Return the query with only the given tokens before the first asked one; later ones have no influence on it."""
    first = query.asked.index(True)
    return Query(query.tokens, [given and index < first for index, given in enumerate(query.given)], query.asked)
