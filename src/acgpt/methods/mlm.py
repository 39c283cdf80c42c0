"""MLM: a masked language model (BERT's kind). What is given is seen, what is asked is masked, attention goes both ways.

It is trained to predict all asked tokens at once, each by itself, which says nothing of how they go together. So a
query is answered, and sampled, by unmasking its tokens one by one from left to right, with a pass for each:

    p(cat, sat | The, on) = p(cat | The MASK MASK on) · p(sat | The cat MASK on)

which is a distribution of the asked tokens, by the chain rule. Unknown tokens stay masked to the end. Passes are
batched over tokens and over texts, and only one position of each goes through the vocabulary projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.conditioning import ASKED, GIVEN
from acgpt.decode import Sampler, Sampling, noise
from acgpt.methods import masked
from acgpt.methods.base import Abilities, Drawn, Method
from acgpt.query import Query
from acgpt.score import check_numbers, chosen, layout_logits
from acgpt.slots import Slots


class Mlm(Method):
    """Any conditional, exactly, in as many passes as there are asked tokens."""

    name: ClassVar[str] = "mlm"
    title: ClassVar[str] = "MLM"
    says: ClassVar[str] = "a masked language model that answers p(any tokens | any other tokens), a pass a token"
    abilities: ClassVar[Abilities] = Abilities(True, True, False, False, False)
    reads_future: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = True

    def answers(self, query: Query) -> bool:
        """Every query."""
        return True

    def score(
        self,
        model: PreTrainedModel,
        queries: Sequence[Query],
        *,
        bos: int,
        mask: int | None,
        backend: str,
        budget: int,
    ) -> list[list[float]]:
        """As `Method.score` says, a pass a token."""
        assert mask is not None
        answers: list[list[float]] = [[] for _ in queries]
        found: list[Tensor] = []
        parts = [masked.parts(query, bos=bos, mask=mask) for query in queries]
        passes = [(number, i) for number, query in enumerate(queries) for i in range(len(query.asked_positions))]
        for group in masked.groups([len(queries[number]) for number, _ in passes], budget):
            members = [passes[each] for each in group]
            texts, places, targets = [], [], []
            for number, i in members:
                start, asked, tokens = parts[number]
                text = start.copy()
                text[asked[:i]] = tokens[:i]
                texts.append(text)
                places.append(asked[i : i + 1])
                targets.append(tokens[i : i + 1])
            layout = masked.both_ways(texts, places, targets, bos=bos, backend=backend)
            logits = layout_logits(model, layout, backend, mask)
            found.append(chosen(logits, layout.targets.to(logits.device)))  # fetched at the end: not waited for here
        scores = torch.cat(found).cpu().double().numpy() if found else np.zeros(0)
        check_numbers(scores)
        for (number, _), score in zip(passes, scores.tolist(), strict=True):
            answers[number].append(score)
        return answers

    def sample(
        self, sampler: Sampler, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> list[list[Drawn]]:
        """As `Method.sample` says, a pass a token; without the future, given tokens are shown when they are reached."""
        mask = self.mask(sampler.mask)
        assert mask is not None
        rows = [(number, sample) for number in range(len(queries)) for sample in range(n)]
        answers: list[list[Drawn]] = [[] for _ in queries]
        for group in masked.groups([len(queries[number]) for number, _ in rows], sampler.budget):
            members = [rows[each] for each in group]
            questions = [queries[number] for number, _ in members]
            texts = [masked.shown(query, bos=sampler.bos, mask=mask, given=future) for query in questions]
            known = [masked.shown(query, bos=sampler.bos, mask=mask) for query in questions]
            chances = [noise(queries[number], sampling.first + sample, sampling.seed) for number, sample in members]
            asked = [np.array(query.asked_positions) for query in questions]
            turns = [[place[None] for place in places] for places in asked]
            given = [np.array(query.given_positions, dtype=np.int64) for query in questions]
            reached = [np.split(a, np.searchsorted(a, places))[:-1] for a, places in zip(given, asked, strict=True)]
            drawn = masked.fill(sampler, texts, turns, chances, mask, sampling, known=known, reached=reached)
            for (number, _), at, (text, scores) in zip(members, asked, drawn, strict=True):
                answers[number].append((text[at], scores[at]))
        return answers

    def rows_at_once(self, sampler: Sampler, length: int) -> int:
        """As many as go through the model in one pass."""
        return max(1, sampler.budget // (length + 2))

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Slots:
        """All that is not given is masked; what is asked is predicted, all at once."""
        assert mask is not None
        asked = roles == ASKED
        return masked.lay_out(tokens, roles != GIVEN, asked, asked=int(asked.sum()), bos=bos, mask=mask)

    def longest(self, length: int) -> int:
        """BOS and the text."""
        return length + 1

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The whole text in both directions; a prediction for each asked token."""
        return np.full_like(given, length + 1), asked
