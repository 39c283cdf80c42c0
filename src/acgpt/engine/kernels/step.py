# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton kernels for what a decoding step does between matrix products and attention.

At one or a few dozen tokens per step, each of these takes about as long as its launch. A network runs about twenty
such operations per layer; here there are three or four:

    add_norm    add the outputs of attention and MLP to the residual stream, and normalise it
    rotate      rotate queries and keys, and write keys and values into the cache
    swiglu      SiLU of the gate times the other half
    angles      cosines and sines of the positions, once per step
    begin       look up what each row reads, once per step
    end         write what each row has drawn, and advance its clock, once per step

Arithmetic is in float32. Sums and products are rounded to the dtype of the network where its modules round them.

Shape legend: n tokens (R rows of W positions), H query heads, K key heads, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acgpt.engine.kernels.attention import HAS_TRITON, jit

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

Angles = tuple[Tensor, Tensor]  # cosines and sines


@jit()
def add_norm_kernel(
    stream, branch, other, weight, bias, new_stream, out, width, epsilon,
    BRANCHES: tl.constexpr, RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up to two branches to a token's residual stream, and normalise the sum."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    real = channel < width
    at = token * width + channel
    kind = stream.dtype.element_ty
    x = tl.load(stream + at, mask=real, other=0.0).to(tl.float32)
    if BRANCHES > 0:
        added = tl.load(branch + at, mask=real, other=0.0).to(tl.float32)
        if BRANCHES == 2:
            added += tl.load(other + at, mask=real, other=0.0).to(tl.float32)
            added = added.to(kind).to(tl.float32)
        x = (x + added).to(kind).to(tl.float32)
        tl.store(new_stream + at, x.to(kind), mask=real)
    scale = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)
    if RMS:
        variance = tl.sum(x * x, 0) / width
        normal = (x / tl.sqrt(variance + epsilon)).to(kind).to(tl.float32) * scale
    else:
        x = tl.where(real, x - tl.sum(x, 0) / width, 0.0)
        variance = tl.sum(x * x, 0) / width
        shift = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        normal = x / tl.sqrt(variance + epsilon) * scale + shift
    tl.store(out + at, normal.to(kind), mask=real)


