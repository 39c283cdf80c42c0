# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""A Triton kernel that draws a token per row from half-precision logits, with top-k and top-p, without a sort.

Sorted by logits, the likeliest first and equal ones by id, the tokens fill an interval. The token drawn is the one at
`uniform` times the mass of those that remain:

    tokens   ├──────── likeliest ────────┼───── next ─────┼ ties ┼ ties ┼┄┄┄┄ cut by top-p ┄┄┄┄┤
    mass     0                  ▲ uniform * total                     total

Both borders are found by a search for a logit, not by sorting: half-precision numbers have 16 bits, and each pass over
the row sums the masses above three candidates, which settles two bits. Among equal logits a token is found by counting.
Without truncation the tokens are taken in the order of the vocabulary. A program handles one row, which stays in the
cache of its multiprocessor.

Masses are sums in float32 in a fixed order, so results are reproducible bit by bit.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels.attention import HAS_TRITON, jit

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

DTYPES = (torch.bfloat16, torch.float16)
TUNING = {"BLOCK": 8192, "num_warps": 16}  # logits in one program at a time
BELOW_ONE = tl.constexpr(1 - 2**-24) if HAS_TRITON else 1.0  # the largest float32 below 1


@jit()
def key_of(value, logits):
    """Return the place of a logit (float32, of the dtype of `logits`) in the order of all numbers of that dtype."""
    bits = value.to(logits.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFF)


@jit()
def value_of(key, logits):
    """Return the logit at a place, the inverse of `key_of`."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFF)
    return bits.to(tl.int16).to(logits.dtype.element_ty, bitcast=True).to(tl.float32)


@jit()
def load(logits, start, size, BLOCK: tl.constexpr):
    """Return a block of logits and their ids."""
    ids = start + tl.arange(0, BLOCK)
    # The mask is the same for eight logits, so that they are loaded together: `draw` has rows padded to that.
    x = tl.load(logits + ids, mask=ids // 8 * 8 < size, other=float("-inf")).to(tl.float32)
    return tl.where(ids < size, x, float("-inf")), ids


@jit()
def weight_of(x, top, scale2):
    """Return the probability of a logit in units of that of the largest."""
    return tl.math.exp2((x - top) * scale2)


@jit()
def extremes(logits, size, BLOCK: tl.constexpr):
    """Return the smallest and the largest logit of a row."""
    ids = tl.arange(0, BLOCK)
    least, most = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        x, ids = load(logits, start, size, BLOCK)
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(ids < size, x, float("inf")))
    return tl.min(least, 0), tl.max(most, 0)


@jit()
def totals(logits, top, scale2, size, BLOCK: tl.constexpr):
    """Return the sums of a row's weights at temperature 1 and at the one of the draw."""
    plain, scaled = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x, _ = load(logits, start, size, BLOCK)
        plain += weight_of(x, top, 1.4426950408889634)
        scaled += weight_of(x, top, scale2)
    return tl.sum(plain, 0), tl.sum(scaled, 0)


