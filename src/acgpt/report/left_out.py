"""Notes on what a figure does not show: which runs, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAX_NAMES = 8  # most names in a sentence


def join_names(names: Iterable[str]) -> str:
    """Join names with commas, each once; after the first few, only the number of the others is given.

    >>> join_names(["a", "b", "a"]), join_names(map(str, range(10)))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    unique = list(dict.fromkeys(names))
    more = len(unique) - MAX_NAMES
    return ", ".join(unique[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def not_shown(reasons: Mapping[str, str]) -> list[str]:
    """Return one sentence for each reason, with the runs it applies to.

    >>> not_shown({"a": "it is a bound.", "b": "it is a bound."})
    ['not shown: a, b: it is a bound.']

    Args:
        reasons: By name of the run, why it is left out and what to do.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"not shown: {join_names(names)}: {reason}" for reason, names in by_reason.items()]


def join_sentences(sentences: Iterable[str]) -> str:
    """Join sentences, each with a capital letter."""
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences if sentence)
