"""Token shards on disk, and the journal from which an interrupted preparation resumes.

Tokens are appended to `train-00007.bin.part`; a full shard is synced to disk and renamed. `journal.json` stores the
state after a batch: the position in the sources, and for each split its finished shards and the number of tokens in its
unfinished shard. It is replaced atomically, after the tokens have been synced. A resumed run truncates the files to the
state of the journal, so the result is the same, byte for byte. `corpus.json` is written last: a folder that has one is
complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from acgpt.common.files import locked, write_json
from acgpt.data.corpus import JOURNAL, MANIFEST, Shard, check_shard
from acgpt.errors import InputError

# Names of all files that a preparation writes.
OURS = re.compile(r"[a-z][a-z0-9_]*-\d{5,}\.bin(\.part)?|(corpus|journal)\.json(\.tmp)?|tokenizer(\.part)?")


# ---- one split ------------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What a batch adds to a split: tokens, the number of documents that end in it, and bytes of text."""

    tokens: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint16))
    documents: int = 0
    bytes: int = 0


@dataclass
class Writer:
    """A writer of the tokens of one split to shards of `capacity` tokens; the last shard may be shorter."""

    folder: Path
    split: str
    dtype: str
    capacity: int
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)
    partial: int = 0  # tokens in the unfinished shard

    def __post_init__(self) -> None:
        self.file: BinaryIO | None = None
        self.digest = hashlib.sha256()

    @property
    def tokens(self) -> int:
        """Number of tokens of all shards, including the unfinished one."""
        return sum(shard.tokens for shard in self.shards) + self.partial

    @property
    def path(self) -> Path:
        """Final path of the unfinished shard."""
        return self.folder / f"{self.split}-{len(self.shards):05}.bin"

    @property
    def part(self) -> Path:
        """Current path of the unfinished shard, with the suffix `.part`."""
        return self.path.with_suffix(".bin.part")

    def write(self, share: Share) -> None:
        """Append what a batch adds."""
        self.documents += share.documents
        self.bytes += share.bytes
        tokens = share.tokens
        while len(tokens):
            head, tokens = np.split(tokens, [self.capacity - self.partial])
            raw = head.tobytes()
            self.open().write(raw)
            self.digest.update(raw)
            self.partial += len(head)
            if self.partial == self.capacity:
                self.finish()

    def open(self) -> BinaryIO:
        """Open the unfinished shard for appending, unless it is open."""
        if self.file is None:
            self.digest = hashlib.sha256(self.part.read_bytes() if self.partial else b"")
            self.file = self.part.open("ab" if self.partial else "wb")
        return self.file

    def sync(self) -> None:
        """Sync the unfinished shard to disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Rename the unfinished shard, if any, to its final path."""
        if self.partial:
            with self.open():
                self.sync()
            self.part.rename(self.path)
            self.shards.append(Shard(self.path.name, self.partial, self.digest.hexdigest()))
            self.file, self.partial = None, 0

    def close(self) -> None:
        """Close the unfinished shard. Tokens that are not synced are not in the journal either."""
        if self.file is not None:
            with suppress(OSError):  # a full disk, which has been reported
                self.file.close()

    def state(self) -> dict[str, Any]:
        """Return the state for the journal."""
        shards = [asdict(shard) for shard in self.shards]
        return {"documents": self.documents, "bytes": self.bytes, "shards": shards, "partial": self.partial}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a state of the journal: truncate what was written after it, and check the shards before it."""
        self.documents, self.bytes, self.partial = state["documents"], state["bytes"], state["partial"]
        self.shards = [Shard(**shard) for shard in state["shards"]]
        for shard in self.shards:
            check_shard(self.folder, shard, self.dtype)
        if self.path.exists():  # the shard was finished after the journal was written
            self.path.rename(self.part)
        if self.partial:
            size = self.partial * np.dtype(self.dtype).itemsize
            if not self.part.exists() or self.part.stat().st_size < size:
                raise InputError(f"{self.part} is missing or too short. Start again with `overwrite=True`.")
            os.truncate(self.part, size)


# ---- the folder -----------------------------------------------------------------------------------------------------


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create and lock a folder. The lock is released when the process ends, even by a crash.

    After an `InputError` before the first token is written, nothing is left that was not there.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as lock:
        if lock is None:
            raise InputError(f"another process is preparing {folder}: wait for it, or choose another folder.")
        new = not any(folder.iterdir())
        try:
            yield
        except InputError:
            if new and not any(folder.glob("*.bin*")):
                clear(folder)
                (folder / JOURNAL).unlink(missing_ok=True)
                with suppress(OSError):  # another process has written to one of them
                    for path in created:
                        path.rmdir()
            raise


def read_previous(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished run, or the journal of an unfinished one; `None` for a new or empty folder."""
    needed = {MANIFEST: {"recipe", "skipped", "splits"}, JOURNAL: {"recipe", "skipped", "splits", "position"}}
    for name, keys in needed.items():
        path = folder / name
        if path.exists():
            try:
                content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                if missing := sorted(keys - {*content}):
                    raise ValueError(f"it lacks {', '.join(missing)}")
            except ValueError as error:
                raise InputError(f"{path} is damaged: {error}. Choose another folder, or delete this one.") from error
            return content
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder: choose one that is new or empty.")
    others = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if others and others != [f"{JOURNAL}.tmp"]:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise InputError(f"{folder} contains other files ({names}): choose a folder that is new or empty.")
    return None


def begin(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Write an empty journal and remove the files of an earlier corpus, in an order that may be interrupted.

    Returns:
        The journal.
    """
    journal = {"recipe": identity, "position": [0, 0], "skipped": [0] * len(identity["sources"]), "splits": {}}
    write_json(folder / JOURNAL, journal, ensure_ascii=False, locked=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    clear(folder)
    return journal


def clear(folder: Path) -> None:
    """Remove the files of a preparation but its journal, without which the others would be taken for the user's."""
    for file in list(folder.iterdir()):
        if OURS.fullmatch(file.name) and file.name != JOURNAL:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()
