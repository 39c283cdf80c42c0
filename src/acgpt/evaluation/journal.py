"""Journals: the finished part of an evaluation or generation, from which it resumes after it was stopped or killed.

    {"journal": {…}}                        the config: a journal of another config is not continued
    {"item": 3, …}                          the entries of a batch: JSON objects, one per line
    {"item": 1, …}
    {"sha256": …, "seconds": …}             the end of the batch: a hash of the file so far, and what the batch took
    {"item": 0, …}                          the next batch …

A journal only grows, by a batch at a time, and is locked while it is open. When it is opened again, everything after
the last intact batch is cut off: a kill loses the batch that was being written, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from acgpt.common.files import locked
from acgpt.errors import InputError

HEAD, END = b'{"journal": ', b'{"sha256": '  # beginnings of the first line, and of the last line of a batch
# Characters that end a line for Python's splitlines, but not for JSON.
LINE_SEPARATORS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@dataclass
class Journal:
    """An open journal.

    Args:
        file: Open for reading and appending; read up to `end`.
        end: Offset of the end of the last batch.
        digest: Hash of the file up to there.
        offsets: Offset of each entry.
        costs: Sums of what the batches took.
    """

    file: BinaryIO
    end: int
    digest: hashlib._Hash
    offsets: list[int] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)

    def recover(self) -> None:
        """Read the intact batches, and cut off what follows them."""
        lines: list[bytes] = []
        for line in self.file:
            lines.append(line)
            if line.startswith(END):
                try:
                    costs = {key: value for key, value in json.loads(line).items() if key != "sha256"}
                    intact = lines == self.batch(lines[:-1], costs)
                except (ValueError, RecursionError):  # incomplete, or damaged by an editor
                    break
                if not intact:
                    break
                self.count(lines, costs)
                lines = []
        self.file.truncate(self.end)

    def add(self, entries: Sequence[bytes], costs: Mapping[str, float]) -> None:
        """Append a batch and flush it to disk.

        Args:
            entries: One line per entry, see `as_line`.
            costs: What the batch took, for example seconds.

        Raises:
            OSError: The batch cannot be written. What was written of it is cut off, so that results have the space.
        """
        lines = self.batch(entries, costs)
        try:
            self.file.write(b"".join(lines))
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file.fileno(), self.end)
            raise
        self.count(lines, costs)

    def batch(self, entries: Sequence[bytes], costs: Mapping[str, float]) -> list[bytes]:
        """Return the lines of the next batch."""
        digest = self.digest.copy()
        digest.update(b"".join([*entries, as_line(costs)]))
        return [*entries, as_line({"sha256": digest.hexdigest(), **costs})]

    def count(self, lines: Sequence[bytes], costs: Mapping[str, float]) -> None:
        """Register the batch at the end of the file."""
        self.digest.update(b"".join(lines))
        *starts, _, self.end = accumulate(map(len, lines), initial=self.end)
        self.offsets += starts
        for key, value in costs.items():
            self.costs[key] = self.costs.get(key, 0) + value

    def entries(self, order: Iterable[int] | None = None) -> Iterator[bytes]:
        """Yield the entries of these numbers, in this order. Default: all."""
        for number in range(len(self.offsets)) if order is None else order:
            self.file.seek(self.offsets[number])
            yield self.file.readline()


@contextlib.contextmanager
def open_journal(path: Path, config: Mapping[str, Any], *, replace: bool = False) -> Iterator[Journal]:
    """Open or create a journal, lock it against other processes, and recover its intact batches.

    Args:
        path: Path of the journal. The folder is created if needed.
        config: Everything that determines the entries.
        replace: Start over if the file has another config or is no journal, instead of refusing it.

    Raises:
        InputError: The file has another config, is no journal, or is locked by another process.
    """
    head = as_line({"journal": config})
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path) as lock, path.open("a+b") as file:
        if lock is None:
            raise InputError(f"another process is writing {path}: wait for it, or choose another `output`.")
        file.seek(0)
        first = file.readline()
        existing = None if replace and first != head else parse_config(path, first)
        if existing is None:
            file.truncate(0)
            file.write(head)
            file.flush()
        elif first != head:
            check_config(path, existing, config)
            head = first
        journal = Journal(file, len(head), hashlib.sha256(head))
        journal.recover()
        yield journal


def continues(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a file is a journal of this config."""
    with path.open("rb") as file:
        return file.readline() == as_line({"journal": config})


def journal_config(path: Path) -> dict[str, Any] | None:
    """Return the config of a journal; `None` if there is none yet.

    Raises:
        InputError: The file is no journal.
    """
    if not path.exists():
        return None
    with path.open("rb") as file:
        return parse_config(path, file.readline())


def parse_config(path: Path, first: bytes) -> dict[str, Any] | None:
    """Return the config in the first line of a journal; `None` if the line is incomplete or empty."""
    if not first.endswith(b"\n") and first[: len(HEAD)] == HEAD[: len(first)]:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(first)
        if isinstance(content, dict) and isinstance(content.get("journal"), dict):
            return dict(content["journal"])
    raise InputError(f"{path} is not a partial file of acgpt: delete it, or choose another `output`.")


def check_config(path: Path, existing: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to go on with a file of another config, and name the differences.

    Args:
        path: The journal, or the record of a complete file, for the error.
        existing: Its config.
        config: The requested config.
    """

    def shown(key: str, value: object) -> str:
        return value[:8] if key in ("set", "weights") and isinstance(value, str) else f"{value!r:.60}"

    differences = [
        f"{key} {shown(key, existing.get(key))}, and not {shown(key, config.get(key))}"
        + (" (other texts, or another number, length, r_max or seed of them)" if key == "set" else "")
        for key in dict.fromkeys((*config, *existing))
        if existing.get(key) != config.get(key)
    ]
    if differences:
        raise InputError(
            f"{path} was sampled with {'; '.join(differences)}. Choose another `output`, or delete {path.parent}."
        )


def as_line(content: Mapping[str, Any]) -> bytes:
    """Return JSON on a single line, by every definition of a line separator."""
    line = json.dumps(content, ensure_ascii=False, allow_nan=False)
    for char, escape in LINE_SEPARATORS.items():
        line = line.replace(char, escape)
    return (line + "\n").encode()
