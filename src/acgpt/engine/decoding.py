"""Decoding step by step: rows join and leave between steps, so that a server can batch requests as they arrive.

    decoding = Decoding(engine, Sampling(temperature=0.8))
    rows = decoding.prefill(queries)            # read up to the first blank; the first token of each is drawn
    while decoding.rows:
        for row in decoding.step():             # the rows that drew a token in this step
            position, token, log_prob = row.drawn[-1]
        decoding.release([row for row in decoding.rows if row.done])

`Engine.stream` uses the same steps with all rows known beforehand, so it does not wait for the device at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch

from acgpt.engine.decode import Allowed, Decoder, Forward
from acgpt.engine.engine import Call, Engine
from acgpt.engine.locks import turn
from acgpt.engine.score import check_numbers
from acgpt.engine.steps import Row, Schedule, choose_width, schedule, steps_of
from acgpt.errors import ModelError
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

CAPTURED = (1, 4, 16, 64, 256)  # numbers of rows that a GPU captures steps for; a step of more rows costs little more
ROOMY_ROWS, ROOMY_SLOTS, ROOMY_BYTES = 64, 256, 2**30  # least room of a decoder on a GPU, as far as the bytes allow

Token = tuple[int, int, float]  # position, token id and log-probability of a drawn token


@cache
def all_tokens(vocabulary: int) -> np.ndarray:
    """Return (V,) that every token may be drawn: one array for all rows, which need not be uploaded for each."""
    everything = np.ones(vocabulary, dtype=np.bool_)
    everything.flags.writeable = False
    return everything


class Guide(Protocol):
    """Decides which tokens a row may draw; it is told every token that the row has drawn."""

    def allowed(self) -> np.ndarray:
        """Return (V,) whether each token may be drawn next; at least one may."""
        ...

    def advance(self, token: int) -> None:
        """Note that a token has been drawn."""
        ...


@dataclass(eq=False)
class ActiveRow:
    """One sample that is being drawn.

    Args:
        query: The query.
        sample: Number of the sample; the noise depends on it.
        schedule: Positions read and drawn at each step after the first draw.
        copies: Number of copies before the text.
        drawn: Tokens drawn so far, from left to right.
        step: Number of steps taken.
        failed: The model's logits for this row were not numbers; it draws no more tokens.
        guide: Constrains the tokens; `None` if all are allowed.
        sampling: Temperature, truncation and seed of the row.
        drawn_with: With a guide, the log-probabilities with which the tokens were drawn: among the allowed tokens, with
            temperature and truncation. 0 for greedy decoding.
        kind: `sampling` without seed and number: the noise covers these. Rows of one kind are drawn together.
    """

    query: Query
    sample: int
    schedule: Schedule
    copies: int
    drawn: list[Token] = field(default_factory=list)
    step: int = 0
    failed: bool = False
    guide: Guide | None = None
    sampling: Sampling = field(default_factory=Sampling)
    drawn_with: list[float] = field(default_factory=list)
    kind: Sampling = field(init=False)

    def __post_init__(self) -> None:
        self.kind = replace(self.sampling, seed=0, first=0)

    @property
    def done(self) -> bool:
        """Whether all asked tokens have been drawn, or the row has failed."""
        return self.failed or len(self.drawn) == len(self.query.asked_at)


class Decoding:
    """Rows that are decoded together; rows may join and leave between steps.

    Every row draws what it would draw alone, up to rounding. All steps are taken with the same adapters active.

    Args:
        engine: The engine of the model.
        sampling: Default of the rows' temperature, truncation and seed.
        future: Condition on given tokens after an asked one, see `layout.build`.
    """

    def __init__(self, engine: Engine, sampling: Sampling | None = None, *, future: bool = True) -> None:
        self.engine, self.sampling, self.future = engine, sampling or Sampling(), future
        self.rows: list[ActiveRow] = []  # in the order of the decoder's buffers
        self.decoder: Decoder | None = None
        self.width = 0  # positions read per step; chosen for the first rows, and again once all have left
        self.forward: Forward | None = None  # runs steps in place of the network, see `Engine.forward`
        self.forward_for = 0, 0  # number of tokens per step, and of steps, that it was chosen for
        self.drawn_with: list[float] = []  # by index of the row, of what was read last

    @torch.inference_mode()
    def prefill(
        self,
        queries: Sequence[Query],
        samples: Sequence[int] | None = None,
        *,
        seed: int | None = None,
        samplings: Sequence[Sampling] | None = None,
        guides: Sequence[Guide | None] | None = None,
    ) -> list[ActiveRow]:
        """Add rows: read each query up to its first blank, and draw its first asked token.

        Args:
            queries: One query for each new row. Rows whose queries are the same object share their prefill.
            samples: For each row, the number of its sample. Default: 0.
            seed: Seed of the noise. Default: that of the sampling options.
            samplings: For each row, its sampling options. Default: those of the decoding.
            guides: For each row, what constrains its tokens. Default: nothing.

        Returns:
            The new rows, in the order of the queries.

        Raises:
            ModelError: The logits of a new row are not numbers. None of the new rows is added.
        """
        if not queries:
            return []
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed)
        numbers = [0] * len(queries) if samples is None else samples
        first_use: dict[int, int] = {}
        shared = [first_use.setdefault(id(query), index) for index, query in enumerate(queries)]
        new = [Row(*fields) for fields in zip(queries, shared, numbers, strict=True)]
        index_of = {id(row): index for index, row in enumerate(new)}  # the steps sort the rows
        guide_of = guides or [None] * len(queries)
        sampling_of = samplings or [sampling] * len(queries)
        if not self.rows:
            self.width = choose_width(new, self.engine.step_cost)
        if not self.rows or self.engine.cuda:
            self.forward_for = 0, 0
        steps, call, first = steps_of(new, self.width, self.future), Call(sampling, self.future), len(self.rows)
        with self.engine.on_device(), turn(self.engine.model):
            logits = []
            for prefill in self.engine.prefills({i: queries[i] for i in first_use.values()}, [], call):
                decoder = self.room(steps.slots, max(map(len, queries)) + 1, len(steps.draws), len(new), prefill.states)
                logits.append(self.engine.fill(decoder, first, steps.rows, prefill))
            joined = []
            for row, copies in zip(steps.rows, steps.copies, strict=True):
                number, reads = index_of[id(row)], schedule(row.query, self.width)
                guide, own = guide_of[number], sampling_of[number]
                joined.append(ActiveRow(row.query, row.sample, reads, int(copies), guide=guide, sampling=own))
            own_samplings = [row.sampling for row in joined]
            self.engine.begin(decoder, first, steps, logits, call, self.permitted(joined), own_samplings)
            indices = range(first, first + len(joined))
            tokens = self.read(indices, [int(row.query.asked_at[0]) for row in joined])
            try:
                check_numbers(np.array([log_prob for *_, log_prob in tokens]))
            except ModelError:
                decoder.leave([], [], first, first + len(joined))
                raise
            self.rows += joined
            self.note(indices, joined, tokens)
        order = {index_of[id(row)]: index for index, row in enumerate(steps.rows)}
        return [joined[order[number]] for number in range(len(queries))]

    @torch.inference_mode()
    def step(self) -> list[ActiveRow]:
        """Advance every row by one step.

        Returns:
            The rows that drew a token; the others are still reading given tokens, or are done.

        Raises:
            ModelError: The logits of some rows are not numbers. These rows have `failed`; the others have drawn.
        """
        active = [index for index, row in enumerate(self.rows) if not row.done]
        if not active:
            return []
        assert self.decoder is not None
        used = max(int(row.schedule.reads[row.step].max()) + row.copies for row in self.rows if not row.done) + 1
        capacity = self.decoder.slots if self.decoder.ragged else -(-used // self.engine.grain) * self.engine.grain
        working = len(self.rows)
        if self.engine.cuda:  # a step is captured for each number of rows, so use few
            rounded = next((rows for rows in CAPTURED if rows >= working), working)
            working = min(rounded, self.decoder.size[0])
        samplings = [row.kind for row in self.rows]
        sampling = samplings[0] if len(set(samplings)) == 1 else None  # others are drawn after the step
        drawing = [index for index in active if self.rows[index].schedule.draws[self.rows[index].step] >= 0]
        constrained = any(row.guide is not None for row in self.rows)
        allowed = self.permitted([self.rows[index] for index in drawing]) if constrained else None
        load = working * self.width, max(len(self.rows[index].schedule.draws) for index in active)
        load = (1, 1) if self.engine.cuda else load  # on CUDA the choice does not depend on it
        with self.engine.on_device(), turn(self.engine.model), self.engine.meter.passes():
            if allowed is not None:
                self.decoder.allow(drawing, allowed)
            if load != self.forward_for:  # choosing it takes some milliseconds
                self.forward, self.forward_for = self.engine.forward(*load), load
            shape = working, self.width, capacity, sampling
            result = self.decoder.play(1, *shape, False, None, constrained, self.forward)
            if sampling is None:
                assert result is not None
                self.decoder.draw(*result, samplings, constrained)
        indices, positions = [], []
        for index in active:
            row = self.rows[index]
            position = int(row.schedule.draws[row.step])
            row.step += 1
            if position >= 0:
                indices.append(index)
                positions.append(position)
        tokens = self.read(indices, positions)
        rows = [self.rows[index] for index in indices]
        for row, token in zip(rows, tokens, strict=True):
            row.failed = math.isnan(token[2])
        good = [i for i, row in enumerate(rows) if not row.failed]
        self.note([indices[i] for i in good], [rows[i] for i in good], [tokens[i] for i in good])
        self.engine.notice(sum(not row.failed for row in rows))
        check_numbers(np.array([log_prob for *_, log_prob in tokens]))
        return rows

    @torch.inference_mode()
    def release(self, rows: Sequence[ActiveRow]) -> None:
        """Remove rows, done or not; the last rows move to their indices."""
        if not rows:
            return
        assert self.decoder is not None
        gone, before = {self.rows.index(row) for row in rows}, len(self.rows)
        stay = before - len(gone)
        free = [index for index in range(stay) if index in gone]
        moved = [index for index in range(stay, before) if index not in gone]
        with self.engine.on_device():
            self.decoder.leave(free, moved, stay, before)
        for index, other in zip(free, moved, strict=True):
            self.rows[index] = self.rows[other]
        del self.rows[stay:]

    # ---- internals --------------------------------------------------------------------------------------------------

    def permitted(self, rows: Sequence[ActiveRow]) -> Allowed | None:
        """Return the tokens that rows may draw next; `None` if no row has a guide."""
        if all(row.guide is None for row in rows):
            return None
        vocabulary = self.engine.model.config.get_text_config().vocab_size
        of_rows = [all_tokens(vocabulary) if row.guide is None else row.guide.allowed() for row in rows]
        different = {id(mask): mask for mask in of_rows}  # constraints keep their masks, so that many are the same
        masks = np.zeros((len(different), vocabulary), dtype=np.bool_)
        for mask, own in zip(masks, different.values(), strict=True):
            mask[: len(own)] = own[:vocabulary]
        numbers = {key: number for number, key in enumerate(different)}
        return Allowed(masks, np.array([numbers[id(mask)] for mask in of_rows]))

    def note(self, indices: Sequence[int], rows: Sequence[ActiveRow], tokens: Sequence[Token]) -> None:
        """Add drawn tokens to their rows, and tell the guides."""
        for index, row, token in zip(indices, rows, tokens, strict=True):
            row.drawn.append(token)
            if row.guide is not None:
                row.drawn_with.append(self.drawn_with[index])
                row.guide.advance(token[1])

    def read(self, indices: Sequence[int], positions: Sequence[int]) -> list[Token]:
        """Copy the tokens that some rows have just drawn, at these positions, to the host; the only wait of a step."""
        assert self.decoder is not None and self.decoder.newest is not None
        tokens, log_probs, self.drawn_with = self.decoder.newest[:, : max(indices, default=-1) + 1].tolist()
        return [(position, int(tokens[i]), log_probs[i]) for i, position in zip(indices, positions, strict=True)]

    def room(
        self, slots: int, columns: int, steps: int, rows: int, like: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Decoder:
        """Return a decoder with room for more rows of this size; a new, larger one takes over the old one's rows.

        Args:
            slots: Slots of the cache per row.
            columns: Columns of the text per row.
            steps: Steps per row.
            rows: Number of new rows.
            like: Keys and values of each layer, for their shapes and dtypes.
        """
        grain = self.engine.grain
        needed = (slots, columns, steps)
        size = (len(self.rows) + rows, *(-(-number // grain) * grain for number in needed), self.width)
        if self.decoder is None or not self.decoder.fits(size):
            old = self.decoder
            if old is None and self.engine.cuda:  # a larger one would capture all its steps again
                slots = max(size[1], ROOMY_SLOTS)
                most = ROOMY_BYTES // (slots * self.engine.slot_bytes)
                size = (max(size[0], min(ROOMY_ROWS, most)), slots, *(max(x, ROOMY_SLOTS) for x in size[2:4]), size[4])
            if old is not None:
                doubled = 2 * old.size[0] if size[0] > old.size[0] else old.size[0]
                size = (max(size[0], doubled), *map(max, size[1:], old.size[1:]))
            larger = Decoder(self.engine.model, like, size, self.engine.ragged, tracked=True)
            if old is not None:
                larger.take_over(old, len(self.rows))
            self.decoder = larger  # only now: if there was no memory for it, the rows go on in the old one
        return self.decoder
