"""What MLM and diffusion share: texts that are read in both directions, with MASK where a token is hidden.

    text        BOS   The  MASK  MASK   on          copies, in the sense of `layout`: each sees all of them
    position     0     1     2     3     4
    predicts     –     –    cat   sat    –          its own token, and never MASK

A text also has one text slot, a second BOS that reads the rest and is read by nobody: the kernels want every key read
by a text slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from acgpt.decode import Sampler, Sampling, draw
from acgpt.layout import Layout
from acgpt.methods.base import Drawn
from acgpt.query import Query
from acgpt.score import check_numbers, layout_logits
from acgpt.slots import Slots


def shown(query: Query, *, bos: int, mask: int, given: bool = True) -> np.ndarray:
    """(T + 1,) BOS and the text, with MASK for all that is not given; for given tokens too, unless `given`."""
    pairs = zip(query.tokens, query.given, strict=True)
    return np.array([bos, *(mask if token is None or not (g and given) else token for token, g in pairs)])


def parts(query: Query, *, bos: int, mask: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The text as `shown`, the positions of the asked tokens, and these tokens."""
    asked = np.array(query.asked_positions)
    return shown(query, bos=bos, mask=mask), asked, np.array([query.tokens[position - 1] for position in asked])


def draws(
    sampler: Sampler, texts: Sequence[np.ndarray], places: Sequence[np.ndarray], chances: Sequence[np.ndarray],
    mask: int, sampling: Sampling,
) -> list[Drawn]:  # fmt: skip
    """Draw the tokens at these places of each text, independently.

    Args:
        sampler: The model.
        texts: As in `both_ways`.
        places: As in `both_ways`.
        chances: For each text and place, a number in [0, 1).
        mask: MASK, which is never drawn.
        sampling: How a token is drawn.
    """
    layout = both_ways(texts, places, places, bos=sampler.bos)
    wide = torch.float32 if sampler.model.device.type == "mps" else torch.float64
    uniform = torch.from_numpy(np.concatenate(chances)).to(wide).to(sampler.model.device)
    with sampler.meter.passes():
        drawn = draw(layout_logits(sampler.model, layout, sampler.backend, mask), uniform, sampling)
    tokens, log_probs = (x.cpu().numpy() for x in drawn)
    check_numbers(log_probs)
    ends = np.cumsum([len(place) for place in places])[:-1]
    return list(zip(np.split(tokens, ends), np.split(log_probs, ends), strict=True))


def both_ways(
    texts: Sequence[np.ndarray], places: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, bos: int
) -> Layout:
    """A batch of texts as they are.

    Args:
        texts: Each (T + 1,), BOS first.
        places: For each the positions that predict.
        targets: For each the tokens that they predict.
        bos: Of the text slots.
    """
    lengths = np.array([len(text) for text in texts])
    starts = lengths.cumsum() - lengths
    ids = np.concatenate([*texts, np.full(len(texts), bos)])
    positions = np.concatenate([*(np.arange(length) for length in lengths), np.zeros(len(texts), dtype=np.int64)])
    rows = np.concatenate([start + place for start, place in zip(starts, places, strict=True)])
    return Layout(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        copies=tuple(lengths.tolist()),
        texts=(1,) * len(texts),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(np.concatenate(targets)),
        asked=tuple(map(len, places)),
    )


def groups(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Neighbours among texts of so many tokens, whose slots stay within the budget together; at least one a group."""
    start = 0
    while start < len(lengths):
        end, longest = start, 0
        while end < len(lengths):
            longest = max(longest, lengths[end] + 2)
            if end > start and (end + 1 - start) * longest > budget:
                break
            end += 1
        yield range(start, end)
        start = end


def lay_out(
    tokens: np.ndarray,
    hidden: np.ndarray,
    predicted: np.ndarray,
    *,
    asked: int,
    bos: int,
    mask: int,
    weights: np.ndarray | None = None,
) -> Slots:
    """The slots of a training batch.

    Args:
        tokens: (B, T) token ids.
        hidden: (B, T) where MASK stands.
        predicted: (B, T) what is predicted.
        asked: What the loss is divided by.
        bos: The token at position 0.
        mask: MASK.
        weights: (B, T) of each prediction in the loss.
    """
    count, length = tokens.shape
    first = np.full((count, 1), bos)
    return Slots(
        copy_ids=np.concatenate([first, np.where(hidden, mask, tokens)], axis=1).ravel(),
        copy_positions=np.tile(np.arange(length + 1), count),
        n_copies=np.full(count, length + 1),
        text_ids=first.ravel(),
        text_positions=np.zeros(count, dtype=np.int64),
        n_texts=np.ones(count, dtype=np.int64),
        rows=np.flatnonzero(np.concatenate([np.zeros((count, 1), dtype=bool), predicted], axis=1)),
        targets=tokens[predicted],
        asked=asked,
        weights=None if weights is None else weights[predicted],
    )
