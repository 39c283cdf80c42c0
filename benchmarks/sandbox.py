"""Run generated programs with limits: does a filled-in function pass its tests?

    passes(task.program(fill))                  one program
    passes_all(programs)                        many, in parallel

A program passes if it runs to its end. Each one has a Python process of its own (`python -I -S -B`) with limits on CPU
time, wall time, memory, processes and file sizes, no input, no output, and an empty working directory that is deleted.
The process reports success by writing a random token to a pipe after the last line of the program, so that a program
that exits early fails.

This is not a security boundary. It contains the accidents of generated code: infinite loops, memory and fork bombs,
stray files. A program written to escape can escape: it shares the process with the code that restricts it, may read any
file of the user, and could find the token. Run untrusted programs in a container or a virtual machine. Linux enforces
all limits; macOS ignores the one on memory.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

GIB = 2**30

# The child sets its limits itself: code between fork and exec (preexec_fn) is unsafe in a process with threads. The
# audit hook adds what limits cannot do: root is exempt from RLIMIT_NPROC, and no limit says where files may be written.
CHILD = r"""
import json, os, resource, sys

job = json.load(sys.stdin)
verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
for standard in (0, 1, 2):
    os.dup2(nothing, standard)
os.close(nothing)

FORBIDDEN = (
    "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "pty.", "subprocess.", "signal.",
    "socket.", "ctypes.", "resource.", "sys.addaudithook",
)
CHANGES = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
    "os.utime", "os.setxattr", "os.removexattr",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def restrict(realpath=os.path.realpath, fsdecode=os.fsdecode, folder=os.path.realpath(os.getcwd()) + os.sep):
    def check(path):
        if not isinstance(path, int) and not realpath(fsdecode(path)).startswith(folder):
            raise PermissionError(f"outside the working directory: {path!r}")

    def hook(event, arguments):
        if event.startswith(FORBIDDEN):
            raise PermissionError(event)
        if event == "open" and arguments[2] & WRITING:
            check(arguments[0])
        if event in CHANGES:
            for path in arguments[:2]:
                if isinstance(path, (str, bytes, os.PathLike)):
                    check(path)

    sys.addaudithook(hook)


for name, (soft, hard) in job["limits"].items():
    resource.setrlimit(getattr(resource, name), (soft, hard))
restrict()
exec(compile(job["program"], "program", "exec"), {"__name__": "__main__"})
os.write(verdict, job["token"].encode())
"""


def passes(program: str, timeout: float = 5) -> bool:
    """Run a program in a process of its own and return whether it ran to its end without an error.

    Args:
        program: Python source: a function, its tests, and the call that runs them. It has the standard library only.
        timeout: Seconds of CPU time, rounded up. The limit on wall time is twice as long, so that a busy machine
            rarely changes the result.
    """
    seconds, token = math.ceil(timeout), secrets.token_hex(16)
    limits = {
        "RLIMIT_CPU": (seconds, seconds + 1),  # a program may ignore the signal of the first limit, not of the second
        "RLIMIT_AS": (GIB, GIB),
        "RLIMIT_NPROC": (0, 0),
        "RLIMIT_FSIZE": (2**20, 2**20),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_CORE": (0, 0),
    }
    # The job is a file, not a pipe, so that writing it cannot block. Of the pipe at most a token's length is read, so
    # that a program that floods it blocks.
    verdict, report = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job,
        os.fdopen(verdict, "rb", buffering=0) as result,
    ):
        job.write(json.dumps({"program": program, "token": token, "limits": limits}).encode())
        job.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", CHILD],
                stdin=job,
                stdout=report,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            )
        finally:
            os.close(report)
        try:
            wait([verdict], 2 * timeout)  # for the token, or for the end of the process
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # before its id is free for others
            process.wait()
        os.set_blocking(verdict, False)
        return result.read(len(token) + 1) == token.encode()


def passes_all(programs: Sequence[str]) -> list[bool]:
    """Run many programs, one on each CPU core at a time, and return whether each one passed, in order."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(passes, programs))
