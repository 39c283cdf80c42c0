"""Raw rows: read files in batches of bounded size, and parse their rows.

Reading is cheap and is done in order, by one process: bytes become lines or blocks of text, and these a `Batch`.
Decoding and parsing are expensive, and are done by the worker processes (`acgpt.data.encode`).

Everything is UTF-8, and texts are not changed. An unusable row becomes a `Bad`, which says where it is and why it is
unusable; the caller decides what to do about it.
"""

from __future__ import annotations

import importlib
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acgpt.errors import InputError

COMPRESSED = (".gz", ".xz", ".zst")
READ = 1 << 16  # bytes per read from a plain file
READ_COMPRESSED = 1 << 10  # bytes per read from a compressed file: they may expand a thousandfold
BATCH = 1 << 20  # approximate bytes of text per batch
ROWS = 256  # rows per batch, if their size is not known in advance
CUT = 1 << 14  # a long text is cut within this number of bytes before the end of a batch
LONGEST = 1 << 26  # maximum bytes per row: a file without line ends must not fill the memory


@dataclass(frozen=True)
class Bad:
    """One or more unusable rows.

    Args:
        where: Position in the part, such as "line 7".
        why: What is wrong.
        rows: Number of rows.
        lost: What is unusable, if it is more than these rows: "the rest of the file".
    """

    where: str
    why: str
    rows: int = 1
    lost: str = ""


@dataclass(frozen=True)
class Batch:
    """Raw rows of one part.

    Args:
        format: "txt" (lines with their ends, or a block of text), "jsonl" (lines without), or "values".
        rows: Bytes for "txt" and "jsonl", any value for "values"; `Bad` for rows that could not be read.
        first: Number of the first row, or of the first byte of a text.
        next: Number of the row or byte after this batch, where reading is resumed.
        line: Line of the first row, from 1, if the part has lines.
        done: Share of the part that has been read, from 0 to 1.
        ends: Whether the part ends with this batch; known of text only.
    """

    format: str
    rows: list[Any]
    first: int
    next: int
    line: int = 0
    done: float = 0.0
    ends: bool = False

    @property
    def count(self) -> int:
        """Number of documents, usable or not; a text file is one document, counted in its last batch."""
        return int(self.ends) if self.format == "txt" else self.next - self.first

    def head(self, count: int) -> Batch:
        """Return a batch of at most the first `count` documents."""
        return self if self.count <= count else replace(self, rows=self.rows[:count], next=self.first + count)


# ---- parsing --------------------------------------------------------------------------------------------------------


def decode(raw: bytes, line: int) -> str | Bad:
    """Decode a line as UTF-8, without the byte order mark that some editors write at the beginning of a file."""
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        why = f"byte {error.start + 1} of it is not UTF-8 (to convert Latin-1: iconv -f latin1 -t utf-8)"
        return Bad(f"line {line}", why)


def parse_json(raw: bytes, line: int, field: str) -> str | Bad:
    """Return the text in a field of a line of a `.jsonl` file; "" for a blank line."""
    if not raw.strip():
        return ""
    where, decoded = f"line {line}", decode(raw, line)
    if isinstance(decoded, Bad):
        return decoded
    try:
        content = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return Bad(where, f"it is not JSON: {error}")
    if not isinstance(content, dict):
        return Bad(where, f"it is not a JSON object such as {{{json.dumps(field)}: …}}")
    if field not in content:
        names = ", ".join(map(repr, content)) or "none"
        return Bad(where, f"it has no field {field!r} (its fields: {names}); choose one with `field`")
    return checked(content[field], where, field)


