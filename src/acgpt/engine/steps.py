"""Which row reads which positions at which step of sampling: known before the first draw, as only values are drawn.

    text     The  [cat]  on   the  [mat]  and  [sat]        width 2: up to two positions a step
    position  1     2     3    4     5     6     7          the first asked token is drawn by the prefill

    step 0   reads 2
    step 1   reads 3, 4    draws 5
    step 2   reads 5, 6    draws 7

A run of given tokens takes several steps if it is longer than a step is wide, during which the other rows go on
drawing. Rows are sorted by the number of their steps, so that those still at work are always the first ones.

Shape legend: R rows (one a sample), W positions read per step.
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
    """What a step costs, in the time that one more token in it takes: so that benchmarks/decoding.py's best is chosen.

    The first two were fitted under a mask, to 64 rows that are done together. What a row costs was set with the kernel,
    to 200 that are not: scattered blocks, `--generate`, where widths 2 and 4 are faster than 1.
    """

    fixed: float  # launches, and reading the weights
    wide: float  # the fixed part at any width but 1, over that at width 1, for which attention has a faster kernel
    row: float = 0  # what a row at work takes besides its tokens: its keys, the vocabulary, the draw


STEP_COST = {
    "ragged": StepCost(fixed=2600, wide=1, row=20),  # the kernel takes as long for 8 queries a row as for one
    "cuda": StepCost(fixed=2600, wide=1.37),
    "other": StepCost(fixed=48, wide=1),
}


@dataclass(frozen=True)
class Row:
    """One sample to draw: a query, its number in the call, and the number of the sample."""

    query: Query
    number: int
    sample: int


@dataclass(frozen=True)
class Schedule:
    """Which positions a row reads at each of its steps, and which one it draws after them."""

    reads: np.ndarray  # (steps, W) positions, right-aligned; -1 for nothing
    draws: np.ndarray  # (steps,) position; -1 while a run of given tokens is still being read


@dataclass(frozen=True)
class Steps:
    """The schedules of a batch of rows, side by side; a row that is done reads and draws nothing (-1)."""

    rows: list[Row]  # those that take most steps first
    reads: np.ndarray  # (steps, R, W)
    draws: np.ndarray  # (steps, R)
    working: np.ndarray  # (steps,) how many rows, always the first ones, are at work
    copies: np.ndarray  # (R,) how many copies stand before the text of each

    @property
    def slots(self) -> int:
        """How many slots the longest row has: its copies, BOS, and the text that is read."""
        return max(int(copies + row.query.asked_at[-1]) for copies, row in zip(self.copies, self.rows, strict=True))


def schedule(query: Query, width: int) -> Schedule:
    """The steps after the first draw: read the token just drawn and the run after it, then draw the next."""
    asked = query.asked_at
    chunks = -(-np.diff(asked) // width)  # how many steps the run before each draw takes; its first may be short
    run_of = np.repeat(np.arange(len(chunks)), chunks)
    left = np.repeat(chunks.cumsum(), chunks) - 1 - np.arange(len(run_of))  # steps of this run still to come
    ends = asked[1:][run_of] - left * width
    reads = ends[:, None] - width + np.arange(width)
    reads = np.where(reads >= asked[:-1][run_of][:, None], reads, -1)
    return Schedule(reads, np.where(left == 0, asked[1:][run_of], -1))


def choose_width(rows: Sequence[Row], cost: StepCost) -> int:
    """The width at which the whole batch should be fastest: few steps, and few rows at work, for what they cost."""
    counts = Counter(row.number for row in rows)
    queries = {row.number: row.query for row in rows}
    gaps = [np.diff(queries[number].asked_at) for number in counts]

    def total(width: int) -> float:
        steps = np.array([(-(-gap // width)).sum() for gap in gaps])
        at_work = (steps * list(counts.values())).sum()  # rows, summed over all steps
        return float(steps.max() * cost.fixed * (cost.wide if width > 1 else 1) + at_work * (cost.row + width))

    return min(WIDTHS, key=total)


def steps_of(rows: Sequence[Row], width: int, future: bool) -> Steps:
    """The steps of a batch at this width; `future` as in `layout.build`."""
    of_query = {number: schedule(query, width) for number, query in {row.number: row.query for row in rows}.items()}
    rows = sorted(rows, key=lambda row: -len(of_query[row.number].draws))
    lengths = np.array([len(of_query[row.number].draws) for row in rows])
    steps = int(lengths[0])
    reads, draws = np.full((steps, len(rows), width), -1), np.full((steps, len(rows)), -1)
    for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        reads[:length, r], draws[:length, r] = of_query[row.number].reads, of_query[row.number].draws
    working = (lengths > np.arange(steps)[:, None]).sum(1)
    copies = np.array([len(row.query.given_at) if future else 0 for row in rows])
    return Steps(rows, reads, draws, working, copies)


def few_shapes(working: np.ndarray) -> np.ndarray:
    """Rows at work rounded up to powers of two, or to all: each number of rows is a step that a GPU captures."""
    powers: np.ndarray = 2 ** np.ceil(np.log2(working)).astype(int)
    return powers.clip(max=working.max(initial=1))
