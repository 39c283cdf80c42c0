"""Paired bootstrap over documents: intervals for perplexities and for differences between them.

    ours, theirs = PerText(set_hash, {"training": TextSums(nats, tokens)}), PerText(…)
    paired_difference(
        MeasuredPerplexity(20.1, "training", (ours,)), MeasuredPerplexity(24.4, "training-no-future", (theirs,))
    )
    # Difference(percent=17.4, interval=(16.3, 18.8))

A resample has as many documents as the dataset, drawn with replacement. Both sides of a difference are computed on the
same resamples, so the difficulty of a document that is common to all models cancels: the interval of a difference is
much narrower than those of its two perplexities suggest. The interval covers the choice of documents only: runs with
other seeds may differ by more.

The texts of a dataset are windows of documents. Windows of one document are alike (their log-probabilities have a
correlation of 0.5 on WikiText-103), so resampling windows makes intervals too narrow. It is done only where the
documents are not known, or fewer than `MIN_DOCUMENTS`; results then say so.

The interval is the expanded percentile interval of 1,000 resamples (Hesterberg, "What teachers should know about the
bootstrap", 2015): the middle 95 % of the resamples is too narrow for few units, by the factor √((n − 1) / n) and
because the normal distribution stands in for Student's t. Both are corrected in the percentiles that are taken. Fewer
than `MIN_UNITS` documents or texts have no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from acgpt.errors import InputError

RESAMPLES, SEED = 1000, 0
LEVEL = 0.95
MIN_UNITS = 8  # units that an interval needs
MIN_DOCUMENTS = 30  # documents that are resampled; for fewer, texts are
DOCUMENTS, TEXTS = "documents", "texts"  # units of resampling
CELLS = 2**22  # maximum number of entries of the resampling matrix in memory


class TextSums(NamedTuple):
    """The sums of each text, or document, from which a perplexity is computed.

    Args:
        nats: (units,) Sum of the negative log-probabilities of the asked tokens.
        tokens: (units,) Number of asked tokens.
    """

    nats: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Difference:
    """A relative difference between two perplexities.

    Args:
        percent: By how many percent the first perplexity is below the second: 100 · (1 − first / second).
        interval: Its 95 % interval; `None` for fewer than `MIN_UNITS` units, where a perplexity is infinite, and where
            sums of single units are not known, or are of other units.
    """

    percent: float
    interval: tuple[float, float] | None = None

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero; false without an interval."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, eq=False)
class PerText:
    """The sums of each document, or text, in each answered mode of one evaluation.

    Args:
        set_hash: Hash of the evaluation dataset. Two evaluations can be paired if and only if it is the same.
        modes: Sums by mode, all with the same number of units.
        unit: What the sums are over: `DOCUMENTS` or `TEXTS`.
    """

    set_hash: str
    modes: Mapping[str, TextSums]
    unit: str = TEXTS

    @cached_property
    def resampled(self) -> Mapping[str, np.ndarray]:
        """(resamples,) mean NLLs by mode; evaluations with the same number of units share the resamples.

        Empty for fewer than `MIN_UNITS` units.
        """
        return resampled_means(self.modes, SEED) if self.units >= MIN_UNITS else {}

    @property
    def units(self) -> int:
        """Number of documents or texts."""
        return max((len(sums.nats) for sums in self.modes.values()), default=0)


@dataclass(frozen=True, eq=False)
class MeasuredPerplexity:
    """A perplexity in one mode, or its mean over several runs, with the sums from which intervals are computed.

    Args:
        value: The perplexity.
        mode: The mode.
        runs: Sums of each run; `None` for a run without them.
    """

    value: float
    mode: str
    runs: tuple[PerText | None, ...]

    @property
    def unit(self) -> tuple[str, int] | None:
        """What was resampled, and how many; `None` if a run kept nothing, or the runs differ."""
        units = {None if run is None else (run.unit, run.units) for run in self.runs}
        return units.pop() if len(units) == 1 else None

    @cached_property
    def resampled(self) -> np.ndarray | None:
        """(resamples,) The perplexity on resamples; `None` where `unit` is not known, and for too few units."""
        means = [run.resampled[self.mode] for run in self.runs if run is not None and self.mode in run.resampled]
        if not means or len(means) < len(self.runs) or self.unit is None:
            return None
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(means).mean(axis=0))


def paired_difference(ours: MeasuredPerplexity, theirs: MeasuredPerplexity) -> Difference:
    """Return by how many percent the first perplexity is below the second, on the same resamples.

    Raises:
        InputError: The evaluation datasets differ.
    """
    hashes = {run.set_hash for run in (*ours.runs, *theirs.runs) if run is not None}
    if len(hashes) > 1:
        sets = " and ".join(sorted(name[:8] for name in hashes))
        raise InputError(f"the evaluations have different datasets, {sets}: evaluate both on the same one.")
    percent = 100 * (1 - ours.value / theirs.value)
    if ours.resampled is None or theirs.resampled is None or ours.unit is None or ours.unit != theirs.unit:
        return Difference(percent)
    with np.errstate(invalid="ignore", over="ignore"):  # what is infinite has no interval
        return Difference(percent, percentiles(100 * (1 - ours.resampled / theirs.resampled), ours.unit[1]))


def resampled_means(sums: Mapping[str, tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, np.ndarray]:
    """Return (`RESAMPLES`,) means by name, each of a resample of all units with replacement.

    Args:
        sums: For each name, the sum of the values and the number of tokens of every unit.
        seed: Seed of the resamples, which depend only on it and on the number of units.
    """
    units = len(next(iter(sums.values()))[0]) if sums else 1
    means: dict[str, list[np.ndarray]] = {mode: [] for mode in sums}
    for times in [small_resamples(units, seed)] if RESAMPLES * units <= CELLS else resamples(units, seed):
        for mode, (nlls, counts) in sums.items():
            # 0 × ∞ if a unit has probability 0, 0 / 0 if no drawn unit has a token.
            with np.errstate(invalid="ignore"):
                means[mode].append(times @ nlls / (times @ counts))
    return {mode: np.concatenate(parts) for mode, parts in means.items()}


def resamples(units: int, seed: int) -> Iterator[np.ndarray]:
    """Yield all resamples, (resamples, units) counts of each unit, in parts of at most `CELLS` entries."""
    rng, size = np.random.default_rng(seed), max(1, CELLS // units)
    for start in range(0, RESAMPLES, size):
        count = min(size, RESAMPLES - start)
        yield rng.multinomial(units, np.full(units, 1 / units), size=count).astype(np.float64)


@lru_cache(maxsize=2)
def small_resamples(units: int, seed: int) -> np.ndarray:
    """Return the resamples of few units, cached: a report resamples evaluations of the same size many times."""
    (times,) = resamples(units, seed)
    times = times.astype(np.int16)  # a count is at most `units`, which is at most CELLS / RESAMPLES
    times.flags.writeable = False
    return times


def percentiles(values: np.ndarray, units: int) -> tuple[float, float] | None:
    """Return the interval of a statistic, from its values on resamples of so many units.

    Returns:
        The ends; `None` if there are fewer than `MIN_UNITS` units, or if a value is not finite.
    """
    if units < MIN_UNITS or not np.isfinite(values).all():
        return None
    tail = NormalDist().cdf(-math.sqrt(units / (units - 1)) * student_quantile((1 + LEVEL) / 2, units - 1))
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def student_quantile(level: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution, to 1e-3 from 7 degrees of freedom on.

    The expansion in 1 / degrees of Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(level)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