@jit()
def angles_kernel(positions, frequencies, cos, sin, scaling, half, BLOCK: tl.constexpr):
    """Compute a token's cosines and sines."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    real = channel < half
    frequency = tl.load(frequencies + channel, mask=real, other=0.0).to(tl.float32)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * half + channel, (tl.cos(angle) * scaling).to(cos.dtype.element_ty), mask=real)
    tl.store(sin + token * half + channel, (tl.sin(angle) * scaling).to(sin.dtype.element_ty), mask=real)


@jit()
def rotated(x, token, cos, sin, half, D: tl.constexpr):
    """Return the channels of a head, of which the first 2 * half are rotated by the angles of a token."""
    channel = tl.arange(0, D)
    turns = channel < 2 * half
    partner = tl.where(turns, tl.where(channel < half, channel + half, channel - half), channel)
    angle = token * half + channel % half
    own, others = tl.load(x + channel).to(tl.float32), tl.load(x + partner).to(tl.float32)
    c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    return own * c + tl.where(channel < half, -others, others) * s


@jit("width", "cache_slots")
def rotate_kernel(
    qkv, query_cos, query_sin, cos, sin, slots, q, keys, values, width, cache_slots, half, qkv_stride, head_stride,
    key_start, value_start, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotate one query head of a token; or rotate a key head, and write it and its values into the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, D)
    if head < H:
        turned = rotated(qkv + token * qkv_stride + head * head_stride, token, query_cos, query_sin, half, D)
        tl.store(q + (token * H + head) * D + channel, turned.to(q.dtype.element_ty))
    else:
        key_head = head - H
        source = qkv + token * qkv_stride + key_head * head_stride
        slot = token // width * cache_slots + tl.load(slots + token)
        target = (slot * K + key_head) * D + channel
        turned = rotated(source + key_start, token, cos, sin, half, D)
        tl.store(keys + target, turned.to(keys.dtype.element_ty))
        value = tl.load(source + value_start + channel)
        tl.store(values + target, value.to(values.dtype.element_ty))


@jit()
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Multiply the SiLU of a token's gate by its other half, for one block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < width
    source = gate_up + token * 2 * width + channel
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=real, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + token * width + channel, (silu * up).to(kind), mask=real)


@jit("spare", "width")
def begin_kernel(
    clock, reads, draws, text, copies, noise, order, ids, positions, targets, slots, columns, uniform, spare, width,
    reads_row, reads_step, draws_row, text_row, noise_row, order_row, ORDERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look up what one row reads in this step and where it draws, see `decode.Decoder.step`."""
    row = tl.program_id(0).to(tl.int64)
    now = tl.load(clock + row)
    column = tl.load(draws + row * draws_row + now)
    tl.store(columns + row, column)
    at = tl.where(column < 0, column + noise_row, column)  # as an index: -1 is the last, the spare one
    tl.store(uniform + row, tl.load(noise + row * noise_row + at))
    index = tl.arange(0, BLOCK)
    real = index < width
    read = tl.load(reads + row * reads_row + now * reads_step + index, mask=real, other=-1)
    place = tl.maximum(read, 0)
    if ORDERED:
        source = order + row * order_row + place
        tl.store(positions + row * width + index, tl.load(source, mask=real, other=0), mask=real)
        tl.store(targets + row * width + index, tl.load(source + 1, mask=real, other=0), mask=real)
    else:
        tl.store(positions + row * width + index, place, mask=real)
    tl.store(slots + row * width + index, tl.where(read >= 0, tl.load(copies + row) + read, spare), mask=real)
    tl.store(ids + row * width + index, tl.load(text + row * text_row + place, mask=real, other=0), mask=real)


