"""Options of `acgpt serve`, and what is made of them before the model is loaded: API keys, and the socket.

This module imports neither torch nor fastapi, so that `acgpt serve --help` is fast, and errors come at once.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from acgpt.common.options import Options, documented, option
from acgpt.errors import InputError
from acgpt.models.options import LoadedOptions

VARIABLE = "ACGPT_API_KEY"


@documented
@dataclass(frozen=True)
class LimitOptions(Options):
    """Limits of a server. A request beyond one of them is refused with an error that names it."""

    max_body_bytes: int = option("Maximum size of a request. Default: 1048576.", 2**20, metavar="N", minimum=1)
    max_tokens_per_request: int = option(
        "Maximum number of tokens of a request: those of its texts, and those that it asks for, times their number. "
        "Default: 65536.",
        2**16,
        metavar="N",
        minimum=1,
    )
    max_questions: int = option(
        "Maximum number of templates or queries in the list of a request. Default: 64.", 64, metavar="N", minimum=1
    )
    max_n: int = option(
        "Maximum number of samples, fills or candidates per template. Default: 64.", 64, metavar="N", minimum=1
    )
    queue: int = option(
        "Maximum number of questions that wait; more are refused with status 429. Default: 256.",
        256,
        metavar="N",
        minimum=1,
    )
    timeout: float = option(
        "Seconds that a request may take, from its arrival to its answer. Default: 120.", 120.0, metavar="S", above=0
    )
    max_rows: int | None = option(
        "Maximum number of texts that are generated at a time. Default: as many as the device takes.",
        metavar="N",
        minimum=1,
    )


@documented
@dataclass(frozen=True)
class ServeOptions(LimitOptions, LoadedOptions):
    """Options of `acgpt serve`: the model, the address, who may ask, and limits."""

    host: str = option(
        "Address to listen on. Another one than this machine's own needs an API key. Default: 127.0.0.1.",
        "127.0.0.1",
        metavar="ADDRESS",
    )
    port: int = option(
        "Port to listen on; 0 takes a free one. Default: 8080.", 8080, metavar="N", minimum=0, maximum=65535
    )
    api_key_file: Path | None = option(
        "File with the API keys that clients must send, one per line. Default: the environment variable "
        "ACGPT_API_KEY; without it, no key is needed.",
        metavar="PATH",
    )
    cors: tuple[str, ...] = option(
        "Origin of web pages that may ask, such as https://example.org, or * for all. Default: none.",
        (),
        metavar="ORIGIN",
        form="list",
        shell="May be repeated.",
    )


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
            texts = options.api_key_file.read_text(encoding="utf-8").splitlines()
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
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {options.port} of {options.host} is in use, perhaps by another acgpt serve: stop that program, "
                "or choose another `port`."
            ) from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot listen on {options.host}, port {options.port}: {reason}. Choose another.") from error
