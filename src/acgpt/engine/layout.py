"""The layout: the input of a causal Transformer that makes it compute p(asked | given) in one forward pass.

    query    The  [cat]  [sat]  on   the        given: The, on, the   asked: [cat], [sat]

    slot      copies        | BOS and text
    token     The  on  the  | BOS   The   cat
    position   1    4   5   |  0     1     2
    sees      all copies    | all copies, and the text up to itself
    predicts   –    –   –   |  –    cat   sat

A copy has the position of its original. It attends to the copies and to nothing else, so no information about asked
tokens can pass through it. BOS and the text attend to all copies and, causally, to the text. For queries, the text is
run only as far as the last prediction needs it; in training, to its end. With nothing given this is a plain causal
language model.

All methods use these two kinds of slots, in training and for queries, and the attention backends know no others:

                 copies                            text                             predicts
    GPT          –                                 BOS, x                           the next token, at the text
    AC-GPT       what is given                     BOS, x                           the next token, at the text
    σ-GPT        –                                 BOS, then x in another order     the token at its target position
    FIM          –                                 BOS, prefix, suffix, middle      the next token, at the text
    MLM,         BOS and x, asked tokens masked    at most one, which is not read   its own token, at the copies
    diffusion

A batch is packed end to end, `[copies of all queries | texts of all queries]`, so there is no padding outside
attention. The backends in `attention` know where each query begins.

Shape legend, here and in `attention`: B queries, C copies and L text slots in the batch, N = C + L, A predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acgpt.errors import QueryError
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN
from acgpt.query.lengths import LengthQuestion
from acgpt.query.query import Query

ALIGN = 128  # slots; matrix units work on whole tiles
IGNORED = -100  # target of a padding prediction


@dataclass(frozen=True)
class Budget:
    """The fixed shape of a training batch.

    Args:
        copies: Number of slots for copies.
        asked: Number of predicted tokens.
        dummies: Minimum number of dummy sequences, which fill the batch up.
        texts: Number of text slots, for batches in which it varies. Default: that of the batch.
        sequences: Number of sequences without the dummies, for batches in which it varies. Default: that of the batch.
        lengths: Number of predicted lengths of gaps.
    """

    copies: int
    asked: int
    dummies: int = 2
    texts: int = 0
    sequences: int = 0
    lengths: int = 0


@dataclass(frozen=True)
class Layout:
    """A packed batch: the model's inputs, the segments of the attention mask, and the slots that predict."""

    ids: Tensor  # (N,) token ids
    positions: Tensor  # (N,) position ids; BOS is 0, the text counts from 1
    copies: tuple[int, ...]  # (B) number of copies of each query
    texts: tuple[int, ...]  # (B) number of text slots of each query, BOS included
    rows: Tensor  # (A,) slots that predict, query by query, left to right
    targets: Tensor  # (A,) token ids to predict; -1 where the token is to be sampled
    asked: tuple[int, ...]  # (B) number of predictions of each query
    target_positions: Tensor | None = None  # (N,) position that each slot predicts, for σ-GPT networks
    weights: Tensor | None = None  # (A,) weight of each prediction in the training loss; default 1
    length_rows: Tensor | None = None  # (G,) slots that predict the length of a gap
    length_targets: Tensor | None = None  # (G,) these lengths, see `query.lengths`
    length_weights: Tensor | None = None  # (G,) weight of each length in the training loss

    def to(self, device: torch.device) -> Layout:
        """Return the layout with its tensors on `device`."""

        def moved(tensor: Tensor) -> Tensor:
            return upload(tensor.numpy(), device) if tensor.device.type == "cpu" else tensor.to(device)

        tensors = {name: moved(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Layout(**(vars(self) | tensors))

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return (1, N) token ids and (1, N) position ids, as a model takes them."""
        return self.ids[None], self.positions[None]

    @property
    def target_position_ids(self) -> Tensor | None:
        """The (1, N) target positions, as a model takes them."""
        return None if self.target_positions is None else self.target_positions[None]

    def rectangle(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the batch as a rectangle with one query per row, `[copies | text | padding]`.

        Returns:
            (B, S) the slot of the packed batch in each cell (padding repeats the row's last slot), and (B, S) booleans,
            true for cells that are not padding.
        """
        copies, texts = np.array(self.copies)[:, None], np.array(self.texts)[:, None]
        slot = np.arange((copies + texts).max())
        copy_start, text_start = copies.cumsum(0) - copies, texts.cumsum(0) - texts + copies.sum()
        text = np.where(texts > 0, text_start + np.minimum(slot - copies, texts - 1), copy_start + copies - 1)
        return np.where(slot < copies, copy_start + slot, text), slot < copies + texts

    def padded(self, budget: Budget, *, longest: int, bos: int) -> Layout:
        """Pad the batch to a fixed shape, as torch.compile needs it.

        A few dummy sequences are added. Nothing else attends to them, and they predict nothing. Every key is read by
        some text slot, so that all gradients are defined.

        Args:
            budget: The shape. A batch that exceeds it gets the next larger shape, see `grow`.
            longest: Upper bound of the copies of a sequence and of its text slots, dummies included.
            bos: Token id that fills the dummies.
        """
        copies, texts, predictions = sum(self.copies), sum(self.texts), len(self.rows)
        room = grow(budget.copies, copies), grow(budget.asked, predictions)
        spare = room[0] - copies
        missing = max(0, budget.texts - texts)  # text slots
        empty = max(0, budget.sequences - len(self.copies))  # sequences of no slots, so that their number is fixed
        dummies = max(budget.dummies, math.ceil(spare / longest))
        # Each dummy has at least one text slot: flash attention leaves gradients of keys that no text reads undefined.
        filling = missing + dummies + -(texts + missing + dummies) % ALIGN
        dummies = max(dummies, math.ceil(filling / longest))

        def slots_padded(tensor: Tensor, filler: int) -> Tensor:
            return torch.cat(
                [tensor[:copies], tensor.new_zeros(spare), tensor[copies:], tensor.new_full((filling,), filler)]
            )

        def predictions_padded(tensor: Tensor, filler: int) -> Tensor:
            return torch.cat([tensor, tensor.new_full((room[1] - predictions,), filler)])

        def split(total: int) -> tuple[int, ...]:
            return tuple(total // dummies + (number < total % dummies) for number in range(dummies))

        def lengths_padded(tensor: Tensor | None, shift: int, filler: int) -> Tensor | None:
            if tensor is None:
                return None
            unused = budget.lengths - len(tensor)
            return torch.cat([tensor + shift, tensor.new_full((unused,), filler)]) if unused > 0 else tensor + shift

        return Layout(
            ids=slots_padded(self.ids, bos),
            positions=slots_padded(self.positions, 0),
            copies=self.copies + (0,) * empty + split(spare),
            texts=self.texts + (0,) * empty + split(filling),
            rows=predictions_padded(torch.where(self.rows < copies, self.rows, self.rows + spare), room[0]),
            targets=predictions_padded(self.targets, IGNORED),
            asked=self.asked + (0,) * (empty + dummies),
            target_positions=None if self.target_positions is None else slots_padded(self.target_positions, 0),
            weights=None if self.weights is None else predictions_padded(self.weights, 0),
            length_rows=lengths_padded(self.length_rows, spare, room[0]),
            length_targets=lengths_padded(self.length_targets, 0, IGNORED),
            length_weights=lengths_padded(self.length_weights, 0, 0),
        )


def grow(budget: int, needed: int) -> int:
    """Return the budget; if a batch needs more, which is rare, the next multiple of 1,024."""
    return budget if needed <= budget else -(-needed // 1024) * 1024


@dataclass(frozen=True)
class Sequences:
    """B token sequences end to end with a role for every token: the input of `lay_out`.

    Args:
        tokens: (T) token ids, T in all; -1 where a token is to be sampled.
        roles: (T) `GIVEN`, `ASKED` or `UNKNOWN`.
        lengths: (B,) number of tokens of each sequence.
        positions: (T) position of each token, from 1, if a method reads them in another order than the text's.
        places: (T) position of each token, if some are skipped, as gaps without tokens are.
        asks_length: (B,) weights of lengths in the training loss; 0 for a sequence that asks tokens. In others the only
            asked token stands for a gap, and is the gap's length.
        starts: (B,) token at position 0 of each sequence; -1 for BOS. Default: BOS.
    """

    tokens: np.ndarray
    roles: np.ndarray
    lengths: np.ndarray
    positions: np.ndarray | None = None
    places: np.ndarray | None = None
    asks_length: np.ndarray | None = None
    starts: np.ndarray | None = None

    @classmethod
    def of(cls, queries: Sequence[Query], positions: Sequence[np.ndarray] | None = None) -> Sequences:
        """Return the sequences of queries; `positions` has those of each query's tokens."""
        return cls(
            np.concatenate([query.ids for query in queries]),
            np.concatenate([query.roles for query in queries]),
            np.array([len(query) for query in queries]),
            None if positions is None else np.concatenate(positions),
            starts=np.array([-1 if query.start is None else query.start for query in queries]),
        )

    @classmethod
    def of_lengths(cls, questions: Sequence[LengthQuestion]) -> Sequences:
        """Return the sequences of questions for lengths of gaps."""
        return cls(
            np.concatenate([question.tokens for question in questions]),
            np.concatenate([question.roles for question in questions]),
            np.array([len(question) for question in questions]),
            places=np.concatenate([question.places for question in questions]),
            asks_length=np.ones(len(questions)),
        )

    @classmethod
    def rows(cls, tokens: np.ndarray, roles: np.ndarray, positions: np.ndarray | None = None) -> Sequences:
        """Return the rows of (B, T) arrays as sequences."""
        count, length = tokens.shape
        flat = None if positions is None else positions.ravel()
        return cls(tokens.ravel(), roles.ravel(), np.full(count, length), flat)


def lay_out(
    sequences: Sequences, *, bos: int, mask: int | None, copies: bool, stops: np.ndarray | None = None
) -> Layout:
    """Lay out a batch: copies of the given tokens, BOS, and the text.

    Args:
        sequences: The texts. If they have `positions`, the layout has target positions: for each slot, the position of
            the next token.
        bos: Id of the BOS token, at position 0.
        mask: Id of the MASK token; needed only if there are unknown tokens.
        copies: Copy the given tokens, so that every prediction sees all of them. If false, a prediction sees only what
            comes before it.
        stops: (B,) position of the last token that each sequence predicts, where its text ends. Default: its length.

    Raises:
        QueryError: Tokens are unknown and there is no MASK; or the texts have `positions` and copies are asked for.
    """
    if copies and sequences.positions is not None:
        raise QueryError("a text that is read in another order cannot have copies.")
    tokens, roles, lengths = sequences.tokens, sequences.roles, sequences.lengths
    stops = lengths if stops is None else stops
    begins, starts = lengths.cumsum() - lengths, stops.cumsum() - stops  # (B,) of the tokens, and of the text slots
    unknown = roles == UNKNOWN
    if unknown.any():
        if mask is None:
            raise QueryError(
                "the query has unknown tokens (neither given nor asked), which need a MASK token, and this model has "
                "none. Give or ask for these tokens, or name a MASK token with LanguageModel(…, mask=ID)."
            )
        tokens = np.where(unknown, mask, tokens)

    def counts(members: np.ndarray) -> np.ndarray:
        """Return (B,) how many of these tokens, in ascending order, each sequence has."""
        ends: np.ndarray = members.searchsorted(begins + lengths)
        return np.diff(ends, prepend=0)

    # Tokens are chosen by number rather than by booleans, which numpy takes several times as long for.
    copied = np.flatnonzero(roles == GIVEN) if copies else np.zeros(0, dtype=np.int64)  # (C,)
    positions = sequences.places if sequences.positions is None else sequences.positions
    if positions is None:
        positions = np.arange(1, len(tokens) + 1) - np.repeat(begins, lengths)

    # x_p is predicted at slot p - 1, so slots 0 … stop - 1 are run: BOS and the tokens before the last predicted one.
    # Slot s > 0 of a text has its token s, which is number begins + s - 1 of all; what is taken for slot 0 is replaced.
    text = np.arange(stops.sum()) + np.repeat(begins - starts - 1, stops)  # (L,) into the tokens
    text_ids, text_positions = (x[text].astype(np.int64, copy=False) for x in (tokens, positions))
    first = starts[stops > 0]
    text_ids[first], text_positions[first] = bos, 0
    if sequences.starts is not None:
        own = (sequences.starts >= 0) & (stops > 0)
        text_ids[starts[own]] = sequences.starts[own]

    predicted = np.flatnonzero(roles == ASKED)  # (A,)
    if (stops < lengths).any():
        predicted = predicted[predicted < np.repeat(begins + stops, counts(predicted))]
    gaps, weights = predicted[:0], None
    if sequences.asks_length is not None:
        weights = np.repeat(sequences.asks_length, lengths)
        gaps, predicted = predicted[weights[predicted] > 0], predicted[weights[predicted] <= 0]

    def joined(*parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))

    def predicting(members: np.ndarray) -> Tensor:
        """Return the slots that predict these tokens."""
        return joined(members + np.repeat(len(copied) + starts - begins, counts(members)))

    return Layout(
        ids=joined(tokens[copied], text_ids),
        positions=joined(positions[copied], text_positions),
        copies=tuple(counts(copied).tolist()),
        texts=tuple(stops.tolist()),
        rows=predicting(predicted),
        targets=joined(tokens[predicted]),
        asked=tuple(counts(predicted).tolist()),
        target_positions=None if sequences.positions is None else joined(positions[text + 1]),
        length_rows=None if weights is None else predicting(gaps),
        length_targets=None if weights is None else joined(tokens[gaps]),
        length_weights=None if weights is None else torch.from_numpy(weights[gaps].astype(np.float32)),
    )


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to `device`; on CUDA the copy is asynchronous, through pinned memory.

    The copy into pinned memory is numpy's: it uses one thread for arrays of this size, where torch would start many.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def download(tensor: Tensor) -> Callable[[], Tensor]:
    """Start an asynchronous device-to-host copy; call the result to wait for it."""
    if tensor.device.type != "cuda":
        copy = tensor.to("cpu", copy=True)
        return lambda: copy
    pinned, copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
    pinned.copy_(tensor, non_blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return pinned

    return wait


def slots_of(query: Query, future: bool, *, first_only: bool = False) -> int:
    """Return the number of slots of a query's layout; the arguments are those of `build`."""
    return int(query.asked_at[0 if first_only else -1]) + (len(query.given_at) if future else 0)


def batches(
    queries: Mapping[int, Query], budget: int, future: bool, *, first_only: bool = False, packed: bool = False
) -> list[list[int]]:
    """Group numbered queries, the longest first, so that a group's rectangle has at most `budget` cells.

    Args:
        queries: The queries by number.
        budget: Maximum number of cells; a longer query gets a group of its own.
        future: As in `build`.
        first_only: As in `build`.
        packed: The backend does not pad the group to a rectangle, so padding does not count.
    """
    groups: list[list[int]] = []
    size = {number: slots_of(query, future, first_only=first_only) for number, query in queries.items()}
    cells = 0  # of the last group
    for number in sorted(queries, key=lambda number: -size[number]):
        cells += size[number] if packed or not groups else size[groups[-1][0]]
        if groups and cells <= budget:
            groups[-1].append(number)
        else:
            groups.append([number])
            cells = size[number]
    return groups


def neighbours(sizes: Sequence[int], budget: int) -> Iterator[range]:
    """Split texts into groups of neighbours; a group's rectangle has at most `budget` cells, or it is a single text.

    Args:
        sizes: Number of slots of each text.
        budget: Maximum number of cells.
    """
    start = 0
    while start < len(sizes):
        end, longest = start + 1, sizes[start]
        while end < len(sizes) and (end + 1 - start) * max(longest, sizes[end]) <= budget:
            longest = max(longest, sizes[end])
            end += 1
        yield range(start, end)
        start = end


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
        queries: The queries, of any lengths.
        bos: Id of the BOS token, at position 0.
        mask: Id of the MASK token; needed only if there are unknown tokens.
        future: Copy the given tokens, so that every prediction sees all of them. If false, nothing is copied and the
            text is read left to right: a prediction sees only what comes before it.
        first_only: Predict each query's first asked token only, and run the text no further: the prefill of sampling.
        orders: For queries whose tokens are in another order than the text: the positions of each query's tokens. The
            layout then has target positions. Only without copies (`future=False`).
    """
    stops = np.array([query.asked_at[0 if first_only else -1] for query in queries])
    return lay_out(Sequences.of(queries, orders), bos=bos, mask=mask, copies=future, stops=stops)


def body_tokens(query: Query, mask: int | None) -> np.ndarray:
    """Return the text as the model reads it: MASK for unknown tokens, -1 for tokens that are to be sampled."""
    if not query.has_unknown:
        return query.ids
    assert mask is not None  # `lay_out` refuses the query otherwise
    return np.where(query.roles == UNKNOWN, mask, query.ids)


def visible(copies: Tensor, slots: int) -> Tensor:
    """Return the whole attention mask: causal attention, and every slot attends to all copies.

    Slots are counted within one sequence, copies first.

    Args:
        copies: (B,) number of copies of each sequence.
        slots: S, the number of slots.

    Returns:
        (B, S, S) booleans [b, q, k]: whether slot q attends to slot k.
    """
    slot = torch.arange(slots, device=copies.device)
    is_copy = slot < copies[:, None]  # (B, S)
    return is_copy[:, None, :] | (slot <= slot[:, None])
