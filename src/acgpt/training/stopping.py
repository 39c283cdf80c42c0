"""Requests to stop a training run: a time limit, SIGTERM or Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from acgpt.common.signals import handling


class NothingToSave(KeyboardInterrupt):
    """A request to stop that came before the first step had ended."""


class StopRequests:
    """Requests to stop the run.

    Before the first step has ended there is nothing to save, and a signal stops at once: the step may take a minute to
    compile, or never end if the signal has also reached the compiler's processes. A second Ctrl-C stops at once too.

    Args:
        deadline: Time of `time.monotonic` after which to stop.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline, self.steps = deadline, 0
        self.requested = threading.Event()

    def step_done(self) -> None:
        """Count a step."""
        self.steps += 1

    def __bool__(self) -> bool:
        """Whether the run should stop."""
        return self.requested.is_set() or time.monotonic() > self.deadline

    def from_signals(self) -> AbstractContextManager[None]:
        """Handle SIGTERM and Ctrl-C inside the context."""
        return handling(self.handle, "SIGINT", "SIGTERM")

    def handle(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if self.requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.steps:
            raise NothingToSave
        if number == signal.SIGINT and sys.stderr.isatty():
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again: at once\n")
        self.requested.set()
