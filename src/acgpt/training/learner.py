"""The training step: a network of a given shape, and the loss of one packed batch.

`Learner` wraps a causal language model: a `Batch` goes in, the summed negative log-likelihood of its asked tokens comes
out. The whole step is one graph for torch.compile, and the logits, by far the largest tensor, never leave it. The
vocabulary projection runs on the asked tokens only.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from acgpt.engine.attention import NAME, Dense, Fused, Varlen, head_width
from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels.loss import linear_cross_entropy
from acgpt.engine.layout import IGNORED
from acgpt.engine.length_head import LengthHead
from acgpt.engine.modules import blocks_of
from acgpt.engine.peft import join_products
from acgpt.engine.score import forbid, has_plain_head
from acgpt.training.batches import Batch
from acgpt.training.recipe import Shape

DEEP = 16  # networks with this many blocks or more are compiled block by block
VOCABULARY_ALIGN = 64  # training pads the vocabulary to a multiple of this, for whole tiles in the matrix units


def new_model(
    shape: Shape,
    *,
    vocabulary: int,
    positions: int,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    seed: int = 0,
    bos: int | None = None,
    eos: int | None = None,
    network: type[GPTNeoXForCausalLM] = GPTNeoXForCausalLM,
    **own: Any,
) -> GPTNeoXForCausalLM:
    """Make a network with new weights: GPT-2 with rotary positions, which is GPT-NeoX without its parallel residual.

    The initialisation is that of GPT-2: normal with standard deviation 0.02, and the projections onto the residual
    stream divided by √(2 · layers), so that its variance at the top does not depend on depth.

    Args:
        shape: Size of the network.
        vocabulary: Size of the vocabulary.
        positions: Number of positions.
        dropout: Dropout rate of the embeddings and of the residual branches.
        attention_dropout: Dropout rate of the attention weights.
        seed: Seed of the weights.
        bos: Token id of BOS.
        eos: Token id of EOS.
        network: Class of the network, if the method has its own.
        **own: Keys that only the config of that class has.
    """
    config: GPTNeoXConfig = network.config_class(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        use_parallel_residual=False,
        hidden_dropout=dropout,
        attention_dropout=attention_dropout,
        initializer_range=0.02,
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=bos,
        eos_token_id=eos,
        **own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network(config)
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            for projection in (layer.attention.dense, layer.mlp.dense_4h_to_h):
                projection.weight.mul_(1 / math.sqrt(2 * shape.layers))
    model.set_attn_implementation(NAME)
    return model


def choose_attention(device: str, *, half: bool, dropout: float, head_dim: int) -> str:
    """Return the fastest backend of `Learner` that can be used. Only "dense" supports dropout of attention weights."""
    if device != "cuda" or not half or dropout:
        return "dense"
    return "fused" if kernels.available() and head_dim in kernels.HEAD_DIMS else "varlen"


class Learner(nn.Module):
    """A causal language model and its loss on a packed batch.

    Args:
        model: A model that `architecture.check_model` accepts.
        backend: "varlen" or "fused" (CUDA, half precision), or "dense".
        compiled: Compile the step with torch.compile; all batches must then have one shape. The blocks of a deep
            network share one graph, which compiles in seconds; a graph of the whole network would take minutes.
        forbidden_token: Token id that gets no probability.
        length_head: Head that predicts lengths of gaps, if batches ask for them.
        joined: Multiply by the sum of weights and LoRA adapter where that is faster, see `peft.join_products`. Default:
            with the fused backend.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: str,
        compiled: bool,
        forbidden_token: int | None = None,
        length_head: LengthHead | None = None,
        joined: bool | None = None,
    ) -> None:
        super().__init__()
        if backend == "fused" if joined is None else joined:
            join_products(model)
        self.model, self.backend, self.forbidden_token = model, backend, forbidden_token
        self.length_head = length_head
        self.hidden: list[Tensor] = []  # what the vocabulary projection has read, if lengths are learnt
        self.fused_loss = backend == "fused" and has_plain_head(model)
        if length_head is not None and not self.fused_loss:
            model.get_output_embeddings().register_forward_pre_hook(self.record)
        blocks = blocks_of(model) if compiled else []
        deep = len(blocks) >= DEEP
        self.run = torch.compile(self.loss, dynamic=False) if compiled and not deep else self.loss
        self.calls = [(block, torch.compile(block._call_impl, dynamic=False)) for block in blocks] if deep else []

    def forward(self, batch: Batch) -> Tensor:
        """Return the summed negative log-likelihood of the batch's asked tokens, in nats."""
        with self.compiled_blocks():
            return self.run(batch)

    @contextmanager
    def compiled_blocks(self) -> Iterator[None]:
        """Use the compiled blocks inside the context; other callers of the model, such as evaluation, do not."""
        for block, call in self.calls:
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for block, _ in self.calls:
                block._compiled_call_impl = None

    def loss(self, batch: Batch) -> Tensor:
        """Compute the loss of `forward`; this is what torch.compile compiles."""
        backend: Varlen | Fused | Dense
        if self.backend == "dense":
            backend = Dense(batch.layout)
        else:
            backend = Fused(batch.segments) if self.backend == "fused" else Varlen(batch.segments)
        ids, rows, targets, weights = batch.ids, batch.rows, batch.targets, batch.weights
        embedded = self.model.get_input_embeddings()(ids[None])
        if torch.is_autocast_enabled(ids.device.type):  # a half-precision residual stream: half the bytes to move
            embedded = embedded.to(torch.get_autocast_dtype(ids.device.type))
        inputs: dict[str, Any] = {
            "inputs_embeds": embedded,
            "position_ids": batch.positions[None],
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # see `attention.run`
            "use_cache": False,
            NAME: backend,
        }
        if batch.target_positions is not None:
            inputs["target_positions"] = batch.target_positions[None]
        lengths = batch.length_rows
        if self.fused_loss:
            states = self.model.base_model(**inputs).last_hidden_state[0]
            weight = self.model.get_output_embeddings().weight.to(embedded.dtype)
            loss = linear_cross_entropy(states[rows].to(embedded.dtype), weight, targets, weights, self.forbidden_token)
            return loss if lengths is None else loss + self.length_loss(states[lengths], batch)
        kept = rows if lengths is None else torch.cat([rows, lengths])
        logits = self.model(**inputs, logits_to_keep=kept).logits[0, : len(rows)]
        logits = forbid(logits, self.forbidden_token)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if weights is None:
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        else:
            loss = (F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none") * weights).sum()
        return loss if lengths is None else loss + self.length_loss(self.hidden.pop()[0, len(rows) :], batch)

    def record(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep what the vocabulary projection reads in a training step; evaluations have no gradients."""
        if torch.is_grad_enabled():
            self.hidden[:] = inputs[:1]

    def length_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the weighted negative log-likelihood of the batch's lengths, from the hidden states before gaps."""
        assert self.length_head is not None and batch.length_targets is not None and batch.length_weights is not None
        losses = F.cross_entropy(self.length_head(hidden), batch.length_targets, ignore_index=IGNORED, reduction="none")
        return (losses * batch.length_weights).sum()


@dataclass(frozen=True)
class Work:
    """Floating-point operations that training needs, forward and backward, see `Batch`.

    A matrix takes six operations per weight and slot, or four if it is frozen; the vocabulary projection runs on asked
    tokens only. Attention takes twelve per channel and pair of slots of which one reads the other.

    Args:
        slot: Operations per slot.
        pair: Operations per pair of slots.
        asked: Operations per asked token.
    """

    slot: int
    pair: int
    asked: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Work:
        """Count the operations of a network. This visits all of its modules."""
        config, head = model.config.get_text_config(), model.get_output_embeddings().weight
        tables = {id(head), *(id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding))}
        matrices = sum(work(weight) for weight in model.parameters() if weight.ndim == 2 and id(weight) not in tables)
        channels = config.num_attention_heads * head_width(config)
        return cls(matrices, 12 * config.num_hidden_layers * channels, work(head))

    def total(self, *, slots: int, pairs: int, asked: int) -> float:
        """Return the operations of a batch."""
        return float(self.slot * slots + self.pair * pairs + self.asked * asked)


def work(weight: Tensor) -> int:
    """Count the operations of a matrix per vector: forward, gradient of the input, and its own gradient if trained."""
    return (6 if weight.requires_grad else 4) * weight.numel()


@functools.cache
def matmul_rate(device: str | torch.device) -> float:
    """Measure the operations per second of a large matrix product on this device: bf16 on CUDA, else fp32.

    A process measures each device once.
    """
    cuda = torch.device(device).type == "cuda"
    size, dtype, repeats = (8192, torch.bfloat16, 8) if cuda else (768, torch.float32, 3)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    best = math.inf
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
