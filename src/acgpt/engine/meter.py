"""How often a model is run, and how long that takes: on CUDA by events of the device, for which nobody has to wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_EVENTS = 1000  # that are held before those of finished passes are added up


def ignore(tokens: int) -> None:
    """Take no notice of drawn tokens: what a sampler calls by default."""


class Meter:
    """Counts the passes through a model on one device, and the time of the device that they take."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, 0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # around passes that may not be over yet

    @contextmanager
    def passes(self, times: int = 1) -> Iterator[None]:
        """Within, the model is run so many times."""
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
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def fold(self) -> None:
        """Add up the passes that are over. Without this, the events of a server that nobody times would pile up."""
        over = next((n for n, (_, end) in enumerate(self._events) if not end.query()), len(self._events))
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events[:over]) / 1000
        del self._events[:over]

    @property
    def seconds(self) -> float:
        """That all passes so far have taken; waits for the last of them."""
        if self._events:
            self._events[-1][1].synchronize()
            self.fold()
        return self._seconds
