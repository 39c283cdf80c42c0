"""Where documents come from: files, folders of them, and data sets on the hub, by the names that users give.

A *source* is what the user names: `wiki.jsonl`, `test=heldout.txt`, `'shards/*.parquet'`, `fineweb`. It stands for
*parts*: one file each, or one split of a data set. A part is read from beginning to end, in batches.

| part | a document is | its number |
|---|---|---|
| `.txt` (also `.raw`, `.tokens`, as WikiText has them) | the whole file, of which pieces can be held out | 0 |
| `.jsonl` | a line: a JSON object, one field of which is the text | its line, from 0 |
| `.parquet`, or a split on the hub | a row, one column of which is the text | its row, from 0 |

Text files and `.jsonl` may be compressed (`.gz`, `.xz`, `.zst`). Where batches begin and end depends on the content of
the part alone, so that a place in it can be found again.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from acgpt.data.rows import (
    BATCH,
    COMPRESSED,
    Bad,
    Batch,
    Damaged,
    Reader,
    damaged,
    line_blocks,
    lines,
    optional,
    running_blocks,
    too_long,
)
from acgpt.errors import InputError

Item = TypeVar("Item")

FORMATS = {".txt": "txt", ".raw": "txt", ".tokens": "txt", ".jsonl": "jsonl", ".parquet": "parquet"}
READABLE = ".txt (also .raw, .tokens) and .jsonl, plain or with .gz, .xz or .zst after it, and .parquet"
SPLIT = re.compile(r"([a-z][a-z0-9_]*)=(.+)", re.DOTALL)
ROWS = 256  # rows in a batch, where their size is not known beforehand


# ---- parts ----------------------------------------------------------------------------------------------------------


class Part(Protocol):
    """What is read from beginning to end: a file, or a split of a data set."""

    @property
    def split(self) -> str:
        """The split of the corpus that it goes to."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def size(self) -> int:
        """Its size in bytes: on the disk, or about."""

    def describe(self) -> dict[str, Any]:
        """What it is and what identifies its content, for the manifest."""

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """What it holds from row `start` on, which must be where a batch begins."""


