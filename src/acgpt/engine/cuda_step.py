"""Decoding steps on CUDA in half precision with few kernels, for GPT-NeoX, σ-GPT and Llama networks.

The modules of a network launch about twenty small kernels per layer. `CudaStep` computes the same with three or four
(see `kernels.step`), next to matrix products and attention:

    attention   add and normalise ──► q, k, v in one product ──► rotary, cache ──► the decoder's attention ──► product
    MLP         add and normalise ──► one product ──► activation ──► product

It reads the network's own weights, except for these copies, which are small (see `MOST_COPIES`):

    q, k and v of a Llama layer, and its gate and up    joined
    linear layers with active LoRA adapters             merged with them
    vocabulary projection                               padded to a multiple of `ALIGNED` tokens

`CudaSteps` makes them when they are first needed, see `stand_in`. It uses them only if their logits agree with the
network's; of every other network, the modules are run.

`CudaStep.packed` runs a packed batch of short texts in the same way: their prefill, or their scores. Launching the
modules of a network with adapters takes several times as long. A server replays such passes, see `packed_graphs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from acgpt.engine.architecture import relative_difference, tolerance_of
from acgpt.engine.attention import BACKENDS, Backend, Ragged, Recorder, can_decode_ragged, head_width, run
from acgpt.engine.decode import Rows
from acgpt.engine.kernels import step as kernels
from acgpt.engine.layout import build as lay_out
from acgpt.engine.stand_in import FAMILIES, StandIns, bare, blocks, can_join, is_plain, linear_layers, low_rank
from acgpt.query.query import Query

ALIGNED = 64  # products are fast if the number of their columns is a multiple of this
MOST_COPIES = 2**30  # bytes of a network's copies; a larger network is used without, or not at all if it has adapters
TRIAL = 8  # tokens on which a step is compared with the network
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")  # kinds whose frequencies do not depend on the text


class Norm:
    """A LayerNorm or a root-mean-square norm, with the additions that precede it."""

    def __init__(self, module: Any) -> None:
        rms = isinstance(module, LlamaRMSNorm)
        self.weight, self.bias = module.weight.detach(), None if rms else module.bias.detach()
        self.epsilon = float(module.variance_epsilon if rms else module.eps)

    def __call__(self, stream: Tensor, *branches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (n, width) residual stream with the branches added to it, and its normalised rows."""
        return kernels.add_norm(stream, branches, self.weight, self.bias, self.epsilon)


class Product:
    """One or more linear layers with the same input; their outputs are returned side by side.

    Args:
        linears: The layers, perhaps with adapters.
        copied: Whether the matrices may be copied: joined, and merged with active adapters.
    """

    def __init__(self, linears: Sequence[Any], copied: bool) -> None:
        self.sources = [(bare(linear).weight.detach(), low_rank(linear)) for linear in linears]
        self.copied = copied and needs_copy(linears)
        self.weights = [weight for weight, _ in self.sources]
        self.biases: list[Tensor | None] = [
            None if (bias := bare(linear).bias) is None else bias.detach() for linear in linears
        ]
        if self.copied:
            self.weights = [torch.cat(self.weights)]
            self.own_biases, self.biases = self.biases, [joined_bias(linears)]
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights again, into the same memory: captured steps read it."""
        if not self.copied:
            return
        start = 0
        for (weight, adapters), bias in zip(self.sources, self.own_biases, strict=True):
            end = start + len(weight)
            merged = weight.float()
            for up, down, scale in adapters:
                merged = merged + scale * (up.float() @ down.float())
            self.weights[0][start:end].copy_(merged if adapters else weight)
            if self.biases[0] is not None and bias is not None:
                self.biases[0][start:end].copy_(bias)
            start = end

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the products of (n, width) rows."""
        products = [F.linear(rows, *pair) for pair in zip(self.weights, self.biases, strict=True)]
        return products[0] if len(products) == 1 else torch.cat(products, -1)


