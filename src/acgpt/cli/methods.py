"""`acgpt methods`: table 1 of the paper, from the abilities that methods declare."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import entry_points

from acgpt.cli.ui import ObjectOption, emit, silence_libraries

COLUMNS = {  # heading and meaning
    "evaluates_any": ("evaluates any conditional", "computes p(asked | given) exactly, for any asked and given tokens"),
    "samples_any": ("samples any conditional", "samples from p(asked | given), for any asked and given tokens"),
    "left_to_right": (
        "left to right",
        "predicts each asked token from given tokens and earlier asked tokens only",
    ),
    "single_pass": ("single pass", "answers a query in one forward pass"),
    "fine_tunes": ("tunes a causal LLM", "a pretrained causal model can be fine-tuned to it (–: it is one)"),
}
MARKS = {True: "✓", False: "✗", None: "–"}


def methods(as_json: ObjectOption = False) -> None:
    r"""List the methods and what they can do (table 1 of the paper).

    acgpt train tiny-cpu corpus=data/mine output=runs/s method=sigma-gpt-random
    acgpt evaluate runs/s/model data/mine --method-option order=random

    Also lists the options of acgpt evaluate --method-option, and the methods for
    which --compile is useful. Packages can add methods:
    docs/how-to/add-a-method.md.

    Keys of --json: methods: by name: title, evaluates_any, samples_any,
    left_to_right, single_pass, fine_tunes (null: it is one), note, bound,
    options (of acgpt evaluate --method-option)
    """
    from acgpt.display.show import Page
    from acgpt.display.table import terminal_table
    from acgpt.methods import METHODS
    from acgpt.methods.registry import GROUP

    if entry_points(group=GROUP):  # only methods of other packages import libraries that print
        silence_libraries()

    if as_json:
        entries = {
            name: {"title": method.title, **asdict(method.abilities), "bound": method.bound, "options": method.options}
            for name, method in METHODS.items()
        }
        emit({"methods": entries})
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
    page.note(f"\nMethods of many passes, for which acgpt evaluate --compile is useful: {compiled}")
    page.note("\nOptions of methods (acgpt evaluate --method-option KEY=VALUE):")
    for method in METHODS.values():
        for key, text in method.options.items():
            page.note(f"   {method.name:18} {key:7} {text}")
