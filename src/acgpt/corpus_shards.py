"""Shards out: the tokens of a split, appended to files that are whole or absent, whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from acgpt.corpus import Shard
from acgpt.errors import InputError

# All that a preparation ever writes into its folder.
OURS = re.compile(r"[a-z][a-z0-9_]*-\d{5,}\.bin(\.part)?|(corpus|journal)\.json(\.tmp)?|tokenizer(\.part)?")
JOURNAL = "journal.json"
BEGIN_AGAIN = "Begin again with --overwrite."


@dataclass
class Share:
    """What a batch adds to a split."""

    tokens: NDArray[Any]
    documents: int
    bytes: int


def sync_folder(folder: Path) -> None:
    """Make sure that renamed files keep their names, where folders can be synced."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    """Write a file whole or not at all, and to the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


@dataclass
class Writer:
    """Appends the tokens of one split to its shards."""

    folder: Path
    split: str
    dtype: str
    capacity: int  # tokens in a shard
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)
    partial: int = 0  # tokens in the unfinished shard
    file: BinaryIO | None = None
    digest: Any = None

    @property
    def tokens(self) -> int:
        """Of all shards, the unfinished one too."""
        return sum(shard.tokens for shard in self.shards) + self.partial

    @property
    def path(self) -> Path:
        """Of the unfinished shard, when it is finished."""
        return self.folder / f"{self.split}-{len(self.shards):05}.bin"

    @property
    def part(self) -> Path:
        """Of the unfinished shard, now."""
        return self.path.with_suffix(".bin.part")

    def state(self) -> dict[str, Any]:
        """For the journal."""
        shards = [asdict(shard) for shard in self.shards]
        return {"documents": self.documents, "bytes": self.bytes, "shards": shards, "partial": self.partial}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state: cut the unfinished shard to what it had then, and forget what came after."""
        self.documents, self.bytes, self.partial = state["documents"], state["bytes"], state["partial"]
        self.shards = [Shard(**shard) for shard in state["shards"]]
        for shard in self.shards:
            check_shard(self.folder, shard, self.dtype)
        if not self.part.exists() and self.path.exists():  # it was finished after the journal was written
            self.path.rename(self.part)
        kept = {self.part.name, *(shard.file for shard in self.shards)}
        for file in self.folder.glob(f"{self.split}-*"):
            if OURS.fullmatch(file.name) and file.name not in kept:
                file.unlink()
        if self.partial:
            size = self.partial * np.dtype(self.dtype).itemsize
            if not self.part.exists() or self.part.stat().st_size < size:
                raise InputError(f"{self.part} is not what was written. Begin again with --overwrite.")
            os.truncate(self.part, size)
        elif self.part.exists():
            self.part.unlink()

    def write(self, share: Share) -> None:
        """Append what a batch holds."""
        self.documents += share.documents
        self.bytes += share.bytes
        tokens = share.tokens
        while len(tokens):
            if self.file is None:
                self.file = self.part.open("ab")
                self.digest = hashlib.sha256(self.part.read_bytes())
            taken, tokens = np.split(tokens, [self.capacity - self.partial])
            raw = taken.tobytes()
            self.file.write(raw)
            self.digest.update(raw)
            self.partial += len(taken)
            if self.partial == self.capacity:
                self.finish()

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Give the unfinished shard, if there is one, its name."""
        if not self.partial:
            return
        if self.file is None:  # nothing was added since an interruption
            self.file = self.part.open("ab")
            self.digest = hashlib.sha256(self.part.read_bytes())
        self.sync()
        self.file.close()
        self.part.rename(self.path)
        self.shards.append(Shard(self.path.name, self.partial, self.digest.hexdigest()))
        self.file, self.partial = None, 0


def check_shard(folder: Path, shard: Shard, dtype: str) -> None:
    """A finished shard is as it was written."""
    path = folder / shard.file
    if not path.is_file() or path.stat().st_size != shard.tokens * np.dtype(dtype).itemsize:
        raise InputError(f"{path} is not what was written. Begin again with --overwrite.")
