"""Token healing: the tokens at the border of a gap that stay the same, whatever text is put into the gap.

    text before the gap     The capital of ·
    tokens                  The| capital| of| ·
    stable                  The| capital| of|            the space is given back: it may be part of " France"

A model is trained on the tokens of whole texts. If the text before a gap is tokenised alone, its last tokens may be
ones that do not occur before the right continuation. `stable_end` and `stable_start` say which part of a text to keep.
The rest is given back: it is generated again, as the beginning or the end of the gap, with the constraint that its
bytes agree.

Method
------
A tokenizer splits a text into pre-tokens, by a regular expression, and each pre-token into tokens. A border of
pre-tokens is stable if it is there next to each of the texts in `PROBES_AFTER` (`PROBES_BEFORE`), which have each kind
of character that the expressions distinguish.

Inside the pre-token at the gap, BPE has this property: if there is a border of tokens at p, then the tokens before p
are those of the text before p alone, and the same holds after p. Let p be where the token begins that crosses the end
of the text. Then text[p:] is the beginning of a token of the vocabulary. There are few such p, and a border is stable
if the tokens of text[:p] have it for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from acgpt.query.text import encode_text
from acgpt.query.vocabulary import ByteVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# "s", "e" and "l" complete an English contraction; \ua000 is a letter that no tokenizer knows (see `text`).
PROBES_AFTER = (
    *("", "a", "s", "e", "l", "A", "é", "\u0301", "中", "あ", "ع", "\ua000", "1", "12", "123"),
    *(" ", " a", "  a", "    ", "\n", "\n\n", "\n    a", "\r\n", "\t", "\u00a0"),
    *(".", "...", ",", "'s", '"', "(", ")", "_", "=", "/", "-", "\u200d", "👩"),
)
PROBES_BEFORE = (
    *("", "a", "A", "é", "e\u0301", "中", "あ", "ع", "\ua000", "1", "12", "123", " 1"),
    *("a ", "1 ", "a  ", "a    ", "a\n", "a\n\n", "a\n  ", "a \n", "a\r", "a\r\n", "a\t", "a\u00a0"),
    *("a.", " .", "a...", "a,", "a'", "a'l", "a'r", 'a "', "a (", "a)", "a_", "a=", "a/", "a-", "👩", "👩\u200d"),
)

SEPARATOR = "\ua000"  # SentencePiece writes it as bytes, which are not joined to anything

# Where a long text can be cut: before a space, after a line break, and between a letter and punctuation.
_CUT = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)|(?<=[^\W\d_])(?=[^\w\s])")
EXAMINED = 128  # minimum number of characters examined next to a gap
MARGIN = 40  # characters next to a cut whose tokens may differ from those of the whole text
MANY = 64  # so many tokens with the same beginning are not checked one by one


def stable_end(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest offset before which the tokens of `text` stay the same, whatever text follows.

    Args:
        text: Text before a gap, from the beginning of the document.
        tokenizer: A fast tokenizer: byte-level BPE, or SentencePiece with byte fallback.

    Returns:
        An offset in characters, at a border of two tokens. `len(text)` if all tokens are stable, 0 if none is.

    Raises:
        ModelError: The tokenizer is of another kind.
        InputError: The text has a lone surrogate.
    """
    size = EXAMINED
    while True:
        cuts = [found.start() for found in _CUT.finditer(text, max(0, len(text) - 8 * size), max(0, len(text) - size))]
        cut = cuts[-1] if cuts else 0
        end = _stable_end(text[cut:], tokenizer)
        if not cut or end >= MARGIN:
            return cut + end
        size *= 4


def stable_start(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the smallest offset from which the tokens of `text` stay the same, whatever text precedes.

    Args:
        text: Text after a gap, up to the end of the document. `encode_inside` returns the tokens of the stable part.
        tokenizer: A fast tokenizer: byte-level BPE, or SentencePiece with byte fallback.

    Returns:
        An offset in characters, at a border of two tokens. 0 if all tokens are stable, `len(text)` if none is.

    Raises:
        ModelError: The tokenizer is of another kind.
        InputError: The text has a lone surrogate.
    """
    size = EXAMINED
    while True:
        found = _CUT.search(text, size, 8 * size)
        cut = found.start() if found else len(text)
        start = _stable_start(text[:cut], tokenizer)
        if cut == len(text) or start <= cut - MARGIN:
            return start
        size *= 4


def encode_inside(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text that is preceded by other text: without the space that begins a document.

    Args:
        text: A text that begins at a `stable_start`.
        tokenizer: Its tokenizer.
    """
    context = _context(tokenizer)
    return encode_text(context + text, tokenizer)[len(encode_text(context, tokenizer)) :]


def _context(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text with which no following text is joined, for tokenizers that begin a document with a space."""
    return SEPARATOR if ByteVocabulary.of(tokenizer).begin else ""


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a text.

    Args:
        ids: Their ids.
        ends: The offset at which each ends, in bytes, from the first byte that the tokenizer writes.
        words: The pre-token of each.
        characters: The offsets of the characters of each.
    """

    ids: list[int]
    ends: list[int]
    words: list[int | None]
    characters: list[tuple[int, int]]

    def new_word(self, index: int) -> bool:
        """Return whether a pre-token begins with this token."""
        return (
            index in (0, len(self.ids)) or self.words[index - 1] is None or self.words[index - 1] != self.words[index]
        )


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, vocabulary: ByteVocabulary) -> list[_Tokens]:
    """Tokenise texts, without special tokens."""
    encoded: Any = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)
    return [
        _Tokens(
            encoding.ids,
            list(accumulate(len(vocabulary.tokens[i] or b"") for i in encoding.ids)),
            encoding.word_ids,
            encoding.offsets,
        )
        for encoding in encoded.encodings
    ]


