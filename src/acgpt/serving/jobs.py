"""What a scheduler has to do: searches that were submitted, their rows and queries, and the rows that are decoded."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from acgpt.engine.decoding import Decoding
from acgpt.engine.steps import Guide, Row
from acgpt.models.executor import LengthRequest, Request, Rows, Samples, Search
from acgpt.models.router import Route
from acgpt.query.query import Query

Result = TypeVar("Result")

BROKEN = "the server cannot answer any more: restart it."


class Refused(Exception):
    """A search that was not accepted."""


class QueueFull(Refused):
    """Too many searches are waiting."""


class Draining(Refused):
    """The scheduler is being closed, and accepts nothing more."""


class Broken(Refused):
    """The thread of the scheduler has ended with an error."""


class Job(Generic[Result]):
    """A search that was submitted.

    Args:
        search: The search.
        wake: Wakes the scheduler.

    Attributes:
        future: Its result.
    """

    def __init__(self, search: Search[Result], wake: threading.Condition) -> None:
        self.search, self.wake = search, wake
        self.future: Future[Result] = Future()
        self.cancelled = False
        self.begun = False
        self.request: Request | None = None  # the one that is being answered
        self.answers: dict[int, Any] = {}  # parts of its result, by index
        self.parts = 0  # number of parts

    def cancel(self) -> None:
        """Give up the search; its rows leave before the next step. May be called from any thread, at any time."""
        with self.wake:
            self.cancelled = True
            self.wake.notify()


@dataclass(eq=False)
class PendingRow:
    """A row that is to be drawn for a job."""

    job: Job[Any]
    index: int  # in the result of the job's request
    query: Query
    sample: int
    route: Route
    request: Rows | Samples
    guide: Guide | None = None
    row: Row | None = None  # once it is decoded

    @property
    def slots(self) -> int:
        """Upper bound of the slots that it takes in a cache."""
        return 2 * len(self.query) + 1

    def ended(self) -> bool:
        """Report what the row has drawn last, and return whether it ends."""
        assert self.row is not None
        self.request.notice(1)
        if isinstance(self.request, Rows):
            self.request.progress(self.row)
            return self.row.done or self.request.stopped(self.row)
        return self.row.done


@dataclass(eq=False)
class PendingScore:
    """A query that is to be scored for a job."""

    job: Job[Any]
    index: int
    query: Query
    route: Route
    top: int | None = None  # number of the most probable tokens that are asked, too


@dataclass
class Pool:
    """The rows of one route, which are decoded together."""

    decoding: Decoding
    rows: dict[int, PendingRow] = field(default_factory=dict)  # by id of the active row

    @property
    def bytes(self) -> int:
        """Size of its cache of keys and values."""
        rows, slots = self.decoding.decoder.size[:2] if self.decoding.decoder is not None else (0, 0)
        return rows * slots * self.decoding.engine.slot_bytes


@dataclass
class Counts:
    """What a scheduler has done, for /metrics."""

    jobs: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    steps: int = 0
    drawn: int = 0
    scored: int = 0
    busy_seconds: float = 0.0


def tokens_of(job: Job[Any]) -> int:
    """Return the number of tokens of a job that asks for lengths."""
    assert isinstance(job.request, LengthRequest)
    return 2 * sum(map(len, job.request.questions))
