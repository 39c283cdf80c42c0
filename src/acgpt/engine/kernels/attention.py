# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton kernels for attention under the layout's mask, forward and backward: no mask, no gather and no padding.

A query of the packed batch (see `layout`) has a run of copies and a run of text slots. Its rows read

    a copy row      all copies
    a text row      all copies, then the text up to and including itself

    keys      copies              text
            ┌────┬────┬──┐┌────┬────┬────┬─┐
    copies  │full│full│t ││                │       full   blocks that every row reads in full: no mask
            │full│full│t ││                │       t      the partial block at the end of the copies: masked
    text    │full│full│t ││d   │           │       d      blocks on the diagonal: masked
            │full│full│t ││full│d   │      │
            └────┴────┴──┘└────┴────┴──────┘

A block of rows of either kind therefore has a list of full key blocks and a list of masked ones, with one loop each.
The gradient of keys and values has the same two lists, over the rows that read a block of keys. Two numbers per query,
`copy_starts` and `text_starts`, say where its keys begin; nothing is moved in memory.

Softmax is in base 2 and sums are in float32. There are no atomic additions, so results are reproducible bit by bit.

    attention              the operator: one node for torch.compile, with its gradient
    forward_kernel         out and lse; a program is a block of rows of one query and head
    backward_query_kernel  dq, and delta = Σ out · dout for the next kernel; programs as in the forward
    backward_key_kernel    dk and dv; a program is a block of keys of one query and key head

Shape legend: N slots in the batch, H query heads, K key heads, G = H / K, D channels, B queries.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acgpt.errors import ModelError

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

    HAS_TRITON = True
except ImportError:  # builds of torch for CPUs have no Triton
    HAS_TRITON = False

HEAD_DIMS = (32, 64, 128)
SPARSE = 2  # programs search for their queries if there are so many times fewer of them, see `place`
MOST_SEARCHED = 2**12  # queries among which programs search
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # float32 for tests: exact, and slow

# Block sizes of each kernel by head dimension: BLOCK_M rows by BLOCK_N keys. Those for 64 are the best of a sweep on an
# H200 (benchmarks/attention_kernels.py). To use others, change this table.
TUNING: dict[str, dict[int, dict[str, int]]] = {
    "forward": {
        32: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        64: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        128: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    },
    "backward_query": {
        32: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
        64: {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3},
        128: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    },
    "backward_key": {
        32: {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2},
        64: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        128: {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2},
    },
}


def available() -> bool:
    """Return whether the kernels can run: they need Triton and a CUDA device of capability 8.0 or more."""
    return HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def succeeds(trial: Callable[[], bool], device: torch.device, otherwise: str) -> bool:
    """Return whether a kernel can be compiled and run on a device, and its trial returns true; `otherwise` warn."""
    if device.type != "cuda" or not available():
        return False
    try:
        with torch.cuda.device(device):
            success = trial()
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise  # memory may be free later
    except Exception as error:  # for example no C compiler, or too little shared memory
        warnings.warn(f"{otherwise}: {error}", stacklevel=3)
        return False
    return success


def jit(*unspecialized: str) -> Callable[[Any], Any]:
    """Return the decorator `triton.jit`, or one that does nothing without Triton; see `do_not_specialize` there."""

    def decorate(function: Any) -> Any:
        return triton.jit(do_not_specialize=unspecialized)(function) if HAS_TRITON else function

    return decorate


# Arguments that change from batch to batch: a new value must not compile a new kernel.
VARYING = ("copies", "slots", "queries", "text_blocks", "all_blocks")


