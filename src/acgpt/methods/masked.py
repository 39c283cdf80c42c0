"""Code shared by MLM and diffusion: texts read in both directions, with MASK for hidden tokens.

    text        BOS   The  MASK  MASK   on          copies, in the sense of `layout`: each attends to all of them
    position     0     1     2     3     4
    predicts     –     –    cat   sat    –          its own token, and never MASK

For the fused kernels a text also has one text slot: a second BOS that attends to the rest and to which nothing attends.
They need every key to be read by a text slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.engine.attention import BACKENDS, Backend, run
from acgpt.engine.decode import Answer, Drawn, draw
from acgpt.engine.engine import Engine
from acgpt.engine.layout import Layout, neighbours
from acgpt.engine.score import check_numbers, forbid
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

# Of one sample: the positions to draw in each turn, the positions of the given tokens to show from each turn on, and a
# random number for every position.
Plan = tuple[Sequence[np.ndarray], Sequence[np.ndarray], np.ndarray]


def shown(query: Query, *, bos: int, mask: int, given: bool = True) -> np.ndarray:
    """Return (T + 1,) BOS and the text with MASK for tokens that are not given; if `given` is false, for all tokens."""
    pairs = zip(query.tokens, query.given, strict=True)
    return np.array([bos, *(mask if token is None or not (g and given) else token for token, g in pairs)])


def parts(query: Query, *, bos: int, mask: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the text as in `shown`, the positions of the asked tokens, and their ids."""
    asked = np.array(query.asked_positions)
    return shown(query, bos=bos, mask=mask), asked, np.array([query.tokens[position - 1] for position in asked])


def fill(
    engine: Engine,
    texts: Sequence[np.ndarray],
    known: Sequence[np.ndarray],
    plans: Sequence[Plan],
    mask: int,
    sampling: Sampling,
) -> list[Drawn]:
    """Fill in texts turn by turn. In each turn the tokens at some positions are drawn, independently of each other.

    The positions of all turns are known in advance, so they are sent to the device at once, and no turn waits for the
    host. Texts are sorted by their number of turns, so that the unfinished ones come first and finished ones cost
    nothing.

    Args:
        engine: The model, its BOS and backend.
        texts: The texts as in `both_ways`, with MASK where a token is to be drawn.
        known: Each text with all given tokens, even if they are not shown from the start.
        plans: For each text, what is drawn and shown when.
        mask: Id of MASK, which is never drawn.
        sampling: Temperature and truncation.

    Returns:
        For each text, (T + 1,) token ids, and the log-probabilities of those that were drawn.
    """
    device, (turns, reached, uniforms) = engine.model.device, zip(*plans, strict=True)
    wide = torch.float32 if device.type == "mps" else torch.float64
    order = sorted(range(len(texts)), key=lambda row: -len(turns[row]))
    ends = np.cumsum([len(texts[row]) for row in order])
    starts = np.concatenate([[0], ends[:-1]])
    unfinished = [sum(len(turns[row]) > turn for row in order) for turn in range(len(turns[order[0]]))]  # texts a turn

    def packed(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[row] for row in order])).to(dtype).to(device)

    def packed_slots(positions: Sequence[Sequence[np.ndarray]]) -> tuple[Tensor, ...]:
        """Return the indices of positions in the packed texts, turn by turn."""
        by_turn = [
            np.concatenate([starts[i] + positions[order[i]][turn] for i in range(count)])
            for turn, count in enumerate(unfinished)
        ]
        flat = torch.from_numpy(np.concatenate(by_turn)).to(device)
        return torch.split(flat, [len(slots) for slots in by_turn])

    ids, uniform = packed(texts, torch.long), packed(uniforms, wide)
    given, log_probs = packed(known, torch.long), torch.zeros_like(uniform)
    slots_shown, slots_drawn = packed_slots(reached), packed_slots(turns)
    lengths = tuple(len(texts[row]) for row in order)
    frame = Frame(lengths[: unfinished[0]], bos=engine.bos, backend=engine.backend, device=device)
    for count, shown_now, slots in zip(unfinished, slots_shown, slots_drawn, strict=True):
        if len(frame.lengths) != count:
            frame = Frame(lengths[:count], bos=engine.bos, backend=engine.backend, device=device)
        ids[shown_now] = given[shown_now]
        with engine.meter.passes():
            logits = frame.logits(engine.model, ids[: ends[count - 1]], slots, mask)
            tokens, scores = draw(logits, uniform[slots], sampling)
        ids[slots], log_probs[slots] = tokens, scores.to(wide)
        engine.notice(len(slots))
    filled, scored = (np.split(x.cpu().numpy(), ends[:-1]) for x in (ids, log_probs))
    check_numbers(np.concatenate(scored))
    rank = {row: i for i, row in enumerate(order)}
    return [(filled[rank[row]], scored[rank[row]]) for row in range(len(texts))]


