"""Sources of documents: files, folders, and datasets on the Hugging Face hub.

A *source* is what the user names: `wiki.jsonl`, `test=heldout.txt`, `'shards/*.parquet'`, `fineweb`. It resolves to
*parts*: single files, or splits of a dataset. A part is read from beginning to end, in batches.

| part | a document is | its number |
|---|---|---|
| `.txt` (also `.raw`, `.tokens`, as in WikiText) | the whole file, of which pieces can be held out | 0 |
| `.jsonl` | a line: a JSON object, one field of which is the text | its line, from 0 |
| `.parquet`, or a split on the hub | a row, one column of which is the text | its row, from 0 |

Text files and `.jsonl` may be compressed (`.gz`, `.xz`, `.zst`). The boundaries of batches depend only on the content
of the part, so that reading can be resumed at any of them.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acgpt.data.rows import COMPRESSED, ROWS, Batch, file_batches, optional, parquet_batches
from acgpt.errors import InputError

FORMATS = {".txt": "txt", ".raw": "txt", ".tokens": "txt", ".jsonl": "jsonl", ".parquet": "parquet"}
READABLE = ".txt (also .raw, .tokens) and .jsonl, also compressed (.gz, .xz, .zst), and .parquet"
SPLIT = re.compile(r"([a-z][a-z0-9_]*)=(.+)", re.DOTALL)


# ---- parts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file on this machine."""

    split: str
    path: Path
    format: str

    @property
    def name(self) -> str:
        """Path of the file."""
        return str(self.path)

    @property
    def size(self) -> int:
        """Size on disk, in bytes."""
        return self.path.stat().st_size

    def describe(self) -> dict[str, Any]:
        """Return its format, size and SHA-256, for which the file is read once."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}.") from error
        return {"split": self.split, "name": self.name, "format": self.format, "bytes": self.size, "sha256": digest}

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """Yield its batches.

        Args:
            start: Row or byte to start at, which must be the first of a batch.
            field: Name of the field or column that holds the text.
            convention: "lines" or "documents".
        """
        running = self.format == "txt" and convention == "documents"
        parquet = self.format == "parquet"
        batches = parquet_batches(self.path, start, field) if parquet else file_batches(self.path, self.format, running)
        try:
            yield from (batch for batch in batches if batch.first >= start)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}.") from error


@dataclass(frozen=True)
class HubSplit:
    """A split of a dataset on the Hugging Face hub, at a fixed revision, so that a resumed run reads the same rows.

    Args:
        title: Name of the dataset here.
        path: Path of the dataset on the hub.
        config: Its configuration there.
        convention: "lines" or "documents".
        streaming: Read rows without downloading all of them first.
        rows: Maximum number of rows to read.
        validation: Share to hold out, if the dataset has no validation split.
        bytes_per_row: An estimate, for progress.
        split: The split.
        revision: The revision.
    """

    title: str
    path: str
    config: str
    convention: str
    streaming: bool
    rows: int | None = None
    validation: float = 0.0
    bytes_per_row: int = 0
    split: str = "train"
    revision: str = ""

    @property
    def name(self) -> str:
        """Name of the dataset and the split."""
        return f"{self.title} ({self.split})"

    @property
    def size(self) -> int:
        """An estimate in bytes, if the number of rows is known; else 0."""
        return (self.rows or 0) * self.bytes_per_row

    def describe(self) -> dict[str, Any]:
        """Return its path and revision on the hub."""
        hub = {"path": self.path, "config": self.config, "revision": self.revision, "rows": self.rows}
        return {"split": self.split, "name": self.title, "format": "hub", **hub}

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """Yield its batches from row `start` on."""
        datasets = optional("datasets", "datasets from the hub")
        number = start
        try:
            options = {"split": self.split, "streaming": self.streaming, "revision": self.revision}
            rows = datasets.load_dataset(self.path, self.config, trust_remote_code=False, **options)
            rows = rows.skip(start)
            if self.rows is not None and self.streaming:
                rows = rows.take(self.rows - start)
            for group in rows.iter(ROWS):
                if field not in group:
                    raise InputError(f"{self.name} has no field {field!r}; its fields: {', '.join(group)}.")
                values = group[field]
                done = number / self.rows if self.rows else 0.0
                yield Batch("values", values, number, number + len(values), done=done)
                number += len(values)
        except InputError:
            raise
        except Exception as error:  # datasets, huggingface_hub, the network and pyarrow have no common error
            raise unreachable(self.path, error) from error


Part = File | HubSplit  # read from beginning to end

WIKITEXT = HubSplit("wikitext-103", "Salesforce/wikitext", "wikitext-103-raw-v1", convention="lines", streaming=False)
FINEWEB = HubSplit(
    "fineweb",
    "HuggingFaceFW/fineweb",
    "sample-10BT",
    convention="documents",
    streaming=True,
    rows=1_500_000,
    validation=0.01,
    bytes_per_row=3_100,
)
NAMED = {
    "wikitext-103": [replace(WIKITEXT, split=split) for split in ("train", "validation", "test")],
    "fineweb": [FINEWEB],
}


def unreachable(path: str, error: Exception) -> InputError:
    """Return the error for a dataset that cannot be read from the hub, with other ways to get it."""
    return InputError(
        f"cannot read {path} from the Hugging Face hub: {type(error).__name__}: {error}\n"
        "Check the connection; the same command resumes where it stopped. With HF_HUB_OFFLINE=1 in the environment, "
        "the Hugging Face cache of this machine is used. Or download the files on another machine, and use them as "
        "sources: docs/how-to/prepare.md has the commands."
    )


# ---- from names to parts --------------------------------------------------------------------------------------------


def resolve(sources: Sequence[str], revisions: Mapping[str, str], limit: int | None = None) -> list[Part]:
    """Resolve sources to parts, in order.

    Args:
        sources: Each is `[SPLIT=]NAME`, where NAME is a file, a folder, a glob, or a name in `NAMED`. The default split
            is train; of a named dataset, all its splits, or only the given one.
        revisions: Revisions of hub datasets by path, if an earlier run has fixed them.
        limit: Maximum number of documents of train; it overrides that of a named dataset.
    """
    parts: dict[object, Part] = {}
    for source in sources:
        match = None if Path(source).exists() else SPLIT.fullmatch(source)
        split, name = (match[1], match[2]) if match else (None, source)
        for part in hub_splits(name, split, revisions, limit) if name in NAMED else files(name, split or "train"):
            key = part.path.resolve() if isinstance(part, File) else (part.name, part.split)
            if key in parts:
                raise InputError(f"{part.name} is twice among the sources: name it once.")
            parts[key] = part
    if not parts:
        raise InputError("there are no sources: name files, folders, globs, or " + " or ".join(NAMED) + ".")
    return list(parts.values())


def hub_splits(name: str, split: str | None, revisions: Mapping[str, str], limit: int | None) -> list[HubSplit]:
    """Return the splits of a named dataset, or only the given one; see `resolve`."""
    parts = [part for part in NAMED[name] if split in (None, part.split)]
    if not parts:
        raise InputError(f"{name} has no split {split!r}; its splits: {', '.join(part.split for part in NAMED[name])}.")
    revision = revisions.get(parts[0].path) or latest(parts[0].path)
    rows = {"train": limit} if limit is not None else {}
    return [replace(part, revision=revision, rows=rows.get(part.split, part.rows)) for part in parts]


def latest(path: str) -> str:
    """Return the newest revision of a dataset on the hub; offline "main", which is the revision in the cache."""
    optional("datasets", "datasets from the hub")  # checked before the network, which may be slow
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "main"
    try:
        return str(huggingface_hub.dataset_info(path).sha)
    except Exception as error:  # the network and the hub have no common error
        raise unreachable(path, error) from error


def files(name: str, split: str) -> list[File]:
    """Return the files of a path or a glob, sorted; of a folder, all readable files in it."""
    path = Path(name)
    if path.is_dir():
        visible = [file for file in path.rglob("*") if not any(p[0] == "." for p in file.relative_to(path).parts)]
        paths = sorted(file for file in visible if file.is_file() and format_of(file))
        missing = f"the folder {name} contains no readable file: use {READABLE}."
    else:
        paths = [path] if path.is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
        missing = f"no file, folder or glob matches {name}: name one, or one of the datasets {', '.join(NAMED)}."
    parts = [File(split, file, format_of(file)) for file in paths if file.is_file()]
    if not parts:
        raise InputError(missing)
    if unknown := [part.name for part in parts if not part.format]:
        raise InputError(f"{unknown[0]} has an unknown format: use {READABLE}.")
    formats = Counter(part.format for part in parts)
    if path.is_dir() and len(formats) > 1:
        counts = ", ".join(f"{count} {format}" for format, count in formats.items())
        raise InputError(f"the folder {name} contains files of several formats ({counts}): select some with a glob.")
    return parts


def format_of(path: Path) -> str:
    """Return the format of a file by its name: txt, jsonl or parquet; "" for other files."""
    name = path.name.lower()
    compression = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    format = FORMATS.get(Path(name.removesuffix(compression)).suffix, "")
    return "" if compression and format == "parquet" else format
