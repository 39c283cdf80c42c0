"""Raw rows and documents: what is read from a file, in batches of bounded size, and what it means.

Reading is cheap and is done in order, by one process: bytes become lines, or blocks of text, and those a `Batch`. What
costs time is `Batch.documents`: decoding and parsing, done wherever there is a processor free.

Everything is UTF-8, and nothing in a text is changed. A row that cannot be used becomes a `Bad`, which says where it
stands and why; whoever asked decides what to do about it.
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
READ = 1 << 16  # bytes read at a time from a plain file
READ_COMPRESSED = 1 << 10  # and from a compressed one: they may stand for thousands of times as many
BATCH = 1 << 20  # bytes of text in a batch, about
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
    """A row that cannot be used: where it stands ("line 7") and why; or several; `lost`: or all that follows."""

    where: str
    why: str
    rows: int = 1
    lost: str = ""


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
        at: Of a block of text, its place in the file: how many bytes of text come before it.
    """

    format: str
    rows: list[Any]
    first: int
    next: int
    line: int = 0
    done: float = 0.0
    ends: bool = False
    at: int = 0

    @property
    def count(self) -> int:
        """How many documents there are in it, good and bad; a text file is one, and is counted where it ends."""
        return int(self.ends) if self.format == "txt" else self.next - self.first

    def head(self, count: int) -> Batch:
        """The first so many documents."""
        return self if self.count <= count else replace(self, rows=self.rows[:count], next=self.first + count)

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
        return Bad(where, f"it has no field {field!r} (its fields: {there}); `field` names another")
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
        size = READ if make is None else READ_COMPRESSED
        stream: Any = None
        with self.path.open("rb") as file:
            while raw := file.read(size):
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


def too_long(line: int) -> Bad:
    """A line that would fill the memory."""
    return Bad(f"line {line}", f"it is longer than {LONGEST >> 20} MB")


def damaged(line: int, error: Damaged) -> Bad:
    """The rest of a file, from a line on."""
    return Bad(f"line {line}", f"the file is damaged from here on: {error}", lost="the rest of the file")


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
        if size <= LONGEST:
            held.append(rest)
        else:
            held.clear()
    if size:
        yield b"".join(held) if size <= LONGEST else None


def line_blocks(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Whole lines, about a batch of them at a time; `None` for one that is too long to hold."""
    held: list[bytes] = []
    size = 0
    damage = None
    try:
        for line in lines(blocks):
            if line is not None:
                held.append(line + b"\n")
                size += len(held[-1])
            if held and (line is None or size >= BATCH):
                yield b"".join(held)
                held, size = [], 0
            if line is None:
                yield None
    except Damaged as error:
        damage = error
    if held:
        yield b"".join(held)
    if damage:
        raise damage


def running_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Running text, about a batch at a time, cut where byte-level tokenizers split anyway."""
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
    """Where to cut a text into pieces so that their tokens are those of the whole.

    Before white space that follows a letter, which is where the byte-level tokenizers (GPT-2's, Llama 3's, Qwen's)
    always split; where there is no such place, before a line end, or else between two characters.
    """
    if found := re.match(rb"(?s).*[A-Za-z](?=\s)", text[limit - CUT : limit + 1]):
        return limit - CUT + found.end()
    if (line := text.rfind(b"\n", limit - CUT, limit)) > 0:
        return line
    for back in range(4):  # the longest character has four bytes
        if not 0x80 <= text[limit - back] < 0xC0:
            return limit - back
    return limit  # no characters at all: `Batch.text` will say so
