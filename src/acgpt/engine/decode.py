"""Sampling: prefill once, then ordinary causal decoding with a key-value cache.

    prefill   copies and the text up to the first blank, packed, one pass; shared by all samples of a query
    step      each row reads its newest token and the given ones that follow it, and draws its next asked token

Every row has a cache `[copies | BOS | text]`, so a query at slot s sees slots 0 … s and the mask is a comparison; where
a kernel stops at the end of each row (CUDA, half precision) there is none. Which row reads which positions at which
step is known before the first draw (see `steps`), so all of it is put on the device at once and no step waits for the
host. On CUDA a step is captured as a graph and replayed: at these sizes decoding is bound by kernel launches, not by
arithmetic. The host's own work is done while the device is at the prefill.

Rows of a ragged batch advance at their own pace, and those that are done cost nothing. They are handed over while the
device is at work on the others.

Shape legend: R rows (one a sample), W positions read per step, P columns (BOS, the text, one spare), V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from acgpt.engine.attention import BACKENDS, Backend, Cached, Ragged, can_decode_ragged, head_width, run, take, words
from acgpt.engine.layout import Layout, batches, body_tokens, build, download, upload
from acgpt.engine.locks import turn
from acgpt.engine.meter import Meter, ignore
from acgpt.engine.score import check_numbers, forbid
from acgpt.engine.steps import STEP_COST, Row, StepCost, Steps, choose_width, few_shapes, steps_of
from acgpt.errors import InputError, whole_number
from acgpt.query.query import Query

Drawn = tuple[np.ndarray, np.ndarray]  # the asked tokens of a sample and their log-probabilities, left to right
Answer = tuple[int, int, Drawn]  # the number of a query, the number of a sample of it, and the sample

GREEDY = 1e-6  # temperatures below this are taken for 0: dividing by them would overflow
FEW = 1024  # of the likeliest tokens, in which truncation mostly ends
MOST_GRAPHS = 64  # captured steps to keep: one for each adapter, number of rows, width, capacity and way of drawing


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's distribution.

    Args:
        temperature: Divides the logits; 1 is the model's own distribution, 0 takes the likeliest token (greedy).
        top_p: Draw from the smallest set of likeliest tokens that holds this much probability.
        top_k: Draw from this many likeliest tokens.
        seed: Of the noise, which depends on (seed, query, sample, position) and on nothing else: the same query gets
            the same samples in any batch, to rounding.
        first: The number of the first sample that is drawn, from 0: samples 4 and 5 are n = 2 from 4 on.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if not isinstance(value := getattr(self, name), int | float) or isinstance(value, bool):
                raise InputError(f"{name} must be a number, not {value!r}.")
        for name in ("top_k", "seed", "first"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None and name == "top_k" else whole_number(name, value))
        if not (0 <= self.temperature < float("inf")):
            raise InputError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}.")
        if not (0 < self.top_p <= 1):
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}.")
        if self.first < 0:
            raise InputError(f"first must be at least 0, not {self.first}.")


def noise(query: Query, sample: int, seed: int) -> np.ndarray:
    """(T + 1,) uniform numbers in [0, 1), one a position: the only randomness of a sample."""
    return randomness(query, sample, seed).random(len(query) + 1)


def randomness(query: Query, sample: int, seed: int, purpose: str | None = None) -> np.random.Generator:
    """The randomness of a sample of a query.

    A function of the seed, the query (what is given and where, what is asked) and the sample's number, so a query gets
    the same noise alone and in any batch. What is random besides the tokens of a sample has a `purpose`, and with it
    numbers that are independent of theirs.
    """
    known = [token if given else None for token, given in zip(query.tokens, query.given, strict=True)]
    identity = json.dumps([seed, sample, known, query.asked, *([] if purpose is None else [purpose])])
    key = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=16).digest())
    return np.random.Generator(np.random.Philox(key=key))


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`.

    Args:
        logits: (R, V).
        uniform: (R,) numbers in [0, 1).
        sampling: Temperature and truncation.

    Returns:
        (R,) token ids and (R,) their log-probabilities under the model itself: temperature 1, nothing cut off.
    """
    log_probs = logits.to(logits.dtype if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
    if sampling.temperature < GREEDY:
        token = log_probs.argmax(-1)
    else:
        p = (log_probs / sampling.temperature).softmax(-1)
        mass, total, order = truncated(p, logits if logits.is_cuda else p, sampling)
        token = torch.searchsorted(mass, uniform[:, None].to(mass.dtype) * total, right=True)
        token = token.minimum((mass < total).sum(-1, keepdim=True))  # should the product have been rounded up
        token = (token if order is None else order.gather(1, token))[:, 0]
    return token, log_probs.gather(1, token[:, None])[:, 0]


def truncated(p: Tensor, key: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor | None]:
    """What is left of a distribution.

    Args:
        p: (R, V) probabilities.
        key: (R, V) what the likeliest tokens have most of: p, or the logits, which in half precision a GPU sorts in
            half the time.
        sampling: How it is truncated.

    Returns:
        (R, n) the cumulative probabilities of the tokens, or of the n likeliest from the likeliest on; (R, 1) that of
        the last one that is left; and (R, n) whose they are, if not in the order of the vocabulary.
    """
    if sampling.top_k is None and sampling.top_p == 1:
        mass = p.cumsum(-1)
        return mass, mass[:, -1:], None
    # To sort a large vocabulary takes a CPU longer than the step of a small network, and few of its tokens are left.
    sparing = p.device.type == "cpu" and p.shape[1] > 4 * FEW > 4 * (sampling.top_k or 0)
    for few in (FEW, None) if sparing else (None,):
        ids = None if few is None else key.topk(few).indices.sort(dim=-1).values  # equals stay in their order
        order = (key if ids is None else key.gather(1, ids)).argsort(dim=-1, descending=True, stable=True)
        order = order if ids is None else ids.gather(1, order)
        top = p.gather(1, order)
        mass = top[:, : sampling.top_k].cumsum(-1)
        if sampling.top_p < 1:  # a token stays if those likelier than it hold less than top_p: a prefix of the order
            whole = 1 if sampling.top_k is None else mass[:, -1:]
            kept = (mass - top[:, : sampling.top_k] < sampling.top_p * whole).sum(-1, keepdim=True)
        else:
            kept = torch.full_like(order[:, :1], mass.shape[1])
        if ids is None or (top.gather(1, kept - 1) > top[:, -1:]).all():  # none that was left out is as likely
            break
    return mass, mass.gather(1, kept - 1), order


class Recorder(Cache):
    """Keeps the keys and values of a packed prefill, one pair a layer, each (1, heads, N, D)."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each layer in turn."""
        self.states.append((key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always passed to the model, so it need not count."""
        return 0


class Rows(Cache):
    """The key-value cache of a batch of rows: a step writes at its own slots and reads the first `capacity` ones."""

    def __init__(self, like: list[tuple[Tensor, Tensor]], rows: int, slots: int) -> None:
        super().__init__(layers=[])

        def empty(state: Tensor) -> Tensor:
            _, heads, _, dim = state.shape
            return state.new_zeros(rows, slots, heads, dim)  # zeros: what is masked must still be finite

        self.buffers = [(empty(key), empty(value)) for key, value in like]
        self.dtype = like[0][1].dtype
        self.nbytes = sum(buffer.nbytes for pair in self.buffers for buffer in pair)
        self.slots = torch.empty(0)
        self.capacity = 0

    def fill(self, states: list[tuple[Tensor, Tensor]], packed: Tensor, places: Tensor) -> None:
        """Copy a prefill in: its slots `packed` go to `places`, counted over the slots of all rows."""
        for buffers, pair in zip(self.buffers, states, strict=True):
            for buffer, state in zip(buffers, pair, strict=True):
                taken = take(state[0].transpose(0, 1), packed).to(buffer.dtype).contiguous()
                words(buffer.flatten(0, 1))[places] = words(taken)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer: write this step's keys and values at `slots`, and hand back all that may be seen."""
        rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
        seen = []
        for buffer, state in zip(self.buffers[layer_idx], (key_states, value_states), strict=True):
            buffer[rows, self.slots] = state.transpose(1, 2).to(buffer.dtype)
            seen.append(buffer[: len(rows), : self.capacity].transpose(1, 2))
        return seen[0], seen[1]

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always passed to the model, so it need not count."""
        return 0


class Decoder:
    """Room for a batch of rows on the device, and the step that advances them.

    Its buffers keep their addresses, so that on CUDA a captured step can be replayed, in later batches too, as long as
    the same adapters are at work in the model.
    """

    def __init__(
        self, model: PreTrainedModel, like: list[tuple[Tensor, Tensor]], size: tuple[int, ...], ragged: bool
    ) -> None:
        self.model, self.size, self.weights, self.at_work = model, size, weights_of(model), adapters_at_work(model)
        self.ragged = ragged
        rows, self.slots, columns, steps, width = size
        wide = torch.float32 if model.device.type == "mps" else torch.float64

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self.cache = Rows(like, rows, self.slots + 1)  # one spare slot, for what is written but never read
        self.text = zeros(rows, columns + 1)  # one spare column likewise
        self.log_probs = zeros(rows, columns + 1, dtype=wide)
        self.noise = zeros(rows, columns + 1, dtype=wide)
        self.places = zeros(rows, columns + 2)  # for texts in an order of their own: the position of each column
        self.copies = zeros(rows, 1)
        self.reads, self.draws, self.clock = zeros(steps, rows, width), zeros(steps, rows), zeros(1)
        self.graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}

    def fits(self, size: tuple[int, ...]) -> bool:
        """Is there room for a batch of this size: rows, slots, columns, steps, width?"""
        return all(need <= have for need, have in zip(size, self.size, strict=True))

    def read_in(self, rows: list[Row], copies: np.ndarray, bos: int, mask: int | None, sampling: Sampling) -> None:
        """Write the text of all rows, as far as it is known, their noise, and how many copies they have."""
        text, uniform = np.zeros((len(rows), self.size[2]), dtype=np.int64), np.zeros((len(rows), self.size[2]))
        for r, row in enumerate(rows):
            text[r, 0], text[r, 1 : len(row.query) + 1] = bos, body_tokens(row.query, mask)
            uniform[r, : len(row.query) + 1] = noise(row.query, sampling.first + row.sample, sampling.seed)
        write(self.text[: len(rows), :-1], text)
        write(self.noise[: len(rows), :-1], uniform)
        write(self.copies[: len(rows), 0], copies)
        self.log_probs[: len(rows)] = 0

    def put(self, rows: Tensor, at: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Write each row's drawn token at its position; position -1 is the spare column."""
        self.text[rows, at] = tokens
        self.log_probs[rows, at] = log_probs.to(self.log_probs.dtype)

    def step(self, rows: int, width: int, capacity: int, sampling: Sampling, ordered: bool, never: int | None) -> None:
        """Advance the first `rows` rows by one step of the schedule; the last two arguments as in `Sampler.stream`."""
        reads = self.reads.index_select(0, self.clock)[0, :rows, :width]
        at = self.draws.index_select(0, self.clock)[0, :rows]
        row = torch.arange(rows, device=at.device)
        positions = reads.clamp(min=0)
        self.cache.slots = torch.where(reads >= 0, self.copies[:rows] + reads, self.slots)
        self.cache.capacity = capacity
        ids, target_positions = self.text[row[:, None], positions], None
        if ordered:
            positions, target_positions = self.places[row[:, None], positions], self.places[row[:, None], positions + 1]
        backend: Backend = (
            Ragged(self.cache.slots, self.slots)
            if self.ragged
            else Cached(self.cache.slots, capacity, self.cache.dtype)
        )
        logits = run(self.model, ids, positions, backend, keep=1, cache=self.cache, target_positions=target_positions)
        self.put(row, at, *draw(forbid(logits[:, -1], never), self.noise[row, at], sampling))
        self.clock += 1

    def drawn(self, rows: list[Row], start: int, end: int) -> Callable[[], list[Answer]]:
        """What the rows from `start` on and before `end` have drawn by now, to be had when it is asked for."""
        read = [download(buffer[start:end]) for buffer in (self.text, self.log_probs)]

        def answers() -> list[Answer]:
            text, log_probs = (copied().numpy() for copied in read)
            check_numbers(log_probs[:, :-1])
            asked = [row.query.asked_at for row in rows[start:end]]
            return [
                (row.number, row.sample, (text[r, at], log_probs[r, at]))
                for r, (row, at) in enumerate(zip(rows[start:end], asked, strict=True))
            ]

        return answers

    def play(self, times: int, *shape: Any) -> None:
        """Take `times` steps of one shape; on CUDA the first is run, then captured, and the others replayed."""
        if self.clock.device.type != "cuda":
            for _ in range(times):
                self.step(*shape)
            return
        key = (self.at_work, *shape)
        if key not in self.graphs:
            self.step(*shape)  # also the warm-up that capturing needs
            times -= 1
            if not times:
                return
            if len(self.graphs) == MOST_GRAPHS:
                self.graphs.clear()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], pool=pool):
                self.step(*shape)
        for _ in range(times):
            self.graphs[key].replay()


@dataclass(frozen=True)
class Call:
    """What a call of `Sampler.stream` was told besides its queries, as described there."""

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


class Sampler:
    """Draws samples from one model; on CUDA it keeps its decoder, with the captured steps, between calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        bos: int,
        mask: int | None,
        backend: str,
        budget: int,
        prefill_budget: int | None = None,
    ) -> None:
        self.model, self.bos, self.mask, self.backend = model, bos, mask, backend
        self.budget = budget  # tokens of a pass that predicts every one of them
        self.prefill_budget = prefill_budget or budget  # of one that predicts the first asked token of each query
        self.cuda = model.device.type == "cuda"
        self.most_rows = 256 if self.cuda else 32
        self.slot_bytes = slot_bytes(model)
        self.grain = 128 if self.cuda else 32  # the cache is read in multiples of this many slots
        self.meter = Meter(model.device)  # of all passes
        self.notice: Callable[[int], object] = ignore  # called as tokens are drawn, with their number
        self.decoder: Decoder | None = None

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
        with torch.cuda.device(self.model.device) if self.cuda else nullcontext():  # where kernels and graphs run
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
        if self.cuda and self.decoder is not None:
            memory += self.decoder.cache.nbytes
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
            decoder, self.decoder = self.decoder, None  # it is put back when all has gone well
            if decoder is not None and not (decoder.fits(size) and decoder.weights == weights_of(self.model)):
                decoder = None
            left, first_logits = [], []
            while prefill is not None:
                if decoder is None:
                    decoder = Decoder(self.model, prefill.states, size, self.ragged)
                first_logits.append(self.fill(decoder, rows, prefill))
                if following in prefill.numbers:
                    left.append(prefill)
                prefill = None  # its keys and values go before the next pass needs the room
                prefill = next(passes, None)
            assert decoder is not None
            self.begin(decoder, steps, first_logits, call)

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
        self.decoder = decoder if self.cuda else None
        del decoder, first_logits  # whoever takes the last rows may need the room
        yield last
        return left

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

    def fill(self, decoder: Decoder, rows: list[Row], prefill: Prefill) -> tuple[list[int], Tensor]:
        """Fill the caches of the rows whose queries have been prefilled.

        Returns:
            Which rows, and (rows, V) the logits of their first asked tokens.
        """
        place = {number: i for i, number in enumerate(prefill.numbers)}
        members = [r for r, row in enumerate(rows) if row.number in place]
        which, device = np.array([place[rows[member].number] for member in members]), self.model.device
        packed, real = (x[which] for x in prefill.layout.rectangle())
        places = np.array(members)[:, None] * (decoder.slots + 1) + np.arange(real.shape[1])
        decoder.cache.fill(prefill.states, upload(packed[real], device), upload(places[real], device))
        return members, prefill.logits[upload(which, device)]

    def begin(self, decoder: Decoder, steps: Steps, first_logits: list[tuple[list[int], Tensor]], call: Call) -> None:
        """Write down the steps and what is known of all rows; make their first draw, from what `fill` returned."""
        rows, (count, _, width) = steps.rows, steps.reads.shape
        decoder.at_work = adapters_at_work(self.model)
        decoder.read_in(rows, steps.copies, self.bos, self.mask, call.sampling)
        write(decoder.reads[:count, : len(rows), :width], steps.reads)
        write(decoder.draws[:count, : len(rows)], steps.draws)
        decoder.clock.zero_()
        if call.orders is not None:
            places = np.zeros((len(rows), decoder.places.shape[1]), dtype=np.int64)
            for place_of, row in zip(places, rows, strict=True):
                order = call.orders[row.number]
                place_of[1 : len(order) + 1] = order
            write(decoder.places[: len(rows)], places)
        members = [member for some, _ in first_logits for member in some]
        first = [int(rows[member].query.asked_at[0]) for member in members]
        r, at = (upload(np.array(numbers), self.model.device) for numbers in (members, first))
        logits = torch.cat([of_some for _, of_some in first_logits])
        decoder.put(r, at, *draw(logits, decoder.noise[r, at], call.sampling))
        self.notice(len(members))


def wanted(queries: Sequence[Query], n: int | Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Of every sample the number of its query and its own; `n` as in `Sampler.stream`."""
    numbers = [range(n)] * len(queries) if isinstance(n, int) else n
    return [(n, sample) for n, samples in zip(range(len(queries)), numbers, strict=True) for sample in samples]


def gathered(answers: Iterable[list[Answer]], queries: Sequence[Query], n: int) -> list[list[Drawn]]:
    """n samples of each query that have come in whatever order, query by query."""
    found = {(number, sample): drawn for some in answers for number, sample, drawn in some}
    return [[found[number, sample] for sample in range(n)] for number in range(len(queries))]


def write(buffer: Tensor, array: np.ndarray) -> None:
    """Copy an array into a buffer on a device, or a part of one."""
    wide = buffer.device.type != "mps" or array.dtype != np.float64  # which MPS has not
    buffer.copy_(upload(array if wide else array.astype(np.float32), buffer.device))


def slot_bytes(model: PreTrainedModel) -> int:
    """The keys and values of a token."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_width(config) * model.dtype.itemsize)


def prefill_tokens(model: PreTrainedModel, memory: int) -> int:
    """How many tokens of a prefill so much memory holds: their keys and values, and what a layer makes of them."""
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return memory // int(slot_bytes(model) + (8 * config.hidden_size + 4 * inner) * model.dtype.itemsize)


# What a captured step depends on besides its inputs: where the weights lie, and which adapters are at work.


def weights_of(model: PreTrainedModel) -> tuple[tuple[int, torch.dtype], ...]:
    """Where the weights lie, and what they are: if that changes, every captured step is worthless."""
    return tuple((weight.data_ptr(), weight.dtype) for weight in model.parameters())


def adapter_layers(model: PreTrainedModel) -> list[Any]:
    """The layers that carry PEFT adapters; none if there are no adapters."""
    flag = "_disable_adapters"  # of each such layer, or of its class; peft itself need not be installed
    return [module for module in model.modules() if flag in vars(module) or hasattr(type(module), flag)]


def adapters_at_work(model: PreTrainedModel) -> tuple[object, ...]:
    """Which adapters are switched on, and which are merged, layer by layer: a step is captured for each such state."""
    return tuple(
        (layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters))
        for layer in adapter_layers(model)
    )
