"""Attention kernels: ours in training against two calls of flash attention, in a decoding step against a mask.

    python benchmarks/attention_kernels.py attention
    python benchmarks/attention_kernels.py decoding
    python benchmarks/attention_kernels.py decoding --sweep         # block sizes for `TUNING` on another GPU

*attention* has batches as in training: texts of 1,023 slots with c copies each, c uniform up to 0.6 of the text, and
one-slot dummies. TFLOP/s count the pairs of slots of which one attends to the other: 4 operations per pair and channel
forward, 10 backward.

*decoding* has rows as in `acgpt.engine.decode`, 12 heads of 64 channels, in a cache of 1,664 slots of which each row
uses a random part ("ragged") or all use the first 1,024 ("even"). Six layers run one after the other, as a captured
graph. "copy_rate" is that of the keys and values that must be read, as a share of the bandwidth of a large copy.

The kernels are checked by the tests (`make gpu-test`).
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from common import Parser, copy_bandwidth, print_record
from torch import Tensor

from acgpt.engine.attention import Cached, Fused, Ragged, Segments, Varlen
from acgpt.engine.kernels import attention as attention_kernel
from acgpt.engine.kernels import decode as decode_kernel

LAYERS, HEADS, DIM, LENGTH, CAPACITY = 6, 12, 64, 1023, 1664
BLOCKS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
SWEEP = {
    "attention": list(itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3))),
    "decoding": list(itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4))),  # BLOCK_M is fixed
}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("kernel", choices=SWEEP)
    parser.add_argument("--sweep", action="store_true", help="also time the first case under other block sizes")
    args = parser.parse_args()
    if not attention_kernel.available():
        parser.error("this benchmark needs Triton and a CUDA device of capability 8.0 or higher.")
    (attention if args.kernel == "attention" else decoding)(args.sweep)


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median device time of a call."""
    for _ in range(3):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def sweep(
    tuning: dict[int, dict[str, int]], kernel: str, work: Callable[[], float]
) -> Iterable[tuple[float, tuple[int, ...]]]:
    """Return what `work` returns under each tuning of a kernel, the fastest first."""
    default, results, choices = tuning[DIM], [], SWEEP[kernel]
    for choice in choices:
        tuning[DIM] = dict(zip(BLOCKS[-len(choice) :], choice, strict=True))
        try:
            results.append((work(), choice))
        except Exception as error:  # too much shared memory, for example: go on with the others
            print(f"{choice}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    tuning[DIM] = default
    return sorted(results)


# ---- attention in training ------------------------------------------------------------------------------------------


class Batch:
    """Texts with q and k as rotary embeddings leave them (heads before slots), and v a part of a fused projection."""

    def __init__(self, texts: int, device: str = "cuda", length: int = LENGTH) -> None:
        torch.manual_seed(0)
        rng = random.Random(0)
        copies = [round(rng.uniform(0, 0.6 * length)) for _ in range(texts)]
        dummies, spare = -(texts * length) % 128 or 128, -sum(copies) % 128
        copies += [spare // dummies + (i < spare % dummies) for i in range(dummies)]
        lengths = [length] * texts + [1] * dummies
        slots = sum(copies) + sum(lengths)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        q, k, v = draw(HEADS, slots, DIM), draw(HEADS, slots, DIM), draw(slots, HEADS, 3 * DIM)[..., 2 * DIM :]
        self.qkv = [x[None].detach().requires_grad_() for x in (q, k, v.transpose(0, 1))]  # (1, H, N, D)
        self.dout = draw(1, slots, HEADS, DIM)
        self.segments = Segments.of(copies, lengths, torch.device(device))
        self.pairs = sum(c * c + t * c + t * (t + 1) / 2 for c, t in zip(copies, lengths, strict=True))


def attention(sweeps: bool) -> None:
    """Time a layer of training, forward and backward."""
    rows: list[dict[str, Any]] = []
    for texts in (64, 48):
        batch = Batch(texts)
        for name, backend in (("acgpt", Fused(batch.segments)), ("two flash calls", Varlen(batch.segments))):
            forward, backward = (milliseconds(work) for work in passes(batch, backend))
            tera = batch.pairs * HEADS * DIM / 1e12
            rows.append(
                {
                    "row": f"{texts} texts, {name}",
                    "forward_milliseconds": forward,
                    "backward_milliseconds": backward,
                    "forward_tflops": 4e3 * tera / forward,
                    "backward_tflops": 10e3 * tera / backward,
                }
            )
        if sweeps and texts == 64:
            forward_pass, backward_pass = passes(batch, Fused(batch.segments))
            for kernel, tuning in attention_kernel.TUNING.items():
                direction, work = ("forward", forward_pass) if kernel == "forward" else ("backward", backward_pass)
                for time, choice in sweep(tuning, "attention", lambda work=work: milliseconds(work, 10)):
                    rows.append({"row": f"{kernel} {choice}", f"{direction}_milliseconds": time})
    print_record("kernels", "attention of training", rows, "cuda")


def passes(batch: Batch, backend: Fused | Varlen) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a layer forward, and backward."""
    out = backend(*batch.qkv, DIM**-0.5)

    def backward() -> object:
        return torch.autograd.grad(out, batch.qkv, batch.dout, retain_graph=True)

    return lambda: backend(*batch.qkv, DIM**-0.5), backward


# ---- attention of a decoding step ------------------------------------------------------------------------------------


class Step:
    """A step of a batch of rows with these `lengths`; each row has its queries in its last `width` slots."""

    def __init__(self, lengths: list[int], width: int, key_heads: int = HEADS, device: str = "cuda") -> None:
        torch.manual_seed(0)
        rows = len(lengths)
        self.slots = torch.tensor(lengths, device=device)[:, None] - width + torch.arange(width, device=device)
        self.most = -(-max(lengths) // 128) * 128  # rounded up as in sampling

        def cache() -> Tensor:
            buffer = torch.randn(rows, CAPACITY + 1, key_heads, DIM, device=device, dtype=torch.bfloat16)
            return buffer[:, :CAPACITY].transpose(1, 2)

        self.layers = [(cache(), cache()) for _ in range(LAYERS)]
        self.q = torch.randn(rows, HEADS, width, DIM, device=device, dtype=torch.bfloat16)
        self.bytes = sum(lengths) * key_heads * DIM * 4  # keys and values of a layer, once

    def masked(self) -> list[Tensor]:
        backend = Cached(self.slots, self.most, torch.bfloat16)
        return [backend(self.q, k[:, :, : self.most], v[:, :, : self.most], None) for k, v in self.layers]

    def ragged(self) -> list[Tensor]:
        backend = Ragged(self.slots, CAPACITY)
        return [backend(self.q, k, v, None) for k, v in self.layers]


@torch.inference_mode()
def microseconds(work: Callable[[], object]) -> float:
    """Return the time of a captured graph, per layer."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * statistics.median(milliseconds(graph.replay) for _ in range(3)) / LAYERS


def decoding(sweeps: bool) -> None:
    """Time a layer of a decoding step."""
    rows: list[dict[str, Any]] = []
    bandwidth = copy_bandwidth("cuda")
    for count, kind, width, key_heads in (
        (200, "ragged", 1, HEADS), (200, "even", 1, HEADS), (200, "ragged", 2, HEADS), (200, "ragged", 8, HEADS),
        (64, "even", 1, HEADS), (16, "even", 1, HEADS), (1, "even", 1, HEADS), (64, "ragged", 1, 3),
    ):  # fmt: skip
        # Ragged as in AC-GPT on scattered blocks: copies of up to 0.6 of the text, and the text so far.
        rng = random.Random(0)
        ragged = [64 + rng.randrange(600) + rng.randrange(960) for _ in range(count)]
        step = Step(ragged if kind == "ragged" else [1024] * count, width, key_heads)
        times = {"kernel": microseconds(step.ragged), "mask": microseconds(step.masked)}
        name = f"{count} rows, {kind}, width {width}{', 3 key heads' if key_heads < HEADS else ''}"
        rows += [
            {
                "row": f"{name}, {path}",
                "microseconds": time,
                "copy_rate_percent": 100 * step.bytes / (time * 1e-6) / bandwidth,
                "relative_time": time / times["mask"],
            }
            for path, time in times.items()
        ]
        if sweeps and len(rows) == 2:
            results = sweep(decode_kernel.TUNING, "decoding", lambda step=step: microseconds(step.ragged))
            rows += [{"row": f"{name}: {choice}", "microseconds": time} for time, choice in results]
    print_record("kernels", "decoding, a layer", rows, "cuda", copy_bytes_per_second=bandwidth)


if __name__ == "__main__":
    main()
