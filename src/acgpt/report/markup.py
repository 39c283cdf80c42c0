"""HTML, an element at a time."""

from __future__ import annotations

from html import escape

EMPTY = ("img", "meta")  # elements that have no end


def tag(element: str, *content: str, **attributes: str | int | None) -> str:
    """An element.

    >>> tag("a", "x &lt; y", href="#top", aria_label='"here"', class_=None)
    '<a href="#top" aria-label="&quot;here&quot;">x &lt; y</a>'

    Args:
        element: Its name.
        content: HTML; text goes through `html.escape` first.
        attributes: Text; `None` is left out. `class_` stands for class, `aria_label` for aria-label.
    """
    given = [(key.strip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    words = [element, *(f'{key}="{escape(str(value))}"' for key, value in given)]
    return f"<{' '.join(words)}>" + ("" if element in EMPTY else f"{''.join(content)}</{element}>")
