"""Documents in: from files, folders of files, or a data set on the hub, in batches of bounded size.

A *source* is what the user names: `wiki.jsonl`, `test=heldout.txt`, `'shards/*.parquet'`, `fineweb`. It resolves to
*parts*: one file each, or one split of a data set. A part is read from beginning to end as `Batch`es that still hold raw
rows, so that reading stays cheap; `Batch.documents` parses them, in whichever process has the time.

    source ──► parts ──► batches of raw rows ──► documents, or what is wrong with a row
    (a name)   (files)   (in order, about 1 MB)  (anywhere)

| file | a document is | its number |
|---|---|---|
| `.txt`, `.raw`, `.tokens` | the whole file | 0 |
| `.jsonl` | a line: an object, one field of which is the text | its line, from 0 |
| `.parquet`, the hub | a row, one column of which is the text | its row, from 0 |

Text files and `.jsonl` may be compressed (`.gz`, `.xz`, `.zst`). Everything is UTF-8; nothing in a text is changed. Where
batches begin and end depends on the file alone, so a position can be found again.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from acgpt.errors import InputError

TEXT = (".txt", ".raw", ".tokens")  # the last two: as WikiText names its files
FORMATS = {**dict.fromkeys(TEXT, "txt"), ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSED = (".gz", ".xz", ".zst")
READABLE = ".txt (also .raw, .tokens) and .jsonl, plain or with .gz, .xz or .zst after it, and .parquet"
CONVENTIONS = ("lines", "documents")
SPLIT = re.compile(r"([a-z][a-z0-9_]*)=(.+)", re.DOTALL)

READ = 1 << 16  # bytes read at a time; what a compressed file makes of them is held in memory
BATCH = 1 << 20  # bytes of text in a batch, about
ROWS = 256  # rows in a batch, where their size is not known beforehand
CUT = 1 << 14  # bytes before the end of a batch in which to look for a good place to cut a long text
LONGEST = 1 << 26  # bytes in a row: a file without line ends must not fill the memory


# ---- what is read ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A document, or a piece of one that is too long to hold: `begins` and `ends` say where it stands in it."""

    number: int
    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Bad:
    """A row that cannot be used: where it stands ("line 7") and why."""

    where: str
    why: str


@dataclass(frozen=True)
class Batch:
    """Rows of one part, as they were read.

    Args:
        format: "txt" (one row: a block of the text), "jsonl" (a line a row), or "values".
        rows: Bytes for "txt" and "jsonl", any value for "values"; `Bad` for what could not even be read.
        first: The number of the first row.
        next: The number of the row after this batch: where to go on.
        line: The first row's line, counted from 1, where the part has lines.
        done: How much of the part has been read, from 0 to 1.
        ends: Does the part end here?
    """

    format: str
    rows: list[Any]
    first: int
    next: int
    line: int = 0
    done: float = 0.0
    ends: bool = False

    def documents(self, field: str) -> Iterator[Document | Bad]:
        """The documents, in order, and what is wrong with the rows that hold none."""
        if self.format == "txt":
            yield from self.text(self.rows[0])
            return
        for index, row in enumerate(self.rows):
            if isinstance(row, Bad):
                yield row
            elif self.format == "values":
                yield checked(row, self.first + index, f"row {self.first + index + 1}", field)
            elif row.strip():
                yield parse_json(row, self.first + index, f"line {self.line + index}", field)

    def text(self, block: bytes | Bad) -> Iterator[Document | Bad]:
        """A block of a text file, without those of its lines that are not UTF-8."""
        text: list[str] = []
        if isinstance(block, Bad):
            yield block
        else:
            for line, raw in enumerate(block.split(b"\n"), self.line):
                try:
                    text.append(decode(raw, line))
                except UnicodeDecodeError as error:
                    yield Bad(f"line {line}", not_utf8(error))
        yield Document(0, "\n".join(text), begins=self.first == 0, ends=self.ends)


