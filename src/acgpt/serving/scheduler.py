"""The scheduler: one thread that answers the requests of many searches together, as they come (continuous batching).

    submit(search) ──► requests of all searches ──► rows join the next step, scores fill the room between steps

    loop    arrivals and cancellations
            rows that wait join                  one prefill for all that share a route
            one decoding step of every pool      a pool has the rows of one route; finished rows leave
            one pass of scores                   small while rows are decoded, so that these do not wait long

On a GPU a prefill or a pass of scores takes longer than a step, however few queries are in it. While rows are decoded,
queries wait for a few others, at most `patience` rounds.

Every search gets the answers that `executor.Executor` would give it alone, up to rounding: the noise of a sample
depends on its seed and query only. What fails, fails alone: if a batch raises an error, its members are tried one by
one.

A pass that nobody waits for any more ends at the next block of the network: on a CPU, a pass over a long text takes
minutes.

All methods but `submit`, `Job.cancel` and `close` run in the scheduler's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from typing import Any, TypeVar

import numpy as np
import torch

from acgpt.engine.modules import Watch, blocks_of
from acgpt.engine.prefixes import Prefixes
from acgpt.engine.steps import Row
from acgpt.errors import QueryError
from acgpt.models.executor import Executor, LengthRequest, Request, Rows, Samples, Scores, Search, Top
from acgpt.models.router import Route, by_route
from acgpt.query.query import Query
from acgpt.serving.jobs import (
    BROKEN,
    Broken,
    Counts,
    Draining,
    Job,
    PendingRow,
    PendingScore,
    Pool,
    QueueFull,
    tokens_of,
)
from acgpt.serving.log import log_failure

Result = TypeVar("Result")

SLICE = {"cpu": 1024, "cuda": 8192}  # tokens per pass of scores while rows are decoded
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
        self.rounds = {"rows": 0, "lengths": 0, "scores": 0}  # that something of this kind has waited
        executor.engine.serving = True
        executor.engine.prefixes = Prefixes(executor.engine.model, PREFIX_BYTES)
        self.most_rows = most_rows or executor.engine.most_rows
        self.wake = threading.Condition()
        self.arrivals: deque[Job[Any]] = deque()
        self.jobs: set[Job[Any]] = set()  # accepted and not finished
        self.waiting: deque[PendingRow] = deque()
        self.scores: deque[PendingScore] = deque()
        self.lengths: deque[Job[Any]] = deque()
        self.blocking: deque[Job[Any]] = deque()  # samples of methods that cannot be decoded step by step
        self.pools: dict[Route, Pool] = {}
        self.counts = Counts()
        self.passing: list[Job[Any]] = []  # what the pass that is being run is for
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
        return sum(len(pool.rows) for pool in list(self.pools.values()))  # likewise

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
        if self.passing and threading.current_thread() is self.thread and all(job.cancelled for job in self.passing):
            raise Abandoned

    @contextlib.contextmanager
    def _pass_for(self, jobs: Iterable[Job[Any]]) -> Iterator[None]:
        """Run passes for some jobs inside the context; they end if all of these are cancelled.

        Raises:
            Abandoned: They were.
        """
        self.passing = list(jobs)
        try:
            yield
        finally:
            self.passing = []

    def _run(self) -> None:
        while True:
            with self.wake:
                while not (self.arrivals or self.jobs or self.stopped or self.draining):
                    self.wake.wait()
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
        """Begin new jobs, let rows join, take one step of every pool, and one pass of each other kind."""
        for job in arrivals:
            if job in self.jobs:
                self._advance(job, None)
        if self._due("rows", len(self.waiting)):
            self._admit()
        for route in list(self.pools):
            self._step(route)
        if self._due("lengths", len(self.lengths)):
            self._ask_lengths()
        if self._due("scores", len(self.scores)):
            self._score()
        self._draw_whole()

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
        return bool(self.waiting or self.scores or self.lengths or self.blocking or self.active_rows)

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

    def _apart(self, error: Exception, parts: Sequence[Any], repeat: Callable[[Any], None]) -> None:
        """Repeat a pass that has failed for each of its parts, so that only those fail that cannot be computed."""
        if len(parts) == 1:
            return self._finish(parts[0].job, error=error)
        for part in parts:
            repeat(part)

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
        self.waiting = deque(pending for pending in self.waiting if pending.job is not job)
        self.scores = deque(pending for pending in self.scores if pending.job is not job)
        self.lengths = deque(other for other in self.lengths if other is not job)
        self.blocking = deque(other for other in self.blocking if other is not job)
        broken: list[tuple[Pool, Exception]] = []
        for route in list(self.pools):
            try:
                self._release(route, [p for p in self.pools[route].rows.values() if p.job is job])
            except Exception as error:
                log_failure(error)
                broken.append((self.pools.pop(route), error))
        with self.wake:  # last, so that a scheduler without jobs has no rows
            self.jobs.discard(job)
        for pool, why in broken:  # a row that cannot be released: those that it is decoded with fail, too
            for other in {pending.job for pending in pool.rows.values()} & self.jobs:
                self._finish(other, error=why)

    def _release(self, route: Route, rows: Sequence[PendingRow]) -> None:
        """Remove rows from a pool; an empty pool is dropped, with its memory, unless it is to be kept."""
        pool = self.pools[route]
        decoded = [pending.row for pending in rows if pending.row is not None]
        assert len(decoded) == len(rows)  # a pool has only rows that have joined
        pool.decoding.release(decoded)
        for row in decoded:
            del pool.rows[id(row)]
        if not pool.rows and not (self.keep_pools and pool.bytes <= self.kept_bytes):
            del self.pools[route]

    def _advance(self, job: Job[Any], answer: Any) -> None:
        """Send a search the answer to its request, and take its next request."""
        while True:
            try:
                request = job.search.send(answer)
            except StopIteration as end:
                return self._finish(job, end.value)
            except Exception as error:
                return self._finish(job, error=error)
            job.request, job.answers = request, {}
            try:
                self._accept(job, request)
            except Exception as error:
                return self._finish(job, error=error)
            if job.parts:
                return None
            job.begun, answer = True, []  # nothing to compute

    def _accept(self, job: Job[Any], request: Request) -> None:
        """Add the parts of a request to what waits."""
        if isinstance(request, Rows):
            job.parts = len(request.queries)
            for i, query in enumerate(request.queries):
                self.waiting.append(
                    PendingRow(job, i, query, request.samples[i], request.routes[i], request, request.guides[i])
                )
        elif isinstance(request, Samples):
            self._accept_samples(job, request)
        elif isinstance(request, Scores):
            job.parts, top = len(request.queries), request.k if isinstance(request, Top) else None
            for i, (query, route) in enumerate(zip(request.queries, request.routes, strict=True)):
                self.scores.append(PendingScore(job, i, query, route, top))
        else:
            job.parts = len(request.questions)
            self.lengths.append(job)

    def _accept_samples(self, job: Job[Any], request: Samples) -> None:
        """Add a row for each sample, if the method decodes step by step; else the whole request."""
        job.parts = len(request.queries) * request.n
        for query, route in zip(request.queries, request.routes, strict=True):
            method = self.executor.router.method(route)
            try:
                method.decoding(self.executor.engine, request.sampling, route.future)
            except QueryError:
                self.blocking.append(job)
                return
            if not method.can_sample(query, route.future) or not len(query.asked_at):
                self.blocking.append(job)  # which raises the method's error
                return
        for i, (query, route) in enumerate(zip(request.queries, request.routes, strict=True)):
            for sample in range(request.n):
                self.waiting.append(PendingRow(job, i * request.n + sample, query, sample, route, request))

    def _answered(self, job: Job[Any], index: int, answer: Any) -> None:
        """Note a part of the result of a job's request, and advance the job if it was the last one."""
        if job not in self.jobs:  # it has failed meanwhile
            return
        job.begun = job.begun or not isinstance(job.request, LengthRequest)  # lengths are little of the work
        job.answers[index] = answer
        if len(job.answers) < job.parts:
            return
        parts, request = [job.answers[i] for i in range(job.parts)], job.request
        if isinstance(request, Samples):
            self._advance(job, [parts[i : i + request.n] for i in range(0, len(parts), request.n)])
        elif isinstance(request, LengthRequest):
            self._advance(job, np.stack(parts))
        else:
            self._advance(job, parts)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let rows that wait join, in their order, as long as there is room."""
        chosen: list[PendingRow] = []
        active = [pending.slots for pool in self.pools.values() for pending in pool.rows.values()]
        longest, room = max(active, default=0), 0
        while self.waiting:
            if not room or self.waiting[0].slots > longest:  # not for each row: it asks the device
                longest = max(longest, self.waiting[0].slots)
                room = max(1, min(self.most_rows, self.executor.engine.rows_at_once(longest)))
            if len(active) + len(chosen) >= room:
                break
            chosen.append(self.waiting.popleft())
        for route, members in by_route([pending.route for pending in chosen]):
            self._join(route, [chosen[i] for i in members])

    def _join(self, route: Route, rows: list[PendingRow]) -> None:
        """Prefill rows together; if that fails, one by one, so that only those fail that cannot be prefilled."""
        rows = [pending for pending in rows if pending.job in self.jobs]
        if not rows:
            return
        try:
            with self._pass_for(pending.job for pending in rows):
                joined = self._prefill(route, rows)
        except Abandoned:
            return
        except Exception as error:
            return self._apart(error, rows, lambda pending: self._join(route, [pending]))
        pool = self.pools[route]
        for pending, row in zip(rows, joined, strict=True):
            pending.row, pending.job.begun = row, True
            pool.rows[id(row)] = pending
        self._drawn(route, rows)

    def _prefill(self, route: Route, rows: Sequence[PendingRow]) -> list[Row]:
        """Add rows to the decoding of their route, and return them in this order."""
        with self.executor.inference(route) as engine:
            pool = self.pools.get(route)
            if pool is None:
                method = self.executor.router.method(route)
                pool = Pool(method.decoding(engine, rows[0].request.sampling, route.future))
            same: dict[Query, Query] = {}  # equal queries share a prefill
            joined = pool.decoding.prefill(
                [same.setdefault(pending.query, pending.query) for pending in rows],
                [pending.sample for pending in rows],
                samplings=[pending.request.sampling for pending in rows],
                guides=[pending.guide for pending in rows],
            )
            self.pools[route] = pool
        return joined

    def _step(self, route: Route) -> None:
        """Advance the rows of a pool by one step. If that fails, the newest row gives way, and so on."""
        while route in self.pools and self.pools[route].rows:
            pool = self.pools[route]
            try:
                with self.executor.inference(route, stepping=True):
                    drawn = pool.decoding.step()
            except Exception as error:
                failed = [pending for pending in pool.rows.values() if pending.row is not None and pending.row.failed]
                for pending in failed or list(pool.rows.values())[-1:]:
                    if pending.job in self.jobs:
                        self._finish(pending.job, error=error)
                if not failed:
                    if not pool.rows:
                        self.pools.pop(route, None)  # whatever is wrong with it
                    continue
                drawn = [p.row for p in self.pools[route].rows.values() if p.row] if route in self.pools else []
            self.counts.steps += 1
            if route in self.pools:
                rows = self.pools[route].rows
                self._drawn(route, [rows[id(row)] for row in drawn if id(row) in rows])
            return

    def _drawn(self, route: Route, rows: Sequence[PendingRow]) -> None:
        """Report what rows have drawn, and let those leave that are done."""
        done: list[PendingRow] = []
        for pending in rows:
            if pending.job not in self.jobs:
                continue
            self.counts.drawn += 1
            try:
                if pending.ended():
                    done.append(pending)
            except Exception as error:
                self._finish(pending.job, error=error)
        done = [pending for pending in done if pending.job in self.jobs]
        if done:
            self._release(route, done)
        for pending in done:
            row = pending.row
            assert row is not None
            if isinstance(pending.job.request, Samples):
                tokens, log_probs = [token for _, token, _ in row.drawn], [log_prob for *_, log_prob in row.drawn]
                self._answered(pending.job, pending.index, (np.array(tokens), np.array(log_probs)))
            else:
                self._answered(pending.job, pending.index, row)

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Return the number of tokens of a pass of scores or lengths."""
        return self.slice if self.active_rows or self.waiting else self.executor.engine.budget

    def _score(self) -> None:
        """Score some of the queries that wait, in one pass or a few: those of the first one's route and kind."""
        route, top = self.scores[0].route, self.scores[0].top
        budget = self._room()
        chosen: list[PendingScore] = []
        for pending in self.scores:
            fits = not chosen or budget >= 2 * len(pending.query)
            if pending.route == route and pending.top == top and fits:
                chosen.append(pending)
                budget -= 2 * len(pending.query)
        taken = set(map(id, chosen))
        self.scores = deque(pending for pending in self.scores if id(pending) not in taken)
        self._score_together(route, chosen)

    def _score_together(self, route: Route, pending: Sequence[PendingScore]) -> None:
        """Score queries in one batch; if that fails, one by one."""
        pending = [each for each in pending if each.job in self.jobs]
        if not pending:
            return
        try:
            with self._pass_for(each.job for each in pending):
                queries = [each.query for each in pending]
                answers = self.executor.log_probs(queries, [route] * len(pending), pending[0].top)
        except Abandoned:
            return
        except Exception as error:
            return self._apart(error, pending, lambda each: self._score_together(route, [each]))
        self.counts.scored += sum(map(len, answers))
        for each, answer in zip(pending, answers, strict=True):
            self._answered(each.job, each.index, answer)

    def _ask_lengths(self) -> None:
        """Answer questions for lengths, of some jobs that wait together; if that fails, job by job."""
        jobs: list[Job[Any]] = []
        budget = self._room()
        while self.lengths and (not jobs or budget >= tokens_of(self.lengths[0])):
            jobs.append(self.lengths.popleft())
            budget -= tokens_of(jobs[-1])
        requests = {i: job.request for i, job in enumerate(jobs) if isinstance(job.request, LengthRequest)}
        if not requests:
            return
        answers: dict[int, Any] = {}
        try:
            with self._pass_for(jobs):
                answers.update(self.executor.lengths(requests))
        except Abandoned:
            return
        except Exception:
            for i, request in requests.items():
                try:
                    answers.update(self.executor.lengths({i: request}))
                except Exception as error:
                    self._finish(jobs[i], error=error)
        for i, answer in answers.items():
            for index, part in enumerate(answer):
                self._answered(jobs[i], index, part)

    def _draw_whole(self) -> None:
        """Draw the samples of one request of a method that cannot be decoded step by step."""
        if not self.blocking:
            return
        job = self.blocking.popleft()
        assert isinstance(job.request, Samples)
        try:
            with self._pass_for([job]):
                (drawn,) = self.executor.samples([job.request])
        except Abandoned:
            return
        except Exception as error:
            return self._finish(job, error=error)
        for index, sample in enumerate(sample for samples in drawn for sample in samples):
            self._answered(job, index, sample)
