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
    """A writer of the tokens of one split, which goes on from the state of a journal.

    Args:
        folder: Folder of the corpus.
        split: Name of the split.
        dtype: Data type of the tokens.
        capacity: Tokens per shard; the last shard may have fewer.
        state: Entry of the split in the journal and in the manifest, which `write` and `finish` change. Its `tokens`
            include those of the unfinished shard.
    """

    folder: Path
    split: str
    dtype: str
    capacity: int
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.file: BinaryIO | None = None
        shards = [Shard(**shard) for shard in self.state["shards"]]
        for shard in shards:
            check_shard(self.folder, shard, self.dtype)
        self.partial = self.state["tokens"] - sum(shard.tokens for shard in shards)  # tokens in the unfinished shard
        if self.path.exists():  # the shard was finished after the journal was written
            self.path.rename(self.part)
        if self.partial:
            size = self.partial * np.dtype(self.dtype).itemsize
            if not self.part.exists() or self.part.stat().st_size < size:
                raise InputError(f"{self.part} is missing or too short. Start again with `overwrite=True`.")
            os.truncate(self.part, size)

    @property
    def path(self) -> Path:
        """Final path of the unfinished shard."""
        return self.folder / f"{self.split}-{len(self.state['shards']):05}.bin"

    @property
    def part(self) -> Path:
        """Current path of the unfinished shard, with the suffix `.part`."""
        return self.path.with_suffix(".bin.part")

    def write(self, share: Share) -> None:
        """Append what a batch adds."""
        tokens = share.tokens
        self.state["documents"] += share.documents
        self.state["tokens"] += len(tokens)
        self.state["bytes"] += share.bytes
        while len(tokens):
            head, tokens = np.split(tokens, [self.capacity - self.partial])
            self.file = self.file or self.part.open("ab" if self.partial else "wb")
            self.file.write(head.tobytes())
            self.partial += len(head)
            if self.partial == self.capacity:
                self.finish()

    def sync(self) -> None:
        """Sync the unfinished shard to disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Rename the unfinished shard, if any, to its final path."""
        if self.partial:
            self.sync()
            self.close()
            with self.part.open("rb") as file:
                shard = Shard(self.path.name, self.partial, hashlib.file_digest(file, "sha256").hexdigest())
            self.part.rename(self.path)
            self.state["shards"].append(asdict(shard))
            self.file, self.partial = None, 0

    def close(self) -> None:
        """Close the unfinished shard. Tokens that are not synced are not in the journal either."""
        if self.file is not None:
            with suppress(OSError):  # a full disk, which has been reported
                self.file.close()


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
    journal_keys = {"recipe", "position", "taken", "outcomes", "splits"}
    for path, keys in {folder / MANIFEST: {"recipe", "skipped", "splits"}, folder / JOURNAL: journal_keys}.items():
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
    outcomes = [{"skipped": 0, "damaged": None} for _ in identity["sources"]]
    journal = {"recipe": identity, "position": [0, 0], "taken": 0, "outcomes": outcomes, "splits": {}}
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
