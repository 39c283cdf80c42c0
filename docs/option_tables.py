"""Generate the tables of options and keys in the documentation from the dataclasses that declare them.

    python docs/option_tables.py            write the tables into the pages
    python docs/option_tables.py --check    change nothing; exit code 1 and a list if pages are out of date

A table stands between `<!-- table MODULE.CLASS COLUMN … -->` and `<!-- end -->`. The columns are key (the field's
name), default and help.
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
TABLE = re.compile(r"(<!-- table (?P<path>[\w.]+) (?P<columns>[a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def cell(item: Field[Any], column: str) -> str:
    """Return one cell."""
    if column == "key":
        return f"`{item.name}`"
    if column == "default":
        default = item.default if item.default_factory is MISSING else item.default_factory()
        default = list(default) if isinstance(default, tuple) else default
        return "" if default in ("", None) else f"`{yaml.safe_dump(default, default_flow_style=True).splitlines()[0]}`"
    assert column == "help", f"there is no column {column}"
    return str(item.metadata["help"])


def table(path: str, columns: list[str]) -> str:
    """Return the table of a dataclass, one row per field."""
    module, _, name = path.rpartition(".")
    options = getattr(import_module(module), name)
    rows = [[column if column != "help" else "" for column in columns]]
    rows += [[cell(item, column) for column in columns] for item in fields(options)]
    head, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head.replace("|  |", "| |"), "|" + "---|" * len(columns), *lines]) + "\n"


def rendered(page: str) -> str:
    """Return a page with up-to-date tables."""
    return TABLE.sub(lambda match: match[1] + table(match["path"], match["columns"].split()), page)


def main() -> int:
    """Write the pages, or check them."""
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := rendered(text)) != text:
            stale.append(str(path.relative_to(DOCS)))
            if "--check" not in sys.argv[1:]:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        print(f"out of date: {', '.join(stale)}. Run python docs/option_tables.py.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
