"""Tolerances for two computations of the same numbers, by dtype.

Bits are compared only where acgpt promises them: the same batches on the same machine. That is the same call twice,
the same seed twice, and a run that was killed and goes on. In another batch, with other threads, another attention
backend, with and without a cache, or in another process of the same sums, results differ by rounding, and how much
depends on the CPU. There a test compares to a tolerance, and of samples the tokens and, to a tolerance, their
log-probabilities. `make test` holds tests to this: see `rounding`.

A token that is drawn can itself differ by rounding, where the noise falls that close to the border between two
tokens. At the seeds of these tests, and in float64, it does not: that has a probability of about 1e-12 a token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

NATS = {torch.float64: 1e-9, torch.float32: 1e-4}  # by which a log-probability may differ


def exactly(values, dtype=torch.float64):
    """Return `pytest.approx` of numbers, or of lists or dictionaries of numbers, up to rounding."""
    return pytest.approx(values, rel=0, abs=NATS[dtype])


EXACT = {"rtol": 0, "atol": NATS[torch.float64]}  # the same for torch.testing.assert_close


def same_draws(one, other, dtype=torch.float64):
    """Return whether two samples, each tokens and log-probabilities, are the same up to rounding."""
    (tokens, log_probs), (others, their_log_probs) = one, other
    return tokens.tolist() == others.tolist() and log_probs.tolist() == exactly(their_log_probs.tolist(), dtype)


def same_scores(one, other, dtype=torch.float64):
    """Return whether two scores or samples of a `LanguageModel` are the same up to rounding."""
    numbers = [[token.log_prob for token in score.tokens] for score in (one, other)]
    rest = [replace(score, tokens=tuple(replace(t, log_prob=0.0) for t in score.tokens)) for score in (one, other)]
    return rest[0] == rest[1] and numbers[0] == exactly(numbers[1], dtype)