def answers(rows: Sequence[tuple[int, int]], queries: Sequence[Query], samples: Sequence[Drawn]) -> list[Answer]:
    """Convert what `fill` returns to what `Method.stream` yields."""
    triples = zip(rows, queries, samples, strict=True)
    return [(*row, (text[query.asked_at], scores[query.asked_at])) for row, query, (text, scores) in triples]


class Frame:
    """The layout of texts of certain lengths, reused from one pass to the next: it does not depend on their tokens.

    Args:
        lengths: Length of each text, BOS included.
        bos: Id of BOS, for the text slots that the fused kernels need.
        backend: Name of the attention backend, see `attention.BACKENDS`.
        device: Device of the model.
    """

    def __init__(self, lengths: tuple[int, ...], *, bos: int, backend: str, device: torch.device) -> None:
        nothing = [np.zeros(0, dtype=np.int64)] * len(lengths)
        texts = [np.zeros(length, dtype=np.int64) for length in lengths]
        layout = both_ways(texts, nothing, nothing, bos=bos, text_slots=backend == "fused").to(device)
        self.lengths, self.positions = lengths, layout.positions[None]
        self.tail = layout.ids[sum(lengths) :]  # token ids of the text slots
        self.backend: Backend = BACKENDS[backend](layout)

    def logits(self, model: PreTrainedModel, ids: Tensor, slots: Tensor, mask: int) -> Tensor:
        """Return (A, V) logits at A slots of texts with (N,) token ids; MASK has no probability."""
        return forbid(run(model, torch.cat([ids, self.tail])[None], self.positions, self.backend, slots)[0], mask)


def both_ways(
    texts: Sequence[np.ndarray],
    predicting: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    bos: int,
    text_slots: bool,
) -> Layout:
    """Lay out a batch of texts that are read in both directions.

    Args:
        texts: Token ids of each text, (T + 1,), BOS first.
        predicting: For each text, the positions that predict.
        targets: For each text, the tokens to predict there.
        bos: Id of BOS, for the text slots.
        text_slots: Whether to add one text slot per text, for training and for the fused kernels.
    """
    lengths, slots = np.array([len(text) for text in texts]), int(text_slots)
    starts = lengths.cumsum() - lengths
    ids = np.concatenate([*texts, np.full(len(texts) * slots, bos)])
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(len(texts) * slots, dtype=np.int64)])
    rows = np.concatenate([start + within for start, within in zip(starts, predicting, strict=True)])
    return Layout(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        copies=tuple(lengths.tolist()),
        texts=(slots,) * len(texts),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(np.concatenate(targets)),
        asked=tuple(map(len, predicting)),
    )


def groups(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Split texts of these numbers of tokens into groups of neighbours, see `layout.neighbours`."""
    return neighbours([length + 2 for length in lengths], budget)


def lay_out(
    tokens: np.ndarray,
    hidden: np.ndarray,
    predicted: np.ndarray,
    *,
    bos: int,
    mask: int,
    weights: np.ndarray | None = None,
) -> Layout:
    """Return the layout of a training batch.

    Args:
        tokens: (B, T) token ids.
        hidden: (B, T) whether MASK replaces the token.
        predicted: (B, T) whether the token is predicted.
        bos: Id of the token at position 0.
        mask: Id of MASK.
        weights: (B, T) weight of each prediction in the loss. Default: 1.
    """
    texts = np.concatenate([np.full((len(tokens), 1), bos), np.where(hidden, mask, tokens)], axis=1)
    predicting = [np.flatnonzero(row) + 1 for row in predicted]
    targets = [text[row] for text, row in zip(tokens, predicted, strict=True)]
    layout = both_ways(list(texts), predicting, targets, bos=bos, text_slots=True)
    if weights is None:
        return layout
    return replace(layout, weights=torch.from_numpy(weights[predicted].astype(np.float32)))
