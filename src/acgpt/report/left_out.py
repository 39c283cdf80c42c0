"""What a figure does not show, in words: which runs, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MOST_NAMED = 8  # names in a sentence


def listed(names: Iterable[str]) -> str:
    """Names separated by commas, each once; of many, the first ones and the number of the others.

    >>> listed(["a", "b", "a"]), listed(map(str, range(10)))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    once = list(dict.fromkeys(names))
    more = len(once) - MOST_NAMED
    return ", ".join(once[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def not_shown(reasons: Mapping[str, str]) -> list[str]:
    """One sentence for each reason, with the runs that it holds for.

    >>> not_shown({"a": "it is a bound.", "b": "it is a bound."})
    ['not shown: a, b: it is a bound.']

    Args:
        reasons: By the name of the run, why it is left out and what to do.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"not shown: {listed(names)}: {reason}" for reason, names in by_reason.items()]


def sentences(words: Iterable[str]) -> str:
    """Sentences in a row, each with a capital letter."""
    return " ".join(each[:1].upper() + each[1:] for each in words if each)
