"""Matrices in 4 or 8 bits, for products with a few rows on a CPU, where reading the weights takes most of the time.

    Int4      blocks of 32 numbers on a grid of 16 values, as in GGUF's format Q4_1; recovered from expanded weights
    Int8      rows of numbers on a grid of 255 values; any matrix, rounded
    LowRank   a matrix plus the product of two smaller ones, as with a LoRA adapter

They read and write bf16 and sum in fp32, with kernels of torch; in fp32 or fp16 these are far slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # numbers with a common scale and minimum
LEVELS = 15  # largest 4-bit code
ON_GRID = 0.01  # distance from the grid, in its steps, up to which weights count as expanded from 4 bits
ROUNDS = 5  # timed
TINY = torch.finfo(torch.float32).tiny


class Product(Protocol):
    """An (N, K) matrix to multiply rows with."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Map (n, K) rows in bf16 to their (n, N) products in bf16."""
        ...


class Int4:
    """A matrix in 4 bits.

    Args:
        codes: (N, K / BLOCK, BLOCK) whole numbers from 0 to 15.
        low: (N, K / BLOCK, 1) value of code 0 in each block.
        step: (N, K / BLOCK, 1) distance between the values of a block.
    """

    def __init__(self, codes: Tensor, low: Tensor, step: Tensor) -> None:
        self.packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).flatten(1), 1)
        # (K / BLOCK, N, 2): the kernel computes (code - 8) * scale + zero.
        self.scales = torch.cat([step, low + 8 * step], -1).transpose(0, 1).bfloat16().contiguous()

    @classmethod
    def recover(cls, weight: Tensor) -> Int4 | None:
        """Return the 4 bits from which an (N, K) matrix in fp32 was expanded; `None` if it was not."""
        if weight.shape[0] % 16 or weight.shape[1] % BLOCK:
            return None
        blocks = weight.unflatten(1, (-1, BLOCK))
        low, high = blocks.aminmax(dim=-1, keepdim=True)
        step = (high - low) / LEVELS
        exact = (blocks - low).div_(step.clamp(min=TINY))
        codes = exact.round()
        return cls(codes, low, step) if exact.sub_(codes).abs_().max() <= ON_GRID else None

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows with the matrix, see `Product`."""
        product: Tensor = torch._weight_int4pack_mm_for_cpu(rows, self.packed, BLOCK, self.scales)
        return product


class Int8:
    """A matrix rounded to 8 bits, with one scale per row.

    Args:
        weight: (N, K) in fp32.
    """

    def __init__(self, weight: Tensor) -> None:
        scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()  # the kernel takes no other dtype
        self.codes = (weight / scale.float().clamp(min=TINY)).round_().clamp_(-127, 127).to(torch.int8)
        self.scale = scale[:, 0].contiguous()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows with the matrix, see `Product`."""
        product: Tensor = torch._weight_int8pack_mm(rows, self.codes, self.scale)
        return product


class LowRank:
    """The sum of a matrix and a product of two smaller ones.

    Args:
        base: (N, K) matrix.
        up: (N, r) matrix, in fp32.
        down: (r, K) matrix, in fp32.
    """

    def __init__(self, base: Product, up: Tensor, down: Tensor) -> None:
        missing = -len(down) % BLOCK  # the kernel needs whole blocks
        self.base = base
        self.up, self.down = Int8(F.pad(up, (0, missing))), Int8(F.pad(down, (0, 0, 0, missing)))

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows with the sum, see `Product`."""
        return self.base(rows).add_(self.up(self.down(rows)))


OPERATORS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm")


def available() -> bool:
    """Return whether this version of torch has the kernels."""
    return all(hasattr(torch, name) for name in OPERATORS)


def is_faster(products: Sequence[Product], weights: Sequence[Tensor]) -> bool:
    """Return whether products with one row are faster than those with the matrices in fp32, on this CPU.

    Args:
        products: Small copies of the matrices.
        weights: The matrices, used in turn so that they do not stay in the CPU's cache.
    """
    row = weights[0][:1].clone()
    half = row.bfloat16()
    small = seconds([partial(product, half) for product in products])
    return small < seconds([partial(F.linear, row, weight) for weight in weights])


def seconds(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Return the shortest time of a round of calls, after one to warm up."""
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - start)
    return min(times[1:])
