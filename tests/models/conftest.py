"""Fixtures: an adapter and its base model, and a tiny embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_adapter, write_model
from models import tiny_tokenizer
from runs import SPECIAL, write_corpus
from test_loading import lora, network, scores, tokenizer
from transformers import AutoModelForCausalLM

from acgpt import LanguageModel, Metadata
from acgpt.models import loading
from acgpt.models.metadata import tokenizer_hash, weights_hash


@pytest.fixture
def adapted(tmp_path):
    """An ordinary base model and an adapter for it that reads the future: two folders, and their answers."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    LanguageModel(network(), tokenizer()).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    fingerprint = weights_hash(model)
    peft_model = lora(model)
    peft_model.save_pretrained(adapter)
    metadata = Metadata(bos_token_id=1, base_hash=fingerprint, tokenizer_hash=tokenizer_hash(tokenizer()))
    metadata.write(adapter)
    return base, adapter, scores(LanguageModel(peft_model, tokenizer(), metadata=metadata))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """A corpus, a model with its tokenizer, and an adapter for it. Not to be changed."""
    folder = tmp_path_factory.mktemp("workshop")
    write_corpus(folder / "corpus")
    write_model(folder / "model", tiny_tokenizer(**SPECIAL))
    write_adapter(folder / "adapter", folder / "model")
    return folder


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    """A package with a GGUF file in it, which is read as a tiny model; returns that file and the cache."""
    package = tmp_path / "packages" / "acgpt_test_default"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    gguf = package / "tiny.gguf"
    gguf.write_bytes(b"GGUF, or so it says")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", package.name)
    monkeypatch.setattr(loading, "DEFAULT_BOS", "<mask>")
    cache = tmp_path / "cache"
    monkeypatch.setenv("ACGPT_CACHE", str(cache))
    true_load_base, reads = loading.load_base, []

    def load_base(source, dtype):
        if Path(source).suffix != ".gguf":
            return true_load_base(source, dtype)
        reads.append(source)
        return network(), tokenizer()

    monkeypatch.setattr(loading, "load_base", load_base)
    return gguf, cache, reads
