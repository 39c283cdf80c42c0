"""Files that are whole or not there at all, whatever becomes of the machine in between."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from acgpt.errors import InputError, OutputError

REMEDY = "Make the folder, make room there, or name another."


@contextlib.contextmanager
def disk_errors(path: str | Path, remedy: str = REMEDY) -> Iterator[None]:
    """What the disk refuses within becomes an `OutputError` that names the file or folder and the remedy."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}. {remedy}") from error


def write_whole(
    path: str | os.PathLike[str], content: str | bytes | Iterable[bytes], temporary: Path | None = None
) -> None:
    """Write a file: under another name at first, and under its own once the disk holds it. Its folder is made.

    Args:
        path: The file.
        content: It may come piece by piece, so that it need not fit into memory.
        temporary: The other name, in the same folder. Default: one of this process alone.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        content = content.encode() if isinstance(content, str) else content
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        sync(temporary)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def json_text(content: object, *, indent: int = 2, ensure_ascii: bool = True, allow_nan: bool = True) -> str:
    """A JSON file's text, as `write_json` writes it: for files that are written together with others."""
    return json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=allow_nan) + "\n"


def write_json(
    path: str | os.PathLike[str],
    content: object,
    *,
    indent: int = 2,
    ensure_ascii: bool = True,
    allow_nan: bool = True,
    locked: bool = False,
) -> None:
    """Write a JSON file, whole or not at all, and have the disk hold its name as well.

    Args:
        path: The file; its folder is made.
        content: What `json.dumps` takes.
        indent: As in `json.dumps`.
        ensure_ascii: As in `json.dumps`.
        allow_nan: As in `json.dumps`.
        locked: The caller has locked the folder. The file is then written under one fixed name at first, so that
            what an interruption left there is replaced.
    """
    path = Path(path)
    text = json_text(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=allow_nan)
    write_whole(path, text, path.with_name(f"{path.name}.tmp") if locked else None)
    sync(path.parent)


def finite(value: Any) -> Any:
    """Replace what JSON cannot hold: an infinite number, or one that is none, becomes null.

    >>> finite({"perplexity": float("inf"), "gains": (1.5, float("nan"))})
    {'perplexity': None, 'gains': [1.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def check_writable(path: Path | None) -> None:
    """Find out before an evaluation, not after it, that its result cannot be written."""
    if path is None:
        return
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder. Name a file.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "cannot be written into" if folder.is_dir() else "is a file"
        raise InputError(f"cannot write {path}: {folder} {why}. Name another place.")


def try_lock(file: int | IO[Any]) -> bool:
    """Lock an open file or folder against other processes; False if one of them holds it.

    The lock is advisory and belongs to the descriptor: the system releases it when that is closed, or when the last
    process that inherited it ends, however it ends. Systems other than Unix have no such lock, and anyone may go on.
    """
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no JSON object, or text that no file can hold.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half a character cannot be written
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def sync(path: Path) -> None:
    """Have the disk hold what was written: a file, or the names in a folder; where the system can do that."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_weights(folder: Path) -> None:
    """Let those read the weights in a folder who may read its config: safetensors writes for the owner alone."""
    mode = next(folder.glob("*config.json")).stat().st_mode
    with contextlib.suppress(OSError):  # of a file system that knows no modes
        for path in folder.glob("*.safetensors"):
            path.chmod(mode)