def decode(raw: bytes, line: int) -> str:
    """UTF-8; the mark that some editors put at the beginning of a file is no text."""
    return raw.decode("utf-8-sig" if line == 1 else "utf-8")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Why bytes are no text."""
    return f"byte {error.start + 1} of it is not UTF-8 (for Latin-1, iconv -f latin1 -t utf-8 converts the file)"


def parse_json(raw: bytes, number: int, where: str, field: str) -> Document | Bad:
    """One line of a `.jsonl` file."""
    try:
        content = json.loads(decode(raw, number + 1))
    except UnicodeDecodeError as error:
        return Bad(where, not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Bad(where, f"it is not JSON: {error}")
    if not isinstance(content, dict):
        return Bad(where, f"it is not a JSON object, as in {{{json.dumps(field)}: …}}")
    if field not in content:
        there = ", ".join(map(repr, content)) or "none"
        return Bad(where, f"it has no field {field!r} (its fields: {there}); --field names another")
    return checked(content[field], number, where, field)


def checked(text: object, number: int, where: str, field: str) -> Document | Bad:
    """The document, if it is one, and can be written as UTF-8: JSON can name half a character."""
    if not isinstance(text, str):
        return Bad(where, f"its {field!r} is {'null' if text is None else 'a ' + type(text).__name__}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad(where, f"character {error.start + 1} of its text is half of a surrogate pair")
    return Document(number, text)


# ---- bytes, lines, blocks -------------------------------------------------------------------------------------------


class Damaged(Exception):
    """What is on the disk is not what was written."""


@dataclass
class Reader:
    """The bytes of a file, decompressed, a block at a time; `read` counts those taken from the disk."""

    path: Path
    read: int = 0

    def __iter__(self) -> Iterator[bytes]:
        suffix = self.path.suffix.lower()
        make = decompressor(suffix) if suffix in COMPRESSED else None
        stream: Any = None
        with self.path.open("rb") as file:
            while raw := file.read(READ):
                self.read += len(raw)
                if make is None:
                    yield raw
                    continue
                while raw := raw if stream else raw.lstrip(b"\0"):  # zeros pad what stands between two streams
                    stream = stream or make()
                    try:
                        block = stream.decompress(raw)
                    except Exception as error:  # each library has its own
                        raise Damaged(f"it cannot be decompressed ({error})") from error
                    if block:
                        yield block
                    raw, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
            if stream is not None:
                raise Damaged("it ends too early")


def decompressor(suffix: str) -> Callable[[], Any]:
    """What makes a decompressor for files of that name; each reads one stream, to its end (`eof`)."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(31)
    if suffix == ".xz":
        return lzma.LZMADecompressor
    if sys.version_info >= (3, 14):
        from compression.zstd import ZstdDecompressor

        return ZstdDecompressor
    zstandard = optional("zstandard", ".zst files")
    return lambda: zstandard.ZstdDecompressor().decompressobj()


def optional(module: str, what: str) -> Any:
    """A module that only some sources need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(
            f"reading {what} takes the package {package}, which is not installed: pip install 'acgpt[data]'"
        ) from error


def lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Lines, without their ends; `None` for one that is too long to hold."""
    held: list[bytes] = []
    size = 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for line in ended:
            yield b"".join([*held, line]) if size <= LONGEST else None
            held, size = [], 0
        size += len(rest)
        held = [*held, rest] if size <= LONGEST else []
    if size:
        yield b"".join(held) if size <= LONGEST else None


