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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)

Token = tuple[int, int, float]  # position, token id and log-probability of a drawn token


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


class Guide(Protocol):
    """Decides which tokens a row may draw; it is told every token that the row has drawn."""

    def allowed(self) -> np.ndarray:
        """Return (V,) whether each token may be drawn next; at least one may."""
        ...

    def advance(self, token: int) -> None:
        """Note that a token has been drawn."""
        ...


@dataclass(frozen=True)
class Schedule:
    """The positions that a row reads at each step, and the position that it draws afterwards."""

    reads: np.ndarray  # (steps, W) positions, right-aligned; -1 for nothing
    draws: np.ndarray  # (steps,) position; -1 while a run of given tokens is still being read


@dataclass(eq=False)
class Row:
    """One sample that is drawn.

    Args:
        query: The query.
        number: Number of the query in the call.
        sample: Number of the sample; the noise depends on it.
        sampling: Temperature, truncation and seed.
        guide: Constrains the tokens; `None` if all are allowed.

    Attributes:
        schedule: Positions read and drawn at each step after the first draw; set by `steps_of`, as is `copies`.
        copies: Number of copies before the text.
        drawn: Tokens drawn so far, from left to right. This and the following are for rows of `Decoding.step`.
        drawn_with: With a guide, the log-probabilities with which the tokens were drawn: among the allowed tokens, with
            temperature and truncation. 0 for greedy decoding.
        step: Number of steps taken.
        failed: The model's logits for this row were not numbers; it draws no more tokens.
    """

    query: Query
    number: int
    sample: int
    sampling: Sampling = field(default_factory=Sampling)
    guide: Guide | None = None
    schedule: Schedule = field(init=False)
    copies: int = field(init=False)
    drawn: list[Token] = field(init=False, default_factory=list)
    drawn_with: list[float] = field(init=False, default_factory=list)
    step: int = field(init=False, default=0)
    failed: bool = field(init=False, default=False)

    @property
    def done(self) -> bool:
        """Whether all asked tokens have been drawn, or the row has failed."""
        return self.failed or len(self.drawn) == len(self.query.asked_at)

    @cached_property
    def kind(self) -> Sampling:
        """`sampling` without seed and number: the noise covers these. Rows of one kind are drawn together."""
        return replace(self.sampling, seed=0, first=0)


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of one shape."""

    steps: int
    rows: int  # to advance, the first ones
    capacity: int  # slots of the cache that are read
    draws: int  # tokens drawn, over all rows
    left: int  # rows that are active afterwards, rounded up by `few_shapes`


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
        return max(row.copies + int(row.query.asked_at[-1]) for row in self.rows)

    def stages(self, grain: int, capacity: int | None, few: bool) -> list[Stage]:
        """Return the steps in groups of one shape; one group without steps if there are none.

        Args:
            grain: The cache is read in multiples of this many slots.
            capacity: Slots of the cache that each step reads. Default: as many as are in use.
            few: Advance numbers of rows that are given by `few_shapes`, finished rows among them.
        """
        used = (self.reads.max(-1, initial=-1) + self.copies).max(-1, initial=0) + 1
        capacities = -(-used // grain) * grain if capacity is None else np.full(len(used), capacity)
        left = few_shapes(self.working)
        rows = left if few else self.working
        changes = np.flatnonzero(np.diff(rows) | np.diff(capacities)) + 1
        stages = []
        for group in np.split(np.arange(len(rows)), changes):
            if not len(group):
                return [Stage(0, 0, 0, 0, 0)]
            first, after = group[0], group[-1] + 1
            draws, rest = (self.draws[group] >= 0).sum(), left[after] if after < len(left) else 0
            stages.append(Stage(len(group), int(rows[first]), int(capacities[first]), int(draws), int(rest)))
        return stages


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
    """Give each row of a batch its schedule at this width, and return them together; `future` as in `layout.build`."""
    schedules = {number: schedule(query, width) for number, query in {row.number: row.query for row in rows}.items()}
    for row in rows:
        row.schedule, row.copies = schedules[row.number], len(row.query.given_at) if future else 0
    rows = sorted(rows, key=lambda row: -len(row.schedule.draws))
    lengths = np.array([len(row.schedule.draws) for row in rows])
    steps = int(lengths[0])
    reads, draws = np.full((steps, len(rows), width), -1), np.full((steps, len(rows)), -1)
    for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        reads[:length, r], draws[:length, r] = row.schedule.reads, row.schedule.draws
    working = (lengths > np.arange(steps)[:, None]).sum(1)
    return Steps(rows, reads, draws, working, np.array([row.copies for row in rows]))


def few_shapes(working: np.ndarray) -> np.ndarray:
    """Round numbers of active rows up to powers of two, or to all: a GPU captures a step for each number of rows."""
    powers: np.ndarray = 2 ** np.ceil(np.log2(working)).astype(int)
    return powers.clip(max=working.max(initial=1))
