"""Find and remove text that a corpus shares with benchmarks: runs of ten equal tokens.

Ten tokens of the default model's tokenizer are about seven words of prose. A run is *trivial*, and does not count, if
fewer than `WORDS` different tokens in it have a letter: whitespace, punctuation, digits (every digit is a token, so a
date is ten tokens), a repeated token, and `for i in range(10):` in code.

A document of at most `SHORT` tokens that shares a run is dropped, and so is a longer one with over a tenth of its
tokens in shared runs, because it is probably a copy. From other documents only the lines that share a run are removed,
and the document is split there: in a long article or file a shared run is nearly always a common phrase, and dropping
all of it would remove long documents from the corpus more than short ones.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import detokenise
import numpy as np

from acgpt.errors import InputError, reason

RUN = 10  # tokens
WORDS = 5  # different tokens with a letter, in a run that counts
SHORT = 512  # tokens
COPY = 0.1  # share of the tokens of a document
LEAST = 32  # tokens of a piece that is kept
BUCKETS = 24  # bits of the hashes that a table is indexed by
OPENERS = {".gz": gzip.open, ".xz": lzma.open}
FIELDS = (("text",), ("prompt", "canonical_solution", "suffix"))  # of a line of JSON: those of the first kind it has


@dataclass(frozen=True)
class Kept:
    """What remains of a document: pieces of its text, with their numbers of tokens."""

    pieces: list[tuple[str, int]]
    tokens: int
    runs: bool  # whether it shared any run


class Runs:
    """A set of runs of ten tokens.

    Args:
        tokenizer: Of the library tokenizers: `tokenizer.backend_tokenizer` of a fast tokenizer.
        texts: Texts that a corpus must not overlap.
    """

    def __init__(self, tokenizer: Any, texts: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        vocabulary = range(tokenizer.get_vocab_size())
        self.letters = np.array([any(map(str.isalpha, tokenizer.decode([i]))) for i in vocabulary])
        batches = [self.hashes_that_count(ids) for ids in self.encode(list(texts))]
        self.hashes = np.unique(np.concatenate(batches)) if batches else np.empty(0, np.uint64)
        self.table = np.zeros(1 << BUCKETS, bool)
        self.table[self.hashes >> np.uint64(64 - BUCKETS)] = True

    def __len__(self) -> int:
        return len(self.hashes)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def hashes_that_count(self, ids: np.ndarray) -> np.ndarray:
        """Return the hashes of all runs that are not trivial."""
        if len(ids) < RUN:
            return np.empty(0, np.uint64)
        words = np.where(self.letters[ids], ids, -1)
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(words, RUN), axis=1)
        new = np.diff(windows, axis=1, prepend=-1) != 0  # the first of each group of equal tokens
        distinct = (new & (windows >= 0)).sum(axis=1)
        return hashes(ids)[distinct >= WORDS]

    def shared(self, ids: np.ndarray) -> np.ndarray:
        """Return the starts of the runs in a text that are in the set."""
        values = hashes(ids)
        candidates = np.flatnonzero(self.table[values >> np.uint64(64 - BUCKETS)])
        places = np.searchsorted(self.hashes, values[candidates])
        return (
            candidates[self.hashes[np.minimum(places, len(self) - 1)] == values[candidates]]
            if len(self)
            else candidates
        )

    def clean(self, texts: Sequence[str]) -> list[Kept]:
        """Return what remains of each document."""
        return [self.remains(text, ids) for text, ids in zip(texts, self.encode(texts), strict=True)]

    def remains(self, text: str, ids: np.ndarray) -> Kept:
        """Return what remains of a document with these tokens."""
        starts = self.shared(ids)
        if not len(starts):
            return Kept([(text, len(ids))], len(ids), runs=False)
        covered = np.unique(starts[:, None] + np.arange(RUN))
        if len(ids) <= SHORT or len(covered) > COPY * len(ids):
            return Kept([], len(ids), runs=True)
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        pieces = list(without_lines(text, [offsets[i] for i in covered]))
        counts = [len(ids) for ids in self.encode(pieces)]
        kept = [(piece, count) for piece, count in zip(pieces, counts, strict=True) if count >= LEAST]
        return Kept(kept, len(ids), runs=True)


def hashes(ids: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of every run of ten tokens."""
    ids = ids.astype(np.uint64)
    count = max(0, len(ids) - RUN + 1)
    values = np.zeros(count, np.uint64)
    for i in range(RUN):
        values = values * np.uint64(0x9E3779B97F4A7C15) + ids[i : i + count] + np.uint64(1)
    values ^= values >> np.uint64(32)
    return values * np.uint64(0xD6E8FEB86659FD93)


def without_lines(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield the parts of a text between the lines that these spans touch."""
    lines = text.splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in lines])
    hit = np.zeros(len(lines), bool)
    for start, end in spans:
        while start < end and text[start].isspace():  # a token may begin with the newlines before its line
            start += 1
        if start < end:
            hit[np.searchsorted(ends, start, "right") : np.searchsorted(ends, end - 1, "right") + 1] = True
    piece = ""
    for line, dropped in zip(lines, hit, strict=True):
        if not dropped:
            piece += line
        elif piece:
            yield piece.strip("\n")
            piece = ""
    if piece:
        yield piece.strip("\n")


def read_texts(path: Path) -> list[str]:
    """Return the texts of a benchmark: lines of JSON, or a text file. Files may be compressed (.gz, .xz).

    Lines of JSON have "text", or HumanEval's prompt, solution and suffix, which are joined. A file of WikiText (.raw,
    .tokens) is returned as it is and as plain text, because a corpus may have either form.

    Raises:
        InputError: The file cannot be read, or has no text.
    """
    name = path.name.removesuffix(path.suffix) if path.suffix in OPENERS else path.name
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            if name.endswith(".jsonl"):
                rows = [json.loads(line) for line in file if line.strip()]
                texts = list(dict.fromkeys(joined(row) for row in rows))
            else:
                content = file.read()
                texts = [content]
                if name.endswith((".raw", ".tokens")):
                    texts += detokenise.articles(content.splitlines())
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise InputError(f"cannot read {path}: {reason(error)}.") from error
    if not any(text.strip() for text in texts):
        raise InputError(f"{path} has no text. Lines of JSON need one of: {'; '.join(map(', '.join, FIELDS))}.")
    return texts


def joined(row: Any) -> str:
    """Return the text of a row of JSON, or "" if it has none."""
    fields = next((names for names in FIELDS if isinstance(row, dict) and names[0] in row), ())
    return "".join(str(row.get(name, "")) for name in fields)


def summary(results: Iterable[Kept]) -> Counter[str]:
    """Count documents and tokens that were dropped or cut."""
    counts: Counter[str] = Counter()
    for kept in results:
        lost = kept.tokens - sum(count for _, count in kept.pieces)
        action = "cut" if kept.pieces else "dropped"
        if kept.runs:
            counts.update({f"documents {action}": 1, f"tokens {action}": lost})
    return counts
