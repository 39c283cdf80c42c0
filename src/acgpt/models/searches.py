"""Every question that a `LanguageModel` answers, as a search: a generator that yields requests and returns the answer.

    lm.fill(…)          one search, run to its end by `executor.Executor`
    acgpt serve         many searches at a time, whose requests are answered together (`models.scheduler`)

Each method of `Searches` belongs to the method of `LanguageModel` with the same name. It reads the question at once, so
that malformed input is refused before anything is run, and returns the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from acgpt.errors import QueryError, TemplateError, too_long
from acgpt.models.ask import (
    Ask,
    Fill,
    FillAsk,
    Lengths,
    LengthsAsk,
    Piece,
    Question,
    RankAsk,
    Ranked,
    Ranking,
    Sample,
    SampleAsk,
    Score,
    ScoreAsk,
    StreamAsk,
    token_scores,
)
from acgpt.models.executor import Executor, Samples, Scores, Search
from acgpt.models.fill import Candidate, Filler
from acgpt.models.fill_by_lengths import FillByLengths
from acgpt.models.fill_by_search import FillBySearch
from acgpt.models.router import Route
from acgpt.query.gaps import encode_gaps, has_gaps
from acgpt.query.query import Query
from acgpt.query.template import Part, Slot, check_slots, fillings, parse, rendered
from acgpt.query.text import Encoded, encode, encode_text, pieces


class Searches:
    """Makes the searches of a model.

    Args:
        executor: Runs the model; the searches need its router and its tokens.
        tokenizer: The model's tokenizer.
        positions: Number of positions, of which BOS takes one.
    """

    def __init__(self, executor: Executor, tokenizer: PreTrainedTokenizerBase, positions: int) -> None:
        self.executor, self.router, self.tokenizer, self.positions = executor, executor.router, tokenizer, positions
        self.vocabulary: int = executor.engine.model.config.get_text_config().vocab_size

    # ---- questions --------------------------------------------------------------------------------------------------

    def of(self, ask: Ask) -> Search[Any]:
        """Return the search for the answer to one question."""
        search: Search[Any] = getattr(self, ask.name)(ask)
        return search

    def log_prob(self, ask: ScoreAsk) -> Search[Score]:
        """Score a question, see `LanguageModel.log_prob`."""
        scores = self.log_probs(ask)

        def search() -> Search[Score]:
            (score,) = yield from scores
            return score

        return search()

    def log_probs(self, ask: ScoreAsk) -> Search[list[Score]]:
        """Score each question of a list. The active adapter is looked up once, which may take longer than a score."""
        queries = [self.scorable(each.question) for each in ask.each()]
        return self.scores(queries, self.router.routes(queries, ask.future, ask.adapter))

    def sample(self, ask: SampleAsk) -> Search[list[Sample]]:
        """Sample the asked tokens of one question, see `LanguageModel.sample`."""
        question, sampling = ask.question, ask.sampling
        if isinstance(question, str) and has_gaps(parts := parse(question)):
            filler = self.filler(parts, FillAsk.like(ask))
            return self.fills_of(filler, filler.at_random(ask.candidates))
        encoded = self.encode(question)
        (route,) = self.router.routes([encoded.query], ask.future, ask.adapter)

        def search() -> Search[list[Sample]]:
            (drawn,) = yield Samples([encoded.query], [route], ask.n, sampling, ask.notice)
            return [self.sample_of(encoded, ids, log_probs, route, sampling.seed) for ids, log_probs in drawn]

        return search()

    def fill(self, ask: FillAsk) -> Search[list[Fill]]:
        """Find the best fills of one template, see `LanguageModel.fill`."""
        filler = self.filler(parse_gaps(ask.question), ask)
        return self.fills_of(filler, filler.best())

    def stream(self, ask: StreamAsk, notify: Callable[[Piece], object]) -> Search[Fill]:
        """Draw one fill, and tell `notify` each piece of it, see `LanguageModel.stream`."""
        filler = self.filler(parse_gaps(ask.question), FillAsk.like(ask))

        def search() -> Search[Fill]:
            found = yield from filler.stream(lambda slot, text: notify(Piece(text, slot)))
            fill = self.fill_of(filler, found)
            notify(Piece("", len(filler.slots) - 1, fill))
            return fill

        return search()

    def lengths(self, ask: LengthsAsk) -> Search[Lengths]:
        """Predict the length of a gap, see `LanguageModel.lengths`."""
        filler = self.filler(parse_gaps(ask.question), FillAsk.like(ask))

        def search() -> Search[Lengths]:
            return Lengths((yield from filler.next_length(tuple(ask.known))))

        return search()

    def rank(self, ask: RankAsk) -> Search[Ranking]:
        """Rank the alternatives of a template, see `LanguageModel.rank`."""
        template, future, adapter = ask.question, ask.future, ask.adapter
        if self.router.own_method(self.router.resolve(adapter)).bound:
            raise QueryError(
                "this model's log-probabilities are lower bounds, which cannot be compared with each other. Rank with "
                "a model of another method."
            )
        candidates = fillings(template)
        texts = [rendered(parts) for parts in candidates]
        if len(set(texts)) < len(texts):
            raise TemplateError("two alternatives make the same text; write each once.", template, 0)
        routed = self.router.chooses_per_query(adapter)
        used = not routed and self.router.reads_future(adapter) if future is None else future
        queries, compared = self.comparable(candidates, template) if used else None, "asked | given"
        # All queries have the same roles, and so the same route.
        routes = [] if queries is None else self.router.routes(queries, future, adapter)
        if queries is None or not routes[0].future:
            compared = "whole text"
            ids = [encode_text(text, self.tokenizer) for text in texts]
            if not all(ids):
                raise TemplateError("with one of the alternatives, no text is left to compare.", template, 0)
            queries = [Query(i, given=[False] * len(i)) for i in ids]
            routes = self.router.routes(queries, False, adapter)
        for query in queries:
            self.check(query)
        scores = self.scores(queries, routes)

        def search() -> Search[Ranking]:
            log_probs = torch.tensor([answer.log_prob for answer in (yield from scores)], dtype=torch.float64)
            ranked = [
                Ranked(text, tuple(p.alternatives[0] for p in parts if isinstance(p, Slot)), probability, log_prob)
                for text, parts, probability, log_prob in zip(
                    texts, candidates, log_probs.softmax(0).tolist(), log_probs.tolist(), strict=True
                )
            ]
            ranked.sort(key=lambda alternative: -alternative.log_prob)
            return Ranking(tuple(ranked), compared, routes[0].future, routes[0].adapter)

        return search()

    # ---- reading questions ------------------------------------------------------------------------------------------

    def encode(self, question: Question, *, blanks: bool = True) -> Encoded:
        """Tokenize a question and check that it fits the model; refuse blanks unless they are allowed."""
        if isinstance(question, Query):
            encoded = Encoded(question, question.blanks)
        else:
            parts = parse(question)
            slots = [part for part in parts if isinstance(part, Slot)]
            if not blanks:
                check_slots(parts, question, scored=True)
            if (blank := sum(slot.tokens or 0 for slot in slots)) >= self.positions:
                raise too_long(f"at least {blank}", self.positions)
            encoded = encode(parts, self.tokenizer, question)
        self.check(encoded.query)
        return encoded

    def scorable(self, question: Question) -> Query:
        """Tokenize a question and check that every asked token has an id."""
        query = self.encode(question, blanks=False).query
        for position in query.asked_positions:
            if query.tokens[position - 1] is None:
                raise QueryError(f"the asked token at position {position} has no id to score; give it, or use sample.")
        return query

    def check(self, query: Query) -> None:
        """Check that a query fits the model's positions and vocabulary."""
        if len(query) + 1 > self.positions:
            raise too_long(len(query), self.positions)
        for position, token in enumerate((query.start, *query.tokens)):
            if token is not None and token >= self.vocabulary:
                raise QueryError(
                    f"the token at position {position} has the id {token}, but the model's largest id is "
                    f"{self.vocabulary - 1}."
                )

    def comparable(self, candidates: list[Any], template: str) -> list[Query] | None:
        """Return the candidates as queries if they differ only in their asked tokens, else `None`."""
        if any(not slot.alternatives[0] for parts in candidates for slot in parts if isinstance(slot, Slot)):
            return None
        queries = [encode(parts, self.tokenizer, template).query for parts in candidates]
        given = {(q.given, tuple(t for t, g in zip(q.tokens, q.given, strict=True) if g)) for q in queries}
        return queries if len(given) == 1 else None

    def filler(self, parts: Sequence[Part], ask: FillAsk) -> Filler:
        """Return the search for the fills of a parsed template."""
        gapped = encode_gaps(parts, self.tokenizer, ask.question)
        query = gapped.encoded([1] * len(gapped.regions)).query  # a route depends on roles alone
        (route,) = self.router.routes([query], ask.future, ask.adapter)
        kind = FillBySearch if self.executor.length_head(route) is None else FillByLengths
        return kind(self.executor, self.tokenizer, self.positions, parts, ask, gapped, route)

    # ---- building answers -------------------------------------------------------------------------------------------

    def scores(self, queries: list[Query], routes: list[Route]) -> Search[list[Score]]:
        """Score each query along its route; results are in the order of the queries."""
        answers = (yield Scores(queries, routes)) if queries else []
        results = []
        for query, route, answer in zip(queries, routes, answers, strict=True):
            tokens = token_scores(query, self.texts(query, route.adapter), answer)
            bound = self.router.method(route).bound
            results.append(Score(tokens, route.future, adapter=route.adapter, bound=bound))
        return results

    def fills_of(self, filler: Filler, found: Search[list[Candidate]]) -> Search[list[Any]]:
        """Build fills from the candidates that a search finds."""
        return [self.fill_of(filler, candidate) for candidate in (yield from found)]

    def fill_of(self, filler: Filler, candidate: Candidate) -> Fill:
        """Build a fill from a candidate."""
        ids, query = candidate.tokens, candidate.query
        complete = Query.trusted(ids, query.given, query.asked)
        texts = self.texts(complete, candidate.route.adapter)
        return Fill(
            tokens=token_scores(complete, texts, candidate.log_probs),
            future=candidate.route.future,
            adapter=candidate.route.adapter,
            text=filler.text(candidate),
            fills=filler.fills(candidate),
            seed=filler.sampling.seed,
            query=complete,
            lengths=filler.lengths_of(candidate),
            length_log_prob=candidate.log_lengths,
            score=candidate.score,
        )

    def sample_of(self, encoded: Encoded, ids: np.ndarray, log_probs: np.ndarray, route: Route, seed: int) -> Sample:
        """Build a sample from the ids and log-probabilities of its asked tokens."""
        query = encoded.query
        tokens = list(query.tokens)
        for position, token in zip(query.asked_positions, ids.tolist(), strict=True):
            tokens[position - 1] = token
        query = Query(tokens, query.given, query.asked, query.start)
        texts = self.texts(query, route.adapter)
        return Sample(
            tokens=token_scores(query, texts, log_probs.tolist()),
            future=route.future,
            adapter=route.adapter,
            text="".join(texts),
            fills=tuple("".join(texts[first - 1 : last]) for first, last in encoded.slots),
            seed=seed,
            query=query,
        )

    def texts(self, query: Query, adapter: str | None) -> list[str]:
        """Return the text of each token; that of MASK (or BOS), as the model reads it, for a token without an id."""
        mask = self.executor.mask(adapter)
        # A MASK that was added to the model alone is not in the tokenizer.
        placeholder = self.executor.engine.bos if mask is None or mask >= len(self.tokenizer) else mask
        return pieces([placeholder if token is None else token for token in query.tokens], self.tokenizer)


def parse_gaps(template: str) -> list[Part]:
    """Parse a template that has a gap."""
    parts = parse(template)
    if not has_gaps(parts):
        raise TemplateError("there is no gap to fill: write {{_}}, or use sample.", template, len(template))
    return parts
