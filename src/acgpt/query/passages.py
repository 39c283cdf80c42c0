r"""Gaps in passages of a training text: words, phrases, lines and sentences, as users leave them out.

    text        … the end.\n│Paris is the capital of France.\n│It lies on the river Seine, and has …
    passages                 └─ one sentence, with a gap: "Paris is ______ of France.\n"

A training text of T tokens is cut into passages, each of which is read by itself, from BOS on, so that the model sees
short texts too. Passages begin where documents, lines or sentences do, and gaps begin and end where words, lines or
sentences do; some are placed at random.

Users leave out characters, and the tokens next to these are generated again (see `healing`). Where a space comes before
a word, nothing is: the space belongs to the word. Elsewhere it is nearly always one token, at either end of a gap. So
a gap here takes in that token too, and has as many tokens as the same gap of a template.

The number of given tokens is known before the text is: a batch has a fixed shape (see `training.batches`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from acgpt.errors import ModelError
from acgpt.query.vocabulary import SPACE, ByteVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD, LINE_END, SENTENCE_END, DOCUMENT_END, SPACED, SPACE_END = 1, 2, 4, 8, 16, 32  # what a token can be, as bits
SHORTEST = 8  # tokens of a passage
LONGEST_PHRASE = 6  # words
LONGEST_RANDOM = 96  # tokens of a gap between random tokens
# How often a gap is of each kind, if its passage has such a place. Random gaps have lengths from 1 on, the short ones
# as often as the long ones (log-uniform).
GAP_KINDS = {"word": 0.3, "phrase": 0.2, "line": 0.25, "sentence": 0.15, "random": 0.1}
AT_AN_END = 0.1  # how often a passage has a gap at its start, and at its end
OTHERWISE = 0.05  # how often a border is not healed as the tokens next to it suggest
EMPTY = 0.04  # how often a place between two tokens counts as a gap of length 0


@dataclass(frozen=True)
class Passage:
    """A part of a text with gaps.

    Args:
        start: Index of its first token in the text.
        end: Index after its last token.
        gaps: The gaps, from left to right: index of the first token in the text, and number of tokens. Between two gaps
            there is at least one token.
    """

    start: int
    end: int
    gaps: tuple[tuple[int, int], ...]

    def around(self, number: int, rng: np.random.Generator, *, alone: bool) -> Passage:
        """Return a part of the passage around one of its gaps; how much is random on both sides.

        Where a text has a fixed number of tokens, those outside of a gap would tell how many there are in it.

        Args:
            number: Index of the gap.
            rng: Source of randomness.
            alone: Take the tokens of the other gaps for given.
        """
        first, size = self.gaps[number]
        start, end = first - fewer(first - self.start, rng), first + size + fewer(self.end - first - size, rng)
        for other, width in self.gaps:  # no border inside of another gap
            if other < start < other + width:
                start = other + width
            if other < end < other + width:
                end = other
        gaps = [gap for gap in self.gaps if start <= gap[0] and sum(gap) <= end]
        return Passage(start, end, (self.gaps[number],) if alone else tuple(gaps))


def fewer(count: int, rng: np.random.Generator) -> int:
    """Return a random number from 1 to `count`, the small ones as often as the large ones; 0 if there is none."""
    return int(np.exp(rng.uniform(0, np.log(count + 1)))) if count else 0


def token_kinds(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return (V,) uint8 what each token of a vocabulary can be: `WORD`, `LINE_END`, … as bits.

    A token is a `WORD` if a word begins with it: its text begins with white space. It is `SPACED` if that is one space,
    and `SPACE_END` if its text ends with white space. Ends of sentences are tokens whose text ends in a full stop, an
    exclamation mark or a question mark; ends of documents are BOS and EOS.
    """
    try:
        tokens = ByteVocabulary.of(tokenizer).tokens
    except ModelError:  # another kind of tokenizer: by the names of its tokens
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        tokens = [None if name is None else name.replace(SPACE, " ").encode() for name in names]
    kinds = np.zeros(max(len(tokens), len(tokenizer)), dtype=np.uint8)
    for i, token in enumerate(tokens):
        if token:
            kinds[i] |= WORD * token[:1].isspace()
            kinds[i] |= SPACED * (token[:1] == b" " and not token[:2].isspace())
            kinds[i] |= SPACE_END * token[-1:].isspace()
            kinds[i] |= LINE_END * (b"\n" in token)
            kinds[i] |= SENTENCE_END * (token.rstrip(b" \n\"')]").endswith((b".", b"!", b"?")))
    for special in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if special is not None and special < len(kinds):
            kinds[special] |= DOCUMENT_END
    return kinds