@dataclass(frozen=True)
class File:
    """A file on this machine."""

    split: str
    path: Path
    format: str

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    @property
    def size(self) -> int:
        """Its size on the disk."""
        return self.path.stat().st_size

    def describe(self) -> dict[str, Any]:
        """Its format, size and SHA-256, for which it is read once."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}.") from error
        return {"split": self.split, "name": self.name, "format": self.format, "bytes": self.size, "sha256": digest}

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """What it holds from row `start` on."""
        if self.format == "parquet":
            found = self.parquet(start, field)
        else:
            found = self.jsonl() if self.format == "jsonl" else self.text(convention)
        try:
            yield from (batch for batch in found if batch.first >= start)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}.") from error

    def jsonl(self) -> Iterator[Batch]:
        """Its lines."""
        reader, total = Reader(self.path), max(1, self.size)
        rows: list[bytes | Bad] = []
        number, size = 0, 0  # rows so far; bytes in `rows`

        def batch() -> Batch:
            first = number - len(rows)
            return Batch("jsonl", rows, first, number, first + 1, reader.read / total)

        try:
            for number, raw in enumerate(lines(reader), 1):
                rows.append(too_long(number) if raw is None else raw)
                size += len(raw or b"") + 1
                if size >= BATCH:
                    yield batch()
                    rows, size = [], 0
        except Damaged as error:
            number += 1
            rows.append(damaged(number, error))
        if rows:
            yield batch()

    def text(self, convention: str) -> Iterator[Batch]:
        """Its text, a block at a time; whole lines, where lines are what counts."""
        reader, total = Reader(self.path), max(1, self.size)

        def blocks() -> Iterator[tuple[int, int, bytes | Bad]]:
            line, at = 1, 0
            try:
                for block in line_blocks(reader) if convention == "lines" else running_blocks(reader):
                    yield line, at, too_long(line) if block is None else block
                    line += 1 if block is None else block.count(b"\n")
                    at += len(block or b"")
            except Damaged as error:
                yield line, at, damaged(line, error)

        for number, ((line, at, block), ends) in enumerate(with_last(blocks())):
            yield Batch("txt", [block], number, number + 1, line, reader.read / total, ends, at)

    def parquet(self, start: int, field: str) -> Iterator[Batch]:
        """The rows of its column `field`, one row group after the other; groups before row `start` are not read."""
        parquet = optional("pyarrow.parquet", ".parquet files")
        damage = (optional("pyarrow", ".parquet files").ArrowException, OSError, ValueError)

        def whole(why: str) -> Batch:
            return Batch("values", [Bad("as a whole", why, lost="the file")], 0, 1, done=1.0)

        try:
            file = parquet.ParquetFile(self.path, page_checksum_verification=True)
        except damage as error:
            yield whole(f"the file is damaged: {error}")
            return
        with file:
            if field not in file.schema_arrow.names:
                there = ", ".join(map(repr, file.schema_arrow.names))
                yield whole(f"it has no column {field!r} (its columns: {there}); `field` names another")
                return
            total = max(1, file.metadata.num_rows)
            number = 0
            for group in range(file.num_row_groups):
                end = number + file.metadata.row_group(group).num_rows
                if end <= start:
                    number = end
                    continue
                try:
                    for batch in file.iter_batches(ROWS, row_groups=[group], columns=[field]):
                        rows = batch.column(0).to_pylist()
                        yield Batch("values", rows, number, number + len(rows), done=number / total)
                        number += len(rows)
                except damage as error:
                    bad = Bad(f"rows {number + 1} to {end}", f"the file is damaged: {error}", end - number)
                    yield Batch("values", [bad], number, end, done=end / total)
                number = end


def with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Every item, and whether it is the last."""
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, False
            item = following
        yield item, True


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub that has a name here."""

    path: str
    config: str
    splits: tuple[str, ...]
    files: str  # where a split's files are on the hub
    convention: str
    streaming: bool
    rows: int | None = None  # the first so many
    validation: float = 0.0  # the share held out, where it has no validation split of its own
    bytes_a_row: int = 0  # about, to tell how much is left


NAMED = {
    "wikitext-103": Hub(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        splits=("train", "validation", "test"),
        files="wikitext-103-raw-v1/{split}-*.parquet",
        convention="lines",
        streaming=False,
    ),
    "fineweb": Hub(
        "HuggingFaceFW/fineweb",
        "sample-10BT",
        splits=("train",),
        files="sample/10BT/*.parquet",
        convention="documents",
        streaming=True,
        rows=1_500_000,
        validation=0.01,
        bytes_a_row=3_100,
    ),
}


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set on the hub, at one revision, so that going on later finds the same rows."""

    split: str
    title: str
    hub: Hub
    revision: str
    rows: int | None  # the first so many

    @property
    def name(self) -> str:
        """Its name here and its split."""
        return f"{self.title} ({self.split})"

    @property
    def size(self) -> int:
        """About, if its number of rows is known; else 0."""
        return (self.rows or 0) * self.hub.bytes_a_row

    def describe(self) -> dict[str, Any]:
        """Where it is on the hub, and which revision."""
        hub = {"path": self.hub.path, "config": self.hub.config, "revision": self.revision, "rows": self.rows}
        return {"split": self.split, "name": self.title, "format": "hub", **hub}

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """Its rows from number `start` on."""
        datasets = optional("datasets", "data sets from the hub")
        hub, number = self.hub, start
        try:
            options = {"split": self.split, "streaming": hub.streaming, "revision": self.revision}
            rows = datasets.load_dataset(hub.path, hub.config, trust_remote_code=False, **options)
            rows = rows.skip(start)
            if self.rows is not None and hub.streaming:
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
        except Exception as error:  # datasets, the hub, the network and pyarrow: each has its own
            raise unreachable(self.title, hub, error) from error


