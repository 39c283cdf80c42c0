"""Tables, written once and shown as Markdown, CSV, LaTeX (booktabs), JSON, and in the terminal.

Rows belong to groups, within which numbers may be compared: the best of each group is bold. A row's note becomes a
footnote. `--` is what cannot be answered or compared.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from acgpt.errors import CONTROLS

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Cell = str | float | None
NOTHING, INFINITE = "--", "∞"
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
TEX |= {">": r"\textgreater{}", "|": r"\textbar{}"} | {each: f"\\{each}" for each in "&%$#_{}"}


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        key: In the cells of a row, in CSV and in JSON.
        title: The heading.
        tex: The heading in LaTeX, where it is another.
        form: How numbers are written; a % at the end is written behind them. "" for a column of words.
        best: `min` or `max`: what is bold.
        terminal: Is there room for it in the terminal?
    """

    key: str
    title: str
    tex: str = ""
    form: str = ""
    best: Callable[[Iterable[float]], float] | None = None
    terminal: bool = True

    def show(self, value: Cell) -> str:
        """A cell, for people."""
        if value is None:
            return NOTHING
        if isinstance(value, str):
            return value.translate(CONTROLS)
        if math.isinf(value):
            return INFINITE
        return format(value, self.form.removesuffix("%")) + ("%" if self.form.endswith("%") else "")


@dataclass(frozen=True)
class Row:
    """A row: cells by column, the group within which it may be compared, and a footnote.

    Args:
        cells: By the key of their column.
        group: Any value; rows of a group stand together.
        note: The text of a footnote.
        paper: Is it one of the paper's own?
    """

    cells: Mapping[str, Cell]
    group: Hashable
    note: str | None = None
    paper: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: In a few words.
        caption: What one has to know to read it.
        columns: From left to right.
        rows: From top to bottom, those of a group together.
        mark: The column whose cells carry the marks of footnotes.
    """

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    mark: str

    @cached_property
    def notes(self) -> dict[str, int]:
        """The footnotes and their numbers."""
        texts = dict.fromkeys(row.note for row in self.rows if row.note)
        return {text: number for number, text in enumerate(texts, start=1)}

    def is_best(self, row: Row, column: Column) -> bool:
        """Is this cell, as it is written, the best of two or more in its group?"""
        if column.best is None:
            return False
        cells = [other.cells.get(column.key) for other in self.rows if other.group == row.group]
        numbers = [cell for cell in cells if isinstance(cell, int | float) and math.isfinite(cell)]
        best = column.show(column.best(numbers)) if len(numbers) > 1 else None
        return column.show(row.cells.get(column.key)) == best

    def grouped(self) -> list[list[Row]]:
        """The rows, group by group."""
        groups: dict[Hashable, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return list(groups.values())

    def markdown(self) -> str:
        """For a page."""

        def cell(row: Row, column: Column) -> str:
            text = plain_markdown(column.show(row.cells.get(column.key)))
            text = f"**{text}**" if self.is_best(row, column) else text
            return f"{text}<sup>{self.notes[row.note]}</sup>" if row.note and column.key == self.mark else text

        rule = ["---:" if column.form else "---" for column in self.columns]
        lines = [[column.title for column in self.columns], rule]
        lines += [[cell(row, column) for column in self.columns] for row in self.rows]
        notes = [f"<sup>{number}</sup> {plain_markdown(text)}" for text, number in self.notes.items()]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([table, *notes]) + "\n"

    def as_csv(self) -> str:
        """For spreadsheets: numbers with all their digits, the empty cell for `--`."""
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["source", *(column.key for column in self.columns), "note"])
        for row in self.rows:
            cells = [row.cells.get(column.key) for column in self.columns]
            shown = [cell.translate(CONTROLS) if isinstance(cell, str) else cell for cell in cells]
            writer.writerow(["paper" if row.paper else "run", *shown, row.note])
        return file.getvalue()

    def latex(self, label: str) -> str:
        r"""For a paper: a float with booktabs' rules.

        Args:
            label: What `\ref` names it by.
        """

        def cell(row: Row, column: Column) -> str:
            value = row.cells.get(column.key)
            text = NOTHING if value is None else escape_latex(column.show(value)).replace(INFINITE, r"$\infty$")
            if column.form.startswith("+") and isinstance(value, int | float):
                text = rf"$\mathbf{{{text}}}$" if self.is_best(row, column) else f"${text}$"  # a minus, not a hyphen
            elif self.is_best(row, column):
                text = rf"\textbf{{{text}}}"
            marked = row.note and column.key == self.mark
            return text + rf"\textsuperscript{{{self.notes[row.note or '']}}}" if marked else text

        def line(cells: Iterable[str]) -> str:
            return " & ".join(cells) + r" \\"

        groups = ["\n".join(line(cell(row, column) for column in self.columns) for row in g) for g in self.grouped()]
        notes = [rf"\textsuperscript{{{n}}}\,{escape_latex(text)}" for text, n in self.notes.items()]
        parts = [
            "% \\usepackage{booktabs,graphicx}",
            r"\begin{table}[ht]",
            rf"\caption{{{escape_latex(self.title)}. {escape_latex(self.caption)}}}",
            rf"\label{{{label}}}",
            r"\begin{center}",
            r"\resizebox{\columnwidth}{!}{%",
            rf"\begin{{tabular}}{{{''.join('r' if column.form else 'l' for column in self.columns)}}}",
            r"\toprule",
            line(column.tex or escape_latex(column.title) for column in self.columns),
            r"\midrule",
            "\n\\midrule\n".join(groups),
            r"\bottomrule",
            r"\end{tabular}%",
            "}",
            *([r"\\[3pt]", r"\footnotesize{" + r"\\ ".join(notes) + "}"] if notes else []),
            r"\end{center}",
            r"\end{table}",
        ]
        return "\n".join(parts) + "\n"

    def as_dicts(self) -> list[dict[str, Any]]:
        """For programs: the cells of each row, with its note; the paper's own rows left out."""
        keys = [column.key for column in self.columns]
        rows = [row for row in self.rows if not row.paper]
        return [{**{key: row.cells.get(key) for key in keys}, "note": row.note} for row in rows]

    def terminal(self) -> RichTable:
        """For the terminal, the paper's own rows left out; notes are numbered as in the other forms."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        columns = [column for column in self.columns if column.terminal]
        for column in columns:
            table.add_column(column.title, justify="right" if column.form else "left", overflow="fold")

        def cell(row: Row, column: Column) -> Text:
            text = column.show(row.cells.get(column.key))
            text += f" [{self.notes[row.note]}]" if row.note and column.key == self.mark else ""
            return Text(text, "bold" if self.is_best(row, column) else "")

        for number, group in enumerate(group for group in self.grouped() if not group[0].paper):
            if number:
                table.add_row()
            for row in group:
                table.add_row(*(cell(row, column) for column in columns))
        return table


def plain_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in a cell of a table too."""
    return re.sub(r"([\\|*_`<\[\]])", r"\\\1", text).replace("\n", " ")


def escape_latex(text: str) -> str:
    """A text that LaTeX shows as it is."""
    return "".join(TEX.get(each, each) for each in text).replace("--", "-{}-")  # which would be a dash
