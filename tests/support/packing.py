"""Training batches of AC-GPT, from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from acgpt.engine.layout import Budget, Sequences, lay_out
from acgpt.training.batches import Batch


def pack(tokens: np.ndarray, roles: np.ndarray, *, bos: int, mask: int | None, budget: Budget | None = None) -> Any:
    """Pack (B, T) tokens and their roles into a batch, padded to a budget if there is one."""
    layout = lay_out(Sequences.rows(tokens, roles), bos=bos, mask=mask, copies=True)
    return Batch.of(layout, longest=tokens.shape[1], bos=bos, budget=budget)


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch and of its segments by name."""
    values = vars(batch) | vars(batch.segments)
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def shapes_of(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes of a batch's tensors by name."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors_of(batch).items())