def checked(text: object, where: str, field: str) -> str | Bad:
    """Return a value if it is text that can be encoded as UTF-8: JSON allows unpaired surrogates."""
    if not isinstance(text, str):
        return Bad(where, f"its {field!r} is {'null' if text is None else 'a ' + type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad(where, f"character {error.start + 1} of its text is half of a surrogate pair")
    return text


# ---- reading --------------------------------------------------------------------------------------------------------


def optional(module: str, what: str) -> Any:
    """Import a module that only some sources need; `what` it reads is named in the error."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(
            f"reading {what} needs the package {package}, which is not installed: pip install 'acgpt[data]'"
        ) from error


def decompressor(suffix: str) -> Callable[[], Any]:
    """Return a function that makes a decompressor for files with this suffix; each reads one stream to its `eof`."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(31)
    if suffix == ".xz":
        return lzma.LZMADecompressor
    if sys.version_info >= (3, 14):
        from compression.zstd import ZstdDecompressor

        return ZstdDecompressor
    zstandard = optional("zstandard", ".zst files")
    return lambda: zstandard.ZstdDecompressor().decompressobj()


class Reader:
    """Iterate over the decompressed bytes of a file, in blocks. At damage the iteration ends.

    Attributes:
        read: Number of bytes read from disk so far.
        damage: What is wrong with the file, if it is damaged after the bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0
        self.damage = ""

    def __iter__(self) -> Iterator[bytes]:
        suffix = self.path.suffix.lower()
        make = decompressor(suffix) if suffix in COMPRESSED else None
        stream: Any = None
        with self.path.open("rb") as file:
            while raw := file.read(READ_COMPRESSED if make else READ):
                self.read += len(raw)
                if make is None:
                    yield raw
                    continue
                while raw := raw if stream else raw.lstrip(b"\0"):  # two streams may be separated by zeros
                    stream = stream or make()
                    try:
                        block = stream.decompress(raw)
                    except Exception as error:  # the libraries have no common error
                        self.damage = f"it cannot be decompressed ({error})"
                        return
                    if block:
                        yield block
                    raw, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
        if stream is not None:
            self.damage = "it ends too early"


def lines(reader: Reader) -> Iterator[bytes | None]:
    """Yield lines without their ends; `None` for a line that is too long. A line that damage cuts is left out."""
    buffer: list[bytes] = []
    size = 0
    for block in reader:
        *ended, rest = block.split(b"\n")
        for line in ended:
            yield b"".join([*buffer, line]) if size <= LONGEST else None
            buffer, size = [], 0
        size += len(rest)
        if size <= LONGEST:
            buffer.append(rest)
        else:
            buffer.clear()
    if size and not reader.damage:
        yield b"".join(buffer) if size <= LONGEST else None


def running_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks of running text, each about a batch long, cut where byte-level tokenizers split anyway."""
    text = bytearray()
    for block in blocks:
        text += block
        while len(text) >= 2 * BATCH:
            cut = cut_before(text, BATCH)
            yield bytes(text[:cut])
            del text[:cut]
    if text:
        yield bytes(text)


def cut_before(text: bytearray, limit: int) -> int:
    """Return where to cut a text so that the tokens of its pieces are those of the whole.

    That is before white space that follows a letter, where the byte-level tokenizers (GPT-2's, Llama 3's, Qwen's)
    always split. If there is none, cut before a line end, or else between two characters.
    """
    if match := re.match(rb"(?s).*[A-Za-z](?=\s)", text[limit - CUT : limit + 1]):
        return limit - CUT + match.end()
    if (line := text.rfind(b"\n", limit - CUT, limit)) > 0:
        return line
    for back in range(4):  # a character has at most four bytes
        if not 0x80 <= text[limit - back] < 0xC0:
            return limit - back
    return limit  # not UTF-8, which `decode` reports


def file_batches(path: Path, format: str, running: bool) -> Iterator[Batch]:
    """Yield the batches of a `.txt` or `.jsonl` file.

    Args:
        path: The file.
        format: "txt" or "jsonl".
        running: Read blocks of running text instead of lines.
    """
    reader, total, text = Reader(path), max(1, path.stat().st_size), format == "txt"
    rows: list[bytes | Bad] = []
    size, first, first_line = 0, 0, 1  # of `rows`: bytes, and where they begin
    number, line = 0, 1  # of what comes next

    def batch(ends: bool) -> Batch:
        return Batch(format, rows, first, number, first_line, reader.read / total, ends)

    for raw in running_blocks(reader) if running else lines(reader):
        if rows and (running or size >= BATCH):
            yield batch(ends=False)
            rows, size, first, first_line = [], 0, number, line
        if raw is None:
            rows.append(Bad(f"line {line}", f"it is longer than {LONGEST >> 20} MB"))
        else:
            rows.append(raw + b"\n" if text and not running else raw)
        length = len(raw or b"") + (not running)
        size += length
        number += length if text else 1
        line += raw.count(b"\n") if raw and running else 1
    if reader.damage:
        why = f"the file is damaged from here on: {reader.damage}"
        rows.append(Bad(f"line {line}", why, lost="the rest of the file"))
        number += 1
    if rows:
        yield batch(ends=True)


def parquet_batches(path: Path, start: int, field: str) -> Iterator[Batch]:
    """Yield the rows of the column `field`, one row group after the other; skip the groups before row `start`."""
    parquet = optional("pyarrow.parquet", ".parquet files")
    damage_errors = (optional("pyarrow", ".parquet files").ArrowException, OSError, ValueError)

    def unusable_file(why: str) -> Batch:
        return Batch("values", [Bad("as a whole", why, lost="the file")], 0, 1, done=1.0)

    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
    except damage_errors as error:
        yield unusable_file(f"the file is damaged: {error}")
        return
    with file:
        if field not in file.schema_arrow.names:
            columns = ", ".join(map(repr, file.schema_arrow.names))
            yield unusable_file(f"it has no column {field!r} (its columns: {columns}); choose one with `field`")
            return
        total, end = max(1, file.metadata.num_rows), 0
        for group in range(file.num_row_groups):
            number, end = end, end + file.metadata.row_group(group).num_rows
            if end <= start:
                continue
            try:
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=[field]):
                    rows = batch.column(0).to_pylist()
                    yield Batch("values", rows, number, number + len(rows), done=number / total)
                    number += len(rows)
            except damage_errors as error:
                bad = Bad(f"rows {number + 1} to {end}", f"the file is damaged: {error}", end - number)
                yield Batch("values", [bad], number, end, done=end / total)
