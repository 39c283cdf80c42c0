"""The contents of one part of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from acgpt.report.tables import Table, file_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMES = 8  # most names in a sentence


@dataclass(frozen=True)
class Part:
    """The answer to one question of the paper.

    Args:
        name: Name of its folder in the report, and its key in JSON.
        title: Title for people.
        content: Data for programs: the rows of the tables, and more.
        tables: Tables by file name without extension; written as Markdown, CSV and LaTeX.
        pictures: Figures by file name without extension: a function that draws it, not called without matplotlib, and
            a caption, which ends with the runs that the figure does not show.
        pages: Further pages by file name: the text of a link to it, and a function that renders its HTML.
        notes: Further remarks for the reader.
    """

    name: str
    title: str
    content: dict[str, Any]
    tables: dict[str, Table] = field(default_factory=dict)
    pictures: dict[str, tuple[Callable[[], Figure], str]] = field(default_factory=dict)
    pages: dict[str, tuple[str, Callable[[], str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def new_folder(self, name: str) -> str:
        """Return a folder for tables that has none yet; two names may be the same as file names."""
        folder = file_name(name)
        while any(stem.startswith(f"{folder}/") for stem in self.tables):
            folder += "_"
        return folder

    def add_table(self, path: Sequence[str], table: Table, *keys: str) -> None:
        """Add a table by the parts of its path, and its rows to the content under these keys."""
        self.tables["/".join(map(file_name, path))], place = table, self.content
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = [table.values(row) for row in table.rows if not row.paper]


def join_names(names: Iterable[str]) -> str:
    """Join names with commas, each once; after the first few, only the number of the others is given.

    >>> join_names(["a", "b", "a"]), join_names(map(str, range(10)))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    unique = list(dict.fromkeys(names))
    more = len(unique) - MAX_NAMES
    return ", ".join(unique[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def name_hidden(names: Iterable[str]) -> str:
    """Return the end of a caption, which names the runs that a figure does not show; "" if it shows all."""
    joined = join_names(names)
    return f" Not shown: {joined}. See the tables." if joined else ""
