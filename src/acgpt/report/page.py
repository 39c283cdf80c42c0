"""Pages of a report, from the jinja2 templates in `templates/`.

An HTML page is one file: its style and figures are in it, and it loads nothing from the network. Values are escaped in
HTML and are never read as templates.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape

from acgpt.display.table import plain_markdown
from acgpt.report.left_out import sentences
from acgpt.report.part import Part
from acgpt.report.tables import WIDTHS, file_name
from acgpt.version import __version__

Provenance = tuple[str, str, str]  # the name of a run, its command, and what it took


@cache
def environment() -> Environment:
    """The environment of the templates: everything but Markdown is escaped, and a missing value is an error."""
    found = Environment(
        loader=PackageLoader("acgpt.report"),
        autoescape=select_autoescape(default=True, disabled_extensions=("md",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["widths"] = WIDTHS
    found.filters |= {"markdown": plain_markdown, "file_name": file_name}
    return found


def template(name: str) -> Template:
    """A template of this package, by its file name."""
    return environment().get_template(name)


def html_page(
    parts: Sequence[Part], runs: Sequence[Provenance], notes: Sequence[str], files: Mapping[str, bytes]
) -> str:
    """Render all tables and figures, the runs behind them, and the notes as one HTML page.

    Args:
        parts: Of the report.
        runs: Where the numbers come from.
        notes: A sentence each.
        files: Of the report, by path: where the figures are taken from.
    """
    figures = {part.name: figures_of(part, files) for part in parts}
    return template("report.html").render(parts=parts, runs=runs, notes=notes, figures=figures, version=__version__)


def figures_of(part: Part, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The figures of a part that were drawn: name, caption, and the SVG in base64."""
    return [
        {
            "stem": stem,
            "caption": " ".join(filter(None, [part.captions.get(stem, ""), sentences(part.left_out.get(stem, ()))])),
            "data": base64.b64encode(files[path]).decode(),
        }
        for stem in part.pictures
        if (path := f"{part.name}/{stem}.svg") in files
    ]


def markdown_page(
    parts: Sequence[Part], runs: Sequence[Provenance], notes: Sequence[str], files: Mapping[str, bytes]
) -> str:
    """Render the same in Markdown, with links to the figures."""
    figures = {}
    for part in parts:
        paths = [PurePosixPath(part.name, f"{stem}.png") for stem in part.pictures]
        figures[part.name] = {str(path): path.stem for path in paths if str(path) in files}
    text = template("report.md").render(parts=parts, runs=runs, notes=notes, figures=figures)
    return text.rstrip("\n") + "\n"
