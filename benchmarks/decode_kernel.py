"""Attention of a decoding step: our kernel, which reads only the used part of each row, against a masked one.

    python benchmarks/decode_kernel.py
    python benchmarks/decode_kernel.py --no-sweep

Rows as in `acgpt.engine.decode`, 12 heads of 64 channels, in a cache of 1,664 slots of which each row uses a random
part ("ragged") or all use the first 1,024 ("even"). Six layers run one after the other, as a captured graph. "Rate" is
the keys and values that must be read over the time, as a share of the bandwidth of a large copy. Errors are
‖x − reference‖ / ‖reference‖ against float64.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from attention_kernel import milliseconds
from common import copy_bandwidth, machine, report
from result_tables import decode_kernel_rows
from torch import Tensor

from acgpt.engine.attention import Cached, Ragged
from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels import decode as decode_kernel

LAYERS, HEADS, DIM, CAPACITY = 6, 12, 64, 1664
SWEEP = [  # BLOCK_N, num_warps, num_stages
    (32, 2, 3), (32, 4, 4), (64, 1, 3), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3),
    (128, 2, 3), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3), (256, 4, 2), (256, 8, 2),
]  # fmt: skip


class Case:
    """A step of a batch of rows with these `lengths`; each row has its queries in its last `width` slots."""

    def __init__(self, lengths: list[int], width: int, key_heads: int = HEADS) -> None:
        torch.manual_seed(0)
        self.lengths, self.width, rows = lengths, width, len(lengths)
        ends = torch.tensor(lengths, device="cuda")[:, None]
        self.slots = ends - width + torch.arange(width, device="cuda")

        def cache() -> Tensor:
            buffer = torch.randn(rows, CAPACITY + 1, key_heads, DIM, device="cuda", dtype=torch.bfloat16)
            return buffer[:, :CAPACITY].transpose(1, 2)

        self.layers = [(cache(), cache()) for _ in range(LAYERS)]
        self.q = torch.randn(rows, HEADS, width, DIM, device="cuda", dtype=torch.bfloat16)
        self.bytes = sum(lengths) * key_heads * DIM * 4  # keys and values of a layer, once

    def masked(self) -> list[Tensor]:
        capacity = -(-max(self.lengths) // 128) * 128  # rounded up as in sampling
        backend = Cached(self.slots, capacity, torch.bfloat16)
        return [backend(self.q, k[:, :, :capacity], v[:, :, :capacity], None) for k, v in self.layers]

    def ragged(self) -> list[Tensor]:
        backend = Ragged(self.slots, CAPACITY)
        return [backend(self.q, k, v, None) for k, v in self.layers]

    def error(self, output: Tensor) -> float:
        k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1).double() for x in self.layers[0])
        mask = torch.arange(CAPACITY, device="cuda") <= self.slots[:, None, :, None]
        expected = torch.nn.functional.scaled_dot_product_attention(self.q.double(), k, v, attn_mask=mask)
        expected = expected.transpose(1, 2)
        return float((output.double() - expected).norm() / expected.norm())


def captured(work: Callable[[], object]) -> float:
    """Return the microseconds per layer of a captured graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * statistics.median(milliseconds(graph.replay) for _ in range(3)) / LAYERS


def ragged_lengths(rows: int) -> list[int]:
    """Return lengths as in AC-GPT on scattered blocks: copies of up to 0.6 of the text, and the text so far."""
    rng = random.Random(0)
    return [64 + rng.randrange(600) + rng.randrange(960) for _ in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if not kernels.available():
        raise SystemExit("this benchmark needs Triton and a CUDA device of capability 8.0 or higher")
    bandwidth = copy_bandwidth("cuda")
    cases = {
        f"{rows} rows, {kind}, width {width}{', 3 key heads' if key_heads < HEADS else ''}": (
            ragged_lengths(rows) if kind == "ragged" else [1024] * rows, width, key_heads,
        )
        for rows, kind, width, key_heads in (
            (200, "ragged", 1, HEADS), (200, "even", 1, HEADS), (200, "ragged", 2, HEADS), (200, "ragged", 8, HEADS),
            (64, "even", 1, HEADS), (16, "even", 1, HEADS), (1, "even", 1, HEADS), (64, "ragged", 1, 3),
        )
    }  # fmt: skip
    results, best = {}, {}
    for name, arguments in cases.items():
        case = Case(*arguments)
        results[name] = {}
        for path, attend in {"kernel": case.ragged, "mask": case.masked}.items():
            with torch.inference_mode():
                error, us = case.error(attend()[0]), captured(attend)
            results[name][path] = {"us": us, "rate": case.bytes / (us * 1e-6) / bandwidth, "error": error}
        print(name, results[name], flush=True)
        if args.sweep and name in list(cases)[:2]:
            best[name] = sweep(case)
    columns, rows = decode_kernel_rows(results)
    for name, choices in best.items():
        rows += [[f"best for {name}: {choice}", f"{us:.1f}", "", "", ""] for us, choice in choices[:4]]
    record = {
        "benchmark": "decode_kernel", **vars(args), **machine("cuda"), "copy_bandwidth": bandwidth, "cases": results,
        "tuning": decode_kernel.TUNING, "best": best,
    }  # fmt: skip
    report("A step of decoding, bf16, " + machine("cuda")["hardware"], columns, rows, record)


def sweep(case: Case) -> list[tuple[float, tuple[int, ...]]]:
    """Return the microseconds per layer under each tuning of the kernel, the fastest first."""
    default, timings = decode_kernel.TUNING[DIM], []
    for choice in SWEEP:
        decode_kernel.TUNING[DIM] = dict(zip(("BLOCK_N", "num_warps", "num_stages"), choice, strict=True))
        try:
            with torch.inference_mode():
                timings.append((captured(case.ragged), choice))
            print(f"{choice}: {timings[-1][0]:.1f} µs", flush=True)
        except Exception as error:  # too much shared memory, for example: go on with the others
            print(f"{choice}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    decode_kernel.TUNING[DIM] = default
    return sorted(timings)


if __name__ == "__main__":
    main()
