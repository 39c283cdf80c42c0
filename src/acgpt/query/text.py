"""Conversion between text and tokens: from parsed templates to `Query`, and from token ids to the text of each token.

    parts     The capital of ·{{France}}· is Paris
    text      The capital of France is Paris             tokenised once, as a whole, like the text of training
    tokens    The| capital| of| France| is| Paris
    asked                     ^^^^^^^                     every token that is at least partly in a slot

A blank has no text to tokenise. A placeholder, a letter that no tokenizer knows as a word, is put there, so that its
neighbours are tokenised as they would be next to a word. Its tokens are then replaced by the blank's number of asked
tokens without an id.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import TYPE_CHECKING

import numpy as np

from acgpt.errors import InputError, ModelError, TemplateError
from acgpt.query.query import Query
from acgpt.query.template import Given, Part, Slot, check_slots

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders for a blank. Letters (Yi, Egyptian, cuneiform) come first: tokenizers split "⟨letter⟩'s" like "John's",
# but join the apostrophe to a symbol or a private-use character.
_PLACEHOLDERS = "\ua000\U00013000\U00012000\ue000\uf8ff"

# The forms of a blank in the text, in the order in which they are tried: the placeholder, and whether the space before
# it stays in the text. With the space, byte-level tokenizers split an indentation as they do before a word;
# SentencePiece makes one token of the whole indentation unless the space that belongs to the blank is removed.
_FORMS = [(placeholder, keep_space) for keep_space in (True, False) for placeholder in _PLACEHOLDERS]


@dataclass(frozen=True)
class Encoded:
    """A tokenised template.

    Args:
        query: The query.
        slots: For each slot, in the order of the template, the positions of its first and last token, counting from 1.
            A slot with empty text has no token: it is `(p, p - 1)`, where p is the position after it. A token that is
            partly in two slots belongs to both.
    """

    query: Query
    slots: tuple[tuple[int, int], ...]


def encode(parts: Iterable[Part], tokenizer: PreTrainedTokenizerBase, template: str = "") -> Encoded:
    """Turn a parsed template into a query in this tokenizer's tokens. No special tokens are added.

    Args:
        parts: A result of `parse` or `fillings`. Slots are blanks, or have one alternative.
        tokenizer: A fast Hugging Face tokenizer. Names of special tokens in the text, such as `<|im_end|>`, are read
            as plain text.
        template: The template of the parts, so that errors can point into it.

    Raises:
        TemplateError: No slot, a slot with several alternatives, or a blank that the tokenizer joins to its neighbours.
        QueryError: Nothing is asked because all slots are empty.
        ModelError: The tokenizer is not a fast one.
    """
    parts = list(parts)
    slots = check_slots(parts, template)
    for slot in slots:
        if slot.gap is not None:
            raise TemplateError("a gap has no number of tokens: fill it, or write {{_4}}.", template, slot.at)

    tokenised = tokenise_parts(parts, tokenizer, template)
    ids, ranges = tokenised.ids, tokenised.slots
    tokens: list[int | None] = list(ids)
    widths = [1] * len(ids)  # number of query tokens for each token of the text: 1, or those of a blank
    for (first, end), slot in zip(ranges, slots, strict=True):
        if slot.tokens is not None:
            tokens[first:end] = [None] * (end - first)
            widths[first:end] = [slot.tokens] + [0] * (end - first - 1)
    positions = list(accumulate(widths, initial=1))
    spans = tuple((positions[first], positions[end] - 1) for first, end in ranges)
    given = [True] * sum(widths)
    asked = [False] * sum(widths)
    for (first, last), slot in zip(spans, slots, strict=True):
        given[first - 1 : last] = [False] * (last - first + 1)
        asked[first - 1 : last] = [slot.unknown is None] * (last - first + 1)
    filled = [t for t, width in zip(tokens, widths, strict=True) for _ in range(width)]
    return Encoded(Query(filled, given, asked), spans)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a plain text; special tokens are neither added nor recognised in it."""
    return _tokenise(text, tokenizer)[0]


def pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] | None = None) -> list[str]:
    """Return the text of each token, or of each part of several tokens; joined, they are the decoded text.

    A character whose bytes are spread over several tokens belongs to the token that completes it; the others have "".
    The time is linear in the number of tokens, because each is decoded with only a few tokens before it.

    Args:
        ids: Token ids.
        tokenizer: Their tokenizer.
        ends: For each part, the number of tokens up to its end. Default: each token is a part.
    """

    def library(part: Sequence[int]) -> str:
        # An array, because transformers checks every token of a list first. str(): its type also covers batches.
        array = np.array(part, dtype=np.int64)
        return str(tokenizer.decode(array, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def backend(part: Sequence[int]) -> str:
        return str(tokenizer.backend_tokenizer.decode(list(part), skip_special_tokens=False))

    text, parts = library(ids), range(1, len(ids) + 1) if ends is None else ends
    if tokenizer.is_fast and (ends is not None or "\ufffd" not in text):  # "\ufffd" may be half a character
        alone = [backend(ids[begin:end]) for begin, end in pairwise([0, *parts])]
        if "".join(alone) == text:  # mostly the parts can be decoded separately
            return alone
    quick = tokenizer.is_fast and backend(ids) == text  # unless the tokenizer overrides decoding
    decoded = backend if quick else library
    result: list[str] = []
    settled = 0  # number of characters that have been assigned to a token
    # The tokens before `done` decode to text[:reached], whatever follows them. Those from `start` on are decoded again
    # with each new token, because some tokenizers drop a space before their first token.
    start, done, reached, again = 0, 0, 0, ""

    def read(end: int) -> tuple[str, int]:
        """Return what the tokens up to `end` add to text[:reached], and up to which character the text agrees."""
        new = decoded(ids[start:end])[len(again) :]
        return new, reached + _agreement(new, text[reached : reached + len(new)])

    def whole(new: str, agreed: int) -> bool:
        """Return whether all characters are complete."""
        return bool(new) and agreed == reached + len(new) and not new.endswith("\ufffd")

    def settle(end: int, new: str, agreed: int) -> str:
        """Return the characters that the tokens up to `end` have completed."""
        nonlocal settled, start, done, reached, again
        piece, settled = text[settled:agreed], max(settled, agreed)
        if whole(new, agreed):
            start, done, reached, again = done, end, agreed, decoded(ids[done:end])
        return piece

    begin = 0
    for end in parts:
        piece, (new, agreed) = "", read(end)
        if end > begin + 1 and not whole(new, agreed):
            # The part ends in half a character: find the token that began it.
            piece = "".join(settle(index, *read(index)) for index in range(begin + 1, end))
            new, agreed = read(end)
        result.append(piece + settle(end, new, agreed))
        begin = end
    if result:
        result[-1] += text[settled:]
    return result


def _agreement(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    if a == b:  # nearly always, and faster
        return len(a)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@dataclass(frozen=True)
class Tokenised:
    """The text of a template, with placeholders for blanks, gaps and unknown tokens, and its tokens.

    Args:
        text: The text.
        spans: Each slot's range of characters, end excluded.
        ids: Token ids of the text.
        starts: Where each token starts in the text.
        ends: Where each token ends.
        slots: Each slot's range of tokens, end excluded.
    """

    text: str
    spans: list[tuple[int, int]]
    ids: list[int]
    starts: list[int]
    ends: list[int]
    slots: list[tuple[int, int]]


def tokenise_parts(parts: Sequence[Part], tokenizer: PreTrainedTokenizerBase, template: str) -> Tokenised:
    """Tokenise a template as a whole.

    Raises:
        TemplateError: The tokenizer joins a blank to its neighbours.
    """
    slots = [part for part in parts if isinstance(part, Slot)]
    forms = [0] * len(slots)
    while True:
        text, spans = _written(parts, forms)
        ids, starts, ends = _tokenise(text, tokenizer)
        ranges, unclear = [], []
        for i, (slot, (a, b)) in enumerate(zip(slots, spans, strict=True)):
            first = bisect_right(ends, a)
            end = max(first, bisect_left(starts, b)) if a < b else first
            ranges.append((first, end))
            if slot.tokens is not None and (first == end or starts[first] < a or ends[end - 1] > b):
                unclear.append(i)
        if not unclear:
            return Tokenised(text, spans, ids, starts, ends, ranges)
        for i in unclear:
            forms[i] += 1
            if forms[i] == len(_FORMS):
                raise TemplateError(
                    "the tokenizer joins this blank to the text next to it: write a gap, {{_}}, or separate it with a "
                    "space.",
                    template,
                    slots[i].at if template else 0,
                )


def _written(parts: Sequence[Part], forms: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, with each blank in its form, and each slot's range of characters, end excluded."""
    text = ""
    spans: list[tuple[int, int]] = []
    for part in parts:
        if isinstance(part, Given):
            text += part.text
        elif part.gap is not None:  # at this character: what it merges with is found by healing
            spans.append((len(text), len(text) + 1))
            text += _PLACEHOLDERS[0]
        elif part.tokens is None:
            spans.append((len(text), len(text) + len(part.alternatives[0])))
            text += part.alternatives[0]
        else:
            placeholder, keep_space = _FORMS[forms[len(spans)]]
            start = len(text) - text.endswith(" ")  # the space before a blank belongs to it
            spans = [(min(a, start), min(b, start)) for a, b in spans]
            text = (text if keep_space else text[:start]) + placeholder
            spans.append((start, len(text)))
    return text, spans


def check_text(text: str) -> None:
    """Raise an `InputError` if a text has half a character, which has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start + 1} of the text is half a character (a lone surrogate, {text[error.start]!a}), "
            "which has no tokens; remove it, or write the whole character."
        ) from None


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """Return token ids, and where each token starts and ends in the text, spaces included."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not map tokens to characters. Load a fast one "
            "with AutoTokenizer.from_pretrained, from a folder with a tokenizer.json."
        )
    check_text(text)
    encoding = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    starts: list[int] = []
    ends: list[int] = []
    covered = 0
    for start, end in encoding["offset_mapping"]:
        while start > covered and text[start - 1] == " ":  # some tokenizers trim spaces from their offsets
            start -= 1
        starts.append(start)
        ends.append(end)
        covered = max(covered, end)
    for i in reversed(range(len(ends) - 1)):
        if starts[i] == ends[i]:  # a token without text, such as an initial "▁", belongs to the next one
            starts[i], ends[i] = starts[i + 1], ends[i + 1]
    return list(encoding["input_ids"]), starts, ends
