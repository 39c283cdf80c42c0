"""The paired bootstrap over texts: how much of a difference between perplexities is due to the texts that were asked.

    ours, theirs = PerText(set_hash, {"training": TextSums(nats, tokens)}), PerText(…)
    paired_difference(MeasuredPerplexity.of([ours], "training"), MeasuredPerplexity.of([theirs], "training-no-future"))
    # Difference(percent=17.4, interval=(16.3, 18.8))

A resample is as many texts as there are, drawn with replacement; both sides of a difference are computed on the same
resamples. What makes a text hard for every model then cancels, so the interval of a difference is much narrower than
those of its two perplexities suggest. The interval holds the middle 95 % of 1,000 resamples (percentile method). It
describes the choice of texts only: runs of other seeds may differ by more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from acgpt.errors import InputError

RESAMPLES, SEED = 1000, 0
LEVEL = 0.95
CELLS = 2**22  # of the resampling matrix that is held at a time


class TextSums(NamedTuple):
    """What a perplexity is made of, text by text.

    Args:
        nats: (texts,) Sum of the negative log-probabilities of the asked tokens.
        tokens: (texts,) Number of asked tokens.
    """

    nats: np.ndarray
    tokens: np.ndarray

    @property
    def perplexity(self) -> float:
        """Per asked token of all texts; infinite if a text is impossible."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.nats.sum() / self.tokens.sum()))


@dataclass(frozen=True)
class Difference:
    """A relative difference between two perplexities.

    Args:
        percent: By how many percent the first perplexity is below the second: 100 · (1 − first / second).
        interval: Its 95 % interval over texts; `None` for a single text, where a perplexity is infinite, and where
            nothing is known of single texts.
    """

    percent: float
    interval: tuple[float, float] | None = None

    @property
    def clear(self) -> bool:
        """Does the interval exclude zero? Without an interval it is not known to."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, eq=False)
class PerText:
    """What one evaluation found of each text, in each mode that was answered.

    Args:
        set_hash: Of the evaluation set. Two evaluations asked the same texts if and only if theirs are the same.
        modes: By mode, all of as many texts.
    """

    set_hash: str
    modes: Mapping[str, TextSums]

    @cached_property
    def resampled(self) -> Mapping[str, np.ndarray]:
        """By mode, (resamples,) mean NLLs; the same resamples in all evaluations of as many texts.

        A single text cannot be resampled: no mode is there then.
        """
        texts = max((len(sums.nats) for sums in self.modes.values()), default=0)
        return resampled_means(self.modes, SEED) if texts > 1 else {}


@dataclass(frozen=True, eq=False)
class MeasuredPerplexity:
    """A perplexity in one mode, or its mean over several runs, and what is known of each text.

    Args:
        value: The perplexity.
        mode: The mode.
        runs: What is known of each text, run by run; `None` for a run that kept nothing.
    """

    value: float
    mode: str
    runs: tuple[PerText | None, ...]

    @classmethod
    def of(cls, runs: Sequence[PerText], mode: str) -> MeasuredPerplexity:
        """The mean perplexity of some runs, from the sums of each text."""
        return cls(float(np.mean([run.modes[mode].perplexity for run in runs])), mode, tuple(runs))

    @cached_property
    def resampled(self) -> np.ndarray | None:
        """(resamples,) The perplexity on resampled texts; `None` where a run kept nothing, and for a single text."""
        means = [run.resampled[self.mode] for run in self.runs if run is not None and self.mode in run.resampled]
        if not means or len(means) < len(self.runs):
            return None
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(means).mean(axis=0))


def paired_difference(ours: MeasuredPerplexity, theirs: MeasuredPerplexity) -> Difference:
    """Compare two perplexities on the same texts: by how many percent the first is below the second.

    Raises:
        InputError: They were asked different evaluation sets.
    """
    hashes = {run.set_hash for run in (*ours.runs, *theirs.runs) if run is not None}
    if len(hashes) > 1:
        sets = " and ".join(sorted(name[:8] for name in hashes))
        raise InputError(f"cannot pair evaluations of different sets, {sets}: evaluate both on one.")
    percent = 100 * (1 - ours.value / theirs.value)
    if ours.resampled is None or theirs.resampled is None:
        return Difference(percent)
    with np.errstate(invalid="ignore", over="ignore"):  # what is infinite has no interval
        return Difference(percent, percentiles(100 * (1 - ours.resampled / theirs.resampled)))


def resampled_means(sums: Mapping[str, tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, np.ndarray]:
    """For each mode, `RESAMPLES` times the mean NLL of as many texts as there are, drawn with replacement.

    Args:
        sums: For each mode, of every text the sum of NLLs and the number of tokens.
        seed: The same draws for the same number of texts.
    """
    rng = np.random.default_rng(seed)
    texts = len(next(iter(sums.values()))[0]) if sums else 1
    means: dict[str, list[np.ndarray]] = {mode: [] for mode in sums}
    size = max(1, CELLS // texts)
    for start in range(0, RESAMPLES, size):
        times = rng.multinomial(texts, np.full(texts, 1 / texts), size=min(size, RESAMPLES - start)).astype(np.float64)
        for mode, (nlls, counts) in sums.items():
            with np.errstate(invalid="ignore"):  # 0 × ∞, where a model finds a text impossible
                means[mode].append(times @ nlls / (times @ counts))
    return {mode: np.concatenate(parts) for mode, parts in means.items()}


def percentiles(values: np.ndarray) -> tuple[float, float] | None:
    """The interval that holds `LEVEL` of the values, with as many on either side; `None` if they are not all finite."""
    if not np.isfinite(values).all():
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
