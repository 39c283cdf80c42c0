"""The engine: one object that scores queries and draws samples, whatever the method.

Engine(model, bos=…, mask=…)
log_probs   queries ──► layouts ──► one forward pass for many queries ──► log p of every asked token
stream      queries ──► prefill ──► steps with a key-value cache ──► samples, as they are ready (see `decode`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.engine.attention import BACKENDS, can_decode_ragged, choose_backend, run
from acgpt.engine.decode import (
    Answer,
    Decoder,
    Drawn,
    Recorder,
    Sampling,
    draw,
    gathered,
    slot_bytes,
    wanted,
    weights_of,
)  # fmt: skip
from acgpt.engine.layout import Layout, batches, build, upload
from acgpt.engine.locks import turn
from acgpt.engine.meter import Meter, ignore
from acgpt.engine.score import check_numbers, forbid, token_log_probs
from acgpt.engine.steps import STEP_COST, Row, StepCost, Steps, choose_width, few_shapes, steps_of
from acgpt.query.query import Query


@dataclass(frozen=True)
class Call:
    """What a call of `Engine.stream` was told besides its queries, as described there."""

    sampling: Sampling
    future: bool
    orders: Sequence[np.ndarray] | None = None
    never: int | None = None


@dataclass(frozen=True)
class Prefill:
    """Queries that have been run up to their first blank, in one packed pass."""

    numbers: list[int]  # which queries
    layout: Layout
    states: list[tuple[Tensor, Tensor]]  # keys and values of each layer, as in `Recorder`
    logits: Tensor  # (queries, V) for the first asked token of each, what is never drawn left out


class Engine:
    """A model and all that it takes to ask it. It scores queries and draws samples.

    On CUDA it keeps its decoder, with the captured steps, between calls.

    Args:
        model: A causal language model that `attention.check_model` has accepted.
        bos: Id of the token at position 0.
        mask: Id of the token that stands for unknown ones; needed only if a query has any, or a method reads it.
        backend: How attention is computed, see `attention.BACKENDS`; by default the fastest that is exact.
        budget: Maximum number of tokens per forward pass that predicts them all. A longer text still goes alone.
        prefill_budget: Likewise, of a pass that predicts the first asked token of each query; by default the same.
        notice: Called as tokens are drawn, with their number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        bos: int,
        mask: int | None = None,
        backend: str | None = None,
        budget: int = 2**13,
        prefill_budget: int | None = None,
        notice: Callable[[int], object] = ignore,
    ) -> None:
        self.model, self.bos, self.mask, self.backend = model, bos, mask, backend or choose_backend(model)
        self.budget, self.prefill_budget, self.notice = budget, prefill_budget or budget, notice
        self.cuda = model.device.type == "cuda"
        self.most_rows = 256 if self.cuda else 32
        self.slot_bytes = slot_bytes(model)
        self.grain = 128 if self.cuda else 32  # the cache is read in multiples of this many slots
        self.meter = Meter(model.device)  # of all passes
        self.kept: list[Decoder] = []  # at most one

    def with_mask(self, mask: int | None) -> Engine:
        """The engine with another MASK; the decoder and the meter are shared."""
        other = copy(self)
        other.mask = mask
        return other

    # ---- scores -----------------------------------------------------------------------------------------------------

    def log_probs(
        self,
        queries: Sequence[Query],
        *,
        future: bool,
        orders: Sequence[np.ndarray] | None = None,
        never: int | None = None,
    ) -> list[list[float]]:
        """log p(asked token | given tokens, asked tokens before it), for each query from left to right, in nats.

        Args:
            queries: Of any lengths; they are packed together, and each gets what it would get alone, to rounding.
            future: As in `layout.build`.
            orders: As in `layout.build`.
            never: A token that has no probability at all.
        """
        answers: list[list[float]] = [[] for _ in queries]
        for group in batches(dict(enumerate(queries)), self.budget, future):
            order = None if orders is None else [orders[i] for i in group]
            layout = build([queries[i] for i in group], bos=self.bos, mask=self.mask, future=future, orders=order)
            for i, scores in zip(group, self.score(layout, never), strict=True):
                answers[i] = scores.tolist()
        return answers

    def score(self, layout: Layout, never: int | None = None) -> list[np.ndarray]:
        """The log-probabilities of a layout's targets, query by query; `never` as in `log_probs`."""
        logits = self.logits(layout, never)
        scores = token_log_probs(logits, layout.targets.to(logits.device)).numpy()
        check_numbers(scores)
        return np.split(scores, np.cumsum(layout.asked)[:-1])

    def logits(self, layout: Layout, never: int | None = None) -> Tensor:
        """(A, V) the logits of a layout's predictions; `never` as in `log_probs`."""
        layout = layout.to(self.model.device)
        backend = BACKENDS[self.backend](layout)
        logits = run(self.model, *layout.inputs(), backend, layout.rows, target_positions=layout.told)[0]
        return forbid(logits, never)

    # ---- samples ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        queries: Sequence[Query],
        n: int | Sequence[Sequence[int]],
        sampling: Sampling,
        future: bool,
        *,
        orders: Sequence[np.ndarray] | None = None,
        never: int | None = None,
    ) -> Iterator[list[Answer]]:
        """Draw n samples of each query, and hand them over as they are ready: whoever takes them works beside a GPU.

        Args:
            queries: The questions.
            n: How many samples of each; or, for each of them, the numbers of those that are wanted.
            sampling: How a token is drawn.
            future: As in `layout.build`.
            orders: As in `layout.build`.
            never: A token that is never drawn.
        """
        call = Call(sampling, future, orders, never)
        rows = [Row(queries[number], number, sample) for number, sample in wanted(queries, n)]
        rows.sort(key=lambda row: -len(row.query.asked_at))  # neighbours take about as many steps
        with self.on_device():
            most = self.rows_at_once(max((2 * len(query) for query in queries), default=0))
            kept: list[Prefill] = []
            for start in range(0, len(rows), most):
                batch, rest = rows[start : start + most], rows[start + most :]
                kept = yield from self.batch(batch, call, kept, rest[0].number if rest else None)

    def sample(
        self, queries: Sequence[Query], n: int, sampling: Sampling, future: bool, *, never: int | None = None
    ) -> list[list[Drawn]]:
        """As `stream`: n samples of each query, when all are there."""
        return gathered(self.stream(queries, n, sampling, future, never=never), queries, n)

    @cached_property
    def ragged(self) -> bool:
        """Do steps read of each row what it has? Where they may, the kernel is compiled when this is first asked."""
        return can_decode_ragged(self.model)

    @property
    def step_cost(self) -> StepCost:
        """What a step costs here."""
        return STEP_COST["ragged" if self.ragged else "cuda" if self.cuda else "other"]

    def rows_at_once(self, slots: int) -> int:
        """How many rows of so many slots to decode together: as many as pay, if their caches fit into memory."""
        memory: int = torch.cuda.mem_get_info(self.model.device)[0] // 2 if self.cuda else 2 * 2**30
        if self.cuda:
            memory += sum(decoder.cache.nbytes for decoder in self.kept)
        return max(1, min(self.most_rows, memory // max(1, slots * self.slot_bytes)))

    def batch(
        self, rows: list[Row], call: Call, ready: list[Prefill], following: int | None
    ) -> Generator[list[Answer], None, list[Prefill]]:
        """Decode one batch of rows together.

        Args:
            rows: What to draw.
            call: How.
            ready: Prefills that the batch before has left.
            following: The query of the first row of the next batch: if it is one of these, its prefill is left for it.

        Yields:
            What is ready. Returns the prefills that are left.
        """
        queries = {row.number: row.query for row in rows}
        with turn(self.model):
            passes = self.prefills(queries, ready, call)
            prefill = next(passes, None)  # a GPU is at work on it while the host makes its plans
            width = choose_width(rows, self.step_cost)
            steps = steps_of(rows, width, call.future)
            rows, columns = steps.rows, max(map(len, queries.values())) + 1

            # Rounded up, so that batches of about the same size find room, and captured steps, in the same decoder.
            needed = steps.slots, columns, len(steps.draws)
            size = (len(rows), *(-(-x // self.grain) * self.grain for x in needed), width)
            decoder = self.kept.pop() if self.kept else None  # it is put back when all has gone well
            if decoder is not None and not (decoder.fits(size) and decoder.weights == weights_of(self.model)):
                decoder = None
            left, first_logits = [], []
            while prefill is not None:
                if decoder is None:
                    decoder = Decoder(self.model, prefill.states, size, self.ragged)
                first_logits.append(self.fill(decoder, 0, rows, prefill))
                if following in prefill.numbers:
                    left.append(prefill)
                prefill = None  # its keys and values go before the next pass needs the room
                prefill = next(passes, None)
            assert decoder is not None
            self.begin(decoder, 0, steps, first_logits, call)

        # Steps of one shape are played together: so many rows still at work, so many slots of the cache in use. When
        # the device has its next ones to do, the rows that are done by then are handed over.
        used = (steps.reads.max(-1, initial=-1) + steps.copies).max(-1, initial=0) + 1
        capacities = -(-used // self.grain) * self.grain
        if decoder.ragged:  # each row is read as far as it reaches, so one shape does for all
            capacities[:] = decoder.slots
        stages = few_shapes(steps.working)
        working = stages if self.cuda else steps.working
        changes = np.flatnonzero(np.diff(working) | np.diff(capacities)) + 1
        how = replace(call.sampling, seed=0, first=0)  # they are in the noise: the same captured step serves any
        at_work, done = len(rows), deque[Callable[[], list[Answer]]]()
        for group in np.split(np.arange(len(steps.draws)), changes):
            if len(group):
                shape = int(working[group[0]]), width, int(capacities[group[0]]), how
                with turn(self.model), self.meter.passes(len(group)):
                    decoder.play(len(group), *shape, call.orders is not None, call.never)
                self.notice(int((steps.draws[group] >= 0).sum()))
            go_on = int(stages[group[-1] + 1]) if len(group) and group[-1] + 1 < len(stages) else 0
            if go_on < at_work:
                done.append(decoder.drawn(rows, go_on, at_work))
                at_work = go_on
                if len(done) > 1:
                    yield done.popleft()()
        last = done.popleft()()
        if self.cuda:
            self.kept[:] = [decoder]
        del decoder, first_logits  # whoever takes the last rows may need the room
        yield last
        return left

    def on_device(self) -> AbstractContextManager[None]:
        """Make the model's GPU the current device: kernels and captured steps run there."""
        return torch.cuda.device(self.model.device) if self.cuda else nullcontext()

    def prefills(self, queries: dict[int, Query], ready: list[Prefill], call: Call) -> Iterator[Prefill]:
        """Every query run up to its first blank, once: those that are ready, then the others, many in a pass."""
        ready = [prefill for prefill in ready if not queries.keys().isdisjoint(prefill.numbers)]
        yield from ready
        done = {number for prefill in ready for number in prefill.numbers}
        left = {number: query for number, query in queries.items() if number not in done}
        for group in batches(left, self.prefill_budget, call.future, first_only=True, packed=self.backend != "dense"):
            questions = [queries[number] for number in group]
            orders = None if call.orders is None else [call.orders[number] for number in group]
            layout = build(questions, bos=self.bos, mask=self.mask, future=call.future, first_only=True, orders=orders)
            there, recorder = layout.to(self.model.device), Recorder()
            backend = BACKENDS[self.backend](there)
            with self.meter.passes():
                logits = run(self.model, *there.inputs(), backend, there.rows, recorder, there.told)[0]
            yield Prefill(group, layout, recorder.states, forbid(logits, call.never))

    def fill(self, decoder: Decoder, first: int, rows: list[Row], prefill: Prefill) -> tuple[list[int], Tensor]:
        """Fill the caches of the rows, from place `first` on, whose queries have been prefilled.

        Returns:
            Which rows, and (rows, V) the logits of their first asked tokens.
        """
        place = {number: i for i, number in enumerate(prefill.numbers)}
        members = [r for r, row in enumerate(rows) if row.number in place]
        which, device = np.array([place[rows[member].number] for member in members]), self.model.device
        packed, real = (x[which] for x in prefill.layout.rectangle())
        places = (first + np.array(members))[:, None] * (decoder.slots + 1) + np.arange(real.shape[1])
        decoder.cache.fill(prefill.states, upload(packed[real], device), upload(places[real], device))
        return members, prefill.logits[upload(which, device)]

    def begin(
        self, decoder: Decoder, first: int, steps: Steps, logits: Sequence[tuple[list[int], Tensor]], call: Call
    ) -> None:
        """Let rows join from place `first` on, and make their first draws, from what `fill` returned."""
        decoder.join(first, steps, bos=self.bos, mask=self.mask, sampling=call.sampling, orders=call.orders)
        members = [member for some, _ in logits for member in some]
        at = np.array([steps.rows[member].query.asked_at[0] for member in members])
        r, positions = (upload(numbers, self.model.device) for numbers in (first + np.array(members), at))
        of_all = torch.cat([of_some for _, of_some in logits])
        decoder.put(r, positions, *draw(of_all, decoder.noise[r, positions], call.sampling))
        self.notice(len(members))
