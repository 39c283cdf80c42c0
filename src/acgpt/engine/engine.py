"""The engine: one object that scores queries and draws samples, for every method.

Engine(model, bos=…, mask=…)
log_probs   queries ──► layouts ──► one forward pass for many queries ──► log p of every asked token
stream      queries ──► prefill ──► steps with a key-value cache ──► samples, as they are ready (see `decode`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.common.options import ignore
from acgpt.engine.attention import BACKENDS, Cached, Recorder, can_decode_ragged, can_fuse, choose_backend, run
from acgpt.engine.cpu_step import CpuSteps, worthwhile
from acgpt.engine.cuda_step import CudaStep, CudaSteps
from acgpt.engine.decode import (
    Allowed,
    Answer,
    Decoder,
    Drawn,
    Forward,
    draw_each,
    gather_samples,
    sample_numbers,
    slot_bytes,
    weights_of,
)  # fmt: skip
from acgpt.engine.head import fast_head
from acgpt.engine.kernels.log_probs import linear_log_probs
from acgpt.engine.layout import Layout, Sequences, batches, build, download, lay_out, slots_of, upload
from acgpt.engine.length_head import LengthHead
from acgpt.engine.locks import turn
from acgpt.engine.meter import Meter
from acgpt.engine.packed_graphs import PackedGraphs
from acgpt.engine.prefixes import Prefixes, part_of
from acgpt.engine.score import TopScore, check_numbers, forbid, target_log_probs, top_scores
from acgpt.engine.steps import STEP_COST, Row, StepCost, Steps, choose_width, few_shapes, steps_of
from acgpt.query.lengths import CLASSES, LengthQuestion
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

MANY_SLOTS = 2**16  # in one call of `log_probs`, for which compiling the fused attention pays off
FEW_SLOTS = 2**13  # in a pass that takes less time than launching the modules of a network
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """The options of one call of `Engine.stream`, described there."""

    sampling: Sampling
    future: bool
    orders: Sequence[np.ndarray] | None = None
    forbidden_token: int | None = None


@dataclass(frozen=True)
class Prefill:
    """The result of running queries up to their first blank, in one packed pass."""

    numbers: list[int]  # of the queries
    layout: Layout
    states: list[tuple[Tensor, Tensor]]  # keys and values of each layer, as in `Recorder`
    logits: Tensor  # (queries, V) for the first asked token of each; -inf for a forbidden token


def one_ahead(started: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Call each function after the next one has been made, so that the host prepares a pass while a device runs one.

    Args:
        started: Functions that wait for the result of a pass. Making one queues its pass.
    """
    waiting = deque[Callable[[], T]]()
    for wait in started:
        waiting.append(wait)
        if len(waiting) > 1:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


