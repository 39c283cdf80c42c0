# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Log-probabilities of tokens under a vocabulary projection, in one sweep over the logits, as a Triton kernel.

    hidden (A, d) · weight (V, d)ᵀ ──► logits, some thousand rows at a time ──► log p of each row's target, in float32

The logits stay in the dtype of the network and are read once. Sums are in float32. Rows of logits are padded to a
multiple of `ALIGN` columns: matrix units need aligned rows to be fast, and GPT-2's vocabulary has 50,257 tokens.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels.attention import HAS_TRITON, jit

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

BLOCK, WARPS = 8192, 16
ALIGN = 64  # columns
TILE = 128  # rows; matrix units work on whole tiles
MOST_BYTES = 2**29  # of logits at a time


@jit("vocabulary", "forbidden")
def rows_kernel(logits, targets, log_probs, columns, vocabulary, forbidden, BLOCK: tl.constexpr):
    """Compute the log-probability of one row's target; NaN if a logit is NaN or ∞, or if there is no such token.

    `columns` includes the padding, a multiple of 16: the compiler then knows that a mask over them covers whole words,
    and loads words. The rest of the mask is applied after the load.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        token = start + lanes
        x = tl.load(logits + token, mask=token < columns, other=float("-inf")).to(tl.float32)
        x = tl.where((token < vocabulary) & (token != forbidden), x, float("-inf"))
        larger = tl.maximum(best, tl.max(x, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing has had a probability yet
        total = total * tl.exp(best - base) + tl.exp(x - base)
        best = larger
    exists = (target >= 0) & (target < vocabulary)
    wanted = tl.load(logits + target, mask=exists, other=float("nan")).to(tl.float32)
    wanted = tl.where(exists & (target == forbidden), float("-inf"), wanted)
    tl.store(log_probs + row, wanted - (best + tl.log(tl.sum(total, 0))))


def row_log_probs(logits: Tensor, targets: Tensor, log_probs: Tensor, vocabulary: int, forbidden: int | None) -> None:
    """Write the log-probabilities of the targets under (A, columns) logits; columns after the vocabulary are padding.

    Args:
        logits: bf16, fp16 or float32, contiguous; the number of columns is a multiple of 16.
        targets: (A,) int64.
        log_probs: (A,) float32, the result.
        vocabulary: Number of tokens.
        forbidden: A token that gets probability 0.
    """
    token = -1 if forbidden is None else forbidden
    grid, columns = (len(logits),), logits.shape[1]
    rows_kernel[grid](logits, targets, log_probs, columns, vocabulary, token, BLOCK=BLOCK, num_warps=WARPS)


def linear_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, forbidden: int | None = None) -> Tensor:
    """Return (A,) float32 log-probabilities of the targets under `softmax(hidden @ weight.T)`, without gradients.

    Args:
        hidden: (A, d) bf16 or fp16 (float32 for tests), A at least 1.
        weight: (V, d) of the same dtype.
        targets: (A,) int64.
        forbidden: A token that gets probability 0.
    """
    hidden, weight = hidden.detach(), weight.detach()
    vocabulary = len(weight)
    columns = -(-vocabulary // ALIGN) * ALIGN
    if columns > vocabulary:  # a new copy in every call, so that it is never out of date: a small part of the product
        weight = F.pad(weight, (0, 0, 0, columns - vocabulary))
    size = chunk_size(len(hidden), columns * hidden.element_size())
    log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    buffer = torch.empty(min(size, len(hidden)), columns, dtype=hidden.dtype, device=hidden.device)
    chunks = zip(hidden.split(size), targets.split(size), log_probs.split(size), strict=True)
    for rows, target, result in chunks:
        logits = torch.mm(rows, weight.T, out=buffer[: len(rows)])
        row_log_probs(logits, target, result, vocabulary, forbidden)
    return log_probs


def chunk_size(rows: int, row_bytes: int) -> int:
    """Return how many rows to process at a time: chunks of about equal size, in whole tiles, of `MOST_BYTES` each."""
    most = max(TILE, MOST_BYTES // row_bytes // TILE * TILE)
    chunks = -(-rows // most)
    return -(-rows // (chunks * TILE)) * TILE


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel can be compiled and run on this device; it is tried once."""

    def trial() -> bool:
        states = torch.zeros(1, ALIGN, dtype=dtype, device=device)
        linear_log_probs(states, states, torch.zeros(1, dtype=torch.long, device=device))
        return True

    return kernels.succeeds(trial, device, "the kernel of log-probabilities cannot be used, so scoring is slower")
