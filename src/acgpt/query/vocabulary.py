r"""The vocabulary of a tokenizer as bytes: what each token adds to a text.

    byte-level BPE    "ĠParis" is b" Paris"; a token may begin or end inside a character
    SentencePiece     "▁Paris" is b" Paris"; "<0x0A>" is b"\n", one byte of a character without a token of its own

Joined, the bytes of a text's tokens are the text, after `begin`. Exceptions are tokenizers that change the text: a
normaliser (Qwen composes characters: NFC), bytes that are not in the vocabulary, and newer SentencePiece tokenizers,
which put no space before a text that begins with one. An empty text has no tokens.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from acgpt.errors import ModelError
from acgpt.query.constraint import TokenTable

if TYPE_CHECKING:
    from tokenizers.models import Model
    from transformers import PreTrainedTokenizerBase

SPACE = "▁"  # how SentencePiece writes a space
_BYTE = re.compile("<0x([0-9A-F]{2})>")

_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, ByteVocabulary]] = WeakKeyDictionary()


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character with which byte-level BPE writes bytes.

    Printable characters of Latin-1 stand for themselves, the other bytes for characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = byte_alphabet()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}


class ByteVocabulary:
    """The tokens of a tokenizer as bytes.

    Attributes:
        tokens: The bytes that each token adds to a text, by id. `None` for tokens that are not text: special tokens
            such as `<|endoftext|>` and `<unk>`, and unused ids. Several ids may have the same bytes.
        ids: The lowest id of each token's bytes.
        begin: What the tokenizer writes before a text: a space for most SentencePiece tokenizers, otherwise nothing.
        byte_level: Whether this is byte-level BPE; otherwise SentencePiece.
        added: The texts of added tokens that are not special. The tokenizer looks for them before all others.
    """

    def __init__(
        self, tokens: list[bytes | None], begin: bytes, byte_level: bool, added: list[str], model: Model
    ) -> None:
        self.tokens, self.begin, self.byte_level, self.added = tokens, begin, byte_level, added
        self._model = model  # not the tokenizer, which could not be freed while the vocabulary is cached
        self.cache: dict[Any, Any] = {}  # for what others derive from it, so that it is freed with the tokenizer
        self.lock = threading.Lock()  # of the cache
        self.ids: dict[bytes, int] = {}
        for i, token in enumerate(tokens):
            if token is not None:
                self.ids.setdefault(token, i)

    @cached_property
    def table(self) -> TokenTable:
        """The tokens, arranged for constraints."""
        return TokenTable(self.tokens)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteVocabulary:
        """Return the vocabulary of a tokenizer. It is built once, and again after tokens have been added.

        Raises:
            ModelError: The tokenizer is neither byte-level BPE nor SentencePiece with byte fallback, or is a slow one.
        """
        size, vocabulary = _vocabularies.get(tokenizer, (0, None))
        if vocabulary is None or size != len(tokenizer):
            vocabulary = cls._build(tokenizer)
            _vocabularies[tokenizer] = len(tokenizer), vocabulary
        return vocabulary

    @classmethod
    def _build(cls, tokenizer: PreTrainedTokenizerBase) -> ByteVocabulary:
        if not tokenizer.is_fast:
            raise _unsupported(f"{type(tokenizer).__name__} is a slow tokenizer")
        settings: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        model = settings["model"]
        decoders = {step["type"] for step in _steps(settings["decoder"], "decoders")}
        byte_level = "ByteLevel" in decoders
        fallback = "ByteFallback" in decoders and model.get("byte_fallback", False)
        if model["type"] != "BPE" or not (byte_level or fallback):
            raise _unsupported(f"the tokenizer ({model['type']}) is neither byte-level BPE nor BPE with byte fallback")
        texts = {i: _bytes_of(token, byte_level) for token, i in model["vocab"].items()}
        texts |= {model["vocab"][token]: None for token in [model["unk_token"]] if token in model["vocab"]}
        added = [token for token in settings["added_tokens"] if not token["special"]]
        texts |= dict.fromkeys(tokenizer.all_special_ids)
        texts |= {token["id"]: None for token in settings["added_tokens"]}
        texts |= {token["id"]: token["content"].encode() for token in added}  # found in texts
        tokens = [texts.get(i) for i in range(1 + max(texts))]
        ids: list[int] = tokenizer("a", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        written = b"".join(tokens[i] or b"" for i in ids)
        if not written.endswith(b"a"):
            raise _unsupported("the tokenizer changes the text")
        texts_of_added = [token["content"] for token in added]
        return cls(tokens, written[:-1], byte_level, texts_of_added, tokenizer.backend_tokenizer.model)

    def decode(self, ids: Iterable[int]) -> bytes:
        """Return the joined bytes of tokens; tokens that are not text add nothing."""
        return b"".join(self.tokens[i] or b"" for i in ids)

    def split(self, data: bytes) -> list[bytes]:
        """Split a pre-token, or a part of one, into tokens.

        Raises:
            UnicodeDecodeError: A SentencePiece tokenizer, and the bytes are not a text.
        """
        if not data:
            return []
        text = "".join([_CHARACTERS[byte] for byte in data]) if self.byte_level else data.decode().replace(" ", SPACE)
        return [self.tokens[token.id] or b"" for token in self._model.tokenize(text)]

    def continuing(self, start: bytes) -> Iterator[bytes]:
        """Yield the tokens that begin with these bytes and are longer, in alphabetical order."""
        return _longer(self._forwards, start)

    def preceding(self, end: bytes) -> Iterator[bytes]:
        """Yield the tokens that end with these bytes and are longer."""
        return (token[::-1] for token in _longer(self._backwards, end[::-1]))

    @cached_property
    def _forwards(self) -> list[bytes]:
        return sorted(self.ids)

    @cached_property
    def _backwards(self) -> list[bytes]:
        return sorted(token[::-1] for token in self.ids)


def _longer(ordered: list[bytes], start: bytes) -> Iterator[bytes]:
    """Yield the longer entries of a sorted list that begin with `start`."""
    for i in range(bisect_right(ordered, start), len(ordered)):
        if not ordered[i].startswith(start):
            return
        yield ordered[i]


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, which may be a sequence of steps."""
    if part is None:
        return []
    return [step for inner in part[name] for step in _steps(inner, name)] if part["type"] == "Sequence" else [part]


def _bytes_of(token: str, byte_level: bool) -> bytes | None:
    """Return the bytes of an entry of the vocabulary; `None` if it is not in the alphabet."""
    if byte_level:
        return bytes(map(_BYTES.__getitem__, token)) if _BYTES.keys() >= set(token) else None
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def _unsupported(problem: str) -> ModelError:
    return ModelError(
        f"{problem}, so a gap cannot begin or end inside a token. Use a blank with a number of tokens: {{{{_4}}}}."
    )
