"""Decoding steps on a CPU with weights in 4 and 8 bits, for Llama networks that were expanded from 4-bit weights.

A step reads all weights to advance a few rows by one token, so its time is that of reading them. `LlamaStep` reads a
copy a fifth as large. It also avoids the overhead of modules:

    attention   q, k, v in one product ──► rotary ──► the decoder's cache and attention backend ──► product
    MLP         gate and up in one product ──► SwiGLU ──► product

    weights                  copy
    linear layers            4 bits, the values that they were expanded from
    LoRA adapters            8 bits, rounded
    vocabulary projection    8 bits, rounded; the logits of the likeliest tokens are computed in fp32

The network itself stays as it is, in fp32. It scores, runs the prefill, and decodes many rows or a few tokens. In a
`LlamaStep`, products have bf16 inputs and outputs; the residual stream, attention and its cache are in fp32.

`CpuSteps` makes the copies when they are first needed. It uses them only if they are faster on this CPU and if their
logits agree with the network's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from acgpt.engine.architecture import relative_difference
from acgpt.engine.attention import Backend, Cached
from acgpt.engine.decode import Rows
from acgpt.engine.forward import run
from acgpt.engine.modules import is_compiled, is_hooked, parameters_of
from acgpt.engine.peft import adapter_layers, adapter_scales, adapters_at_work
from acgpt.engine.small_weights import Int4, Int8, LowRank, Product, available, is_faster

MOST_TOKENS = 8  # tokens of a step, over all rows, up to which the copies are faster than the network
FEWEST_STEPS = 24  # steps of a call from which on it is faster even if it has to make the copies
LIKELY = 128  # tokens whose logits are computed in fp32
KEPT = 4  # steps to keep, for different adapters
TOLERANCE = 0.25  # relative difference from the network's logits; 0.06 is usual
JOINED = {  # linear layers with the same input, by the name of their product
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class Norm:
    """Root-mean-square normalisation of (n, width) rows."""

    def __init__(self, module: Any) -> None:
        width = module.weight.numel()
        self.weight = module.weight.detach() * width**0.5
        self.least = torch.tensor((width * module.variance_epsilon) ** 0.5)

    def exact(self, rows: Tensor) -> Tensor:
        """Return the normalised rows in fp32."""
        length = torch.hypot(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), self.least)
        return (rows / length).mul_(self.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the normalised rows in bf16, as products read them."""
        return self.exact(rows).bfloat16()


class Head:
    """The vocabulary projection.

    Args:
        weight: (V, width) in fp32.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.small = weight, Int8(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the (n, V) logits of (n, width) rows."""
        logits = self.small(rows.bfloat16()).float()
        likely = logits.topk(min(LIKELY, logits.shape[1]), sorted=False).indices
        return logits.scatter_(1, likely, torch.bmm(self.weight[likely], rows[:, :, None])[:, :, 0])


@dataclass(frozen=True)
class Layer:
    """Norms and matrices of one layer."""

    attention_norm: Norm
    mlp_norm: Norm
    qkv: Product
    out: Product
    gate_up: Product
    down: Product


