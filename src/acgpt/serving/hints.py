"""Messages for requests that miss: what a client probably meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from acgpt.errors import reason

CHAT = ("/v1/chat/completions", "/chat/completions")
COMPLETIONS = "/v1/completions"


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the one of some names that is most like another one, if one is."""
    return next(iter(get_close_matches(name, names, 1)), None)


def no_path(path: str, paths: Collection[str]) -> str:
    """Return the message for a path that the server does not have.

    Args:
        path: The path.
        paths: Those that it has.
    """
    if path.startswith("/v1/v1/"):
        return f"{reason(path)} has /v1 twice: leave it out of the address of the server."
    if path.rstrip("/") in CHAT:
        return f"{path} is not served: use {COMPLETIONS}."
    meant = f"/v1{path}" if f"/v1{path}" in paths else nearest(path, paths)
    return f"there is no path {reason(path)}" + (f". Did you mean {meant}?" if meant else ": see /openapi.json.")


def wrong_method(method: str, path: str, allowed: Iterable[str]) -> str:
    """Return the message for a method that a path does not have.

    Args:
        method: The method.
        path: The path.
        allowed: The methods that it has.
    """
    return f"{reason(path)} does not take {reason(method)}: use {' or '.join(sorted(allowed))}."
