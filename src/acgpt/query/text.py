"""Between text and tokens: a parsed template becomes a `Query`, and token ids become the text that each contributes.

    parts     The capital of ·{{France}}· is Paris
    text      The capital of France is Paris             tokenised once, as a whole, as the model has always seen text
    tokens    The| capital| of| France| is| Paris
    asked                     ^^^^^^^                     every token that reaches into a slot, even partly

A blank has no text to tokenise. A letter that no tokenizer knows as a word stands in its place, so that its neighbours
are tokenised as they would be beside a word; then its tokens are replaced by as many unknown ones as the blank is long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, takewhile
from typing import TYPE_CHECKING

import numpy as np

from acgpt.errors import InputError, ModelError, TemplateError
from acgpt.query.query import Query
from acgpt.query.template import Given, Part, Slot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What may stand for a blank. Letters (Yi, Egyptian, cuneiform) come first, as tokenizers split "⟨letter⟩'s" like
# "John's", but swallow the apostrophe after a symbol or a private-use character.
_PLACEHOLDERS = "\ua000\U00013000\U00012000\ue000\uf8ff"

# The ways to write a blank down, in the order in which they are tried: the placeholder, and whether the space before it
# stays in the text. With the space kept, byte-level tokenizers split an indentation as they do before a word;
# SentencePiece glues the whole indentation together unless the space that belongs to the blank is taken out.
_WRITINGS = [(placeholder, keep_space) for keep_space in (True, False) for placeholder in _PLACEHOLDERS]

TOGETHER = 16  # texts that are decoded in one call: enough for the cores of a large machine


@dataclass(frozen=True)
class Encoded:
    """A template in tokens.

    Args:
        query: The question.
        slots: For each slot, in the order of the template, the positions of its first and last token, counting from 1.
            A slot with empty text has no token: it is `(p, p - 1)`, where p is the position that follows it. Two
            slots that reach into the same token both count it as theirs.
    """

    query: Query
    slots: tuple[tuple[int, int], ...]


def encode(parts: Iterable[Part], tokenizer: PreTrainedTokenizerBase, template: str = "") -> Encoded:
    """The question that a parsed template asks, in this tokenizer's tokens. No special tokens are added.

    Args:
        parts: What `parse` or `fillings` returned. Slots are blanks, or have one alternative.
        tokenizer: A fast Hugging Face tokenizer. Names of special tokens in the text, such as `<|im_end|>`, are read
            as plain text.
        template: The template the parts come from, so that errors can point into it.

    Raises:
        TemplateError: No slot, a slot with several alternatives, or a blank that cannot be told from its neighbours.
        QueryError: Nothing is asked, as all slots are empty.
        ModelError: The tokenizer is a slow one.
    """
    parts = list(parts)
    slots = [part for part in parts if isinstance(part, Slot)]
    if not slots:
        raise TemplateError("nothing is asked: put {{ and }} around what is, or write a blank, {{_4}}.", template, 0)
    for slot in slots:
        if len(slot.alternatives) > 1:
            problem = "alternatives can be ranked, but not scored or sampled: keep one of them, or rank the template."
            raise TemplateError(problem, template, slot.at if template else 0)

    ids, ranges = _tokenise_with_blanks(parts, tokenizer, template)
    tokens: list[int | None] = list(ids)
    widths = [1] * len(ids)  # what each token of the text becomes in the query: itself, or the tokens of a blank
    for (first, end), slot in zip(ranges, slots, strict=True):
        if slot.blank is not None:
            tokens[first:end] = [None] * (end - first)
            widths[first:end] = [slot.blank] + [0] * (end - first - 1)
    positions = list(accumulate(widths, initial=1))
    spans = tuple((positions[first], positions[end] - 1) for first, end in ranges)
    given = [True] * sum(widths)
    for first, last in spans:
        given[first - 1 : last] = [False] * (last - first + 1)
    return Encoded(Query([t for t, width in zip(tokens, widths, strict=True) for _ in range(width)], given), spans)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a plain text: no special tokens are added, and none are read from it."""
    return _tokenise(text, tokenizer)[0]


def pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] | None = None) -> list[str]:
    """The text that each token contributes, or each part of several tokens; joined, they are the decoded text.

    A character whose bytes are spread over several tokens comes with the token that completes it; the others
    contribute "". Takes time linear in the number of tokens, as each is decoded with the few that come before it only.

    Args:
        ids: The tokens.
        tokenizer: Theirs.
        ends: How many tokens there are up to the end of each part, the last part's included; by default a part a token.
    """

    def library(part: Sequence[int]) -> str:
        # As an array: of a list the library looks at every token first. Its signature also covers batches, hence str.
        array = np.array(part, dtype=np.int64)
        return str(tokenizer.decode(array, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def backend(part: Sequence[int]) -> str:
        return str(tokenizer.backend_tokenizer.decode(list(part), skip_special_tokens=False))

    text, parts = library(ids), range(1, len(ids) + 1) if ends is None else ends
    if tokenizer.is_fast and (ends is not None or "\ufffd" not in text):  # which may be half a character
        alone = [backend(ids[begin:end]) for begin, end in pairwise([0, *parts])]
        if "".join(alone) == text:  # parts that make the text each by itself, as most do, take no more
            return alone
    quick = tokenizer.is_fast and backend(ids) == text  # it is, unless a tokenizer has a way of its own
    decoded = backend if quick else library
    result: list[str] = []
    settled = 0  # so many characters of the text have found their token
    # The tokens before `done` decode to text[:reached], whatever follows them. Those from `start` on are decoded again
    # with each new token, as some tokenizers drop a space before the first token they see.
    start, done, reached, again = 0, 0, 0, ""

    def read(end: int) -> tuple[str, int]:
        """What the tokens up to `end` add to text[:reached], and up to which character the text agrees."""
        new = decoded(ids[start:end])[len(again) :]
        return new, reached + _agreement(new, text[reached : reached + len(new)])

    def whole(new: str, agreed: int) -> bool:
        """Is no character left incomplete?"""
        return bool(new) and agreed == reached + len(new) and not new.endswith("\ufffd")

    def settle(end: int, new: str, agreed: int) -> str:
        """The characters that the tokens up to `end` have completed."""
        nonlocal settled, start, done, reached, again
        piece, settled = text[settled:agreed], max(settled, agreed)
        if whole(new, agreed):
            start, done, reached, again = done, end, agreed, decoded(ids[done:end])
        return piece

    begin = 0
    for end in parts:
        piece, (new, agreed) = "", read(end)
        if end > begin + 1 and not whole(
            new, agreed
        ):  # the part ends in half a character: which of its tokens began it?
            piece = "".join(settle(each, *read(each)) for each in range(begin + 1, end))
            new, agreed = read(end)
        result.append(piece + settle(end, new, agreed))
        begin = end
    if result:
        result[-1] += text[settled:]
    return result


def pieces_of_many(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[str]]:
    """The `pieces` of many texts, each with the ends of its parts; they are decoded together, on all cores."""
    if not _decodes_as_backend(tokenizer):
        yield from (pieces(ids, tokenizer, ends) for ids, ends in texts)
        return
    for start in range(0, len(texts), TOGETHER):
        some = texts[start : start + TOGETHER]
        parts = [ids[begin:end] for ids, ends in some for begin, end in pairwise([0, *ends])]
        decoded = iter(
            tokenizer.backend_tokenizer.decode_batch([*(ids for ids, _ in some), *parts], skip_special_tokens=False)
        )
        for (ids, ends), whole in zip(some, list(islice(decoded, len(some))), strict=True):
            alone = list(islice(decoded, len(ends)))
            yield alone if "".join(alone) == whole else pieces(ids, tokenizer, ends)


def _decodes_as_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Is `decode` that of the tokenizers library, with nothing added by this tokenizer?"""
    from transformers import PreTrainedTokenizerFast

    return tokenizer.is_fast and all(
        getattr(getattr(tokenizer, name, None), "__func__", None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode")
    )


def _agreement(a: str, b: str) -> int:
    """The number of characters that both start with."""
    if a == b:  # nearly always, and quicker
        return len(a)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _tokenise_with_blanks(
    parts: Sequence[Part], tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of the text, with something in place of each blank, and each slot's range of them, end excluded."""
    slots = [part for part in parts if isinstance(part, Slot)]
    writings = [0] * len(slots)
    while True:
        text, spans = _written(parts, writings)
        ids, starts, ends = _tokenise(text, tokenizer)
        ranges, unclear = [], []
        for i, (slot, (a, b)) in enumerate(zip(slots, spans, strict=True)):
            first = bisect_right(ends, a)
            end = max(first, bisect_left(starts, b)) if a < b else first
            ranges.append((first, end))
            if slot.blank is not None and (first == end or starts[first] < a or ends[end - 1] > b):
                unclear.append(i)
        if not unclear:
            return ids, ranges
        for i in unclear:
            writings[i] += 1
            if writings[i] == len(_WRITINGS):
                raise TemplateError(
                    "the tokenizer joins this blank to the text beside it, whatever stands in its place: write a text "
                    "in the slot, set it apart with a space, or say where the tokens stand with a Query.",
                    template,
                    slots[i].at if template else 0,
                )


def _written(parts: Sequence[Part], writings: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text, with each blank in its writing, and the characters of it that belong to each slot, end excluded."""
    text = ""
    spans: list[tuple[int, int]] = []
    for part in parts:
        if isinstance(part, Given):
            text += part.text
        elif part.blank is None:
            spans.append((len(text), len(text) + len(part.alternatives[0])))
            text += part.alternatives[0]
        else:
            placeholder, keep_space = _WRITINGS[writings[len(spans)]]
            start = len(text) - text.endswith(" ")  # the space before a blank is the blank's, whoever wrote it
            spans = [(min(a, start), min(b, start)) for a, b in spans]
            text = (text if keep_space else text[:start]) + placeholder
            spans.append((start, len(text)))
    return text, spans


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """Token ids, and where each token starts and ends in the text, spaces included."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which cannot say which characters a token comes from; "
            "load the fast one with AutoTokenizer.from_pretrained, from a folder with a tokenizer.json."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start + 1} of the text is half a character (a lone surrogate, {text[error.start]!a}), "
            "which has no tokens; remove it, or write the whole character."
        ) from None
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
        if starts[i] == ends[i]:  # a token without text, such as the "▁" that may open a text, goes with the next one
            starts[i], ends[i] = starts[i + 1], ends[i + 1]
    return list(encoding["input_ids"]), starts, ends
