"""What a power failure would leave: files and folders as they were when they were last synced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Disk:
    """A record of what this process syncs and renames.

    Args:
        synced: Size of each file, or names in each folder, when it was last synced; by device and inode.
        renamed: New path of each renamed file or folder, with the paths in it that were not synced since they changed.
        before_rename: Called with each new path before the renaming.
    """

    synced: dict[tuple[int, int], Any] = field(default_factory=dict)
    renamed: list[tuple[Path, list[Path]]] = field(default_factory=list)
    before_rename: Callable[[Path], object] = lambda path: None

    def lost(self, path: Path) -> list[Path]:
        """Return what a power failure might take of a file; or of a folder, and of all in it."""
        every = [path, *sorted(path.rglob("*"))]
        return [each for each in every if self.synced.get(identity(each)) != extent(each)]


def identity(file: int | Path) -> tuple[int, int]:
    """Return what identifies a file or folder under every name."""
    status = os.stat(file)
    return status.st_dev, status.st_ino


def extent(file: int | Path) -> Any:
    """Return the size of a file, which only grows in what acgpt writes; or the names in a folder."""
    status = os.stat(file)
    return sorted(os.listdir(file)) if stat.S_ISDIR(status.st_mode) else status.st_size


def watched_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Record what `os.fsync`, `os.rename` and `os.replace` do until the end of the test."""
    disk = Disk()

    def sync(fsync: Callable[[int], None], descriptor: int) -> None:
        fsync(descriptor)
        disk.synced[identity(descriptor)] = extent(descriptor)

    def move(rename: Callable[[Any, Any], None], source: Any, target: Any) -> None:
        disk.before_rename(Path(target))
        disk.renamed.append((Path(target), disk.lost(Path(source))))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", partial(sync, os.fsync))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, partial(move, getattr(os, name)))
    return disk
