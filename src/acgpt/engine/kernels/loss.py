# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The loss of a vocabulary projection, with its gradient in one sweep over the logits, as a Triton kernel.

The logits of a training step take more memory than all else together, and moving them is all that cross-entropy costs.
Here a program takes a row of them: once to sum the exponentials, once more, while the row is still in cache, to put the
gradient softmax - onehot in their place. They are read once and written once, half of what separate kernels need.

The gradient is that of the *sum* of the rows' losses; the factor that comes from above scales the two products that
use it, which are small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acgpt.engine.kernels.attention import HAS_TRITON, jit

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

BLOCK, WARPS = 8192, 16


@jit()
def rows_kernel(logits, targets, losses, V: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its loss, and its gradient in place of its logits. A negative target has neither."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    if target < 0:
        for start in range(0, V, BLOCK):
            tl.store(logits + start + lanes, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + lanes < V)
        tl.store(losses + row, 0.0)
        return
    # Now, and not where it is needed: there another warp may have put the gradient in its place already.
    wanted = tl.load(logits + target).to(tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - larger) + tl.exp(x - larger)
        best = larger
    lse = best + tl.log(tl.sum(total, 0))
    tl.store(losses + row, lse - wanted)
    for start in range(0, V, BLOCK):
        inside = start + lanes < V
        x = tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - lse) - tl.where(start + lanes == target, 1.0, 0.0)
        tl.store(logits + start + lanes, gradient.to(logits.dtype.element_ty), mask=inside)


@torch.library.custom_op("acgpt::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, never: int | None
) -> tuple[Tensor, Tensor]:
    """The summed loss, and the gradient of the logits (of the rows' losses before they are weighted)."""
    logits = hidden @ weight.T
    if never is not None:
        logits[:, never] = float("-inf")
    losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
    rows_kernel[(len(targets),)](logits, targets, losses, V=logits.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return (losses if weights is None else losses * weights).sum(), logits


@linear_cross_entropy_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, never: int | None
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), hidden.new_empty(len(hidden), len(weight))


def keep(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int | None], output: tuple[Tensor, Tensor]
) -> None:
    """For the backward pass."""
    hidden, weight, _, weights, _ = inputs
    ctx.save_for_backward(hidden, weight, output[1], weights)


def gradients(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
    """Of the hidden states and of the weight; the rows' weights scale two small matrices, and not the logits."""
    hidden, weight, gradient, weights = ctx.saved_tensors
    by_hidden = (gradient @ weight) * upstream
    if weights is not None:
        scale = weights[:, None].to(hidden.dtype)
        hidden, by_hidden = hidden * scale, by_hidden * scale
    by_weight = (gradient.T @ hidden) * upstream if ctx.needs_input_grad[1] else None  # not if the head is frozen
    return by_hidden, by_weight, None, None, None


linear_cross_entropy_op.register_autograd(gradients, setup_context=keep)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None, never: int | None = None
) -> Tensor:
    """The summed cross-entropy of `softmax(hidden @ weight.T)`.

    Args:
        hidden: (A, d) bf16 or fp16 (float32 for tests), contiguous.
        weight: (V, d) of the same dtype.
        targets: (A,) int64; a negative one is left out.
        weights: (A,) float32, of each row in the sum; by default 1.
        never: A token that has no probability at all, and is no target.
    """
    loss: Tensor
    loss, _ = linear_cross_entropy_op(hidden, weight, targets, weights, never)
    return loss
