"""The scheduler: one thread that answers the requests of many searches together, as they come (continuous batching).

    submit(search) ──► requests of all searches ──► rows join the next step, scores fill the room between steps

    loop    arrivals and cancellations
            rows that wait join                  one prefill for all that share a route
            one decoding step of every pool      a pool has the rows of one route; finished rows leave
            a pass for queries that wait         for scores and lengths; small while rows are decoded

On a GPU a prefill or a pass takes longer than a step, however few queries are in it. While rows are decoded, queries
wait for a few others, at most `patience` rounds.

Every search gets the answers that `Executor.run` would give it alone, up to rounding: the noise of a sample depends on
its seed and query only. What fails, fails alone: if a batch raises an error, its members are tried one by one.

A pass that nobody waits for any more ends at the next block of the network: on a CPU, a pass over a long text takes
minutes.

All methods but `submit`, `Job.cancel` and `close` run in the scheduler's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from acgpt.engine.modules import Watch, blocks_of
from acgpt.engine.prefixes import Prefixes
from acgpt.engine.steps import Row
from acgpt.errors import BROKEN, Broken, Draining, QueueFull, log_failure
from acgpt.models.executor import (
    AnyTask,
    Executor,
    LengthRequest,
    Pool,
    Request,
    RowTask,
    SampleRows,
    Samples,
    Scores,
    Search,
    Task,
    grouped,
)
from acgpt.models.router import Route

Result = TypeVar("Result")

SLICE = {"cpu": 1024, "cuda": 8192}  # slots of queries that are answered between two steps, while rows are decoded
PATIENCE = {"cpu": 0, "cuda": 8}  # rounds at most that a query waits for others; fewer if there are few rows
ENOUGH = 2  # so many times the queries that wait are at least as many as the rows that are decoded
CROWD = 8  # rows that are decoded, for each round that a query may wait for others
PREFIX_BYTES = 2**28  # of keys and values that later requests can share
KEPT_BYTES = 2**30  # largest cache of a pool without rows that is kept
KEPT_SHARE = 1 / 16  # likewise, of the memory of a GPU, if that is more


def device_bytes(device: torch.device) -> int:
    """Return the memory of a GPU; 0 for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


class Abandoned(Exception):
    """All searches that a pass was for were cancelled."""


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
        self.tasks: Sequence[Task] = ()  # of the request that is being answered
        self.missing = 0  # number of tasks without an answer

    def cancel(self) -> None:
        """Give up the search; its rows leave before the next step. May be called from any thread, at any time."""
        with self.wake:
            self.cancelled = True
            self.wake.notify()


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


