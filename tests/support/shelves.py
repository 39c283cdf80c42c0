"""A base model and adapters for it, in folders, and queries for them."""

from __future__ import annotations

import random

import pytest
import torch
from models import random_query, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import acgpt
from acgpt import LanguageModel, Metadata, Query
from acgpt.models.metadata import tokenizer_hash, weights_hash
from acgpt.query.conditioning import Blocks, Conditioning, Infilling

peft = pytest.importorskip("peft")

VOCABULARY = 324  # of the tiny tokenizer
INFILLING, BLOCKS = Conditioning((Infilling(),)).as_dict(), Conditioning((Blocks(),)).as_dict()
CAUSAL, GAP, SCATTERED = "The cat sat on the {{mat}}", "The {{cat}} sat on the mat.", "The {{cat}} sat on the {{mat}}."


def tokenizer():
    return tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")


def lora(network, *targets, seed, **how):
    """Return a network with a LoRA adapter whose weights are large enough to change every answer."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM", **how)
    adapted = peft.get_peft_model(network, config)
    for name, weight in adapted.named_parameters():
        if "trainable_tokens" in name or "modules_to_save" in name:
            weight.data += torch.randn_like(weight)
    return adapted


class Shelf:
    """A base model and adapters for it, in folders."""

    def __init__(self, folder, says=None, **shape):
        self.folder, self.base = folder, folder / "base"
        network = tiny_model(vocabulary=VOCABULARY, scale=0.15, **shape)
        LanguageModel(network, tokenizer(), metadata=says).save_pretrained(self.base)

    def network(self):
        return AutoModelForCausalLM.from_pretrained(self.base)

    def add(self, name, *targets, metadata=None, seed=1, **how):
        lora(self.network(), *targets, seed=seed, **how).save_pretrained(self.folder / name)
        if metadata is not None:
            metadata.write(self.folder / name)
        return self.folder / name

    def load(self, adapter, **how):
        return acgpt.load(self.base, adapter=adapter, dtype="float64", **how)

    def reference(self, name=None):
        """Return the base, or the base with an adapter merged by PEFT, as a plain transformers model without acgpt."""
        network = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float64)
        if name is None:
            return network
        return peft.PeftModel.from_pretrained(network, self.folder / name).merge_and_unload()


def stocked(folder):
    """A shelf with an adapter of each kind."""
    shelf = Shelf(folder)
    known = {"base_hash": weights_hash(shelf.network()), "tokenizer_hash": tokenizer_hash(tokenizer())}
    shelf.add("fill", "q_proj", "v_proj", metadata=Metadata(conditioning=INFILLING, mask_token_id=5, **known))
    shelf.add("any", "q_proj", "down_proj", metadata=Metadata(conditioning=BLOCKS, mask_token_id=6, **known), seed=2)
    shelf.add("causal", "o_proj", metadata=Metadata(method="gpt"), seed=3)
    shelf.add("silent", "o_proj", seed=4)
    return shelf


def questions():
    """Return queries of all shapes and lengths, and the adapter that should answer each; adapters differ in MASK."""
    pairs = [(CAUSAL, None), (GAP, "mine"), (SCATTERED, "other"), ("{{The}} cat.", "mine"), ("{{The cat}}", None)]
    pairs += [(random_query(i, 9 + i, share=0.5, vocabulary=300), "other") for i in range(3)]
    pairs += [(random_query(9, 14, share=0.4, unknown=0.3, vocabulary=300), "other")]
    pairs += [(Query([9, 8, 7, 6], [True, False, False, True]), "mine"), (Query([9, 8], [False, False]), None)]
    random.Random(1).shuffle(pairs)
    return [q for q, _ in pairs], [who for _, who in pairs]
