r"""Check regular expressions of clients: compiling some takes hours and gigabytes, `[ab]*a[ab]{18}` for example.

The library that compiles patterns cannot be interrupted. So a pattern that has not been seen is first compiled in a
process of its own, with limits of time and memory. Few of these processes run at a time. One is killed if nobody waits
for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from acgpt.query.constraint import MOST_CHARACTERS, expressions

SECONDS = 5.0  # to start a process and to compile a pattern
MOST_AT_ONCE = 2  # processes
MOST_KNOWN = 4096  # patterns whose results are kept
PROGRAM = """
import json, sys
try:
    from outlines_core import Index, Vocabulary
except ImportError:
    sys.exit(0)  # which is found later
try:
    import resource, signal
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    signal.setitimer(signal.ITIMER_PROF, 1.0)  # of computing; the signal ends the process
except (ImportError, AttributeError, OSError, ValueError):
    pass  # on another system than Unix
try:
    for expression in json.load(sys.stdin):
        Index(expression, Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
except MemoryError:
    sys.exit(1)
except Exception:
    pass  # invalid, which is found later
"""


class Patterns:
    """Checks patterns, and remembers the results."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(MOST_AT_ONCE)
        self.known: dict[str, bool] = {}

    async def compile_in_time(self, pattern: str) -> bool:
        """Return whether a pattern compiles within the limits; true if it is invalid, which is found later.

        If the task is cancelled, the process is killed.
        """
        if pattern not in self.known and len(pattern) <= MOST_CHARACTERS:
            async with self.turns:
                compiles = await compiled(json.dumps(expressions(pattern)).encode())
            while len(self.known) >= MOST_KNOWN:
                self.known.pop(next(iter(self.known)), None)
            self.known[pattern] = compiles
        return self.known.get(pattern, True)


async def compiled(content: bytes) -> bool:
    """Return whether `PROGRAM` compiles some expressions, a list in JSON, within the limits."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=null, stderr=null
    )
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(content), SECONDS)
        return process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
