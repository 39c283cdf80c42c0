"""What a caption says of the runs that a figure does not show."""

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


def name_hidden(names: Iterable[str]) -> str:
    """Return the end of a caption, which names the runs that a figure does not show; "" if it shows all.

    >>> name_hidden(["a", "b"]), name_hidden([])
    (' Not shown: a, b. See the tables.', '')
    """
    joined = join_names(names)
    return f" Not shown: {joined}. See the tables." if joined else ""
