"""A tiny network of each method, and its prompts for generation."""

from __future__ import annotations

import json

import numpy as np
import torch
from models import tiny_tokenizer
from toys import toy

from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.methods import method_of
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata, tokenizer_hash

LENGTH = 24


def model_of(name, *, vocabulary=None, length=LENGTH, dtype=torch.float32, scale=0.2):
    """Return a tiny network of a method and its tokenizer; MASK, if needed, is an id after those of the tokenizer."""
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    size = len(tokenizer) if vocabulary is None else vocabulary
    network = toy(name, vocabulary=size, length=length, scale=scale, dtype=dtype)
    mask = size if method_of(name).needs_mask else None
    return LanguageModel(network, tokenizer, metadata=Metadata(method=name), bos=0, mask=mask)


def set_of(*, texts=6, length=LENGTH, vocabulary=300, **how):
    tokens = np.random.default_rng(0).integers(3, vocabulary, texts * length)
    return EvaluationDataset.build(tokens, tokenizer_hash=tokenizer_hash(tiny_tokenizer()), length=length, **how)


def lines_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def stop(*_):
    raise KeyboardInterrupt
