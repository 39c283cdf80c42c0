r"""Check regular expressions of clients: compiling some takes hours, `[ab]*a[ab]{18}` for example.

The library that compiles patterns cannot be interrupted. So a pattern that has not been seen is first compiled in a
process of its own, which is killed after `SECONDS`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache

from acgpt.errors import TemplateError
from acgpt.query.template import Part, Slot

SECONDS = 3.0  # to start a process and to compile a pattern of bytes
PROGRAM = """
import sys
from outlines_core import Index, Vocabulary
try:
    Index(sys.stdin.buffer.read().decode(), Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
except Exception:
    pass  # invalid, which is found later
"""


@lru_cache(maxsize=4096)
def compiles_in_time(pattern: str) -> bool:
    """Return whether a pattern compiles within the time limit; true if it is invalid."""
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", PROGRAM],
            input=pattern.encode(), timeout=SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return True


def check_patterns(parts: Iterable[Part], template: str) -> None:
    """Check that the patterns of a template compile in time.

    Raises:
        TemplateError: One does not.
    """
    for slot in (part for part in parts if isinstance(part, Slot)):
        pattern = None if slot.gap is None else slot.gap.pattern
        if pattern is not None and not compiles_in_time(pattern):
            raise TemplateError("the pattern of this gap takes too long to compile: simplify it.", template, slot.at)
