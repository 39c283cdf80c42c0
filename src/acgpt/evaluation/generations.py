"""Generated texts as files: NAME.jsonl, a sample a line, and beside it NAME.json, the record of the whole.

    a line       item, sample, seed         which text of the evaluation set, and which of its samples
                 roles                      "gga…": a letter a token; g given, a asked, u unknown
                 tokens                     the ids of the whole text, what was drawn in its place, without BOS
                 log_probs                  of the asked tokens, under the model itself at temperature 1; or null
                 prompt, fills, text        for people: what was given, what was drawn for each blank, all of it
    the record   kind "generations", method, model, mode, r_max, set, sampling, tokenizer_hash, versions, …

`generate` writes them. Here they are read and checked, and a line is made (`as_line`); no model is needed.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby
from pathlib import Path
from typing import Any

from acgpt.common.files import read_object
from acgpt.errors import InputError
from acgpt.query.modes import MODES

KIND = "generations"
BLANK = "____"  # for people: a run of tokens that are not given
AGAIN = "Delete it and generate it again, or leave it out."
IDS = 2**31  # token ids are below
LEAST, MOST = -1e9, 1e-3  # of a log-probability; the sum of any number of them can be computed
LONGEST = 2**26  # characters of a line
# Characters that Python's splitlines, but not JSON, takes for the end of a line.
ENDS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class Generation:
    """One sample: a line of the file.

    Args:
        item: The number of its text in the evaluation set.
        sample: Its number among the samples of that text.
        roles: A letter a token.
        tokens: Of the whole text; `None` where one is unknown.
        log_probs: Of the asked tokens, in nats; `None` where the method has none.
        prompt: What was given, for people, with `BLANK` for each run of asked tokens.
        fills: What was drawn, a text for each run of asked tokens.
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
    def of(cls, line: Any) -> Generation:
        """A line of the file, checked.

        Raises:
            ValueError: It is none; the message says why.
        """
        if not isinstance(line, dict):
            raise ValueError("it is not a JSON object")
        kinds: dict[str, type | tuple[type, ...]] = {"item": int, "sample": int, "roles": str, "tokens": list}
        kinds |= {"log_probs": (list, type(None)), "prompt": str, "fills": list, "text": str}
        for key, kind in kinds.items():
            if key not in line:
                raise ValueError(f"it has no {key!r}")
            if not isinstance(line[key], kind) or isinstance(line[key], bool):
                raise ValueError(f"its {key!r} is of the wrong type")
        roles, tokens, log_probs, fills = (line[key] for key in ("roles", "tokens", "log_probs", "fills"))
        asked = roles.count("a")
        if len(roles) != len(tokens) or not asked or set(roles) - set("gau"):
            raise ValueError("its 'roles' are not a letter (g, a or u) for each of its tokens, at least one of them a")
        if not (0 <= line["item"] < IDS and 0 <= line["sample"] < IDS):
            raise ValueError("its 'item' or its 'sample' is no number of a text")
        for role, token in zip(roles, tokens, strict=True):
            if not (type(token) is int and 0 <= token < IDS) and not (token is None and role == "u"):
                raise ValueError(f"its 'tokens' hold {token!r:.40}, which is no token id")
        if len(fills) != len(runs(roles)) or not all(isinstance(fill, str) for fill in fills):
            raise ValueError("its 'fills' are not a text for each run of asked tokens")
        if log_probs is not None and all(each is None for each in log_probs):
            log_probs = None
        if log_probs is not None and not (len(log_probs) == asked and all(map(is_log_prob, log_probs))):
            raise ValueError("its 'log_probs' are not a number for each asked token, 0 or less")
        "".join((line["prompt"], *fills, line["text"])).encode()  # half a character is a ValueError
        return cls(
            line["item"],
            line["sample"],
            roles,
            tuple(tokens),
            None if log_probs is None else tuple(map(float, log_probs)),
            line["prompt"],
            tuple(fills),
            line["text"],
        )

    @property
    def runs(self) -> list[tuple[int, ...]]:
        """The tokens of each run of asked ones."""
        return [tuple(t for t in self.tokens[start:end] if t is not None) for start, end in runs(self.roles)]


def is_log_prob(value: object) -> bool:
    """Is it a finite number, not a boolean, and 0 or less, to rounding?"""
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST <= value <= MOST


def runs(roles: str) -> list[tuple[int, int]]:
    """Where asked tokens stand together: the first of each run, and the place after its last.

    >>> runs("gaaga")
    [(1, 3), (4, 5)]
    """
    found, place = [], 0
    for role, same in groupby(roles):
        end = place + len(list(same))
        if role == "a":
            found.append((place, end))
        place = end
    return found


