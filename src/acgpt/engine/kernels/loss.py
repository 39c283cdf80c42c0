# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Cross-entropy of a vocabulary projection and its gradient in one sweep over the logits, as a Triton kernel.

The logits of a training step take more memory than everything else together, and the cost of cross-entropy is that of
moving them. Here a program handles one row: it sums the exponentials, then, while the row is still in cache, overwrites
the logits with their gradient softmax - onehot. The logits are read once and written once, half of what separate
kernels need.

The gradient is that of the *sum* of the rows' losses. The upstream factor scales the two products that use it, which
are small.
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
    """Compute the loss of one row, and overwrite its logits with their gradient; both are 0 for a negative target."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    if target < 0:
        for start in range(0, V, BLOCK):
            tl.store(logits + start + lanes, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + lanes < V)
        tl.store(losses + row, 0.0)
        return
    # Load it before the logits are overwritten: later, another warp may have written the gradient already.
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
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, forbidden_token: int | None
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, and the gradient of the unweighted rows' losses with respect to the logits."""
    logits = hidden @ weight.T
    if forbidden_token is not None:
        logits[:, forbidden_token] = float("-inf")
    losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
    rows_kernel[(len(targets),)](logits, targets, losses, V=logits.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return (losses if weights is None else losses * weights).sum(), logits


@linear_cross_entropy_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, forbidden_token: int | None
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), hidden.new_empty(len(hidden), len(weight))


def keep(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int | None], output: tuple[Tensor, Tensor]
) -> None:
    """Save what the backward pass needs."""
    hidden, weight, _, weights, _ = inputs
    ctx.save_for_backward(hidden, weight, output[1], weights)


def gradients(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
    """Return the gradients of the hidden states and the weight.

    The rows' weights scale two small matrices instead of the logits.
    """
    hidden, weight, gradient, weights = ctx.saved_tensors
    by_hidden = (gradient @ weight) * upstream
    if weights is not None:
        scale = weights[:, None].to(hidden.dtype)
        hidden, by_hidden = hidden * scale, by_hidden * scale
    by_weight = (gradient.T @ hidden) * upstream if ctx.needs_input_grad[1] else None  # None if the head is frozen
    return by_hidden, by_weight, None, None, None


linear_cross_entropy_op.register_autograd(gradients, setup_context=keep)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None, forbidden_token: int | None = None
) -> Tensor:
    """Return the summed cross-entropy of `softmax(hidden @ weight.T)`.

    Args:
        hidden: (A, d) bf16 or fp16 (float32 for tests), contiguous.
        weight: (V, d) of the same dtype.
        targets: (A,) int64; rows with a negative target are left out.
        weights: (A,) float32, weight of each row in the sum. Default: 1.
        forbidden_token: A token that gets probability 0, and is not a target.
    """
    loss: Tensor
    loss, _ = linear_cross_entropy_op(hidden, weight, targets, weights, forbidden_token)
    return loss
