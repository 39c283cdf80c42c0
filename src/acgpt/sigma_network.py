"""The network of σ-GPT: the backbone of all methods, told at each slot which position it is to predict.

σ-GPT reads a text in any order, so a slot that has read a token must know two positions: that of the token, and that of
the next one in the order. The original (Pannatier et al., 2024) looks both up in one learned table and adds them to the
token's embedding. Here every method has rotary positions for what is read, and so has this one; what it is to predict
is looked up in a learned table of its own, one row a position, and added to the embedding:

    input of a slot = embedding(token) + targets(position to predict)          attention: RoPE at the token's position

Row 0 of the table stands for "nothing more": no token is at position 0, where BOS stands. A slot that is told nothing
predicts the next position, so that the network, called by anyone as a causal model, is one.

The class is registered with transformers when this module is imported; a saved network is a plain folder of
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


class SigmaGPTConfig(GPTNeoXConfig):
    """That of GPT-NeoX, under a name of its own."""

    model_type = "acgpt-sigma"


class SigmaGPTModel(GPTNeoXModel):
    """GPT-NeoX with a table of target positions."""

    config_class = SigmaGPTConfig

    def __init__(self, config: SigmaGPTConfig) -> None:
        super().__init__(config)
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
        """As GPT-NeoX's; `target_positions`, of the shape of `position_ids`, are what the slots are to predict."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_in(input_ids)
            input_ids = None
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = seen + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if target_positions is None:  # the next one; after the last there is none
            target_positions = (position_ids + 1) % self.embed_target.num_embeddings
        inputs_embeds = inputs_embeds + self.embed_target(target_positions).to(inputs_embeds.dtype)
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


class SigmaGPTForCausalLM(GPTNeoXForCausalLM):
    """The network of σ-GPT."""

    config_class = SigmaGPTConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "gpt_neox.embed_in.weight"}

    def __init__(self, config: SigmaGPTConfig) -> None:
        GPTNeoXPreTrainedModel.__init__(self, config)  # the parent's would build a GPT-NeoX first
        self.gpt_neox = SigmaGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(SigmaGPTConfig.model_type, SigmaGPTConfig, exist_ok=True)
AutoModelForCausalLM.register(SigmaGPTConfig, SigmaGPTForCausalLM, exist_ok=True)
