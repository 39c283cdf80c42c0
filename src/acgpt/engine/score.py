"""From logits to log-probabilities."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from acgpt.errors import ModelError


def forbid(logits: Tensor, never: int | None) -> Tensor:
    """Logits that leave one token no probability; as they are for none."""
    if never is None:
        return logits
    column = torch.arange(logits.shape[-1], device=logits.device) == never
    return logits.masked_fill(column, float("-inf"))


def check_numbers(log_probs: np.ndarray) -> None:
    """Refuse to pass on what is no number: a model that overflowed has no answer."""
    if np.isnan(log_probs).any():
        raise ModelError("the model's logits are not numbers (NaN): its weights are broken, or its dtype overflows.")


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """(A,) float64 log-probabilities of the targets under (A, V) logits, from at least fp32, brought to the CPU."""
    return chosen(logits, targets).cpu().double()


def chosen(logits: Tensor, targets: Tensor) -> Tensor:
    """(A,) the same where the logits are, for which nobody has to wait."""
    chunks = []
    for rows, target in zip(logits.split(1024), targets.split(1024), strict=True):
        rows = rows if rows.dtype == torch.float64 else rows.float()
        chunks.append(rows.gather(1, target[:, None])[:, 0] - rows.logsumexp(-1))
    return torch.cat(chunks)
