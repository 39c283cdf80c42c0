"""What a part of a report consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from acgpt.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Part:
    """The answer to one question of the paper.

    Args:
        name: Of its folder in the report, and its key in JSON.
        title: For people.
        content: For programs.
        tables: By file name without ending; written as Markdown, CSV and LaTeX.
        data: Likewise, but only as CSV: too long to read.
        pictures: By file name without ending, what draws each: matplotlib may be missing.
        captions: What each picture shows, in words.
        left_out: What each picture does not show though one might look for it, a sentence each: which run, why, and
            what to do. They end the caption, and are notes of the report.
        pages: Further pages, by file name: what a link to each says, and what makes its HTML.
        notes: What the reader has to know besides.
    """

    name: str
    title: str
    content: dict[str, Any]
    tables: dict[str, Table]
    data: dict[str, Table] = field(default_factory=dict)
    pictures: dict[str, Callable[[], Figure]] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    pages: dict[str, tuple[str, Callable[[], str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
