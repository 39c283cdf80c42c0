"""Scoring: the exact log-probability of every asked token of a batch of queries, a forward pass for many queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.attention import BACKENDS, run
from acgpt.errors import ModelError
from acgpt.layout import batches, build
from acgpt.query import Query


def log_probs(
    model: PreTrainedModel,
    queries: Sequence[Query],
    *,
    bos: int,
    mask: int | None,
    future: bool,
    backend: str,
    budget: int,
) -> list[list[float]]:
    """log p(asked token | given tokens, asked tokens before it), for each query from left to right, in nats.

    Args:
        model: A causal language model that `attention.check_model` has accepted.
        queries: Of any lengths; they are packed together, and each gets what it would get alone, to rounding.
        bos: As in `layout.build`.
        mask: As in `layout.build`.
        future: As in `layout.build`.
        backend: "dense" or "varlen".
        budget: At most this many tokens go through the model at a time (a longer text still goes alone).
    """
    answers: list[list[float]] = [[] for _ in queries]
    for group in batches(dict(enumerate(queries)), budget, future):
        layout = build([queries[i] for i in group], bos=bos, mask=mask, future=future).to(model.device)
        logits = run(model, layout.ids[None], layout.positions[None], BACKENDS[backend](layout), layout.rows)[0]
        scores = token_log_probs(logits, layout.targets)
        check_numbers(scores.numpy())
        for i, score in zip(group, scores.split(layout.asked), strict=True):
            answers[i] = score.tolist()
    return answers


def check_numbers(log_probs: np.ndarray) -> None:
    """Refuse to pass on what is no number: a model that overflowed has no answer."""
    if np.isnan(log_probs).any():
        raise ModelError("the model's logits are not numbers (NaN): its weights are broken, or its dtype overflows.")


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """(A,) float64 log-probabilities of the targets under (A, V) logits, computed in at least fp32."""
    chunks = []
    for rows, target in zip(logits.split(1024), targets.split(1024), strict=True):
        rows = rows if rows.dtype == torch.float64 else rows.float()
        chunks.append(rows.gather(1, target[:, None])[:, 0] - rows.logsumexp(-1))
    return torch.cat(chunks).cpu().double()