@jit()
def end_kernel(clock, ends, columns, tokens, scores, text, log_probs, text_row, log_probs_row):
    """Write the token that one row has drawn and its log-probability, and advance the clock."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(columns + row)
    tl.store(text + row * text_row + tl.where(column < 0, column + text_row, column), tl.load(tokens + row))
    at = row * log_probs_row + tl.where(column < 0, column + log_probs_row, column)
    tl.store(log_probs + at, tl.load(scores + row).to(log_probs.dtype.element_ty))
    tl.store(clock + row, tl.minimum(tl.load(clock + row) + 1, tl.load(ends + row)))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def add_norm(
    stream: Tensor, branches: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add the outputs of layers to the residual stream, and normalise it.

    Args:
        stream: (n, width) the residual stream.
        branches: Up to two (n, width) outputs.
        weight: (width,) weights of the norm.
        bias: (width,) biases of a LayerNorm; `None` for a root-mean-square norm.
        epsilon: Added to the variance.

    Returns:
        (n, width) the new residual stream, `stream` itself without branches; and the normalised rows.
    """
    tokens, width = stream.shape
    out = torch.empty_like(stream)
    total = torch.empty_like(stream) if branches else stream
    first, *rest = branches or (stream,)
    block = power_of_two(width)
    add_norm_kernel[(tokens,)](
        stream, first, rest[0] if rest else first, weight, weight if bias is None else bias, total, out, width, epsilon,
        BRANCHES=len(branches), RMS=bias is None, BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return total, out


def angles(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> Angles:
    """Return the (n, half) cosines and sines of (n,) positions, for (half,) frequencies."""
    tokens, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(tokens, half, dtype=dtype, device=positions.device) for _ in range(2))
    block = power_of_two(half)
    angles_kernel[(tokens,)](positions, frequencies, cos, sin, scaling, half, BLOCK=block, num_warps=1)
    return cos, sin


def rotate(
    qkv: Tensor,
    query_angles: Angles,
    key_angles: Angles,
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    interleaved: bool,
) -> Tensor:
    """Rotate queries and keys, and write keys and values into the cache.

    Args:
        qkv: (n, …) queries, keys and values: those of all heads, or head by head if `interleaved`.
        query_angles: What `angles` returns for the positions of queries, each (n, half): the first 2 * half channels
            of each head are rotated.
        key_angles: The same for those of keys.
        slots: (R, W) slots of the cache to write.
        cache: Keys and values, each (rows, slots, K, D).
        heads: H and K; equal if `interleaved`.
        interleaved: GPT-NeoX's order: queries, keys and values of the first head, then of the second, and so on.

    Returns:
        (n, H, D) rotated queries.
    """
    (tokens, stride), (query_heads, key_heads), (keys, values) = qkv.shape, heads, cache
    dim = keys.shape[3]
    head_stride = 3 * dim if interleaved else dim
    key_start = dim if interleaved else query_heads * dim
    value_start = 2 * dim if interleaved else (query_heads + key_heads) * dim
    q = torch.empty(tokens, query_heads, dim, dtype=qkv.dtype, device=qkv.device)
    rotate_kernel[(tokens, query_heads + key_heads)](
        qkv, *query_angles, *key_angles, slots, q, keys, values, slots.shape[1], keys.shape[1], key_angles[0].shape[1],
        stride, head_stride, key_start, value_start, H=query_heads, K=key_heads, D=dim, num_warps=1,
    )  # fmt: skip
    return q


def swiglu(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) * up of (n, 2 * width) products, the gate first."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_two(width))
    swiglu_kernel[(tokens, -(-width // block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def begin(
    clock: Tensor,
    schedule: tuple[Tensor, Tensor],
    text: Tensor,
    copies: Tensor,
    noise: Tensor,
    shape: tuple[int, int],
    spare: int,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """Look up what rows read and draw in this step.

    Args:
        clock: The step of each row.
        schedule: (rows, steps, positions) what each row reads at each step, and (rows, steps) what it draws; or -1.
        text: (rows, columns) token ids.
        copies: (rows, 1) number of copies.
        noise: (rows, columns) uniform numbers.
        shape: R rows, of W positions each.
        spare: The slot that padding is written to.
        order: (rows, columns + 1) position of each column, for texts in another order.

    Returns:
        (R, W) token ids; positions; the positions to predict, if there is an order, else nothing; and slots. (R,) the
        columns to draw, and the uniform numbers there.
    """
    rows, width = shape
    reads, draws = schedule
    ids, positions, targets, slots = (torch.empty(shape, dtype=torch.long, device=clock.device) for _ in range(4))
    ordered = order is not None
    order = positions if order is None else order
    columns = torch.empty(rows, dtype=torch.long, device=clock.device)
    uniform = torch.empty(rows, dtype=noise.dtype, device=clock.device)
    begin_kernel[(rows,)](
        clock, reads, draws, text, copies, noise, order, ids, positions, targets, slots, columns, uniform, spare, width,
        reads.stride(0), reads.stride(1), draws.stride(0), text.stride(0), noise.stride(0), order.stride(0),
        ORDERED=ordered, BLOCK=power_of_two(width), num_warps=1,
    )  # fmt: skip
    return ids, positions, (targets,) if ordered else (), slots, columns, uniform


def end(
    clock: Tensor, ends: Tensor, columns: Tensor, drawn: tuple[Tensor, Tensor], text: Tensor, log_probs: Tensor
) -> None:
    """Write the drawn tokens and their log-probabilities at the columns of their rows, and advance the clock.

    Args:
        clock: The step of each row.
        ends: The step where it stays.
        columns: (R,) columns; -1 is the last, spare one.
        drawn: (R,) tokens, and their log-probabilities.
        text: (rows, columns) token ids.
        log_probs: (rows, columns) log-probabilities.
    """
    end_kernel[(len(columns),)](
        clock, ends, columns, *drawn, text, log_probs, text.stride(0), log_probs.stride(0), num_warps=1
    )
