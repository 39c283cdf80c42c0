"""Features of texts for MAUVE: the last layer's hidden state at the last token of each text.

Features are computed once and stored in the folder `$ACGPT_CACHE/features`, in files of `STORED` texts each, under a
hash of the texts, the model's weights, its tokenizer, the number of tokens that are read and the precision of matrix
products. They are always computed in float32, on a GPU with TF32 products.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import write_atomically
from acgpt.engine.device import choose_device, matrix_products
from acgpt.models.checkpoint import check_finite
from acgpt.models.language_model import positions_of
from acgpt.models.loading import cache_folder, from_pretrained, load_base, resolve_base
from acgpt.models.metadata import tokenizer_hash, weights_hash

VERSION = 2  # of the computation; part of the hash
LENGTH = 2048  # maximum number of tokens read per text: a text of 1,024 tokens fits under any tokenizer
STORED = 128  # texts whose features are stored together: a kill loses no more
PRODUCTS = {"cpu": "fp32", "cuda": "tf32"}
BUDGET = {"cpu": 2**12, "cuda": 2**16}  # maximum number of tokens per forward pass, with padding


@dataclass(frozen=True, eq=False)
class Featurizer:
    """A model that turns texts into vectors.

    Args:
        name: Name of the model, as the user passed it.
        network: Any causal model of transformers, in float32.
        tokenizer: Its tokenizer.
    """

    name: str
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @staticmethod
    def check(name: str) -> None:
        """Check that there is a model of this name, without loading it."""
        source = resolve_base(name)
        if not Path(source).is_file():
            from_pretrained(AutoConfig, source)

    @classmethod
    def load(cls, name: str, device: str = "auto") -> Featurizer:
        """Load a model: a folder, a hub id, a .gguf file, or "default", the embedded model."""
        network, tokenizer = load_base(resolve_base(name), torch.float32)
        network = network.to(choose_device(device)).eval()
        check_finite(name, network)
        return cls(name, network, tokenizer)

    @cached_property
    def hash(self) -> str:
        """Hash of everything that determines the features of a text."""
        content = [VERSION, weights_hash(self.network), tokenizer_hash(self.tokenizer)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def length(self) -> int:
        """Return the maximum number of tokens that are read per text."""
        return min(LENGTH, positions_of(self.network.config.get_text_config()))

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Return the number of texts that are longer than what is read."""
        most = self.length() + 1
        return sum(len(self.tokenizer(text, truncation=True, max_length=most)["input_ids"]) == most for text in texts)

    def describe(self) -> dict[str, Any]:
        """Return a description for results. The hash does not cover "products", the precision of matrix products."""
        config = self.network.config.get_text_config()
        model = {"model": self.name, "hash": self.hash, "dimensions": config.hidden_size, "length": self.length()}
        return {**model, "products": self.products}

    @property
    def products(self) -> str:
        """Precision of matrix products on the device of the network."""
        return PRODUCTS.get(self.network.device.type, PRODUCTS["cpu"])

    def features(
        self,
        texts: Sequence[str],
        progress: Callable[[int, int], object] = lambda done, all: None,
    ) -> np.ndarray:
        """Return features, (texts, dimensions) float32, from stored files if possible.

        Args:
            texts: The texts; none is empty.
            progress: Called with the number of processed texts and the total.
        """
        features = np.zeros((len(texts), self.network.config.get_text_config().hidden_size), np.float32)
        # Long texts first, so that a lack of memory shows at once.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        progress(0, len(texts))
        for start in range(0, len(order), STORED):
            group = order[start : start + STORED]
            report = partial(lambda start, done, _: progress(start + done, len(texts)), start)
            features[group] = self.stored([texts[i] for i in group], report)
        return features

    def stored(self, texts: Sequence[str], progress: Callable[[int, int], object]) -> np.ndarray:
        """Return the features of a file of stored ones, which is written if it is missing or damaged."""
        key = json.dumps([self.hash, self.products, self.length(), list(texts)])
        folder = cache_folder() / "features"
        path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
        try:
            features: np.ndarray = load_file(path)["features"]
        except (OSError, SafetensorError, KeyError):
            features = self.compute(texts, progress)
            try:
                write_atomically(path, save({"features": features}))
            except OSError as error:
                warnings.warn(f"cannot store features in {folder}: {error.strerror or error}.", stacklevel=2)
        else:
            progress(len(texts), len(texts))
        return features

    def compute(self, texts: Sequence[str], progress: Callable[[int, int], object]) -> np.ndarray:
        """Compute features, of long texts first."""
        length = self.length()
        encoded = [self.tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts]
        order = sorted(range(len(texts)), key=lambda i: -len(encoded[i]))
        config, device = self.network.config.get_text_config(), self.network.device
        budget = BUDGET.get(device.type, BUDGET["cpu"])
        features = np.zeros((len(texts), config.hidden_size), np.float32)
        done = 0
        while done < len(order):
            group = order[done : done + max(1, budget // max(1, len(encoded[order[done]])))]
            features[group] = self.last_states([encoded[i] for i in group], device)
            done += len(group)
            progress(done, len(texts))
        return features

    def last_states(self, texts: Sequence[Sequence[int]], device: torch.device) -> np.ndarray:
        """Return (texts, dimensions) hidden states after the last layer and its norm, at the end of each text."""
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros((len(texts), int(lengths.max())), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]  # right padding
        with torch.inference_mode(), matrix_products("high"):
            states = self.network.base_model(
                input_ids=ids.to(device), attention_mask=mask.long().to(device), use_cache=False
            ).last_hidden_state
            last = states[torch.arange(len(texts), device=device), (lengths - 1).to(device)]
        return np.asarray(last.float().cpu().numpy())
