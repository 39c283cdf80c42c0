"""Packed passes of a server, captured as CUDA graphs: the host launches one graph in place of hundreds of kernels.

A pass over a few short texts takes a GPU about a millisecond, and its kernels take several to launch. A graph has fixed
shapes and addresses, so a batch is padded to a *bucket*, a shape that many batches share, in buffers that stay:

    batch     copies of all queries          | texts of all queries
    bucket    copies of all queries, padding | texts of all queries, padding        and padding queries of no slots

                    capacity                                    least
    copies, texts   next power of two; 0 without any            64
    queries         next power of two                           8
    longest         next of 128 · 4ⁿ: an upper bound of the     128
                    copies of a query, and of its text

Attention is the only part of a pass in which slots see each other, and no query has a padding slot. So padding, which
has the tokens of earlier passes, affects nothing. What a caller gets is copied from the buffers, without padding.

A bucket is captured on its second use, if there is room: see `MOST_GRAPHS` and `MOST_BYTES`. A graph that has not been
used for long (`STALE`) gives way. A graph is used only if it agrees with the pass itself. All other batches are run as
they are, and so are those of larger networks in which padding would cost more time than launching kernels
(`PASS_WORK`).

All graphs share the buffers and the memory of their intermediate results, as they are never replayed at the same time:
callers hold the lock of the network, and use one stream. The buffers for 8,192 slots of a network with 135M weights (30
layers, 3 key heads of 64 channels, bf16) have 200 MB: 189 MB of keys and values, and the last hidden states.

Shape legend: B queries, C copies, L text slots, N = C + L, S slots of a bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from acgpt.engine.attention import Segments, Varlen, segment_numbers
from acgpt.engine.cuda_step import CudaStep, PackedRow, states_of
from acgpt.engine.decode import write
from acgpt.engine.device import capture
from acgpt.engine.layout import Layout
from acgpt.engine.prefixes import PASS_WORK

States = list[tuple[Tensor, Tensor]]  # keys and values of each layer, as in `attention.Recorder`

LEAST_SLOTS, LEAST_QUERIES, LEAST_LONGEST = 64, 8, 128
MOST_SLOTS = 2**13  # of a bucket
MOST_BYTES = 2**28  # keys and values of a bucket
MOST_CELLS = 2**17  # queries times their longest text: attention starts thread blocks for all, most of which are empty
MOST_GRAPHS = 64  # of all steps
STALE = 1000  # passes without a use after which a graph gives way: to capture one takes as long as several passes


def capacity(size: int, least: int, base: int = 2) -> int:
    """Return the first of the numbers least, least * base, least * base², … that is at least `size`; 0 for 0."""
    if not size:
        return 0
    while least < size:
        least *= base
    return least


@dataclass(frozen=True)
class Bucket:
    """A shape of packed batches.

    Args:
        copies: Slots of copies; the text begins after them.
        texts: Slots of text.
        queries: Number of queries.
        longest: Upper bound of the number of copies of a query, and of its text slots.
    """

    copies: int
    texts: int
    queries: int
    longest: int

    @classmethod
    def of(cls, copies: Sequence[int], texts: Sequence[int]) -> Bucket:
        """Return the bucket of a batch, from the numbers of copies and text slots of its queries."""
        return cls(
            capacity(sum(copies), LEAST_SLOTS),
            capacity(sum(texts), LEAST_SLOTS),
            capacity(len(copies), LEAST_QUERIES),
            capacity(max(*copies, *texts), LEAST_LONGEST, base=4),
        )

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.copies + self.texts

    @property
    def numbers(self) -> int:
        """Number of integers that describe the segments of a batch, see `segment_numbers`."""
        return self.slots + 3 * (self.queries + 1)

    def fits(self, slots: int) -> bool:
        """Return whether buffers of so many slots have room for it, and whether attention is worth the padding."""
        return self.slots <= slots and self.queries * self.longest <= MOST_CELLS

    def segment_numbers(self, copies: Sequence[int], texts: Sequence[int]) -> np.ndarray:
        """Return the segments of a batch in this shape.

        Returns:
            (S,) the slots of the bucket, query by query, see `Segments.keys`, and 0 for padding; then (3, queries + 1)
            where queries begin among copies, texts and these slots. Padding queries begin at the end.
        """
        starts, keys, _ = segment_numbers(copies, texts)
        gap = self.copies - sum(copies)
        slots = np.pad(np.where(keys < sum(copies), keys, keys + gap), (0, self.slots - len(keys)))
        starts = np.pad(starts, ((0, 0), (0, self.queries - len(copies))), mode="edge")
        return np.concatenate([slots, starts.ravel()])

    def segments(self, numbers: Tensor) -> Segments:
        """Return the segments of a batch from what `segment_numbers` returned, on the device."""
        keys, starts = numbers.split([self.slots, 3 * (self.queries + 1)])
        longest = (self.longest if self.copies else 0), (self.longest if self.texts else 0), 2 * self.longest
        copy_starts, text_starts, key_starts = starts.int().view(3, -1)
        # The last argument is read for gradients only.
        return Segments(self.copies, longest, copy_starts, text_starts, key_starts, keys, keys)

    def unpadded(self, padded: Tensor, layout: Layout, dim: int) -> Tensor:
        """Return a copy of a tensor without the padding in its dimension of slots, in the order of a layout."""
        copies, texts = sum(layout.copies), sum(layout.texts)
        return torch.cat([padded.narrow(dim, 0, copies), padded.narrow(dim, self.copies, texts)], dim)


def most_slots(step: CudaStep) -> int:
    """Return the number of slots of the largest bucket."""
    a_slot = 2 * len(step.layers) * step.heads[1] * step.width * step.embedding.itemsize  # bytes
    return min(MOST_SLOTS, int(MOST_BYTES // a_slot), PASS_WORK // step.weights)


def kind_of(step: CudaStep) -> tuple[object, ...]:
    """Return what passes that share buffers have in common; another stream would overwrite what is still read."""
    weight = step.embedding
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    return len(step.layers), step.heads, step.width, weight.shape, weight.dtype, weight.device, stream


class Buffers:
    """What graphs read and write: inputs, segments, keys and values, hidden states.

    Args:
        step: A step of the network.
    """

    def __init__(self, step: CudaStep) -> None:
        weight, self.slots, self.kind = step.embedding, most_slots(step), kind_of(step)
        with torch.inference_mode(False):  # they are written outside inference mode, too
            # Padding has tokens that exist: token 0, or what an earlier batch had there.
            self.ids, self.positions = weight.new_zeros(2, self.slots, dtype=torch.long)
            self.numbers = weight.new_zeros(self.slots + 3 * (MOST_CELLS // LEAST_LONGEST + 1), dtype=torch.long)
            self.memory = step.memory(self.slots, len(step.layers))
            self.hidden = weight.new_empty(self.slots, weight.shape[1])

    def fill(self, layout: Layout, bucket: Bucket) -> None:
        """Write a batch."""
        copies, texts = sum(layout.copies), sum(layout.texts)
        for buffer, own in ((self.ids, layout.ids), (self.positions, layout.positions)):
            buffer[:copies] = own[:copies]
            buffer[bucket.copies : bucket.copies + texts] = own[copies:]
        write(self.numbers[: bucket.numbers], bucket.segment_numbers(layout.copies, layout.texts))

    def run(self, step: CudaStep, bucket: Bucket) -> None:
        """Run the batch that was written last: what is captured."""
        attention = Varlen(bucket.segments(self.numbers[: bucket.numbers]))
        ids, positions = self.ids[None, : bucket.slots], self.positions[None, : bucket.slots]
        row = PackedRow(self.memory[:, :, :, : bucket.slots], len(step.layers))
        self.hidden[: bucket.slots] = step.norm(*step.residuals(ids, positions, attention, row))[1]

    def results(
        self, step: CudaStep, bucket: Bucket, layout: Layout, keep: Tensor, *, hidden: bool, kept: bool
    ) -> tuple[Tensor, States]:
        """Copy what `CudaStep.packed` returns for the batch that was run last."""
        normal = bucket.unpadded(self.hidden, layout, 0)[keep]
        output = normal if hidden else step.head(normal)
        if not kept:
            return output, []
        layers, pair, row, slots, heads, width = self.memory.shape
        # In three dimensions one kernel copies all of it.
        memory = bucket.unpadded(self.memory.view(layers * pair, slots, heads * width), layout, 1)
        return output, states_of(memory.view(layers, pair, row, -1, heads, width))


@dataclass
class Graph:
    """The captured pass of a bucket.

    Args:
        graph: The graph. `None` on a CPU, where the pass itself is run: in tests.
        used: When it was used last: the number of passes until then.
    """

    graph: torch.cuda.CUDAGraph | None
    used: int


@dataclass
class Captured:
    """The buckets of one step.

    Args:
        seen: Those that were used once.
        refused: Those for which there was no memory.
        graphs: The captured ones.
    """

    seen: set[Bucket] = field(default_factory=set)
    refused: set[Bucket] = field(default_factory=set)
    graphs: dict[Bucket, Graph] = field(default_factory=dict)


class PackedGraphs:
    """The captured passes of the steps of a network. Those of a step are dropped with it."""

    def __init__(self) -> None:
        self.buffers: Buffers | None = None  # made with the first graph
        self.captured: WeakKeyDictionary[CudaStep, Captured] = WeakKeyDictionary()
        self.usable = True  # false once a graph could not be captured, or did not agree
        self.passes = 0

    def __reduce__(self) -> tuple[type[PackedGraphs], tuple[()]]:
        """Copy and pickle an object without graphs: they belong to one network on one GPU."""
        return PackedGraphs, ()

    def packed(
        self, step: CudaStep, layout: Layout, keep: Tensor, *, hidden: bool = False, kept: bool = True
    ) -> tuple[Tensor, States]:
        """Run a packed batch, as `CudaStep.packed` does, with the attention of `Varlen`.

        The caller holds the lock of the network, and has made its device the current one.

        Args:
            step: The step of the network with its active adapters.
            layout: The batch, on the device.
            keep: (n,) slots to return logits for.
            hidden: Return the last hidden states instead of logits.
            kept: Return keys and values, too.
        """
        bucket, own = Bucket.of(layout.copies, layout.texts), self.captured.setdefault(step, Captured())
        buffers, self.passes = self.buffers, self.passes + 1
        if bucket in own.graphs and buffers is not None and buffers.kind == kind_of(step):
            captured = own.graphs[bucket]
            captured.used = self.passes
            buffers.fill(layout, bucket)
            if captured.graph is None:
                buffers.run(step, bucket)
            else:
                captured.graph.replay()
            return buffers.results(step, bucket, layout, keep, hidden=hidden, kept=kept)
        results = step.packed(*layout.inputs(), Varlen(layout), keep, hidden=hidden, kept=kept)
        if bucket not in own.seen:
            own.seen.add(bucket)
        elif self.usable and bucket not in own.graphs and bucket not in own.refused and len(keep):
            self.capture(step, bucket, layout, keep)
        return results

    def capture(self, step: CudaStep, bucket: Bucket, layout: Layout, keep: Tensor) -> None:
        """Capture the pass of a bucket if there is room.

        Args:
            step: The step.
            bucket: The bucket.
            layout: A batch to try it on.
            keep: (n,) slots whose hidden states are compared.
        """
        if not bucket.fits(most_slots(step)) or not self.make_room():
            return
        graphs = [captured.graph for own in self.captured.values() for captured in own.graphs.values()]
        try:
            if self.buffers is None or not graphs:  # those of a network that is now elsewhere, or of another dtype
                self.buffers = None
                self.buffers = Buffers(step)
            buffers = self.buffers
            if buffers.kind != kind_of(step):
                return
            expected = step.packed(*layout.inputs(), Varlen(layout), keep, hidden=True)
            buffers.fill(layout, bucket)
            buffers.run(step, bucket)  # compiles what is to be captured
            graph = None
            if step.embedding.is_cuda:
                pool = next((other.pool() for other in graphs if other is not None), None)
                graph, _ = capture(lambda: buffers.run(step, bucket), step.embedding.device, pool)
                buffers.memory.zero_()  # so that only a replay can agree
                buffers.hidden.zero_()
                graph.replay()
            error = difference(buffers.results(step, bucket, layout, keep, hidden=True, kept=True), expected)
        except torch.OutOfMemoryError:
            self.captured[step].refused.add(bucket)
            return
        except Exception as failure:  # a kernel that cannot be captured, for example
            self.give_up(str(failure))
            return
        if not error <= step.tolerance:
            self.give_up(f"relative difference {error:.2g}")
            return
        self.captured[step].graphs[bucket] = Graph(graph, self.passes)

    def make_room(self) -> bool:
        """Return whether one more graph may be kept; if there are too many, a stale one is dropped."""
        kept = [(own, bucket) for own in self.captured.values() for bucket in own.graphs]
        if len(kept) < MOST_GRAPHS:
            return True
        own, oldest = min(kept, key=lambda one: one[0].graphs[one[1]].used)
        if self.passes - own.graphs[oldest].used < STALE:
            return False
        del own.graphs[oldest]
        own.seen.discard(oldest)  # it is new again
        return True

    def give_up(self, why: str) -> None:
        """Drop all graphs and capture no more."""
        warnings.warn(f"passes cannot be captured here, so the server is slower: {why}", stacklevel=2)
        self.usable, self.buffers = False, None
        self.captured.clear()


def difference(results: tuple[Tensor, States], expected: tuple[Tensor, States]) -> float:
    """Return the largest relative difference between what two passes returned."""
    flat = [[output, *(state for pair in states for state in pair)] for output, states in (results, expected)]
    pairs = [(ours.float(), theirs.float()) for ours, theirs in zip(*flat, strict=True)]
    return torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs]).max().item()
