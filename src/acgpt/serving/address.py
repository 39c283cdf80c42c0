"""The API keys and the socket of a server.

Both are checked before the model and its libraries are loaded, so that errors come at once. This module imports neither
torch nor fastapi.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

from acgpt.errors import InputError
from acgpt.serving.options import ServeOptions

VARIABLE = "ACGPT_API_KEY"


def read_keys(options: ServeOptions) -> list[str]:
    """Return the API keys: the lines of the file, or else the value of the environment variable.

    Raises:
        InputError: The file cannot be read or has no key, or a key cannot be sent in a header.
    """
    if options.api_key_file is None:
        source, texts = VARIABLE, [os.environ.get(VARIABLE, "")]
    else:
        source = str(options.api_key_file)
        try:
            texts = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {source}: {error}. Choose a text file with one key per line.") from error
    keys = [text.strip() for text in texts if text.strip()]
    if options.api_key_file is not None and not keys:
        raise InputError(f"{source} has no key: write one per line.")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise InputError(f"a key in {source} has characters other than letters, digits and signs.")
    return keys


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(options: ServeOptions, keys: list[str]) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: The address needs a key, or cannot be listened on.
    """
    if not keys and not is_loopback(options.host):
        raise InputError(
            f"`host={options.host}` can be reached from other machines, which needs an API key. Set `api_key_file` or "
            f"the environment variable {VARIABLE}."
        )
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot listen on {options.host}, port {options.port}: {reason}. Choose another.") from error
