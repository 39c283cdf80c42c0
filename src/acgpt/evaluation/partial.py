"""A file of generations as far as it has been drawn: MODE.jsonl.part, in whole groups.

    the configuration            one line: what it is a part of; with another, nothing is added
    the samples of a group       a line each, as in the file that is made of them (see `generated`)
    what the group took          one line: seconds, seconds of the model, calls, and a hash of these and the samples
    the samples of the next …

A group is written at once. What follows the last whole one is cut off when the part is opened again, and so is a group
that is not what was written.
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

from acgpt.common.files import try_lock
from acgpt.errors import InputError
from acgpt.evaluation.generations import as_line, record_of

BEGINS = b'{"mode": "'  # every configuration
TOOK = ("seconds", "model_seconds", "calls")  # what a group says of itself


@dataclass(frozen=True)
class Group:
    """What is drawn together: these samples of each of these texts.

    Args:
        items: The numbers of the texts.
        samples: Those of the samples.
        owners: Of a text that asks the same as others, which of them has each sample.
    """

    items: tuple[int, ...]
    samples: range
    owners: tuple[int, ...] = ()

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The text and the number of every sample."""
        if self.owners:
            return list(zip(self.owners, self.samples, strict=True))
        return [(item, sample) for item in self.items for sample in self.samples]


@dataclass
class Part:
    """What has been drawn of a file, in whole groups.

    Args:
        file: Open to be added to, and read as far as `end`.
        end: Of the last whole group.
        places: Where in the file the line of each sample begins.
        tokens: That were drawn in the groups that have been read.
        took: What all groups took together.
    """

    file: BinaryIO
    end: int
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: int = 0
    took: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOOK, 0))

    def resume(self, groups: Sequence[Group]) -> list[Group]:
        """Read the groups that are there, in this order, cut off what follows them, and return those that are left."""
        left = list(dropwhile(self.read, groups))
        self.file.truncate(self.end)
        return left

    def read(self, group: Group) -> bool:
        """Is this group the next, and as it was written? Then it counts."""
        *lines, last = [self.file.readline() for _ in range(len(group.keys) + 1)]
        try:
            took = json.loads(last)
            if last != closing(lines, took):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):  # half a line, or what a crash or an editor has left
            return False
        keys, drawn = [], 0
        for line in lines:
            sample = json.loads(line)
            keys.append((sample["item"], sample["sample"]))
            drawn += len(sample["log_probs"])
        if keys != group.keys:
            return False
        self.tokens += drawn
        self.count(group, took, [*lines, last])
        return True

    def add(self, group: Group, samples: Sequence[bytes], took: Mapping[str, float]) -> None:
        """Write a group, its samples as lines, and have the disk hold it."""
        lines = [*samples, closing(samples, took)]
        self.file.write(b"".join(lines))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.count(group, took, lines)

    def count(self, group: Group, took: Mapping[str, float], lines: Sequence[bytes]) -> None:
        """Note a group that stands at the end."""
        *starts, _, self.end = accumulate(map(len, lines), initial=self.end)
        self.places.update(zip(group.keys, starts, strict=True))
        for key in TOOK:
            self.took[key] += took[key]

    def lines(self) -> Iterator[bytes]:
        """The samples in the order of the texts."""
        for key in sorted(self.places):
            self.file.seek(self.places[key])
            yield self.file.readline()


def closing(samples: Iterable[bytes], took: Mapping[str, float]) -> bytes:
    """The last line of a group of samples."""
    numbers = {key: took[key] for key in TOOK}
    digest = hashlib.sha256()
    for line in (*samples, as_line(numbers)):
        digest.update(line)
    return as_line({**numbers, "sha256": digest.hexdigest()})


@contextlib.contextmanager
def opened(path: Path, config: Mapping[str, Any]) -> Iterator[Part]:
    """The part of a file that has been drawn, or a new one; nobody else can open it meanwhile.

    Raises:
        InputError: It is a part of something else, or no part at all, or another process has opened it.
    """
    with path.open("a+b") as file:
        if not try_lock(file):
            raise InputError(f"another process is drawing {path}: wait for it, or name another folder with `output`.")
        file.seek(0)
        first = file.readline()
        there = config_of(path, first)
        if there is not None:
            same(path, there, config)
        else:  # nothing, or half a line
            first = as_line(config)
            file.truncate(0)
            file.write(first)
            file.flush()
        yield Part(file, len(first))


def config_in(path: Path) -> dict[str, Any] | None:
    """The configuration that a record, or a part of a file, was made with; `None` if there is none yet."""
    if path.suffix == ".json":
        record = record_in(path)
        return None if record is None else dict(record["config"])
    if not path.exists():
        return None
    with path.open("rb") as file:
        return config_of(path, file.readline())


def config_of(path: Path, first: bytes) -> dict[str, Any] | None:
    """The configuration in the first line of a part; `None` of half a line or none. What is no part is refused."""
    if not first.endswith(b"\n") and first[: len(BEGINS)] == BEGINS[: len(first)]:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        there = json.loads(first)
        if isinstance(there, dict) and "method" in there:
            return there
    raise InputError(f"{path} is no part of generations: delete it, or name another folder.")


def record_in(path: Path) -> dict[str, Any] | None:
    """The record of generations; `None` if there is none yet. Another file of its name is refused."""
    if not path.exists():
        return None
    record = None
    with contextlib.suppress(InputError):
        record = record_of(path)
    if record is None or not isinstance(record.get("config"), dict):
        raise InputError(
            f"{path} is no record of generations: move it elsewhere or delete it, and the mode is drawn again; or name "
            "another folder."
        )
    return record


def same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to go on with what was begun otherwise, and say what differs."""

    def shown(key: str, value: object) -> str:
        return value[:8] if key in ("set", "weights") and isinstance(value, str) else f"{value!r:.60}"

    differ = [
        f"{key} {shown(key, there.get(key))}, and not {shown(key, here.get(key))}"
        + (" (other texts, or another number, length, r_max or seed of them)" if key == "set" else "")
        for key in dict.fromkeys((*here, *there))
        if there.get(key) != here.get(key)
    ]
    if differ:
        raise InputError(
            f"{path} was drawn with {'; '.join(differ)}. Name another folder with `output`, or delete {path.parent}."
        )