class LlamaStep:
    """A forward pass of a Llama network over a few tokens, with a key-value cache.

    Args:
        model: The network.
        layers: Its layers.
        head: Its vocabulary projection.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[Layer], head: Head) -> None:
        network: Any = model.base_model
        self.embedding, self.rotary = network.embed_tokens, network.rotary_emb
        self.layers, self.norm, self.head = layers, Norm(network.norm), head
        attention = network.layers[0].self_attn
        self.scale, self.width = attention.scaling, attention.head_dim
        self.heads = model.config.num_attention_heads, model.config.num_key_value_heads

    def __call__(self, ids: Tensor, positions: Tensor, backend: Backend, keep: int, cache: Rows) -> Tensor:
        """Return the (rows, keep, V) logits at the last slots, as `forward.run` does."""
        rows, slots = ids.shape
        n, (query_heads, key_heads), width = rows * slots, self.heads, self.width
        states = self.embedding(ids).flatten(0, 1)  # (n, width of the network)
        cos, sin = self.angles(states, positions)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.attention_norm(states)).float().view(n, -1, 2, width // 2)
            qkv = torch.addcmul(qkv * cos, qkv.flip(2), sin).view(n, -1, width)
            q, kv = qkv.split_with_sizes((query_heads, 2 * key_heads), 1)
            keys, values = cache.put(kv.view(n, 2, key_heads, width).transpose(0, 1), index)
            q = q.view(rows, slots, query_heads, width).transpose(1, 2)
            attended = backend(q, keys, values, self.scale)  # (rows, slots, heads, width)
            states += layer.out(attended.bfloat16().view(n, -1))
            gate, up = layer.gate_up(layer.mlp_norm(states)).chunk(2, -1)
            states += layer.down(F.silu(gate).mul_(up))
        last = states.view(rows, slots, -1)[:, slots - keep :].flatten(0, 1)
        logits: Tensor = self.head(self.norm.exact(last))
        return logits.view(rows, keep, -1)

    def cache(self, slots: Tensor) -> Rows:
        """Return an empty cache for a pass that writes the (R, W) slots."""
        state = torch.empty(1, self.heads[1], 0, self.width)
        size = int(slots.max()) + 1
        cache = Rows([(state, state)] * len(self.layers), len(slots), size)
        cache.advance(slots, size)
        return cache

    def angles(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (n, heads, 2, width / 2) factors of the halves of each head, and those of the swapped halves.

        Heads are those of queries, keys and values together. Values are not rotated: their factors are 1 and 0.
        """
        cos, sin = (x.flatten(0, 1).unflatten(1, (1, 2, -1)) for x in self.rotary(states, positions))
        sin = torch.cat([-sin[:, :, :1], sin[:, :, 1:]], 2)
        cos, sin = (x.expand(-1, sum(self.heads), -1, -1) for x in (cos, sin))
        zeros = torch.zeros_like(sin[:, : self.heads[1]])
        return torch.cat([cos, zeros + 1], 1), torch.cat([sin, zeros], 1)


class CpuSteps:
    """The small copies of a network's weights, made when they are first needed.

    Args:
        model: The network. Without 4-bit weights, or of another class than Llama, it gets no copies.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.adapter_layers: list[Any] = []
        self.weights: object = None  # state of the weights that `base` was copied from
        self.base: tuple[list[Layer], Head] | None = None  # without adapters
        self.steps: dict[object, LlamaStep | None] = {}  # by state of the adapters, the last used at the end

    @property
    def in_use(self) -> bool:
        """Whether decoding steps without adapters use a copy; makes it if necessary."""
        self.refresh()
        return self.base is not None and not is_hooked(self.model)

    def current(self) -> LlamaStep | None:
        """Return the step for the adapters that are active now; `None` if the network itself is to be used."""
        if is_hooked(self.model):
            return None
        self.refresh()
        if self.base is None:
            return None
        key = adapters_at_work(self.adapter_layers), tuple(adapter_scales(self.adapter_layers))
        if key not in self.steps:
            while len(self.steps) >= KEPT:
                del self.steps[next(iter(self.steps))]
            self.steps[key] = self.build(*self.base)
        self.steps[key] = self.steps.pop(key)
        return self.steps[key]

    def refresh(self) -> None:
        """Copy the weights again if they have changed, in training for example."""
        weights = tuple((weight.data_ptr(), version(weight)) for weight in parameters_of(self.model))
        if weights != self.weights:
            self.weights, self.steps, self.adapter_layers = weights, {}, adapter_layers(self.model)
            self.base = copied(self.model)

    def build(self, layers: Sequence[Layer], head: Head) -> LlamaStep | None:
        """Return the step for the active adapters; `None` if it cannot have them or its logits do not agree."""
        network: Any = self.model.base_model
        if not all(map(can_join, linear_layers(self.model))):
            return None
        step = LlamaStep(self.model, [adapted(*pair) for pair in zip(layers, network.layers, strict=True)], head)
        return step if difference(step, self.model) <= TOLERANCE else None


def worthwhile(tokens: int, steps: int) -> bool:
    """Return whether a call is to use `CpuSteps`: few tokens in a step, over all rows, and many steps."""
    return tokens <= MOST_TOKENS and steps >= FEWEST_STEPS


def version(weight: Tensor) -> int:
    """Return the number of changes of a weight in place; one that was made in inference mode does not count them."""
    return 0 if weight.is_inference() else weight._version


def supports(model: PreTrainedModel) -> bool:
    """Return whether `LlamaStep` computes what a network without adapters computes."""
    return (
        type(model) is LlamaForCausalLM
        and all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in model.parameters())
        and model.config.hidden_act == "silu"
        and type(model.get_input_embeddings()) is nn.Embedding
        and type(model.get_output_embeddings()) is nn.Linear
        and all(type(norm) is LlamaRMSNorm for norm in norms(model))
        and all(type(bare(layer)) is nn.Linear for layer in linear_layers(model))
        and all(bare(layer).bias is None for layer in (*linear_layers(model), model.get_output_embeddings()))
        and not is_compiled(model)
    )


def copied(model: PreTrainedModel) -> tuple[list[Layer], Head] | None:
    """Return small copies of a network's layers and head; `None` if it has none, or none that are faster."""
    if not available() or not supports(model):
        return None
    network: Any = model.base_model
    layers = []
    for layer in network.layers:
        products = {name: Int4.recover(joined(layer, paths)) for name, paths in JOINED.items()}
        if None in products.values():
            return None
        layers.append(Layer(Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm), **products))  # type: ignore[arg-type]
    several = network.layers[:8]  # more than a CPU's cache holds
    if not is_faster([x.gate_up for x in layers[:8]], [joined(layer, JOINED["gate_up"]) for layer in several]):
        return None
    head: Any = model.get_output_embeddings()
    return layers, Head(head.weight.detach())


