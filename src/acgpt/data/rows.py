"""Raw rows and documents: read files in batches of bounded size, and parse the batches.

Reading is cheap and is done in order, by one process: bytes become lines or blocks of text, and these a `Batch`. The
expensive part is `Batch.documents`, decoding and parsing, which runs in the worker processes.

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
CUT = 1 << 14  # a long text is cut within this number of bytes before the end of a batch
LONGEST = 1 << 26  # maximum bytes per row: a file without line ends must not fill the memory


# ---- batches and documents ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A document, or a piece of a long one.

    Args:
        number: Number of the document in its part.
        text: The text.
        begins: Whether the document begins with this piece.
        ends: Whether the document ends with this piece.
    """

    number: int
    text: str
    begins: bool = True
    ends: bool = True


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
        format: "txt" (one row: a block of text), "jsonl" (one line per row), or "values".
        rows: Bytes for "txt" and "jsonl", any value for "values"; `Bad` for rows that could not be read.
        first: Number of the first row.
        next: Number of the row after this batch, where reading is resumed.
        line: Line of the first row, from 1, if the part has lines.
        done: Share of the part that has been read, from 0 to 1.
        ends: Whether the part ends with this batch.
        offset: Number of bytes of text before a block of text.
    """

    format: str
    rows: list[Any]
    first: int
    next: int
    line: int = 0
    done: float = 0.0
    ends: bool = False
    offset: int = 0

    @property
    def count(self) -> int:
        """Number of documents, usable or not; a text file is one document, counted in its last batch."""
        return int(self.ends) if self.format == "txt" else self.next - self.first

    def head(self, count: int) -> Batch:
        """Return a batch of at most the first `count` documents."""
        return self if self.count <= count else replace(self, rows=self.rows[:count], next=self.first + count)

    def documents(self, field: str) -> Iterator[Document | Bad]:
        """Yield the documents in order, and a `Bad` for each unusable row; `field` is the field of the text."""
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
        """Yield the document of a block of a text file, after a `Bad` for each line that is not UTF-8."""
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
    """Decode a line as UTF-8, without the byte order mark that some editors write at the beginning of a file."""
    return raw.decode("utf-8-sig" if line == 1 else "utf-8")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Describe a decoding error."""
    return f"byte {error.start + 1} of it is not UTF-8 (to convert Latin-1: iconv -f latin1 -t utf-8)"


def parse_json(raw: bytes, number: int, where: str, field: str) -> Document | Bad:
    """Parse one line of a `.jsonl` file.

    Args:
        raw: The line.
        number: Number of the document, from 0.
        where: Position for errors, such as "line 7".
        field: Field that holds the text.
    """
    try:
        content = json.loads(decode(raw, number + 1))
    except UnicodeDecodeError as error:
        return Bad(where, not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Bad(where, f"it is not JSON: {error}")
    if not isinstance(content, dict):
        return Bad(where, f"it is not a JSON object such as {{{json.dumps(field)}: …}}")
    if field not in content:
        names = ", ".join(map(repr, content)) or "none"
        return Bad(where, f"it has no field {field!r} (its fields: {names}); choose one with `field`")
    return checked(content[field], number, where, field)


def checked(text: object, number: int, where: str, field: str) -> Document | Bad:
    """Return the document if it is text that can be encoded as UTF-8: JSON allows unpaired surrogates."""
    if not isinstance(text, str):
        return Bad(where, f"its {field!r} is {'null' if text is None else 'a ' + type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad(where, f"character {error.start + 1} of its text is half of a surrogate pair")
    return Document(number, text)


# ---- bytes, lines and blocks ----------------------------------------------------------------------------------------


class Damaged(Exception):
    """A file that is damaged on disk."""


@dataclass
class Reader:
    """Iterate over the decompressed bytes of a file, in blocks.

    Args:
        path: The file.
        read: Number of bytes read from disk so far.
    """

    path: Path
    read: int = 0

    def __iter__(self) -> Iterator[bytes]:
        suffix = self.path.suffix.lower()
        make = decompressor(suffix) if suffix in COMPRESSED else None
        size = READ if make is None else READ_COMPRESSED
        stream: Any = None
        with self.path.open("rb") as file:
            while raw := file.read(size):
                self.read += len(raw)
                if make is None:
                    yield raw
                    continue
                while raw := raw if stream else raw.lstrip(b"\0"):  # two streams may be separated by zeros
                    stream = stream or make()
                    try:
                        block = stream.decompress(raw)
                    except Exception as error:  # the libraries have no common error
                        raise Damaged(f"it cannot be decompressed ({error})") from error
                    if block:
                        yield block
                    raw, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
            if stream is not None:
                raise Damaged("it ends too early")


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


def optional(module: str, what: str) -> Any:
    """Import a module that only some sources need.

    Args:
        module: Name of the module.
        what: What it reads, for errors.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(
            f"reading {what} needs the package {package}, which is not installed: pip install 'acgpt[data]'"
        ) from error


def too_long(line: int) -> Bad:
    """Return the `Bad` of a line that is longer than `LONGEST`."""
    return Bad(f"line {line}", f"it is longer than {LONGEST >> 20} MB")


def damaged(line: int, error: Damaged) -> Bad:
    """Return the `Bad` of the rest of a damaged file, from a line on."""
    return Bad(f"line {line}", f"the file is damaged from here on: {error}", lost="the rest of the file")


def lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield lines without their ends; `None` for a line that is too long."""
    buffer: list[bytes] = []
    size = 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for line in ended:
            yield b"".join([*buffer, line]) if size <= LONGEST else None
            buffer, size = [], 0
        size += len(rest)
        if size <= LONGEST:
            buffer.append(rest)
        else:
            buffer.clear()
    if size:
        yield b"".join(buffer) if size <= LONGEST else None


def line_blocks(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield blocks of whole lines, each about a batch long; `None` for a line that is too long."""
    buffer: list[bytes] = []
    size = 0
    damage = None
    try:
        for line in lines(blocks):
            if line is not None:
                buffer.append(line + b"\n")
                size += len(buffer[-1])
            if buffer and (line is None or size >= BATCH):
                yield b"".join(buffer)
                buffer, size = [], 0
            if line is None:
                yield None
    except Damaged as error:
        damage = error
    if buffer:
        yield b"".join(buffer)
    if damage:
        raise damage


def running_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks of running text, each about a batch long, cut where byte-level tokenizers split anyway."""
    text = bytearray()
    damage = None
    try:
        for block in blocks:
            text += block
            while len(text) >= 2 * BATCH:
                cut = cut_before(text, BATCH)
                yield bytes(text[:cut])
                del text[:cut]
    except Damaged as error:
        damage = error
    if text:
        yield bytes(text)
    if damage:
        raise damage


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
    return limit  # not UTF-8, which `Batch.text` reports
