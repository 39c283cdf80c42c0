"""Metrics of the server in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from acgpt.serving.scheduler import Scheduler

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Histogram:
    """Durations, counted by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Metrics:
    """Counts requests. All methods are called in the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Histogram] = {}

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self.requests[method, route, status] += 1
        self.durations.setdefault(route, Histogram()).add(seconds)

    def render(self, scheduler: Scheduler) -> str:
        """Return all metrics as text.

        Args:
            scheduler: Has counts of its own.
        """
        counts = scheduler.counts
        return "".join(
            [
                *family("acgpt_requests_total", "counter", "Requests by route and status.", self._requests()),
                *family("acgpt_request_seconds", "histogram", "Duration of requests.", self._durations()),
                *plain("acgpt_queue_length", "gauge", "Questions that wait for their first pass.", scheduler.queued),
                *plain("acgpt_active_rows", "gauge", "Texts that are being generated.", scheduler.active_rows),
                *plain("acgpt_questions_total", "counter", "Questions that were accepted.", counts.jobs),
                *plain("acgpt_failed_total", "counter", "Questions that failed.", counts.failed),
                *plain("acgpt_cancelled_total", "counter", "Questions that were given up.", counts.cancelled),
                *plain("acgpt_refused_total", "counter", "Questions refused by a full queue.", counts.refused),
                *plain("acgpt_steps_total", "counter", "Decoding steps.", counts.steps),
                *plain("acgpt_tokens_drawn_total", "counter", "Tokens drawn.", counts.drawn),
                *plain("acgpt_tokens_scored_total", "counter", "Tokens scored.", counts.scored),
                *plain("acgpt_busy_seconds_total", "counter", "Time that the model has run.", counts.busy_seconds),
            ]
        )

    def _requests(self) -> Iterator[tuple[str, Mapping[str, object], float]]:
        for (method, route, status), count in sorted(self.requests.items()):
            yield "", {"method": method, "route": route, "status": status}, count

    def _durations(self) -> Iterator[tuple[str, Mapping[str, object], float]]:
        for route, histogram in sorted(self.durations.items()):
            below = 0
            for bound, count in zip((*BUCKETS, "+Inf"), histogram.counts, strict=True):
                below += count
                yield "_bucket", {"route": route, "le": bound}, below
            yield "_sum", {"route": route}, histogram.total
            yield "_count", {"route": route}, below


def family(
    name: str, kind: str, help: str, samples: Iterable[tuple[str, Mapping[str, object], float]]
) -> Iterator[str]:
    """Yield the lines of a metric.

    Args:
        name: Its name.
        kind: Its type.
        help: What it counts.
        samples: For each value: the suffix of the name, the labels, and the value.
    """
    yield f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
        yield f"{name}{suffix}{{{inside}}} {value!r}\n" if inside else f"{name}{suffix} {value!r}\n"


def plain(name: str, kind: str, help: str, value: float) -> Iterator[str]:
    """Yield the lines of a metric with one value."""
    return family(name, kind, help, [("", {}, value)])
