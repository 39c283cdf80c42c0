"""Atomic file writes, JSON files, file locks and errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from acgpt.errors import InputError, OutputError

FULL = ("ENOSPC", "EDQUOT", "EFBIG")  # errors that more space mends
LOCK_BESIDE = os.name == "nt"  # lock .NAME.lock beside NAME: Windows cannot open folders or read what is locked


def disk_remedy(error: Exception) -> str:
    """Say what to do about an error in writing; an error of a library that has no number is taken for a full disk."""
    name = errno.errorcode.get(error.errno or 0) if isinstance(error, OSError) else FULL[0]
    advice = {"ENOENT": "Create the folder, or choose", "EACCES": "Change its permissions, or choose"}
    return f"{'Free some space, or choose' if name in FULL else advice.get(str(name), 'Choose')} another path."


@contextlib.contextmanager
def disk_errors(path: str | Path, kept: str = "") -> Iterator[None]:
    """Turn each `OSError` inside the context into an `OutputError` that names the path and the remedy.

    Args:
        path: The file or folder that is written.
        kept: What is not lost, for the message.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}. {disk_remedy(error)} {kept}"
        raise OutputError(message.rstrip()) from error


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes | Iterable[bytes], temporary: Path | None = None
) -> None:
    """Write a file atomically: to a temporary name, synced to disk, then renamed. The folder is created if needed.

    Args:
        path: Path of the file.
        content: The content, or an iterable of chunks if it may not fit into memory.
        temporary: Temporary path, in the same folder. Default: one that contains the process id.
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
    """Return the text of a JSON file as `write_json` writes it, to write several files together."""
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
    """Write a JSON file atomically, and sync its folder.

    Args:
        path: Path of the file. The folder is created if needed.
        content: Content that `json.dumps` accepts.
        indent: As in `json.dumps`.
        ensure_ascii: As in `json.dumps`.
        allow_nan: As in `json.dumps`.
        locked: The caller has locked the folder. The temporary name is then fixed, so that a leftover of an
            interrupted write is replaced.
    """
    path = Path(path)
    text = json_text(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=allow_nan)
    write_atomically(path, text, path.with_name(f"{path.name}.tmp") if locked else None)
    sync(path.parent)


def finite(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON cannot represent, by `None`.

    >>> finite({"perplexity": float("inf"), "gains": (1.5, float("nan"))})
    {'perplexity': None, 'gains': [1.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def check_writable(path: Path | None) -> None:
    """Check that a file can be written, to fail before a long computation and not after it."""
    if path is None:
        return
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder. Choose a file name.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is not writable" if folder.is_dir() else "is a file"
        raise InputError(f"cannot write {path}: {folder} {why}. Choose another path.")


@contextlib.contextmanager
def locked(path: Path, patience: float = 0) -> Iterator[int | None]:
    """Lock a file, created if needed, or a folder; yield the descriptor, or `None` if another process has the lock.

    The lock is advisory and belongs to the descriptor: it is released when the context ends, or when the last process
    that inherited the descriptor ends for any reason. On Windows no process inherits it.

    Args:
        path: Path of the file or folder.
        patience: Seconds to wait for the lock.
    """
    from filelock import lock_descriptor  # most commands need no lock

    if LOCK_BESIDE:
        path = path.resolve()
        path = path.parent / f".{path.name}.lock"
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = time.monotonic() + patience
        while not (free := lock_descriptor(descriptor, blocking=False)) and time.monotonic() < end:
            time.sleep(0.1)
        yield descriptor if free else None
    finally:
        os.close(descriptor)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a JSON object, or contains text that cannot be encoded.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # fails for lone surrogates
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk. Does nothing on systems other than Unix."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def copy_config_permissions(folder: Path) -> None:
    """Give the weights in a folder the permissions of its config: safetensors writes for the owner only."""
    mode = next(folder.glob("*config.json")).stat().st_mode
    with contextlib.suppress(OSError):  # the file system may not support modes
        for path in folder.glob("*.safetensors"):
            path.chmod(mode)
