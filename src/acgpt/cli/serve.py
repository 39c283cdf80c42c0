"""`acgpt serve`: answer requests over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from acgpt.cli.templates import load_model
from acgpt.cli.ui import with_options
from acgpt.errors import InputError
from acgpt.models.paths import check_paths
from acgpt.serving.options import ServeOptions, listen, read_keys


@with_options(ServeOptions)
def serve(*, options: ServeOptions) -> None:
    r"""Serve the model over HTTP, to many clients at a time.

    acgpt serve
    acgpt serve -m runs/mine/model --port 9000
    acgpt serve --host 0.0.0.0 --api-key-file keys.txt
    curl localhost:8080/v1/fill -H 'Content-Type: application/json' \
      -d '{"template": "The capital of {{_}} is Paris.", "n": 1}'

    Requests are batched as they come. acgpt.Client and the option --server of
    acgpt score, infill and rank ask a server. Routes, limits and deployment:
    docs/how-to/serve.md. The schema is at /openapi.json.

    Prints one JSON line per request to standard error: time, method, route,
    status, ms, tokens; never texts or keys.

    SIGTERM and Ctrl-C let accepted requests finish; a second one stops at once,
    with exit code 1.
    """
    check_paths(options.model, options.adapter)
    keys = read_keys(options)
    with listen(options, keys) as listener:  # before the imports, which take seconds
        try:
            from acgpt.serving.server import serve as run
        except ModuleNotFoundError as error:
            raise InputError(f"a server needs the package {error.name}: pip install 'acgpt[serve]'") from error

        def note(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        with requests_logged():
            run(options, keys, listener, lambda: load_model(options), public_name(options.model), note)


@contextmanager
def requests_logged() -> Iterator[None]:
    """Write the log of the server to stderr, inside the context."""
    handler, log = logging.StreamHandler(sys.stderr), logging.getLogger("acgpt.serving")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


def public_name(model: str | None) -> str:
    """Return the name of a model as clients see it: of a folder or a file, the last part of the path."""
    if model is None:
        return "default"
    return Path(model).resolve().name if Path(model).exists() else model
