"""Texts as vectors, for MAUVE: the last layer's hidden state at the last token of each; computed once, then kept.

What was computed lies in the user's cache (`$ACGPT_CACHE/features`), under a hash of the texts, the model's weights,
its tokenizer, and the number of tokens that were read. It is always computed in float32, on a GPU with products in
TF32, so that features of one machine serve on another.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import write_whole
from acgpt.engine.attention import matrix_products
from acgpt.engine.device import choose_device
from acgpt.errors import ModelError
from acgpt.models.checkpoint import check_finite
from acgpt.models.language_model import positions_of
from acgpt.models.loading import cache_folder, from_pretrained, is_default, load_base, resolve
from acgpt.models.metadata import tokenizer_hash, weights_hash

VERSION = 2  # of what is computed: another one, other features
LENGTH = 2048  # tokens of a text that are read at most: of one of 1,024 all, in whatever tokens
PRODUCTS = {"cpu": "fp32", "cuda": "tf32"}
BUDGET = {"cpu": 2**12, "cuda": 2**16}  # tokens, padding included, that go through the model at a time


@dataclass(frozen=True, eq=False)
class Featurizer:
    """A model that turns texts into vectors.

    Args:
        name: As it was named.
        network: Any causal model of transformers, in float32.
        tokenizer: Its tokenizer.
        used: In what precision products were for all features so far: what is kept may be another machine's.
    """

    name: str
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    used: set[str] = field(default_factory=set)

    @staticmethod
    def find(name: str) -> str:
        """What a name stands for: a folder, a hub id or a .gguf file; an adapter is refused."""
        source, adapter = resolve(name, False if is_default(name) else None)
        if adapter is not None:
            raise ModelError(f"{name} is an adapter: features are taken from a whole model. acgpt merge makes one.")
        return source

    @classmethod
    def check(cls, name: str) -> None:
        """Find out without loading it that there is no model of this name."""
        source = cls.find(name)
        if not Path(source).is_file():
            from_pretrained(AutoConfig, source)

    @classmethod
    def load(cls, name: str, device: str = "auto") -> Featurizer:
        """By name: a folder, a hub id, a .gguf file, or "default", the embedded model."""
        network, tokenizer = load_base(cls.find(name), torch.float32)
        network = network.to(choose_device(device)).eval()
        check_finite(name, network)
        return cls(name, network, tokenizer)

    @cached_property
    def hash(self) -> str:
        """Of all that decides the features of a text."""
        content = [VERSION, weights_hash(self.network), tokenizer_hash(self.tokenizer)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def length(self, most: int = LENGTH) -> int:
        """How many tokens of a text are read."""
        return min(most, positions_of(self.network.config.get_text_config()))

    def cut(self, texts: Sequence[str]) -> int:
        """How many of these texts go on where no more is read."""
        most = self.length() + 1
        return sum(len(self.tokenizer(text, truncation=True, max_length=most)["input_ids"]) == most for text in texts)

    def about(self) -> dict[str, Any]:
        """For results; the hash leaves out "products", in what precision matrices are multiplied here."""
        config, device = self.network.config.get_text_config(), self.network.device.type
        about = {"model": self.name, "hash": self.hash, "dimensions": config.hidden_size, "length": self.length()}
        return {**about, "products": PRODUCTS.get(device, PRODUCTS["cpu"])}

    def features(
        self,
        texts: Sequence[str],
        progress: Callable[[int, int], object] = lambda done, all: None,
        cache: Path | None = None,
        longer: Sequence[str] = (),
    ) -> np.ndarray:
        """(texts, dimensions) float32, from the cache where they are there.

        Args:
            texts: None of them empty.
            progress: Called with how many texts are read, and of how many.
            cache: The folder where features are kept; by default the user's.
            longer: A list that begins with these texts, and whose features may be there instead.
        """
        folder = cache_folder() / "features" if cache is None else cache
        path = folder / self.file_name(texts)
        found = kept(path, len(texts))
        if found is None and longer and list(longer[: len(texts)]) == list(texts):
            found = kept(folder / self.file_name(longer), len(longer))
        if found is not None:
            progress(len(texts), len(texts))
            vectors, products = found
            self.used.add(products)
            return vectors[: len(texts)]
        computed = self.compute(texts, progress)
        self.used.add(self.about()["products"])
        try:
            write_whole(path, save({"features": computed}, metadata={"acgpt_features": json.dumps(self.about())}))
        except OSError as error:
            warnings.warn(f"features cannot be kept in {folder} ({error.strerror or error}).", stacklevel=2)
        return computed

    def file_name(self, texts: Sequence[str]) -> str:
        """Where the features of these texts are kept."""
        key = json.dumps([self.hash, self.length(), list(texts)])
        return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def compute(self, texts: Sequence[str], progress: Callable[[int, int], object]) -> np.ndarray:
        """As `features`, without the cache: long texts first, so that too little memory shows at once."""
        length = self.length()
        encoded = [self.tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts]
        order = sorted(range(len(texts)), key=lambda i: -len(encoded[i]))
        config, device = self.network.config.get_text_config(), self.network.device
        budget = BUDGET.get(device.type, BUDGET["cpu"])
        found = np.zeros((len(texts), config.hidden_size), np.float32)
        done = 0
        progress(done, len(texts))
        while done < len(order):
            group = order[done : done + max(1, budget // max(1, len(encoded[order[done]])))]
            found[group] = self.last_states([encoded[i] for i in group], device)
            done += len(group)
            progress(done, len(texts))
        return found

    def last_states(self, texts: Sequence[Sequence[int]], device: torch.device) -> np.ndarray:
        """(texts, dimensions) the hidden state after the last layer and its norm, where each text ends."""
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros((len(texts), int(lengths.max())), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]  # padding stands after the text
        with torch.inference_mode(), matrix_products("high"):
            states = self.network.base_model(
                input_ids=ids.to(device), attention_mask=mask.long().to(device), use_cache=False
            ).last_hidden_state
            last = states[torch.arange(len(texts), device=device), (lengths - 1).to(device)]
        return np.asarray(last.float().cpu().numpy())


def kept(path: Path, texts: int) -> tuple[np.ndarray, str] | None:
    """Features as they were kept, and the precision of their products; `None` if they were not, or not whole."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as file:
            found = file.get_tensor("features")
            about = json.loads((file.metadata() or {}).get("acgpt_features", "{}"))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if found.ndim != 2 or len(found) != texts or found.dtype != np.float32:
        return None
    return found, str(about.get("products", "unknown"))
