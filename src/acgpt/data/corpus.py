"""A prepared corpus: a folder of token shards and their tokenizer, for training and evaluation.

    corpus.json         the manifest: contents and sources
    tokenizer/          the tokenizer, as `save_pretrained` writes it
    train-00000.bin     tokens, raw: little-endian uint16 (uint32 if the vocabulary needs it), no header
    train-00001.bin …   a split is the concatenation of its shards

    >>> corpus = Corpus.open("data/wiki")          # doctest: +SKIP
    >>> tokens = corpus.tokens("train")            # doctest: +SKIP
    >>> tokens.chunk(7, 1023)                      # doctest: +SKIP

Shards are memory-mapped when they are first read. `acgpt prepare` (`acgpt.data.prepare`) writes such folders; this
module only reads them, and needs only numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acgpt.errors import InputError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "corpus.json"
JOURNAL = "journal.json"  # exists while a corpus is being prepared
TOKENIZER = "tokenizer"
FORMAT_VERSION = 1
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
AGAIN = "Prepare the corpus again: acgpt prepare … --overwrite."
TITLE = re.compile(r"\s*= [^=](.*[^=])? =\s*")  # of a WikiText article; headings of its sections have more signs
LONGEST_TITLE = 64  # tokens of a line that may be a title


@dataclass(frozen=True)
class Shard:
    """A file of tokens."""

    file: str
    tokens: int
    sha256: str

    def __post_init__(self) -> None:
        if self.file in ("", "..") or Path(self.file).name != self.file:
            raise ValueError(f"the shard {self.file!r} is not a file of its own folder")


def check_size(path: Path, tokens: int, dtype: str) -> None:
    """Check that a shard exists and has the expected number of tokens."""
    expected = tokens * np.dtype(DTYPES[dtype]).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"the shard {path} cannot be read: {error.strerror}. {AGAIN}") from error
    if size != expected:
        raise InputError(f"the shard {path} has {size:,} bytes instead of {expected:,}. {AGAIN}")


def check_shard(folder: Path, shard: Shard, dtype: str) -> None:
    """Check the size and the SHA-256 of a shard."""
    check_size(folder / shard.file, shard.tokens, dtype)
    with (folder / shard.file).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
            raise InputError(f"the shard {folder / shard.file} is damaged: its SHA-256 differs. {AGAIN}")


@dataclass(frozen=True)
class Split:
    """The contents of a split: numbers of documents, tokens (with EOS) and bytes of UTF-8 text, and the shards."""

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the corpus in a folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers have no common error
        raise InputError(f"cannot load the tokenizer in {folder / TOKENIZER}: {reason(error)}. {AGAIN}") from error


class Corpus:
    """A corpus written by `acgpt prepare`. Open one with `Corpus.open`."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.splits: dict[str, Split] = {
            name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
            for name, split in manifest["splits"].items()
        }

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Corpus:
        """Open the corpus in a folder; only its manifest is read."""
        path = Path(folder) / MANIFEST
        if Path(folder).is_file():
            raise InputError(
                f"{folder} is a file, not a prepared corpus: prepare it with acgpt prepare {folder} -o FOLDER."
            )
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            unfinished = (Path(folder) / JOURNAL).exists()
            remedy = (
                "its preparation is unfinished: repeat the command"
                if unfinished
                else "prepare one with acgpt prepare SOURCE -o FOLDER"
            )
            raise InputError(f"{folder} is not a prepared corpus (there is no {path}); {remedy}.") from error
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {error}. {AGAIN}") from error
        try:
            if (version := manifest["format_version"]) <= FORMAT_VERSION:
                return cls(Path(folder), manifest)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged ({type(error).__name__}: {error}). {AGAIN}") from error
        raise InputError(
            f"{path} has format version {version}; this acgpt reads up to {FORMAT_VERSION}. Upgrade acgpt."
        )

    @property
    def hash(self) -> str:
        """Hash of the tokenizer, the convention and the shards, which does not depend on where or when it was made."""
        shards = {name: [shard.sha256 for shard in split.shards] for name, split in sorted(self.splits.items())}
        content = [self.manifest["tokenizer_hash"], self.manifest["dtype"], self.manifest["convention"], shards]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the corpus."""
        return tokenizer_in(self.folder)

    def tokens(self, split: str) -> Tokens:
        """Return the tokens of a split as one long sequence."""
        if split not in self.splits:
            raise InputError(f"{self.folder} has no split {split!r}; its splits: {', '.join(self.splits)}.")
        shards = self.splits[split].shards
        files, counts = [self.folder / shard.file for shard in shards], [shard.tokens for shard in shards]
        return Tokens(files, counts, self.manifest["dtype"])

    def document_starts(self, split: str, end: int) -> NDArray[np.int64] | None:
        """Return the tokens with which documents begin, in order, among the first `end` tokens of a split; 0 is one.

        Where EOS ends every document, one begins after each EOS. Where EOS ends every line, one begins with each title
        of WikiText, ` = Title = `.

        Returns:
            (documents,) positions; `None` where documents are not known: lines without titles, pieces of one file that
            were held out as if they were documents, and a manifest that names no EOS.
        """
        tokens, eos = self.tokens(split)[: end + LONGEST_TITLE], self.manifest.get("eos_token_id")
        pieces = (self.manifest.get("recipe") or {}).get("piece") and split in ("train", "validation")
        if eos is None or pieces:
            return None
        starts = np.concatenate([[0], np.flatnonzero(tokens[:-1] == eos) + 1])
        lengths = np.diff(starts, append=len(tokens))
        if self.manifest["convention"] != "documents":
            short = starts[lengths <= LONGEST_TITLE]
            lines = [tokens[start : start + LONGEST_TITLE] for start in short]
            texts = self.tokenizer().batch_decode([line[: (np.append(line, eos) == eos).argmax()] for line in lines])
            titles = [start for start, text in zip(short, texts, strict=True) if TITLE.fullmatch(text)]
            if not titles:
                return None
            starts = np.union1d([0], titles)
        return starts[starts < end]

    def verify(self) -> None:
        """Check every shard against its SHA-256, at about a gigabyte per second.

        Raises:
            InputError: A shard is missing or damaged; the error names it.
        """
        for split in self.splits.values():
            for shard in split.shards:
                check_shard(self.folder, shard, self.manifest["dtype"])

    def summary(self) -> dict[str, Any]:
        """Return the manifest without its lists of files, for JSON."""
        splits = {name: asdict(split) | {"shards": len(split.shards)} for name, split in self.splits.items()}
        manifest = {key: value for key, value in self.manifest.items() if key not in ("sources", "recipe")}
        return {"folder": str(self.folder), "hash": self.hash, **manifest, "splits": splits}

    def __repr__(self) -> str:
        splits = ", ".join(f"{name}: {split.tokens:,} tokens" for name, split in self.splits.items())
        return f"Corpus({str(self.folder)!r}, {splits})"


class Tokens:
    """The tokens of a split as one sequence over its memory-mapped shards.

    It can be pickled for other processes; each process maps the files itself.
    """

    def __init__(self, files: Sequence[Path], counts: Sequence[int], dtype: str) -> None:
        self.files, self.dtype = list(files), DTYPES[dtype]
        self.ends = list(accumulate(counts))
        self.maps: dict[int, NDArray[Any]] = {}
        for file, count in zip(files, counts, strict=True):
            check_size(file, count, dtype)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: slice) -> NDArray[np.int64]:
        """Return `tokens[start:stop]` as int64 in memory; bounds beyond the ends are clipped, as for a list."""
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise InputError("tokens cannot be sliced with a step: use tokens[start:stop].")
        tokens = np.empty(max(0, stop - start), np.int64)
        position = start
        while position < stop:
            shard = bisect_right(self.ends, position)
            first = self.ends[shard - 1] if shard else 0
            end = min(stop, self.ends[shard])
            tokens[position - start : end - start] = self.shard(shard)[position - first : end - first]
            position = end
        return tokens

    def holds(self, token: int | None) -> bool:
        """Return whether a token occurs."""
        return any((self.shard(number) == token).any() for number in range(len(self.files)))

    def chunks(self, length: int) -> int:
        """Return the number of whole chunks of `length` tokens; the remainder is not used."""
        if length < 1:
            raise InputError(f"a chunk must have at least one token, not {length}.")
        return len(self) // length

    def chunk(self, i: int, length: int) -> NDArray[np.int64]:
        """Return chunk `i`, from 0: tokens `i * length` up to `(i + 1) * length`."""
        if not 0 <= i < self.chunks(length):
            raise IndexError(f"chunk {i} of {self.chunks(length)} (of {length} tokens each)")
        return self[i * length : (i + 1) * length]

    def shard(self, i: int) -> NDArray[Any]:
        """Return shard `i`, memory-mapped."""
        if i not in self.maps:
            self.maps[i] = np.memmap(self.files[i], self.dtype, "r")
        return self.maps[i]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"maps": {}}

    def __repr__(self) -> str:
        return f"Tokens({len(self):,} in {len(self.files)} shards)"
