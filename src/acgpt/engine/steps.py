"""The schedule of sampling: the positions that each row reads and draws at each step, known before the first draw.

    text     The  [cat]  on   the  [mat]  and  [sat]        width 2: up to two positions a step
    position  1     2     3    4     5     6     7          the first asked token is drawn by the prefill

    step 0   reads 2
    step 1   reads 3, 4    draws 5
    step 2   reads 5, 6    draws 7

A run of given tokens that is longer than the width takes several steps; meanwhile other rows go on drawing. Rows are
sorted by their number of steps, so that the active rows are always the first ones.

Shape legend: R rows (one per sample), W positions read per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acgpt.query.query import Query

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class StepCost:
    """Cost of a step, in units of the time for one more token in it.

    The costs are set such that `choose_width` finds the fastest width on the queries of benchmarks/sampling.py. `fixed`
    and `wide` were fitted with a mask, to 64 rows that end together. `row` was set with the kernel, to 200 rows that do
    not (scattered blocks, `--generate`), where widths 2 and 4 are faster than 1.
    """

    fixed: float  # kernel launches, and reading the weights
    wide: float  # ratio of the fixed part at any larger width to that at width 1, where attention has a faster kernel
    row: float = 0  # cost of an active row besides its tokens: its keys, the vocabulary, the draw


STEP_COST = {
    "ragged": StepCost(fixed=2600, wide=1, row=20),  # the kernel is as fast for 8 queries per row as for one
    "cuda": StepCost(fixed=2600, wide=1.37),
    "other": StepCost(fixed=48, wide=1),
}


@dataclass(frozen=True)
class Row:
    """A sample to draw: a query, its number in the call, and the number of the sample."""

    query: Query
    number: int
    sample: int


@dataclass(frozen=True)
class Schedule:
    """The positions that a row reads at each step, and the position that it draws afterwards."""

    reads: np.ndarray  # (steps, W) positions, right-aligned; -1 for nothing
    draws: np.ndarray  # (steps,) position; -1 while a run of given tokens is still being read


@dataclass(frozen=True)
class Steps:
    """The schedules of a batch of rows, side by side; a finished row reads and draws nothing (-1)."""

    rows: list[Row]  # those with most steps first
    reads: np.ndarray  # (steps, R, W)
    draws: np.ndarray  # (steps, R)
    working: np.ndarray  # (steps,) number of active rows, which are the first ones
    copies: np.ndarray  # (R,) number of copies before each row's text

    @property
    def slots(self) -> int:
        """Number of slots of the longest row: copies, BOS, and the text that is read."""
        return max(int(copies + row.query.asked_at[-1]) for copies, row in zip(self.copies, self.rows, strict=True))


def schedule(query: Query, width: int) -> Schedule:
    """Return the steps after the first draw: read the token just drawn and the given run after it, draw the next."""
    asked = query.asked_at
    chunks = -(-np.diff(asked) // width)  # steps of the run before each draw; the first one may read less
    run_of = np.repeat(np.arange(len(chunks)), chunks)
    remaining = np.repeat(chunks.cumsum(), chunks) - 1 - np.arange(len(run_of))  # steps of this run still to come
    ends = asked[1:][run_of] - remaining * width
    reads = ends[:, None] - width + np.arange(width)
    reads = np.where(reads >= asked[:-1][run_of][:, None], reads, -1)
    return Schedule(reads, np.where(remaining == 0, asked[1:][run_of], -1))


def choose_width(rows: Sequence[Row], cost: StepCost) -> int:
    """Return the width at which the batch should be fastest, by the cost of its steps and of its active rows."""
    counts = Counter(row.number for row in rows)
    queries = {row.number: row.query for row in rows}
    gaps = [np.diff(queries[number].asked_at) for number in counts]

    def total(width: int) -> float:
        steps = np.array([(-(-gap // width)).sum() for gap in gaps])
        active = (steps * list(counts.values())).sum()  # rows, summed over all steps
        return float(steps.max() * cost.fixed * (cost.wide if width > 1 else 1) + active * (cost.row + width))

    return min(WIDTHS, key=total)


def steps_of(rows: Sequence[Row], width: int, future: bool) -> Steps:
    """Return the steps of a batch at this width; `future` as in `layout.build`."""
    schedules = {number: schedule(query, width) for number, query in {row.number: row.query for row in rows}.items()}
    rows = sorted(rows, key=lambda row: -len(schedules[row.number].draws))
    lengths = np.array([len(schedules[row.number].draws) for row in rows])
    steps = int(lengths[0])
    reads, draws = np.full((steps, len(rows), width), -1), np.full((steps, len(rows)), -1)
    for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        reads[:length, r], draws[:length, r] = schedules[row.number].reads, schedules[row.number].draws
    working = (lengths > np.arange(steps)[:, None]).sum(1)
    copies = np.array([len(row.query.given_at) if future else 0 for row in rows])
    return Steps(rows, reads, draws, working, copies)


def few_shapes(working: np.ndarray) -> np.ndarray:
    """Round numbers of active rows up to powers of two, or to all: a GPU captures a step for each number of rows."""
    powers: np.ndarray = 2 ** np.ceil(np.log2(working)).astype(int)
    return powers.clip(max=working.max(initial=1))
