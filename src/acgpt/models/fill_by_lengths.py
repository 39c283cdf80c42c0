"""Filling gaps whose lengths the model predicts: p(length | context) · p(fill | length, context).

p(length | context) is one more pass (see `query.lengths`). The product is normalised over fills of all lengths, so that
a random fill is a draw of lengths, and then one of tokens.

**The best fills.** The likeliest lengths that together have the probability `MASS`, `TRIED` at most, are tried from the
shortest on (`Filler.search`), except those far less likely than the likeliest one (`LEAST`). `max_tokens` takes longer
lengths away and leaves the probabilities of the others as they are, so that a smaller limit leaves out no length that
fits it. Fills are ordered by the mean of two estimates of the same logarithm, which differ by a constant if the model
is right: of the product, and of the causal probability of the fill and all that follows it. Each of them alone finds
fewer of the true fills (docs/log.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from acgpt.engine.decode import randomness
from acgpt.errors import QueryError
from acgpt.models.executor import LengthRequest, Search
from acgpt.models.fill import Candidate, Filler
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN
from acgpt.query.gaps import Gapped
from acgpt.query.lengths import LONGEST, length_question, normalised

MASS = 0.8  # probability of the lengths of which the best fill is chosen, together
TRIED = 16  # such lengths at most
LEAST = 1 / 7  # probability of such a length, as a share of the likeliest one's


class LengthTable(NamedTuple):
    """The distribution of the length of a region.

    Args:
        log_probs: Log-probabilities of the lengths that fit into `max_tokens`; they sum to 1.
        log_fitting: Log-probability that a length fits.
    """

    log_probs: dict[int, float]
    log_fitting: float = 0.0


class FillByLengths(Filler):
    """Fills the gaps of one template, and asks the model for their lengths; see `Filler`."""

    longest = LONGEST  # as long as a length can be told from others

    @cached_property
    def log_lengths(self) -> dict[tuple[int, ...], float]:
        """Log-probabilities of the lengths that were chosen so far."""
        return {}

    def candidates(self, samples: int) -> Search[list[Candidate]]:
        """Return the best candidate of each of the likeliest lengths."""
        yield from self.likeliest_lengths()
        choices = sorted(self.log_lengths, key=sum)
        return (yield from self.search(self.gapped, self.constraints, choices, samples))

    def likeliest_lengths(self) -> Search[None]:
        """Set `log_lengths` to the likeliest lengths of all regions, found by a beam search of width `TRIED`."""
        # Log-probabilities under any limit of tokens, by which lengths are chosen, and under the limit that is set.
        beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, 0.0)}
        for index in range(len(self.constraints)):
            tables = yield from self.tables(index, list(beam))
            extended = {
                (*before, length): (beam[before][0] + table.log_fitting + log_prob, beam[before][1] + log_prob)
                for before, table in zip(beam, tables, strict=True)
                for length, log_prob in table.log_probs.items()
                if length or len(table.log_probs) == 1  # not nothing, if a gap can have something
            }
            beam = dict(heapq.nlargest(TRIED, extended.items(), key=itemgetter(1)))
        probabilities = np.exp([log_prob for log_prob, _ in beam.values()])
        likelier = probabilities.cumsum() - probabilities
        tried = (likelier < MASS) & (probabilities >= LEAST * probabilities[0])
        self.log_lengths = {lengths: beam[lengths][1] for lengths, each in zip(beam, tried, strict=True) if each}

    def choose_lengths(self) -> Search[tuple[int, ...]]:
        """Draw the lengths of all regions; with temperature 0, return the likeliest ones."""
        if self.sampling.greedy:
            yield from self.likeliest_lengths()
            return next(iter(self.log_lengths))
        ((lengths, _),) = yield from self.draw_lengths([0])
        return lengths

    def stream(self, notify: Callable[[int, str], object]) -> Search[Candidate]:
        """Draw one fill, see `Filler.stream`; with temperature 0, find the best one, which is then known as a whole."""
        if not self.sampling.greedy or self.gapped.open_ended:
            return (yield from super().stream(notify))
        self.begin()
        best = min((yield from self.candidates(0)), key=Candidate.order)
        for slot, text in enumerate(self.fills(best)):
            if text:
                notify(slot, text)
        return best

    def score(self, gapped: Gapped, candidates: Sequence[Candidate]) -> Search[None]:
        """Set the scores of candidates: the mean of both logarithms, see above."""
        yield from self.read(gapped, candidates)
        for candidate in candidates:
            candidate.log_lengths = self.log_lengths[self.asked_lengths(candidate)]
            candidate.score = (candidate.log_lengths + candidate.log_prob + candidate.log_text) / 2
            candidate.empty = self.is_empty(gapped, candidate)

    def asked_lengths(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the lengths that a candidate was drawn with; one that ends the text may have ended before."""
        if not self.gapped.open_ended:
            return candidate.lengths
        return next(known for known in self.log_lengths if known[:-1] == candidate.lengths[:-1])

    def tables(self, index: int, before: Sequence[tuple[int, ...]]) -> Search[list[LengthTable]]:
        """Return `distributions`; of a region that ends the text, whose rows end by themselves, its largest length."""
        if self.gapped.open_ended and index == len(self.constraints) - 1:
            return [LengthTable({self.fitting(index, lengths)[-1]: 0.0}) for lengths in before]
        return (yield from self.distributions(index, before))

    def distributions(self, index: int, before: Sequence[tuple[int, ...]]) -> Search[list[LengthTable]]:
        """Return the log-probabilities of a region's lengths, for each of several choices of the lengths before it."""
        head = self.executor.length_head(self.route)
        assert head is not None  # or `FillBySearch` would fill
        ids = np.array([-1 if token is None else token for token in self.gapped.tokens], dtype=np.int64)
        given, asked = np.array(self.gapped.given, dtype=bool), np.array(self.gapped.asked, dtype=bool)
        roles = np.where(given, GIVEN, np.where(asked, ASKED, UNKNOWN)).astype(np.int8)
        places = [region.at for region in self.gapped.regions]
        questions = [
            length_question(ids, roles, places, lengths, distance=head.distance, positions=self.positions)
            for lengths in before
        ]
        answers = yield LengthRequest(questions, [self.route] * len(questions), head)
        unlimited = sorted({*self.lengths[index], *self.within(index, None)})
        tables = []
        for answer, lengths in zip(answers, before, strict=True):
            table = normalised(answer, self.fitting(index, lengths))
            any_limit, shortest = normalised(answer, self.fitting(index, lengths, unlimited)), min(table)
            tables.append(LengthTable(table, any_limit[shortest] - table[shortest]))
        return tables

    def next_length(self, known: tuple[int, ...]) -> Search[dict[int, float]]:
        """Return the log-probabilities of the lengths of the region after those whose lengths are known."""
        if len(known) >= len(self.constraints):
            raise QueryError(
                f"`known` has {len(known)} lengths, and the template asks for {len(self.constraints)}: leave one to be "
                "predicted. Gaps without a kept token between them count as one."
            )
        if self.gapped.open_ended and len(known) == len(self.constraints) - 1:
            raise QueryError(
                "the last gap ends the text: it ends where the model ends it, and has no length to predict. Write what "
                "follows it."
            )
        for index, length in enumerate(known):
            if length not in self.fitting(index, known[:index]):
                raise QueryError(f"gap {index + 1} cannot have {length!r} tokens.")
        (table,) = yield from self.distributions(len(known), [known])
        return table.log_probs

    def draw_lengths(self, numbers: Sequence[int]) -> Search[list[tuple[tuple[int, ...], float]]]:
        """Draw lengths of all regions from left to right, each given those before it.

        Args:
            numbers: The numbers of the samples.

        Returns:
            For each sample the lengths, and their log-probability.
        """
        sampling = self.sampling
        rngs = [randomness(self.kept, i, sampling.seed, "lengths") for i in numbers]
        chosen: list[tuple[int, ...]] = [()] * len(numbers)
        log_probs = [0.0] * len(numbers)
        for index in range(len(self.constraints)):
            before = sorted(set(chosen))
            tables = yield from self.tables(index, before)
            by_lengths = dict(zip(before, tables, strict=True))
            for i, lengths in enumerate(chosen):
                table = by_lengths[lengths].log_probs
                values = np.array(list(table.values()))
                weights = np.exp((values - values.max()) / sampling.temperature)
                number = int(rngs[i].choice(len(weights), p=weights / weights.sum()))
                length = list(table)[number]
                chosen[i], log_probs[i] = (*lengths, length), log_probs[i] + table[length]
        drawn = list(zip(chosen, log_probs, strict=True))
        self.log_lengths |= dict(drawn)
        return drawn

    def at_random(self, candidates: int) -> Search[list[Candidate]]:
        """Draw fills from p(length | context) · p(fill | length, context).

        A candidate is drawn under the constraint of its gaps, so its tokens come with a larger probability q than p.
        It is accepted with the probability p / q, which makes the accepted ones exact draws. If too few are accepted of
        `candidates`, or of eight for each fill, all of them are resampled with these weights instead.

        With another temperature than 1, or a truncated distribution, lengths and tokens are drawn one after the other,
        as usual, and there is nothing to correct. With temperature 0, the best fill is returned.
        """
        ask, sampling = self.ask, self.sampling
        if sampling.greedy:
            found = yield from self.candidates(0)
            return [min(found, key=Candidate.order)] * ask.n
        exact = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k is None
        most = max(candidates, 8 * ask.n) if exact else ask.n
        drawn: list[Candidate] = []
        accepted: list[Candidate] = []
        while len(drawn) < most and len(accepted) < ask.n:
            numbers = range(len(drawn), min(most, len(drawn) + max(ask.n, len(drawn), 4)))
            lengths = yield from self.draw_lengths(numbers)
            jobs = [(chosen, i) for (chosen, _), i in zip(lengths, numbers, strict=True)]
            new = yield from self.draw(self.gapped, self.constraints, jobs, greedy=False)
            for candidate in new:
                candidate.log_lengths = self.log_lengths[self.asked_lengths(candidate)]
                candidate.score = candidate.log_lengths + candidate.log_prob
            drawn += new
            for i, candidate in zip(numbers, new, strict=True):
                rng = randomness(self.kept, i, sampling.seed, "accepting")
                if not exact or rng.random() < math.exp(candidate.log_prob - candidate.drawn_with):
                    accepted.append(candidate)
        if len(accepted) >= ask.n:
            return accepted[: ask.n]
        log_weights = np.array([candidate.log_prob - candidate.drawn_with for candidate in drawn])
        return self.resampled(drawn, log_weights, self.kept)
