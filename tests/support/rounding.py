"""Round differently for each shape of a batch, as other CPUs do: a comparison of bits across batches then fails.

Products and sums are rounded according to how a kernel splits them, and that depends on the CPU, the number of
threads and the shapes. Bits agree only where all of these do: the same batches on the same machine. A test that
compares bits elsewhere passes on one CPU and fails on another.

`perturbed` shows such a test on any machine. It moves the results of products, attention and softmax by a few units in
the last place, by an amount that is a function of their shape alone: the same batches still give the same bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

UNITS = 2  # in the last place, at most, relative to the largest number of a row


@functools.lru_cache(maxsize=4096)
def noise(shape, dtype):
    """Return numbers between -1 and 1 that depend only on the shape."""
    key = 0
    for size in shape:
        key = (1_000_003 * key + size) % 2**31
    generator = torch.Generator().manual_seed(key)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(dtype)


def moved(out, by_row=False):
    """Return the result of an operation with another rounding.

    Args:
        out: The result. Half precision, integers and other devices are left as they are.
        by_row: Scale each row as a whole, so that ties stay ties and zeros stay zeros. Otherwise each number moves on
            its own, relative to the largest of its row: that is how the errors of a sum of products lie.
    """
    if not isinstance(out, torch.Tensor) or out.dtype not in (torch.float32, torch.float64) or out.numel() == 0:
        return out
    if out.device.type != "cpu" or torch.compiler.is_compiling():
        return out
    unit = UNITS * torch.finfo(out.dtype).eps
    if by_row:
        return out * (1 + unit * noise((*out.shape[:-1], 1), out.dtype))
    return out + unit * noise(tuple(out.shape), out.dtype) * out.detach().abs().amax(-1, keepdim=True)


def perturb(patch: pytest.MonkeyPatch) -> None:
    """Make rounding depend on shapes, until the patch is undone."""

    def wrap(owner, name, by_row=False):
        original = getattr(owner, name)

        @functools.wraps(original)
        def rounded(*args, **kwargs):
            return moved(original(*args, **kwargs), by_row)

        patch.setattr(owner, name, rounded)

    wrap(F, "linear")
    wrap(F, "scaled_dot_product_attention")
    wrap(torch, "addmm")
    for name in ("softmax", "log_softmax", "logsumexp"):
        wrap(torch.Tensor, name, by_row=True)


@contextmanager
def perturbed() -> Iterator[None]:
    """Make rounding depend on shapes inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        perturb(patch)
        yield


def perturb_if_asked(patch: pytest.MonkeyPatch) -> None:
    """Make rounding depend on shapes if ACGPT_TEST_ROUNDING=1."""
    if os.environ.get("ACGPT_TEST_ROUNDING") == "1":
        perturb(patch)
