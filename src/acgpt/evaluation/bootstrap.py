"""Paired bootstrap over texts: intervals for differences between perplexities.

    ours, theirs = PerText(set_hash, {"training": TextSums(nats, tokens)}), PerText(…)
    paired_difference(MeasuredPerplexity.of([ours], "training"), MeasuredPerplexity.of([theirs], "training-no-future"))
    # Difference(percent=17.4, interval=(16.3, 18.8))

A resample has as many texts as the dataset, drawn with replacement. Both sides of a difference are computed on the same
resamples, so the difficulty of a text that is common to all models cancels: the interval of a difference is much
narrower than those of its two perplexities suggest. The interval covers the choice of texts only: runs with other seeds
may differ by more.

The interval is the expanded percentile interval of 1,000 resamples (Hesterberg, "What teachers should know about the
bootstrap", 2015): the middle 95 % of the resamples is too narrow for few texts, by the factor √((n − 1) / n) and
because the normal distribution stands in for Student's t. Both are corrected in the percentiles that are taken. Fewer
than `MIN_TEXTS` texts have no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from acgpt.errors import InputError

RESAMPLES, SEED = 1000, 0
LEVEL = 0.95
MIN_TEXTS = 8  # texts that an interval needs
CELLS = 2**22  # maximum number of entries of the resampling matrix in memory


class TextSums(NamedTuple):
    """The sums of each text from which a perplexity is computed.

    Args:
        nats: (texts,) Sum of the negative log-probabilities of the asked tokens.
        tokens: (texts,) Number of asked tokens.
    """

    nats: np.ndarray
    tokens: np.ndarray

    @property
    def perplexity(self) -> float:
        """Perplexity per asked token over all texts; infinite if a text has probability 0."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.nats.sum() / self.tokens.sum()))


@dataclass(frozen=True)
class Difference:
    """A relative difference between two perplexities.

    Args:
        percent: By how many percent the first perplexity is below the second: 100 · (1 − first / second).
        interval: Its 95 % interval over texts; `None` for fewer than `MIN_TEXTS` texts, where a perplexity is infinite,
            and where nothing is known of single texts.
    """

    percent: float
    interval: tuple[float, float] | None = None

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero; false without an interval."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, eq=False)
class PerText:
    """The sums of each text in each answered mode of one evaluation.

    Args:
        set_hash: Hash of the evaluation dataset. Two evaluations can be paired if and only if it is the same.
        modes: Sums by mode, all with the same number of texts.
    """

    set_hash: str
    modes: Mapping[str, TextSums]

    @cached_property
    def resampled(self) -> Mapping[str, np.ndarray]:
        """(resamples,) mean NLLs by mode; evaluations with the same number of texts share the resamples.

        Empty for fewer than `MIN_TEXTS` texts.
        """
        return resampled_means(self.modes, SEED) if self.texts >= MIN_TEXTS else {}

    @property
    def texts(self) -> int:
        """Number of texts."""
        return max((len(sums.nats) for sums in self.modes.values()), default=0)


@dataclass(frozen=True, eq=False)
class MeasuredPerplexity:
    """A perplexity in one mode, or its mean over several runs, with the sums per text.

    Args:
        value: The perplexity.
        mode: The mode.
        runs: Sums per text of each run; `None` for a run without them.
    """

    value: float
    mode: str
    runs: tuple[PerText | None, ...]

    @classmethod
    def of(cls, runs: Sequence[PerText], mode: str) -> MeasuredPerplexity:
        """Return the mean perplexity of some runs, computed from the sums per text."""
        return cls(float(np.mean([run.modes[mode].perplexity for run in runs])), mode, tuple(runs))

    @property
    def texts(self) -> int:
        """Number of texts, as far as they are known."""
        return max((run.texts for run in self.runs if run is not None), default=0)

    @cached_property
    def resampled(self) -> np.ndarray | None:
        """(resamples,) The perplexity on resampled texts; `None` where a run kept nothing, and for too few texts."""
        means = [run.resampled[self.mode] for run in self.runs if run is not None and self.mode in run.resampled]
        if not means or len(means) < len(self.runs):
            return None
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(means).mean(axis=0))


def paired_difference(ours: MeasuredPerplexity, theirs: MeasuredPerplexity) -> Difference:
    """Return by how many percent the first perplexity is below the second, on the same texts.

    Raises:
        InputError: The evaluation datasets differ.
    """
    hashes = {run.set_hash for run in (*ours.runs, *theirs.runs) if run is not None}
    if len(hashes) > 1:
        sets = " and ".join(sorted(name[:8] for name in hashes))
        raise InputError(f"the evaluations have different datasets, {sets}: evaluate both on the same one.")
    percent = 100 * (1 - ours.value / theirs.value)
    if ours.resampled is None or theirs.resampled is None:
        return Difference(percent)
    with np.errstate(invalid="ignore", over="ignore"):  # what is infinite has no interval
        return Difference(percent, percentiles(100 * (1 - ours.resampled / theirs.resampled), ours.texts))


def resampled_means(sums: Mapping[str, tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, np.ndarray]:
    """Return (`RESAMPLES`,) mean NLLs per mode, each of a resample of all texts with replacement.

    Args:
        sums: For each mode, the sum of NLLs and the number of tokens of every text.
        seed: Seed of the resamples, which depend only on it and on the number of texts.
    """
    texts = len(next(iter(sums.values()))[0]) if sums else 1
    means: dict[str, list[np.ndarray]] = {mode: [] for mode in sums}
    for times in [small_resamples(texts, seed)] if RESAMPLES * texts <= CELLS else resamples(texts, seed):
        for mode, (nlls, counts) in sums.items():
            with np.errstate(invalid="ignore"):  # 0 × ∞, if a text has probability 0
                means[mode].append(times @ nlls / (times @ counts))
    return {mode: np.concatenate(parts) for mode, parts in means.items()}


def resamples(texts: int, seed: int) -> Iterator[np.ndarray]:
    """Yield all resamples, (resamples, texts) counts of each text, in parts of at most `CELLS` entries."""
    rng, size = np.random.default_rng(seed), max(1, CELLS // texts)
    for start in range(0, RESAMPLES, size):
        count = min(size, RESAMPLES - start)
        yield rng.multinomial(texts, np.full(texts, 1 / texts), size=count).astype(np.float64)


@lru_cache(maxsize=2)
def small_resamples(texts: int, seed: int) -> np.ndarray:
    """Return the resamples of few texts, cached: a report resamples evaluations of the same size many times."""
    (times,) = resamples(texts, seed)
    times = times.astype(np.int16)  # a count is at most `texts`, which is at most CELLS / RESAMPLES
    times.flags.writeable = False
    return times


def percentiles(values: np.ndarray, texts: int) -> tuple[float, float] | None:
    """Return the interval of a statistic, from its values on resamples of so many texts.

    Returns:
        The ends; `None` if there are fewer than `MIN_TEXTS` texts, or if a value is not finite.
    """
    if texts < MIN_TEXTS or not np.isfinite(values).all():
        return None
    tail = NormalDist().cdf(-math.sqrt(texts / (texts - 1)) * student_quantile((1 + LEVEL) / 2, texts - 1))
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
