"""The log of the server: one JSON object per line and request, and the places of unexpected errors.

Neither prompts nor keys are written: of a request only its route, and of an error only its class and where it was
raised, because messages may quote a text.
"""

from __future__ import annotations

import json
import logging
import time
import traceback

INNERMOST = 12  # calls of an error that are logged
LOG = logging.getLogger("acgpt.serving")


def log_request(method: str, route: str, status: int, seconds: float, tokens: int | None) -> None:
    """Log a request that was answered."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"time": stamp, "method": method, "route": route, "status": status, "ms": round(1000 * seconds, 1)}
    LOG.info(json.dumps({**fields, "tokens": tokens}))


def log_failure(error: BaseException) -> None:
    """Log an unexpected error: its class, and the calls that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[-INNERMOST:]
    calls = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    LOG.error(json.dumps({"failure": type(error).__name__, "calls": calls}))
