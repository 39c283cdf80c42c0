"""Scoring: the exact log-probability of every asked token of a batch of queries, a forward pass for many queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.engine.attention import BACKENDS, run
from acgpt.engine.layout import Layout, batches, build
from acgpt.errors import ModelError
from acgpt.query.query import Query


def log_probs(
    model: PreTrainedModel,
    queries: Sequence[Query],
    *,
    bos: int,
    mask: int | None,
    future: bool,
    backend: str,
    budget: int,
    orders: Sequence[np.ndarray] | None = None,
    never: int | None = None,
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
        orders: As in `layout.build`.
        never: A token that has no probability at all.
    """
    answers: list[list[float]] = [[] for _ in queries]
    for group in batches(dict(enumerate(queries)), budget, future):
        order = None if orders is None else [orders[i] for i in group]
        layout = build([queries[i] for i in group], bos=bos, mask=mask, future=future, orders=order)
        for i, score in zip(group, layout_log_probs(model, layout, backend, never), strict=True):
            answers[i] = score.tolist()
    return answers


def layout_log_probs(model: PreTrainedModel, layout: Layout, backend: str, never: int | None) -> list[np.ndarray]:
    """The log-probabilities of a layout's targets, query by query; arguments as of `log_probs`."""
    logits = layout_logits(model, layout, backend, never)
    scores = token_log_probs(logits, layout.targets.to(logits.device)).numpy()
    check_numbers(scores)
    return np.split(scores, np.cumsum(layout.asked)[:-1])


def layout_logits(model: PreTrainedModel, layout: Layout, backend: str, never: int | None) -> Tensor:
    """(A, V) the logits of a layout's predictions; arguments as of `log_probs`."""
    layout = layout.to(model.device)
    logits = run(model, *layout.inputs(), BACKENDS[backend](layout), layout.rows, target_positions=layout.told)[0]
    return forbid(logits, never)


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
