r"""Filling gaps of unknown length, at any character: what is common to all ways to find out how long a gap is.

    template     return {{_}}(x)\n
    encode       kept tokens, and a region with literals to spell            (query.gaps)
    lengths      by search (`fill_by_search`), or predicted (`fill_by_lengths`)
    draw         p(fill | length, context), under the constraint that the bytes agree

A model of arbitrary conditionals answers p(fill | length, context), which is normalised for each length by itself. The
two subclasses of `Filler` differ in how they choose lengths, and in how they compare fills of different lengths.

The candidates of all lengths are read once more from left to right, which gives the causal probability of the fill and
of what follows it. It can be compared between lengths, and both subclasses use it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from acgpt.common.options import ignore
from acgpt.engine.decode import randomness
from acgpt.engine.steps import Row
from acgpt.errors import InputError, QueryError, TemplateError, too_long
from acgpt.models.ask import MAX_TOKENS, FillAsk
from acgpt.models.executor import Executor, Rows, Scores, Search
from acgpt.models.region import RegionGuide, constraint_of
from acgpt.models.router import Route
from acgpt.query.constraint import Constraint
from acgpt.query.gaps import Gapped, Region
from acgpt.query.query import Query
from acgpt.query.template import Part, Slot
from acgpt.query.text import pieces
from acgpt.query.vocabulary import ByteVocabulary

WAVE = 4  # lengths that are tried together
TRIES = 4  # times that more candidates are drawn, if there are fewer distinct ones than asked for


@dataclass
class Candidate:
    """A possible fill of a template.

    Args:
        lengths: Number of tokens of each region.
        query: The query; its asked tokens are drawn.
        ids: The asked tokens.
        log_probs: Their log-probabilities under the model.
        drawn_with: Log-probability with which all of them were drawn.
        route: What answered.
        score: What candidates are ordered by.
        empty: Whether all its gaps are empty or white space.
        log_lengths: Log-probability of its lengths, if the model predicts them.
        log_end: Log-probability of the token that ended the text early, which `log_probs` do not have.
        log_text: Causal log-probability of the first region and what follows it.
    """

    lengths: tuple[int, ...]
    query: Query
    ids: list[int]
    log_probs: list[float]
    drawn_with: float
    route: Route
    score: float = -math.inf
    log_text: float = -math.inf
    log_lengths: float | None = None
    log_end: float = 0.0
    empty: bool = False

    def order(self) -> tuple[bool, float]:
        """Return a key to sort by, the best first. Empty fills come last: a gap asks for something."""
        return self.empty, -self.score

    @property
    def log_prob(self) -> float:
        """Log-probability under the model of all that was drawn."""
        return math.fsum([*self.log_probs, self.log_end])

    @property
    def tokens(self) -> list[int | None]:
        """The tokens of the text, with the drawn ones; `None` for unknown tokens."""
        tokens = list(self.query.tokens)
        for position, token in zip(self.query.asked_positions, self.ids, strict=True):
            tokens[position - 1] = token
        return tokens


class Filler(ABC):
    """Fills the gaps of one template. Subclasses find out how long they are.

    Args:
        executor: Runs the queries of the search.
        tokenizer: The model's tokenizer.
        positions: Number of positions of the model, of which BOS takes one.
        parts: The parsed template.
        ask: The question.
        gapped: The tokens of the template, and its regions.
        route: What answers.

    Raises:
        TemplateError: A gap cannot be filled with the tokens that it may have.
        QueryError: The text is too long, or the model cannot draw under constraints.
    """

    longest: int | None = None  # length that an unbounded gap may have, if not `MAX_TOKENS`
    tried = 8  # lengths that are likely to be tried

    def __init__(
        self,
        executor: Executor,
        tokenizer: PreTrainedTokenizerBase,
        positions: int,
        parts: Sequence[Part],
        ask: FillAsk,
        gapped: Gapped,
        route: Route,
    ) -> None:
        self.executor, self.tokenizer, self.positions = executor, tokenizer, positions
        self.parts, self.template, self.ask, self.sampling = list(parts), ask.question, ask, ask.sampling
        self.size: int = executor.engine.model.config.get_text_config().vocab_size  # of the model's vocabulary
        self.slots = [part for part in parts if isinstance(part, Slot)]
        self.vocabulary = ByteVocabulary.of(tokenizer)
        self.stops = [stop.encode() for stop in ask.stop]
        self.gapped, self.route = gapped, route
        self.constraints = [self.constraint(region) for region in self.gapped.regions]
        self.kept = Query.trusted(gapped.tokens, gapped.given, gapped.asked)
        self.lengths = [self.possible(i) for i in range(len(self.constraints))]
        shortest = len(gapped.tokens) + sum(lengths[0] for lengths in self.lengths)
        if shortest + 1 > positions:
            raise too_long(shortest, positions)
        self.deadline = math.inf  # no more lengths are tried after it

    # ---- what depends on how lengths are found ----------------------------------------------------------------------

    @abstractmethod
    def candidates(self, samples: int) -> Search[list[Candidate]]:
        """Return scored candidates of the lengths that are worth trying.

        Args:
            samples: Number of candidates to draw at random per length, besides the likeliest one.
        """

    @abstractmethod
    def choose_lengths(self) -> Search[tuple[int, ...]]:
        """Return the lengths of all regions, for one fill."""

    @abstractmethod
    def at_random(self, candidates: int) -> Search[list[Candidate]]:
        """Draw fills from p(fill | context).

        Args:
            candidates: Number of candidates to choose them from.
        """

    @abstractmethod
    def score(self, gapped: Gapped, candidates: Sequence[Candidate]) -> Search[None]:
        """Set the scores of candidates.

        Args:
            gapped: The template, or a part of it.
            candidates: What was drawn for it.
        """

    def next_length(self, known: tuple[int, ...]) -> Search[dict[int, float]]:
        """Return the log-probabilities of the lengths of the region after those whose lengths are known.

        Raises:
            QueryError: The model does not predict lengths, or not for these.
        """
        yield from ()  # no requests
        raise QueryError(
            "this model does not predict lengths of gaps, or not on this route. Use a model that was trained with "
            "a share of `lengths` in its conditioning, and with the future."
        )

    # ---- what may be drawn ------------------------------------------------------------------------------------------

    def constraint(self, region: Region) -> Constraint:
        """Return the constraint of a region."""
        try:
            return constraint_of(self.vocabulary, region.literals, tuple(gap.pattern for gap in region.gaps))
        except InputError as error:
            raise TemplateError(str(error), self.template, self.slots[region.slots[0]].at) from error

    def most(self, index: int, max_tokens: int | None) -> int:
        """Return the maximum number of tokens of a region under a limit."""
        region = self.gapped.regions[index]
        open_ended = self.gapped.open_ended and index == len(self.constraints) - 1
        healed = sum(-(-len(literal) // 4) for literal in region.literals)  # about as many tokens as were given back
        default = MAX_TOKENS + healed if self.longest is None or open_ended else self.longest
        return min((limit for limit in (region.most, max_tokens) if limit is not None), default=default)

    def within(self, index: int, max_tokens: int | None) -> list[int]:
        """Return the numbers of tokens that a region may have under a limit; none if it cannot be filled."""
        most = min(self.most(index, max_tokens), max(0, self.room))
        return [n for n in self.constraints[index].lengths(most) if n >= self.gapped.regions[index].least]

    def possible(self, index: int) -> list[int]:
        """Return the numbers of tokens that a region may have; raise an error if there is none."""
        region, constraint, room = self.gapped.regions[index], self.constraints[index], self.room
        open_ended = self.gapped.open_ended and index == len(self.constraints) - 1
        most, lengths = self.most(index, self.ask.max_tokens), self.within(index, self.ask.max_tokens)
        if not lengths or (open_ended and room < 1):
            at = self.slots[region.slots[0]].at
            if room < max(1, region.least):
                raise too_long(len(self.gapped.tokens) + max(1, region.least), self.positions)
            start = max(region.least, min(most, room) + 1)
            needs = next((n for n in range(start, start + 257) if constraint.possible(n)), None)
            if needs is None:
                raise TemplateError("no text fits into this gap.", self.template, at)
            if needs <= most:
                raise too_long(len(self.gapped.tokens) + needs, self.positions)
            raise TemplateError(
                f"this gap needs at least {needs} tokens, with those of the given text that it is joined to, but may "
                f"have at most {most}: allow more, by `max_tokens` or in the gap.",
                self.template,
                at,
            )
        return lengths

    @property
    def room(self) -> int:
        """Maximum number of tokens of all regions together."""
        return self.positions - 1 - len(self.gapped.tokens)

    def fitting(self, index: int, before: Sequence[int], lengths: Sequence[int] | None = None) -> list[int]:
        """Return the lengths of a region that leave room for the later ones, if those before it have these lengths.

        A region that ends the text gets as much as it may have: its rows end by themselves.

        Args:
            index: Number of the region.
            before: Lengths of the regions before it.
            lengths: The lengths to choose from. Default: all that it may have.
        """
        room = self.room - sum(before) - sum(lengths[0] for lengths in self.lengths[index + 1 :])
        lengths = [length for length in lengths or self.lengths[index] if length <= room]
        return lengths[-1:] if self.gapped.open_ended and index == len(self.lengths) - 1 else lengths

    def ends(self) -> list[int]:
        """Return the tokens that end a text."""
        ids = {self.executor.engine.bos, self.tokenizer.eos_token_id}
        return sorted(
            i for i in ids if i is not None and i < len(self.vocabulary.tokens) and not self.vocabulary.tokens[i]
        )

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def draw(
        self,
        gapped: Gapped,
        constraints: Sequence[Constraint],
        jobs: Sequence[tuple[tuple[int, ...], int]],
        greedy: bool,
        progress: Callable[[Row], object] = ignore,
    ) -> Search[list[Candidate]]:
        """Draw candidates.

        Args:
            gapped: The template, or a part of it.
            constraints: Constraints of its regions.
            jobs: For each candidate the numbers of tokens of the regions, and the number of the sample.
            greedy: Take the likeliest tokens instead of drawing at random.
            progress: Called with a row whenever it has drawn a token.
        """
        ask = self.ask
        encodings = {lengths: gapped.encoded(lengths) for lengths, _ in jobs if any(lengths) or any(gapped.asked)}
        questions = [encoded.query for encoded in encodings.values()]
        found = self.executor.router.routes(questions, ask.future, ask.adapter)
        routes = dict(zip(encodings, found, strict=True))
        ends = self.ends() if gapped.open_ended else []
        drawn = [job for job in jobs if job[0] in encodings]
        sampling = replace(self.sampling, temperature=0) if greedy else self.sampling
        request = Rows(sampling, self.stopped, ask.notice, progress)
        for lengths, sample in drawn:
            encoded = encodings[lengths]
            spans = [encoded.slots[region.slots[0]] for region in gapped.regions]
            guide = RegionGuide(encoded.query, spans, constraints, self.size, ends, gapped.regions[-1].least)
            request.add(encoded.query, sample, routes[lengths], guide)
        rows = iter((yield request) if drawn else [])
        unasked = Query.trusted(gapped.tokens, gapped.given, gapped.asked)
        return [
            self.candidate(lengths, next(rows), routes[lengths])
            if lengths in encodings
            else Candidate(lengths, unasked, [], [], 0.0, Route(None, False))
            for lengths, _ in jobs
        ]

    def stopped(self, row: Row) -> bool:
        """Return whether a row has drawn the end of its text; or, in a gap that ends the text, a stop string.

        Such a gap may also end when the time is over, once there is some text in it.
        """
        guide = row.guide
        assert isinstance(guide, RegionGuide)
        if guide.ended:
            return True
        late = time.monotonic() > self.deadline
        if not (guide.ends and (self.ask.stop or late)):
            return False
        first = guide.spans[-1][0]
        text = self.vocabulary.decode([token for position, token, _ in row.drawn if position >= first])
        first_literal, *middle, _ = self.gapped.regions[-1].literals
        text = text[len(first_literal) :]
        for literal in filter(None, middle):  # only the last gap ends the text
            _, found, text = text.partition(literal)
            if not found:
                return False
        return bool(late and text) or any(stop in text for stop in self.stops)

    def candidate(self, lengths: tuple[int, ...], row: Row, route: Route) -> Candidate:
        """Return the candidate that a row has drawn. If it ended early, its query is cut."""
        query, guide = row.query, row.guide
        assert isinstance(guide, RegionGuide)
        drawn = row.drawn[:-1] if guide.ended else row.drawn
        if len(drawn) < len(query.asked_at):
            size = len(query) - (len(query.asked_at) - len(drawn))
            query = Query.trusted(query.tokens[:size], query.given[:size], query.asked[:size])
            lengths = *lengths[:-1], lengths[-1] - (len(row.query.asked_at) - len(drawn))
        ids, log_probs = [token for _, token, _ in drawn], [log_prob for *_, log_prob in drawn]
        log_end = row.drawn[-1][-1] if guide.ended else 0.0
        return Candidate(lengths, query, ids, log_probs, math.fsum(row.drawn_with), route, log_end=log_end)

    def search(
        self,
        gapped: Gapped,
        constraints: Sequence[Constraint],
        choices: Sequence[tuple[int, ...]],
        samples: int,
    ) -> Search[list[Candidate]]:
        """Return candidates of all lengths that were tried: `WAVE` at a time, the shortest first.

        The search ends when so many longer ones than the best are no better as the options say (*patience*), or when
        the time is over.

        Args:
            gapped: The template, or a part of it.
            constraints: Constraints of its regions.
            choices: Numbers of tokens of the regions, the fewest first.
            samples: Number of candidates to draw at random of each choice, besides the likeliest one.
        """
        candidates: list[Candidate] = []
        for start in range(0, len(choices), WAVE):
            wave = choices[start : start + WAVE]
            new = yield from self.draw(gapped, constraints, [(lengths, 0) for lengths in wave], greedy=True)
            if samples:
                jobs = [(lengths, sample) for lengths in wave for sample in range(samples)]
                new += yield from self.draw(gapped, constraints, jobs, greedy=False)
            yield from self.score(gapped, new)
            candidates += new
            best = sum(min(candidates, key=Candidate.order).lengths)
            if sum(sum(lengths) > best for lengths in choices[: start + WAVE]) >= self.ask.patience:
                break
            if time.monotonic() > self.deadline:
                break
        return candidates

    def read(self, gapped: Gapped, candidates: Sequence[Candidate]) -> Search[None]:
        """Set `log_text` of candidates: the causal log-probability of what was drawn and of all that follows it."""
        first = min(region.at for region in gapped.regions)
        queries: list[Query] = []
        for candidate in candidates:
            tokens = candidate.tokens
            known = [token is not None for token in tokens]
            start = min([first, *(position - 1 for position in candidate.query.asked_positions)])
            given = [k and i < start for i, k in enumerate(known)]
            asked = [k and i >= start for i, k in enumerate(known)]
            queries.append(Query.trusted(tokens, given, asked))
        scorable = [i for i, query in enumerate(queries) if any(query.asked)]
        scored = [queries[i] for i in scorable]
        routes = self.executor.router.routes(scored, False, self.ask.adapter)
        scores = dict(zip(scorable, (yield Scores(scored, routes)) if scored else [], strict=True))
        for i, candidate in enumerate(candidates):
            candidate.log_text = math.fsum(scores.get(i, ()))

    def is_empty(self, gapped: Gapped, candidate: Candidate) -> bool:
        """Return whether all gaps of a candidate are empty or white space, up to stop strings."""
        return not any(fill.strip() for _, fills in self.region_fills(gapped, candidate) for fill in fills)

    def cut(self, fill: str) -> str:
        """Return a fill up to the first stop string."""
        cuts = [at for stop in self.ask.stop if (at := fill.find(stop)) >= 0]
        return fill[: min(cuts)] if cuts else fill

    # ---- fills ------------------------------------------------------------------------------------------------------

    def best(self) -> Search[list[Candidate]]:
        """Return candidates, the best first."""
        ask, gapped = self.ask, self.gapped
        self.begin()
        samples = 0 if ask.best_of is None else -(-ask.best_of // max(1, min(len(self.lengths[0]), self.tried)))
        candidates = yield from self.candidates(samples)
        chosen = self.ranked(candidates)
        drawn = Counter(dict.fromkeys((c.lengths for c in candidates), samples))  # at random, for each lengths
        for _ in range(TRIES):  # more, drawn at random, as long as there are new ones
            few = len(candidates) < (ask.best_of or 0)
            missing, known = max(ask.n, (ask.best_of or 0) * few) - len(chosen), len(chosen)
            if missing <= 0 or time.monotonic() > self.deadline:
                break
            lengths = chosen[0].lengths
            if gapped.open_ended:
                lengths = (*lengths[:-1], *self.fitting(len(lengths) - 1, lengths[:-1]))
            count = max(missing, min(4, ask.n))
            jobs = [(lengths, drawn[lengths] + i) for i in range(count)]
            drawn[lengths] += count
            new = yield from self.draw(gapped, self.constraints, jobs, greedy=False)
            yield from self.score(gapped, new)
            candidates += new
            chosen = self.ranked(candidates)
            if len(chosen) == known:
                break
        return chosen[: ask.n]

    def begin(self) -> None:
        """Start the time that the search may take."""
        if self.ask.seconds is not None:
            self.deadline = time.monotonic() + self.ask.seconds

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates, the best first; the first of those with the same fills, if they must be distinct."""
        ordered = sorted(candidates, key=Candidate.order)
        if not self.ask.distinct:
            return ordered
        seen: dict[tuple[str, ...], Candidate] = {}
        for candidate in ordered:
            seen.setdefault(self.fills(candidate), candidate)
        return list(seen.values())

    def resampled(self, drawn: Sequence[Candidate], log_weights: np.ndarray, query: Query) -> list[Candidate]:
        """Return as many candidates as are asked for, drawn at random with these weights; `query` is the noise's."""
        weights = np.exp(log_weights - log_weights.max())
        rng = randomness(query, 0, self.sampling.seed, "resampling")
        return [drawn[i] for i in rng.choice(len(drawn), size=self.ask.n, p=weights / weights.sum())]

    def stream(self, notify: Callable[[int, str], object]) -> Search[Candidate]:
        """Find the lengths of all regions, then draw one fill.

        Args:
            notify: Called with the number of a slot and its new text, as it is made.
        """
        gapped = self.gapped
        self.begin()
        lengths = yield from self.choose_lengths()
        shown = [""] * len(self.slots)

        def progress(row: Row) -> None:
            encoded, finished = gapped.encoded(lengths), row.done or self.stopped(row)
            spans = [encoded.slots[region.slots[0]] for region in gapped.regions]
            for slot, text in self.progress(row, spans, encoded.slots, finished=finished):
                if len(text) > len(shown[slot]):
                    notify(slot, text[len(shown[slot]) :])
                    shown[slot] = text

        drawn = yield from self.draw(gapped, self.constraints, [(lengths, 0)], greedy=False, progress=progress)
        yield from self.score(gapped, drawn)
        return drawn[0]

    def progress(
        self, row: Row, spans: Sequence[tuple[int, int]], slots: Sequence[tuple[int, int]], finished: bool
    ) -> Iterator[tuple[int, str]]:
        """Yield each slot with as much of its text as is settled."""
        ends = set(self.ends())
        for region, (first, last) in zip(self.gapped.regions, spans, strict=True):
            ids = [token for position, token, _ in row.drawn if first <= position <= last]
            if ids and ids[-1] in ends:
                ids = ids[:-1]
            text, complete = self.vocabulary.decode(ids), finished or (len(row.drawn) and row.drawn[-1][0] >= last)
            if complete:
                texts = region.fills(text)
            elif len(region.slots) == 1 and len(text) >= len(region.literals[0]):
                settled = text[len(region.literals[0]) : max(0, len(text) - len(region.literals[-1]))]
                texts = [settled.decode(errors="ignore")]
            else:
                continue
            for slot, fill in zip(region.slots, texts, strict=True):
                cut = self.cut(fill)
                held = 0 if complete or cut != fill else max(map(len, self.ask.stop), default=1) - 1
                yield slot, cut[: max(0, len(cut) - held)]
        for slot, part in enumerate(self.slots):
            if part.gap is None and part.unknown is None:
                first, last = slots[slot]
                known = [token for position, token, _ in row.drawn if first <= position <= last]
                if len(known) == last - first + 1:
                    yield slot, "".join(pieces(known, self.tokenizer))

    # ---- texts ------------------------------------------------------------------------------------------------------

    def text(self, candidate: Candidate) -> str:
        """Return the completed text; unknown tokens are left out."""
        fills = self.fills(candidate)
        if all(slot.gap is not None or slot.unknown is not None for slot in self.slots):
            remaining = iter(fills)
            return "".join(next(remaining) if isinstance(part, Slot) else part.text for part in self.parts)
        # A space before a blank belongs to the blank: the text is that of the tokens.
        starts = {region.at: i for i, region in enumerate(self.gapped.regions)}
        tokens, text, position = candidate.tokens, b"", 0
        for index in range(len(self.gapped.tokens) + 1):
            if index in starts:
                region = self.gapped.regions[starts[index]]
                texts = [fills[slot].encode() for slot in region.slots]
                text += b"".join(a + b for a, b in zip(region.literals, [*texts, b""], strict=True))
                position += candidate.lengths[starts[index]]
            if index < len(self.gapped.tokens):
                token = tokens[position]
                text += b"" if token is None else self.bytes_of(token)
                position += 1
        return text.removeprefix(self.vocabulary.begin).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; for one that is not text, which a blank may have, its name."""
        known = self.vocabulary.tokens[token] if token < len(self.vocabulary.tokens) else None
        return "".join(pieces([token], self.tokenizer)).encode() if known is None else known

    def lengths_of(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the number of tokens of the region of each gap."""
        lengths = zip(self.gapped.regions, candidate.lengths, strict=True)
        return tuple(length for region, length in lengths for _ in region.slots)

    def fills(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the text of each slot, cut at stop strings."""
        tokens, regions = candidate.tokens, self.region_fills(self.gapped, candidate)
        fills = {slot: fill for region, texts in regions for slot, fill in zip(region.slots, texts, strict=True)}
        others = [slot for slot, part in enumerate(self.slots) if slot not in fills and part.unknown is None]
        spans = self.gapped.encoded(candidate.lengths).slots if others else ()
        for slot, part in enumerate(self.slots):
            if part.unknown is not None:
                fills[slot] = ""
            elif slot not in fills:  # a blank or a text, which is asked
                first, last = spans[slot]
                fills[slot] = "".join(pieces([t for t in tokens[first - 1 : last] if t is not None], self.tokenizer))
        return tuple(fills[slot] for slot in range(len(self.slots)))

    def region_fills(self, gapped: Gapped, candidate: Candidate) -> list[tuple[Region, list[str]]]:
        """Return each region of a template, or of a part of it, with the texts of its gaps, cut at stop strings."""
        tokens, drawn, found = candidate.tokens, 0, []
        for region, length in zip(gapped.regions, candidate.lengths, strict=True):
            start = region.at + drawn
            ids = [token for token in tokens[start : start + length] if token is not None]
            found.append((region, [self.cut(fill) for fill in region.fills(self.vocabulary.decode(ids))]))
            drawn += length
        return found
