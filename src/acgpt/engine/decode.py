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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from acgpt.engine.attention import Backend, Cached, Ragged, head_width, run, take, words
from acgpt.engine.layout import body_tokens, download, upload
from acgpt.engine.peft import adapters_at_work
from acgpt.engine.score import check_numbers, forbid
from acgpt.engine.steps import Row, Steps
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
        self.model, self.size, self.weights = model, size, weights_of(model)
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
        # Of each row, what it reads and draws at each of its steps; and nothing, -1, at one step more, where it stays.
        self.reads, self.draws = zeros(rows, steps + 1, width) - 1, zeros(rows, steps + 1) - 1
        self.clock, self.ends = zeros(rows), zeros(rows)  # the step at which each row is, and the one where it stays
        self.graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self.warm: set[tuple[object, ...]] = set()  # shapes that have been run once, as capturing them needs

    def fits(self, size: tuple[int, ...]) -> bool:
        """Is there room for a batch of this size: rows, slots, columns, steps, width?"""
        return all(need <= have for need, have in zip(size, self.size, strict=True))

    def join(
        self,
        first: int,
        steps: Steps,
        *,
        bos: int,
        mask: int | None,
        sampling: Sampling,
        orders: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Write down all that is known of some rows: their text, their noise, their steps, how many copies they have.

        Args:
            first: The place of the first of them; the others follow it.
            steps: The rows and their steps.
            bos: As in `layout.lay_out`.
            mask: Likewise.
            sampling: Says what noise they have.
            orders: As in `layout.build`, by the number of a row's query.
        """
        rows, (count, _, width) = steps.rows, steps.reads.shape
        here = slice(first, first + len(rows))
        text, uniform = np.zeros((len(rows), self.size[2]), dtype=np.int64), np.zeros((len(rows), self.size[2]))
        for r, row in enumerate(rows):
            text[r, 0], text[r, 1 : len(row.query) + 1] = bos, body_tokens(row.query, mask)
            uniform[r, : len(row.query) + 1] = noise(row.query, sampling.first + row.sample, sampling.seed)
        write(self.text[here, :-1], text)
        write(self.noise[here, :-1], uniform)
        write(self.copies[here, 0], steps.copies)
        self.log_probs[here] = 0
        write(self.reads[here, :count, :width], steps.reads.swapaxes(0, 1))
        write(self.draws[here, :count], steps.draws.T)
        self.reads[here, count], self.draws[here, count] = -1, -1
        self.clock[here], self.ends[here] = 0, count
        if orders is not None:
            places = np.zeros((len(rows), self.places.shape[1]), dtype=np.int64)
            for place_of, row in zip(places, rows, strict=True):
                place_of[1 : len(orders[row.number]) + 1] = orders[row.number]
            write(self.places[here], places)

    def buffers(self) -> list[Tensor]:
        """All that belongs to rows, one after the other."""
        own = [self.text, self.log_probs, self.noise, self.places, self.copies]
        own += [self.reads, self.draws, self.clock, self.ends]
        return own + [buffer for pair in self.cache.buffers for buffer in pair]

    def leave(self, place: int, last: int) -> None:
        """Let a row go; the one at place `last` takes its place."""
        if place != last:
            for buffer in self.buffers():
                buffer[place] = buffer[last]
        self.clock[last] = self.ends[last]  # where nothing is read or drawn

    def take_over(self, other: Decoder, rows: int) -> None:
        """Copy the first rows of a smaller decoder."""
        for mine, theirs in zip(self.buffers(), other.buffers(), strict=True):
            mine[(slice(rows), *(slice(size) for size in theirs.shape[1:]))] = theirs[:rows]

    def put(self, rows: Tensor, at: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Write each row's drawn token at its position; position -1 is the spare column."""
        self.text[rows, at] = tokens
        self.log_probs[rows, at] = log_probs.to(self.log_probs.dtype)

    def step(self, rows: int, width: int, capacity: int, sampling: Sampling, ordered: bool, never: int | None) -> None:
        """Advance the first `rows` rows by one step of the schedule; the last two arguments as in `Engine.stream`."""
        now, row = self.clock[:rows], torch.arange(rows, device=self.clock.device)
        reads, at = self.reads[row, now, :width], self.draws[row, now]
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
        self.clock[:rows] = torch.minimum(now + 1, self.ends[:rows])

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
        """Take `times` steps of one shape. On CUDA the first step of a shape is run, later ones are replayed."""
        if self.clock.device.type != "cuda":
            for _ in range(times):
                self.step(*shape)
            return
        key = (adapters_at_work(self.model), *shape)
        if key not in self.warm:
            self.step(*shape)
            self.warm.add(key)
            times -= 1
        if times and key not in self.graphs:
            if len(self.graphs) == MOST_GRAPHS:
                self.graphs.clear()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], pool=pool):
                self.step(*shape)
        for _ in range(times):
            self.graphs[key].replay()


def wanted(queries: Sequence[Query], n: int | Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Of every sample the number of its query and its own; `n` as in `Engine.stream`."""
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


def weights_of(model: PreTrainedModel) -> tuple[tuple[int, torch.dtype], ...]:
    """Where the weights lie, and what they are: if that changes, every captured step is worthless."""
    return tuple((weight.data_ptr(), weight.dtype) for weight in model.parameters())
