"""What MLM and diffusion share: texts that are read in both directions, with MASK where a token is hidden.

    text        BOS   The  MASK  MASK   on          copies, in the sense of `layout`: each sees all of them
    position     0     1     2     3     4
    predicts     –     –    cat   sat    –          its own token, and never MASK

For the fused kernels a text also has one text slot, a second BOS that reads the rest and is read by nobody: they want
every key read by a text slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.engine.attention import BACKENDS, Backend, run
from acgpt.engine.decode import Answer, Drawn, Sampling, draw
from acgpt.engine.engine import Engine
from acgpt.engine.layout import Layout
from acgpt.engine.score import check_numbers, forbid
from acgpt.query.query import Query


def shown(query: Query, *, bos: int, mask: int, given: bool = True) -> np.ndarray:
    """(T + 1,) BOS and the text, with MASK for all that is not given; for given tokens too, unless `given`."""
    pairs = zip(query.tokens, query.given, strict=True)
    return np.array([bos, *(mask if token is None or not (g and given) else token for token, g in pairs)])


def parts(query: Query, *, bos: int, mask: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The text as `shown`, the positions of the asked tokens, and these tokens."""
    asked = np.array(query.asked_positions)
    return shown(query, bos=bos, mask=mask), asked, np.array([query.tokens[position - 1] for position in asked])


def fill(
    engine: Engine,
    texts: Sequence[np.ndarray],
    turns: Sequence[Sequence[np.ndarray]],
    chances: Sequence[np.ndarray],
    mask: int,
    sampling: Sampling,
    *,
    known: Sequence[np.ndarray] | None = None,
    reached: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[Drawn]:
    """Fill in texts turn by turn: the tokens at some places are drawn, each by itself, and read from then on.

    Which places come when is known before the first draw, so all of it is put on the device at once and no turn waits
    for the host. Texts are sorted by the number of their turns: those still at work are the first ones, and what is
    done costs nothing.

    Args:
        sampler: The model.
        texts: As in `both_ways`, with MASK where a token is still to come.
        turns: For each text the places that are drawn in each of its turns.
        chances: For each text a number in [0, 1) at every place.
        mask: MASK, which is never drawn.
        sampling: How a token is drawn.
        known: Each text with all that is given, where not all of it is shown from the start.
        reached: For each text the places at which that is shown from each turn on.

    Returns:
        For each text, (T + 1,) its tokens, and the log-probabilities of those that were drawn.
    """
    device = engine.model.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    order = sorted(range(len(texts)), key=lambda row: -len(turns[row]))
    ends = np.cumsum([len(texts[row]) for row in order])
    starts = np.concatenate([[0], ends[:-1]])
    working = [sum(len(turns[row]) > turn for row in order) for turn in range(len(turns[order[0]]))]

    def packed(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[row] for row in order])).to(dtype).to(device)

    def places(of: Sequence[Sequence[np.ndarray]]) -> tuple[Tensor, ...]:
        """Where in the packed texts these places are, turn by turn."""
        by_turn = [
            np.concatenate([starts[i] + of[order[i]][turn] for i in range(count)]) for turn, count in enumerate(working)
        ]
        flat = torch.from_numpy(np.concatenate(by_turn)).to(device)
        return torch.split(flat, [len(each) for each in by_turn])

    ids, uniform = packed(texts, torch.long), packed(chances, wide)
    given = None if known is None else packed(known, torch.long)
    log_probs = torch.zeros_like(uniform)
    shown = None if reached is None else places(reached)
    lengths = tuple(len(texts[row]) for row in order)
    frame = Frame(lengths[: working[0]], bos=engine.bos, backend=engine.backend, device=device)
    for turn, (count, at) in enumerate(zip(working, places(turns), strict=True)):
        if len(frame.lengths) != count:
            frame = Frame(lengths[:count], bos=engine.bos, backend=engine.backend, device=device)
        if shown is not None and given is not None:
            ids[shown[turn]] = given[shown[turn]]
        with engine.meter.passes():
            logits = frame.logits(engine.model, ids[: ends[count - 1]], at, mask)
            tokens, scores = draw(logits, uniform[at], sampling)
        ids[at], log_probs[at] = tokens, scores.to(wide)
        engine.notice(len(at))
    filled, scored = (np.split(x.cpu().numpy(), ends[:-1]) for x in (ids, log_probs))
    check_numbers(np.concatenate(scored))
    place_of = {row: i for i, row in enumerate(order)}
    return [(filled[place_of[row]], scored[place_of[row]]) for row in range(len(texts))]


