"""What the future is worth by distance: gains of asked tokens, by how far the next given token is.

                   The   [cat]  [sat]  [on]   the   [mat]        [asked]
    distance              3      2      1             none       to the next given token
    run                   3      3      3             1          of tokens that are not given, with the asked one

An asked token is scored with and without the future. The difference, in nats, is its gain. The mean over the tokens of
a bin depends on the model and the text, and at one r_max little on how the given tokens were placed. How many tokens
are in a bin depends on the conditioning sets alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from acgpt.query.conditioning import GIVEN

EDGES = (1, 2, 3, 5, 9, 17, 33)  # first number of each bin
NONE = "none"  # no given token follows
LABELS = ("1", "2", "3–4", "5–8", "9–16", "17–32", "33+", NONE)


@dataclass(frozen=True)
class BinnedGain:
    """Tokens of one bin, with and without the future.

    Args:
        tokens: Number of asked tokens.
        nats: Mean negative log-probability with the future.
        nats_without: The same without the future.
        gain: `nats_without - nats`.
        interval: 95 % interval of the gain, paired, see `bootstrap`; `None` if fewer than `MIN_UNITS` units have such
            tokens, and if the gain is infinite.
    """

    tokens: int
    nats: float
    nats_without: float
    gain: float
    interval: tuple[float, float] | None


def next_given(roles: np.ndarray) -> np.ndarray:
    """Return for each token of (texts, length) roles the distance to the next given one; 0 if none follows."""
    length = roles.shape[1]
    given = np.where(roles == GIVEN, np.arange(length), length)
    following = np.minimum.accumulate(given[:, ::-1], axis=1)[:, ::-1]  # of the token itself or later
    return np.where(following < length, following - np.arange(length), 0)


def run_lengths(roles: np.ndarray) -> np.ndarray:
    """Return for each token of (texts, length) roles the length of its run of tokens that are not given; else 0."""
    length = roles.shape[1]
    given = np.where(roles == GIVEN, np.arange(length), -1)
    before = np.maximum.accumulate(given, axis=1)
    after = np.minimum.accumulate(np.where(given < 0, length, given)[:, ::-1], axis=1)[:, ::-1]
    return np.where(roles == GIVEN, 0, after - before - 1)


def bins(numbers: np.ndarray) -> np.ndarray:
    """Return the index in `LABELS` of distances or lengths; 0 belongs to `NONE`."""
    return np.where(numbers > 0, np.searchsorted(EDGES, numbers, side="right") - 1, len(EDGES))
