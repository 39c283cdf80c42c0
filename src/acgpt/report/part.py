"""The contents of one part of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from acgpt.report.tables import Table, file_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Part:
    """The answer to one question of the paper.

    Args:
        name: Name of its folder in the report, and its key in JSON.
        title: Title for people.
        content: Data for programs.
        tables: Tables by file name without extension; written as Markdown, CSV and LaTeX.
        pictures: Functions that draw the figures, by file name without extension; not called without matplotlib.
        captions: Captions of the figures; they end with the runs that a figure does not show.
        pages: Further pages by file name: the text of a link to it, and a function that renders its HTML.
        notes: Further remarks for the reader.
    """

    name: str
    title: str
    content: dict[str, Any]
    tables: dict[str, Table]
    pictures: dict[str, Callable[[], Figure]] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)
    pages: dict[str, tuple[str, Callable[[], str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def new_folder(self, name: str) -> str:
        """Return a folder for tables that has none yet; two names may be the same as file names."""
        folder = file_name(name)
        while any(stem.startswith(f"{folder}/") for stem in self.tables):
            folder += "_"
        return folder
