"""Perplexities from the sums of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from acgpt.evaluation.bootstrap import MeasuredPerplexity, PerText, TextSums


def perplexity_of(sums: TextSums) -> float:
    """The perplexity per asked token over all units."""
    return math.exp(sums.nats.sum() / sums.tokens.sum())


def measured(runs: Sequence[PerText], mode: str) -> MeasuredPerplexity:
    """The mean perplexity of some runs."""
    return MeasuredPerplexity(float(np.mean([perplexity_of(run.modes[mode]) for run in runs])), mode, tuple(runs))