class Head:
    """The vocabulary projection.

    Args:
        weight: (V, width).
        copied: Whether it may be copied, to be padded.
    """

    def __init__(self, weight: Tensor, copied: bool) -> None:
        self.source = self.weight = weight
        if copied and (missing := -len(weight) % ALIGNED):
            self.weight = F.pad(weight, (0, 0, 0, missing))

    def refresh(self) -> None:
        """Copy the weights again, into the same memory."""
        if self.weight is not self.source:
            self.weight[: len(self.source)].copy_(self.source)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the (n, V) logits of (n, width) rows, without those of padding."""
        return F.linear(rows, self.weight)[:, : len(self.source)]


class Layer:
    """Norms, products and activation of one layer."""

    def __init__(self, module: Any, groups: Sequence[Sequence[Any]], activation: str | None, copied: bool) -> None:
        self.attention_norm, self.mlp_norm = Norm(module.input_layernorm), Norm(module.post_attention_layernorm)
        self.qkv, self.out, self.up, self.down = (Product(linears, copied) for linears in groups)
        self.activation: Callable[[Tensor], Tensor] = (
            kernels.swiglu if activation is None else module.get_submodule(activation)
        )
        self.parallel = bool(getattr(module, "use_parallel_residual", False))

    def mlp(self, rows: Tensor) -> Tensor:
        """Return the output of the MLP for (n, width) normalised rows."""
        return self.down(self.activation(self.up(rows)))


@runtime_checkable
class TargetReader(Protocol):
    """A network that reads the position that each slot predicts, see `methods.sigma_network`."""

    rotates_queries: bool  # to the position that is predicted

    def next_positions(self, positions: Tensor) -> Tensor:
        """Return what slots predict where no positions are passed."""

    def embed_targets(self, positions: Tensor, target_positions: Tensor) -> Tensor:
        """Return what is added to the embeddings of tokens."""


class PackedRow:
    """Keys and values of a packed pass: the cache of one row, of which a pass writes and reads all slots.

    Args:
        memory: What `CudaStep.memory` returns: that of all layers, or of one, which all layers use in turn.
        layers: Number of layers.
    """

    def __init__(self, memory: Tensor, layers: int) -> None:
        self.slots = torch.arange(memory.shape[3], device=memory.device)[None]
        self.buffers = [(keys, values) for keys, values in memory.expand(layers, -1, -1, -1, -1, -1)]

    def visible(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the (rows, heads, slots, D) keys and values of a layer."""
        keys, values = self.buffers[layer]
        return keys[:rows].transpose(1, 2), values[:rows].transpose(1, 2)