def line_blocks(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Whole lines, about a batch of them at a time; `None` for one that is too long to hold."""
    held: list[bytes] = []
    size = 0
    for line in lines(blocks):
        if line is not None:
            held.append(line + b"\n")
            size += len(held[-1])
        if held and (line is None or size >= BATCH):
            yield b"".join(held)
            held, size = [], 0
        if line is None:
            yield None
    if held:
        yield b"".join(held)


def running_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Running text, about a batch at a time, cut where byte-level tokenizers split anyway."""
    text = b""
    for block in blocks:
        text += block
        while len(text) >= 2 * BATCH:
            cut = cut_before(text, BATCH)
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def cut_before(text: bytes, limit: int) -> int:
    """Where to cut a text into pieces so that their tokens are those of the whole.

    Before white space that follows a letter, which is where the byte-level tokenizers (GPT-2's, Llama 3's, Qwen's)
    always split; where there is no such place, before a line end, or else between two characters.
    """
    if found := re.match(rb"(?s).*[A-Za-z](?=\s)", text[limit - CUT : limit + 1]):
        return limit - CUT + found.end()
    if (line := text.rfind(b"\n", limit - CUT, limit)) > 0:
        return line
    while 0x80 <= text[limit] < 0xC0:  # inside a character
        limit -= 1
    return limit


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
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"split": self.split, "name": self.name, "format": self.format, "bytes": self.size, "sha256": digest}

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """What it holds from row `start` on."""
        found = {
            "txt": lambda: self.text(convention),
            "jsonl": self.jsonl,
            "parquet": lambda: self.parquet(start, field),
        }[self.format]()
        try:
            yield from (batch for batch in found if batch.first >= start)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}.") from error

    def jsonl(self) -> Iterator[Batch]:
        """Its lines."""
        reader, total = Reader(self.path), max(1, self.size)
        rows: list[bytes | Bad] = []
        number, size = 0, 0  # of all rows; of the bytes in `rows`
        try:
            for number, raw in enumerate(lines(reader), 1):
                rows.append(too_long(number) if raw is None else raw)
                size += len(raw or b"") + 1
                if size >= BATCH:
                    first = number - len(rows)
                    yield Batch("jsonl", rows, first, number, first + 1, reader.read / total)
                    rows, size = [], 0
        except Damaged as error:
            number += 1
            rows.append(Bad(f"line {number}", f"the file is damaged from here on: {error}"))
        first = number - len(rows)
        yield Batch("jsonl", rows, first, number, first + 1, 1.0, ends=True)

    def text(self, convention: str) -> Iterator[Batch]:
        """Its text by the block, one after the other: whole lines where they are what counts."""
        reader, total = Reader(self.path), max(1, self.size)
        line = 1
        held: bytes | Bad = b""
        number = 0
        blocks = line_blocks(reader) if convention == "lines" else running_blocks(reader)

        def batch(ends: bool) -> Batch:
            return Batch("txt", [held], number, number + 1, line, reader.read / total, ends)

        try:
            for block in blocks:
                if held:
                    yield batch(ends=False)
                    number += 1
                    line += 1 if isinstance(held, Bad) else held.count(b"\n")
                held = too_long(line) if block is None else block
        except Damaged as error:
            if held:
                yield batch(ends=False)
                number += 1
                line += 1 if isinstance(held, Bad) else held.count(b"\n")
            held = Bad(f"line {line}", f"the file is damaged from here on: {error}")
        yield batch(ends=True)

    def parquet(self, start: int, field: str) -> Iterator[Batch]:
        """The rows of its column `field`, one row group after the other; groups before row `start` are not read."""
        parquet = optional("pyarrow.parquet", ".parquet files")
        damage = (optional("pyarrow", ".parquet files").ArrowException, OSError, ValueError)

        def whole(why: str) -> Batch:
            return Batch("values", [Bad("as a whole", why)], 0, 1, done=1.0, ends=True)

        try:
            file = parquet.ParquetFile(self.path)
        except damage as error:
            yield whole(f"the file is damaged: {error}")
            return
        with file:
            if field not in file.schema_arrow.names:
                there = ", ".join(map(repr, file.schema_arrow.names))
                yield whole(f"it has no column {field!r} (its columns: {there}); --field names another")
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
                    bad = Bad(f"rows {number + 1} to {end}", f"the file is damaged: {error}")
                    yield Batch("values", [bad], number, end, done=end / total)
                number = end


