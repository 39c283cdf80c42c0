"""The vocabulary projection of a network, for code that computes log-probabilities without all logits at once."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acgpt.engine.kernels import log_probs
from acgpt.engine.locks import process_lock, turn
from acgpt.engine.modules import evaluating

MANY = 1024  # predictions; for fewer, compiling a kernel does not pay off
HUGE = 1000.0  # a logit that a cap would change

_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # results of `try_head` by network


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
    """Return the weight for `log_probs.linear_log_probs`, or `None` if so many predictions should go through logits.

    The kernel is for half precision on CUDA.
    """
    if predictions < MANY or model.device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return None
    weight = model.get_output_embeddings().weight
    whole = type(weight) is nn.Parameter and weight.dtype == model.dtype  # not one of several shards
    return weight if whole and has_plain_head(model) and log_probs.works(model.device, model.dtype) else None
