# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Attention of a step of decoding as Triton kernels: of each row's cache as much is read as that row has.

A step's attention is as slow as its keys and values are to read. Under a mask all rows are read up to the fullest one's
last slot; here a program takes one row and one key head, with the queries that share it, and stops where the row ends:

    slots    0 ………………………………………… capacity
    row 0    █████████████▒▒······        █  read        ▒  read, for the rest of a block
    row 1    ████▒▒···············        ·  not read
    row 2    █████████████████████

How far a row reaches is read from `slots` on the device, so that a captured step serves every length.

    part_kernel    a part of a row's slots, for all queries of a key head; the whole row, where rows are many
    join_kernel    the parts of a row put together: few rows are cut up, or most of the GPU would have nothing to do

Softmax is in base 2, sums are in float32, and nothing is added with atomics: results repeat bit by bit.

Shape legend: R rows, W queries a row, H query heads, K key heads, G = H / K, D channels.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor

from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels.attention import HAS_TRITON, jit, rowwise

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

# Into how many parts rows are cut: chosen from a few timings on an H200 (benchmarks/decode_kernel.py).
BUSY = 2048  # programs that keep a large GPU at work to the end
MOST_PARTS = 16
FEW = 64  # programs, that leave most of it idle whatever their parts cost
LEAST_PART = {"few": 128, "many": 512}  # slots: what is shorter is not cut up further
BLOCK_M = 64  # queries of a row and key head that are taken together, at most
# How the kernel is cut into blocks, by head dimension. That for 64 is the best of a sweep of the same program, at 200
# rows and a query each; for 128, larger ones do not fit into shared memory if a block of queries is full.
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
    """A part of one row's slots for a block of the queries of one key head: out and, of several parts, their lse."""
    program = tl.program_id(0)
    part, key_head = program % PARTS, program // PARTS % K
    # Backwards: rows come by the number of their steps, and those with most copies to read should not begin last.
    row = (rows - 1 - program // PARTS // K).to(tl.int64)
    m_range, n_range, d_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    query = tl.program_id(1) * BLOCK_M + m_range  # head by head, and for each the row's positions
    real = query < G * width
    head, at = key_head * G + query // width, query % width
    slot = tl.load(slots + row * width + at, mask=real, other=0)
    limit = tl.where(slot < spare, slot + 1, 1).to(tl.int32)  # what only fills up a row reads no more than it must
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
    """One query: the mean of its parts, weighted by the denominators of their softmaxes."""
    query = tl.program_id(0).to(tl.int64)
    part, d_range = tl.arange(0, PARTS), tl.arange(0, D)
    logs = tl.load(lse + part * count + query)
    weights = tl.math.exp2(logs - tl.max(logs, 0))
    means = tl.load(parts + (part * count + query)[:, None] * D + d_range[None, :])
    mean = tl.sum(means * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query * D + d_range, mean.to(out.dtype.element_ty))


def parts_of(programs: int, capacity: int) -> int:
    """Into how many parts, a power of two, to cut each row, if uncut rows make so many programs."""
    least = LEAST_PART["few" if programs < FEW else "many"]
    wanted = min(MOST_PARTS, BUSY // max(1, programs), capacity // least)
    return 1 << max(0, wanted.bit_length() - 1)


def attention(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, spare: int, scale: float) -> Tensor:
    """One step of decoding: the query at slot s of a row reads slots 0 … s of that row's cache.

    Args:
        q: (R, H, W, D) queries in bf16 or fp16 (float32 for tests), D 32, 64 or 128, with any strides.
        k: (R, K, capacity, D) keys of the cache; H is a multiple of K.
        v: (R, K, capacity, D) values, of the dtype of the queries.
        slots: (R, W) int64 where each query is in its row's cache.
        spare: Queries at this slot or beyond only fill up a row: what is returned for them is finite, and means
            nothing.
        scale: Of the logits.

    Returns:
        (R, W, H, D).
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
    lse = torch.empty(parts, count, dtype=torch.float32, device=v.device) if parts > 1 else means  # unused for one
    part_kernel[(rows * key_heads * parts, blocks)](
        q, k, v, slots, means, lse, width, spare, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        scale * math.log2(math.e), rows, K=key_heads, G=groups, D=dim, PARTS=parts, BLOCK_M=block, **TUNING[dim],
    )  # fmt: skip
    if parts > 1:
        join_kernel[(count,)](means, lse, out, count, D=dim, PARTS=parts, num_warps=1)
    return out


@functools.cache
def works(device: torch.device, dim: int, dtype: torch.dtype) -> bool:
    """Can the kernels be compiled and run here, for heads of so many channels?

    Tried once, on as large a block of queries as there is, in parts; where it fails, decoding reads under a mask.
    """
    if device.type != "cuda" or not kernels.available():
        return False
    try:
        q, k = (torch.zeros(1, 1, n, dim, dtype=dtype, device=device) for n in (BLOCK_M, 2 * LEAST_PART["few"]))
        with torch.cuda.device(device):
            attention(q, k, k, torch.zeros(1, BLOCK_M, dtype=torch.long, device=device), k.shape[2], 1.0)
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise  # which may pass
    except Exception as error:  # no C compiler, too little shared memory: whatever a compiler, or a GPU, may lack
        warnings.warn(f"the decoding kernel cannot be used here, so sampling is slower: {error}", stacklevel=2)
        return False
    return True