def answers(rows: Sequence[tuple[int, int]], queries: Sequence[Query], drawn: Sequence[Drawn]) -> list[Answer]:
    """What `Method.stream` hands over of these samples, given what `fill` returns."""
    pairs = zip(rows, queries, drawn, strict=True)
    return [(*row, (text[query.asked_at], scores[query.asked_at])) for row, query, (text, scores) in pairs]


class Frame:
    """Texts of certain lengths, whatever they read: what stays the same from one pass over such texts to the next.

    Args:
        lengths: Of each text, BOS included.
        bos: Of the text slots that the fused kernels want.
        backend: As in `attention.BACKENDS`.
        device: The model's.
    """

    def __init__(self, lengths: tuple[int, ...], *, bos: int, backend: str, device: torch.device) -> None:
        nothing = [np.zeros(0, dtype=np.int64)] * len(lengths)
        texts = [np.zeros(length, dtype=np.int64) for length in lengths]
        layout = both_ways(texts, nothing, nothing, bos=bos, text_slots=backend == "fused").to(device)
        self.lengths, self.positions = lengths, layout.positions[None]
        self.tail = layout.ids[sum(lengths) :]  # what the text slots read
        self.backend: Backend = BACKENDS[backend](layout)

    def logits(self, model: PreTrainedModel, ids: Tensor, at: Tensor, mask: int) -> Tensor:
        """(A, V) what the model says at the slots `at` of texts of which the slots read (N,) `ids`; never MASK."""
        return forbid(run(model, torch.cat([ids, self.tail])[None], self.positions, self.backend, at)[0], mask)


def both_ways(
    texts: Sequence[np.ndarray],
    places: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    bos: int,
    text_slots: bool,
) -> Layout:
    """Lay out a batch of texts that are read in both directions.

    Args:
        texts: Each (T + 1,), BOS first.
        places: For each the positions that predict.
        targets: For each the tokens that they predict.
        bos: Of the text slots.
        text_slots: Give each text one text slot, for training and for the fused kernels.
    """
    lengths, slots = np.array([len(text) for text in texts]), int(text_slots)
    starts = lengths.cumsum() - lengths
    ids = np.concatenate([*texts, np.full(len(texts) * slots, bos)])
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(len(texts) * slots, dtype=np.int64)])
    rows = np.concatenate([start + place for start, place in zip(starts, places, strict=True)])
    return Layout(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        copies=tuple(lengths.tolist()),
        texts=(slots,) * len(texts),
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
    bos: int,
    mask: int,
    weights: np.ndarray | None = None,
) -> Layout:
    """The layout of a training batch.

    Args:
        tokens: (B, T) token ids.
        hidden: (B, T) where MASK stands.
        predicted: (B, T) what is predicted.
        bos: The token at position 0.
        mask: MASK.
        weights: (B, T) of each prediction in the loss.
    """
    texts = np.concatenate([np.full((len(tokens), 1), bos), np.where(hidden, mask, tokens)], axis=1)
    places = [np.flatnonzero(which) + 1 for which in predicted]
    targets = [text[which] for text, which in zip(tokens, predicted, strict=True)]
    layout = both_ways(list(texts), places, targets, bos=bos, text_slots=True)
    if weights is None:
        return layout
    return replace(layout, weights=torch.from_numpy(weights[predicted].astype(np.float32)))
