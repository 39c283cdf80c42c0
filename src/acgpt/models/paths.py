"""Checks of the names of models and adapters that need neither torch nor transformers, which take seconds to import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from acgpt.errors import InputError, ModelError, reason


def check_paths(model: object, adapter: object) -> None:
    """Refuse a model or an adapter that looks like a path to a folder or file that does not exist.

    Args:
        model: Argument of `acgpt.load`.
        adapter: Argument of `acgpt.load`: one adapter, several by name, or none.
    """
    adapters = list(adapter.values()) if isinstance(adapter, Mapping) else [adapter]
    for role, source in (("model", model), *(("adapter", source) for source in adapters)):
        if isinstance(source, str) and not source.endswith(".gguf"):
            check_exists(path_text(role, source))


def path_text(role: str, source: object) -> str:
    """Return the folder, hub id or file of a model or adapter as text, after a check; `role` names it in errors."""
    if not isinstance(source, str | os.PathLike) or not isinstance(path := os.fspath(source), str):
        raise ModelError(f"the {role} must be a folder or a hub id, not {reason(repr(source))}.")
    if not path:
        raise InputError(f"the name of the {role} is empty: name a folder, a hub id or a .gguf file, or leave it out.")
    try:
        if "\0" in path:
            raise OSError("it has a null character")
        Path(path).exists()
    except OSError as error:
        raise ModelError(f"{reason(path)} is not the name of a folder: {error.strerror or error}.") from error
    return path


def check_exists(source: str) -> str:
    """Return a folder or hub id; refuse what looks like a path to a folder that does not exist."""
    looks_like_a_path = Path(source).is_absolute() or source.startswith(".") or source.count("/") > 1
    if looks_like_a_path and not Path(source).exists():
        raise ModelError(f"there is no folder {source}.")
    return source
