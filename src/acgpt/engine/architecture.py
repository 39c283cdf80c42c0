"""Checks of a network's configuration, before its attention is replaced (see `attention.check_model`).

The trial in `attention.try_out` is short: it does not reach a window of 4,096 tokens, or an attention temperature that
sets in at token 8,192. Everything that depends on length is therefore checked in the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.errors import ModelError

FULL = "full_attention"
# Layer types that have no softmax attention, or more than that; their states depend on the order of the slots.
RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp", "hybrid", "hybrid_sliding"}
WINDOWED = {"sliding_attention", "chunked_attention", "window_attention", "reference_sliding_attention"}


def objection(model: PreTrainedModel) -> str | None:
    """Return why, by its configuration, this model's answers would not be exact, and what to do; `None` if they are."""
    try:
        config = model.config.get_text_config()
    except ValueError as error:  # several text networks, or none
        return f"has no single text network ({error}). Load its decoder alone."
    layers = getattr(config, "layer_types", None)
    kinds = set(layers or ()) - {FULL}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layers and not kinds:  # no layer uses the window
        window = None
    if kinds & RECURRENT:
        return (
            f"has recurrent layers ({', '.join(sorted(kinds))}), which follow the order of the slots and not positions "
            "and a mask. Use a model in which every layer has full attention."
        )
    if window is not None or (kinds and kinds <= WINDOWED):
        feature = f"layers of type {', '.join(sorted(kinds))}" if window is None else f"a sliding window of {window}"
        return (
            f"has {feature}, but a copy must be visible from every position. Use a model in which every layer has full "
            "attention, or, for texts shorter than the window, switch it off in config.json (layer_types, "
            "sliding_window)."
        )
    if kinds:
        return (
            f"has layers of type {', '.join(sorted(kinds))}, which leave keys out, but a copy must be visible from "
            "every position. Use a model in which every layer has full attention."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return (
            "does not take position_ids: it counts tokens itself (as ALiBi does), so copies cannot carry the positions "
            "of their originals. Use a model that takes them, such as Llama, Qwen3 or GPT-NeoX."
        )
    tuned = [module for module in model.modules() if getattr(module, "attn_temperature_tuning", False)]
    if tuned and not all(getattr(module, "use_rope", False) for module in tuned):
        return (
            "tunes the temperature of attention by the number of the slot (attn_temperature_tuning), not by the "
            f"position. For texts shorter than {getattr(config, 'floor_scale', 'floor_scale')} tokens, which it does "
            "not change, set attn_temperature_tuning to false in config.json."
        )
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "is spread over several devices; load it onto one."
    if model.get_output_embeddings() is None:
        return "predicts no tokens; load it as a causal language model (AutoModelForCausalLM)."
    return None


def tolerance_of(model: PreTrainedModel) -> float:
    """Return the largest relative difference that counts as rounding: at least four times the largest observed."""
    if getattr(model, "is_quantized", False):  # its activations are always in half precision
        return 0.2
    return {torch.bfloat16: 0.2, torch.float16: 0.05}.get(model.dtype, 1e-3)


def plain_logits(model: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    """Return the (slots, V) logits of a model with its own attention."""
    try:
        logits: Tensor = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
    except Exception as error:
        if model.dtype == torch.float64 and getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            raise ModelError(
                "transformers cannot run experts in float64. Load the model in float32, or call its "
                'set_experts_implementation("eager") first.'
            ) from error
        raise ModelError(f"its own code fails on a short text ({type(error).__name__}: {error}).") from error
    if logits.isnan().any():
        raise ModelError("its logits are not numbers (NaN): its weights are broken, or its dtype overflows.")
    return logits


def relative_difference(states: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the largest relative difference between two passes: logits first, then the inputs of attention."""
    differences = []
    for index, pair in enumerate(zip(states, reference, strict=True)):
        state, expected = (x if x.dtype == torch.float64 else x.float() for x in pair)
        if index == 0:  # logits: subtract what all slots share, such as the frequencies of tokens
            state, expected = (x.log_softmax(-1).clamp(min=-100) for x in (state, expected))
            size = (expected - expected.mean(0)).norm()
        else:
            size = expected.norm()
        difference = (state - expected).norm()
        differences.append(torch.where(difference == 0, difference, difference / size))
    return torch.stack(differences).max().item()
