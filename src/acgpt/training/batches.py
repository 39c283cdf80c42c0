"""Training batches: texts of one length, their conditioning sets drawn, packed as the layout wants them.

    corpus ──► chunks of T tokens ──► roles (seed, epoch, item) ──► packed arrays, ready for flash attention

How a text and its roles are laid out is the method's to say; the layout is that of `layout`, with two differences that
torch.compile asks for. All texts run to their last slot. And every batch has the same shape: copies and predictions are
filled up to a *budget* with a few dummy sequences (`Layout.padded`).

Filling up would waste some 5 % of a step, as the number of copies varies from text to text. So steps are *balanced*:
an epoch's texts are sorted by the size of their sets and cut into as many strata as a step has texts; a step takes
one text, at random, from each. Every text still comes once an epoch in a random step, and a step's total is now nearly
constant. A step that is run in several batches, on several processes or one after the other, is dealt out like cards,
to and fro, so that they are balanced too: the budget lies within a percent or two of each.

Everything is a function of the seed: step number i of a run has the same texts and sets whatever the number of
batches it is run in, of workers, processes or restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from acgpt.engine.attention import Segments
from acgpt.engine.layout import ALIGN, Budget, Layout
from acgpt.errors import InputError
from acgpt.methods import Method
from acgpt.methods.ac_gpt import AcGpt
from acgpt.query.conditioning import Conditioning, first_draws, generator

FORESEEN = 2**24  # texts whose sizes are looked at before a run: some ten seconds
SLACK = 1.01  # of the budget over the largest batch of those, if there are more


class Texts(Protocol):
    """Tokens cut into texts of one length; `corpus.Tokens` is one."""

    def chunks(self, length: int) -> int:
        """How many whole texts there are."""
        ...

    def chunk(self, number: int, length: int) -> np.ndarray:
        """(length,) the tokens of one of them."""
        ...


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
    asked: int = 0  # predicted tokens
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
            asked=len(layout.rows) if layout.weights is None else round(float(layout.weights.double().sum())),
            slots=int(copies.sum() + texts.sum()),
            pairs=int((copies * (copies + texts)).sum() + (texts * (texts + 1) // 2).sum()),
        )

    @property
    def layout(self) -> Layout:
        """The layout of these tensors."""
        copies, texts = (
            tuple(starts.diff().tolist()) for starts in (self.segments.copy_starts, self.segments.text_starts)
        )
        return Layout(self.ids, self.positions, copies, texts, self.rows, self.targets, ())

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to each of its tensors."""

        def mapped(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {name: function(value) if isinstance(value, Tensor) else value for name, value in fields.items()}

        return Batch(**mapped(vars(self)) | {"segments": Segments(**mapped(vars(self.segments)))})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move the tensors to a device; Accelerate calls it."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy the tensors to page-locked memory; the data loader calls it."""
        return self.map(Tensor.pin_memory)


class Batches(Dataset[Batch]):
    """The batches of a training run, by number: those of step 0, those of step 1, and so on.

    Args:
        texts: Where the texts come from.
        count: How many batches the run takes; they go round the corpus as often as that needs.
        size: Texts in a batch.
        parts: How many batches make a step. What is left of an epoch when it no longer fills a step is not read in it.
        length: Tokens in a text, T.
        conditioning: How the roles of a text's tokens are drawn.
        seed: Of the order of the texts and of their conditioning sets.
        bos: The token at position 0.
        mask: The token that stands for unknown ones.
        fixed: Give all batches one shape, for torch.compile.
        balance: The distribution by whose sizes texts are dealt to batches; by default `conditioning`. A causal twin
            names the other's, and reads the same texts in the same order.
        method: How a text and its roles are laid out. What it draws is a function of (seed, epoch, item), as the roles
            are: it goes on where their generator stopped.
    """

    def __init__(
        self,
        texts: Texts,
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
    ) -> None:
        self.method = AcGpt() if method is None else method
        self.balance = conditioning if balance is None else balance
        self.texts, self.count, self.size, self.parts, self.length = texts, count, size, parts, length
        self.conditioning, self.seed, self.bos, self.mask = conditioning, seed, bos, mask
        self.items = texts.chunks(length)
        self.step = size * parts  # texts
        self.per_epoch = self.items // self.step  # steps
        if not self.per_epoch:
            raise InputError(
                f"the corpus has {self.items} texts of {length} tokens, fewer than the {self.step} of one step: "
                "prepare more text, or lower batch or length."
            )
        cards = np.arange(self.step).reshape(size, parts)
        cards[1::2] = cards[1::2, ::-1]
        self.deal = cards.T  # (parts, size) which strata of a step each of its batches gets
        self._order: tuple[int, np.ndarray] | None = None
        self.budget = self.measure() if fixed else None

    def __len__(self) -> int:
        """The number of batches in the run."""
        return self.count

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, from 0."""
        epoch, items = self.items_of(number)
        tokens = np.stack([self.texts.chunk(int(item), self.length) for item in items])
        rngs = [generator(self.seed, epoch, int(item)) for item in items]
        roles = np.stack(
            [self.conditioning.roles(self.length, rng) for rng in rngs]
        )  # methods go on with the generators
        layout = self.method.lay_out(tokens, roles, rngs, bos=self.bos, mask=self.mask)
        return Batch.of(layout, longest=self.method.longest(self.length), bos=self.bos, budget=self.budget)

    def items_of(self, number: int) -> tuple[int, np.ndarray]:
        """The epoch of batch `number`, and the numbers of its texts."""
        step, part = divmod(number, self.parts)
        epoch, place = divmod(step, self.per_epoch)
        return epoch, self.order(epoch)[place, self.deal[part]]

    def roles(self, epoch: int, item: int) -> np.ndarray:
        """(T,) the roles of a text's tokens in an epoch."""
        return self.conditioning.roles(self.length, generator(self.seed, epoch, item))

    def sizes(self, epoch: int, conditioning: Conditioning | None = None) -> np.ndarray:
        """(items,) |x_c| of every text in an epoch; as another distribution would draw it, if one is named."""
        _, sizes = (conditioning or self.conditioning).sizes(self.length, first_draws(self.seed, epoch, self.items))
        return sizes

    def order(self, epoch: int) -> np.ndarray:
        """(steps, texts of one) the texts of every step of an epoch, one from each stratum."""
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            items = rng.permutation(self.items)[: self.per_epoch * self.step]
            strata = items[np.argsort(self.sizes(epoch, self.balance)[items], kind="stable")].reshape(
                self.step, self.per_epoch
            )
            self._order = epoch, rng.permuted(strata, axis=1).T
        return self._order[1]

    def measure(self) -> Budget:
        """A shape with room for every batch of the run: all their sizes are known beforehand.

        A run of more than `FORESEEN` texts is measured by its first ones, with some room to spare.
        """
        copies = asked = 0
        least = math.inf
        epochs = math.ceil(self.count / (self.per_epoch * self.parts))
        foreseen = max(1, min(epochs, FORESEEN // self.items))
        for epoch in range(foreseen):
            order = self.order(epoch)[:, self.deal]  # (steps, parts, size)
            asked_of = self.conditioning.asked(self.length, first_draws(self.seed, epoch, self.items))
            room = self.method.room(self.length, self.sizes(epoch), asked_of)
            totals, left = (each[order].sum(-1) for each in room)
            copies, least = max(copies, int(totals.max())), min(least, int(totals.min()))
            asked = max(asked, int(left.max()))
        slack = 1.0 if foreseen == epochs else SLACK
        copies, asked = (math.ceil(most * slack / ALIGN) * ALIGN for most in (copies, asked))
        return Budget(copies, asked, max(2, math.ceil((copies - least) / self.method.longest(self.length))))
