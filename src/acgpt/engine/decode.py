"""Sampling: prefill once, then ordinary causal decoding with a key-value cache.

    prefill   copies and the text up to the first blank, packed, one pass; shared by all samples of a query
    step      each row reads its newest token and the given ones that follow it, and draws its next asked token

Every row has a cache `[copies | BOS | text]`, so a query at slot s attends to slots 0 … s and the mask is a comparison.
On CUDA in half precision no mask is needed: a kernel stops at the end of each row.

Which row reads which positions at which step is known before the first draw (see `steps`). The whole schedule is
uploaded at once, so no step waits for the host. On CUDA a step is captured as a graph and replayed: at these sizes
decoding is bound by the number of kernels, not by arithmetic. `cuda_step` needs fewer than the modules of a network,
and `kernels.draw` draws without sorting. The host prepares the schedule while the device runs the prefill.

Rows may have different lengths and advance independently; finished rows cost nothing. Their samples are returned while
the device works on the other rows.

Shape legend: R rows (one per sample), W positions read per step, P columns (BOS, the text, one spare), V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from acgpt.engine.attention import Backend, Cached, Ragged, as_int64, head_width, run, take
from acgpt.engine.device import capture
from acgpt.engine.kernels import draw as draw_kernel
from acgpt.engine.kernels import step as step_kernels
from acgpt.engine.layout import body_tokens, download, upload
from acgpt.engine.modules import parameters_of
from acgpt.engine.peft import adapter_layers, adapters_at_work
from acgpt.engine.score import check_numbers, forbid
from acgpt.engine.steps import Row, Steps
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

Drawn = tuple[np.ndarray, np.ndarray]  # the asked tokens of a sample and their log-probabilities, left to right
Answer = tuple[int, int, Drawn]  # number of the query, number of the sample, and the sample
Forward = Callable[..., Tensor]  # see `cpu_step.LlamaStep.__call__` and `cuda_step.CudaStep.__call__`

FEW = 1024  # likeliest tokens that are sorted first; truncation mostly ends among them
MOST_GRAPHS = 64  # captured steps to keep: one for each adapter, number of rows, width, capacity and sampling


def noise(query: Query, sample: int, seed: int) -> np.ndarray:
    """Return (T + 1,) uniform numbers in [0, 1), one per position: the only randomness of a sample."""
    return randomness(query, sample, seed).random(len(query) + 1)


def randomness(query: Query, sample: int, seed: int, purpose: str | None = None) -> np.random.Generator:
    """Return the random generator of one sample of a query.

    It depends only on the seed, the query (given tokens and their positions, asked positions) and the sample's number,
    so a query gets the same noise alone and in any batch.

    Args:
        query: The query.
        sample: Number of the sample.
        seed: The seed.
        purpose: Name for random numbers other than those that draw the tokens; they are independent of these.
    """
    known = [token if given else None for token, given in zip(query.tokens, query.given, strict=True)]
    identity = json.dumps([seed, sample, known, query.asked, *([] if purpose is None else [purpose])])
    key = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=16).digest())
    return np.random.Generator(np.random.Philox(key=key))


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return its id and its log-probability, see `draw_among`."""
    token, log_prob, _ = draw_among(logits, uniform, sampling)
    return token, log_prob


