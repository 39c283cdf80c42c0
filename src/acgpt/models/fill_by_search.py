"""Filling gaps by a search for their lengths, for models that do not predict them.

    lengths      1, 2, 3, 4 │ 5, 6, 7, 8 │ …       one query per length, drawn in one ragged batch per wave
    score        log p(fill and what follows | what comes before), causal, + 0.5 nats per token

Fills of different lengths are compared by the causal probability of the whole text. The text of largest probability is
nearly always too short: every token costs something. So `BONUS` nats are added per generated token. It was chosen on
300 gaps in prose and code that no benchmark here contains (docs/log.md): of 0 to 2.5 nats, 0.5 keeps most exact
matches, 43 of the 47 that a known length gives.

**The search.** All lengths are tried from the shortest on (`Filler.search`). Several regions are resolved from left to
right, each with what follows it up to the next one; then all of them are drawn by one query.

**A random fill.** Candidates of all lengths are drawn, and resampled with the weights p(text) / q(candidate), where q
is the probability with which the candidate was drawn. This is exact for many candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from acgpt.models.executor import Search
from acgpt.models.fill import Candidate, Filler
from acgpt.query.gaps import Gapped

BONUS = 0.5  # nats per generated token, so that the best fill is not the shortest


class FillBySearch(Filler):
    """Fills the gaps of one template, and tries their lengths."""

    def candidates(self, samples: int) -> Search[list[Candidate]]:
        """Return the best candidate of each length that was tried; of several regions, of the lengths found."""
        gapped = self.gapped
        if len(gapped.regions) == 1 and not gapped.open_ended:
            return (yield from self.search(gapped, self.constraints, [(n,) for n in self.lengths[0]], samples))
        lengths = yield from self.choose_lengths()
        candidates = yield from self.draw(gapped, self.constraints, [(lengths, 0)], greedy=True)
        yield from self.score(gapped, candidates)
        return candidates

    def score(self, gapped: Gapped, candidates: Sequence[Candidate]) -> Search[None]:
        """Set the scores of candidates: their causal log-probability, and the bonus."""
        yield from self.read(gapped, candidates)
        for candidate in candidates:
            candidate.score = candidate.log_text + BONUS * sum(candidate.lengths)
            candidate.empty = self.is_empty(gapped, candidate)

    def choose_lengths(self) -> Search[tuple[int, ...]]:
        """Return the lengths of all regions, found one by one from left to right."""
        chosen: list[int] = []
        filled: list[list[int]] = []
        for index, constraint in enumerate(self.constraints):
            last, lengths = index == len(self.constraints) - 1, self.fitting(index, chosen)
            part = self.window(index, filled)
            if len(lengths) == 1:
                length = lengths[0]
                if not last:
                    (best,) = yield from self.draw(part, [constraint], [((length,), 0)], greedy=True)
            else:
                candidates = yield from self.search(part, [constraint], [(n,) for n in lengths], 0)
                best = min(candidates, key=Candidate.order)
                length = sum(best.lengths)
            chosen.append(length)
            if not last:
                positions = best.query.asked_positions
                span = part.encoded([length]).slots[0] if length else (1, 0)
                filled.append([t for p, t in zip(positions, best.ids, strict=True) if span[0] <= p <= span[1]])
        return tuple(chosen)

    def window(self, index: int, filled: Sequence[Sequence[int]]) -> Gapped:
        """Return the text up to the region after this one, with the regions before it filled."""
        gapped, region = self.gapped, self.gapped.regions[index]
        end = gapped.regions[index + 1].at if index + 1 < len(gapped.regions) else len(gapped.tokens)
        tokens, given, asked = list(gapped.tokens[:end]), list(gapped.given[:end]), list(gapped.asked[:end])
        for before, ids in reversed(list(zip(gapped.regions[:index], filled, strict=True))):
            tokens[before.at : before.at] = ids
            given[before.at : before.at] = [True] * len(ids)
            asked[before.at : before.at] = [False] * len(ids)
        region = replace(region, at=region.at + sum(map(len, filled)), slots=(0,))
        return Gapped(tuple(tokens), tuple(given), tuple(asked), (region,), (None,))

    def at_random(self, candidates: int) -> Search[list[Candidate]]:
        """Resample candidates of all lengths with the weights p(text) / q."""
        ask, gapped = self.ask, self.gapped
        lengths_of: list[tuple[int, ...]]
        if len(gapped.regions) == 1:
            lengths_of = [(length,) for length in self.lengths[0]]
        else:
            lengths_of = [(yield from self.choose_lengths())]
        if gapped.open_ended:  # nothing follows, so that candidates need no weights
            jobs = [(lengths_of[-1], i) for i in range(ask.n)]
            return (yield from self.draw(gapped, self.constraints, jobs, greedy=False))
        count = max(candidates, ask.n, len(lengths_of))
        jobs = [(lengths_of[i % len(lengths_of)], i // len(lengths_of)) for i in range(count)]
        drawn = yield from self.draw(gapped, self.constraints, jobs, greedy=False)
        yield from self.score(gapped, drawn)
        temperature = self.sampling.temperature
        if self.sampling.greedy:
            return [max(drawn, key=lambda candidate: candidate.log_text)] * ask.n
        drawn_at = Counter(candidate.lengths for candidate in drawn)
        log_weights = np.array([c.log_text / temperature - c.drawn_with - math.log(drawn_at[c.lengths]) for c in drawn])
        return self.resampled(drawn, log_weights, drawn[0].query)