class Engine:
    """Scores queries and draws samples with one model.

    On CUDA it keeps its decoder, with the captured steps, between calls.

    Args:
        model: A causal language model that `architecture.check_model` has accepted.
        bos: Id of the BOS token, at position 0.
        mask: Id of the MASK token; needed only if a query has unknown tokens, or if the method reads MASK.
        backend: Name of the attention backend, see `attention.BACKENDS`. Default: `attention.choose_backend`, and
            the fused kernels for calls that score many texts.
        budget: Maximum number of tokens per forward pass when scoring. A longer text is run alone.
        prefill_budget: Maximum number of tokens per prefill pass. Default: `budget`.
        notice: Called with the number of new tokens whenever some are drawn.
        cpu_steps: Copies of the weights for decoding a few rows on a CPU. Default: the network itself is used.
        cuda_steps: Decoding steps on CUDA with few kernels, to share between engines. Default: steps of its own.
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
        cpu_steps: CpuSteps | None = None,
        cuda_steps: CudaSteps | None = None,
    ) -> None:
        self.model, self.bos, self.mask, self.backend = model, bos, mask, backend or choose_backend(model)
        self.automatic = backend is None
        self.cpu_steps = cpu_steps
        self.budget, self.prefill_budget, self.notice = budget, prefill_budget or budget, notice
        self.cuda = model.device.type == "cuda"
        self.cuda_steps = cuda_steps or CudaSteps(model)
        self.most_rows = 256 if self.cuda else 32
        self.slot_bytes = slot_bytes(model)
        self.grain = 128 if self.cuda else 32  # the cache is read in multiples of this many slots
        self.meter = Meter(model.device)  # of all passes
        self.decoders: list[Decoder] = []  # kept between calls; at most one
        self.prefixes: Prefixes | None = None  # set by a server, whose queries share their beginnings
        self.serving = False  # set by a server, which scores few texts at a time: `CudaStep` may score them
        self.packed_graphs = PackedGraphs()  # of a server, whose packed passes have shapes that come back

    def with_mask(self, mask: int | None) -> Engine:
        """Return an engine with another MASK that shares the decoder and the meter."""
        other = copy(self)
        other.mask = mask
        return other

    def with_notice(self, notice: Callable[[int], object]) -> Engine:
        """Return an engine that reports drawn tokens to another function, and shares the decoder and the meter."""
        other = copy(self)
        other.notice = notice
        return other

    # ---- scores -----------------------------------------------------------------------------------------------------

    def log_probs(
        self,
        queries: Sequence[Query],
        *,
        future: bool,
        orders: Sequence[np.ndarray] | None = None,
        forbidden_token: int | None = None,
    ) -> list[list[float]]:
        """Return log p(asked token | given tokens, asked tokens before it) in nats, for each query from left to right.

        Args:
            queries: The queries, of any lengths. They are packed together; each result is what the query would get
                alone, up to rounding.
            future: Condition on given tokens after an asked one, see `layout.build`.
            orders: Positions of each query's tokens, if not in the order of the text; see `layout.build`.
            forbidden_token: A token that gets probability 0.
        """
        results: list[list[float]] = [[] for _ in queries]
        groups = batches(dict(enumerate(queries)), self.budget, future)
        name = self.scoring_backend(sum(slots_of(query, future) for query in queries))

        def layouts() -> Iterator[Layout]:
            for group in groups:
                order = None if orders is None else [orders[i] for i in group]
                yield build([queries[i] for i in group], bos=self.bos, mask=self.mask, future=future, orders=order)

        passes = (self.start_score(layout, forbidden_token, name) for layout in layouts())
        for group, scores in zip(groups, one_ahead(passes), strict=True):
            for i, own in zip(group, scores, strict=True):
                results[i] = own.tolist()
        return results

    def scoring_backend(self, slots: int) -> str:
        """Return the backend that scores so many slots: the fused kernels if that pays for their compilation."""
        return "fused" if self.automatic and slots > MANY_SLOTS and can_fuse(self.model) else self.backend

    def score(self, layout: Layout, forbidden_token: int | None = None) -> list[np.ndarray]:
        """Return the log-probabilities of a layout's targets, query by query."""
        return self.start_score(layout, forbidden_token)()

    def start_score(
        self, layout: Layout, forbidden_token: int | None = None, backend: str | None = None
    ) -> Callable[[], list[np.ndarray]]:
        """Queue the pass of `score` on the device; call the result to wait for the log-probabilities.

        Args:
            layout: The batch.
            forbidden_token: A token that gets probability 0.
            backend: Name of the attention backend. Default: the engine's.
        """
        asked = layout.asked
        with self.on_device():
            found = download(self.target_log_probs(layout, forbidden_token, backend))

        def wait() -> list[np.ndarray]:
            scores = found().double().numpy()
            check_numbers(scores)
            return np.split(scores, np.cumsum(asked)[:-1])

        return wait

    def target_log_probs(
        self, layout: Layout, forbidden_token: int | None = None, backend: str | None = None
    ) -> Tensor:
        """Return (A,) log-probabilities of a layout's targets, on the device, without waiting for it."""
        layout = layout.to(self.model.device)
        weight = fast_head(self.model, len(layout.rows))
        if weight is None:
            return target_log_probs(self.logits(layout, forbidden_token, backend), layout.targets)
        return linear_log_probs(
            self.forward_pass(layout, backend, hidden=True), weight, layout.targets, forbidden_token
        )

    def top_log_probs(self, queries: Sequence[Query], k: int, *, future: bool) -> list[list[TopScore]]:
        """Return log-probabilities as `log_probs` does, each with the k most probable tokens in its place."""
        results: list[list[TopScore]] = [[] for _ in queries]
        groups = batches(dict(enumerate(queries)), self.budget, future)

        def start(group: list[int]) -> Callable[[], list[TopScore]]:
            layout = build([queries[i] for i in group], bos=self.bos, mask=self.mask, future=future)
            layout = layout.to(self.model.device)
            return top_scores(self.logits(layout), layout.targets, k)

        for group, found in zip(groups, one_ahead(map(start, groups)), strict=True):
            scores = iter(found)
            for i in group:
                results[i] = list(islice(scores, len(queries[i].asked_at)))
        return results

    def logits(self, layout: Layout, forbidden_token: int | None = None, backend: str | None = None) -> Tensor:
        """Return the (A, V) logits of a layout's predictions; -inf for a forbidden token."""
        return forbid(self.forward_pass(layout, backend), forbidden_token)

    def forward_pass(
        self, layout: Layout, backend: str | None = None, *, hidden: bool = False, lengths: bool = False
    ) -> Tensor:
        """Return the (A, V) logits of a layout's predictions, or the (A, width) last hidden states.

        Short batches of questions for lengths, and all short ones of a server, are run by `CudaStep` if it can. Its
        copies of weights with adapters are rounded once more than the network's products.

        Args:
            layout: The layout.
            backend: Attention. Default: that of the engine.
            hidden: Return hidden states.
            lengths: Return those of the questions for lengths, (G, width), instead of those of predictions.
        """
        layout = layout.to(self.model.device)
        rows, targets = layout.length_rows if lengths else layout.rows, layout.target_position_ids
        assert rows is not None
        step = self.packed_step(layout) if self.serving or lengths else None
        if step is not None:
            return self.packed_pass(step, layout, rows, backend, hidden=hidden, kept=False)[0]
        attention = BACKENDS[backend or self.backend](layout)
        return run(self.model, *layout.inputs(), attention, rows, target_positions=targets, hidden=hidden)[0]

    def length_log_probs(self, questions: Sequence[LengthQuestion], head: LengthHead) -> np.ndarray:
        """Return (n, CLASSES) log p(length | given tokens, lengths of gaps before it) in nats, see `query.lengths`.

        Args:
            questions: The questions. They are packed together; each result is what the question would get alone, up to
                rounding.
            head: The model's head for lengths.
        """
        results = np.empty((len(questions), CLASSES))
        order, start = np.argsort([len(question) for question in questions], kind="stable"), 0
        while start < len(order):
            # A question has a copy and a text slot per token at most, and batches are padded to their longest.
            end = start + 1
            while end < len(order) and 2 * (end + 1 - start) * len(questions[order[end]]) <= self.budget:
                end += 1
            group = [questions[i] for i in order[start:end]]
            stops = np.array([question.at for question in group])
            layout = lay_out(Sequences.of_lengths(group), bos=self.bos, mask=self.mask, copies=True, stops=stops)
            with self.meter.passes():
                hidden = self.forward_pass(layout, hidden=True, lengths=True)
            logits = head.to(hidden.device)(hidden).double()
            check_numbers(logits.cpu().numpy())
            results[order[start:end]] = logits.log_softmax(-1).cpu().numpy()
            start = end
        return results

    # ---- samples ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        queries: Sequence[Query],
        n: int | Sequence[Sequence[int]],
        sampling: Sampling,
        future: bool,
        *,
        orders: Sequence[np.ndarray] | None = None,
        forbidden_token: int | None = None,
    ) -> Iterator[list[Answer]]:
        """Draw n samples of each query and yield them as they are ready, so that a consumer works while a GPU goes on.

        Args:
            queries: The queries.
            n: Number of samples of each query; or, for each query, the numbers of the samples to draw.
            sampling: Sampling options.
            future: Condition on given tokens after an asked one, see `layout.build`.
            orders: Positions of each query's tokens, if not in the order of the text; see `layout.build`.
            forbidden_token: A token that is not drawn.
        """
        call = Call(sampling, future, orders, forbidden_token)
        rows = [Row(queries[number], number, sample) for number, sample in sample_numbers(queries, n)]
        rows.sort(key=lambda row: -len(row.query.asked_at))  # rows of a batch then take about as many steps
        with self.on_device():
            most = self.rows_at_once(max((2 * len(query) for query in queries), default=0))
            prefills: list[Prefill] = []
            for start in range(0, len(rows), most):
                batch, rest = rows[start : start + most], rows[start + most :]
                prefills = yield from self.batch(batch, call, prefills, rest[0].number if rest else None)

    def sample(
        self, queries: Sequence[Query], n: int, sampling: Sampling, future: bool, *, forbidden_token: int | None = None
    ) -> list[list[Drawn]]:
        """Draw n samples of each query, as `stream` does, and return them all together."""
        return gather_samples(self.stream(queries, n, sampling, future, forbidden_token=forbidden_token), queries, n)

    @cached_property
    def ragged(self) -> bool:
        """Whether steps read each row only up to its length. The first access compiles the kernel."""
        return can_decode_ragged(self.model)

    @property
    def step_cost(self) -> StepCost:
        """Cost of a decoding step on this device."""
        return STEP_COST["ragged" if self.ragged else "cuda" if self.cuda else "other"]

    def rows_at_once(self, slots: int) -> int:
        """Return how many rows of `slots` slots to decode together: `most_rows`, or as many as fit into memory."""
        memory: int = torch.cuda.mem_get_info(self.model.device)[0] // 2 if self.cuda else 2 * 2**30
        if self.cuda:
            memory += sum(decoder.cache.nbytes for decoder in self.decoders)
        return max(1, min(self.most_rows, memory // max(1, slots * self.slot_bytes)))

    def batch(
        self, rows: list[Row], call: Call, ready: list[Prefill], following: int | None
    ) -> Generator[list[Answer], None, list[Prefill]]:
        """Decode one batch of rows together.

        Args:
            rows: The samples to draw.
            call: Options of the call.
            ready: Prefills that the previous batch returned.
            following: Number of the query of the next batch's first row. If this batch has the same query, its
                prefill is returned.

        Yields:
            Samples, as they are ready.

        Returns:
            Prefills for the next batch.
        """
        queries = {row.number: row.query for row in rows}
        with turn(self.model):
            passes = self.prefills(queries, ready, call)
            prefill = next(passes, None)  # a GPU runs it while the host computes the schedule
            width = choose_width(rows, self.step_cost)
            steps = steps_of(rows, width, call.future)
            rows, columns = steps.rows, max(map(len, queries.values())) + 1

            # Rounded up, so that batches of about the same size can use the same decoder and its captured steps.
            needed = steps.slots, columns, len(steps.draws)
            size = (len(rows), *(-(-x // self.grain) * self.grain for x in needed), width)
            decoder = self.decoders.pop() if self.decoders else None  # put back at the end, unless there is an error
            if decoder is not None and not (decoder.fits(size) and decoder.weights == weights_of(self.model)):
                decoder = None
            reusable, first_logits = [], []
            while prefill is not None:
                if decoder is None:
                    decoder = Decoder(self.model, prefill.states, size, self.ragged)
                first_logits.append(self.fill(decoder, 0, rows, prefill))
                if following in prefill.numbers:
                    reusable.append(prefill)
                prefill = None  # free its keys and values before the next pass
                prefill = next(passes, None)
            assert decoder is not None
            forward = self.forward(len(rows) * width, len(steps.draws))
            self.begin(decoder, 0, steps, first_logits, call)

        # Steps of one shape (active rows, used slots of the cache) are played together. Finished rows are yielded after
        # the device has been given its next steps.
        used = (steps.reads.max(-1, initial=-1) + steps.copies).max(-1, initial=0) + 1
        capacities = -(-used // self.grain) * self.grain
        if decoder.ragged:  # the kernel reads each row up to its length, so one shape serves all
            capacities[:] = decoder.slots
        stages = few_shapes(steps.working)
        working = stages if self.cuda else steps.working
        changes = np.flatnonzero(np.diff(working) | np.diff(capacities)) + 1
        sampling = replace(call.sampling, seed=0, first=0)  # the noise covers these: one captured step serves all
        active, done = len(rows), deque[Callable[[], list[Answer]]]()
        for group in np.split(np.arange(len(steps.draws)), changes):
            if len(group):
                shape = int(working[group[0]]), width, int(capacities[group[0]]), sampling
                with turn(self.model), self.meter.passes(len(group)):
                    ordered = call.orders is not None
                    decoder.play(len(group), *shape, ordered, call.forbidden_token, False, forward)
                self.notice(int((steps.draws[group] >= 0).sum()))
            remaining = int(stages[group[-1] + 1]) if len(group) and group[-1] + 1 < len(stages) else 0
            if remaining < active:
                done.append(decoder.drawn(rows, remaining, active))
                active = remaining
                if len(done) > 1:
                    yield done.popleft()()
        last = done.popleft()()
        if self.cuda:
            self.decoders[:] = [decoder]
        del decoder, first_logits  # free memory that the consumer of the last rows may need
        yield last
        return reusable

    def forward(self, tokens: int, steps: int) -> Forward | None:
        """Return what runs decoding steps in place of the network, with its active adapters; `None`: the network does.

        Args:
            tokens: Positions read per step, over all rows.
            steps: Steps of the longest row.
        """
        if self.cuda:
            return self.cuda_steps.current() if self.ragged else None
        if self.cpu_steps is None or not worthwhile(tokens, steps):
            return None
        return self.cpu_steps.current()

    def on_device(self) -> AbstractContextManager[None]:
        """Make the model's GPU the current device: kernels and captured steps run there."""
        return torch.cuda.device(self.model.device) if self.cuda else nullcontext()

    def prefills(self, queries: dict[int, Query], ready: list[Prefill], call: Call) -> Iterator[Prefill]:
        """Yield a prefill for every query: first those that are ready, then new ones, many queries per pass."""
        ready = [prefill for prefill in ready if not queries.keys().isdisjoint(prefill.numbers)]
        yield from ready
        done = {number for prefill in ready for number in prefill.numbers}
        missing = {number: query for number, query in queries.items() if number not in done}
        sharing = self.prefixes if call.orders is None else None
        if sharing is not None:
            for number, query in list(missing.items()):
                if not sharing.suits(query, call.future):
                    continue
                if (prefill := self.extend(sharing, number, query, call)) is not None:
                    del missing[number]
                    yield prefill
        for group in batches(
            missing, self.prefill_budget, call.future, first_only=True, packed=self.backend != "dense"
        ):
            questions = [queries[number] for number in group]
            orders = None if call.orders is None else [call.orders[number] for number in group]
            layout = build(questions, bos=self.bos, mask=self.mask, future=call.future, first_only=True, orders=orders)
            logits, states = self.prefill_pass(layout.to(self.model.device))
            if sharing is not None:
                for i, question in enumerate(questions):
                    if sharing.suits(question, call.future):
                        alone = self.first_only(question, call)
                        sharing.keep(alone, part_of(layout, states, i, alone))
            yield Prefill(group, layout, states, forbid(logits, call.forbidden_token))

    def prefill_pass(self, layout: Layout) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the logits of a layout's predictions, and the keys and values of each layer."""
        target_positions, recorder = layout.target_position_ids, Recorder()
        step = self.packed_step(layout)
        with self.meter.passes():
            if step is not None:
                return self.packed_pass(step, layout, layout.rows)
            backend = BACKENDS[self.backend](layout)
            logits = run(self.model, *layout.inputs(), backend, layout.rows, recorder, target_positions)[0]
        return logits, recorder.states

    def packed_step(self, layout: Layout) -> CudaStep | None:
        """Return what runs a short packed batch in place of the network; `None`: the network does."""
        if not self.cuda or layout.target_position_ids is not None or len(layout.ids) > FEW_SLOTS or not self.ragged:
            return None
        step = self.cuda_steps.current()
        return step if step is not None and step.packs else None

    def packed_pass(
        self,
        step: CudaStep,
        layout: Layout,
        rows: Tensor,
        backend: str | None = None,
        *,
        hidden: bool = False,
        kept: bool = True,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run a short packed batch with what `packed_step` returned; other arguments are those of `CudaStep.packed`.

        A server replays captured passes. A library user's call may have a shape that never comes back.
        """
        name = backend or self.backend
        with self.on_device(), turn(self.model):
            if self.serving and name == "varlen":
                return self.packed_graphs.packed(step, layout, rows, hidden=hidden, kept=kept)
            return step.packed(*layout.inputs(), BACKENDS[name](layout), rows, hidden=hidden, kept=kept)

    def first_only(self, query: Query, call: Call) -> Layout:
        """Return the layout of the prefill of one query."""
        return build([query], bos=self.bos, mask=self.mask, future=call.future, first_only=True)

    def extend(self, prefixes: Prefixes, number: int, query: Query, call: Call) -> Prefill | None:
        """Return the prefill of a query that shares a prefix: only what comes after it is run.

        Args:
            prefixes: The prefixes that are kept.
            number: Number of the query.
            query: The query.
            call: Options of the call.

        Returns:
            The prefill, which is kept, too; `None` if there is nothing to share.
        """
        layout = self.first_only(query, call)
        found = prefixes.longest(layout)
        if found is None:
            return None
        states, start = found
        device, size, cache = self.model.device, len(layout.ids), Recorder(states)
        ids, positions = (upload(x[start:].numpy(), device)[None] for x in (layout.ids, layout.positions))
        slots = torch.arange(start, size, device=device)[None]
        with self.meter.passes():
            logits = run(self.model, ids, positions, Cached(slots, size, states[0][1].dtype), keep=1, cache=cache)[
                :, -1
            ]
        prefixes.keep(layout, cache.states)
        return Prefill([number], layout, cache.states, forbid(logits, call.forbidden_token))

    def fill(self, decoder: Decoder, first: int, rows: list[Row], prefill: Prefill) -> tuple[list[int], Tensor]:
        """Copy a prefill into the caches of the rows whose queries it has; rows start at index `first`.

        Returns:
            Indices into `rows`, and (indices, V) the logits of the first asked tokens.
        """
        index = {number: i for i, number in enumerate(prefill.numbers)}
        members = [r for r, row in enumerate(rows) if row.number in index]
        sources, device = np.array([index[rows[member].number] for member in members]), self.model.device
        packed, real = (x[sources] for x in prefill.layout.rectangle())
        targets = (first + np.array(members))[:, None] * (decoder.slots + 1) + np.arange(real.shape[1])
        decoder.cache.fill(prefill.states, upload(packed[real], device), upload(targets[real], device))
        return members, prefill.logits[upload(sources, device)]

    def begin(
        self,
        decoder: Decoder,
        first: int,
        steps: Steps,
        logits: Sequence[tuple[list[int], Tensor]],
        call: Call,
        allowed: Allowed | None = None,
        samplings: Sequence[Sampling] | None = None,
    ) -> None:
        """Add rows to the decoder from index `first` on, and draw their first tokens from what `fill` returned.

        Args:
            decoder: The decoder.
            first: Index of the first new row.
            steps: The new rows and their steps.
            logits: For each prefill, indices into the rows and the logits of their first asked tokens.
            call: Options of the call.
            allowed: Tokens that each row may draw first. Default: all.
            samplings: Sampling options of each row. Default: those of the call.
        """
        samplings = [call.sampling] * len(steps.rows) if samplings is None else samplings
        decoder.join(first, steps, bos=self.bos, mask=self.mask, samplings=samplings, orders=call.orders)
        members = [member for group, _ in logits for member in group]
        first_asked = np.array([steps.rows[member].query.asked_at[0] for member in members])
        r, positions = (upload(numbers, self.model.device) for numbers in (first + np.array(members), first_asked))
        first_logits = torch.cat([group_logits for _, group_logits in logits])
        permitted = None if allowed is None else allowed.take(members).upload(self.model.device)
        each = [samplings[member] for member in members]
        decoder.put(r, positions, *draw_each(first_logits, decoder.noise[r, positions], each, permitted))
        self.notice(len(members))