def draw_among(
    logits: Tensor, uniform: Tensor, sampling: Sampling, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`.

    Args:
        logits: (R, V).
        uniform: (R,) numbers in [0, 1).
        sampling: Temperature and truncation.
        allowed: (R, V) tokens that may be drawn. Default: all.

    Returns:
        (R,) token ids; (R,) their log-probabilities under the model itself: temperature 1, no truncation, all tokens
        allowed; and, with `allowed`, (R,) the log-probabilities with which they were drawn (0 for greedy decoding).
    """
    if allowed is None and logits.is_cuda and draw_kernel.works(logits.device, logits.dtype):
        temperature = 0.0 if sampling.greedy else sampling.temperature
        return *draw_kernel.draw(logits, uniform, temperature, sampling.top_p, sampling.top_k), None
    log_probs = logits.to(logits.dtype if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
    proposal = log_probs if allowed is None else log_probs.masked_fill(~allowed, float("-inf"))
    drawn_with = None if allowed is None else torch.zeros_like(log_probs[:, 0])
    if sampling.greedy:
        token = proposal.argmax(-1)
    else:
        p = (proposal / sampling.temperature).softmax(-1)
        key = (logits if allowed is None else proposal) if logits.is_cuda else p
        mass, total, order = truncated(p, key, sampling)
        token = torch.searchsorted(mass, uniform[:, None].to(mass.dtype) * total, right=True)
        token = token.minimum((mass < total).sum(-1, keepdim=True))  # in case the product was rounded up
        token = (token if order is None else order.gather(1, token))[:, 0]
        if allowed is not None:
            drawn_with = (p.gather(1, token[:, None]) / total)[:, 0].log()
    return token, log_probs.gather(1, token[:, None])[:, 0], drawn_with


def draw_each(
    logits: Tensor, uniform: Tensor, samplings: Sequence[Sampling], allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row as `draw_among` does, with sampling options for each row."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault((sampling.temperature, sampling.top_p, sampling.top_k), []).append(row)
    if len(groups) == 1:
        return draw_among(logits, uniform, samplings[0], allowed)
    tokens, log_probs, drawn_with = [], [], []
    for rows in groups.values():
        chosen = upload(np.array(rows), logits.device)
        some = None if allowed is None else allowed[chosen]
        token, log_prob, with_which = draw_among(logits[chosen], uniform[chosen], samplings[rows[0]], some)
        tokens.append(token)
        log_probs.append(log_prob)
        drawn_with.append(torch.zeros_like(log_prob) if with_which is None else with_which)
    order = upload(np.argsort(np.concatenate([np.array(rows) for rows in groups.values()])), logits.device)
    token, log_prob = torch.cat(tokens)[order], torch.cat(log_probs)[order]
    return token, log_prob, None if allowed is None else torch.cat(drawn_with)[order]


def truncated(p: Tensor, key: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor | None]:
    """Truncate distributions with top_k and top_p.

    Args:
        p: (R, V) probabilities.
        key: (R, V) values to sort tokens by: p, or the logits, which a GPU sorts in half the time in half precision.
        sampling: Options with top_k and top_p.

    Returns:
        (R, n) cumulative probabilities of the tokens in the order of the vocabulary, or of the n likeliest tokens,
        likeliest first; (R, 1) the cumulative probability up to the last token that remains; and (R, n) the ids of the
        sorted tokens, `None` in the order of the vocabulary.
    """
    if sampling.top_k is None and sampling.top_p == 1:
        mass = p.cumsum(-1)
        return mass, mass[:, -1:], None
    # Sorting a large vocabulary takes a CPU longer than the step of a small network, and few of its tokens remain.
    try_few = p.device.type == "cpu" and p.shape[1] > 4 * FEW > 4 * (sampling.top_k or 0)
    for few in (FEW, None) if try_few else (None,):
        ids = None if few is None else key.topk(few).indices.sort(dim=-1).values  # ties stay in the order of ids
        order = (key if ids is None else key.gather(1, ids)).argsort(dim=-1, descending=True, stable=True)
        order = order if ids is None else ids.gather(1, order)
        top = p.gather(1, order)
        mass = top[:, : sampling.top_k].cumsum(-1)
        if sampling.top_p < 1:  # a token remains if the likelier ones hold less than top_p: a prefix of the order
            whole = 1 if sampling.top_k is None else mass[:, -1:]
            count = (mass - top[:, : sampling.top_k] < sampling.top_p * whole).sum(-1, keepdim=True)
        else:
            count = torch.full_like(order[:, :1], mass.shape[1])
        if ids is None or (top.gather(1, count - 1) > top[:, -1:]).all():  # no token outside the few is as likely
            break
    return mass, mass.gather(1, count - 1), order


class Rows(Cache):
    """The key-value cache of a batch of rows: a step writes at `slots` and reads the first `capacity` slots."""

    def __init__(self, like: list[tuple[Tensor, Tensor]], rows: int, slots: int) -> None:
        super().__init__(layers=[])

        states = [state for pair in like for state in pair]
        shapes = [(state.dtype, state.shape[1], state.shape[3]) for state in states]
        alike = len(set(shapes)) == 1  # of all layers, so that one copy moves a row
        # Zeros: masked values must be finite.
        self.memory = [
            state.new_zeros(len(states) if alike else 1, rows, slots, heads, dim)
            for state, (_, heads, dim) in zip(states, shapes[:1] if alike else shapes, strict=False)
        ]
        buffers = [buffer for block in self.memory for buffer in block]
        self.buffers = list(zip(buffers[::2], buffers[1::2], strict=True))
        self.dtype = like[0][1].dtype
        self.nbytes = sum(block.nbytes for block in self.memory)
        # By layer, if all are alike: (2, rows * slots, heads, D) keys and values.
        self.pairs = self.memory[0].flatten(1, 2).split(2) if alike else ()
        self.slots = torch.empty(0)
        self.flat_slots: Tensor | None = None
        self.capacity = 0
        self.views: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # for the last (rows, capacity) alone

    def advance(self, slots: Tensor, capacity: int) -> None:
        """Set the (R, W) slots that the next step writes, and the number of slots that it may read."""
        self.slots, self.capacity, self.flat_slots = slots, capacity, None

    def fill(self, states: list[tuple[Tensor, Tensor]], packed: Tensor, targets: Tensor) -> None:
        """Copy the slots `packed` of a prefill to the slots `targets`, which count through the slots of all rows."""
        for buffers, pair in zip(self.buffers, states, strict=True):
            for buffer, state in zip(buffers, pair, strict=True):
                values = take(state[0].transpose(0, 1), packed).to(buffer.dtype).contiguous()
                as_int64(buffer.flatten(0, 1))[targets] = as_int64(values)

    def targets(self) -> Tensor:
        """Return the (R * W,) slots that a step writes; they count through the slots of all rows."""
        if self.flat_slots is None:  # in the first layer
            first = torch.arange(len(self.slots), device=self.slots.device) * self.buffers[0][0].shape[1]
            self.flat_slots = (first[:, None] + self.slots).flatten()
        return self.flat_slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values at `slots` and return those of all visible slots; called by each layer."""
        for buffer, state in zip(self.buffers[layer_idx], (key_states, value_states), strict=True):
            buffer.flatten(0, 1)[self.targets()] = state.transpose(1, 2).flatten(0, 1).to(buffer.dtype)
        return self.visible(layer_idx, len(self.slots))

    def put(self, states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Do what `update` does, for (2, R * W, heads, D) keys and values of layers that are alike, on a CPU."""
        self.pairs[layer].index_copy_(1, self.targets(), states)
        return self.visible(layer, len(self.slots))

    def visible(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the (rows, heads, capacity, D) keys and values that a step may read in one layer."""
        size = rows, self.capacity
        if size not in self.views:  # the same in many steps
            self.views = {
                size: [
                    (keys[:rows, : self.capacity].transpose(1, 2), values[:rows, : self.capacity].transpose(1, 2))
                    for keys, values in self.buffers
                ]
            }
        return self.views[size][layer]

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: positions are always passed to the model, so it does not count slots."""
        return 0


class Decoder:
    """Buffers for a batch of rows on the device, and the step that advances them.

    The buffers keep their addresses, so that on CUDA a captured step can be replayed, also in later batches, while the
    same adapters are active in the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        like: list[tuple[Tensor, Tensor]],
        size: tuple[int, ...],
        ragged: bool,
        *,
        tracked: bool = False,
    ) -> None:
        self.model, self.size, self.weights = model, size, weights_of(model)
        self.adapter_layers = adapter_layers(model)
        self.ragged = ragged
        rows, self.slots, columns, steps, width = size
        wide = torch.float32 if model.device.type == "mps" else torch.float64

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self.cache = Rows(like, rows, self.slots + 1)  # one spare slot, written but not read
        self.text = zeros(rows, columns + 1)  # one spare column, likewise
        self.log_probs = zeros(rows, columns + 1, dtype=wide)
        self.noise = zeros(rows, columns + 1, dtype=wide)
        self.allowed: Tensor | None = None  # (rows, V) for constrained rows: the tokens that each may draw next
        # For `Decoding`: the newest token of each row, its log-probability, and that with which it was drawn.
        self.newest = zeros(3, rows, dtype=wide) if tracked else None
        self.position_ids = zeros(rows, columns + 2)  # position of each column, for texts in another order
        self.copies = zeros(rows, 1)
        # Positions that each row reads and draws at each step, and -1 (nothing) at one more step, where it stays.
        self.reads, self.draws = zeros(rows, steps + 1, width) - 1, zeros(rows, steps + 1) - 1
        self.clock, self.ends = zeros(rows), zeros(rows)  # current step of each row, and the one where it stays
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self.warm: set[tuple[object, ...]] = set()  # shapes that have been run once, as capturing them needs

    def fits(self, size: tuple[int, ...]) -> bool:
        """Return whether a batch of this size (rows, slots, columns, steps, width) fits."""
        return all(need <= have for need, have in zip(size, self.size, strict=True))

    def join(
        self,
        first: int,
        steps: Steps,
        *,
        bos: int,
        mask: int | None,
        orders: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Write the text, noise, steps and number of copies of new rows into the buffers.

        Args:
            first: Index of the first new row; the others follow it.
            steps: The rows and their steps.
            bos: Id of the BOS token.
            mask: Id of the MASK token; needed only if there are unknown tokens.
            orders: Positions of each query's tokens, by number of the query; see `layout.build`.
        """
        rows, (count, _, width) = steps.rows, steps.reads.shape
        new = slice(first, first + len(rows))
        text, uniform = np.zeros((len(rows), self.size[2]), dtype=np.int64), np.zeros((len(rows), self.size[2]))
        for r, row in enumerate(rows):
            sampling = row.sampling
            text[r, 0] = bos if row.query.start is None else row.query.start
            text[r, 1 : len(row.query) + 1] = body_tokens(row.query, mask)
            uniform[r, : len(row.query) + 1] = noise(row.query, sampling.first + row.sample, sampling.seed)
        write(self.text[new, :-1], text)
        write(self.noise[new, :-1], uniform)
        write(self.copies[new, 0], steps.copies)
        self.log_probs[new] = 0
        write(self.reads[new, :count, :width], steps.reads.swapaxes(0, 1))
        write(self.draws[new, :count], steps.draws.T)
        self.reads[new, count], self.draws[new, count] = -1, -1
        self.clock[new], self.ends[new] = 0, count
        if orders is not None:
            position_ids = np.zeros((len(rows), self.position_ids.shape[1]), dtype=np.int64)
            for row_positions, row in zip(position_ids, rows, strict=True):
                row_positions[1 : len(orders[row.number]) + 1] = orders[row.number]
            write(self.position_ids[new], position_ids)

    def buffers(self) -> list[Tensor]:
        """Return all buffers whose first dimension is the rows, without the cache."""
        buffers = [self.text, self.log_probs, self.noise, self.position_ids, self.copies]
        return [*buffers, self.reads, self.draws, self.clock, self.ends]

    def leave(self, free: Sequence[int], moved: Sequence[int], rows: int, before: int) -> None:
        """Remove rows, and move the last ones to their indices.

        Args:
            free: Indices below `rows` of rows that leave.
            moved: As many indices, from `rows` on, of rows that stay: they move to these.
            rows: Number of rows that stay.
            before: Number of rows until now.
        """
        if free:
            single = len(free) == 1  # copied without an index on the device
            targets, sources = (x[0] if single else upload(np.array(x), self.clock.device) for x in (free, moved))
            for buffer in self.buffers():
                buffer[targets] = buffer[sources]
            for block in self.cache.memory:  # row by row: all at once would take a copy of them first
                for target, source in zip(free, moved, strict=True):
                    block[:, target] = block[:, source]
        self.clock[rows:before] = self.ends[rows:before]  # where nothing is read or drawn

    def take_over(self, other: Decoder, rows: int) -> None:
        """Copy the first rows of a smaller decoder."""
        for buffer, source in zip(self.buffers(), other.buffers(), strict=True):
            buffer[(slice(rows), *(slice(size) for size in source.shape[1:]))] = source[:rows]
        for block, other_block in zip(self.cache.memory, other.cache.memory, strict=True):
            block[:, :rows, : other_block.shape[2]] = other_block[:, :rows]

    def put(self, rows: Tensor, columns: Tensor, tokens: Tensor, log_probs: Tensor, drawn_with: Tensor | None) -> None:
        """Write each row's drawn token to its column; column -1 is the spare one."""
        self.text[rows, columns] = tokens
        self.log_probs[rows, columns] = log_probs.to(self.log_probs.dtype)
        self.track(rows, tokens, log_probs, drawn_with)

    def track(self, rows: Tensor | slice, *drawn: Tensor | None) -> None:
        """Write what rows have drawn to `newest`, if there is one."""
        if self.newest is not None:
            for newest, numbers in zip(self.newest, drawn, strict=False):
                if numbers is not None:
                    newest[rows] = numbers.to(newest.dtype)

    def allow(self, rows: Sequence[int], allowed: Tensor) -> None:
        """Set the tokens that some rows may draw next, (n, V)."""
        if self.allowed is None:
            self.allowed = torch.ones(self.size[0], allowed.shape[1], dtype=torch.bool, device=allowed.device)
        self.allowed[upload(np.array(rows), allowed.device)] = allowed

    def step(
        self,
        rows: int,
        width: int,
        capacity: int,
        sampling: Sampling | None,
        ordered: bool,
        forbidden_token: int | None,
        constrained: bool = False,
        forward: Forward | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Advance rows by one step of their schedules.

        Args:
            rows: Number of rows to advance, from the first on.
            width: Positions read per step.
            capacity: Slots of the cache that may be read.
            sampling: Temperature and truncation. `None`: nothing is drawn; `draw` does it.
            ordered: The texts are in another order, given by `position_ids`.
            forbidden_token: A token that is not drawn.
            constrained: Draw only tokens that were allowed with `allow`.
            forward: Replaces `attention.run` of the network, see `cpu_step` and `cuda_step`.

        Returns:
            (rows, V) the logits, and (rows,) the columns to draw.
        """
        if self.ragged and forward is not None and not constrained and sampling is not None:
            return self.fused_step(rows, width, capacity, sampling, ordered, forbidden_token, forward)
        now, row = self.clock[:rows], torch.arange(rows, device=self.clock.device)
        reads, columns = self.reads[row, now, :width], self.draws[row, now]
        positions = reads.clamp(min=0)
        self.cache.advance(torch.where(reads >= 0, self.copies[:rows] + reads, self.slots), capacity)
        ids = self.text[row[:, None], positions]
        targets: tuple[Tensor, ...] = ()
        if ordered:
            order = self.position_ids
            positions, targets = order[row[:, None], positions], (order[row[:, None], positions + 1],)
        backend: Backend = (
            Ragged(self.cache.slots, self.slots)
            if self.ragged
            else Cached(self.cache.slots, capacity, self.cache.dtype)
        )
        forward = forward or partial(run, self.model)
        logits = forward(ids, positions, backend, 1, self.cache, *targets)
        logits = forbid(logits[:, -1], forbidden_token)
        if sampling is not None:
            allowed = self.allowed[:rows] if constrained and self.allowed is not None else None
            self.put(row, columns, *draw_among(logits, self.noise[row, columns], sampling, allowed))
        self.clock[:rows] = torch.minimum(now + 1, self.ends[:rows])
        return logits, columns

    def fused_step(
        self,
        rows: int,
        width: int,
        capacity: int,
        sampling: Sampling,
        ordered: bool,
        forbidden_token: int | None,
        forward: Forward,
    ) -> tuple[Tensor, Tensor]:
        """Take the step that `step` describes with two kernels in place of twenty, besides `forward` and the draw."""
        ids, positions, targets, slots, columns, uniform = step_kernels.begin(
            self.clock, (self.reads, self.draws), self.text, self.copies, self.noise, (rows, width), self.slots,
            self.position_ids if ordered else None,
        )  # fmt: skip
        self.cache.advance(slots, capacity)
        logits = forward(ids, positions, Ragged(slots, self.slots), 1, self.cache, *targets)[:, -1]
        if forbidden_token is not None:
            logits[:, forbidden_token] = float("-inf")  # in place: a copy would not be aligned
        drawn = draw(logits, uniform, sampling)
        step_kernels.end(self.clock, self.ends, columns, drawn, self.text, self.log_probs)
        self.track(slice(rows), *drawn)
        return logits, columns

    def draw(self, logits: Tensor, columns: Tensor, samplings: Sequence[Sampling], constrained: bool) -> None:
        """Draw what a step without sampling options has left to draw.

        Args:
            logits: What the step returned.
            columns: Likewise.
            samplings: Options of each row; rows beyond these draw nothing.
            constrained: Draw only tokens that were allowed with `allow`.
        """
        row = torch.arange(len(samplings), device=columns.device)
        logits, columns = logits[: len(row)], columns[: len(row)]
        allowed = self.allowed[: len(row)] if constrained and self.allowed is not None else None
        self.put(row, columns, *draw_each(logits, self.noise[row, columns], samplings, allowed))

    def drawn(self, rows: list[Row], start: int, end: int) -> Callable[[], list[Answer]]:
        """Start an asynchronous copy of the samples of rows `start` … `end` - 1; call the result to wait for it."""
        copies = [download(buffer[start:end]) for buffer in (self.text, self.log_probs)]

        def answers() -> list[Answer]:
            text, log_probs = (wait().numpy() for wait in copies)
            check_numbers(log_probs[:, :-1])
            asked = [row.query.asked_at for row in rows[start:end]]
            return [
                (row.number, row.sample, (text[r, positions], log_probs[r, positions]))
                for r, (row, positions) in enumerate(zip(rows[start:end], asked, strict=True))
            ]

        return answers

    def play(self, times: int, *shape: Any) -> tuple[Tensor, Tensor] | None:
        """Take `times` steps with the arguments `shape` of `step`, and return what the last one does.

        On CUDA the first step of a shape is run; the second is captured as a graph, which is replayed from then on.
        """
        result = None
        if self.clock.device.type != "cuda":
            for _ in range(times):
                result = self.step(*shape)
            return result
        key = (adapters_at_work(self.adapter_layers), *shape)
        if key not in self.warm:
            result = self.step(*shape)
            self.warm.add(key)
            times -= 1
        if times and key not in self.graphs:
            if len(self.graphs) == MOST_GRAPHS:
                self.graphs.clear()
            pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
            self.graphs[key] = capture(lambda: self.step(*shape), self.clock.device, pool)
        for _ in range(times):
            graph, result = self.graphs[key]
            graph.replay()
        return result


def sample_numbers(queries: Sequence[Query], n: int | Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (number of the query, number of the sample) for every sample to draw; `n` as in `Engine.stream`."""
    numbers = [range(n)] * len(queries) if isinstance(n, int) else n
    return [(n, sample) for n, samples in zip(range(len(queries)), numbers, strict=True) for sample in samples]


def gather_samples(answers: Iterable[list[Answer]], queries: Sequence[Query], n: int) -> list[list[Drawn]]:
    """Collect the n samples of each query, which may arrive in any order; return them query by query."""
    samples = {(number, sample): drawn for group in answers for number, sample, drawn in group}
    return [[samples[number, sample] for sample in range(n)] for number in range(len(queries))]


def write(buffer: Tensor, array: np.ndarray) -> None:
    """Copy an array into a buffer on a device, or into a slice of one."""
    supported = buffer.device.type != "mps" or array.dtype != np.float64  # MPS has no float64
    buffer.copy_(upload(array if supported else array.astype(np.float32), buffer.device))


def slot_bytes(model: PreTrainedModel) -> int:
    """Return the number of bytes of one token's keys and values."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_width(config) * model.dtype.itemsize)


def prefill_tokens(model: PreTrainedModel, memory: int) -> int:
    """Return how many prefill tokens fit into `memory` bytes: their keys and values, and a layer's activations."""
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return memory // int(slot_bytes(model) + (8 * config.hidden_size + 4 * inner) * model.dtype.itemsize)


def weights_of(model: PreTrainedModel) -> tuple[tuple[int, torch.dtype], ...]:
    """Return addresses and dtypes of the weights; if these change, captured steps are invalid."""
    return tuple((weight.data_ptr(), weight.dtype) for weight in parameters_of(model))