def too_long(line: int) -> Bad:
    """A line that would fill the memory."""
    return Bad(f"line {line}", f"it is longer than {LONGEST >> 20} MB")


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub that has a name here."""

    path: str
    config: str
    splits: tuple[str, ...]
    convention: str
    streaming: bool
    rows: int | None = None  # the first so many
    validation: float = 0.0  # the share held out, where it has no validation split of its own
    bytes_a_row: int = 0  # about, to tell how much is left


NAMED = {
    "wikitext-103": Hub(
        "Salesforce/wikitext", "wikitext-103-raw-v1", ("train", "validation", "test"), "lines", streaming=False
    ),
    "fineweb": Hub(
        "HuggingFaceFW/fineweb",
        "sample-10BT",
        ("train",),
        "documents",
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

    @property
    def name(self) -> str:
        """Its name here and its split."""
        return f"{self.title} ({self.split})"

    @property
    def size(self) -> int:
        """About, if its number of rows is known; else 0."""
        return (self.hub.rows or 0) * self.hub.bytes_a_row

    def describe(self) -> dict[str, Any]:
        """Where it is on the hub, and which revision."""
        hub = {"path": self.hub.path, "config": self.hub.config, "revision": self.revision, "rows": self.hub.rows}
        return {"split": self.split, "name": self.title, "format": "hub", **hub}

    def batches(self, start: int, field: str, convention: str) -> Iterator[Batch]:
        """Its rows from number `start` on."""
        datasets = optional("datasets", "data sets from the hub")
        hub, number = self.hub, start
        try:
            options = {"split": self.split, "streaming": hub.streaming, "revision": self.revision}
            rows = datasets.load_dataset(hub.path, hub.config, **options)
            rows = rows.skip(start)
            if hub.rows is not None:
                rows = rows.take(hub.rows - start)
            for group in rows.iter(ROWS):
                if field not in group:
                    raise InputError(f"{self.name} has no field {field!r}; its fields: {', '.join(group)}.")
                values = group[field]
                done = number / hub.rows if hub.rows else 0.0
                yield Batch("values", values, number, number + len(values), done=done)
                number += len(values)
        except InputError:
            raise
        except Exception as error:  # datasets, the hub, the network and pyarrow: each has its own
            raise unreachable(self.title, hub, error) from error


def unreachable(title: str, hub: Hub, error: Exception) -> InputError:
    """What to do where the hub does not answer."""
    files = " ".join(f"{split}='DIR/{hub.config}/{split}-*.parquet'" for split in hub.splits)
    return InputError(
        f"cannot read {hub.path} from the Hugging Face hub: {type(error).__name__}: {error}\nCheck the connection; the "
        "same command goes on where it stopped. Where there is no connection, fetch the files elsewhere with hf "
        f"download --repo-type dataset {hub.path} --include '{hub.config}/*' --local-dir DIR, and name them instead "
        f"of {title}: {files} --convention {hub.convention}"
    )


# ---- from names to parts --------------------------------------------------------------------------------------------


def resolve(sources: Sequence[str], revisions: Mapping[str, str]) -> list[Part]:
    """The parts that the user's names stand for, in order.

    Args:
        sources: `[SPLIT=]NAME` each: a file, a folder, a glob, or a name in `NAMED`. Without a split, train; a named
            data set brings its own splits, and with one, that split alone.
        revisions: Of data sets on the hub, by path, where a revision has been chosen before.
    """
    parts: list[Part] = []
    for source in sources:
        match = None if Path(source).exists() else SPLIT.fullmatch(source)
        split, name = (match[1], match[2]) if match else (None, source)
        if hub := NAMED.get(name):
            if split is not None and split not in hub.splits:
                raise InputError(f"{name} has no split {split!r}; its splits: {', '.join(hub.splits)}.")
            revision = revisions.get(hub.path) or latest(name, hub)
            parts += [HubSplit(each, name, hub, revision) for each in hub.splits if split in (None, each)]
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
    """The newest revision of a data set."""
    optional("datasets", "data sets from the hub")  # before a network that may be slow
    from huggingface_hub import dataset_info

    try:
        return str(dataset_info(hub.path).sha)
    except Exception as error:  # the network's, the hub's
        raise unreachable(title, hub, error) from error


def files(name: str) -> list[Path]:
    """The files that a path or a glob stands for, sorted; of a folder, all those in it that can be read."""
    path = Path(name)
    if path.is_file():
        format_of(path)
        return [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and suffix_of(file)]
        found = [file for file in found if not any(step.startswith(".") for step in file.relative_to(path).parts)]
        formats = Counter(format_of(file) for file in found)
        if len(formats) > 1:
            counts = ", ".join(f"{count} {each}" for each, count in formats.items())
            raise InputError(
                f"the folder {name} holds files of several kinds ({counts}): name those you mean, or a glob."
            )
    else:
        found = sorted(Path(each) for each in glob.glob(name, recursive=True) if Path(each).is_file())
    if not found:
        if path.is_dir():
            raise InputError(f"the folder {name} holds none of the files that can be read: {READABLE}.")
        also = "" if path.exists() else f" Data sets with a name: {', '.join(NAMED)}."
        raise InputError(f"there is no file, folder or glob {name}.{also}")
    return found


def suffix_of(path: Path) -> str | None:
    """The ending that says what a file holds: ".txt", ".jsonl"…; `None` if there is no such."""
    name = path.name.lower()
    for ending in COMPRESSED:
        if name.endswith(ending):
            found = Path(name.removesuffix(ending)).suffix
            return found if FORMATS.get(found) in ("txt", "jsonl") else None
    found = Path(name).suffix
    return found if found in FORMATS else None


def format_of(path: Path) -> str:
    """txt, jsonl or parquet, by the name."""
    if (suffix := suffix_of(path)) is None:
        raise InputError(f"{path}: files of this kind cannot be read; those that can: {READABLE}.")
    return FORMATS[suffix]