def unreachable(title: str, hub: Hub, error: Exception) -> InputError:
    """What to do where the hub does not answer."""
    files = {split: hub.files.format(split=split) for split in hub.splits}
    wanted = " ".join(f"--include '{pattern}'" for pattern in files.values())
    named = " ".join(f"{split}='DIR/{pattern}'" for split, pattern in files.items())
    options = f"--convention {hub.convention}"
    options += f" --limit {hub.rows}" * bool(hub.rows) + f" --validation {hub.validation}" * bool(hub.validation)
    return InputError(
        f"cannot read {hub.path} from the Hugging Face hub: {type(error).__name__}: {error}\n"
        "Check the connection; the same command goes on where it stopped. With HF_HUB_OFFLINE=1 in the environment, "
        "what is in the cache of this machine is used. Or fetch the files elsewhere:\n"
        f"  hf download --repo-type dataset {hub.path} {wanted} --local-dir DIR\n"
        f"and name them: acgpt prepare {named} {options} … (instead of {title})"
    )


# ---- from names to parts --------------------------------------------------------------------------------------------


def resolve(sources: Sequence[str], revisions: Mapping[str, str], limit: int | None = None) -> list[Part]:
    """The parts that the user's names stand for, in order.

    Args:
        sources: `[SPLIT=]NAME` each: a file, a folder, a glob, or a name in `NAMED`. Without a split, train; a named
            data set brings its own splits, and with one, that split alone.
        revisions: Of data sets on the hub, by path, where a revision has been chosen before.
        limit: On the documents of train; it goes before that of a named data set.
    """
    parts: list[Part] = []
    for source in sources:
        match = None if Path(source).exists() else SPLIT.fullmatch(source)
        split, name = (match[1], match[2]) if match else (None, source)
        if hub := NAMED.get(name):
            if split is not None and split not in hub.splits:
                raise InputError(f"{name} has no split {split!r}; its splits: {', '.join(hub.splits)}.")
            revision = revisions.get(hub.path) or latest(name, hub)
            wanted = [each for each in hub.splits if split in (None, each)]
            limits = {each: limit if each == "train" and limit is not None else hub.rows for each in wanted}
            parts += [HubSplit(each, name, hub, revision, limits[each]) for each in wanted]
        else:
            parts += [File(split or "train", path, format_of(path)) for path in files(name)]
    if not parts:
        raise InputError("no source: name files, folders or globs of them, or " + " or ".join(NAMED) + ".")
    seen: set[object] = set()
    for part in parts:
        key = part.path.resolve() if isinstance(part, File) else (part.name, part.split)
        if key in seen:
            raise InputError(f"{part.name} is named twice among the sources: name it once.")
        seen.add(key)
    return parts


def latest(title: str, hub: Hub) -> str:
    """The newest revision of a data set; "main", whatever that is in the cache, if the user wants no connection."""
    optional("datasets", "data sets from the hub")  # before a network that may be slow
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "main"
    try:
        return str(huggingface_hub.dataset_info(hub.path).sha)
    except Exception as error:  # the network's, the hub's
        raise unreachable(title, hub, error) from error


def files(name: str) -> list[Path]:
    """The files that a path or a glob stands for, sorted; of a folder, all those in it that can be read."""
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        found = sorted(Path(each) for each in glob.glob(name, recursive=True) if Path(each).is_file())
        if not found:
            raise InputError(f"there is no file, folder or glob {name}. Data sets with a name: {', '.join(NAMED)}.")
        return found
    visible = [file for file in path.rglob("[!.]*") if not any(step[0] == "." for step in file.relative_to(path).parts)]
    found = sorted(file for file in visible if file.is_file() and known_format(file))
    formats = Counter(format_of(file) for file in found)
    if not formats:
        raise InputError(f"the folder {name} holds none of the files that can be read: {READABLE}.")
    if len(formats) > 1:
        counts = ", ".join(f"{count} {each}" for each, count in formats.items())
        raise InputError(f"the folder {name} holds files of several kinds ({counts}): name those you mean, or a glob.")
    return found


def known_format(path: Path) -> str | None:
    """txt, jsonl or parquet, by the name; `None` if it is none of them."""
    name = path.name.lower()
    ending = next((ending for ending in COMPRESSED if name.endswith(ending)), "")
    found = FORMATS.get(Path(name.removesuffix(ending)).suffix)
    return None if ending and found == "parquet" else found


def format_of(path: Path) -> str:
    """txt, jsonl or parquet, by the name."""
    if (found := known_format(path)) is None:
        raise InputError(f"{path}: files of this kind cannot be read; those that can: {READABLE}.")
    return found
