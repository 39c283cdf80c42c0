"""The question how long a gap is, p(length | given tokens, lengths of the gaps before it).

    text        The cat ____ on ____ mat.            two gaps, of 1 and 2 tokens
    question    The cat [?]              on         mat.       for the first: both gaps are `distance` positions wide
    question    The cat      on [?]              mat.          for the second: the first is as wide as it is

The tokens of a gap are left out, and the positions of what follows jump. A gap whose length is not known yet is
`distance` positions wide, whatever its length, so that nothing of the length can be seen. Given tokens are copied, as
in every query, and the slot before the gap predicts its length with a head of its own: 0 to 255, or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acgpt.query.conditioning import ASKED

LONGEST = 255  # the largest length that is told from all larger ones
MORE = LONGEST + 1  # class of all larger lengths
CLASSES = LONGEST + 2
DISTANCE = 16  # default for the width of a gap of unknown length


def normalised(log_probs: np.ndarray, allowed: Sequence[int]) -> dict[int, float]:
    """Return the log-probabilities of the allowed lengths, normalised over these.

    Args:
        log_probs: (CLASSES,) log-probabilities of the classes.
        allowed: Lengths; those above `LONGEST` share the probability of `MORE` equally.
    """
    longer = sum(length > LONGEST for length in allowed)
    values = np.array([
        log_probs[min(length, MORE)] - (math.log(longer) if length > LONGEST else 0.0) for length in allowed
    ])  # fmt: skip
    values -= values.max() + np.log(np.exp(values - values.max()).sum())
    return dict(zip(allowed, values.tolist(), strict=True))


@dataclass(frozen=True)
class LengthQuestion:
    """A question for the length of a gap.

    Args:
        tokens: (n,) tokens besides those in gaps, and a placeholder for the gap, whose id is the length if it is known.
        roles: (n,) `GIVEN` or `UNKNOWN`; the placeholder is `ASKED`.
        places: (n,) position of each token; that of the placeholder is never read.
        at: The placeholder is the token of this number, from 1. The slot before it predicts.
    """

    tokens: np.ndarray
    roles: np.ndarray
    places: np.ndarray
    at: int

    def __len__(self) -> int:
        return len(self.tokens)


def length_question(
    tokens: np.ndarray,
    roles: np.ndarray,
    gaps: Sequence[int],
    lengths: Sequence[int],
    *,
    distance: int,
    positions: int,
    length: int = 0,
) -> LengthQuestion:
    """Build the question for the length of the first gap whose length is not known.

    Args:
        tokens: (n,) tokens besides those in gaps.
        roles: (n,) their roles. Asked tokens, whose number is known and not their text, are left out like gaps.
        gaps: Index of the token before which each gap is, from left to right; n for a gap at the end.
        lengths: Lengths of the first gaps; the next one is asked.
        distance: Width of gaps whose length is not known.
        positions: Number of positions of the model, BOS included. Tokens that would have no position are left out; they
            are far behind the gap.
        length: Length of the gap that is asked, for training. No input of the model depends on it.
    """
    number = len(lengths)
    widths = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(widths, np.array(gaps), [*lengths, *[distance] * (len(gaps) - number)])
    places = np.arange(1, len(tokens) + 1) + widths[:-1].cumsum()
    kept = (roles != ASKED) & (places < positions)
    at = int(kept[: gaps[number]].sum())
    return LengthQuestion(
        np.insert(tokens[kept], at, min(length, MORE)),
        np.insert(roles[kept], at, ASKED),
        np.insert(places[kept], at, 0),
        at + 1,
    )
