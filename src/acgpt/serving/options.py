"""Options of `acgpt serve`.

This module imports neither torch nor fastapi, so that `acgpt serve --help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acgpt.common.options import Options, documented, option
from acgpt.models.options import LoadedOptions


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
