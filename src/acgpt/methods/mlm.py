"""MLM: a masked language model, like BERT. Given tokens are visible, asked ones are masked, attention is bidirectional.

It is trained to predict all asked tokens at once, independently of each other, which is not a joint distribution. So a
query is scored, and sampled, by unmasking its tokens one by one from left to right, with one pass each:

    p(cat, sat | The, on) = p(cat | The MASK MASK on) · p(sat | The cat MASK on)

By the chain rule this is a distribution of the asked tokens. Unknown tokens stay masked to the end. Passes are batched
over tokens and over texts, and only one position of each goes through the vocabulary projection.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import register
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.query import Query

if TYPE_CHECKING:
    from torch import Tensor

    from acgpt.engine.decode import Answer
    from acgpt.engine.engine import Engine
    from acgpt.engine.layout import Layout
    from acgpt.methods.masked import Plan
    from acgpt.query.sampling import Sampling


class BothWays(Method):
    """Base of the methods that read a text in both directions, with MASK for hidden tokens; see `masked`."""

    reads_future: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

    @abstractmethod
    def plan(self, query: Query, sample: int, seed: int, future: bool) -> Plan:
        """Return how one sample of a query is drawn. Without the future, given tokens are shown when reached."""

    def answers(self, query: Query) -> bool:
        """Return true: it answers every query."""
        return True

    def stream(
        self, engine: Engine, queries: Sequence[Query], n: int, sampling: Sampling, future: bool = True
    ) -> Iterator[list[Answer]]:
        """Sample turn by turn, with one pass each; without the future, given tokens are shown when they are reached."""
        from acgpt.engine.decode import sample_numbers
        from acgpt.methods import masked

        mask = self.mask(engine.mask)
        assert mask is not None
        rows = sample_numbers(queries, n)
        for group in masked.groups([len(queries[number]) for number, _ in rows], engine.budget):
            members = [rows[i] for i in group]
            questions = [queries[number] for number, _ in members]
            texts = [masked.shown(query, bos=engine.bos, mask=mask, given=future) for query in questions]
            known = [masked.shown(query, bos=engine.bos, mask=mask) for query in questions]
            plans = [
                self.plan(query, sampling.first + sample, sampling.seed, future)
                for query, (_, sample) in zip(questions, members, strict=True)
            ]
            samples = masked.fill(engine, texts, known, plans, mask, sampling)
            yield masked.answers(members, questions, samples)

    def rows_at_once(self, engine: Engine, length: int) -> int:
        """Return the number of samples that fit into one pass."""
        return max(1, engine.budget // (length + 2))

    def longest(self, length: int) -> int:
        """Return the number of slots: BOS and the text."""
        return length + 1

    def room(self, length: int, given: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole text as copies, and at most one prediction per asked token."""
        return np.full_like(given, length + 1), asked


@register
class Mlm(BothWays):
    """Any conditional, exactly, in as many passes as there are asked tokens."""

    name: ClassVar[str] = "mlm"
    title: ClassVar[str] = "MLM (BERT)"
    sort_order: ClassVar[int] = 50
    colour: ClassVar[str] = "#e09f3e"
    description: ClassVar[str] = (
        "a masked language model that answers p(any tokens | any other tokens), one pass per token"
    )
    abilities: ClassVar[Abilities] = Abilities(True, True, False, False, False)
    texts_at_once: ClassVar[int | None] = 4

    def score(self, engine: Engine, queries: Sequence[Query]) -> list[list[float]]:
        """Score queries, with one pass per asked token.

        The input of a pass is built on the device: the text, with MASK for every asked token whose rank among the asked
        ones is not below the number of the pass. So nothing is transferred, or waited for, between passes over texts of
        the same lengths.
        """
        import torch

        from acgpt.engine.score import check_numbers, target_log_probs
        from acgpt.methods import masked

        model, bos, mask = engine.model, engine.bos, self.mask(engine.mask)
        assert mask is not None
        if not queries:
            return []
        parts = [masked.parts(query, bos=bos, mask=mask) for query in queries]
        counts = [len(asked) for _, asked, _ in parts]
        lengths = np.array([len(text) for text, _, _ in parts])
        ranks = [np.full(length, -1) for length in lengths]  # given and unknown tokens come before all asked ones
        complete = [text.copy() for text, _, _ in parts]
        for text_ranks, text, (_, asked, tokens) in zip(ranks, complete, parts, strict=True):
            text_ranks[asked], text[asked] = np.arange(len(asked)), tokens

        def on_device(*arrays: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(model.device)

        rank, ids = on_device(*ranks), on_device(*complete)  # of all queries, concatenated
        owner = np.repeat(np.arange(len(queries)), counts)  # the query of each pass
        begin = on_device((lengths.cumsum() - lengths)[owner])
        turn = on_device(*map(np.arange, counts))
        position = on_device(*(asked for _, asked, _ in parts))
        target = on_device(*(tokens for _, _, tokens in parts))
        frame, results = None, []
        for group in masked.groups((lengths[owner] - 1).tolist(), engine.budget):
            batch = slice(group.start, group.stop)
            sizes = lengths[owner[batch]]
            if frame is None or frame.lengths != tuple(sizes):
                frame = masked.Frame(tuple(sizes.tolist()), bos=bos, backend=engine.backend, device=model.device)
                first = on_device(sizes.cumsum() - sizes)
                member = on_device(np.repeat(np.arange(len(sizes)), sizes))  # the pass of each slot
                offset = on_device(*map(np.arange, sizes))
            slot = begin[batch][member] + offset
            read = torch.where(rank[slot] < turn[batch][member], ids[slot], mask)
            results.append(target_log_probs(frame.logits(model, read, first + position[batch], mask), target[batch]))
        scores = torch.cat(results).cpu().double().numpy()
        check_numbers(scores)
        return [part.tolist() for part in np.split(scores, np.cumsum(counts)[:-1])]

    def plan(self, query: Query, sample: int, seed: int, future: bool) -> Plan:
        """Draw one token a turn, from left to right."""
        from acgpt.engine.decode import noise

        asked, given = np.array(query.asked_positions), np.array(query.given_positions, dtype=np.int64)
        reached = np.split(given, np.searchsorted(given, asked))[:-1]
        return [position[None] for position in asked], reached, noise(query, sample, seed)

    def lay_out(
        self,
        tokens: np.ndarray,
        roles: np.ndarray,
        rngs: Sequence[np.random.Generator],
        *,
        bos: int,
        mask: int | None,
    ) -> Layout:
        """Mask all tokens that are not given, and predict all asked tokens at once."""
        from acgpt.methods import masked

        assert mask is not None
        return masked.lay_out(tokens, roles != GIVEN, roles == ASKED, bos=bos, mask=mask)
