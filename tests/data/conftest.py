"""A small tokenizer, and preparation with it."""

from __future__ import annotations

import pytest
from texts import EOS, TEXTS
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from acgpt.data import rows as corpus_rows
from acgpt.data import sources
from acgpt.data.prepare import prepare


@pytest.fixture(scope="module")
def tokenizer():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=400, special_tokens=[EOS], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=EOS, eos_token=EOS)


@pytest.fixture(scope="module")
def named(tokenizer, tmp_path_factory):
    """The folder of the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(named, tmp_path):
    """Prepare with the small tokenizer in this process."""

    def run(names, folder=None, **options):
        if "train_tokenizer" not in options:
            options = {"tokenizer": named, **options}
        return prepare(names, folder or tmp_path / "corpus", **{"workers": 1, **options})

    return run


@pytest.fixture
def small(monkeypatch):
    """Shrink batches, so that a short text fills many of them."""
    for name, value in {"BATCH": 300, "READ": 64, "READ_COMPRESSED": 20, "CUT": 100, "ROWS": 3}.items():
        monkeypatch.setattr(corpus_rows, name, value)
    monkeypatch.setattr(sources, "ROWS", 3)
