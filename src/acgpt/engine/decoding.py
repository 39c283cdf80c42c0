"""Decoding step by step: rows join and leave between steps, so that a server can batch requests as they come.

    decoding = Decoding(engine, Sampling(temperature=0.8))
    rows = decoding.prefill(queries)            # read up to the first blank; the first token of each is drawn
    while decoding.rows:
        for row in decoding.step():             # the rows that have drawn a token in this step
            position, token, log_prob = row.drawn[-1]
        decoding.release([row for row in decoding.rows if row.done])

`Engine.stream` uses the same steps, with all rows known beforehand and none of them waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from acgpt.engine.decode import Decoder, Sampling
from acgpt.engine.engine import Call, Engine
from acgpt.engine.locks import turn
from acgpt.engine.score import check_numbers
from acgpt.engine.steps import Row, Schedule, choose_width, few_shapes, schedule, steps_of
from acgpt.errors import ModelError
from acgpt.query.query import Query

Token = tuple[int, int, float]  # a position, the token that was drawn there, and its log-probability


@dataclass(eq=False)
class ActiveRow:
    """One sample that is being drawn.

    Args:
        query: What is given and asked.
        sample: The number of the sample, which its noise depends on.
        schedule: What it reads and draws at each step after its first draw.
        copies: How many copies stand before its text.
        drawn: The tokens so far, from left to right.
        step: How many steps it has taken.
        failed: The model's logits for it were not numbers. It draws no more.
    """

    query: Query
    sample: int
    schedule: Schedule
    copies: int
    drawn: list[Token] = field(default_factory=list)
    step: int = 0
    failed: bool = False

    @property
    def done(self) -> bool:
        """Whether all asked tokens have been drawn, or it has failed."""
        return self.failed or len(self.drawn) == len(self.query.asked_at)


class Decoding:
    """Rows that are decoded together. They may join and leave between steps.

    Every row draws what it would draw alone, to rounding.

    Args:
        engine: The model, its BOS and MASK.
        sampling: Temperature and truncation of all rows, and the seed of those that name none.
        future: As in `layout.build`.
    """

    def __init__(self, engine: Engine, sampling: Sampling | None = None, *, future: bool = True) -> None:
        self.engine, self.sampling, self.future = engine, sampling or Sampling(), future
        self.rows: list[ActiveRow] = []  # by their places
        self.decoder: Decoder | None = None
        self.width = 0  # of steps; chosen for the first rows

    @torch.inference_mode()
    def prefill(
        self, queries: Sequence[Query], samples: Sequence[int] | None = None, *, seed: int | None = None
    ) -> list[ActiveRow]:
        """Let rows join: read each query up to its first blank, and draw the first asked token.

        Args:
            queries: One for each row.
            samples: For each row the number of its sample; by default 0.
            seed: Of their noise; by default that of the sampling.

        Raises:
            ModelError: The logits of one of them are not numbers; none of them joins.
        """
        if not queries:
            return []
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed)
        numbers = [0] * len(queries) if samples is None else samples
        wanted = [Row(*of) for of in zip(queries, range(len(queries)), numbers, strict=True)]
        self.width = self.width or choose_width(wanted, self.engine.step_cost)
        steps, call, first = steps_of(wanted, self.width, self.future), Call(sampling, self.future), len(self.rows)
        with self.engine.on_device(), turn(self.engine.model):
            logits = []
            for prefill in self.engine.prefills(dict(enumerate(queries)), [], call):
                decoder = self.room(
                    steps.slots, max(map(len, queries)) + 1, len(steps.draws), len(wanted), prefill.states
                )
                logits.append(self.engine.fill(decoder, first, steps.rows, prefill))
            self.engine.begin(decoder, first, steps, logits, call)
            joined = [
                ActiveRow(row.query, row.sample, schedule(row.query, self.width), int(copies))
                for row, copies in zip(steps.rows, steps.copies, strict=True)
            ]
            places = range(first, first + len(joined))
            tokens = self.read(places, [int(row.query.asked_at[0]) for row in joined])
            try:
                check_numbers(np.array([log_prob for *_, log_prob in tokens]))
            except ModelError:
                for place in places:
                    decoder.leave(place, place)
                raise
            self.rows += joined
            for row, token in zip(joined, tokens, strict=True):
                row.drawn.append(token)
        order = {row.number: place for place, row in enumerate(steps.rows)}
        return [joined[order[number]] for number in range(len(queries))]

    @torch.inference_mode()
    def step(self) -> list[ActiveRow]:
        """Advance every row by one step.

        Returns:
            The rows that have drawn a token; the others are still reading given ones, or are done.

        Raises:
            ModelError: The logits of some rows are not numbers. These have `failed`; the step of the others counts.
        """
        active = [place for place, row in enumerate(self.rows) if not row.done]
        if not active:
            return []
        assert self.decoder is not None
        used = max(int(row.schedule.reads[row.step].max()) + row.copies for row in self.rows if not row.done) + 1
        capacity = self.decoder.slots if self.decoder.ragged else -(-used // self.engine.grain) * self.engine.grain
        working = len(self.rows)
        if self.engine.cuda:  # each number of rows is a step that is captured
            working = min(int(few_shapes(np.array([working, self.decoder.size[0]]))[0]), self.decoder.size[0])
        how = replace(self.sampling, seed=0, first=0)  # they are in the noise
        with self.engine.on_device(), turn(self.engine.model), self.engine.meter.passes():
            self.decoder.play(1, working, self.width, capacity, how, False, None)
        places, positions = [], []
        for place in active:
            row = self.rows[place]
            position = int(row.schedule.draws[row.step])
            row.step += 1
            if position >= 0:
                places.append(place)
                positions.append(position)
        tokens = self.read(places, positions)
        drawn = [self.rows[place] for place in places]
        for row, token in zip(drawn, tokens, strict=True):
            row.failed = math.isnan(token[2])
            if not row.failed:
                row.drawn.append(token)
        self.engine.notice(sum(not row.failed for row in drawn))
        check_numbers(np.array([log_prob for *_, log_prob in tokens]))
        return drawn

    @torch.inference_mode()
    def release(self, rows: Sequence[ActiveRow]) -> None:
        """Let rows go, done or not; others take their places."""
        for row in rows:
            place, last = self.rows.index(row), len(self.rows) - 1
            assert self.decoder is not None
            with self.engine.on_device():
                self.decoder.leave(place, last)
            self.rows[place] = self.rows[last]
            self.rows.pop()

    # ---- underneath -------------------------------------------------------------------------------------------------

    def read(self, places: Sequence[int], positions: Sequence[int]) -> list[Token]:
        """Return the tokens that the rows at these places have drawn at these positions."""
        assert self.decoder is not None
        tokens = self.decoder.text[list(places), list(positions)].tolist()
        log_probs = self.decoder.log_probs[list(places), list(positions)].tolist()
        return list(zip(positions, tokens, log_probs, strict=True))

    def room(
        self, slots: int, columns: int, steps: int, rows: int, like: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Decoder:
        """A decoder with room for so many rows more, of this size; a larger one takes over what the old one holds."""
        grain = self.engine.grain
        needed = (slots, columns, steps)
        size = (len(self.rows) + rows, *(-(-each // grain) * grain for each in needed), self.width)
        if self.decoder is None or not self.decoder.fits(size):
            old = self.decoder
            if old is not None:
                doubled = 2 * old.size[0] if size[0] > old.size[0] else old.size[0]
                size = (max(size[0], doubled), *map(max, size[1:], old.size[1:]))
            larger = Decoder(self.engine.model, like, size, self.engine.ragged)
            if old is not None:
                larger.take_over(old, len(self.rows))
            self.decoder = larger  # only now: if there was no memory for it, the rows go on in the old one
        return self.decoder
