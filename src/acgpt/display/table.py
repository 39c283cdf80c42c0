"""Tables on a terminal, in Markdown and in LaTeX.

On a terminal nothing is truncated:

    wide enough, or no terminal    the table as it is
    narrower                       headings and text wrapped
    too narrow for that            a block per row, a line per column

Rich would truncate cells that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from acgpt.errors import CONTROLS

LEAST = 12  # minimum width of a wrapped text column
GAP = 2  # cells between two columns
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
TEX |= {">": r"\textgreater{}", "|": r"\textbar{}"} | {each: f"\\{each}" for each in "&%$#_{}"}
TEX |= {"σ": r"$\sigma$", "±": r"$\pm$", "≤": r"$\le$", "×": r"$\times$", "∞": r"$\infty$", "…": r"\ldots{}"}


# ---- Markdown and LaTeX ---------------------------------------------------------------------------------------------


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["run", "loss"], [["a", "1.5"]], [False, True]))
    | run | loss |
    | --- | ---: |
    | a | 1.5 |

    Args:
        headings: Headings of the columns.
        rows: The cells of each row, as Markdown.
        numbers: Whether each column holds numbers, aligned right.
    """
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headings, rule, *rows])


def plain_markdown(text: str) -> str:
    """Escape a text for Markdown, also in cells of tables."""
    return re.sub(r"([\\|*_`<\[\]])", r"\\\1", text).replace("\n", " ")


def latex_table(
    headings: Iterable[str], groups: Iterable[Iterable[Iterable[str]]], numbers: Iterable[bool]
) -> list[str]:
    """Return the lines of a LaTeX tabular with booktabs rules, scaled to the column width.

    Args:
        headings: Headings of the columns, as LaTeX.
        groups: Groups of rows, separated by rules; cells as LaTeX.
        numbers: Whether each column holds numbers, aligned right.
    """

    def line(cells: Iterable[str]) -> str:
        return (
            re.sub(r"^(?=[\[*])", "{}", " & ".join(cells)) + r" \\"
        )  # otherwise LaTeX reads it as an argument of the line before

    return [
        r"\resizebox{\columnwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numbers)}}}",
        r"\toprule",
        line(headings),
        r"\midrule",
        "\n\\midrule\n".join("\n".join(map(line, rows)) for rows in groups),
        r"\bottomrule",
        r"\end{tabular}%",
        "}",
    ]


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX. A `--` on its own remains a dash."""
    shown = "".join(TEX.get(each, each) for each in text.translate(CONTROLS))
    return re.sub(r"(?<![\w-])(--)(?![\w-])|-(?=-)", lambda match: match[1] or "-{}", shown)


# ---- the terminal ---------------------------------------------------------------------------------------------------


def terminal_table(headings: Iterable[str], numbers: Iterable[bool] | None = None, *, fold: bool = True) -> Table:
    """Return an empty table for `print_table`, in the common style.

    Args:
        headings: Headings of the columns.
        numbers: Whether each column holds numbers, aligned right. Default: all are but the first.
        fold: Whether text columns may be wrapped.
    """
    headings = list(headings)
    numbers = [number > 0 for number in range(len(headings))] if numbers is None else numbers
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for heading, number in zip(headings, numbers, strict=True):
        if number:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, no_wrap=not fold, overflow="fold")
    return table


def print_table(page: Console, table: Table) -> None:
    """Print a table without truncation.

    Args:
        page: The console. Its width matters only on a terminal.
        table: A table without a box. Left-aligned columns are wrapped unless they are `no_wrap`.
    """
    if not page.file.isatty():  # in a pipe, colours or not
        width, page.width = page.width, max(page.width, width_of(map(widest, table.columns)))
        page.print(table)
        page.width = width
        return
    if width_of(map(least, table.columns)) > page.width:
        print_stacked(page, table)
        return
    if width_of(map(widest, table.columns)) > page.width:
        for column in table.columns:
            column.min_width, column.overflow, column.no_wrap = least(column), "fold", not folds(column)
            if column.no_wrap:
                lines = wrap(plain(column.header), max(1, column.min_width), break_long_words=False)
                column.header = "\n".join(lines)
    page.print(table)


def plain(cell: object) -> str:
    """Return the text of a cell without its style."""
    return cell.plain if isinstance(cell, Text) else str(cell)


def cells_of(column: Column) -> list[str]:
    """Return the cells of a column below its heading."""
    return [plain(cell) for cell in column.cells]


def across(text: str) -> int:
    """Return the width of the widest line."""
    return max(map(cell_len, text.split("\n")))


def folds(column: Column) -> bool:
    """Return whether the cells of a column may be wrapped."""
    return column.justify == "left" and not column.no_wrap


def width_of(columns: Iterable[int]) -> int:
    """Return the width of a table whose columns have these widths."""
    widths = list(columns)
    return sum(widths) + GAP * (len(widths) - 1)


def widest(column: Column) -> int:
    """Return the width of a column without wrapping."""
    return max(map(across, [plain(column.header), *cells_of(column)]))


def least(column: Column) -> int:
    """Return the minimum width of a column, with wrapped heading and, if allowed, wrapped cells."""
    widest = max(map(across, cells_of(column)), default=0)
    heading = max(map(cell_len, plain(column.header).split()), default=0)
    return max(heading, min(widest, LEAST) if folds(column) else widest)


def print_stacked(page: Console, table: Table) -> None:
    """Print a block per row: its first cell in bold, and a line per other column."""
    headings = [plain(column.header) for column in table.columns]
    size = max(map(cell_len, headings))
    for row in zip(*map(cells_of, table.columns), strict=True):
        if not any(row):
            continue  # a separator between groups
        number = next(number for number, cell in enumerate(row) if cell)
        page.print(Text(f"{headings[number]} {row[number]}".strip(), "bold"), soft_wrap=True)
        for heading, cell in list(zip(headings, row, strict=True))[number + 1 :]:
            if cell:
                page.print(Text(f"  {heading}{' ' * (size - cell_len(heading))}  {cell}"), soft_wrap=True)
