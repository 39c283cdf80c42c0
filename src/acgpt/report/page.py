"""Pages of a report, from the jinja2 templates in `templates/`.

An HTML page is one file: it contains its style and figures, and loads nothing from the network. Values are escaped in
HTML and are never read as templates.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from acgpt.report.part import Part
from acgpt.report.tables import file_name
from acgpt.version import __version__

Provenance = tuple[str, str, str]  # name of a run, its command, and its cost


@cache
def environment() -> Environment:
    """Return the environment of the templates: all values are escaped, and a missing value is an error."""
    jinja = Environment(
        loader=PackageLoader("acgpt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["file_name"] = file_name
    return jinja


def template(name: str) -> Template:
    """Return a template of this package, by its file name."""
    return environment().get_template(name)


def html_page(
    parts: Sequence[Part], runs: Sequence[Provenance], notes: Sequence[str], files: Mapping[str, bytes]
) -> str:
    """Render all tables and figures, the runs behind them, and the notes as one HTML page.

    Args:
        parts: Parts of the report.
        runs: Provenance of the numbers.
        notes: One sentence each.
        files: Files of the report by path, which contain the figures.
    """
    figures = {part.name: figures_of(part, files) for part in parts}
    return template("report.html").render(parts=parts, runs=runs, notes=notes, figures=figures, version=__version__)


def figures_of(part: Part, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the figures of a part that were drawn: name, caption, and the SVG in base64."""
    return [
        {
            "stem": stem,
            "caption": part.captions[stem],
            "data": base64.b64encode(files[path]).decode(),
        }
        for stem in part.pictures
        if (path := f"{part.name}/{stem}.svg") in files
    ]