def linear_layers(model: PreTrainedModel) -> list[Any]:
    """Return the linear layers of a Llama network's blocks."""
    network: Any = model.base_model
    return [layer.get_submodule(path) for layer in network.layers for path in chain(*JOINED.values())]


def norms(model: PreTrainedModel) -> list[Any]:
    """Return the norms of a Llama network."""
    network: Any = model.base_model
    pairs = ((layer.input_layernorm, layer.post_attention_layernorm) for layer in network.layers)
    return [*chain(*pairs), network.norm]


def bare(linear: Any) -> Any:
    """Return a linear layer without its adapters."""
    return getattr(linear, "base_layer", linear)


def joined(layer: Any, paths: Sequence[str]) -> Tensor:
    """Return the matrices of linear layers, without adapters, one below the other."""
    return torch.cat([bare(layer.get_submodule(path)).weight.detach() for path in paths])


def active_names(linear: Any) -> list[str]:
    """Return the names of the active LoRA adapters of a linear layer."""
    if bare(linear) is linear or linear.disable_adapters:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]


def can_join(linear: Any) -> bool:
    """Return whether the adapters of a linear layer, if any are active, are plain LoRA."""
    if bare(linear) is linear or (linear.disable_adapters and not linear.merged_adapters):
        return True
    if linear.merged_adapters or not hasattr(linear, "lora_A") or getattr(linear, "lora_variant", None):
        return False
    pairs = [(linear.lora_A[name], linear.lora_B[name]) for name in active_names(linear)]
    return all(type(matrix) is nn.Linear and matrix.bias is None for pair in pairs for matrix in pair)


def adapted(layer: Layer, module: Any) -> Layer:
    """Add the active adapters of a layer of the network to its copy."""
    changes: dict[str, Any] = {}
    for product, paths in JOINED.items():
        ups, downs = [], []  # of each linear layer, those of its adapters side by side
        for linear in map(module.get_submodule, paths):
            names = active_names(linear)
            own = [linear.lora_B[name].weight.detach() * linear.scaling[name] for name in names]
            ups.append(torch.cat([torch.zeros(bare(linear).out_features, 0), *own], 1))
            downs += [linear.lora_A[name].weight.detach() for name in names]
        if downs:
            changes[product] = LowRank(getattr(layer, product), torch.block_diag(*ups), torch.cat(downs))
    return replace(layer, **changes)


@torch.no_grad()
def difference(step: LlamaStep, model: PreTrainedModel) -> float:
    """Return the relative difference between the logits of a step and of the network, on a few tokens."""
    slots = torch.arange(MOST_TOKENS)[None]
    ids = slots * 7919 % model.config.vocab_size
    backends = [Cached(slots, MOST_TOKENS, torch.float32) for _ in range(2)]
    logits = step(ids, slots, backends[0], MOST_TOKENS, step.cache(slots))[0]
    return relative_difference([logits], [run(model, ids, slots, backends[1], MOST_TOKENS, step.cache(slots))[0]])
