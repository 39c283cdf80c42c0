"""Count and time the passes through a model; on CUDA with device events, without synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_EVENTS = 1000  # that are held before those of finished passes are added up


class Meter:
    """Counter of the passes through a model on one device, and of the device time that they take."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, 0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # before and after passes that may still run

    @contextmanager
    def passes(self, times: int = 1) -> Iterator[None]:
        """Count and time `times` passes, which run inside the context."""
        self.calls += times
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            yield
            end.record(stream)
            self._events.append((begin, end))
            if len(self._events) > MOST_EVENTS:
                self.fold()
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def fold(self) -> None:
        """Add up the passes that are over. Without this, the events of a server that nobody times would pile up."""
        over = next((n for n, (_, end) in enumerate(self._events) if not end.query()), len(self._events))
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events[:over]) / 1000
        del self._events[:over]

    @property
    def seconds(self) -> float:
        """Time of all passes so far in seconds; waits for the last pass."""
        if self._events:
            self._events[-1][1].synchronize()
            self.fold()
        return self._seconds
