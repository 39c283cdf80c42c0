"""Pages of a report, from the jinja2 templates in `templates/`.

An HTML page is one file: it contains its style and figures, and loads nothing from the network. Values are escaped in
HTML and are never read as templates.
"""

from __future__ import annotations

import base64
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from acgpt.report.tables import file_name


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
    jinja.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return jinja


def template(name: str) -> Template:
    """Return a template of this package, by its file name."""
    return environment().get_template(name)
