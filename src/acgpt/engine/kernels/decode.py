# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton kernels for the attention of a decoding step, which read each row's cache only up to its length.

The time of a step's attention is that of reading keys and values. With a mask, all rows are read up to the last slot of
the longest one. Here a program handles one row and one key head, with the queries that share it, and stops where the
row ends:

    slots    0 ………………………………………… capacity
    row 0    █████████████▒▒······        █  read        ▒  read, to complete a block
    row 1    ████▒▒···············        ·  not read
    row 2    █████████████████████

The length of a row is read from `slots` on the device, so that a captured step serves every length.

    part_kernel    a part of a row's slots, for all queries of a key head; the whole row if there are many rows
    join_kernel    combine the parts of a row: a few rows are split, or most of the GPU would be idle

Softmax is in base 2 and sums are in float32. There are no atomic additions, so results are reproducible bit by bit.

Shape legend: R rows, W queries per row, H query heads, K key heads, G = H / K, D channels.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels.attention import HAS_TRITON, jit, rowwise

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

# Constants of `parts_of`, chosen from a few timings on an H200 (benchmarks/attention_kernels.py).
BUSY = 2048  # programs that keep a large GPU busy to the end
MOST_PARTS = 16
FEW = 64  # with fewer programs most of the GPU is idle, so that small parts pay off
LEAST_PART = {"few": 128, "many": 512}  # slots; shorter parts are not split further
BLOCK_M = 64  # maximum number of queries of a row and key head in one program
# Block sizes by head dimension. Those for 64 are the best of a sweep with the same benchmark, at 200 rows of one query
# each. For 128, larger blocks do not fit into shared memory if a block of queries is full.
TUNING: dict[int, dict[str, int]] = {
    32: {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3},
    128: {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
}


@jit("width", "spare", "rows")
def part_kernel(
    q, k, v, slots, out, lse, width, spare,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, scale2,
    rows, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out over a part of one row's slots, for a block of the queries of one key head; lse if PARTS > 1."""
    program = tl.program_id(0)
    part, key_head = program % PARTS, program // PARTS % K
    # Backwards: rows are sorted by number of steps, and those with most copies to read should not start last.
    row = (rows - 1 - program // PARTS // K).to(tl.int64)
    m_range, n_range, d_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    query = tl.program_id(1) * BLOCK_M + m_range  # head by head, then by position in the row
    real = query < G * width
    head, at = key_head * G + query // width, query % width
    slot = tl.load(slots + row * width + at, mask=real, other=0)
    limit = tl.where(slot < spare, slot + 1, 1).to(tl.int32)  # padding reads one slot only
    length = tl.max(limit, 0)
    share = tl.cdiv(length, PARTS * BLOCK_N) * BLOCK_N
    begin = part * share
    end = tl.minimum(begin + share, length)

    q_rows = tl.load(
        q + row * q_row + (head * q_head + at * q_slot)[:, None] + d_range[None, :], mask=real[:, None], other=0.0
    )
    k_block = k + row * k_row + key_head * k_head + n_range[None, :] * k_slot + d_range[:, None]  # (D, BLOCK_N)
    v_block = v + row * v_row + key_head * v_head + n_range[:, None] * v_slot + d_range[None, :]  # (BLOCK_N, D)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + n_range
        k_keys = tl.load(k_block + start * k_slot, mask=(keys < end)[None, :], other=0.0)
        v_keys = tl.load(v_block + start * v_slot, mask=(keys < end)[:, None], other=0.0)
        logits = tl.dot(q_rows, k_keys.to(q_rows.dtype), input_precision="ieee") * scale2
        logits = tl.where((keys[None, :] < limit[:, None]) & (keys < end)[None, :], logits, float("-inf"))
        new_m = tl.maximum(m, tl.max(logits, 1))
        base = tl.where(new_m == float("-inf"), 0.0, new_m)  # a query that has read nothing yet
        p = tl.math.exp2(logits - base[:, None])
        shrink = tl.math.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_keys.dtype), v_keys, acc * shrink[:, None], input_precision="ieee")
        m = new_m

    found = total > 0
    mean = acc / tl.where(found, total, 1.0)[:, None]
    place = (row * width + at) * (K * G) + head  # of (R, W, H)
    if PARTS > 1:
        place += part.to(tl.int64) * rows * width * (K * G)
        tl.store(lse + place, tl.where(found, m + tl.math.log2(tl.where(found, total, 1.0)), float("-inf")), mask=real)
    tl.store(out + place[:, None] * D + d_range[None, :], mean.to(out.dtype.element_ty), mask=real[:, None])


@jit("count")
def join_kernel(parts, lse, out, count, D: tl.constexpr, PARTS: tl.constexpr):
    """Average the parts of one query, weighted by the denominators of their softmaxes."""
    query = tl.program_id(0).to(tl.int64)
    part, d_range = tl.arange(0, PARTS), tl.arange(0, D)
    logs = tl.load(lse + part * count + query)
    weights = tl.math.exp2(logs - tl.max(logs, 0))
    means = tl.load(parts + (part * count + query)[:, None] * D + d_range[None, :])
    mean = tl.sum(means * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query * D + d_range, mean.to(out.dtype.element_ty))


def parts_of(programs: int, capacity: int) -> int:
    """Return the number of parts of each row, a power of two; `programs` is the number of programs without parts."""
    least = LEAST_PART["few" if programs < FEW else "many"]
    parts = min(MOST_PARTS, BUSY // max(1, programs), capacity // least)
    return 1 << max(0, parts.bit_length() - 1)


def attention(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, spare: int, scale: float) -> Tensor:
    """Compute attention for a decoding step: the query at slot s of a row reads slots 0 … s of that row's cache.

    Args:
        q: (R, H, W, D) queries in bf16 or fp16 (float32 for tests), D 32, 64 or 128, with any strides.
        k: (R, K, capacity, D) keys of the cache; H is a multiple of K.
        v: (R, K, capacity, D) values, of the dtype of the queries.
        slots: (R, W) int64, slot of each query in its row's cache.
        spare: Queries at this slot or beyond are padding; their outputs are finite but meaningless.
        scale: Scale of the logits.

    Returns:
        (R, W, H, D) outputs.
    """
    rows, heads, width, dim = q.shape
    key_heads, capacity = k.shape[1:3]
    groups = heads // key_heads
    q, k, v, slots = rowwise(q), rowwise(k), rowwise(v), slots.contiguous()
    block = min(BLOCK_M, max(16, 1 << (groups * width - 1).bit_length()))
    blocks = -(-groups * width // block)
    parts = parts_of(rows * key_heads * blocks, capacity)
    count = rows * width * heads
    out = torch.empty(rows, width, heads, dim, dtype=v.dtype, device=v.device)
    means = out if parts == 1 else torch.empty(parts, count, dim, dtype=torch.float32, device=v.device)
    lse = torch.empty(parts, count, dtype=torch.float32, device=v.device) if parts > 1 else means  # unused for 1
    part_kernel[(rows * key_heads * parts, blocks)](
        q, k, v, slots, means, lse, width, spare, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        scale * math.log2(math.e), rows, K=key_heads, G=groups, D=dim, PARTS=parts, BLOCK_M=block, **TUNING[dim],
    )  # fmt: skip
    if parts > 1:
        join_kernel[(count,)](means, lse, out, count, D=dim, PARTS=parts, num_warps=1)
    return out


@functools.cache
def works(device: torch.device, dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels can be compiled and run on this device, for heads of `dim` channels.

    They are tried once, with the largest block of queries and several parts. If they fail, decoding uses a mask.
    """

    def trial() -> bool:
        q, k = (torch.zeros(1, 1, n, dim, dtype=dtype, device=device) for n in (BLOCK_M, 2 * LEAST_PART["few"]))
        attention(q, k, k, torch.zeros(1, BLOCK_M, dtype=torch.long, device=device), k.shape[2], 1.0)
        return True

    return kernels.succeeds(trial, device, "the decoding kernel cannot be used here, so sampling is slower")
