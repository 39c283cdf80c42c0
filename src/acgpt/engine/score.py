"""From hidden states or logits to log-probabilities.

Log-probabilities of many tokens are computed from hidden states, without all logits at once, if the vocabulary
projection of the network is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acgpt.engine.kernels import log_probs as kernel
from acgpt.engine.layout import download
from acgpt.engine.modules import evaluating, process_lock, turn
from acgpt.errors import ModelError

MANY = 1024  # predictions; for fewer, compiling a kernel does not pay off
HUGE = 1000.0  # a logit that a cap would change

_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # results of `try_head` by network


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


# ---- the vocabulary projection --------------------------------------------------------------------------------------


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the logits are the last hidden states times a matrix. Some architectures scale or cap them."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:  # such as the layer of an adapter
        return False
    if any((*module._forward_hooks, *module._forward_pre_hooks) for module in (model, head)):
        return False  # they may change the logits
    if model not in _plain:
        _plain[model] = try_head(model, head)
    return _plain[model]


@torch.no_grad()
def try_head(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Run a few tokens; return whether the head reads the last hidden states, and its output is the logits.

    The output is replaced by large numbers, so that the result does not depend on the weights.
    """
    seen: dict[str, Any] = {}
    size = head.weight.shape[0]
    logits = torch.linspace(-HUGE, HUGE, size, device=head.weight.device).to(head.weight.dtype).expand(1, 4, size)

    def keep_states(_: nn.Module, __: object, output: Any) -> None:
        seen["states"] = getattr(output, "last_hidden_state", None)

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> Tensor:
        seen["read"] = inputs[0] if inputs else None
        return logits

    with turn(model), process_lock(), evaluating(model), torch.compiler.set_stance("force_eager"):
        # A compiled network would be recompiled for this length.
        hooks = model.base_model.register_forward_hook(keep_states), head.register_forward_hook(replace)
        try:
            found = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
    states, read = seen.get("states"), seen.get("read")
    if states is None or read is None:
        return False
    return torch.equal(states, read) and torch.equal(found.to(logits.dtype), logits)


def fast_head(model: PreTrainedModel, predictions: int) -> Tensor | None:
    """Return the weight for `linear_log_probs`, or `None` if so many predictions should go through logits.

    The kernel is for half precision on CUDA.
    """
    if predictions < MANY or model.device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return None
    weight = model.get_output_embeddings().weight
    whole = type(weight) is nn.Parameter and weight.dtype == model.dtype  # not one of several shards
    return weight if whole and has_plain_head(model) and kernel.works(model.device, model.dtype) else None
