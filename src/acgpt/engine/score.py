"""From logits to log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acgpt.engine.layout import download
from acgpt.errors import ModelError


@dataclass(frozen=True)
class TopScore:
    """The log-probability of a token, and the most probable tokens in its place.

    Args:
        log_prob: Log-probability of the token.
        ids: The most probable tokens, the most probable first.
        log_probs: Their log-probabilities. If the token is one of them, it has the same number here to the last bit.
    """

    log_prob: float
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def forbid(logits: Tensor, token: int | None) -> Tensor:
    """Return the logits with probability 0 for one token; unchanged if `token` is `None`."""
    if token is None:
        return logits
    column = torch.arange(logits.shape[-1], device=logits.device) == token
    return logits.masked_fill(column, float("-inf"))


def check_numbers(log_probs: np.ndarray) -> None:
    """Raise a `ModelError` if a log-probability is NaN, as after an overflow in the model."""
    if np.isnan(log_probs).any():
        raise ModelError("the model's logits are not numbers (NaN): its weights are broken, or its dtype overflows.")


def target_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (A,) log-probabilities of the targets under (A, V) logits, on their device, without waiting for it."""
    chunks = []
    for rows, target in zip(logits.split(1024), targets.split(1024), strict=True):
        rows = rows if rows.dtype == torch.float64 else rows.float()
        chunks.append(rows.gather(1, target[:, None])[:, 0] - rows.logsumexp(-1))
    return torch.cat(chunks)


def top_scores(logits: Tensor, targets: Tensor, k: int) -> Callable[[], list[TopScore]]:
    """Start computing the log-probability of each target under (A, V) logits, and the k most probable tokens there.

    Call the result to wait for them.
    """
    chunks = []
    for rows, target in zip(logits.split(1024), targets.split(1024), strict=True):
        rows = rows if rows.dtype == torch.float64 else rows.float()
        total = rows.logsumexp(-1)
        values, ids = rows.topk(min(k, rows.shape[-1]), dim=-1)
        own = rows.gather(1, target[:, None])[:, 0] - total
        chunks.append([download(x) for x in (own, ids, values - total[:, None])])

    def wait() -> list[TopScore]:
        results = []
        for chunk in chunks:
            own, ids, others = (x().numpy() for x in chunk)
            check_numbers(own)
            check_numbers(others)
            for log_prob, best, log_probs in zip(own.tolist(), ids.tolist(), others.tolist(), strict=True):
                results.append(TopScore(log_prob, tuple(best), tuple(log_probs)))
        return results

    return wait
