"""`acgpt methods`: what each method can do, table 1 of the paper, from what the code declares."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from acgpt.cli.ui import emit, option, silence_libraries

COLUMNS = {  # their headings, and what they mean
    "evaluates_any": ("evaluates any conditional", "gives p(asked | given) exactly, whatever is asked and given"),
    "samples_any": ("samples any conditional", "draws from p(asked | given), whatever is asked and given"),
    "left_to_right": (
        "left to right",
        "learns each asked token from what is given and the asked tokens before it, from no others",
    ),
    "single_pass": ("single pass", "answers a query in one forward pass"),
    "fine_tunes": ("tunes a causal LLM", "a pretrained causal model can be tuned to it (–: it is one)"),
}
MARKS = {True: "✓", False: "✗", None: "–"}


def methods(
    as_json: Annotated[bool, option("--json", help="For programs: one JSON object with the keys named above.")] = False,
) -> None:
    r"""What each method can do: table 1 of the paper.

    Below the table: what its columns mean, and which methods acgpt evaluate
    --compile and --method-option are for. Packages can add methods:
    docs/how-to/add-a-method.md.

    acgpt train tiny-cpu corpus=data/mine output=runs/s method=sigma-gpt-random
    acgpt evaluate runs/s/model data/mine --method-option order=random

    Keys of --json: methods: for each, by name: title, evaluates_any, samples_any,
    left_to_right, single_pass, fine_tunes (null: it is one), note, bound,
    options (of acgpt evaluate --method-option)
    """
    silence_libraries()
    from acgpt.display.show import Page
    from acgpt.display.table import terminal_table
    from acgpt.methods import METHODS

    if as_json:
        found = {
            name: {"title": method.title, **asdict(method.abilities), "bound": method.bound, "options": method.options}
            for name, method in METHODS.items()
        }
        emit({"methods": found})
        return
    page, notes = Page(), [method for method in METHODS.values() if method.abilities.note]
    table = terminal_table(("method=", *(heading for heading, _ in COLUMNS.values())), fold=False)
    for column in table.columns[1:]:
        column.justify = "center"
    for method in METHODS.values():
        marks = [MARKS[getattr(method.abilities, name)] for name in COLUMNS]
        mark = f" {notes.index(method) + 1}" if method in notes else ""
        table.add_row(method.name + mark, *marks)
    page.table(table)
    page.note("")
    for heading, meaning in COLUMNS.values():
        page.note(f"{heading:25}  {meaning}")
    page.note("")
    for number, method in enumerate(notes, start=1):
        page.note(f"{number}  {method.abilities.note}.")
    compiled = ", ".join(method.name for method in METHODS.values() if method.compiles)
    page.note(f"\nacgpt evaluate --compile, for methods of many passes: {compiled}")
    page.note("\nacgpt evaluate --method-option KEY=VALUE, where a method leaves a choice:")
    for method in METHODS.values():
        for key, words in method.options.items():
            page.note(f"   {method.name:18} {key:7} {words}")
