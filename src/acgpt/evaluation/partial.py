"""Partial files of generations, MODE.jsonl.part: the groups that have been sampled so far.

    the config                   one line; samples of another config are not appended
    the samples of a group       one line per sample, as in the final file (see `generations`)
    the costs of the group       one line: seconds, seconds of the model, calls, and a hash of these and the samples
    the samples of the next …

A group is written at once. When the part is opened again, everything after the last complete group is cut off; so is a
group whose hash does not match.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, dropwhile
from pathlib import Path
from typing import Any, BinaryIO

from acgpt.common.files import locked
from acgpt.errors import InputError
from acgpt.evaluation.generations import as_line, record_of

CONFIG_PREFIX = b'{"mode": "'  # of every config line
COSTS = ("seconds", "model_seconds", "calls")  # keys of a group's closing line


@dataclass(frozen=True)
class Group:
    """Samples that are drawn together: the same sample numbers of several texts.

    Args:
        items: Numbers of the texts.
        samples: Numbers of the samples.
        owners: If several texts share one query: for each sample, the text it belongs to.
    """

    items: tuple[int, ...]
    samples: range
    owners: tuple[int, ...] = ()

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Number of the text and number of the sample, for every sample."""
        if self.owners:
            return list(zip(self.owners, self.samples, strict=True))
        return [(item, sample) for item in self.items for sample in self.samples]


@dataclass
class Part:
    """The complete groups of a partial file.

    Args:
        file: Open for reading and appending; read up to `end`.
        end: Offset of the end of the last complete group.
        offsets: Offset of each sample's line.
        tokens: Number of sampled tokens in the groups that were read.
        costs: Sum of the costs of all groups.
    """

    file: BinaryIO
    end: int
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: int = 0
    costs: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0))

    def resume(self, groups: Sequence[Group]) -> list[Group]:
        """Read the complete groups, in this order, truncate the file after them, and return the remaining groups."""
        remaining = list(dropwhile(self.read, groups))
        self.file.truncate(self.end)
        return remaining

    def read(self, group: Group) -> bool:
        """Read a group if it comes next in the file and is intact; return whether it does."""
        *lines, last = [self.file.readline() for _ in range(len(group.keys) + 1)]
        try:
            costs = json.loads(last)
            if last != closing_line(lines, costs):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):  # an incomplete line, or one damaged by an editor
            return False
        keys, tokens = [], 0
        for line in lines:
            sample = json.loads(line)
            keys.append((sample["item"], sample["sample"]))
            tokens += len(sample["log_probs"])
        if keys != group.keys:
            return False
        self.tokens += tokens
        self.count(group, costs, [*lines, last])
        return True

    def add(self, group: Group, samples: Sequence[bytes], costs: Mapping[str, float]) -> None:
        """Append a group and flush it to disk.

        Args:
            group: The group.
            samples: One line per sample.
            costs: What the group took, by the keys `COSTS`.
        """
        lines = [*samples, closing_line(samples, costs)]
        self.file.write(b"".join(lines))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.count(group, costs, lines)

    def count(self, group: Group, costs: Mapping[str, float], lines: Sequence[bytes]) -> None:
        """Register the group at the end of the file."""
        *starts, _, self.end = accumulate(map(len, lines), initial=self.end)
        self.offsets.update(zip(group.keys, starts, strict=True))
        for key in COSTS:
            self.costs[key] += costs[key]

    def lines(self) -> Iterator[bytes]:
        """Yield the samples in the order of the texts."""
        for key in sorted(self.offsets):
            self.file.seek(self.offsets[key])
            yield self.file.readline()


def closing_line(samples: Iterable[bytes], costs: Mapping[str, float]) -> bytes:
    """Return the last line of a group: its costs and a hash."""
    numbers = {key: costs[key] for key in COSTS}
    digest = hashlib.sha256()
    for line in (*samples, as_line(numbers)):
        digest.update(line)
    return as_line({**numbers, "sha256": digest.hexdigest()})


@contextlib.contextmanager
def open_part(path: Path, config: Mapping[str, Any]) -> Iterator[Part]:
    """Open or create a partial file, and lock it against other processes.

    Raises:
        InputError: The file has another config, is not a partial file, or is locked by another process.
    """
    with locked(path) as lock, path.open("a+b") as file:
        if lock is None:
            raise InputError(f"another process is writing {path}: wait for it, or choose another `output`.")
        file.seek(0)
        first = file.readline()
        existing = parse_config(path, first)
        if existing is not None:
            check_config(path, existing, config)
        else:  # an empty file, or an incomplete first line
            first = as_line(config)
            file.truncate(0)
            file.write(first)
            file.flush()
        yield Part(file, len(first))


def existing_config(path: Path) -> dict[str, Any] | None:
    """Return the config of a record or of a partial file; `None` if there is none yet."""
    if path.suffix == ".json":
        record = existing_record(path)
        return None if record is None else dict(record["config"])
    if not path.exists():
        return None
    with path.open("rb") as file:
        return parse_config(path, file.readline())


def parse_config(path: Path, first: bytes) -> dict[str, Any] | None:
    """Return the config in the first line of a partial file; `None` if the line is incomplete or empty.

    Raises:
        InputError: The file is not a partial file of generations.
    """
    if not first.endswith(b"\n") and first[: len(CONFIG_PREFIX)] == CONFIG_PREFIX[: len(first)]:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(first)
        if isinstance(config, dict) and "method" in config:
            return config
    raise InputError(f"{path} is not a partial file of generations: delete it, or choose another folder.")


def existing_record(path: Path) -> dict[str, Any] | None:
    """Return the record of generations; `None` if there is none yet.

    Raises:
        InputError: The file is not a record of generations.
    """
    if not path.exists():
        return None
    record = None
    with contextlib.suppress(InputError):
        record = record_of(path)
    if record is None or not isinstance(record.get("config"), dict):
        raise InputError(
            f"{path} is not a record of generations. Move or delete it to sample the mode again, or choose another "
            "folder."
        )
    return record


def check_config(path: Path, existing: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to resume a file of another config, and name the differences.

    Args:
        path: The record or partial file, for the error.
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
