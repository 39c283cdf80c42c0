"""Training batches of AC-GPT, from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from acgpt.engine.layout import Budget, Sequences, lay_out
from acgpt.training.batches import Batch


def pack(
    tokens: np.ndarray, roles: np.ndarray, *, bos: int, mask: int | None, budget: Budget | None = None
) -> dict[str, Any]:
    """Pack (B, T) tokens and their roles into a batch, padded to a budget if there is one."""
    layout = lay_out(Sequences.rows(tokens, roles), bos=bos, mask=mask, copies=True)
    return Batch.of(layout, longest=tokens.shape[1], bos=bos, budget=budget)