def states_of(memory: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each layer in what `CudaStep.memory` returned, as in `attention.Recorder`."""
    return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in memory]


class CudaStep:
    """A forward pass of a network over a few tokens, with the decoder's key-value cache.

    Args:
        model: The network.
        copied: Whether weights may be copied.
    """

    def __init__(self, model: PreTrainedModel, copied: bool) -> None:
        family, network, config = FAMILIES[type(model)], model.base_model, model.config
        layers = blocks(model)
        rotary: Any = network.get_submodule("rotary_emb")
        head: Any = model.get_output_embeddings()
        attention: Any = layers[0][0].get_submodule(family.attention)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.layers = [Layer(module, groups, family.activation, copied) for module, groups in layers]
        self.norm, self.head = Norm(network.get_submodule(family.norm)), Head(head.weight.detach(), copied)
        self.frequencies, self.scaling = rotary.inv_freq, float(rotary.attention_scaling)
        self.scale, self.width, self.interleaved = attention.scaling, head_width(config), family.interleaved
        heads = config.num_attention_heads
        self.heads = heads, getattr(config, "num_key_value_heads", None) or heads
        self.calls = 0  # passes, including one for each captured graph but not its replays
        self.packs = False  # whether `packed` agrees with the network
        self.reader: TargetReader | None = network if isinstance(network, TargetReader) else None
        self.weights: int = model.num_parameters()
        self.tolerance = tolerance_of(model)

    def refresh(self) -> None:
        """Copy the weights again, into the same memory."""
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.layers:
                for product in (layer.qkv, layer.out, layer.up, layer.down):
                    product.refresh()
            self.head.refresh()

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        backend: Backend,
        keep: int,
        cache: Rows,
        target_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the (rows, keep, V) logits at the last slots, as `attention.run` does."""
        rows, slots = ids.shape
        stream, *branches = self.residuals(ids, positions, backend, cache, target_positions)
        kept = (x.unflatten(0, (rows, slots))[:, slots - keep :] for x in (stream, *branches))
        _, normal = self.norm(*(x.flatten(0, 1).contiguous() for x in kept))
        logits: Tensor = self.head(normal).unflatten(0, (rows, keep))
        return logits

    def packed(
        self, ids: Tensor, positions: Tensor, backend: Backend, keep: Tensor, *, hidden: bool = False, kept: bool = True
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run a packed batch, as `attention.run` does.

        Args:
            ids: (1, N) token ids.
            positions: (1, N) position ids.
            backend: Attention under the layout's mask.
            keep: (n,) slots to return logits for.
            hidden: Return the last hidden states instead of logits.
            kept: Return keys and values, too.

        Returns:
            (n, V) logits, or (n, width) hidden states; and the keys and values of each layer, as in `Recorder`.
        """
        memory = self.memory(ids.shape[1], len(self.layers) if kept else 1)
        cache = PackedRow(memory, len(self.layers))
        _, normal = self.norm(*(x[keep] for x in self.residuals(ids, positions, backend, cache)))
        return normal if hidden else self.head(normal), states_of(memory) if kept else []

    def memory(self, slots: int, layers: int) -> Tensor:
        """Return new memory for keys and values: (layers, 2, 1, slots, key heads, channels of a head)."""
        return self.embedding.new_empty(layers, 2, 1, slots, self.heads[1], self.width)

    def residuals(
        self,
        ids: Tensor,
        positions: Tensor,
        backend: Backend,
        cache: Rows | PackedRow,
        target_positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the (n, width) residual stream after all layers, without and then the branches to add to it."""
        self.calls += 1
        rows, slots = ids.shape
        stream = F.embedding(ids.flatten(), self.embedding)  # (n, width), n = rows * slots
        query_angles = angles = self.angles(positions)
        if self.reader is not None:
            targets = self.reader.next_positions(positions) if target_positions is None else target_positions
            stream = stream + self.reader.embed_targets(positions, targets).flatten(0, 1).to(stream.dtype)
            query_angles = self.angles(targets) if self.reader.rotates_queries else angles
        branches: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self.layers):
            stream, normal = layer.attention_norm(stream, *branches)
            q = kernels.rotate(
                layer.qkv(normal), query_angles, angles, cache.slots, cache.buffers[index], self.heads, self.interleaved
            )
            q = q.unflatten(0, (rows, slots)).transpose(1, 2)
            attended = backend(q, *cache.visible(index, rows), self.scale)  # (rows, slots, heads, head width)
            out = layer.out(attended.reshape(rows * slots, -1))
            if layer.parallel:
                _, normal = layer.mlp_norm(stream)
                branches = layer.mlp(normal), out
            else:
                stream, normal = layer.mlp_norm(stream, out)
                branches = (layer.mlp(normal),)
        return stream, *branches

    def angles(self, positions: Tensor) -> kernels.Angles:
        """Return the cosines and sines of (rows, slots) positions."""
        return kernels.angles(positions.flatten(), self.frequencies, self.scaling, self.embedding.dtype)


class CudaSteps(StandIns[CudaStep]):
    """The steps of a network, one for each state of its adapters, made when they are first needed."""

    replaces = False  # captured steps would keep the memory of those that are given up

    def copy(self) -> None:
        """Update the copies of weights that have changed."""
        for step in filter(None, self.steps.values()):
            step.refresh()

    def make(self) -> CudaStep | None:
        """Return a step for the active adapters; `None` if there is none or its logits do not agree."""
        model, tolerance = self.model, tolerance_of(self.model)
        if not can_decode_ragged(model) or not supports(model):
            return None
        copied = copied_bytes(model) <= MOST_COPIES
        if not copied and any(map(low_rank, linear_layers(model))):
            return None
        try:
            with torch.inference_mode(False), torch.no_grad():  # the copies are updated outside inference mode, too
                step = CudaStep(model, copied)
                distance = difference(step, model)
                step.packs = packed_difference(step, model, "varlen") <= tolerance
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # a kernel that cannot be compiled, for example
            warnings.warn(f"the kernels of a step cannot be used here, so sampling is slower: {error}", stacklevel=2)
            return None
        return step if distance <= tolerance else None


def needs_copy(linears: Sequence[Any]) -> bool:
    """Return whether one product for these layers needs a copy of their matrices."""
    return len(linears) > 1 or bool(low_rank(linears[0]))


def joined_bias(linears: Sequence[Any]) -> Tensor | None:
    """Return the biases of linear layers side by side, 0 for those without; `None` if none has one."""
    biases = [bare(linear).bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    weights = [bare(linear).weight.detach() for linear in linears]
    pairs = zip(biases, weights, strict=True)
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias.detach() for bias, weight in pairs])


