"""The forward pass of a network under a backend, in every architecture.

One attention function is registered with transformers. `run` passes a backend (see `attention`) to the model's forward
as the keyword `acgpt`; transformers hands it on to every layer.

Without a backend, that is outside acgpt's own calls, the registered function behaves like transformers' `sdpa`. A model
that was loaded by acgpt therefore still works everywhere else.

Three things could silently apply another mask. All are prevented, and each has a test:

* transformers takes a jump in position ids for a boundary between packed documents. `run` always passes a 4-D mask,
  which switches this off.
* Someone may change the attention implementation later. `run` counts the layers that called the backend; in a compiled
  network, where layers cannot count, it checks the implementation's name.
* Layers may have a mask of their own, such as a sliding window. `check_model` refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from acgpt.engine.attention import Backend, Dense
from acgpt.engine.locks import turn
from acgpt.engine.modules import is_compiled
from acgpt.errors import ModelError

NAME = "acgpt"  # the attention implementation's name in transformers, and the keyword that carries the backend
# Additions to attention that some architectures pass and our backends would ignore.
OWN_ADDITIONS = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "block_indices")
OWN_ATTENTION = (
    "its code computes attention itself, not through transformers' attention interface. Use a model that does, such as "
    "Llama, Qwen3 or GPT-NeoX."
)
BOTH_WAYS = (
    "it reads a text both ways, so it is no causal model. If it was trained as one, set is_decoder to true in "
    "config.json."
)


class Recorder(Cache):
    """A cache that records keys and values. A pass also attends to those of earlier passes.

    Args:
        states: Keys and values of each layer until now, each (1, heads, N, D). Default: none.
        length: The length that it reports. Positions are always passed to the model, so it need not count slots.
    """

    def __init__(self, states: Sequence[tuple[Tensor, Tensor]] = (), length: int = 0) -> None:
        super().__init__(layers=[])
        self.by_layer, self.length = dict(enumerate(states)), length

    @property
    def states(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer."""
        return list(self.by_layer.values())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values and return all of them; called by each layer in turn."""
        if layer_idx in self.by_layer:
            keys, values = self.by_layer[layer_idx]
            key_states, value_states = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        self.by_layer[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Return the length."""
        return self.length


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the backend of this call, or with `sdpa` if there is none; registered in transformers."""
    backend: Backend | None = kwargs.pop(NAME, None)
    if backend is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(BOTH_WAYS)
    added = [name for name in OWN_ADDITIONS if kwargs.get(name) is not None]
    if attention_mask is not None and attention_mask.shape != (1, 1, 1, 1):  # not the one that `run` passed
        added.append("a mask of its own")
    if added:
        raise ModelError(
            f"its attention uses {', '.join(added)}, which acgpt's would leave out. Use a model with plain softmax "
            "attention in every layer."
        )
    if dropout and not isinstance(backend, Dense):  # others would ignore it
        raise ModelError("this backend has no dropout of attention weights: use the dense one, or no dropout there.")
    if not torch.compiler.is_compiling():  # a counter would make torch.compile recompile each layer
        backend.calls += 1
    return backend(query, key, value, scaling, dropout), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a backend


def run(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    backend: Backend,
    keep: Tensor | int,
    cache: Any = None,
    target_positions: Tensor | None = None,
    *,
    hidden: bool = False,
) -> Tensor:
    """Run one forward pass of the model under `backend` and return the logits at the slots `keep`.

    Threads that share the model take turns.

    Args:
        model: A causal language model that `check_model` has accepted.
        ids: (rows, slots) token ids.
        positions: (rows, slots) position ids.
        backend: Attention under the layout's mask.
        keep: Slots to return logits for, or the number of last slots. The vocabulary projection runs on these only.
        cache: Keys and values of earlier calls, or a `Recorder` of this call's.
        target_positions: (rows, slots) the position that each slot predicts, for networks that take it as an input
            (`sigma_network`).
        hidden: Return the last hidden states instead of logits.

    Returns:
        (rows, kept slots, vocabulary) logits, or (rows, kept slots, width) hidden states.

    Raises:
        ModelError: Not every layer called the backend exactly once.
    """
    backend.calls = 0
    with turn(model):
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # passed through, not read
            "past_key_values": cache,
            "use_cache": cache is not None,
            NAME: backend,
        }
        if target_positions is not None:
            inputs["target_positions"] = target_positions
        if hidden:
            logits: Tensor = model.base_model(**inputs).last_hidden_state[:, keep]
        else:
            logits = model(**inputs, logits_to_keep=keep).logits
    layers = model.config.get_text_config().num_hidden_layers
    if backend.calls != layers and not (model.config._attn_implementation == NAME and is_compiled(model)):
        raise ModelError(miscount(model, backend.calls, layers))
    count = keep if isinstance(keep, int) else len(keep)
    if logits.shape[1] != count:  # an architecture that ignores `logits_to_keep`
        logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
    return logits


def miscount(model: PreTrainedModel, calls: int, layers: int) -> str:
    """Return an error message for a model whose number of attention calls is not its number of layers."""
    if (now := model.config.get_text_config()._attn_implementation) != NAME:
        return (
            f"{type(model).__name__} used acgpt's attention in {calls} of its {layers} layers: its attention "
            f"implementation is now {now!r}. Set it to {NAME!r} again."
        )
    if not calls:
        return OWN_ATTENTION
    return (
        f"it calls attention {calls} times for its {layers} layers, which is not one softmax attention a layer. Use a "
        "model in which every layer has full attention."
    )
