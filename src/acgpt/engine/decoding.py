"""Decoding rows together, by one of two clocks.

    decoding = Decoding(engine, Sampling(temperature=0.8))
    rows = decoding.prefill(queries)            # read up to the first blank; the first token of each is drawn
    while decoding.rows:
        for row in decoding.step():             # the rows that drew a token in this step
            position, token, log_prob = row.drawn[-1]
        decoding.release([row for row in decoding.rows if row.done])

`step` waits for the device, so that rows may join and leave between steps, as requests of a server do, and guides may
constrain what is drawn next. `Engine.stream` knows all rows beforehand: `finish` takes their steps without a wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from acgpt.engine.decode import Answer, Decoder, Forward, draw_each, weights_of
from acgpt.engine.layout import upload
from acgpt.engine.modules import turn
from acgpt.engine.passes import Call, Passes, Prefill
from acgpt.engine.prefixes import States
from acgpt.engine.score import check_numbers
from acgpt.engine.steps import Guide, Row, Steps, Token, choose_width, steps_of
from acgpt.errors import ModelError
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

CAPTURED = (1, 4, 16, 64, 256)  # numbers of rows that a GPU captures steps for; a step of more rows costs little more
ROOMY_ROWS, ROOMY_SLOTS, ROOMY_BYTES = 64, 256, 2**30  # least room of a decoder on a GPU, as far as the bytes allow


@cache
def all_tokens(vocabulary: int) -> np.ndarray:
    """Return (V,) that every token may be drawn: one array for all rows, which need not be uploaded for each."""
    everything = np.ones(vocabulary, dtype=np.bool_)
    everything.flags.writeable = False
    return everything


class Decoding:
    """Rows that are decoded together.

    Every row draws what it would draw alone, up to rounding. All steps are taken with the same adapters active.

    Args:
        engine: The engine of the model.
        sampling: Default of the rows' temperature, truncation and seed.
        future: Condition on given tokens after an asked one, see `layout.build`.
        orders: Positions of each query's tokens, if not in the order of the text; see `layout.build`.
        forbidden_token: A token that is not drawn.
        fixed: All rows join at once, and `finish` draws them; their buffers may be those of an earlier call.
    """

    def __init__(
        self,
        engine: Passes,
        sampling: Sampling | None = None,
        *,
        future: bool = True,
        orders: Sequence[np.ndarray] | None = None,
        forbidden_token: int | None = None,
        fixed: bool = False,
    ) -> None:
        self.engine, self.call = engine, Call(sampling or Sampling(), future, orders, forbidden_token)
        self.fixed = fixed
        self.rows: list[Row] = []  # in the order of the decoder's buffers
        self.decoder: Decoder | None = None
        self.width = 0  # positions read per step; chosen for the first rows, and again once all have left
        self.forward: Forward | None = None  # runs steps in place of the network, see `Passes.forward`
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
    ) -> list[Row]:
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
        sampling = self.call.sampling if seed is None else replace(self.call.sampling, seed=seed)
        count, first, first_use = len(queries), len(self.rows), dict[int, int]()
        numbers = [first_use.setdefault(id(query), index) for index, query in enumerate(queries)]
        fields = numbers, samples or [0] * count, samplings or [sampling] * count, guides or [None] * count
        new = [Row(*own) for own in zip(queries, *fields, strict=True)]
        with self.engine.on_device(), turn(self.engine.model):
            self.join(new)
            joined, indices = self.rows[first:], range(first, first + count)
            tokens = self.read(indices, [int(row.query.asked_at[0]) for row in joined])
            try:
                check_numbers(np.array([log_prob for *_, log_prob in tokens]))
            except ModelError:
                self.release(joined)
                raise
            self.note(zip(indices, joined, tokens, strict=True))
        return new

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Advance every row by one step.

        Returns:
            The rows that drew a token; the others are still reading given tokens, or are done.

        Raises:
            ModelError: The logits of some rows are not numbers. These rows have `failed`; the others have drawn.
        """
        active = {index: row for index, row in enumerate(self.rows) if not row.done}
        if not active:
            return []
        engine, decoder, working = self.engine, self.decoder, len(self.rows)
        assert decoder is not None
        used = max(int(row.schedule.reads[row.step].max()) + row.copies for row in active.values()) + 1
        capacity = decoder.slots if decoder.ragged else -(-used // engine.grain) * engine.grain
        if engine.cuda:  # a step is captured for each number of rows, so use few
            rounded = next((rows for rows in CAPTURED if rows >= working), working)
            working = min(rounded, decoder.size[0])
        kinds = [row.kind for row in self.rows]
        sampling = kinds[0] if len(set(kinds)) == 1 else None  # others are drawn after the step
        drawn = {index: int(row.schedule.draws[row.step]) for index, row in active.items()}
        positions = {index: position for index, position in drawn.items() if position >= 0}
        rows = [self.rows[index] for index in positions]
        constrained = any(row.guide is not None for row in self.rows)
        with engine.on_device():
            allowed = self.permitted(rows) if constrained else None
            with turn(engine.model), engine.meter.passes():
                if allowed is not None:
                    decoder.allow([*positions], allowed)
                self.choose_forward(working, max(len(row.schedule.draws) for row in active.values()))
                result = self.play(1, working, capacity, sampling, constrained)
                if sampling is None:
                    assert result is not None
                    decoder.draw(*result, kinds, constrained)
        for row in active.values():
            row.step += 1
        tokens = self.read([*positions], [*positions.values()])
        for row, token in zip(rows, tokens, strict=True):
            row.failed = math.isnan(token[2])
        good = [entry for entry in zip(positions, rows, tokens, strict=True) if not entry[1].failed]
        self.note(good)
        engine.notice(len(good))
        check_numbers(np.array([log_prob for *_, log_prob in tokens]))
        return rows

    @torch.inference_mode()
    def release(self, rows: Sequence[Row]) -> None:
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

    def finish(self, steps: Steps) -> Iterator[list[Answer]]:
        """Take all steps of rows that have joined at once, and yield samples as they are ready.

        Steps of one shape are played together. Finished rows are yielded after the device has been given its next
        steps.
        """
        engine, decoder, rows = self.engine, self.decoder, self.rows
        assert decoder is not None
        with turn(engine.model):
            self.choose_forward(len(rows), len(steps.draws))
        active, done = len(rows), deque[Callable[[], list[Answer]]]()
        # The kernel for ragged rows reads each up to its length, so one shape serves all.
        for stage in steps.stages(engine.grain, decoder.slots if decoder.ragged else None, few=engine.cuda):
            if stage.steps:
                with turn(engine.model), engine.meter.passes(stage.steps):
                    self.play(stage.steps, stage.rows, stage.capacity, rows[0].kind)
                engine.notice(stage.draws)
            if stage.left < active:
                done.append(decoder.drawn(rows, stage.left, active))
                active = stage.left
                if len(done) > 1:
                    yield done.popleft()()
        last = done.popleft()()
        if engine.cuda:
            engine.decoders[:] = [decoder]
        self.decoder = None
        del decoder  # free memory that the consumer of the last rows may need
        yield last

    def join(
        self, new: Sequence[Row], ready: Sequence[Prefill] = (), following: int | None = None
    ) -> tuple[Steps, list[Prefill]]:
        """Add rows: read their queries up to the first blanks, and draw their first tokens.

        The caller holds the lock of the network.

        Args:
            new: The rows. Those of one number share their prefill.
            ready: Prefills that an earlier call returned.
            following: Number of a query whose prefill a later call can use.

        Returns:
            The steps of the rows, which are sorted by them, and the prefill of the query `following` if there is one.
        """
        engine, first = self.engine, len(self.rows)
        passes = engine.prefills({row.number: row.query for row in new}, ready, self.call)
        prefill = next(passes, None)  # a GPU runs it while the host computes the schedule
        if not self.rows:
            self.width = choose_width(new, engine.step_cost)
        if not self.rows or engine.cuda:
            self.forward_for = 0, 0
        steps = steps_of(new, self.width, self.call.future)
        size = first + len(new), steps.slots, max(len(row.query) for row in new) + 1, len(steps.draws)
        decoder, filled, reusable = None, [], []
        while prefill is not None:
            decoder = decoder or self.room(size, prefill.states)
            filled.append(self.fill(decoder, steps.rows, prefill))
            if following in prefill.numbers:
                reusable.append(prefill)
            prefill = None  # free its keys and values before the next pass
            prefill = next(passes, None)
        assert decoder is not None
        members = [member for group, _ in filled for member in group]
        rows, device = [steps.rows[member] for member in members], engine.model.device
        allowed = self.permitted(rows)
        decoder.join(first, steps, bos=engine.bos, mask=engine.mask, orders=self.call.orders)
        first_asked = np.array([row.query.asked_at[0] for row in rows])
        r, positions = (upload(numbers, device) for numbers in (first + np.array(members), first_asked))
        logits, noise = torch.cat([group_logits for _, group_logits in filled]), decoder.noise[r, positions]
        decoder.put(r, positions, *draw_each(logits, noise, [row.sampling for row in rows], allowed))
        engine.notice(len(members))
        self.rows += steps.rows
        return steps, reusable

    # ---- internals --------------------------------------------------------------------------------------------------

    def fill(self, decoder: Decoder, rows: Sequence[Row], prefill: Prefill) -> tuple[list[int], Tensor]:
        """Copy a prefill into the caches of the new rows whose queries it has.

        Returns:
            Indices into `rows`, and (indices, V) the logits of the first asked tokens.
        """
        index = {number: i for i, number in enumerate(prefill.numbers)}
        members = [r for r, row in enumerate(rows) if row.number in index]
        sources, device = np.array([index[rows[member].number] for member in members]), self.engine.model.device
        packed, real = (x[sources] for x in prefill.layout.rectangle())
        targets = (len(self.rows) + np.array(members))[:, None] * (decoder.slots + 1) + np.arange(real.shape[1])
        decoder.cache.fill(prefill.states, upload(packed[real], device), upload(targets[real], device))
        return members, prefill.logits[upload(sources, device)]

    def choose_forward(self, rows: int, steps: int) -> None:
        """Choose what runs steps of so many rows, the longest of which takes so many steps."""
        load = (1, 1) if self.engine.cuda else (rows * self.width, steps)  # on CUDA the choice does not depend on it
        if load != self.forward_for:  # choosing it takes some milliseconds
            self.forward, self.forward_for = self.engine.forward(*load), load

    def play(
        self, steps: int, rows: int, capacity: int, sampling: Sampling | None, constrained: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Take steps of one shape, see `Decoder.play`."""
        assert self.decoder is not None
        ordered, forbidden = self.call.orders is not None, self.call.forbidden_token
        shape = rows, self.width, capacity, sampling, ordered, forbidden, constrained, self.forward
        return self.decoder.play(steps, *shape)

    def permitted(self, rows: Sequence[Row]) -> Tensor | None:
        """Return (rows, V) whether each row may draw each token next, on the device; `None` if no row has a guide."""
        if all(row.guide is None for row in rows):
            return None
        vocabulary = self.engine.model.config.get_text_config().vocab_size
        of_rows = [all_tokens(vocabulary) if row.guide is None else row.guide.allowed() for row in rows]
        different = {id(mask): mask for mask in of_rows}  # constraints keep their masks, so that many are the same
        masks = np.zeros((len(different), vocabulary), dtype=np.bool_)
        for mask, own in zip(masks, different.values(), strict=True):
            mask[: len(own)] = own[:vocabulary]
        numbers = {key: number for number, key in enumerate(different)}
        index = np.array([numbers[id(mask)] for mask in of_rows])
        return upload(masks, self.engine.model.device)[upload(index, self.engine.model.device)]

    def note(self, drawn: Iterable[tuple[int, Row, Token]]) -> None:
        """Add drawn tokens to their rows, which come with their indices, and tell the guides."""
        for index, row, token in drawn:
            row.drawn.append(token)
            if row.guide is not None:
                row.drawn_with.append(self.drawn_with[index])
                row.guide.advance(token[1])

    def read(self, indices: Sequence[int], positions: Sequence[int]) -> list[Token]:
        """Copy the tokens that some rows have just drawn, at these positions, to the host; the only wait of a step."""
        assert self.decoder is not None and self.decoder.newest is not None
        tokens, log_probs, self.drawn_with = self.decoder.newest[:, : max(indices, default=-1) + 1].tolist()
        return [(position, int(tokens[i]), log_probs[i]) for i, position in zip(indices, positions, strict=True)]

    def room(self, size: tuple[int, ...], like: States) -> Decoder:
        """Return a decoder with room for rows; a new, larger one takes over the old one's rows.

        Args:
            size: Number of rows, and for each of them slots of the cache, columns of the text, and steps.
            like: Keys and values of each layer, for their shapes and dtypes.
        """
        engine, grain = self.engine, self.engine.grain
        # Rounded up, so that batches of about the same size can use the same decoder and its captured steps.
        size = size[0], *(-(-number // grain) * grain for number in size[1:]), self.width
        if self.fixed and engine.decoders:
            self.decoder = engine.decoders.pop()  # put back at the end, unless there is an error
            if self.decoder.weights != weights_of(engine.model):
                self.decoder = None
        if self.decoder is not None and self.decoder.fits(size):
            return self.decoder
        old = self.decoder
        if self.fixed:
            self.decoder = old = None  # free its memory first
        elif old is not None:
            doubled = 2 * old.size[0] if size[0] > old.size[0] else old.size[0]
            size = (max(size[0], doubled), *map(max, size[1:], old.size[1:]))
        elif engine.cuda:  # a larger one would capture all its steps again
            slots = max(size[1], ROOMY_SLOTS)
            most = ROOMY_BYTES // (slots * engine.slot_bytes)
            size = (max(size[0], min(ROOMY_ROWS, most)), slots, *(max(x, ROOMY_SLOTS) for x in size[2:4]), size[4])
        larger = Decoder(engine.model, like, size, engine.ragged, tracked=not self.fixed)
        if old is not None:
            larger.take_over(old, len(self.rows))
        self.decoder = larger  # only now: if there was no memory for it, the rows go on in the old one
        return larger
