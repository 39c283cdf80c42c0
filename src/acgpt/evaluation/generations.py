"""Files of generations: NAME.jsonl with one sample per line, and beside it NAME.json, the record of the file.

    a line       item, sample, seed         number of the text in the evaluation dataset, number of the sample, seed
                 roles                      "gga…": one letter per token; g given, a asked, u unknown
                 tokens                     token ids of the whole text with the sampled tokens, without BOS
                 log_probs                  of the asked tokens, under the model itself at temperature 1; or null
                 prompt, fills, text        for readers: what was given, the sampled text of each blank, the whole text
    the record   kind "generations", method, model, mode, r_max, set, sampling, tokenizer_hash, versions, …

`generate` writes these files. This module reads and checks them; no model is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from acgpt.common.files import read_json_object
from acgpt.errors import InputError
from acgpt.query.modes import MODES

KIND = "generations"
BLANK = "____"  # stands for a run of tokens that are not given
REGENERATE = "Delete it and generate it again, or leave it out."
REQUIRED = ("method", "mode", "options", "set", "sampling", "tokenizer_hash", "sha256")  # keys of a record


@dataclass(frozen=True)
class Generation:
    """One sample: a line of the file.

    Args:
        item: Number of the text in the evaluation dataset.
        sample: Number of the sample among those of the text.
        roles: One letter per token.
        tokens: Token ids of the whole text; `None` for unknown tokens.
        log_probs: Log-probabilities of the asked tokens, in nats; `None` if the method has none.
        prompt: The given text, with `BLANK` for each run of asked tokens.
        fills: The sampled text of each run of asked tokens.
        text: The whole text.
    """

    item: int
    sample: int
    roles: str
    tokens: tuple[int | None, ...]
    log_probs: tuple[float, ...] | None
    prompt: str
    fills: tuple[str, ...]
    text: str

    @classmethod
    def from_json(cls, line: str) -> Generation:
        """Parse a line of a file that matches its record."""
        content = json.loads(line)
        values: dict[str, Any] = {key.name: content[key.name] for key in fields(cls)}
        for name in ("tokens", "log_probs", "fills"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)

    @property
    def runs(self) -> list[tuple[int, ...]]:
        """Token ids of each run of asked tokens."""
        return [tuple(t for t in self.tokens[start:end] if t is not None) for start, end in runs(self.roles)]


def runs(roles: str) -> list[tuple[int, int]]:
    """Return the start and end (exclusive) of each run of asked tokens.

    >>> runs("gaaga")
    [(1, 3), (4, 5)]
    """
    return [run.span() for run in re.finditer("a+", roles)]


@dataclass(frozen=True, eq=False)
class Generations:
    """The samples of one model in one mode.

    Args:
        path: Path of NAME.jsonl.
        record: Content of NAME.json.
        limit: Only samples of the first texts of the evaluation dataset (`reference.limit_generations`).
    """

    path: Path
    record: Mapping[str, Any]
    limit: int | None = None

    @classmethod
    def open(cls, path: str | Path) -> Generations:
        """Open NAME.jsonl and read the record beside it. Samples are read when needed."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"there is no file {path}: pass a .jsonl written by acgpt generate, or its folder.")
        if path.suffix == ".json" and path.with_suffix(".jsonl").is_file():
            raise InputError(f"{path} is the record of generations: pass {path.with_suffix('.jsonl')}.")
        record, record_path = record_of(path), path.with_suffix(".json")
        if record is None:
            raise InputError(
                f"{path} has no record of generations ({record_path.name}) beside it. Pass a .jsonl written by acgpt "
                "generate, and keep the two files together."
            )
        record.setdefault("model", "")
        if missing := [key for key in REQUIRED if key not in record]:
            raise InputError(f"{record_path} lacks {', '.join(missing)}. {REGENERATE}")
        return cls(path, record)

    @property
    def name(self) -> str:
        """Name of the file, without its suffix."""
        return self.path.stem

    def __iter__(self) -> Iterator[Generation]:
        """Yield the samples in order while reading the file, which must match the hash in its record."""
        check_lines(self.path, self.record, self.hash)
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                sample = Generation.from_json(line)
                if self.limit is None or sample.item < self.limit:
                    yield sample

    @property
    def samples(self) -> list[Generation]:
        """All samples, read from the file at each access."""
        return list(self)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the file."""
        return sha256(self.path)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_lines(path: Path, record: Mapping[str, Any], file_hash: str, remedy: str = REGENERATE) -> None:
    """Refuse a file of samples that does not match the hash in its record.

    Args:
        path: The file.
        record: Its record.
        file_hash: SHA-256 of the file.
        remedy: Last sentence of the error.
    """
    if record.get("sha256") != file_hash:
        raise InputError(f"{path} does not match {path.stem}.json: it was truncated or changed. {remedy}")


def record_of(path: Path) -> dict[str, Any] | None:
    """Return the record beside NAME.jsonl; `None` if there is none, or if the file is of another kind."""
    return object_of_kind(path.with_suffix(".json"), KIND)


def has_record(path: Path) -> bool:
    """Return whether NAME.jsonl has a record beside it.

    Raises:
        InputError: NAME is a mode, and the file beside it cannot be read: a damaged record.
    """
    record_path = path.with_suffix(".json")
    try:
        if path.stem in MODES and record_path.exists():
            read_json_object(record_path)
    except (OSError, ValueError) as error:
        raise InputError(f"{record_path} cannot be read: {error}. {REGENERATE}") from error
    return record_of(path) is not None


def mode_order(path: Path) -> tuple[int, str]:
    """Return a sort key: files named after a mode in the order of the modes, then others by name."""
    modes = list(MODES)
    return modes.index(path.stem) if path.stem in modes else len(modes), path.name


def object_of_kind(path: Path, *kinds: str) -> dict[str, Any] | None:
    """Return the content of a JSON file of one of these kinds; `None` if it is missing or of another kind."""
    try:
        content = read_json_object(path)
    except (OSError, ValueError):
        return None
    return content if content.get("kind") in kinds else None


def find_generations(paths: Sequence[Path], allow_none: bool = False) -> Iterator[Generations]:
    """Yield the generations in files and folders, each once.

    A folder of `acgpt generate` without generations, because its method can answer no mode, is skipped with a warning.

    Args:
        paths: Files NAME.jsonl, or folders of them.
        allow_none: Accept that there are no generations at all.

    Raises:
        InputError: A path is neither, or a folder has no generations and no index; or there are none at all.
    """
    seen = set()
    for path in paths:
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.glob("*.jsonl"), key=mode_order) if has_record(file)]
            if not files and object_of_kind(path / "index.json", "index") is None:
                inside = sorted({file.parent for file in path.glob("*/**/*.jsonl") if record_of(file) is not None})
                example = f" such as {inside[0]}" if inside else ""
                raise InputError(
                    f"{path} contains no generations: pass a folder{example} that acgpt generate has written."
                )
            if not files:
                warnings.warn(f"{path} contains an index, but no generations: it is skipped.", stacklevel=2)
        for file in files:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield Generations.open(file)
    if not seen and not allow_none:
        raise InputError(f"there are no generations in {', '.join(map(str, paths))}: pass other folders.")
