"""A plugin method: a language model that reads from right to left, p(tokens | tokens after them).

    text      [The]  [cat]   sat    on          given: sat, on      asked: [The], [cat]

    reads      BOS    on     sat    cat         a plain causal model of the reversed text
    predicts    –      –     cat    The

Scores are exact and take one pass. The method passes mirrored queries to GPT and reverses its results.
"""

from __future__ import annotations

from acgpt.methods import Abilities, Method, register
from acgpt.methods.gpt import Gpt
from acgpt.query.conditioning import Conditioning, Empty
from acgpt.query.query import Query

GPT = Gpt()


def mirrored(query: Query) -> Query:
    """Return the query for the reversed text."""
    return Query(query.tokens[::-1], query.given[::-1], query.asked[::-1])


@register
class RightToLeft(Method):
    """A causal model of reversed texts."""

    name = "right-to-left"
    title = "Right to left"
    colour = "#2f4858"
    description = "a language model that answers p(earlier tokens | later tokens)"
    examples = ("{{The cat}} sat on the mat.", "{{_3}} on the mat.")
    abilities = Abilities(False, False, False, single_pass=True, fine_tunes=True)
    reads_future = True
    refusal = "it gives a token before an asked one, or leaves one after it unknown. Use a model of another method."

    @property
    def chain(self):
        """Whether log-probabilities factorise from left to right: they do so from right to left."""
        return False

    def answers(self, query):
        """Return whether nothing is given before an asked token, and nothing after one is unknown."""
        return GPT.answers(mirrored(query))

    def score(self, engine, queries):
        """Score queries in one causal pass over each reversed text."""
        return [scores[::-1] for scores in GPT.score(engine, [mirrored(query) for query in queries])]

    def stream(self, engine, queries, n, sampling, future=True):
        """Sample with GPT's cache."""
        self.check(queries if future else [self.left_to_right(query) for query in queries])
        for answers in GPT.stream(engine, [mirrored(query) for query in queries], n, sampling):
            yield [(query, sample, (tokens[::-1], scores[::-1])) for query, sample, (tokens, scores) in answers]

    def conditioning(self, distribution):
        """Return empty conditioning sets: nothing is given, everything is asked."""
        return Conditioning((Empty(),))

    def lay_out(self, tokens, roles, rngs, *, bos, mask):
        """Lay out the reversed texts as GPT does."""
        return GPT.lay_out(tokens[:, ::-1], roles[:, ::-1], rngs, bos=bos, mask=mask)
