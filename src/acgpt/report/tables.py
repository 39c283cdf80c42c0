"""Tables, written once and shown as Markdown, CSV, LaTeX (booktabs), HTML, JSON, and in the terminal.

Rows belong to groups, within which numbers may be compared: the best of each group is bold, unless its lead lies within
noise. A `Difference` is bold where its interval excludes zero. A row's note becomes a footnote. `--` is what cannot be
answered or compared, `≤` what is only a bound, which is never the best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from acgpt.display.table import escape_latex, latex_table, markdown_table, plain_markdown, terminal_table
from acgpt.errors import CONTROLS
from acgpt.evaluation.bootstrap import LEVEL, RESAMPLES, Difference, percentiles

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOTHING, INFINITE = "--", "∞"
# What pdflatex shows without further packages: ASCII and most of Latin-1.
PDFLATEX = frozenset(map(chr, range(256))) - set("«»ÐÞðþ")
INTERVALS = (
    f"In brackets: the {100 * LEVEL:g} % interval over texts (paired bootstrap, {RESAMPLES:,} resamples). Bold: it "
    "excludes zero. A difference without an interval is not bold: the sums of each text were not kept."
)
UNLESS = (
    f"unless zero lies in the {100 * LEVEL:g} % interval of its lead over one of them (paired bootstrap over texts, "
    "where their sums were kept)"
)
WIDTHS = (40, 60, 80, 100, 1000)  # of windows, in rem: a page is never wider than about 100
LINES = 56  # of a table, rules counted, that fit on a page of LaTeX below the caption


@dataclass(frozen=True)
class Mean:
    """What several runs have found that differ in their seed only.

    Args:
        mean: Over the runs; infinite if one of them is.
        std: The standard deviation of a sample; `None` for a single run.
        runs: How many there were, if that is known.
        bound: Is it only known to be at most this?
        digits: After the point, if it was printed with so many elsewhere.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    bound: bool = False
    digits: int | None = None

    @classmethod
    def of(cls, values: Iterable[float | None], bound: bool = False) -> Mean | None:
        """The mean and spread of those numbers that are there; `None` if none is.

        It aggregates a pandas group, like `"mean"` and `"std"`, but its sums are exactly rounded: the order of the runs
        makes no difference, not even in the last digit.
        """
        there = [value for value in values if value is not None and not math.isnan(value)]
        if not there:
            return None
        finite = len(there) > 1 and all(map(math.isfinite, there))
        mean = math.fsum(there) / len(there)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in there) / (len(there) - 1)) if finite else None
        return cls(mean, std, len(there), bound)


Cell = str | float | Mean | Difference | None