@jit()
def place(
    copy_starts, text_starts, queries, all_blocks,
    HEADS: tl.constexpr, SIZE: tl.constexpr, MOST_QUERIES: tl.constexpr,
):  # fmt: skip
    """Return this program's block, head and query. Programs of one query run together and share its keys.

    If MOST_QUERIES is 0, every query has as many programs as the longest. Otherwise there are at most so many queries,
    and a program searches for its own: query i begins at program (slots of the queries before it) // SIZE + 2 · i of
    each head. This leaves room for its blocks, since its copies and its text are each rounded up once.
    """
    program = tl.program_id(0)
    if MOST_QUERIES:
        numbers = tl.arange(0, MOST_QUERIES)
        exist = numbers < queries
        before = tl.load(copy_starts + numbers, mask=exist, other=0)
        before += tl.load(text_starts + numbers, mask=exist, other=0)
        begins = before // SIZE + 2 * numbers
        begun = exist & (begins <= program // HEADS)
        block = program // HEADS - tl.max(tl.where(begun, begins, 0), 0)
        head, query = program % HEADS, tl.sum(begun.to(tl.int32), 0) - 1
    else:
        block, head, query = program % all_blocks, program // all_blocks % HEADS, program // all_blocks // HEADS
    return block, head, query


@jit()
def segments_of(copy_starts, text_starts, copies, query):
    """Return where a query's copies and text begin in the packed batch, and their numbers."""
    copy_start = tl.load(copy_starts + query)
    text_start = tl.load(text_starts + query)
    n_copies = tl.load(copy_starts + query + 1) - copy_start
    n_text = tl.load(text_starts + query + 1) - text_start
    return copy_start.to(tl.int64), (copies + text_start).to(tl.int64), n_copies, n_text


@jit()
def key_blocks(is_text, first, n_copies, n_text, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Count the key blocks that the rows first … first + BLOCK_M - 1 read.

    Returns:
        Full blocks of copies, full blocks of text, masked blocks of copies (0 or 1), masked blocks of text.
    """
    copies_full = n_copies // BLOCK_N
    copies_masked = tl.cdiv(n_copies, BLOCK_N) - copies_full
    text_full = tl.where(is_text, first // BLOCK_N, 0)
    text_read = tl.where(is_text, tl.minimum(first + BLOCK_M, n_text), 0)
    return copies_full, text_full, copies_masked, tl.cdiv(text_read, BLOCK_N) - text_full


@jit()
def read_block(acc, m, total, q, k, v, limit, keys, scale2, MASKED: tl.constexpr):
    """Add one block of keys to the online softmax: k (D, BLOCK_N), v (BLOCK_N, D)."""
    logits = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        logits = tl.where(keys[None, :] < limit[:, None], logits, float("-inf"))
    new_m = tl.maximum(m, tl.max(logits, 1) * scale2)
    p = tl.math.exp2(logits * scale2 - new_m[:, None])
    shrink = tl.math.exp2(m - new_m)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_m, total


@jit(*VARYING)
def forward_kernel(
    q, k, v, out, lse, copy_starts, text_starts, copies, slots, queries, text_blocks, all_blocks,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
):  # fmt: skip
    """Compute out and the logarithm (base 2) of the softmax's denominator for one block of rows of a query and head."""
    block, head, query = place(copy_starts, text_starts, queries, all_blocks, H, BLOCK_M, MOST_QUERIES)
    copy_start, text_start, n_copies, n_text = segments_of(copy_starts, text_starts, copies, query)
    if MOST_QUERIES:
        text_blocks = tl.cdiv(n_text, BLOCK_M)
    is_text = block < text_blocks  # the end of the text takes longest, so it comes first
    first = tl.where(is_text, text_blocks - 1 - block, block - text_blocks) * BLOCK_M
    n_rows = tl.where(is_text, n_text, n_copies)
    if first >= n_rows:
        return
    copies_full, text_full, copies_masked, text_masked = key_blocks(is_text, first, n_copies, n_text, BLOCK_M, BLOCK_N)
    start = tl.where(is_text, text_start, copy_start) + first
    m_range, n_range, d_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    real = first + m_range < n_rows
    head64 = head.to(tl.int64)

    q_block = q + head64 * q_head + start * q_slot + m_range[:, None] * q_slot + d_range[None, :]
    k_block = k + head64 // G * k_head + n_range[None, :] * k_slot + d_range[:, None]  # (D, BLOCK_N)
    v_block = v + head64 // G * v_head + n_range[:, None] * v_slot + d_range[None, :]  # (BLOCK_N, D)
    q_rows = tl.load(q_block, mask=real[:, None], other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for j in range(0, copies_full + text_full):
        at = tl.where(j < copies_full, copy_start + j * BLOCK_N, text_start + (j - copies_full) * BLOCK_N)
        k_keys = tl.load(k_block + at * k_slot)
        v_keys = tl.load(v_block + at * v_slot)
        acc, m, total = read_block(acc, m, total, q_rows, k_keys, v_keys, m, n_range, scale2, False)
    for j in range(0, copies_masked + text_masked):
        in_copies = j < copies_masked
        key = tl.where(in_copies, copies_full, text_full + j - copies_masked) * BLOCK_N
        at = tl.where(in_copies, copy_start, text_start) + key
        keys = key + n_range
        exist = keys < tl.where(in_copies, n_copies, n_text)
        limit = tl.where(in_copies, n_copies, first + m_range + 1)
        k_keys = tl.load(k_block + at * k_slot, mask=exist[None, :], other=0.0)
        v_keys = tl.load(v_block + at * v_slot, mask=exist[:, None], other=0.0)
        acc, m, total = read_block(acc, m, total, q_rows, k_keys, v_keys, limit, keys, scale2, True)

    out_block = out + (start * H + head) * D + m_range[:, None] * (H * D) + d_range[None, :]
    tl.store(out_block, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + head64 * slots + start + m_range, m + tl.math.log2(total), mask=real)


@jit()
def query_gradient(dq, q, dout, k, v, lse, delta, limit, keys, scale2, MASKED: tl.constexpr):
    """Add the contribution of one block of keys to dq / scale: k and v (D, BLOCK_N)."""
    logits = tl.dot(q, k, input_precision="ieee")
    p = tl.math.exp2(logits * scale2 - lse[:, None])
    if MASKED:
        p = tl.where(keys[None, :] < limit[:, None], p, 0.0)
    dp = tl.dot(dout, v, input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision="ieee")


@jit(*VARYING)
def backward_query_kernel(
    q, k, v, out, dout, lse, delta, dq, copy_starts, text_starts, copies, slots, queries, text_blocks, all_blocks,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, dout_slot, dout_head, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
):  # fmt: skip
    """Compute dq, and delta for the gradient of keys and values, for one block of rows of a query and head."""
    block, head, query = place(copy_starts, text_starts, queries, all_blocks, H, BLOCK_M, MOST_QUERIES)
    copy_start, text_start, n_copies, n_text = segments_of(copy_starts, text_starts, copies, query)
    if MOST_QUERIES:
        text_blocks = tl.cdiv(n_text, BLOCK_M)
    is_text = block < text_blocks
    first = tl.where(is_text, text_blocks - 1 - block, block - text_blocks) * BLOCK_M
    n_rows = tl.where(is_text, n_text, n_copies)
    if first >= n_rows:
        return
    copies_full, text_full, copies_masked, text_masked = key_blocks(is_text, first, n_copies, n_text, BLOCK_M, BLOCK_N)
    start = tl.where(is_text, text_start, copy_start) + first
    m_range, n_range, d_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    real = first + m_range < n_rows
    head64 = head.to(tl.int64)

    q_block = q + head64 * q_head + start * q_slot + m_range[:, None] * q_slot + d_range[None, :]
    dout_block = dout + head64 * dout_head + start * dout_slot + m_range[:, None] * dout_slot + d_range[None, :]
    packed = (start * H + head) * D + m_range[:, None] * (H * D) + d_range[None, :]  # in out and dq
    k_block = k + head64 // G * k_head + n_range[None, :] * k_slot + d_range[:, None]  # (D, BLOCK_N)
    v_block = v + head64 // G * v_head + n_range[None, :] * v_slot + d_range[:, None]  # (D, BLOCK_N)
    q_rows = tl.load(q_block, mask=real[:, None], other=0.0)
    dout_rows = tl.load(dout_block, mask=real[:, None], other=0.0)
    out_rows = tl.load(out + packed, mask=real[:, None], other=0.0)
    lse_rows = tl.load(lse + head64 * slots + start + m_range, mask=real, other=0.0)
    delta_rows = tl.sum(out_rows.to(tl.float32) * dout_rows.to(tl.float32), 1)
    tl.store(delta + head64 * slots + start + m_range, delta_rows, mask=real)
    dq_rows = tl.zeros([BLOCK_M, D], tl.float32)

    for j in range(0, copies_full + text_full):
        at = tl.where(j < copies_full, copy_start + j * BLOCK_N, text_start + (j - copies_full) * BLOCK_N)
        k_keys = tl.load(k_block + at * k_slot)
        v_keys = tl.load(v_block + at * v_slot)
        dq_rows = query_gradient(
            dq_rows, q_rows, dout_rows, k_keys, v_keys, lse_rows, delta_rows, m_range, n_range, scale2, False
        )
    for j in range(0, copies_masked + text_masked):
        in_copies = j < copies_masked
        key = tl.where(in_copies, copies_full, text_full + j - copies_masked) * BLOCK_N
        at = tl.where(in_copies, copy_start, text_start) + key
        keys = key + n_range
        exist = keys < tl.where(in_copies, n_copies, n_text)
        limit = tl.where(in_copies, n_copies, first + m_range + 1)
        k_keys = tl.load(k_block + at * k_slot, mask=exist[None, :], other=0.0)
        v_keys = tl.load(v_block + at * v_slot, mask=exist[None, :], other=0.0)
        dq_rows = query_gradient(
            dq_rows, q_rows, dout_rows, k_keys, v_keys, lse_rows, delta_rows, limit, keys, scale2, True
        )

    tl.store(dq + packed, (dq_rows * scale).to(dq.dtype.element_ty), mask=real[:, None])


@jit()
def key_gradient(dk, dv, k, v, q, dout, lse, delta, rows, readers, scale2, MASKED: tl.constexpr):
    """Add the contribution of one block of rows to dk / scale and dv.

    Shapes: k and v (BLOCK_N, D), q (D, BLOCK_M), dout (BLOCK_M, D).
    """
    logits = tl.dot(k, q, input_precision="ieee")  # (BLOCK_N, BLOCK_M): transposed, as are p and ds
    p = tl.math.exp2(logits * scale2 - lse[None, :])
    if MASKED:
        p = tl.where(rows[None, :] >= readers[:, None], p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision="ieee")
    return dk, dv


@jit(*VARYING)
def backward_key_kernel(
    q, k, v, dout, lse, delta, dk, dv, copy_starts, text_starts, copies, slots, queries, text_blocks, all_blocks,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, dout_slot, dout_head, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv for one block of keys of a query and key head, over all rows of all heads that read them."""
    K: tl.constexpr = H // G
    block, key_head, query = place(copy_starts, text_starts, queries, all_blocks, K, BLOCK_N, MOST_QUERIES)
    copy_start, text_start, n_copies, n_text = segments_of(copy_starts, text_starts, copies, query)
    copy_blocks = tl.cdiv(n_copies, BLOCK_N) if MOST_QUERIES else all_blocks - text_blocks
    is_text = block >= copy_blocks  # copies and the beginning of the text come first: most rows read them
    first = tl.where(is_text, block - copy_blocks, block) * BLOCK_N
    n_keys = tl.where(is_text, n_text, n_copies)
    if first >= n_keys:
        return

    # Row blocks of text: masked from `diagonal` to `below` and from `ragged` to `end`; full from `below` to `ragged`.
    # Copies are read by all rows, so they have no diagonal.
    end = tl.cdiv(n_text, BLOCK_M)
    diagonal = tl.where(is_text, first // BLOCK_M, 0)
    below = tl.where(is_text, tl.minimum(tl.cdiv(first + BLOCK_N, BLOCK_M), end), 0)
    ragged = tl.maximum(n_text // BLOCK_M, below)
    copies_full = tl.where(is_text, 0, n_copies // BLOCK_M)
    copies_masked = tl.where(is_text, 0, tl.cdiv(n_copies, BLOCK_M)) - copies_full
    full, masked = copies_full + ragged - below, copies_masked + below - diagonal + end - ragged

    start = tl.where(is_text, text_start, copy_start) + first
    m_range, n_range, d_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    real = first + n_range < n_keys
    readers = tl.where(is_text, first + n_range, -1)  # the first text row that reads the key
    key_head64 = key_head.to(tl.int64)
    k_block = k + key_head64 * k_head + start * k_slot + n_range[:, None] * k_slot + d_range[None, :]
    v_block = v + key_head64 * v_head + start * v_slot + n_range[:, None] * v_slot + d_range[None, :]
    k_keys = tl.load(k_block, mask=real[:, None], other=0.0)
    v_keys = tl.load(v_block, mask=real[:, None], other=0.0)
    dk_keys = tl.zeros([BLOCK_N, D], tl.float32)
    dv_keys = tl.zeros([BLOCK_N, D], tl.float32)

    for g in range(0, G):
        head64 = key_head64 * G + g
        q_block = q + head64 * q_head + m_range[None, :] * q_slot + d_range[:, None]  # (D, BLOCK_M)
        dout_block = dout + head64 * dout_head + m_range[:, None] * dout_slot + d_range[None, :]  # (BLOCK_M, D)
        lse_head, delta_head = lse + head64 * slots, delta + head64 * slots
        for j in range(0, full):
            at = tl.where(j < copies_full, copy_start + j * BLOCK_M, text_start + (below + j - copies_full) * BLOCK_M)
            q_rows = tl.load(q_block + at * q_slot)
            lse_rows = tl.load(lse_head + at + m_range)
            dout_rows = tl.load(dout_block + at * dout_slot)
            delta_rows = tl.load(delta_head + at + m_range)
            dk_keys, dv_keys = key_gradient(
                dk_keys, dv_keys, k_keys, v_keys, q_rows, dout_rows, lse_rows, delta_rows, m_range, readers, scale2,
                False,
            )  # fmt: skip
        for j in range(0, masked):
            in_copies = j < copies_masked
            row = diagonal + j - copies_masked
            row = tl.where(row < below, row, row - below + ragged)
            row = tl.where(in_copies, copies_full, row) * BLOCK_M
            at = tl.where(in_copies, copy_start, text_start) + row
            rows = row + m_range
            exist = rows < tl.where(in_copies, n_copies, n_text)
            q_rows = tl.load(q_block + at * q_slot, mask=exist[None, :], other=0.0)
            # lse is ∞ where there is no row, so that p is 0.
            lse_rows = tl.load(lse_head + at + m_range, mask=exist, other=float("inf"))
            dout_rows = tl.load(dout_block + at * dout_slot, mask=exist[:, None], other=0.0)
            delta_rows = tl.load(delta_head + at + m_range, mask=exist, other=0.0)
            dk_keys, dv_keys = key_gradient(
                dk_keys, dv_keys, k_keys, v_keys, q_rows, dout_rows, lse_rows, delta_rows, rows, readers, scale2, True
            )

    packed = (start * K + key_head) * D + n_range[:, None] * (K * D) + d_range[None, :]
    tl.store(dk + packed, (dk_keys * scale).to(dk.dtype.element_ty), mask=real[:, None])
    tl.store(dv + packed, dv_keys.to(dv.dtype.element_ty), mask=real[:, None])


def programs_of(slots: int, queries: int, all_blocks: int, size: int) -> tuple[int, int]:
    """Return the number of programs of a head, and MOST_QUERIES of `place`.

    Args:
        slots: Number of slots in the batch.
        queries: Number of queries.
        all_blocks: Upper bound of the number of blocks of a query.
        size: Slots of a block.
    """
    programs, fewest = all_blocks * queries, slots // size + 2 * queries
    if SPARSE * fewest > programs or queries > MOST_SEARCHED:
        return programs, 0
    return fewest, 1 << max(0, queries - 1).bit_length()  # a power of two


def launch(
    name: str, kernel: Any, tensors: list[Tensor], strided: list[Tensor], copy_starts: Tensor, text_starts: Tensor,
    copies: int, longest: tuple[int, int], scales: tuple[float, ...], shape: tuple[int, int, int],
) -> None:  # fmt: skip
    """Run one of the kernels with the block sizes of `TUNING`; `shape` is (H, K, D)."""
    heads, key_heads, dim = shape
    tuning = TUNING[name][dim]
    over_keys = name == "backward_key"
    size = tuning["BLOCK_N" if over_keys else "BLOCK_M"]
    copy_blocks, text_blocks = (-(-length // size) for length in longest)
    all_blocks, queries = copy_blocks + text_blocks, len(text_starts) - 1
    programs, most_queries = programs_of(len(tensors[0]), queries, all_blocks, size)
    grid = programs * (key_heads if over_keys else heads)
    if not grid or not tensors[0].numel():
        return
    strides = [stride for tensor in strided for stride in tensor.stride()[:2]]
    kernel[(grid,)](
        *tensors, copy_starts, text_starts, copies, len(tensors[0]), queries, text_blocks, all_blocks, *strides,
        *scales, H=heads, G=heads // key_heads, D=dim, MOST_QUERIES=most_queries, **tuning,
    )  # fmt: skip


def rowwise(x: Tensor) -> Tensor:
    """Return the tensor with the channels of a head contiguous in memory; copy it only if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check(q: Tensor, k: Tensor, v: Tensor, copy_starts: Tensor, text_starts: Tensor, scale: float) -> None:
    """Raise a `ModelError` for inputs that the kernels do not support."""
    if not HAS_TRITON:
        raise ModelError("the attention kernels need Triton, which is missing. Use the backend varlen or dense.")
    if q.shape[2] not in HEAD_DIMS or q.dtype not in DTYPES:
        raise ModelError(
            f"the attention kernels support heads of {HEAD_DIMS} channels in bf16 or fp16, not {q.shape[2]} in "
            f"{q.dtype}. Use the backend varlen or dense."
        )
    shaped = len(q) == len(k) and k.shape == v.shape and k.shape[2] == q.shape[2] and q.shape[1] % k.shape[1] == 0
    if not shaped or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ModelError(f"expected q (N, H, D), k and v (N, K, D), H a multiple of K, in one dtype, not {shapes}.")
    if copy_starts.dtype != torch.int32 or text_starts.dtype != torch.int32 or copy_starts.shape != text_starts.shape:
        raise ModelError("copy_starts and text_starts must be int32 and of equal length.")
    if not scale > 0:
        raise ModelError(f"the scale of attention must be positive, not {scale}.")


@torch.library.custom_op("acgpt::attention", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, copy_starts: Tensor, text_starts: Tensor,
    copies: int, longest_copies: int, longest_text: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result of `attention`, and (H, N) the logarithm (base 2) of each softmax's denominator."""
    check(q, k, v, copy_starts, text_starts, scale)
    q, k, v = rowwise(q), rowwise(k), rowwise(v)
    slots, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, slots, dtype=torch.float32, device=q.device)
    launch(
        "forward", forward_kernel, [q, k, v, out, lse], [q, k, v], copy_starts, text_starts,
        copies, (longest_copies, longest_text), (scale * math.log2(math.e),), (heads, k.shape[1], dim),
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("acgpt::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, copy_starts: Tensor, text_starts: Tensor,
    copies: int, longest_copies: int, longest_text: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `attention` with respect to q, k and v."""
    dout, q, k, v = (rowwise(x) for x in (dout.to(q.dtype), q, k, v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    strided, longest, shape = [q, k, v, dout], (longest_copies, longest_text), (q.shape[1], k.shape[1], q.shape[2])
    scales = scale, scale * math.log2(math.e)
    launch(
        "backward_query", backward_query_kernel, [q, k, v, out, dout, lse, delta, dq], strided,
        copy_starts, text_starts, copies, longest, scales, shape,
    )  # fmt: skip
    launch(
        "backward_key", backward_key_kernel, [q, k, v, dout, lse, delta, dk, dv], strided,
        copy_starts, text_starts, copies, longest, scales, shape,
    )  # fmt: skip
    return dq, dk, dv


@attention_forward.register_fake
def _(q, k, v, *_):
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


@attention_backward.register_fake
def _(dout, q, k, v, *_):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the gradient needs."""
    *tensors, ctx.copies, ctx.longest_copies, ctx.longest_text, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # lse has no gradient: make no zeros for it


def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Any, ...]:
    """Return the gradient of the operator with respect to each argument."""
    q, k, v, copy_starts, text_starts, out, lse = ctx.saved_tensors
    gradients = attention_backward(
        dout, q, k, v, out, lse, copy_starts, text_starts, ctx.copies, ctx.longest_copies, ctx.longest_text, ctx.scale
    )
    return *gradients, None, None, None, None, None, None


attention_forward.register_autograd(backward, setup_context=keep_for_backward)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    copy_starts: Tensor,
    text_starts: Tensor,
    copies: int,
    longest_copies: int,
    longest_text: int,
    scale: float,
) -> Tensor:
    """Compute attention over a packed batch under the layout's mask; differentiable, and one node for torch.compile.

    Args:
        q: (N, H, D) queries in bf16 or fp16, D 32, 64 or 128, with any strides.
        k: (N, K, D) keys; H is a multiple of K.
        v: (N, K, D) values.
        copy_starts: (B + 1,) int32, start of each query's copies, and the number of copies.
        text_starts: (B + 1,) int32, start of each query's text among the text slots, and the number of text slots.
        copies: Number of copies in the batch; slot `copies` is the first of the text.
        longest_copies: Upper bound of the number of copies of a query.
        longest_text: Upper bound of the number of text slots of a query.
        scale: Scale of the logits, above 0.

    Returns:
        (N, H, D) outputs, contiguous.
    """
    out: Tensor
    out, _ = attention_forward(q, k, v, copy_starts, text_starts, copies, longest_copies, longest_text, scale)
    return out


@functools.cache
def works(device: torch.device, heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Return whether the forward kernel can be compiled and run on this device; it is tried once."""

    def trial() -> bool:
        q, k = (torch.zeros(2, n, dim, dtype=dtype, device=device) for n in (heads, key_heads))
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        attention(q, k, k, starts, starts, 1, 1, 1, 1.0)
        return True

    return succeeds(trial, device, "the attention kernel cannot be used here, so scoring is slower")
