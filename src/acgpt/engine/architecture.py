"""The check of an architecture: whether a model's answers will be exact under acgpt's attention.

`objection` reads the configuration and `try_out` runs the model. The trial is short: it does not reach a window of
4,096 tokens, or an attention temperature that sets in at token 8,192. Everything that depends on length is therefore
checked in the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from acgpt.engine.attention import BOTH_WAYS, NAME, OWN_ATTENTION, Backend, Cached, Dense, Recorder, head_width, run
from acgpt.engine.device import matrix_products
from acgpt.engine.layout import Layout, upload
from acgpt.engine.modules import evaluating, process_lock, turn
from acgpt.errors import ModelError

FAR = 2**20  # slots; beyond the length at which any attention temperature or window sets in
FULL = "full_attention"
# Layer types that have no softmax attention, or more than that; their states depend on the order of the slots.
RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp", "hybrid", "hybrid_sliding"}
WINDOWED = {"sliding_attention", "chunked_attention", "window_attention", "reference_sliding_attention"}


def check_model(model: PreTrainedModel) -> None:
    """Check that a model's answers will be exact, and set its attention implementation to `acgpt`.

    The check reads the configuration, then runs the model on a few tokens: six passes of at most two dozen tokens. It
    does not depend on the size of the weights.

    Raises:
        ModelError: The answers would not be exact; the message gives the reason.
    """
    name = type(model).__name__
    if reason := objection(model):
        raise ModelError(f"{name} {reason}")
    with turn(model), process_lock():
        own_attention = model.config._attn_implementation
        try:
            eager = torch.compiler.set_stance("force_eager")  # a compiled network would be recompiled for each pass
            with torch.no_grad(), evaluating(model), matrix_products("highest"), eager:
                try_out(model)
        except Exception as error:  # a network of another kind may raise anything
            model.set_attn_implementation(own_attention)
            if isinstance(error, ModelError):
                reason = str(error)
            elif not model._supports_attention_backend:
                reason = OWN_ATTENTION
            else:
                reason = f"its code fails with it ({type(error).__name__}: {error})."
            raise ModelError(f"{name} cannot use acgpt's attention: {reason}") from error


def accept(model: PreTrainedModel) -> None:
    """Set the attention implementation of a model that `check_model` has accepted before, with the same libraries."""
    with turn(model):
        model.set_attn_implementation(NAME)


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


class Trace:
    """A backend that records the inputs of each layer's attention, then calls another backend."""

    def __init__(self, backend: Backend) -> None:
        self.calls = 0
        self.backend = backend
        self.states: list[Tensor] = []  # queries, keys and values of each layer: (slots, numbers)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """Record the inputs; a decoding step gets the keys of all slots so far, of which its own come last."""
        self.states += [x[0, :, -q.shape[2] :].transpose(0, 1).flatten(1) for x in (q, k, v)]
        return self.backend(q, k, v, scale, dropout)


