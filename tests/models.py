"""Tiny models of every supported architecture, with weights large enough that everything matters, and random queries."""

from __future__ import annotations

import random

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen3Config

from acgpt.query import Query

ARCHITECTURES = ["gpt2", "gpt_neox", "llama", "qwen3", "mistral"]


def tiny_model(architecture="llama", *, vocabulary=50, width=32, layers=2, positions=64, scale=0.3, seed=0, **more):
    """A float32 model with random weights. They are far larger than at initialisation: every token then matters."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 2 * width}
    shape |= {"vocab_size": vocabulary, "max_position_embeddings": positions, **special, **more}
    grouped = {**shape, "num_key_value_heads": 2}
    config = {
        "gpt2": lambda: GPT2Config(
            n_embd=width, n_layer=layers, n_head=4, n_positions=positions, vocab_size=vocabulary, **special, **more
        ),
        "gpt_neox": lambda: GPTNeoXConfig(rotary_pct=1.0, use_parallel_residual=False, **shape),
        "llama": lambda: LlamaConfig(**grouped),
        "qwen3": lambda: Qwen3Config(head_dim=width // 4, **grouped),
        "mistral": lambda: MistralConfig(**{"sliding_window": None, **grouped}),
    }[architecture]()
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, scale, generator=generator)
    return model


def random_query(seed, length, *, share=0.4, unknown=0.0, vocabulary=50):
    """Tokens at random, a share of them given and a share unknown; at least one is asked."""
    rng = random.Random(seed)
    roles = [rng.choices("gua", (share, unknown, 1 - share - unknown))[0] for _ in range(length)]
    roles[rng.randrange(length)] = "a"
    tokens = [rng.randrange(2, vocabulary) for _ in range(length)]
    return Query(tokens, [r == "g" for r in roles], [r == "a" for r in roles])
