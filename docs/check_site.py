"""Check that a built site loads nothing from another host.

    python docs/check_site.py site

Links for readers to follow may lead anywhere. What a browser loads by itself may not: scripts, style sheets, images,
fonts, frames, and whatever style sheets and scripts name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

REMOTE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
FOLLOWED = {"a", "area"}  # elements whose `href` loads nothing until somebody clicks
PASSIVE = {"canonical", "next", "prev", "alternate", "license", "author"}  # kinds of <link> that load nothing
LOADS = {"src", "srcset", "data", "poster", "href", "xlink:href", "action"}
CSS = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
# A file that a script could load: a module, a style sheet, a font, a program.
SCRIPT = re.compile(r"""["'`](https?://[^"'`\s]+?\.(?:m?js|css|woff2?|ttf|wasm|json)(?:\?[^"'`]*)?)["'`]""")
# Material's script names these, and loads them only for what no page may have.
ONLY_FOR = {
    "https://unpkg.com/mermaid": 'class="mermaid"',
    "https://unpkg.com/iframe-worker": 'src="https://unpkg.com/',
}


class Page(HTMLParser):
    """What a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what the element loads."""
        self.inside = tag
        values = {name: value or "" for name, value in attributes}
        self.remote += CSS.findall(values.get("style", ""))
        if tag in FOLLOWED or (tag == "link" and {*values.get("rel", "").split()} <= PASSIVE):
            return
        self.remote += [value for name, value in values.items() if name in LOADS and REMOTE.match(value)]

    def handle_data(self, data: str) -> None:
        """Note what a style sheet or a script within the page loads."""
        if self.inside == "style":
            self.remote += CSS.findall(data)
        elif self.inside == "script":
            self.remote += SCRIPT.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """Leave the element."""
        self.inside = ""


def loaded_from_elsewhere(site: Path) -> list[str]:
    """What the files of a site load from other hosts, as "FILE: URL"."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    found = []
    for path, text in pages.items():
        page = Page()
        page.feed(text)
        found += [(path, url) for url in page.remote]
    for path in sorted(site.rglob("*.css")):
        found += [(path, url) for url in CSS.findall(path.read_text(encoding="utf-8"))]
    for path in sorted(site.rglob("*.js")):
        urls = SCRIPT.findall(path.read_text(encoding="utf-8"))
        found += [(path, url) for url in urls if not unused(url, pages.values())]
    return [f"{path.relative_to(site)}: {url}" for path, url in found]


def unused(url: str, pages: Iterable[str]) -> bool:
    """Does the theme's script load this only for something that no page has?"""
    marks = [mark for start, mark in ONLY_FOR.items() if url.startswith(start)]
    return bool(marks) and not any(mark in page for mark in marks for page in pages)


def main() -> int:
    """Check the site that is named on the command line."""
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        print(f"{site} holds no built site. Run make docs.", file=sys.stderr)
        return 1
    found = loaded_from_elsewhere(site)
    for each in found:
        print(f"loaded from another host: {each}", file=sys.stderr)
    if not found:
        print(f"{site}: {len([*site.rglob('*.html')])} pages, nothing loaded from another host")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
