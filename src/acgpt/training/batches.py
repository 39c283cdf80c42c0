"""Training batches: texts of one length, their conditioning sets drawn, packed as the layout wants them.

    corpus ──► chunks of T tokens ──► roles (seed, epoch, item) ──► packed arrays, ready for flash attention

How a text and its roles become slots is the method's to say (`slots`). AC-GPT's are those of `layout.build`, made from
arrays because a step of training has tens of thousands of tokens, and with two differences that torch.compile asks for.
All texts run to their last slot. And every batch has the same shape: copies and predictions are filled up to a *budget*
with a few dummy queries, which nothing else can see and which predict nothing; their keys are all read, so all
gradients are defined.

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
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from acgpt.errors import InputError
from acgpt.methods import Method
from acgpt.methods.ac_gpt import AcGpt
from acgpt.methods.slots import Slots, copies_and_text
from acgpt.query.conditioning import Conditioning, first_draws, generator

ALIGN = 128  # slots; matrix units like whole tiles
FORESEEN = 2**24  # texts whose sizes are looked at before a run: some ten seconds
SLACK = 1.01  # of the budget over the largest batch of those, if there are more
IGNORED = -100  # the target of a row that only fills up
COUNTS = ("asked", "slots", "pairs")  # what a batch says of itself, for the record


class Texts(Protocol):
    """Tokens cut into texts of one length; `corpus.Tokens` is one."""

    def chunks(self, length: int) -> int:
        """How many whole texts there are."""
        ...

    def chunk(self, number: int, length: int) -> np.ndarray:
        """(length,) the tokens of one of them."""
        ...


@dataclass(frozen=True)
class Budget:
    """The fixed shape of a batch: for how many copies and predictions there is room, and how many dummies fill it."""

    copies: int
    asked: int
    dummies: int = 2  # at least


def pack(
    tokens: np.ndarray, roles: np.ndarray, *, bos: int, mask: int | None, budget: Budget | None = None
) -> dict[str, Any]:
    """Lay out B texts of T tokens for one training step of AC-GPT; as `fill` of its slots.

    Args:
        tokens: (B, T) token ids.
        roles: (B, T) `GIVEN`, `ASKED` or `UNKNOWN`.
        bos: The token at position 0.
        mask: The token that stands for unknown ones.
        budget: As in `fill`.
    """
    slots = copies_and_text(tokens, roles, bos=bos, mask=mask)
    return fill(slots, longest=tokens.shape[1], bos=bos, budget=budget)


def fill(slots: Slots, *, longest: int, bos: int, budget: Budget | None = None) -> dict[str, Any]:
    """The slots of B texts as a batch of tensors.

    Args:
        slots: As a method lays them out.
        longest: No text has more copies than this, nor more text slots, and no dummy will.
        bos: The token of dummies.
        budget: Fill up to this shape. A batch that outgrows it gets the next larger one.

    Returns:
        What `learner.Learner` takes, by name; and, for the record, how many tokens are `asked`, how many `slots` run
        and how many `pairs` of slots of which one reads the other, dummies not counted.
    """
    n_copies, n_texts = slots.n_copies, slots.n_texts
    copy_ids, copy_positions, text_ids, text_positions = (
        slots.copy_ids, slots.copy_positions, slots.text_ids, slots.text_positions,
    )  # fmt: skip
    rows, targets, aims, weights = slots.rows, slots.targets, slots.aims, slots.weights
    if aims is not None and len(copy_ids):
        raise InputError("a batch whose slots are told what to predict has no copies.")

    if budget is not None:
        room = grow(budget.copies, len(copy_ids)), grow(budget.asked, len(rows))
        spare = room[0] - len(copy_ids)
        dummies = max(budget.dummies, math.ceil(spare / longest))
        # Their text slots, one each at least: keys that no text reads would have no gradient under flash attention.
        filling = dummies + -(len(text_ids) + dummies) % ALIGN
        dummies = max(dummies, math.ceil(filling / longest))
        n_copies, n_texts = (
            np.concatenate([lengths, extra // dummies + (np.arange(dummies) < extra % dummies)])
            for lengths, extra in ((n_copies, spare), (n_texts, filling))
        )
        rows = np.where(rows < len(copy_ids), rows, rows + spare)
        copy_ids, copy_positions = (np.pad(x, (0, spare)) for x in (copy_ids, copy_positions))
        text_ids = np.pad(text_ids, (0, filling), constant_values=bos)
        text_positions = np.pad(text_positions, (0, filling))
        aims = None if aims is None else np.pad(aims, (0, filling))
        more = (0, room[1] - len(rows))
        rows, targets = (
            np.pad(x, more, constant_values=empty) for x, empty in ((rows, len(copy_ids)), (targets, IGNORED))
        )
        weights = None if weights is None else np.pad(weights, more)

    starts = [np.concatenate([[0], lengths.cumsum()]) for lengths in (n_copies, n_texts, n_copies + n_texts)]
    copy_starts, text_starts, key_starts = starts
    total = len(copy_ids) + len(text_ids)
    homes = np.arange(total)  # where a slot stands once the batch is sorted query by query
    homes[: len(copy_ids)] += np.repeat((key_starts - copy_starts)[:-1], n_copies)
    homes[len(copy_ids) :] += np.repeat((key_starts - text_starts)[:-1] + n_copies - len(copy_ids), n_texts)
    keys = np.empty(total, dtype=np.int64)
    keys[homes] = np.arange(total)

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

    batch = {
        "ids": tensor(np.concatenate([copy_ids, text_ids])),
        "positions": tensor(np.concatenate([copy_positions, text_positions])),
        "rows": tensor(rows),
        "targets": tensor(targets),
        "copy_starts": tensor(copy_starts, torch.int32),
        "text_starts": tensor(text_starts, torch.int32),
        "key_starts": tensor(key_starts, torch.int32),
        "keys": tensor(keys),
        "homes": tensor(homes),
        "copies": len(copy_ids),
        "asked": slots.asked,
        "slots": int(slots.n_copies.sum() + slots.n_texts.sum()),
        "pairs": int((slots.n_copies * (slots.n_copies + slots.n_texts)).sum())
        + int((slots.n_texts * (slots.n_texts + 1) // 2).sum()),
    }
    if aims is not None:
        batch["aims"] = tensor(aims)
    if weights is not None:
        batch["weights"] = tensor(weights, torch.float32)
    return batch


def grow(budget: int, needed: int) -> int:
    """The budget; or, for the rare batch that outgrows it, the next multiple of 1,024."""
    return budget if needed <= budget else -(-needed // 1024) * 1024


class Batches(Dataset[dict[str, Any]]):
    """The batches of a training run, by number: those of step 0, those of step 1, and so on.

    Args:
        texts: Where the texts come from.
        count: How many batches the run takes; they go round the corpus as often as that needs.
        size: Texts in a batch.
        parts: How many batches make a step. What is left of an epoch when it no longer fills a step is not read in it.
        length: Tokens in a text, T.
        conditioning: How the roles of a text's tokens are drawn.
        seed: Of the order of the texts and of their conditioning sets.
        bos: As in `pack`.
        mask: As in `pack`.
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

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Batch `number`, from 0."""
        epoch, items = self.items_of(number)
        tokens = np.stack([self.texts.chunk(int(item), self.length) for item in items])
        rngs = [generator(self.seed, epoch, int(item)) for item in items]
        roles = np.stack([self.conditioning.roles(self.length, rng) for rng in rngs])
        slots = self.method.lay_out(tokens, roles, rngs, bos=self.bos, mask=self.mask)
        return fill(slots, longest=self.method.longest(self.length), bos=self.bos, budget=self.budget)

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
