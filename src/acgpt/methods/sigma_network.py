"""The network of σ-GPT: the GPT-NeoX network of all methods, with the position to predict as a further input.

σ-GPT reads a text in any order, so each slot needs two positions: that of its token, and that of the next token in the
order, its target. As in all methods, tokens that are read have rotary positions (RoPE). The target is encoded in one of
two ways:

    rotary     The query of a slot is rotated to its target, its key to its token: an attention logit depends on the
               distance between the token that is read and the one that is predicted. A slot knows its own token
               without attention, and needs its distance too: the offset, target - token, clipped to ±`REACH`, is
               looked up in a learned table and added to the embedding. No parameters depend on absolute positions,
               and no length is fixed.
    table      The target is looked up in a learned table with one row per position, and added to the token's
               embedding; queries and keys are rotated to the token. Row 0 means that no token follows: position 0 is
               BOS, which is never a target.

Rotary is the default and much better. RoPE encodes only differences of positions and a table only absolute ones, so
with a table a slot cannot tell how far its target is from the tokens it reads (docs/explanation/methods.md has the
numbers). The original (Pannatier et al., 2024) has no RoPE, and looks both positions up in one table.

Without target positions each slot predicts the next position, so the network works as an ordinary causal model.

The class is registered with transformers when this module is imported. A saved network is a plain folder of
safetensors, which `acgpt.load` opens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXModel,
    GPTNeoXPreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, eager_attention_forward, rotate_half

from acgpt.engine.stand_in import FAMILIES

REACH = 16  # largest offset in the table; larger ones are clipped to it
Rotation = tuple[Tensor, Tensor]  # (rows, slots, rotated channels) cosines and sines


class SigmaGPTConfig(GPTNeoXConfig):
    """The config of GPT-NeoX, with the encoding of target positions."""

    model_type = "acgpt-sigma"
    target_positions: str = "rotary"  # or "table"


class SigmaAttention(GPTNeoXAttention):
    """GPT-NeoX's attention, with queries rotated to other positions than keys."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        position_embeddings: Rotation | None = None,
        target_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention; `position_embeddings` are for the keys and `target_embeddings` for the queries."""
        assert position_embeddings is not None and target_embeddings is not None
        shape = hidden_states.shape[:-1]
        qkv = self.query_key_value(hidden_states).view(*shape, -1, 3 * self.head_size).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)  # (rows, heads, slots, channels)
        query, key = rotated(query, target_embeddings), rotated(key, position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )  # fmt: skip
        return self.dense(out.reshape(*shape, -1).contiguous()), weights


def rotated(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys, (rows, heads, slots, channels); channels beyond those of RoPE stay unchanged."""
    cos, sin = (x[:, None] for x in rotation)
    rotary, rest = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
    return torch.cat([rotary * cos + rotate_half(rotary) * sin, rest], dim=-1)


class SigmaGPTModel(GPTNeoXModel):
    """GPT-NeoX without its head, with the target position of each slot as a further input."""

    config_class = SigmaGPTConfig

    def __init__(self, config: SigmaGPTConfig) -> None:
        super().__init__(config)
        if config.target_positions not in ("rotary", "table"):
            raise ValueError(f"target_positions must be rotary or table, not {config.target_positions!r}.")
        self.rotates_queries = config.target_positions == "rotary"
        if self.rotates_queries:
            self.embed_offset = nn.Embedding(2 * REACH + 1, config.hidden_size)
            for layer in self.layers:
                layer.attention = SigmaAttention(config, layer.attention.layer_idx)
        else:
            self.embed_target = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        target_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the network; `target_positions`, shaped like `position_ids`, are the positions that slots predict."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_in(input_ids)
            input_ids = None
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = seen + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if target_positions is None:
            target_positions = self.next_positions(position_ids)
        if self.rotates_queries:
            kwargs["target_embeddings"] = self.rotary_emb(inputs_embeds, position_ids=target_positions)
        inputs_embeds = inputs_embeds + self.embed_targets(position_ids, target_positions).to(inputs_embeds.dtype)
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )

    def next_positions(self, positions: Tensor) -> Tensor:
        """Return the next positions; after the last row of a table, row 0."""
        return positions + 1 if self.rotates_queries else (positions + 1) % self.embed_target.num_embeddings

    def embed_targets(self, positions: Tensor, target_positions: Tensor) -> Tensor:
        """Return what is added to the embeddings of the tokens at `positions`."""
        if self.rotates_queries:
            offsets: Tensor = self.embed_offset((target_positions - positions).clamp(-REACH, REACH) + REACH)
            return offsets
        targets: Tensor = self.embed_target(target_positions)
        return targets


class SigmaGPTForCausalLM(GPTNeoXForCausalLM):
    """The network of σ-GPT, with its language-model head."""

    config_class = SigmaGPTConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "gpt_neox.embed_in.weight"}

    def __init__(self, config: SigmaGPTConfig) -> None:
        GPTNeoXPreTrainedModel.__init__(self, config)  # the parent's constructor would build a GPT-NeoX first
        self.gpt_neox = SigmaGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(SigmaGPTConfig.model_type, SigmaGPTConfig, exist_ok=True)
AutoModelForCausalLM.register(SigmaGPTConfig, SigmaGPTForCausalLM, exist_ok=True)
FAMILIES[SigmaGPTForCausalLM] = FAMILIES[GPTNeoXForCausalLM]
