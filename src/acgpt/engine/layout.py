"""The layout: what a causal Transformer is shown so that it answers p(asked | given) in one forward pass.

    query    The  [cat]  [sat]  on   the        given: The, on, the   asked: [cat], [sat]

    slot      copies        | BOS and text
    token     The  on  the  | BOS   The   cat
    position   1    4   5   |  0     1     2
    sees      all copies    | all copies, and the text up to itself
    predicts   –    –   –   |  –    cat   sat

A copy carries the position of its original, sees every copy and nothing else, so nothing of the asked tokens can
travel through it. BOS and the text see all copies and, causally, themselves. When a model is asked, the text is run
only as far as the last prediction needs it; in training, to its end. With nothing given this is a plain causal
language model.

These two kinds of slots carry all methods, in training as in answering, and the attention backends know no others:

                 copies                            text                             predicts
    GPT          –                                 BOS, x                           the next token, at the text
    AC-GPT       what is given                     BOS, x                           the next token, at the text
    σ-GPT        –                                 BOS, then x in another order     the token at the position it is told
    FIM          –                                 BOS, prefix, suffix, middle      the next token, at the text
    MLM,         BOS and x, what is asked masked   at most one that nobody reads    its own token, at the copies
    diffusion

A batch is packed end to end, `[copies of all queries | texts of all queries]`, so there is no padding anywhere outside
the attention; the backends in `attention` know where each query begins.

Shape legend, here and in `attention`: B queries, C copies and L text slots in the batch, N = C + L, A predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acgpt.errors import QueryError
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN
from acgpt.query.query import Query

ALIGN = 128  # slots; matrix units like whole tiles
IGNORED = -100  # the target of a prediction that only fills up


@dataclass(frozen=True)
class Budget:
    """The fixed shape of a training batch.

    Args:
        copies: Slots for copies.
        asked: Predictions.
        dummies: The least number of dummy sequences that fill it up.
    """

    copies: int
    asked: int
    dummies: int = 2


@dataclass(frozen=True)
class Layout:
    """A packed batch: the model's inputs, who sees whom, and where the predictions come out."""

    ids: Tensor  # (N,) token ids
    positions: Tensor  # (N,) position ids; BOS is 0, the text counts from 1
    copies: tuple[int, ...]  # (B) how many copies each query has
    texts: tuple[int, ...]  # (B) how many text slots each query has, BOS included
    rows: Tensor  # (A,) the slots that predict, query by query, left to right
    targets: Tensor  # (A,) the token ids they predict; -1 where the token is still to be sampled
    asked: tuple[int, ...]  # (B) how many of those A belong to each query
    target_positions: Tensor | None = None  # (N,) the position each slot predicts, for networks that are told
    weights: Tensor | None = None  # (A,) of each prediction in the training loss; by default 1

    def to(self, device: torch.device) -> Layout:
        """The same layout with its tensors on `device`."""

        def moved(tensor: Tensor) -> Tensor:
            return upload(tensor.numpy(), device) if tensor.device.type == "cpu" else tensor.to(device)

        tensors = {name: moved(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Layout(**(vars(self) | tensors))

    def inputs(self) -> tuple[Tensor, Tensor]:
        """(1, N) token ids and (1, N) position ids, as a model takes them."""
        return self.ids[None], self.positions[None]

    @property
    def target_position_ids(self) -> Tensor | None:
        """(1, N) the target positions, as a model takes them."""
        return None if self.target_positions is None else self.target_positions[None]

    def rectangle(self) -> tuple[np.ndarray, np.ndarray]:
        """The batch as a rectangle, a query a row, `[copies | text | padding]`.

        Returns:
            (B, S) the slot of the packed batch that each cell holds (padding repeats the row's last one), and
            (B, S) which cells are no padding.
        """
        copies, texts = np.array(self.copies)[:, None], np.array(self.texts)[:, None]
        slot = np.arange((copies + texts).max())
        copy_start, text_start = copies.cumsum(0) - copies, texts.cumsum(0) - texts + copies.sum()
        text = np.where(texts > 0, text_start + np.minimum(slot - copies, texts - 1), copy_start + copies - 1)
        return np.where(slot < copies, copy_start + slot, text), slot < copies + texts

    def padded(self, budget: Budget, *, longest: int, bos: int) -> Layout:
        """Fill the batch up to a fixed shape, which torch.compile asks for.

        A few dummy sequences are added, which nothing else can see and which predict nothing. Every key is read by
        some text slot, so that all gradients are defined.

        Args:
            budget: The shape. A batch that outgrows it gets the next larger one.
            longest: No sequence has more copies than this, nor more text slots, and no dummy will.
            bos: The token of dummies.
        """
        copies, texts, predictions = sum(self.copies), sum(self.texts), len(self.rows)
        room = grow(budget.copies, copies), grow(budget.asked, predictions)
        spare = room[0] - copies
        dummies = max(budget.dummies, math.ceil(spare / longest))
        # Their text slots, one each at least: keys that no text reads would have no gradient under flash attention.
        filling = dummies + -(texts + dummies) % ALIGN
        dummies = max(dummies, math.ceil(filling / longest))

        def slots(tensor: Tensor, filler: int) -> Tensor:
            return torch.cat(
                [tensor[:copies], tensor.new_zeros(spare), tensor[copies:], tensor.new_full((filling,), filler)]
            )

        def predicted(tensor: Tensor, filler: int) -> Tensor:
            return torch.cat([tensor, tensor.new_full((room[1] - predictions,), filler)])

        def shared(total: int) -> tuple[int, ...]:
            return tuple(total // dummies + (number < total % dummies) for number in range(dummies))

        return Layout(
            ids=slots(self.ids, bos),
            positions=slots(self.positions, 0),
            copies=self.copies + shared(spare),
            texts=self.texts + shared(filling),
            rows=predicted(torch.where(self.rows < copies, self.rows, self.rows + spare), room[0]),
            targets=predicted(self.targets, IGNORED),
            asked=self.asked + (0,) * dummies,
            target_positions=None if self.target_positions is None else slots(self.target_positions, 0),
            weights=None if self.weights is None else predicted(self.weights, 0),
        )


def grow(budget: int, needed: int) -> int:
    """The budget; or, for the rare batch that outgrows it, the next multiple of 1,024."""
    return budget if needed <= budget else -(-needed // 1024) * 1024


@dataclass(frozen=True)
class Sequences:
    """B token sequences end to end, with a role for every token: what is laid out.

    Args:
        tokens: (T) token ids, T in all; -1 where a token is still to be sampled.
        roles: (T) `GIVEN`, `ASKED` or `UNKNOWN`.
        lengths: (B,) the number of tokens of each.
        positions: (T) the position of each token, from 1, where a method reads them in another order than the text's.
    """

    tokens: np.ndarray
    roles: np.ndarray
    lengths: np.ndarray
    positions: np.ndarray | None = None

    @classmethod
    def of(cls, queries: Sequence[Query], positions: Sequence[np.ndarray] | None = None) -> Sequences:
        """The sequences of queries; `positions`, for each query, as above."""
        return cls(
            np.concatenate([query.ids for query in queries]),
            np.concatenate([query.roles for query in queries]),
            np.array([len(query) for query in queries]),
            None if positions is None else np.concatenate(positions),
        )

    @classmethod
    def rows(cls, tokens: np.ndarray, roles: np.ndarray, positions: np.ndarray | None = None) -> Sequences:
        """The rows of (B, T) arrays as sequences."""
        count, length = tokens.shape
        own = None if positions is None else positions.ravel()
        return cls(tokens.ravel(), roles.ravel(), np.full(count, length), own)


def lay_out(
    sequences: Sequences, *, bos: int, mask: int | None, copies: bool, stops: np.ndarray | None = None
) -> Layout:
    """Lay out a batch: copies of what is given, BOS, and the text.

    Args:
        sequences: The texts. If they have positions of their own, each slot is told the position of the next token.
        bos: Id of the beginning-of-sequence token, at position 0.
        mask: Id of the token that stands for unknown ones; needed only if there are any.
        copies: Copy the given tokens, so that every prediction sees all of them. If false, a prediction sees what
            stands before it.
        stops: (B,) the position of the last token that each sequence predicts, where its text ends; by default the
            end.

    Raises:
        QueryError: Tokens are unknown, and there is no MASK.
    """
    if copies and sequences.positions is not None:
        raise QueryError("a text in an order of its own is read in that order: it has no copies.")
    tokens, roles, lengths = sequences.tokens, sequences.roles, sequences.lengths
    stops = lengths if stops is None else stops
    owners = np.repeat(np.arange(len(lengths)), lengths)  # (T) whose a token is
    places = np.arange(len(tokens)) - (lengths.cumsum() - lengths)[owners] + 1  # (T) from 1, in its sequence
    positions = places if sequences.positions is None else sequences.positions
    ends = stops[owners]

    unknown = roles == UNKNOWN
    if unknown.any():
        if mask is None:
            raise QueryError(
                "the query has unknown tokens (neither given nor asked), which are fed as the model's MASK token, and "
                "this model names none. Ask for those tokens or give them, or name a token with LanguageModel(…, "
                "mask=ID)."
            )
        tokens = np.where(unknown, mask, tokens)
    copied = (roles == GIVEN) if copies else np.zeros(len(tokens), dtype=bool)
    n_copies = np.bincount(owners[copied], minlength=len(lengths))

    # x_p is predicted at slot p - 1, so slots 0 … stop - 1 are run: BOS and the tokens before the last prediction.
    starts = stops.cumsum() - stops
    text_ids, text_positions = np.full(stops.sum(), bos), np.zeros(stops.sum(), dtype=np.int64)
    read = places < ends
    slot = starts[owners] + places  # of each token that is read, in the text
    text_ids[slot[read]], text_positions[slot[read]] = tokens[read], positions[read]
    predicted = (roles == ASKED) & (places <= ends)
    told = None if sequences.positions is None else positions[places <= ends]

    def joined(*parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return Layout(
        ids=joined(tokens[copied], text_ids),
        positions=joined(positions[copied], text_positions),
        copies=tuple(n_copies.tolist()),
        texts=tuple(stops.tolist()),
        rows=joined(int(copied.sum()) + slot[predicted] - 1),
        targets=joined(tokens[predicted]),
        asked=tuple(np.bincount(owners[predicted], minlength=len(lengths)).tolist()),
        target_positions=None if told is None else joined(told),
    )


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on `device`. The host does not wait for a GPU that has other things to do yet.

    Nor for threads of its own: numpy copies so little in one, where torch would share it out among many.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def download(tensor: Tensor) -> Callable[[], Tensor]:
    """A tensor on the host, as it is now, to be had when it is asked for: a GPU goes on to what comes next."""
    if tensor.device.type != "cuda":
        copy = tensor.to("cpu", copy=True)
        return lambda: copy
    there, copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
    there.copy_(tensor, non_blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return there

    return wait


def batches(
    queries: Mapping[int, Query], budget: int, future: bool, *, first_only: bool = False, packed: bool = False
) -> list[list[int]]:
    """Group numbered queries, the longest first, so that a group's rectangle stays within `budget` cells.

    Args:
        queries: The questions, by number.
        budget: In cells; a query that is longer has a group of its own.
        future: As in `build`.
        first_only: Likewise.
        packed: Nobody makes a rectangle of the group: padding does not count.
    """

    def slots(number: int) -> int:
        query = queries[number]
        return int(query.asked_at[0 if first_only else -1]) + (len(query.given_at) if future else 0)

    groups: list[list[int]] = []
    size = {number: slots(number) for number in queries}
    cells = 0  # of the last group
    for number in sorted(queries, key=lambda number: -size[number]):
        cells += size[number] if packed or not groups else size[groups[-1][0]]
        if groups and cells <= budget:
            groups[-1].append(number)
        else:
            groups.append([number])
            cells = size[number]
    return groups


def build(
    queries: Sequence[Query],
    *,
    bos: int,
    mask: int | None,
    future: bool,
    first_only: bool = False,
    orders: Sequence[np.ndarray] | None = None,
) -> Layout:
    """Lay out a batch of queries, each no further than its last prediction needs.

    Args:
        queries: The questions, of any lengths.
        bos: As in `lay_out`.
        mask: As in `lay_out`.
        future: Copy the given tokens, so that every prediction sees all of them. If false nothing is copied and the
            text is read left to right: a prediction sees what stands before it.
        first_only: Predict each query's first asked token only, and run the text no further: the prefill of sampling.
        orders: For queries whose tokens stand in another order than that of the text: for each, the positions of its
            tokens. Each slot is then told the position of the token after it. Without copies only.
    """
    stops = np.array([query.asked_at[0 if first_only else -1] for query in queries])
    return lay_out(Sequences.of(queries, orders), bos=bos, mask=mask, copies=future, stops=stops)


def body_tokens(query: Query, mask: int | None) -> np.ndarray:
    """The text as the model reads it: unknown tokens are MASK, tokens to be sampled are -1 until they are."""
    if not query.has_unknown:
        return query.ids
    assert mask is not None  # else the query could not be laid out
    return np.where(query.roles == UNKNOWN, mask, query.ids)


def visible(copies: Tensor, slots: int) -> Tensor:
    """The whole mask: may query slot q read key slot k? Slots are counted within one sequence, copies first.

    Causal attention everywhere, and a copy is seen by all.

    Args:
        copies: (B,) the number of copies of each sequence.
        slots: S, the number of slots to draw.

    Returns:
        (B, S, S) booleans, [b, q, k].
    """
    slot = torch.arange(slots, device=copies.device)
    is_copy = slot < copies[:, None]  # (B, S)
    return is_copy[:, None, :] | (slot <= slot[:, None])