def _stable_end(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return `stable_end`, examining the whole text."""
    vocabulary = ByteVocabulary.of(tokenizer)
    encode_text(text, tokenizer)  # raises an error if the text is not valid
    completions = [token[n:] for token in vocabulary.added for n in range(1, len(token)) if text.endswith(token[:n])]
    probes = _encode([text + probe for probe in (*PROBES_AFTER, *completions)], tokenizer, vocabulary)
    alone = probes[PROBES_AFTER.index("")]
    same = min(_agreement(alone.ids, probe.ids) for probe in probes)
    word = max(i for i in range(same + 1) if all(probe.new_word(i) for probe in probes))
    first = alone.ends[word - 1] if word else 0
    borders = {0: word} | {alone.ends[i] - first: i + 1 for i in range(word, same)}
    stable = borders.keys() & _borders_before(vocabulary.decode(alone.ids[word:]), vocabulary)
    for index in [*sorted((borders[border] for border in stable), reverse=True), *range(word - 1, 0, -1)]:
        offset = _character(index, text, alone, vocabulary)
        if offset is not None and encode_text(text[:offset], tokenizer) == alone.ids[:index]:
            return offset
    return 0


def _stable_start(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return `stable_start`, examining the whole text."""
    vocabulary = ByteVocabulary.of(tokenizer)
    encode_text(text, tokenizer)  # raises an error if the text is not valid
    completions = [
        token[:-n] for token in vocabulary.added for n in range(1, len(token)) if text.startswith(token[-n:])
    ]
    probes = _encode([probe + text for probe in (*PROBES_BEFORE, *completions)], tokenizer, vocabulary)
    alone = probes[PROBES_BEFORE.index("")]
    count = len(alone.ids)
    same = count - min(_agreement(alone.ids[::-1], probe.ids[::-1]) for probe in probes)
    word = min(i for i in range(same, count + 1) if all(probe.new_word(i + len(probe.ids) - count) for probe in probes))
    borders = {alone.ends[i - 1] if i else 0: i for i in range(same, word + 1)}
    data = vocabulary.decode(alone.ids[:word])
    lead = len(vocabulary.begin) if len(vocabulary.decode(alone.ids)) > len(text.encode()) else 0  # not in the text
    stable = {border + lead for border in _borders_after(data[lead:], vocabulary)} & borders.keys()
    for index in [*sorted(borders[border] for border in stable), *range(word + 1, count)]:
        offset = _character(index, text, alone, vocabulary)
        if offset is not None and encode_inside(text[offset:], tokenizer) == alone.ids[index:]:
            return offset
    return len(text)


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _character(index: int, text: str, tokens: _Tokens, vocabulary: ByteVocabulary) -> int | None:
    """Return the offset of the character with which a token begins; `None` if it begins inside a character."""
    if index in (0, len(tokens.ids)):
        return len(text) if index else 0
    written, data = vocabulary.decode(tokens.ids), text.encode()
    if written.endswith(data):
        before = data[: max(0, tokens.ends[index - 1] - (len(written) - len(data)))]
        return len(before.decode(errors="ignore")) if _is_text(before) else None
    # The tokenizer changes the text. Its offsets may leave out spaces before a token.
    end, start = tokens.characters[index - 1][1], tokens.characters[index][0]
    while start > end and text[start - 1] == " ":
        start -= 1
    return start if start >= end else None


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _borders_before(data: bytes, vocabulary: ByteVocabulary) -> set[int]:
    """Return the borders of tokens in the beginning of a pre-token that are there however the pre-token ends."""
    borders = set(range(len(data) + 1))
    for p in range(len(data)):
        crossing = list(islice(vocabulary.continuing(data[p:]), MANY))
        if crossing:
            tokens = vocabulary.split(data[:p])
            if (
                not tokens
                or len(crossing) == MANY
                or any(_adjacent(tokens[-1], token, vocabulary) for token in crossing)
            ):
                borders &= {0, *accumulate(map(len, tokens))}
    return borders


def _borders_after(data: bytes, vocabulary: ByteVocabulary) -> set[int]:
    """Return the borders of tokens in the end of a pre-token that are there however the pre-token begins."""
    borders = set(range(len(data) + 1))
    for p in range(1, len(data) + 1):
        crossing = list(islice(vocabulary.preceding(data[:p]), MANY))
        if crossing:
            tokens = vocabulary.split(data[p:])
            if (
                not tokens
                or len(crossing) == MANY
                or any(_adjacent(token, tokens[0], vocabulary) for token in crossing)
            ):
                borders &= {p, *(p + end for end in accumulate(map(len, tokens)))}
    return borders


def _adjacent(first: bytes, second: bytes, vocabulary: ByteVocabulary) -> bool:
    """Return whether the tokenizer ever writes these two tokens next to each other in a pre-token."""
    if not vocabulary.byte_level and not (_is_text(first) and _is_text(second)):
        return True  # SentencePiece does not join single bytes of a character
    return vocabulary.split(first + second) == [first, second]
