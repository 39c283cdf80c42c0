"""A report as one HTML page that needs nothing else: its style and its figures are in it, and it asks no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from acgpt.report.left_out import sentences
from acgpt.report.markup import tag
from acgpt.report.part import Part
from acgpt.report.tables import WIDTHS, file_name
from acgpt.version import __version__

STYLE = """
:root { --ink: #1d2326; --soft: #59666c; --line: #d5dcdf; --back: #ffffff; --tint: #f3f7f5; --mark: #14664a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9eb; --soft: #a3b0b6; --line: #3a4449; --back: #14191b; --tint: #1c2426; --mark: #7fd1b0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 104rem; padding: 1rem 1.5rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 1.5rem 0 .25rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .5rem; padding-top: .6rem; border-top: 2px solid var(--mark); }
a { color: var(--mark); }
a:focus-visible, .wide:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
.skip { position: absolute; left: -100rem; } .skip:focus { left: 1rem; top: .5rem; }
.soft { color: var(--soft); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
.wide { overflow-x: auto; margin: 1.5rem 0 .5rem; border-right: 1px solid var(--line); background:
  linear-gradient(to right, var(--back) 40%, transparent) 0 0 / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--back) 40%, transparent) 100% 0 / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--soft), transparent) 0 0 / .6rem 100% no-repeat scroll,
  linear-gradient(to left, var(--soft), transparent) 100% 0 / .6rem 100% no-repeat scroll; }
.hint { display: none; margin: 1.5rem 0 -1.2rem; font-size: .85rem; color: var(--mark); }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .6rem; color: var(--soft);
  position: sticky; left: 0; max-width: min(75ch, calc(100vw - 3rem)); }
caption strong { color: var(--ink); }
th, td { padding: .3rem .55rem; text-align: left; white-space: nowrap; font-weight: normal; }
thead th { font-weight: 600; border-bottom: 1.5px solid var(--ink); }
tbody { border-bottom: 1px solid var(--soft); }
tbody.paper { background: var(--tint); color: var(--soft); }
tbody tr:hover { background: var(--tint); }
.number { text-align: right; }
td strong { font-weight: 700; color: var(--mark); }
.notes { font-size: .85rem; color: var(--soft); margin-top: 0; }
figure { margin: 2rem 0; overflow-x: auto; }
figure img { max-width: max(100%, 40rem); height: auto; padding: .5rem; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; }
figcaption { font-size: .9rem; color: var(--soft); position: sticky; left: 0;
  max-width: min(75ch, calc(100vw - 3rem)); }
dt { font-weight: 600; margin-top: .8rem; } dd { margin: 0; }
code { font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
@media print { body { max-width: none; } .wide { overflow: visible; } nav, .skip, .hint { display: none; } }
"""
STYLE += "".join(f"@media screen and (max-width: {n}rem) {{ .under-{n} {{ display: block; }} }}\n" for n in WIDTHS)


def html_page(
    parts: Sequence[Part],
    made_by: Sequence[tuple[str, str, str]],
    notes: Sequence[str],
    files: Mapping[str, bytes],
) -> str:
    """All tables and figures, the runs behind them, and what there is to say besides.

    Args:
        parts: Of the report.
        made_by: For each run its name, its command, and what it took.
        notes: A sentence each.
        files: Of the report, by path: where the figures are taken from.
    """
    sections = {part.name: (part.title, section(part, files)) for part in parts}
    described = [
        tag("dt", escape(name)) + tag("dd", tag("code", escape(command))) + tag("dd", escape(took), class_="soft")
        for name, command, took in made_by
    ]
    if described:
        sections["runs"] = ("Runs", tag("dl", *described))
    if notes:
        sections["notes"] = ("Notes", tag("ul", *(tag("li", escape(note)) for note in notes)))
    links = [tag("li", tag("a", escape(title), href=f"#{name}")) for name, (title, _) in sections.items()]
    header = [
        tag("h1", "What the runs came to"),
        tag(
            "p",
            f"Written by acgpt {escape(__version__)}. All numbers are from the runs' own result files; those of the "
            "paper stand on a tinted ground.",
            class_="soft",
        ),
        tag("nav", tag("ul", *links), aria_label="Parts of this report"),
    ]
    main = [
        tag("section", tag("h2", escape(title), id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title")
        for name, (title, content) in sections.items()
    ]
    body = [
        tag("a", "Skip to the results", class_="skip", href="#results"),
        tag("header", *header),
        tag("main", "\n".join(main), id="results"),
    ]
    return document("acgpt report", "\n".join(body))


def document(title: str, body: str, style: str = "") -> str:
    """A whole page in the style of a report.

    Args:
        title: Text.
        body: HTML.
        style: CSS, after that of all pages.
    """
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content_="width=device-width, initial-scale=1"),
        tag("title", escape(title)),
        tag("style", STYLE, style),
    ]
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", body), lang="en") + "\n"


def section(part: Part, files: Mapping[str, bytes]) -> str:
    """Links to further pages, the figures of a part, where they were drawn, then its tables."""
    links = [tag("a", escape(title), href=name) for name, (title, _) in part.pages.items()]
    pieces = [tag("p", ", ".join(links))] if links else []
    for stem in part.pictures:
        if (drawn := files.get(f"{part.name}/{stem}.svg")) is not None:
            words = " ".join(filter(None, [part.captions.get(stem, ""), sentences(part.left_out.get(stem, ()))]))
            data = base64.b64encode(drawn).decode()
            image = tag("img", src=f"data:image/svg+xml;base64,{data}", alt=f"Figure {stem}, of the tables below.")
            pieces.append(tag("figure", image, tag("figcaption", tag("strong", escape(stem), "."), " ", escape(words))))
    for stem, table in part.tables.items():
        pieces.append(table.html(file_name(f"{part.name}-{stem}")))
    return "\n".join(pieces)