class Scheduler:
    """Answers searches in one thread.

    Args:
        executor: Runs passes of the model.
        most_waiting: Searches that may wait for their first pass, other than one for lengths; more are refused.
        most_rows: Rows that are decoded at a time. Default: as many as the engine takes.
    """

    def __init__(self, executor: Executor, *, most_waiting: int = 256, most_rows: int | None = None) -> None:
        self.executor, self.most_waiting = executor, most_waiting
        device = "cuda" if executor.engine.cuda else "cpu"
        self.patience, self.slice = PATIENCE[device], SLICE[device]
        self.keep_pools = executor.engine.cuda  # also without rows: their steps have been captured
        self.kept_bytes = max(KEPT_BYTES, int(KEPT_SHARE * device_bytes(executor.engine.model.device)))
        executor.engine.serving = True
        executor.engine.prefixes = Prefixes(executor.engine.model, PREFIX_BYTES)
        self.most_rows = most_rows or executor.engine.most_rows
        self.wake = threading.Condition()
        self.arrivals: deque[Job[Any]] = deque()
        self.jobs: set[Job[Any]] = set()  # accepted and not finished
        self.waiting: deque[RowTask] = deque()
        self.queries: deque[Task] = deque()  # for scores, for lengths, and for samples that are not drawn step by step
        self.rounds = {"rows": 0, "queries": 0}  # that some of these have waited
        self.pools: dict[Route, Pool] = {}
        self.counts = Counts()
        self.passing: Sequence[Task] = ()  # what the pass that is being run is for
        self.draining = self.stopped = self.broken = False
        self.thread = threading.Thread(target=self._loop, name="acgpt-scheduler", daemon=True)
        self.thread.start()

    # ---- from any thread --------------------------------------------------------------------------------------------

    def submit(self, search: Search[Result]) -> Job[Result]:
        """Accept a search.

        Raises:
            QueueFull: As many searches as may wait are waiting.
            Draining: The scheduler is being closed.
            Broken: Its thread has ended.
        """
        with self.wake:
            if self.broken:
                raise Broken(BROKEN)
            if self.draining:
                raise Draining("the server is shutting down and accepts no more requests.")
            if self.queued >= self.most_waiting:
                self.counts.refused += 1
                raise QueueFull(f"{self.most_waiting} requests are waiting, which is the limit. Try again later.")
            job = Job(search, self.wake)
            self.jobs.add(job)
            self.arrivals.append(job)
            self.counts.jobs += 1
            self.wake.notify()
            return job

    @property
    def queued(self) -> int:
        """Number of searches that wait for their first pass, other than one for lengths."""
        return sum(not job.begun for job in list(self.jobs))  # a copy: other threads change it

    @property
    def active_rows(self) -> int:
        """Number of rows that are being decoded."""
        return sum(len(pool.tasks) for pool in list(self.pools.values()))  # likewise

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Accept nothing more, and end the thread.

        Args:
            drain: Finish what was accepted; if not, it is cancelled.
            timeout: Seconds to wait.

        Returns:
            Whether the thread has ended.
        """
        with self.wake:
            self.draining = True
            if not drain:
                self.stopped = True
            self.wake.notify()
        self.thread.join(timeout)
        return not self.thread.is_alive()

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        blocks = blocks_of(self.executor.engine.model)
        hooks = [block.register_forward_pre_hook(Watch(self._check)) for block in blocks]
        try:
            self._run()
        except BaseException as error:  # not to be expected: nothing is accepted any more
            log_failure(error)
            with self.wake:
                self.broken = True
            for job in list(self.jobs):
                with contextlib.suppress(InvalidStateError):
                    job.future.set_exception(Broken(BROKEN))
            self.jobs.clear()
        finally:
            for hook in hooks:
                hook.remove()

    def _check(self) -> None:
        """End a pass that nobody waits for; called before each block of the network."""
        if not self.passing or threading.current_thread() is not self.thread:
            return
        if all(task.owner.cancelled for task in self.passing):
            raise Abandoned

    def _run(self) -> None:
        while True:
            with self.wake:
                while not (self.arrivals or self._working() or self._cancelled() or self.stopped):
                    if self.draining and not self.jobs:
                        return
                    self.wake.wait()
                arrivals = list(self.arrivals)
                self.arrivals.clear()
                gone = list(self.jobs) if self.stopped else self._cancelled()
            for job in gone:
                self._abandon(job)
            if self.stopped:
                return
            start = time.perf_counter()
            try:
                self._round(arrivals)
            except Exception as error:  # a bug here: fail what is accepted, and go on with what comes
                self.pools.clear()
                for job in list(self.jobs):
                    self._finish(job, error=error)
            self.counts.busy_seconds += time.perf_counter() - start

    def _round(self, arrivals: Sequence[Job[Any]]) -> None:
        """Begin new jobs, let rows join, take one step of every pool, and answer queries."""
        for job in arrivals:
            if job in self.jobs:
                self._advance(job, None)
        if self._due("rows", len(self.waiting)):
            self._admit()
        for route in list(self.pools):
            self._step(route)
        if self._due("queries", len(self.queries)):
            self._answer()

    def _due(self, kind: str, waiting: int) -> bool:
        """Return whether to compute now what waits: if it is much, has waited for long, or no rows are decoded."""
        self.rounds[kind] = self.rounds[kind] + 1 if waiting else 0
        active = self.active_rows
        patience = min(self.patience, active // CROWD)
        due = waiting > 0 and (ENOUGH * waiting >= active or self.rounds[kind] > patience)
        if due:
            self.rounds[kind] = 0
        return due

    def _working(self) -> bool:
        """Return whether something can be computed now."""
        return bool(self.waiting or self.queries or self.active_rows)

    def _cancelled(self) -> list[Job[Any]]:
        """Return the jobs that were cancelled."""
        return [job for job in self.jobs if job.cancelled]

    def _finish(self, job: Job[Any], result: Any = None, error: BaseException | None = None) -> None:
        """Set the result of a job, and forget it."""
        self._forget(job)
        self.counts.failed += error is not None
        with contextlib.suppress(InvalidStateError):  # nobody waits any more: the client has just hung up
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)

    def _abandon(self, job: Job[Any]) -> None:
        """Forget a job that was cancelled."""
        self._forget(job)
        self.counts.cancelled += 1
        try:
            job.search.close()
        except Exception as error:  # of the search's own clean-up
            log_failure(error)
        if self.stopped:
            with contextlib.suppress(InvalidStateError):
                job.future.set_exception(Draining("the server has stopped."))
        else:
            job.future.cancel()

    def _forget(self, job: Job[Any]) -> None:
        """Remove a job and all that waits or is decoded for it."""
        self.waiting = deque(task for task in self.waiting if task.owner is not job)
        self.queries = deque(task for task in self.queries if task.owner is not job)
        broken: list[tuple[Pool, Exception]] = []
        for route in list(self.pools):
            try:
                self._release(route, [task for task in self.pools[route].tasks.values() if task.owner is job])
            except Exception as error:
                log_failure(error)
                broken.append((self.pools.pop(route), error))
        job.tasks = ()  # they refer to the job
        with self.wake:  # last, so that a scheduler without jobs has no rows
            self.jobs.discard(job)
        for pool, why in broken:  # a row that cannot be released: those that it is decoded with fail, too
            for other in {task.owner for task in pool.tasks.values()} & self.jobs:
                self._finish(other, error=why)

    def _release(self, route: Route, tasks: Sequence[RowTask]) -> None:
        """Remove rows from a pool; an empty pool is dropped, with its memory, unless it is to be kept."""
        pool = self.pools[route]
        pool.release(tasks)
        if not pool.tasks and not (self.keep_pools and pool.bytes <= self.kept_bytes):
            del self.pools[route]

    def _advance(self, job: Job[Any], result: Any) -> None:
        """Send a search the result of its request, and take its next request."""
        try:
            request = job.search.send(result)
            while not self._accept(job, request):
                job.begun, request = True, job.search.send(request.result([]))  # nothing to compute
        except StopIteration as end:
            self._finish(job, end.value)
        except Exception as error:
            self._finish(job, error=error)

    def _accept(self, job: Job[Any], request: Request) -> bool:
        """Add the tasks of a request to what waits; return whether it has any."""
        if isinstance(request, Samples) and self.executor.draws_by_steps(request):
            request = SampleRows.of(request)
        job.tasks = request.tasks(job)
        job.missing = len(job.tasks)
        for task in job.tasks:
            if isinstance(task, RowTask):
                self.waiting.append(task)
            else:
                self.queries.append(task)
        return job.missing > 0

    def _answered(self, task: Task, answer: Any) -> None:
        """Note the answer to a task, and advance its job if it was the last one of a request."""
        job: Job[Any] = task.owner
        if job not in self.jobs:  # it has failed meanwhile
            return
        job.begun = job.begun or not isinstance(task.request, LengthRequest)  # these are little of the work
        task.answer = answer
        job.missing -= 1
        if not job.missing:
            self._advance(job, task.request.result([each.answer for each in job.tasks]))

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let rows that wait join, in their order, as long as there is room."""
        chosen: list[RowTask] = []
        active = [task.slots for pool in self.pools.values() for task in pool.tasks.values()]
        longest, room = max(active, default=0), 0
        while self.waiting:
            if not room or self.waiting[0].slots > longest:  # not for each row: it asks the device
                longest = max(longest, self.waiting[0].slots)
                room = max(1, min(self.most_rows, self.executor.engine.rows_at_once(longest + 1)))
            if len(active) + len(chosen) >= room:
                break
            chosen.append(self.waiting.popleft())
        for tasks in grouped(chosen, attrgetter("route")):
            self._drawn([task for task, _ in self._passed(tasks, self._join)])

    def _join(self, tasks: Sequence[RowTask]) -> Sequence[Row]:
        """Prefill rows together."""
        route = tasks[0].route
        pool = self.pools.get(route) or Pool(self.executor, route, tasks[0].request.sampling)
        rows = pool.join(tasks)
        self.pools[route] = pool
        return rows

    def _step(self, route: Route) -> None:
        """Advance the rows of a pool by one step. If that fails, the newest row gives way, and so on."""
        while route in self.pools and self.pools[route].tasks:
            pool = self.pools[route]
            try:
                drawn = pool.step()
            except Exception as error:
                failed = [task for task in pool.tasks.values() if task.row.failed]
                for task in failed or list(pool.tasks.values())[-1:]:
                    if task.owner in self.jobs:
                        self._finish(task.owner, error=error)
                if not failed:
                    if not pool.tasks:
                        self.pools.pop(route, None)  # whatever is wrong with it
                    continue
                drawn = list(pool.tasks.values())
            self.counts.steps += 1
            self._drawn(drawn)
            return

    def _drawn(self, tasks: Sequence[RowTask]) -> None:
        """Report what rows of one route have drawn, and let those leave that have ended."""
        ended: list[RowTask] = []
        for task in tasks:
            if task.owner not in self.jobs:
                continue
            self.counts.drawn += 1
            task.owner.begun = True
            try:
                if task.ended():
                    ended.append(task)
            except Exception as error:
                self._finish(task.owner, error=error)
        ended = [task for task in ended if task.owner in self.jobs]
        if ended:
            self._release(ended[0].route, ended)
        for task in ended:
            self._answered(task, task.row)

    def _answer(self) -> None:
        """Answer some of the queries that wait: of each kind those that have waited longest, in one pass."""
        oldest: dict[type[object], Task] = {}
        for task in self.queries:
            oldest.setdefault(type(task.request), task)
        for task in oldest.values():
            self._answer_like(task)

    def _answer_like(self, first: Task) -> None:
        """Answer the queries of one group that wait, as many as there is room for; whole samples of one job alone."""
        room = self.slice if self.active_rows or self.waiting else self.executor.engine.budget
        group, owner = first.group, first.owner if isinstance(first.request, Samples) else None
        chosen: list[Task] = []
        for task in self.queries:
            if task.group == group and owner in (None, task.owner) and (not chosen or task.slots <= room):
                chosen.append(task)
                room -= task.slots
        taken = set(map(id, chosen))
        self.queries = deque(task for task in self.queries if id(task) not in taken)
        for task, answer in self._passed(chosen, self.executor.answers):
            self.counts.scored += len(answer) if isinstance(task.request, Scores) else 0
            self._answered(task, answer)

    def _passed(
        self, tasks: Sequence[AnyTask], run: Callable[[Sequence[AnyTask]], Sequence[Any]]
    ) -> list[tuple[AnyTask, Any]]:
        """Run a pass, and return its tasks with their results. If it fails, run one for each task: one fails alone.

        The pass ends if all jobs that it is for are cancelled.
        """
        self.passing = tasks = [task for task in tasks if task.owner in self.jobs]
        try:
            return list(zip(tasks, run(tasks), strict=True)) if tasks else []
        except Abandoned:
            return []
        except Exception as error:
            if len(tasks) == 1:
                self._finish(tasks[0].owner, error=error)
                return []
        finally:
            self.passing = []
        return [pair for task in tasks for pair in self._passed([task], run)]