@dataclass(frozen=True, eq=False)
class Generations:
    """The samples of one model in one mode.

    Args:
        path: Of NAME.jsonl.
        record: What NAME.json holds.
        limit: Those of the first texts of the evaluation set only (`reference.limited`).
    """

    path: Path
    record: Mapping[str, Any]
    limit: int | None = None

    @classmethod
    def open(cls, path: str | Path) -> Generations:
        """Of NAME.jsonl, with the record beside it; the samples are read when they are needed."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"there is no file {path}: name a .jsonl that acgpt generate has written, or its folder.")
        if path.suffix == ".json" and path.with_suffix(".jsonl").is_file():
            raise InputError(f"{path} is the record of generations: name {path.with_suffix('.jsonl')}.")
        record, beside = record_of(path), path.with_suffix(".json")
        if record is None:
            raise InputError(
                f"{path} has no record of generations beside it that can be read ({beside.name}): name a .jsonl that "
                "acgpt generate has written, and keep the two files together."
            )
        record.setdefault("model", "")
        kinds: dict[str, type | tuple[type, ...]] = {"method": str, "model": str, "mode": str, "tokenizer_hash": str}
        kinds |= {"set": dict, "options": (dict, type(None)), "sampling": (dict, type(None))}
        for key, kind in kinds.items():
            if not isinstance(record.get(key), kind) or "\0" in str(record.get(key)):
                raise InputError(f"{beside} does not say what its {key} is. {AGAIN}")
        of = record["set"]
        if not isinstance(of.get("hash"), str) or not all(is_size(of.get(key)) for key in ("texts", "length")):
            raise InputError(f"{beside} does not say which evaluation set it is of. {AGAIN}")
        if of.get("corpus_hash") is not None and not isinstance(of.get("split"), str):
            raise InputError(f"{beside} does not say which split of its corpus it is of. {AGAIN}")
        return cls(path, record)

    @property
    def name(self) -> str:
        """The file's, without its ending."""
        return self.path.stem

    def __iter__(self) -> Iterator[Generation]:
        """The samples in order, as they are read."""
        try:
            with self.path.open(encoding="utf-8") as file:
                for number in count(1):
                    line = file.readline(LONGEST)
                    if not line:
                        self.check()
                        return
                    if len(line) == LONGEST and not line.endswith("\n"):
                        raise InputError(f"{self.path}, line {number}: it is too long. {AGAIN}")
                    if line.strip():
                        try:
                            sample = Generation.of(json.loads(line))
                        except (ValueError, RecursionError) as error:
                            self.check()  # which says that it was cut off, if it was
                            raise InputError(f"{self.path}, line {number}: {error}. {AGAIN}") from error
                        if self.limit is None or sample.item < self.limit:
                            yield sample
        except UnicodeDecodeError as error:
            self.check()
            raise InputError(f"cannot read {self.path}: {error}. {AGAIN}") from error
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error}. {AGAIN}") from error

    def check(self) -> None:
        """Refuse a file that is not what its record says of it, if it says so: others than `generate` may make one."""
        if "sha256" in self.record:
            check_lines(self.path, self.record)

    @property
    def samples(self) -> list[Generation]:
        """All of them, read anew; at least one."""
        found = list(self)
        if not found:
            raise InputError(f"{self.path} holds no sample. {AGAIN}")
        return found

    @cached_property
    def hash(self) -> str:
        """Of the file of samples."""
        return sha256(self.path)


def as_line(content: Mapping[str, Any]) -> bytes:
    """JSON in a line of its own, for whoever reads lines in whatever way."""
    line = json.dumps(content, ensure_ascii=False, allow_nan=False)
    for char, escape in ENDS.items():
        line = line.replace(char, escape)
    return (line + "\n").encode()


def sha256(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_lines(path: Path, record: Mapping[str, Any], remedy: str = AGAIN) -> None:
    """Refuse a file of samples that is not what its record says of it: lines are missing, or were changed."""
    if record.get("sha256") != sha256(path):
        raise InputError(f"{path} is not what {path.stem}.json says of it: it was cut off, or changed. {remedy}")


def is_size(value: object) -> bool:
    """Is it a number of things, at least one?"""
    return type(value) is int and 0 < value < IDS


def record_of(path: Path) -> dict[str, Any] | None:
    """The record beside NAME.jsonl; `None` if there is none, or if it is of something else."""
    return object_of_kind(path.with_suffix(".json"), KIND)


def has_record(path: Path) -> bool:
    """Has NAME.jsonl a record beside it?

    Raises:
        InputError: It is named by a mode, and what is beside it cannot be read: a record that was damaged.
    """
    beside = path.with_suffix(".json")
    try:
        if path.stem in MODES and beside.exists():
            read_object(beside)
    except (OSError, ValueError) as error:
        raise InputError(f"{beside} cannot be read: {error}. {AGAIN}") from error
    return record_of(path) is not None


def mode_first(path: Path) -> tuple[int, str]:
    """Files named by a mode come in the order of the modes, others after them by their names."""
    modes = list(MODES)
    return modes.index(path.stem) if path.stem in modes else len(modes), path.name


def object_of_kind(path: Path, *kinds: str) -> dict[str, Any] | None:
    """What a JSON file of one of these kinds holds; `None` if there is none, or if it is something else."""
    try:
        content = read_object(path)
    except (OSError, ValueError):
        return None
    return content if content.get("kind") in kinds else None


def find_generations(places: Sequence[Path], allow_none: bool = False) -> Iterator[Generations]:
    """Those that are named, and all in the folders that are named, each once.

    A folder of `acgpt generate` that holds none, for its method answers in no mode, is passed over with a warning.

    Raises:
        InputError: A place is neither, or a folder holds none; or there are none at all, and that is not allowed.
    """
    seen = set()
    for place in places:
        found = [place]
        if place.is_dir():
            found = [path for path in sorted(place.glob("*.jsonl"), key=mode_first) if has_record(path)]
            if not found and object_of_kind(place / "index.json", "index") is None:
                inside = sorted({path.parent for path in place.glob("*/**/*.jsonl") if record_of(path) is not None})
                such = f" such as {inside[0]}" if inside else ""
                raise InputError(
                    f"{place} holds no generations: name a folder{such} that acgpt generate has written into."
                )
            if not found:
                warnings.warn(f"{place} holds an index, but no generations: it is passed over.", stacklevel=2)
        for path in found:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield Generations.open(path)
    if not seen and not allow_none:
        raise InputError(f"there are no generations in {', '.join(map(str, places))}: name folders that have some.")