@dataclass(frozen=True)
class Starts:
    """Where words, lines and sentences of a text begin.

    Args:
        words: (T,) booleans; the first token of a text counts as a start of all three.
        lines: (T,) booleans.
        sentences: (T,) booleans; lines begin sentences.
        documents: (T,) booleans; documents begin lines.
    """

    words: np.ndarray
    lines: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    @classmethod
    def of(cls, kinds: np.ndarray) -> Starts:
        """Find them from the kinds of the text's tokens."""

        def after(kind: int) -> np.ndarray:
            return np.concatenate(([True], (kinds[:-1] & kind) > 0))

        documents = after(DOCUMENT_END)
        lines = documents | after(LINE_END)
        words = lines | ((kinds & WORD) > 0)
        return cls(words, lines, lines | (after(SENTENCE_END) & words), documents)

    def inside(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Return where gaps of each kind may begin in a passage."""
        words, lines, sentences = (
            np.flatnonzero(starts[begin:end]) + begin for starts in (self.words, self.lines, self.sentences)
        )
        return {"word": words, "phrase": words, "line": lines, "sentence": sentences}


def draw_passages(kinds: np.ndarray, count: int, asked: int, rng: np.random.Generator) -> list[Passage]:
    """Cut a text into passages and choose gaps in them.

    Args:
        kinds: (T,) kinds of the text's tokens, see `token_kinds`.
        count: Number of passages; fewer if the text has too few starts, or if they would be too short.
        asked: Total number of tokens in gaps, less than T.
        rng: Source of randomness.

    Returns:
        The passages, which together are the text. A passage has a token that is in no gap, unless `asked` leaves too
        few. Gaps of length 0 can occur.
    """
    starts = Starts.of(kinds)
    borders = cut(starts, count, rng)
    free = np.ones(len(kinds), dtype=bool)  # tokens in no gap, and next to none
    gaps: list[list[tuple[int, int]]] = [[] for _ in borders[1:]]
    left = asked
    tries = 0
    order: list[int] = []
    places = [starts.inside(begin, end) for begin, end in pairwise(borders)]
    while left > 0 and tries < 8 * (len(gaps) + asked):
        tries += 1
        order = order or rng.permutation(len(gaps)).tolist()
        number = order.pop()
        begin, end = borders[number], borders[number + 1]
        first, after = draw_gap(places[number], begin, end, rng, at_an_end=not gaps[number])
        if after > first:
            first, after = healed(kinds, first, after, begin, end, rng)
        after = min(after, first + left)
        if end - begin == after - first:
            after -= 1
        if after <= first or not free[first:after].all():
            continue
        if end - begin - sum(length for _, length in gaps[number]) <= after - first:
            continue  # nothing of the passage would be left
        gaps[number].append((first, after - first))
        free[max(begin, first - 1) : after + 1] = False
        left -= after - first
    roles = np.zeros(len(kinds), dtype=bool)
    for first, length in (gap for passage in gaps for gap in passage):
        roles[first : first + length] = True
    if left:  # rare: the rest anywhere, so that the number is exact
        roles[rng.choice(np.flatnonzero(~roles), size=left, replace=False, shuffle=False)] = True
    return [Passage(begin, end, runs(roles, begin, end, rng)) for begin, end in pairwise(borders)]


def cut(starts: Starts, count: int, rng: np.random.Generator) -> list[int]:
    """Return the borders of passages, 0 and T included: at starts of documents if there are some, else of sentences."""
    length = len(starts.words)
    count = min(count, length // SHORTEST)
    borders = [0, length]
    for candidates in (starts.documents, starts.sentences):
        for place in rng.permutation(np.flatnonzero(candidates)).tolist():
            if len(borders) > count:
                break
            if min(abs(place - border) for border in borders) >= SHORTEST:
                borders.append(place)
    return sorted(borders)


def draw_gap(
    places: Mapping[str, np.ndarray], begin: int, end: int, rng: np.random.Generator, *, at_an_end: bool
) -> tuple[int, int]:
    """Draw a gap inside a passage.

    Args:
        places: Where words, lines and sentences of the passage begin, see `Starts.inside`.
        begin: Index of the passage's first token.
        end: Index after its last token.
        rng: Source of randomness.
        at_an_end: Whether the gap may be moved to an end of the passage.

    Returns:
        Index of the gap's first token, and that after its last.
    """
    kind, at, moved = rng.random(3).tolist()
    kinds = iter(GAP_KINDS.items())
    name, share = next(kinds)
    while kind >= share and (following := next(kinds, None)):
        kind -= share
        name, share = following
    if name == "random":
        length = int(np.exp(rng.uniform(0, np.log(min(LONGEST_RANDOM, end - begin)))))
        first = begin + int(at * (end - length - begin + 1))
        after = first + length
    else:
        borders = places[name]
        if not len(borders):
            return begin, begin
        number = int(at * len(borders))
        behind = number + (int(rng.integers(2, LONGEST_PHRASE, endpoint=True)) if name == "phrase" else 1)
        first, after = int(borders[number]), int(borders[behind]) if behind < len(borders) else end
        if name == "line":
            after -= after < end  # the line's own end stays
    if at_an_end and moved < AT_AN_END:
        first, after = begin, begin + after - first
    elif at_an_end and moved > 1 - AT_AN_END:
        first, after = end - (after - first), end
    return first, after


def healed(
    kinds: np.ndarray, first: int, after: int, begin: int, end: int, rng: np.random.Generator
) -> tuple[int, int]:
    """Return the gap that healing makes of one: with the token before it and behind it, unless a space comes there.

    A space before a gap is given back to the gap, but not if more white space comes before it, such as the indentation
    of a line. `query.gaps` finds the same borders in nine of ten gaps.
    """
    otherwise = rng.random(2) < OTHERWISE
    if first > begin:
        space = kinds[first] & SPACED and not kinds[first - 1] & SPACE_END
        first -= (not space) != otherwise[0]
    if after < end:
        after += (not kinds[after] & SPACED) != otherwise[1]
    return int(first), int(after)


def runs(roles: np.ndarray, begin: int, end: int, rng: np.random.Generator) -> tuple[tuple[int, int], ...]:
    """Return the runs of true values inside a passage, and some places between two false ones as gaps of length 0."""
    padded = np.concatenate(([False], roles[begin:end], [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1]) + begin
    found = [(int(first), int(after - first)) for first, after in zip(edges[::2], edges[1::2], strict=True)]
    while rng.random() < EMPTY:
        places = [i for i in range(begin + 1, end) if not roles[i - 1] and not roles[i]]
        places = [i for i in places if (i, 0) not in found]
        if not places:
            break
        found.append((int(rng.choice(places)), 0))
    return tuple(sorted(found))
