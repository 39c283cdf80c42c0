"""Training batches: texts of one length with sampled conditioning sets, packed in the layout of the method.

    corpus ──► chunks of T tokens ──► roles (seed, epoch, item) ──► packed arrays, ready for flash attention

The method lays out a text and its roles. The layout is that of `layout`, with two differences for torch.compile: all
texts run to their last slot, and all batches have the same shape. Copies and predictions are padded up to a *budget*
with a few dummy sequences (`Layout.padded`).

The number of copies varies from text to text, so padding would waste about 5 % of a step. Steps are therefore
*balanced*: the texts of an epoch are sorted by the size of their conditioning sets and cut into one stratum for each
text of a step. A step takes one random text from each stratum. Every text still comes once per epoch, in a random step,
and the total of a step is nearly constant. If a step consists of several batches, on several processes or accumulated,
its texts are dealt to them in a zigzag over the strata, so that the batches are balanced too: each is within one or two
percent of the budget.

Everything is a function of the seed: step i of a run has the same texts and conditioning sets for any number of batches
per step, workers, processes or restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from acgpt.data.corpus import Tokens
from acgpt.engine.attention import Segments
from acgpt.engine.layout import ALIGN, Budget, Layout, Sequences, lay_out
from acgpt.errors import InputError
from acgpt.methods import Method
from acgpt.methods.ac_gpt import AcGpt
from acgpt.query.conditioning import ASKED, Conditioning, Draw, Gaps, first_draws, generator
from acgpt.query.lengths import DISTANCE, length_question
from acgpt.query.passages import Passage

FORESEEN = 2**24  # maximum number of texts whose sizes are computed before a run, in about ten seconds
SLACK = 1.01  # ratio of the budget to the largest of these batches, if the run has more texts
SAMPLED = 2**11  # texts whose sets are drawn before a run, in about a second, if only bounds of their sizes are known
DEVIATIONS = 5  # standard deviations of a batch's tokens that the budget then has room for


@dataclass  # not frozen: torch.compile would then guard on every field
class Batch:
    """A training batch: the tensors of a layout, where each text begins in them, and counts for the record.

    The tensors are those of `Layout`. Padding is not counted.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    segments: Segments
    target_positions: Tensor | None = None
    weights: Tensor | None = None
    length_rows: Tensor | None = None
    length_targets: Tensor | None = None
    length_weights: Tensor | None = None
    asked: int = 0  # predicted tokens
    weight: float = 0.0  # of all predictions in the loss: one for each token, and that of each length
    slots: int = 0
    pairs: int = 0  # pairs of slots of which one reads the other

    @classmethod
    def of(cls, layout: Layout, *, longest: int, bos: int, budget: Budget | None = None) -> Batch:
        """Make a batch of a layout.

        Args:
            layout: The laid out texts.
            longest: Maximum number of copies, and of text slots, of a text.
            bos: Token id to pad with.
            budget: Shape to pad to.
        """
        copies, texts = np.array(layout.copies), np.array(layout.texts)
        asked = len(layout.rows) if layout.weights is None else round(float(layout.weights.double().sum()))
        full = layout if budget is None else layout.padded(budget, longest=longest, bos=bos)
        segments = Segments.of(full.copies, full.texts, torch.device("cpu"))
        return cls(
            full.ids,
            full.positions,
            full.rows,
            full.targets,
            replace(segments, longest=(longest, longest, 2 * longest)),  # the same for all batches
            full.target_positions,
            full.weights,
            full.length_rows,
            full.length_targets,
            full.length_weights,
            asked=asked,
            weight=asked + (0.0 if layout.length_weights is None else float(layout.length_weights.double().sum())),
            slots=int(copies.sum() + texts.sum()),
            pairs=int((copies * (copies + texts)).sum() + (texts * (texts + 1) // 2).sum()),
        )

    @property
    def layout(self) -> Layout:
        """The layout of these tensors."""
        copies, texts = (
            tuple(starts.diff().tolist()) for starts in (self.segments.copy_starts, self.segments.text_starts)
        )
        return Layout(self.ids, self.positions, copies, texts, self.rows, self.targets, ())  # what attention reads

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to each of its tensors."""

        def mapped(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {name: function(value) if isinstance(value, Tensor) else value for name, value in fields.items()}

        return Batch(**mapped(vars(self)) | {"segments": Segments(**mapped(vars(self.segments)))})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move the tensors to a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy the tensors to page-locked memory; the data loader calls it."""
        return self.map(Tensor.pin_memory)


class Batches(Dataset[Batch]):
    """The batches of a training run by number: those of step 0, those of step 1, and so on.

    Args:
        texts: The tokens of a split, cut into texts of one length.
        count: Number of batches of the run; they repeat the corpus as often as needed.
        size: Texts per batch.
        parts: Batches per step. Texts at the end of an epoch that do not fill a step are not used in that epoch.
        length: Tokens per text, T.
        conditioning: Distribution of the roles of a text's tokens.
        seed: Seed of the order of the texts and of their conditioning sets.
        bos: Token id at position 0.
        mask: Token id that stands for unknown tokens.
        fixed: Give all batches the same shape, for torch.compile.
        balance: Distribution whose sizes balance the steps. Default: `conditioning`. A causal twin passes that of the
            other run, so that it reads the same texts in the same order.
        method: The method, which lays out a text and its roles. Its random choices continue the generator of the roles,
            so they are a function of (seed, epoch, item) too.
        kinds: (V,) kinds of tokens, see `passages.token_kinds`; needed if `conditioning` has `Gaps`.
    """

    def __init__(
        self,
        texts: Tokens,
        *,
        count: int,
        size: int,
        parts: int = 1,
        length: int,
        conditioning: Conditioning,
        seed: int,
        bos: int,
        mask: int | None,
        fixed: bool,
        balance: Conditioning | None = None,
        method: Method | None = None,
        kinds: np.ndarray | None = None,
    ) -> None:
        self.method = AcGpt() if method is None else method
        self.balance = conditioning if balance is None else balance
        self.texts, self.count, self.size, self.parts, self.length = texts, count, size, parts, length
        self.conditioning, self.seed, self.bos, self.mask = conditioning, seed, bos, mask
        self.kinds = kinds
        self.cuts = any(isinstance(part, Gaps) for part in conditioning.parts)  # texts into passages
        self.longest = self.method.longest(length)  # copies, and text slots, that a text may have
        self.items = texts.chunks(length)
        self.step = size * parts  # texts
        self.per_epoch = self.items // self.step  # steps
        if not self.per_epoch:
            raise InputError(
                f"the corpus has {self.items} texts of {length} tokens, fewer than the {self.step} of one step: "
                "prepare more text, or reduce batch or length."
            )
        strata = np.arange(self.step).reshape(size, parts)
        strata[1::2] = strata[1::2, ::-1]
        self.strata = strata.T  # (parts, size) the strata of each batch of a step
        self._order: tuple[int, np.ndarray] | None = None
        self.budget = self.measure() if fixed else None

    def __len__(self) -> int:
        """Return the number of batches of the run."""
        return self.count

    def __getitem__(self, number: int) -> Batch:
        """Return batch `number`, from 0."""
        epoch, items = self.items_of(number)
        tokens = np.stack([self.texts.chunk(int(item), self.length) for item in items])
        rngs = [generator(self.seed, epoch, int(item)) for item in items]
        kinds = np.zeros_like(tokens, dtype=np.uint8) if self.kinds is None else self.kinds[tokens]
        draws = [self.conditioning.draw(kind, rng) for kind, rng in zip(kinds, rngs, strict=True)]
        if self.cuts:
            layout = lay_out_passages(
                tokens,
                draws,
                bos=self.bos,
                mask=self.mask,
                distance=DISTANCE,
                positions=self.length + 1,
                lengths=self.conditioning.asks_lengths,
            )
        else:  # methods go on with the generators
            roles = np.stack([draw.roles for draw in draws])
            layout = self.method.lay_out(tokens, roles, rngs, bos=self.bos, mask=self.mask)
        return Batch.of(layout, longest=self.longest, bos=self.bos, budget=self.budget)

    def items_of(self, number: int) -> tuple[int, np.ndarray]:
        """Return the epoch of batch `number` and the numbers of its texts."""
        step, part = divmod(number, self.parts)
        epoch, step_of_epoch = divmod(step, self.per_epoch)
        return epoch, self.order(epoch)[step_of_epoch, self.strata[part]]

    def roles(self, epoch: int, item: int) -> np.ndarray:
        """Return (T,) the roles of a text's tokens in an epoch."""
        return self.conditioning.roles(self.length, generator(self.seed, epoch, item))

    def sizes(self, epoch: int, conditioning: Conditioning | None = None) -> np.ndarray:
        """Return (items,) |x_c| of every text in an epoch; `conditioning` replaces that of the run."""
        _, sizes = (conditioning or self.conditioning).sizes(self.length, first_draws(self.seed, epoch, self.items))
        return sizes

    def order(self, epoch: int) -> np.ndarray:
        """Return (steps, texts per step) the texts of every step of an epoch, one from each stratum."""
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            items = rng.permutation(self.items)[: self.per_epoch * self.step]
            strata = items[np.argsort(self.sizes(epoch, self.balance)[items], kind="stable")].reshape(
                self.step, self.per_epoch
            )
            self._order = epoch, rng.permuted(strata, axis=1).T
        return self._order[1]

    def measure(self) -> Budget:
        """Return a shape with room for every batch of the run, whose sizes are known in advance.

        For a run of more than `FORESEEN` texts, only the first ones are measured, and `SLACK` is added. Where sets can
        be smaller than foreseen, the number of asked tokens is estimated from `SAMPLED` texts.
        """
        copies = asked = sequences = 0
        least, more = math.inf, 0.0
        epochs = math.ceil(self.count / (self.per_epoch * self.parts))
        foreseen = max(1, min(epochs, FORESEEN // self.items))
        for epoch in range(foreseen):
            order = self.order(epoch)[:, self.strata]  # (steps, parts, size)
            draws = first_draws(self.seed, epoch, self.items)
            asked_of = self.conditioning.asked(self.length, draws)
            if epoch == 0 and not self.conditioning.exact:
                items = range(min(self.items, SAMPLED))
                lost = [(self.roles(0, item) == ASKED).sum() - asked_of[item] for item in items]
                more = self.size * np.mean(lost) + DEVIATIONS * math.sqrt(self.size) * np.std(lost)
            passages = np.array(self.conditioning.passages)[self.conditioning.sizes(self.length, draws)[0]]
            sequences = max(sequences, int(passages[order].sum(-1).max()))
            room = self.method.room(self.length, self.sizes(epoch), asked_of)
            totals, predictions = (sizes[order].sum(-1) for sizes in room)
            copies, least = max(copies, int(totals.max())), min(least, int(totals.min()))
            asked = max(asked, min(int(predictions.max() + more), self.size * self.length))
        slack = 1.0 if foreseen == epochs else SLACK
        copies, asked = (math.ceil(most * slack / ALIGN) * ALIGN for most in (copies, asked))
        longest = self.longest
        if not self.cuts:
            return Budget(copies, asked, max(2, math.ceil((copies - least + more) / longest)))
        # Questions for lengths leave tokens out. So many dummies can take all copies and all text slots of a batch.
        texts, sequences = self.size * self.length, math.ceil(sequences * slack)
        dummies = max(2, math.ceil(copies / longest), math.ceil((texts + ALIGN) / (longest - 1)))
        lengths = sequences if self.conditioning.asks_lengths else 0
        return Budget(copies, asked, dummies, texts, sequences, lengths)


def lay_out_passages(
    tokens: np.ndarray,
    draws: Sequence[Draw],
    *,
    bos: int,
    mask: int | None,
    distance: int,
    positions: int,
    lengths: bool,
) -> Layout:
    """Lay out texts that may be cut into passages, with copies of the given tokens.

    Args:
        tokens: (B, T) token ids.
        draws: How each text is asked.
        bos: Id of the token at position 0.
        mask: Id of the token that stands for unknown tokens.
        distance: Width of gaps whose length is asked.
        positions: Number of positions of the network, BOS included.
        lengths: Whether the distribution asks for lengths at all. The layout then has an entry for them, even if it is
            empty, so that all batches are alike.
    """
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, float]] = []  # tokens, roles, places, stop, weight
    for text, draw in zip(tokens, draws, strict=True):
        everything = [Passage(0, len(text), ())] if draw.passages is None else draw.passages
        for passage, question in zip(everything, draw.questions or [None], strict=True):
            ids, roles = (array[passage.start : passage.end] for array in (text, draw.roles))
            if question is None:
                parts.append((ids, roles, np.arange(1, len(ids) + 1), len(ids), 0.0))
                continue
            inside = np.zeros(len(ids), dtype=bool)
            for first, count in passage.gaps:
                inside[first - passage.start : first - passage.start + count] = True
            outside = np.concatenate(([0], (~inside).cumsum()))  # tokens in no gap before each token
            asked = length_question(
                ids[~inside],
                roles[~inside],
                [int(outside[first - passage.start]) for first, _ in passage.gaps],
                [count for _, count in passage.gaps[:question]],
                distance=distance,
                positions=positions,
                length=passage.gaps[question][1],
            )
            parts.append((asked.tokens, asked.roles, asked.places, asked.at, draw.length_weight))
    ids, roles, places, stops, weights = zip(*parts, strict=True)
    sequences = Sequences(
        np.concatenate(ids), np.concatenate(roles), np.array([len(part) for part in ids]),
        places=np.concatenate(places), asks_length=np.array(weights) if lengths else None,
    )  # fmt: skip
    return lay_out(sequences, bos=bos, mask=mask, copies=True, stops=np.array(stops))
