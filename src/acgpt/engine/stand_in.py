"""Steps that stand in for a network: they compute what it computes, with its weights or with copies of them.

`cpu_step` and `cuda_step` have one kind each. Here is what they share: the parts of a network with the LoRA adapters on
them, and `StandIns`, which uses a step only for the weights, active adapters and scales that it was made for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from acgpt.engine.attention import NAME
from acgpt.engine.modules import is_compiled, is_hooked, parameters_of, turn, unchanged
from acgpt.engine.peft import adapter_layers, adapter_scales, adapters_at_work

KEPT = 4  # states of the adapters that have steps

Step = TypeVar("Step")


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps its parts; paths are relative to the network or to a layer."""

    norm: str
    attention: str
    products: tuple[tuple[str, ...], ...]  # four: q, k and v; attention's output; up, of Llama gate and up; down
    activation: str | None  # `None`: SwiGLU of gate and up
    norm_class: type[nn.Module]
    interleaved: bool  # see `kernels.step.rotate`


FAMILIES: dict[type[PreTrainedModel], Family] = {
    GPTNeoXForCausalLM: Family(
        "final_layer_norm", "attention",
        (("attention.query_key_value",), ("attention.dense",), ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
        "mlp.act", nn.LayerNorm, True,
    ),
    LlamaForCausalLM: Family(
        "norm", "self_attn",
        (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
            ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
        ),
        None, LlamaRMSNorm, False,
    ),
}  # fmt: skip


def blocks(model: PreTrainedModel) -> list[tuple[Any, list[list[Any]]]]:
    """Return each layer of a network, and its linear layers in groups with the same input, see `Family.products`."""
    paths = FAMILIES[type(model)].products
    layers = model.base_model.get_submodule("layers").children()
    return [(layer, [[layer.get_submodule(path) for path in group] for group in paths]) for layer in layers]


def linear_layers(model: PreTrainedModel) -> list[Any]:
    """Return the linear layers of all layers."""
    return [linear for _, groups in blocks(model) for group in groups for linear in group]


def is_plain(model: PreTrainedModel) -> bool:
    """Return whether a network is of a known family and has, adapters aside, parts of the usual kinds in one dtype."""
    family = FAMILIES.get(type(model))
    if family is None:
        return False
    norms: list[Any] = [model.base_model.get_submodule(family.norm)]
    norms += [norm for layer, _ in blocks(model) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    linears = [*map(bare, linear_layers(model)), model.get_output_embeddings()]
    embedding: Any = model.get_input_embeddings()
    return (
        all(type(norm) is family.norm_class for norm in norms)
        and all(type(norm) is LlamaRMSNorm or norm.bias is not None for norm in norms)
        and all(type(linear) is nn.Linear for linear in linears)
        and linears[-1].bias is None
        and type(embedding) is nn.Embedding
        and embedding.max_norm is None
        and all(x.weight.dtype == model.dtype and x.weight.is_contiguous() for x in (*norms, *linears, embedding))
        and (family.activation is not None or model.config.hidden_act == "silu")
    )


def bare(linear: Any) -> Any:
    """Return a linear layer without its adapters."""
    return getattr(linear, "base_layer", linear)


def active_names(linear: Any) -> list[str]:
    """Return the names of the active LoRA adapters of a linear layer."""
    if bare(linear) is linear or linear.disable_adapters:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]


def low_rank(linear: Any) -> list[tuple[Tensor, Tensor, float]]:
    """Return the up and down projections and the scale of each active LoRA adapter of a linear layer."""
    return [
        (linear.lora_B[name].weight.detach(), linear.lora_A[name].weight.detach(), float(linear.scaling[name]))
        for name in active_names(linear)
    ]


def can_join(model: PreTrainedModel) -> bool:
    """Return whether the adapters of all linear layers, where any are active, are plain LoRA."""
    return all(map(has_plain_lora, linear_layers(model)))


def has_plain_lora(linear: Any) -> bool:
    """Return whether the adapters of a linear layer, if any are active, are plain LoRA."""
    if bare(linear) is linear or (linear.disable_adapters and not linear.merged_adapters):
        return True
    if linear.merged_adapters or not hasattr(linear, "lora_A") or getattr(linear, "lora_variant", None):
        return False
    pairs = [(linear.lora_A[name], linear.lora_B[name]) for name in active_names(linear)]
    return all(type(matrix) is nn.Linear and matrix.bias is None for pair in pairs for matrix in pair)


class StandIns(ABC, Generic[Step]):
    """The steps of a network, one for each state of its adapters, made when they are first needed.

    Args:
        model: The network.
    """

    replaces = True  # whether the step that was not used for longest gives way to a new one

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.adapter_layers: list[Any] = []
        self.addresses: object = None
        self.versions: object = None
        self.steps: dict[object, Step | None] = {}  # by state of the adapters, the last used at the end

    def current(self) -> Step | None:
        """Return the step for the adapters that are active now; `None` if the network itself is to be used."""
        with turn(self.model):
            if not self.refresh():
                return None
            key = adapters_at_work(self.adapter_layers), tuple(adapter_scales(self.adapter_layers))
            if key not in self.steps:
                if len(self.steps) >= KEPT:
                    if not self.replaces:
                        return None
                    del self.steps[next(iter(self.steps))]
                self.steps[key] = self.make()
            self.steps[key] = self.steps.pop(key)
            return self.steps[key]

    def refresh(self) -> bool:
        """Copy weights that have changed; return whether steps may be used. The caller holds the network's lock."""
        with unchanged(self.model):
            if self.model.config._attn_implementation != NAME or is_hooked(self.model) or is_compiled(self.model):
                return False
            weights = parameters_of(self.model)
            addresses = [weight.data_ptr() for weight in weights], [weight.dtype for weight in weights]
            versions = versions_of(weights)
            if addresses != self.addresses:
                self.steps, self.adapter_layers = {}, adapter_layers(self.model)
            if (addresses, versions) != (self.addresses, self.versions):
                self.copy()
            self.addresses, self.versions = addresses, versions
        return True

    @abstractmethod
    def copy(self) -> None:
        """Copy weights, which are new or have changed. There are no steps if they are at other addresses now."""

    @abstractmethod
    def make(self) -> Step | None:
        """Return a step for the active adapters; `None` if it cannot have them or does not agree with the network."""


def versions_of(weights: Sequence[Tensor]) -> list[int]:
    """Return how often each weight was changed in place; a server asks for it before every pass.

    A weight that was made in inference mode does not count its changes.
    """
    try:
        return [weight._version for weight in weights]
    except RuntimeError:
        return [0 if weight.is_inference() else weight._version for weight in weights]
