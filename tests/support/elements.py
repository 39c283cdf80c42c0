"""The elements and the text of a page of a report."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any


class Elements(HTMLParser):
    """The elements of a page, its text, and of each card of samples the text, that which was given, and the titles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.cards: list[dict[str, Any]] = []
        self.inside = False
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        own = {key: value or "" for key, value in attributes}
        self.found.append((name, own))
        if name not in ("img", "meta"):
            self.open.append(name)
        if own.get("class") == "text":
            self.cards.append({"name": own["aria-label"], "text": "", "titles": [], "given": ""})
            self.inside = True
        elif self.inside and name == "i":
            self.cards[-1]["titles"].append(own.get("title"))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name
        self.inside = self.inside and name != "div"

    def handle_data(self, text: str) -> None:
        self.text += text
        if self.inside:
            self.cards[-1]["text"] += text
            self.cards[-1]["given"] += text if self.open[-1] == "span" else ""

    @property
    def names(self) -> set[str]:
        """The names of the elements."""
        return {name for name, _ in self.found}

    def all(self, name: str) -> list[dict[str, str]]:
        """Return the attributes of all elements of a name."""
        return [attributes for each, attributes in self.found if each == name]

    def values(self, key: str) -> list[str]:
        """Return the values of an attribute."""
        return [attributes[key] for _, attributes in self.found if key in attributes]
