"""The passes of one model, which `Decoding` and `Engine` share: scores of packed queries, and prefills.

log_probs   queries ──► layouts ──► one forward pass for many queries ──► log p of every asked token
prefills    queries ──► layouts up to their first blanks ──► logits of the first asked tokens, keys and values
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.common.options import ignore
from acgpt.engine.attention import BACKENDS, Cached, Recorder, can_decode_ragged, can_fuse, choose_backend, run
from acgpt.engine.cpu_step import CpuSteps, worthwhile
from acgpt.engine.cuda_step import CudaStep, CudaSteps
from acgpt.engine.decode import Decoder, Forward, slot_bytes
from acgpt.engine.kernels.log_probs import linear_log_probs
from acgpt.engine.layout import Layout, Sequences, batches, build, download, lay_out, neighbours, slots_of, upload
from acgpt.engine.length_head import LengthHead
from acgpt.engine.modules import turn
from acgpt.engine.packed_graphs import PackedGraphs
from acgpt.engine.prefixes import Prefixes, States, part_of
from acgpt.engine.score import TopScore, check_numbers, fast_head, forbid, target_log_probs, top_scores
from acgpt.engine.steps import STEP_COST, StepCost
from acgpt.query.lengths import CLASSES, LengthQuestion
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

MANY_SLOTS = 2**16  # in one call of `log_probs`, for which compiling the fused attention pays off
MOST_EVENTS = 1000  # that a meter holds before those of finished passes are added up
FEW_SLOTS = 2**13  # in a pass that takes less time than launching the modules of a network
T = TypeVar("T")


class Meter:
    """Counter of the passes through a model on one device, and of the device time that they take.

    On CUDA it uses events of the device, and does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, 0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # before and after passes that may still run

    @contextmanager
    def passes(self, times: int = 1) -> Iterator[None]:
        """Count and time `times` passes, which run inside the context."""
        self.calls += times
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            yield
            end.record(stream)
            self._events.append((begin, end))
            if len(self._events) > MOST_EVENTS:
                self.fold()
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def fold(self) -> None:
        """Add up the passes that are over. Without this, the events of a server that nobody times would pile up."""
        over = next((n for n, (_, end) in enumerate(self._events) if not end.query()), len(self._events))
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events[:over]) / 1000
        del self._events[:over]

    @property
    def seconds(self) -> float:
        """Time of all passes so far in seconds; waits for the last pass."""
        if self._events:
            self._events[-1][1].synchronize()
            self.fold()
        return self._seconds


@dataclass(frozen=True)
class Call:
    """The options of one call of `Engine.stream`, described there, or of a `Decoding`."""

    sampling: Sampling
    future: bool
    orders: Sequence[np.ndarray] | None = None
    forbidden_token: int | None = None


@dataclass(frozen=True)
class Prefill:
    """The result of running queries up to their first blank, in one packed pass."""

    numbers: list[int]  # of the queries
    layout: Layout
    states: States  # keys and values of each layer, as in `Recorder`
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


