"""Metrics of generated tokens that need no model: diversity, repetition, and perplexity under their own model.

    distinct-n      share of distinct n-grams among all n-grams of asked tokens (Li et al., 2016). It falls with the
                    amount of text, so only the first sample of each text counts: as many tokens as in the original
    repetition      share of 4-grams of a sample that occurred before in it (seq-rep-4 of Welleck et al., 2020), mean
                    over samples
    loops           share of samples that end in a loop: at least three copies of a block of at most 64 tokens, with
                    at least 16 tokens in total

An n-gram lies within one run of asked tokens; none spans given tokens. Loops are detected at the last asked token, with
everything before it, given or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from acgpt.evaluation.generations import Generation

ORDERS = (1, 2, 3)
REPEATED = 4
BLOCK, COPIES, LOOP = 64, 3, 16


def ngrams(tokens: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """Yield the n-grams of a sequence."""
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def distinct(samples: Sequence[Generation], n: int) -> float | None:
    """Return the share of distinct n-grams among all n-grams of asked tokens; `None` if there are none."""
    grams = [gram for sample in samples for run in sample.runs for gram in ngrams(run, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(samples: Sequence[Generation]) -> float | None:
    """Return the share of repeated 4-grams, as a mean over the samples that have any 4-gram."""
    shares = []
    for sample in samples:
        if grams := [gram for run in sample.runs for gram in ngrams(run, REPEATED)]:
            shares.append(1 - len(set(grams)) / len(grams))
    return math.fsum(shares) / len(shares) if shares else None


def ends_in_loop(tokens: Sequence[int | None]) -> bool:
    """Return whether tokens end in at least three copies of a block, with at least 16 tokens in total."""
    for period in range(1, min(BLOCK, len(tokens) // COPIES) + 1):
        same = 0  # tokens, counted from the end, that equal the token one period before
        while same + period < len(tokens) and tokens[-1 - same] == tokens[-1 - same - period] is not None:
            same += 1
        if same + period >= max(COPIES * period, LOOP):
            return True
    return False


def loops(samples: Sequence[Generation]) -> float:
    """Return the share of samples with a loop that ends at the last asked token."""
    return sum(ends_in_loop(sample.tokens[: sample.roles.rindex("a") + 1]) for sample in samples) / len(samples)


def own_perplexity(samples: Sequence[Generation]) -> float | None:
    """Return the perplexity of the asked tokens under their own model, at temperature 1; `None` if unknown."""
    if any(sample.log_probs is None for sample in samples):
        return None
    return perplexity([log_prob for sample in samples for log_prob in sample.log_probs or ()])


def perplexity(log_probs: Sequence[float]) -> float:
    """Return exp of the mean negative log-probability."""
    try:
        return math.exp(-math.fsum(log_probs) / len(log_probs))
    except OverflowError:
        return math.inf


def companions(samples: Sequence[Generation]) -> dict[str, float | None]:
    """Return all metrics by their keys in results."""
    first = first_samples(samples)
    metrics: dict[str, float | None] = {f"distinct_{n}": distinct(first, n) for n in ORDERS}
    return metrics | {"repetition": repetition(samples), "loops": loops(samples)}


def first_samples(samples: Sequence[Generation]) -> list[Generation]:
    """Return the first sample of each text."""
    first: dict[tuple[int, str], Generation] = {}
    for sample in samples:
        first.setdefault((sample.item, sample.roles), sample)
    return list(first.values())


def with_tokens(sample: Generation, tokens: Sequence[int], fills: Sequence[str], text: str) -> Generation:
    """Return the same query with other tokens in the asked positions, for example the original ones."""
    filled = [new if role == "a" else old for new, old, role in zip(tokens, sample.tokens, sample.roles, strict=True)]
    return replace(sample, tokens=tuple(filled), log_probs=None, fills=tuple(fills), text=text)
