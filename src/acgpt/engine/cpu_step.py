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

`CpuSteps` makes the copies when they are first needed, see `stand_in`. It uses them only if they are faster on this CPU
and if their logits agree with the network's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from acgpt.engine.architecture import relative_difference
from acgpt.engine.attention import Backend, Cached, run
from acgpt.engine.decode import Rows
from acgpt.engine.small_weights import Int4, Int8, LowRank, Product, available, is_faster
from acgpt.engine.stand_in import StandIns, bare, blocks, can_join, is_plain, linear_layers, low_rank

MOST_TOKENS = 8  # tokens of a step, over all rows, up to which the copies are faster than the network
FEWEST_STEPS = 24  # steps of a call from which on it is faster even if it has to make the copies
LIKELY = 128  # tokens whose logits are computed in fp32
TOLERANCE = 0.25  # relative difference from the network's logits; 0.06 is usual


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
        """Return the (rows, keep, V) logits at the last slots, as `attention.run` does."""
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


class CpuSteps(StandIns[LlamaStep]):
    """The small copies of a network's weights, made when they are first needed.

    A network without 4-bit weights, or of another class than Llama, gets none.
    """

    base: tuple[list[Layer], Head] | None = None  # without adapters

    @property
    def in_use(self) -> bool:
        """Whether decoding steps without adapters use a copy; makes it if necessary."""
        return self.refresh() and self.base is not None

    def copy(self) -> None:
        """Copy the weights again if they have changed, in training for example."""
        self.steps, self.base = {}, copied(self.model)

    def make(self) -> LlamaStep | None:
        """Return the step for the active adapters; `None` if it cannot have them or its logits do not agree."""
        if self.base is None or not can_join(self.model):
            return None
        layers, head = self.base
        pairs = zip(layers, blocks(self.model), strict=True)
        step = LlamaStep(self.model, [adapted(layer, groups) for layer, (_, groups) in pairs], head)
        return step if difference(step, self.model) <= TOLERANCE else None


def worthwhile(tokens: int, steps: int) -> bool:
    """Return whether a call is to use `CpuSteps`: few tokens in a step, over all rows, and many steps."""
    return tokens <= MOST_TOKENS and steps >= FEWEST_STEPS


def supports(model: PreTrainedModel) -> bool:
    """Return whether `LlamaStep` computes what a network without adapters computes."""
    return (
        type(model) is LlamaForCausalLM
        and is_plain(model)
        and all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in model.parameters())
        and all(bare(linear).bias is None for linear in linear_layers(model))
    )


def copied(model: PreTrainedModel) -> tuple[list[Layer], Head] | None:
    """Return small copies of a network's layers and head; `None` if it has none, or none that are faster."""
    if not available() or not supports(model):
        return None
    layers, known = [], blocks(model)
    for layer, groups in known:
        matrices = [Int4.recover(joined(group)) for group in groups]
        if None in matrices:
            return None
        layers.append(Layer(Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm), *matrices))  # type: ignore[arg-type]
    several = [joined(gate_up) for _, (_, _, gate_up, _) in known[:8]]  # more than a CPU's cache holds
    if not is_faster([layer.gate_up for layer in layers[:8]], several):
        return None
    head: Any = model.get_output_embeddings()
    return layers, Head(head.weight.detach())


def joined(linears: Sequence[Any]) -> Tensor:
    """Return the matrices of linear layers, without adapters, one below the other."""
    return torch.cat([bare(linear).weight.detach() for linear in linears])


def adapted(layer: Layer, groups: Sequence[Sequence[Any]]) -> Layer:
    """Add the active adapters of a layer of the network, see `blocks`, to its copy."""
    changes: dict[str, Any] = {}
    for product, linears in zip(("qkv", "out", "gate_up", "down"), groups, strict=True):
        ups, downs = [], []  # of each linear layer, those of its adapters side by side
        for linear in linears:
            adapters = low_rank(linear)
            own = [up * scale for up, _, scale in adapters]
            ups.append(torch.cat([torch.zeros(bare(linear).out_features, 0), *own], 1))
            downs += [down for _, down, _ in adapters]
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