@jit()
def search(logits, top, scale2, low, high, bound, size, COUNT: tl.constexpr, EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key in low + 1 … high such that the logits above it have less mass than `bound`.

    Args:
        logits: The row.
        top: Its largest logit.
        scale2: See `weight_of`.
        low: Lower bound of the key, exclusive.
        high: A key for which this holds.
        bound: The mass.
        size: Number of logits.
        COUNT: Compare numbers of logits, not masses.
        EQUAL: Less or equal, not less.
        BLOCK: Logits at a time.
    """
    while high - low > 1:
        stride = (high - low + 3) // 4
        first = low + stride  # below `high`
        second, third = tl.minimum(first + stride, high), tl.minimum(first + 2 * stride, high)
        value1, value2, value3 = value_of(first, logits), value_of(second, logits), value_of(third, logits)
        above1, above2 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        above3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            x, _ = load(logits, start, size, BLOCK)
            weight = tl.full([BLOCK], 1.0, tl.float32) if COUNT else weight_of(x, top, scale2)
            above1 += tl.where(x > value1, weight, 0.0)
            above2 += tl.where(x > value2, weight, 0.0)
            above3 += tl.where(x > value3, weight, 0.0)
        mass1, mass2, mass3 = tl.sum(above1, 0), tl.sum(above2, 0), tl.sum(above3, 0)
        if EQUAL:
            holds1, holds2, holds3 = mass1 <= bound, mass2 <= bound, mass3 <= bound
        else:
            holds1, holds2, holds3 = mass1 < bound, mass2 < bound, mass3 < bound
        low = tl.where(holds1, low, tl.where(holds2, first, tl.where(holds3, second, third)))
        high = tl.where(holds1, first, tl.where(holds2, second, tl.where(holds3, third, high)))
    return high


@jit()
def around(logits, value, top, scale2, size, BLOCK: tl.constexpr):
    """Return the mass and the number of logits above a value, and the number of those that equal it."""
    mass, above, equal = (
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.int32),
        tl.zeros([BLOCK], tl.int32),
    )
    for start in range(0, size, BLOCK):
        x, ids = load(logits, start, size, BLOCK)
        mass += tl.where(x > value, weight_of(x, top, scale2), 0.0)
        above += (x > value).to(tl.int32)
        equal += ((x == value) & (ids < size)).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(above, 0), tl.sum(equal, 0)


@jit()
def nth_equal(logits, value, index, size, BLOCK: tl.constexpr):
    """Return the id of the logit that equals `value` and has `index` such logits before it; 0 if there is none."""
    found, before = index * 0, index * 0
    for start in range(0, size, BLOCK):
        x, ids = load(logits, start, size, BLOCK)
        equal = ((x == value) & (ids < size)).to(tl.int32)
        count = tl.sum(equal, 0)
        if (before <= index) & (index < before + count):
            hit = (equal == 1) & (before + tl.cumsum(equal, 0) - 1 == index)
            found = tl.max(tl.where(hit, ids, 0), 0)
        before += count
    return found


@jit()
def in_vocabulary(logits, uniform, top, scale2, size, BLOCK: tl.constexpr):
    """Return the id of the token at `uniform` of a row's mass, in the order of the vocabulary."""
    total = uniform * 0
    for start in range(0, size, BLOCK):
        x, _ = load(logits, start, size, BLOCK)
        total += tl.sum(weight_of(x, top, scale2), 0)
    target = tl.minimum(uniform, BELOW_ONE) * total
    found, before = key_of(top, logits) * 0, uniform * 0
    for start in range(0, size, BLOCK):
        x, ids = load(logits, start, size, BLOCK)
        weight = weight_of(x, top, scale2)
        mass = tl.sum(weight, 0)
        if (before <= target) & (target < before + mass):
            reached = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
            last = tl.max(tl.where(weight > 0, ids, 0), 0)  # in case the sum in another order is smaller
            found = tl.minimum(tl.min(tl.where(reached, ids, size), 0), last)
        before += mass
    return found


@jit()
def among_likeliest(
    logits, uniform, bottom, top, scale2, total, top_p, top_k, size,
    TOP_P: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the logit of the token drawn from a truncated row, and its number among equal logits."""
    high = key_of(top, logits)
    cut = key_of(bottom, logits)  # the last key that remains, and how many logits with this key
    room = tl.full([], 2147483647, tl.int32)
    if TOP_K:
        cut = search(logits, top, scale2, cut - 1, high, top_k, size, True, False, BLOCK)
        value = value_of(cut, logits)
        mass, above, equal = around(logits, value, top, scale2, size, BLOCK)
        room = tl.minimum(top_k - above, equal)
        total = mass + room.to(tl.float32) * weight_of(value, top, scale2)
    if TOP_P:
        bound = top_p * total
        key = search(logits, top, scale2, cut - 1, high, bound, size, False, False, BLOCK)
        value = value_of(key, logits)
        mass, above, equal = around(logits, value, top, scale2, size, BLOCK)
        weight = weight_of(value, top, scale2)
        most = tl.where(key == cut, tl.minimum(room, equal), equal)
        share = (bound - mass) / tl.maximum(weight, 1e-30)
        room = tl.minimum(tl.ceil(tl.minimum(share, 16777216.0)).to(tl.int32), most)
        room = tl.maximum(room, 1)
        cut, total = key, mass + room.to(tl.float32) * weight
    target = tl.minimum(uniform, BELOW_ONE) * total
    key = search(logits, top, scale2, cut - 1, high, target, size, False, True, BLOCK)
    value = value_of(key, logits)
    mass, above, equal = around(logits, value, top, scale2, size, BLOCK)
    most = tl.where(key == cut, tl.minimum(room, equal), equal)
    share = (target - mass) / tl.maximum(weight_of(value, top, scale2), 1e-30)
    index = tl.minimum(tl.minimum(share, 16777216.0).to(tl.int32), most - 1)
    return value, tl.maximum(index, 0)


@jit()
def draw_kernel(
    logits, uniforms, tokens, log_probs, row_stride, scale2, top_p, top_k, size,
    GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row, and compute its log-probability at temperature 1; NaN if a logit is."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    uniform = tl.load(uniforms + row).to(tl.float32)
    bottom, top = extremes(logits, size, BLOCK)
    plain, total = totals(logits, top, scale2, size, BLOCK)
    if GREEDY:
        token = nth_equal(logits, top, key_of(top, logits) * 0, size, BLOCK)
    elif TOP_P or TOP_K:
        value, index = among_likeliest(
            logits, uniform, bottom, top, scale2, total, top_p, top_k, size, TOP_P, TOP_K, BLOCK
        )
        token = nth_equal(logits, value, index, size, BLOCK)
    else:
        token = in_vocabulary(logits, uniform, top, scale2, size, BLOCK)
    chosen = tl.load(logits + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, chosen - top - tl.log(plain))


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`.

    Args:
        logits: (R, V) in bf16 or fp16, with rows of any stride.
        uniform: (R,) numbers in [0, 1).
        temperature: Divides the logits; 0 takes the likeliest token, the first of several.
        top_p: See `query.sampling.Sampling`.
        top_k: Likewise.

    Returns:
        (R,) int64 token ids, and (R,) float32 log-probabilities at temperature 1 without truncation.
    """
    rows, size = logits.shape
    logits = padded(logits)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    scale2 = math.log2(math.e) / (temperature or 1.0)
    draw_kernel[(rows,)](
        logits, uniform.contiguous(), tokens, log_probs, logits.stride(0), scale2, top_p, min(top_k or size, size),
        size, GREEDY=temperature == 0, TOP_P=top_p < 1, TOP_K=top_k is not None, **TUNING,
    )  # fmt: skip
    return tokens, log_probs


def padded(logits: Tensor) -> Tensor:
    """Return (R, V) logits of which eight at a time can be read up to the end of a row; copy them if necessary."""
    rows, size = logits.shape
    stride, room = logits.stride(0), logits.untyped_storage().nbytes() // logits.itemsize - logits.storage_offset()
    whole = -(-size // 8) * 8
    if logits.stride(1) == 1 and stride % 8 == 0 and stride >= whole and room >= (rows - 1) * stride + whole:
        return logits
    copy = logits.new_empty(rows, whole)[:, :size]
    return copy.copy_(logits)


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel can be compiled and run on this device; it is tried once. Otherwise rows are sorted."""

    def trial() -> bool:
        logits = torch.tensor([[0.0, 9.0, -1.0]], dtype=dtype, device=device)
        uniform = torch.tensor([0.5], dtype=torch.float64, device=device)
        options = ((1.0, 1.0, None), (0.5, 0.9, None), (0.5, 1.0, 2), (0.5, 0.9, 2), (0.0, 1.0, None))
        return all(draw(logits, uniform, *option)[0].item() == 1 for option in options)

    warning = "the kernel that draws tokens cannot be used here, so they are sorted"
    return dtype in DTYPES and kernels.succeeds(trial, device, warning)
