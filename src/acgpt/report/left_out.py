"""Notes on the runs that a figure does not show."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAMES = 8  # most names in a sentence


def join_names(names: Iterable[str]) -> str:
    """Join names with commas, each once; after the first few, only the number of the others is given.

    >>> join_names(["a", "b", "a"]), join_names(map(str, range(10)))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    unique = list(dict.fromkeys(names))
    more = len(unique) - MAX_NAMES
    return ", ".join(unique[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def name_hidden(names: Iterable[str]) -> list[str]:
    """Return a sentence that names the runs that a figure does not show; none if it shows all.

    >>> name_hidden(["a", "b"]), name_hidden([])
    (['not shown: a, b. See the tables.'], [])
    """
    joined = join_names(names)
    return [f"not shown: {joined}. See the tables."] if joined else []


def join_sentences(sentences: Iterable[str]) -> str:
    """Join sentences, each with a capital letter."""
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences if sentence)
