"""Requests to stop a training run: a time limit, SIGTERM or Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self


class NothingToSave(KeyboardInterrupt):
    """A request to stop that came before the first step had ended."""


class StopRequests:
    """Requests to stop the run. As a context manager, it handles SIGTERM and Ctrl-C.

    Before the first step has ended there is nothing to save, and a signal stops at once: the step may take a minute to
    compile, or never end if the signal has also reached the compiler's processes. A second Ctrl-C stops at once too.

    Args:
        deadline: Time of `time.monotonic` after which to stop.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline, self.steps = deadline, 0
        self.requested = threading.Event()
        self.previous: dict[int, Any] = {}

    def step_done(self) -> None:
        """Count a step."""
        self.steps += 1

    def __bool__(self) -> bool:
        """Whether the run should stop."""
        return self.requested.is_set() or time.monotonic() > self.deadline

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there can signals be handled
            signals = [
                number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN
            ]
            self.previous = {number: signal.signal(number, self.handle) for number in signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if self.requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.steps:
            raise NothingToSave
        if number == signal.SIGINT and sys.stderr.isatty():
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again: at once\n")
        self.requested.set()
