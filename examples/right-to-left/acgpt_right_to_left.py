"""A language model that reads from right to left: p(what stands before | what follows), exactly and in one pass.

    text      [The]  [cat]   sat    on          given: sat, on      asked: [The], [cat]

    reads      BOS    on     sat    cat         a plain causal model of the reversed text
    predicts    –      –     cat    The

All of it is GPT's work on mirrored queries; what comes back is put from left to right again.
"""

from __future__ import annotations

from acgpt.methods import Abilities, Method, register
from acgpt.methods.gpt import Gpt
from acgpt.query.conditioning import Conditioning, Empty
from acgpt.query.query import Query

GPT = Gpt()


def mirrored(query: Query) -> Query:
    """The query about the reversed text."""
    return Query(query.tokens[::-1], query.given[::-1], query.asked[::-1])


@register
class RightToLeft(Method):
    """A causal model of reversed texts."""

    name = "right-to-left"
    title = "Right to left"
    colour = "#2f4858"
    says = "a language model that answers p(what stands before | what follows)"
    examples = ("{{The cat}} sat on the mat.", "{{_3}} on the mat.")
    abilities = Abilities(False, False, False, single_pass=True, fine_tunes=True)
    reads_future = True
    refusal = "it gives a token before an asked one, or leaves one after it unknown. Use a model of another method."

    @property
    def chain(self):
        """Whether log-probabilities go from left to right: they go the other way."""
        return False

    def answers(self, query):
        """Whether nothing is given before an asked token, and nothing after one is unknown."""
        return GPT.answers(mirrored(query))

    def score(self, engine, queries):
        """As `Method.score`, in one causal pass over each reversed text."""
        return [scores[::-1] for scores in GPT.score(engine, [mirrored(query) for query in queries])]

    def stream(self, engine, queries, n, sampling, future=True):
        """As `Method.stream`, with GPT's cache."""
        self.check(queries if future else [self.left_to_right(query) for query in queries])
        for answers in GPT.stream(engine, [mirrored(query) for query in queries], n, sampling):
            yield [(query, sample, (tokens[::-1], scores[::-1])) for query, sample, (tokens, scores) in answers]

    def conditioning(self, distribution):
        """Nothing is given in training, and everything is asked."""
        return Conditioning((Empty(),))

    def lay_out(self, tokens, roles, rngs, *, bos, mask):
        """GPT's training batch of the reversed texts."""
        return GPT.lay_out(tokens[:, ::-1], roles[:, ::-1], rngs, bos=bos, mask=mask)