class Passes:
    """Runs one model over many queries at once.

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

    def with_mask(self, mask: int | None) -> Self:
        """Return an engine with another MASK that shares the decoder and the meter."""
        other = copy(self)
        other.mask = mask
        return other

    def with_notice(self, notice: Callable[[int], object]) -> Self:
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
        return self.packed_pass(layout, backend, hidden=hidden, lengths=lengths)[0]

    def packed_pass(
        self,
        layout: Layout,
        backend: str | None = None,
        *,
        hidden: bool = False,
        lengths: bool = False,
        kept: bool = False,
    ) -> tuple[Tensor, States]:
        """Do what `forward_pass` does; if they are to be `kept`, return the keys and values of each layer, too.

        A server replays captured passes. A library user's call may have a shape that never comes back.
        """
        layout, name = layout.to(self.model.device), backend or self.backend
        rows, targets = layout.length_rows if lengths else layout.rows, layout.target_position_ids
        assert rows is not None
        step = self.packed_step(layout) if self.serving or lengths or kept else None
        if step is None:
            recorder = Recorder() if kept else None
            attention = BACKENDS[name](layout)
            out = run(self.model, *layout.inputs(), attention, rows, recorder, targets, hidden=hidden)[0]
            return out, [] if recorder is None else recorder.states
        with self.on_device(), turn(self.model):
            if self.serving and name == "varlen":
                return self.packed_graphs.packed(step, layout, rows, hidden=hidden, kept=kept)
            return step.packed(*layout.inputs(), BACKENDS[name](layout), rows, hidden=hidden, kept=kept)

    def packed_step(self, layout: Layout) -> CudaStep | None:
        """Return what runs a short packed batch in place of the network; `None`: the network does."""
        if not self.cuda or layout.target_position_ids is not None or len(layout.ids) > FEW_SLOTS or not self.ragged:
            return None
        step = self.cuda_steps.current()
        return step if step is not None and step.packs else None

    def length_log_probs(self, questions: Sequence[LengthQuestion], head: LengthHead) -> np.ndarray:
        """Return (n, CLASSES) log p(length | given tokens, lengths of gaps before it) in nats, see `query.lengths`.

        Args:
            questions: The questions. They are packed together; each result is what the question would get alone, up to
                rounding.
            head: The model's head for lengths.
        """
        results = np.empty((len(questions), CLASSES))
        order = np.argsort([len(question) for question in questions], kind="stable")
        # A question has a copy and a text slot per token at most, and batches are padded to their longest.
        for members in neighbours([2 * len(questions[i]) for i in order], self.budget):
            numbers = order[members]
            group = [questions[i] for i in numbers]
            stops = np.array([question.at for question in group])
            layout = lay_out(Sequences.of_lengths(group), bos=self.bos, mask=self.mask, copies=True, stops=stops)
            with self.meter.passes():
                hidden = self.forward_pass(layout, hidden=True, lengths=True)
            logits = head.to(hidden.device)(hidden).double()
            check_numbers(logits.cpu().numpy())
            results[numbers] = logits.log_softmax(-1).cpu().numpy()
        return results

    # ---- prefills and steps ----------------------------------------------------------------------------------------

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

    def prefills(self, queries: dict[int, Query], ready: Sequence[Prefill], call: Call) -> Iterator[Prefill]:
        """Yield a prefill for every query: first those that are ready, then new ones, many queries per pass."""
        ready = [prefill for prefill in ready if not queries.keys().isdisjoint(prefill.numbers)]
        yield from ready
        done = {number for prefill in ready for number in prefill.numbers}
        missing = {number: query for number, query in queries.items() if number not in done}
        for number, query in list(missing.items()):
            if (prefill := self.extend(number, query, call)) is not None:
                del missing[number]
                yield prefill
        packed = self.backend != "dense"
        for group in batches(missing, self.prefill_budget, call.future, first_only=True, packed=packed):
            yield self.prefill(group, [queries[number] for number in group], call)

    def prefill(self, numbers: list[int], queries: list[Query], call: Call) -> Prefill:
        """Run queries up to their first blanks in one pass. Their keys and values are kept for others to share."""
        orders = None if call.orders is None else [call.orders[number] for number in numbers]
        layout = self.first_layout(queries, call, orders)
        with self.meter.passes():
            logits, states = self.packed_pass(layout, kept=True)
        for index, query in enumerate(queries):
            if (prefixes := self.shareable(query, call)) is not None:
                alone = self.first_layout([query], call)
                prefixes.keep(alone, part_of(layout, states, index, alone))
        return Prefill(numbers, layout, states, forbid(logits, call.forbidden_token))

    def extend(self, number: int, query: Query, call: Call) -> Prefill | None:
        """Run what comes after the prefix that a query shares with earlier ones; `None` if it shares nothing."""
        if (prefixes := self.shareable(query, call)) is None:
            return None
        layout = self.first_layout([query], call)
        if (found := prefixes.longest(layout)) is None:
            return None
        states, start = found
        device, size, cache = self.model.device, len(layout.ids), Recorder(states)
        ids, positions = (upload(x[start:].numpy(), device)[None] for x in (layout.ids, layout.positions))
        attention = Cached(torch.arange(start, size, device=device)[None], size, states[0][1].dtype)
        with self.meter.passes():
            logits = run(self.model, ids, positions, attention, keep=1, cache=cache)[:, -1]
        prefixes.keep(layout, cache.states)
        return Prefill([number], layout, cache.states, forbid(logits, call.forbidden_token))

    def shareable(self, query: Query, call: Call) -> Prefixes | None:
        """Return the prefixes that a query may share, and become one of; `None` if it is too short for that."""
        if self.prefixes is None or call.orders is not None or not self.prefixes.suits(query, call.future):
            return None
        return self.prefixes

    def first_layout(self, queries: Sequence[Query], call: Call, orders: Sequence[np.ndarray] | None = None) -> Layout:
        """Return the layout of queries up to their first blanks."""
        return build(queries, bos=self.bos, mask=self.mask, future=call.future, first_only=True, orders=orders)