def rank(cell: Cell) -> float | None:
    """The number by which a cell is compared: none for words, for what is missing or infinite, and for bounds."""
    number = cell
    if isinstance(cell, Mean):
        number = None if cell.bound else cell.mean
    elif isinstance(cell, Difference):
        number = cell.percent
    return number if isinstance(number, int | float) and math.isfinite(number) else None


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        key: In the cells of a row, in CSV and in JSON.
        title: The heading.
        tex: The heading in LaTeX, where it is another.
        form: How numbers are written; a % at the end is written behind them. "" for a column of words.
        best: `min` or `max`: what is bold.
        terminal: Does it say anything in the terminal, where the paper's own rows are left out?
        spare: May a narrow terminal leave it out? 0: never; 1: if it must, for it may tell rows apart; 2: first.
        spread: Are its cells `Mean`? Their parts then have columns of their own in CSV.
        interval: Are its cells `Difference`? Their intervals then have columns of their own in CSV, and a key in JSON.
    """

    key: str
    title: str
    tex: str = ""
    form: str = ""
    best: Callable[[Iterable[float]], float] | None = None
    terminal: bool = True
    spare: int = 0
    spread: bool = False
    interval: bool = False

    def show(self, value: Cell) -> str:
        """A cell, for people."""
        if value is None:
            return NOTHING
        if isinstance(value, str):
            return value.translate(CONTROLS)
        if isinstance(value, Mean):
            mean, std = self.parts(value)
            return ("≤ " if value.bound else "") + mean + (f" ± {std}" if std else "")
        if isinstance(value, Difference):
            return " ".join(filter(None, self.with_interval(value)))
        if math.isinf(value):
            return INFINITE
        return format(value, self.form.removesuffix("%")) + ("%" if self.form.endswith("%") else "")

    def with_interval(self, value: Difference) -> tuple[str, str]:
        """A difference and its interval, for people; "" where there is none."""
        form = self.form.removesuffix("%")
        ends = [] if value.interval is None else [format(end, form) for end in value.interval]
        return self.show(value.percent), f"({' to '.join(ends)})" if ends else ""

    def same_text(self, cell: Cell, own: float, other: float) -> bool:
        """Are two numbers written alike in this column, with the digits of a cell? What is missing is like nothing."""
        if math.isnan(own):
            return False
        form = f".{cell.digits}f" if isinstance(cell, Mean) and cell.digits is not None else self.form
        as_written = replace(self, form=form)
        return as_written.show(own) == as_written.show(other)

    def parts(self, value: Mean) -> tuple[str, str]:
        """A mean and its deviation, for people; "" where there is none."""
        form = self.form if value.digits is None else f".{value.digits}f"
        mean = INFINITE if math.isinf(value.mean) else format(value.mean, form)
        return mean, "" if value.std is None else format(value.std, form)


@dataclass(frozen=True)
class Row:
    """A row: cells by column, the group within which it may be compared, and a footnote.

    Args:
        cells: By the key of their column.
        group: Any value; rows of a group stand together.
        note: The text of a footnote.
        paper: Is it one of the paper's own?
        about: What it was asked or compared with, for the caption: each is said once, of the rows that there are.
        resampled: By column, (resamples,) the cell on resampled texts, where that is known. Rows of a group share the
            resamples.
        texts: Number of texts that were resampled.
    """

    cells: Mapping[str, Cell]
    group: Hashable
    note: str | None = None
    paper: bool = False
    about: tuple[str, ...] = ()
    resampled: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    texts: int = 0


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: In a few words.
        caption: What one has to know to read it.
        columns: From left to right.
        rows: From top to bottom, those of a group together.
        mark: The column whose cells carry the marks of footnotes.
        about: What the rows' own `about` are, in the caption's words.
        beside: What one has to know of the paper's rows, where there are some.
    """

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    mark: str
    about: str = ""
    beside: str = ""

    @cached_property
    def words(self) -> str:
        """The whole caption, for the rows that there are."""
        said = "; ".join(dict.fromkeys(words for row in self.rows for words in row.about))
        beside = self.beside if any(row.paper for row in self.rows) else ""
        return " ".join(filter(None, [self.caption, f"{self.about}: {said}." if said else "", beside]))

    def only(self, **values: Sequence[str]) -> Table:
        """The table with those rows alone whose cells are written as one of the values of their column.

        A row of the paper is left out if it says something else there, not if it says nothing.
        """
        columns = {column.key: column for column in self.columns}

        def fits(row: Row, key: str) -> bool:
            cell = row.cells.get(key)
            return (row.paper and cell is None) or columns[key].show(cell) in values[key]

        return replace(self, rows=tuple(row for row in self.rows if all(fits(row, key) for key in values)))

    @cached_property
    def notes(self) -> dict[str, int]:
        """The footnotes and their numbers."""
        texts = dict.fromkeys(row.note for row in self.rows if row.note)
        return {text: number for number, text in enumerate(texts, start=1)}

    def text(self, row: Row, column: Column) -> str:
        """A cell, for people."""
        return column.show(row.cells.get(column.key))

    @cached_property
    def groups(self) -> pd.Series:
        """The number of each row's group, in the order of their first rows."""
        return numbered(row.group for row in self.rows)

    @cached_property
    def best(self) -> pd.DataFrame:
        """For each row and column: is the cell, as it is written, the best of two or more in its group?

        None is where the best leads another by a difference whose interval over texts holds zero.
        """
        found = {}
        for column in (column for column in self.columns if column.best is not None):
            cells = [row.cells.get(column.key) for row in self.rows]
            ranks = pd.Series([rank(cell) for cell in cells], dtype=float)
            by_group = ranks.groupby(self.groups)
            winners, rivals = by_group.transform("min" if column.best is min else "max"), by_group.transform("count")
            unclear = {group for group, own in by_group if self.within_noise(column, own)}
            found[column.key] = [
                several > 1 and group not in unclear and column.same_text(cell, own, winner)
                for cell, own, winner, several, group in zip(cells, ranks, winners, rivals, self.groups, strict=True)
            ]
        return pd.DataFrame(found, index=[id(row) for row in self.rows])

    def within_noise(self, column: Column, ranks: pd.Series) -> bool:
        """Does the interval of a difference between the best of some rows and another hold zero, where it is known?

        Args:
            column: The column.
            ranks: The numbers of the rows of one group, by their index.
        """
        there = ranks.dropna()
        if there.empty:
            return False
        first = there.idxmin() if column.best is min else there.idxmax()
        best = self.rows[first].resampled.get(column.key)
        others = [self.rows[i].resampled.get(column.key) for i in there.index if i != first]
        intervals = [
            percentiles(other - best, self.rows[first].texts)
            for other in others
            if other is not None and best is not None
        ]
        return any(ends is not None and ends[0] <= 0 <= ends[1] for ends in intervals)

    def is_bold(self, row: Row, column: Column) -> bool:
        """Is this cell the best of two or more in its group, or a difference that lies outside noise?"""
        if column.best is not None:
            return bool(self.best.at[id(row), column.key])
        cell = row.cells.get(column.key)
        return isinstance(cell, Difference) and cell.clear

    def grouped(self) -> list[list[Row]]:
        """The rows, group by group."""
        return [list(rows) for _, rows in pd.Series(self.rows, dtype=object).groupby(self.groups)]

    def pages(self) -> list[list[list[Row]]]:
        """The groups, page by page of a paper: what is longer than a page would be cut off there."""
        pages: list[list[list[Row]]] = [[]]
        for group in self.grouped():
            if pages[-1] and sum(len(other) + 1 for other in pages[-1]) + len(group) > LINES:
                pages.append([])
            pages[-1].append(group)
        return pages

    def markdown(self) -> str:
        """For a page."""

        def cell(row: Row, column: Column) -> str:
            text = plain_markdown(self.text(row, column))
            text = f"**{text}**" if self.is_bold(row, column) else text
            return f"{text}<sup>{self.notes[row.note]}</sup>" if row.note and column.key == self.mark else text

        rows = [[cell(row, column) for column in self.columns] for row in self.rows]
        table = markdown_table([column.title for column in self.columns], rows, [*map(is_number, self.columns)])
        notes = [f"<sup>{number}</sup> {plain_markdown(text)}" for text, number in self.notes.items()]
        return "\n\n".join([table, *notes]) + "\n"

    @cached_property
    def cells(self) -> pd.DataFrame:
        """All cells as objects: numbers with all their digits, and `None` for what is missing.

        `source` is "run" or "paper". A column of means has its deviations and bounds in columns beside it, one of
        differences the ends of their intervals.
        """

        def parts(row: Row, column: Column) -> dict[str, Any]:
            cell = row.cells.get(column.key)
            if column.interval:
                ends = cell.interval if isinstance(cell, Difference) and cell.interval else (None, None)
                values = [rank(cell), *ends]
                return dict(zip([column.key, f"{column.key}_low", f"{column.key}_high"], values, strict=True))
            if not column.spread:
                return {column.key: cell.translate(CONTROLS) if isinstance(cell, str) else cell}
            mean = [cell.mean, cell.std, int(cell.bound)] if isinstance(cell, Mean) else [None] * 3
            return dict(zip([column.key, f"{column.key}_std", f"{column.key}_bound"], mean, strict=True))

        records = []
        for row in self.rows:
            record: dict[str, Any] = {"source": "paper" if row.paper else "run"}
            for column in self.columns:
                record |= parts(row, column)
            records.append(record | {"note": row.note})
        return pd.DataFrame(records, dtype=object)

    @property
    def frame(self) -> pd.DataFrame:
        """The table as a DataFrame, with the dtypes of its numbers: what its CSV file holds."""
        frame = self.cells.infer_objects()
        empty = [key for key in frame if key != "note" and frame[key].isna().all()]
        return frame.astype(dict.fromkeys(empty, float))

    def as_csv(self) -> str:
        """For spreadsheets: numbers with all their digits, the empty cell for `--`."""
        return str(self.cells.to_csv(index=False, lineterminator="\n"))

    def latex(self, label: str) -> str:
        r"""For a paper: a float with booktabs' rules, or several; comments at its head say what it takes to compile it.

        Args:
            label: What `\ref` names it by.
        """

        def cell(row: Row, column: Column) -> str:
            value, ends = row.cells.get(column.key), ""
            if isinstance(value, Difference):
                ends = re.sub(r"([+-][\d.]+)", r"$\1$", column.with_interval(value)[1])
                value, ends = value.percent, rf" {{\scriptsize {ends}}}" if ends else ""
            text = NOTHING if value is None else escape_latex(column.show(value))
            if isinstance(value, Mean):  # as the paper writes it
                text = re.sub(r" \$\\pm\$ (.*)", r" {\\scriptsize $\\pm$ \1}", text)
            if column.form.startswith("+") and isinstance(value, int | float):
                text = rf"$\mathbf{{{text}}}$" if self.is_bold(row, column) else f"${text}$"  # a minus, not a hyphen
            elif self.is_bold(row, column):
                text = rf"\textbf{{{text}}}"
            text += ends
            marked = row.note and column.key == self.mark
            return text + rf"\textsuperscript{{{self.notes[row.note or '']}}}" if marked else text

        def tabular(groups: Sequence[Sequence[Row]]) -> list[str]:
            headings = [column.tex or escape_latex(column.title) for column in self.columns]
            rows = [[[cell(row, column) for column in self.columns] for row in group] for group in groups]
            return latex_table(headings, rows, map(is_number, self.columns))

        notes = [rf"\textsuperscript{{{n}}}\,{escape_latex(text)}" for text, n in self.notes.items()]
        title, words = escape_latex(self.title), re.sub(r"\br\\_max\b", r"$r_{\\max}$", escape_latex(self.words))
        begin, end = r"\begin{table}[ht]", [r"\end{center}", r"\end{table}"]
        first, *further = self.pages()
        parts = [begin, rf"\caption[{{{title}}}]{{\textbf{{{title}.}} {words}}}", rf"\label{{{label}}}"]
        parts += [r"\begin{center}", *tabular(first)]
        for page in further:
            parts += [*end, begin, r"\begin{center}", rf"\tablename~\ref{{{label}}}, continued\\[3pt]", *tabular(page)]
        parts += [*([r"\\[3pt]", r"\footnotesize{" + r"\\ ".join(notes) + "}"] if notes else []), *end]
        odd = " ".join(sorted(set("".join(parts)) - PDFLATEX))
        font = [f"% lualatex or xelatex, and a font that has {odd}: pdflatex has not"] if odd else []
        return "\n".join([r"% \usepackage{booktabs,graphicx}", *font, *parts]) + "\n"

    def as_dicts(self) -> list[dict[str, Any]]:
        """For programs: the cells of each row, with its note; the paper's own rows left out.

        The interval of a difference has a key of its own, `KEY_interval`.
        """

        def plain(row: Row, column: Column) -> dict[str, Any]:
            cell = row.cells.get(column.key)
            if column.interval:
                ends = cell.interval if isinstance(cell, Difference) else None
                return {column.key: rank(cell), f"{column.key}_interval": ends and list(ends)}
            return {column.key: asdict(cell) if isinstance(cell, Mean) else cell}

        records: list[dict[str, Any]] = []
        for row in (row for row in self.rows if not row.paper):
            record: dict[str, Any] = {}
            for column in self.columns:
                record |= plain(row, column)
            records.append(record | {"note": row.note})
        return records

    @property
    def page_width(self) -> int:
        """The width of a window, in rem, below which not all columns may be seen at once: one of `WIDTHS`."""
        letters = [
            max(len(column.title), *(len(self.text(row, column)) for row in self.rows), 1) for column in self.columns
        ]
        width = sum(0.5 * count + 1.1 for count in letters) + 3  # cells have a size of 0.875, padding and margins
        return next((each for each in WIDTHS if width <= each), WIDTHS[-1])

    @property
    def spare(self) -> list[str]:
        """The titles of the columns that a narrow terminal can do without, the first of them first."""
        rows = [row for row in self.rows if not row.paper]

        def worth(column: Column) -> tuple[int, bool]:
            return -column.spare, len({self.text(row, column) for row in rows}) > 1

        found = [column for column in self.columns if column.terminal and column.spare]
        return [column.title for column in sorted(reversed(found), key=worth)]

    def terminal(self) -> RichTable:
        """For the terminal, the paper's own rows left out; notes are numbered as in the other forms."""
        from rich.text import Text

        columns = [column for column in self.columns if column.terminal]
        table = terminal_table([column.title for column in columns], map(is_number, columns))

        def cell(row: Row, column: Column) -> Text:
            text = self.text(row, column)
            text += f" [{self.notes[row.note]}]" if row.note and column.key == self.mark else ""
            return Text(text, "bold" if self.is_bold(row, column) else "")

        for number, group in enumerate(group for group in self.grouped() if not group[0].paper):
            if number:
                table.add_row()
            for row in group:
                table.add_row(*(cell(row, column) for column in columns))
        return table


def numbered(groups: Iterable[Hashable]) -> pd.Series:
    """The number of each group, counted in the order in which they first appear.

    >>> numbered(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    values = pd.Series(list(groups), dtype=object)
    return pd.Series(values.factorize(use_na_sentinel=False)[0], dtype=int)


def is_number(column: Column) -> bool:
    """Does a column hold numbers?"""
    return bool(column.form)


def file_name(text: str) -> str:
    """A text as the name of a file or folder, with nothing odd in it."""
    return re.sub(r"[^\w.-]", "_", text).lstrip(".") or "_"