def try_out(model: PreTrainedModel) -> None:
    """Run the model on a few tokens to check what the layout relies on; set its attention to `acgpt`.

    * With nothing given, the logits are those of the unmodified model.
    * Copies are a set: in another order, with the same positions, they give the same result.
    * A decoding step continues a pass.
    * The number of a slot does not matter: it grows with the batch, not with the text.

    Differences are relative. The inputs of each layer's attention are compared as well as the logits, so that small
    weights cannot hide a difference.

    Raises:
        ModelError: One of these does not hold.
    """
    config = model.config.get_text_config()
    try:
        head_width(config)
    except Exception as unknown:
        raise ModelError(
            "its configuration names no width that all attention heads have. Use a model that has one, such as Llama, "
            "Qwen3 or GPT-NeoX."
        ) from unknown
    text = torch.arange(min(8, getattr(config, "max_position_embeddings", None) or 8), device=model.device)
    ids = text * 7919 % config.vocab_size  # by position
    plain = plain_logits(model, ids)
    own_attention = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise ModelError(OWN_ATTENTION)
    tolerance = tolerance_of(model)

    def states(positions: Tensor, backend: Backend, cache: Cache | None = None) -> list[Tensor]:
        """Return the logits and the inputs of each layer's attention, each (slots, numbers)."""
        trace = Trace(backend)
        logits = run(model, ids[positions][None], positions[None], trace, len(positions), cache)[0]
        return [logits, *trace.states]

    alone = states(text, Dense(laid_out([text[:0]], text)))
    if not (error := relative_difference(alone[:1], [plain])) <= tolerance:
        raise ModelError(disagreement(model, ids, plain, own_attention, error))

    copies = text[1::2]
    orders = laid_out([copies, copies.flip(0)], text)
    both = states(orders.positions, Dense(orders))
    packed, _ = orders.rectangle()
    first, second = (upload(slots, model.device) for slots in packed)
    second = torch.cat([second[: len(copies)].flip(0), second[len(copies) :]])
    given = [x[first] for x in both]
    if not (error := relative_difference([x[second] for x in both], given)) <= tolerance:
        raise ModelError(
            f"it depends on the order of copies, not only on their positions (relative difference {error:.2g}). Use a "
            "model that takes every position from position_ids."
        )

    positions, slots = orders.positions[first], torch.arange(len(first), device=model.device)
    near, far, known = Recorder(), Recorder(length=FAR), laid_out([copies], text[:-2])
    try:
        prefill = states(positions[:-2], Dense(known), near)
        step = states(positions[-2:], Cached(slots[None, -2:], len(slots), alone[-1].dtype), near)
    except Exception as own_cache:
        raise ModelError(
            "it takes no key-value cache but its own, so nothing could be sampled from it. Use a model that takes "
            "one, such as Llama, Qwen3 or GPT-NeoX."
        ) from own_cache
    decoded = [torch.cat(pair) for pair in zip(prefill, step, strict=True)]
    if not (error := relative_difference(decoded, given)) <= tolerance:
        raise ModelError(
            f"a decoding step does not continue a pass (relative difference {error:.2g}): its layers keep more than "
            "keys and values. Use a model in which every layer has full attention."
        )
    if not (error := relative_difference(states(positions[:-2], Dense(known), far), prefill)) <= tolerance:
        raise ModelError(
            f"it depends on the number of a slot, not only on its position (relative difference {error:.2g} after "
            f"{FAR:,} slots). Use a model that takes every position from position_ids."
        )


def laid_out(copies: Sequence[Tensor], text: Tensor) -> Layout:
    """Lay out one text once for each of several sequences of copies; the token ids are the positions."""
    positions = torch.cat([*copies, *[text] * len(copies)])
    counts, texts = tuple(map(len, copies)), (len(text),) * len(copies)
    rows = torch.arange(sum(counts), len(positions), device=text.device)
    return Layout(positions, positions, counts, texts, rows, positions[rows], texts)


def disagreement(model: PreTrainedModel, ids: Tensor, plain: Tensor, own_attention: str, error: float) -> str:
    """Return an error message for a model whose logits differ under acgpt's attention with nothing given."""
    model.set_attn_implementation(own_attention)
    tolerance, positions = tolerance_of(model), torch.arange(len(ids), device=ids.device)
    if not relative_difference([plain_logits(model, ids, position_ids=positions[None])], [plain]) <= tolerance:
        return (
            "it does not number positions 0, 1, 2, … (RoBERTa begins after its padding token). Use a model that does, "
            "such as Llama, Qwen3 or GPT-NeoX."
        )
    changed = plain_logits(model, torch.cat([ids[:-1], ids[:1]]))
    if not relative_difference([changed[:-1]], [plain[:-1]]) <= tolerance:
        return BOTH_WAYS
    return (
        f"with nothing given its logits differ from those of its own attention (relative difference {error:.2g}): that "
        "does more than plain softmax attention. Use another model."
    )
