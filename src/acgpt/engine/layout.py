"""The layout: what a causal Transformer is shown so that it answers p(asked | given) in one forward pass.

    query    The  [cat]  [sat]  on   the        given: The, on, the   asked: [cat], [sat]

    slot      copies        | BOS and text
    token     The  on  the  | BOS   The   cat
    position   1    4   5   |  0     1     2
    sees      all copies    | all copies, and the text up to itself
    predicts   –    –   –   |  –    cat   sat

A copy carries the position of its original, sees every copy and nothing else, so nothing of the asked tokens can
travel through it. BOS and the text see all copies and, causally, themselves. The text is run only as far as the last
prediction needs it. With nothing given this is a plain causal language model.

A batch is packed end to end, `[copies of all queries | texts of all queries]`, so there is no padding anywhere outside
the attention; the backends in `attention` know where each query begins.

Shape legend, here and in `attention`: B queries, C copies and L text slots in the batch, N = C + L, A asked tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acgpt.errors import QueryError
from acgpt.query.query import Query


@dataclass(frozen=True)
class Layout:
    """A packed batch of queries: the model's inputs, and where the predictions come out."""

    ids: Tensor  # (N,) token ids
    positions: Tensor  # (N,) position ids; BOS is 0, the text counts from 1
    copies: tuple[int, ...]  # (B) how many copies each query has
    texts: tuple[int, ...]  # (B) how many text slots each query has, BOS included
    rows: Tensor  # (A,) the slots that predict, query by query, left to right
    targets: Tensor  # (A,) the token ids they predict; -1 where the token is still to be sampled
    asked: tuple[int, ...]  # (B) how many of those A belong to each query
    aims: Tensor | None = None  # (N,) the position that each slot is to predict, for networks that are told

    def to(self, device: torch.device) -> Layout:
        """The same layout with its tensors on `device`."""

        def there(tensor: Tensor) -> Tensor:
            return upload(tensor.numpy(), device) if tensor.device.type == "cpu" else tensor.to(device)

        ids, positions, rows, targets = map(there, (self.ids, self.positions, self.rows, self.targets))
        aims = None if self.aims is None else there(self.aims)
        return Layout(ids, positions, self.copies, self.texts, rows, targets, self.asked, aims)

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
    """Lay out a batch of queries.

    Args:
        queries: The questions, of any lengths.
        bos: Id of the beginning-of-sequence token, at position 0.
        mask: Id of the token that stands for unknown ones; needed only if a query has any.
        future: Copy the given tokens, so that every prediction sees all of them. If false nothing is copied and the
            text is read left to right: a prediction sees what stands before it.
        first_only: Predict each query's first asked token only, and run the text no further: the prefill of sampling.
        orders: For queries whose tokens stand in another order than that of the text: for each, the positions of its
            tokens. Each slot is then told the position of the token after it. Without copies only.
    """
    if orders is not None and future:
        raise QueryError("a text in an order of its own is read in that order: it has no copies.")
    copy_ids, copy_positions, text_ids, text_positions, aims = [], [], [], [], []
    rows, targets, asked = [], [], []
    text_start = 0
    for number, query in enumerate(queries):
        tokens = body_tokens(query, mask)
        positions = query.asked_at[:1] if first_only else query.asked_at
        length = int(positions[-1])  # x_p is predicted at slot p - 1, so slots 0 … p - 1 are run
        given = query.given_at if future else query.given_at[:0]
        copy_ids.append(tokens[given - 1])
        copy_positions.append(given)
        text_ids.append(np.concatenate(([bos], tokens[: length - 1])))
        if orders is None:
            text_positions.append(np.arange(length))
        else:
            text_positions.append(np.concatenate(([0], orders[number][: length - 1])))
            aims.append(orders[number][:length])
        rows.append(text_start + positions - 1)
        targets.append(tokens[positions - 1])
        asked.append(len(positions))
        text_start += length

    copies, texts = tuple(map(len, copy_ids)), tuple(map(len, text_ids))

    def join(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return Layout(
        ids=join(copy_ids + text_ids),
        positions=join(copy_positions + text_positions),
        copies=copies,
        texts=texts,
        rows=join(rows) + sum(copies),
        targets=join(targets),
        asked=tuple(asked),
        aims=None if orders is None else join(aims),
    )


def body_tokens(query: Query, mask: int | None) -> np.ndarray:
    """The text as the model reads it: unknown tokens are MASK, tokens to be sampled are -1 until they are."""
    if not query.has_unknown:
        return query.ids
    if mask is None:
        raise QueryError(
            "the query has unknown tokens (neither given nor asked), which are fed as the model's MASK token, and "
            "this model names none. Ask for those tokens or give them, or name a token with LanguageModel(…, "
            "mask=ID)."
        )
    body = np.full(len(query), mask)
    for positions in (query.given_at, query.asked_at):
        body[positions - 1] = query.ids[positions - 1]
    return body


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
