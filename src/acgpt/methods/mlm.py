"""MLM: a masked language model (BERT's kind). What is given is seen, what is asked is masked, attention goes both ways.

It is trained to predict all asked tokens at once, each by itself, which says nothing of how they go together. So a
query is answered, and sampled, by unmasking its tokens one by one from left to right, with a pass for each:

    p(cat, sat | The, on) = p(cat | The MASK MASK on) · p(sat | The cat MASK on)

which is a distribution of the asked tokens, by the chain rule. Unknown tokens stay masked to the end. Passes are
batched over tokens and over texts, and only one position of each goes through the vocabulary projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from acgpt.engine.decode import Answer, Sampling, noise, wanted
from acgpt.engine.engine import Engine
from acgpt.engine.layout import Layout
from acgpt.engine.score import check_numbers, chosen
from acgpt.methods import masked
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.query import Query


@register
class Mlm(Method):
    """Any conditional, exactly, in as many passes as there are asked tokens."""

    name: ClassVar[str] = "mlm"
    title: ClassVar[str] = "MLM (BERT)"
    sort_order: ClassVar[int] = 50
    colour: ClassVar[str] = "#e09f3e"
    says: ClassVar[str] = "a masked language model that answers p(any tokens | any other tokens), a pass a token"
    abilities: ClassVar[Abilities] = Abilities(True, True, False, False, False)
    reads_future: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    texts_at_once: ClassVar[int | None] = 4

    def answers(self, query: Query) -> bool:
        """Every query."""
        return True

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """As `Method.score` says, a pass a token.

        What a pass reads is made where the model is: the text, with MASK where the rank of an asked token among all
        asked ones is not below the pass's. So nothing is sent there, or waited for, between passes over texts of the
        same lengths.
        """
        model, bos, mask = engine.model, engine.bos, self.mask(engine.mask)
        assert mask is not None
        if not queries:
            return []
        parts = [masked.parts(query, bos=bos, mask=mask) for query in queries]
        counts = [len(asked) for _, asked, _ in parts]
        lengths = np.array([len(text) for text, _, _ in parts])
        ranks = [np.full(length, -1) for length in lengths]  # what is given or unknown comes before all that is asked
        whole = [text.copy() for text, _, _ in parts]
        for own, full, (_, asked, tokens) in zip(ranks, whole, parts, strict=True):
            own[asked], full[asked] = np.arange(len(asked)), tokens

        def there(*arrays: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(model.device)

        rank, text = there(*ranks), there(*whole)  # of all queries, one after the other
        owner = np.repeat(np.arange(len(queries)), counts)  # of each pass
        begin = there((lengths.cumsum() - lengths)[owner])
        turn = there(*map(np.arange, counts))
        place, target = there(*(asked for _, asked, _ in parts)), there(*(tokens for _, _, tokens in parts))
        frame, found = None, []
        for group in masked.groups((lengths[owner] - 1).tolist(), engine.budget):
            now = slice(group.start, group.stop)
            sizes = lengths[owner[now]]
            if frame is None or frame.lengths != tuple(sizes):
                frame = masked.Frame(tuple(sizes.tolist()), bos=bos, backend=engine.backend, device=model.device)
                first = there(sizes.cumsum() - sizes)
                member = there(np.repeat(np.arange(len(sizes)), sizes))  # whose a slot is
                offset = there(*map(np.arange, sizes))
            slot = begin[now][member] + offset
            read = torch.where(rank[slot] < turn[now][member], text[slot], mask)
            found.append(chosen(frame.logits(model, read, first + place[now], mask), target[now]))
        scores = torch.cat(found).cpu().double().numpy()
        check_numbers(scores)
        return [part.tolist() for part in np.split(scores, np.cumsum(counts)[:-1])]

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """As `Method.stream` says, a pass a token; without the future, given tokens are shown when they are reached."""
        mask = self.mask(engine.mask)
        assert mask is not None
        rows = wanted(queries, n)
        for group in masked.groups([len(queries[number]) for number, _ in rows], engine.budget):
            members = [rows[each] for each in group]
            questions = [queries[number] for number, _ in members]
            texts = [masked.shown(query, bos=engine.bos, mask=mask, given=future) for query in questions]
            known = [masked.shown(query, bos=engine.bos, mask=mask) for query in questions]
            chances = [noise(queries[number], sampling.first + sample, sampling.seed) for number, sample in members]
            asked = [np.array(query.asked_positions) for query in questions]
            turns = [[place[None] for place in places] for places in asked]
            given = [np.array(query.given_positions, dtype=np.int64) for query in questions]
            reached = [np.split(a, np.searchsorted(a, places))[:-1] for a, places in zip(given, asked, strict=True)]
            drawn = masked.fill(engine, texts, turns, chances, mask, sampling, known=known, reached=reached)
            yield masked.answers(members, questions, drawn)

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
        """All that is not given is masked; what is asked is predicted, all at once."""
        assert mask is not None
        return masked.lay_out(tokens, roles != GIVEN, roles == ASKED, bos=bos, mask=mask)

    def longest(self, length: int) -> int:
        """BOS and the text."""
        return length + 1

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The whole text in both directions; a prediction for each asked token."""
        return np.full_like(given, length + 1), asked