def copied_bytes(model: PreTrainedModel) -> int:
    """Return the size of the copies that `CudaStep` would make with the active adapters."""
    groups = [group for _, groups in blocks(model) for group in groups if needs_copy(group)]
    head: Any = model.get_output_embeddings()
    padded = head.weight.nbytes if len(head.weight) % ALIGNED else 0
    return int(padded + sum(bare(linear).weight.nbytes for group in groups for linear in group))


def supports(model: PreTrainedModel) -> bool:
    """Return whether `CudaStep` computes what a network computes with its active adapters."""
    return (
        is_plain(model)
        and can_join(model)
        and getattr(model.base_model.get_submodule("rotary_emb"), "rope_type", None) in FIXED_ROTARY
    )


def difference(step: CudaStep, model: PreTrainedModel) -> float:
    """Return the relative difference between a step and the network on a few tokens: of logits, keys and values."""
    slots = torch.arange(TRIAL, device=model.device)[None]
    ids = slots * 7919 % model.config.vocab_size
    targets = () if step.reader is None else (slots * 5 % min(TRIAL, model.config.max_position_embeddings),)
    state = model.get_input_embeddings().weight.new_empty(1, step.heads[1], 0, step.width)
    states = []
    for forward in (step, lambda *inputs: run(model, *inputs)):
        cache = Rows([(state, state)] * len(step.layers), 1, TRIAL + 1)
        cache.advance(slots, TRIAL)
        logits = forward(ids, slots, Ragged(slots, TRIAL), TRIAL, cache, *targets)[0]
        buffers = [buffer[0, :TRIAL].flatten(1) for pair in cache.buffers for buffer in pair]
        states.append([logits, *buffers])
    return relative_difference(*states)


def packed_difference(step: CudaStep, model: PreTrainedModel, backend: str) -> float:
    """Return the relative difference between `CudaStep.packed` and the network on two short texts, one with copies."""
    ids = [number * 7919 % model.config.vocab_size for number in range(TRIAL)]
    queries = [Query(ids, [i % 3 == 0 for i in range(TRIAL)]), Query(ids[1:], [False] * (TRIAL - 1))]
    layout = lay_out(queries, bos=0, mask=None, future=True).to(model.device)
    recorder = Recorder()
    expected = run(model, *layout.inputs(), BACKENDS[backend](layout), layout.rows, recorder)[0]
    logits, states = step.packed(*layout.inputs(), BACKENDS[backend](layout), layout.rows)
    results = (logits, states), (expected, recorder.states)
    flat = ([x.flatten(0, -2) for x in (y, *(state for pair in pairs for state in pair))] for y, pairs in results)
    return relative_difference(*flat)
