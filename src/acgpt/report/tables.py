"""Tables, built once and rendered as Markdown, CSV, LaTeX (booktabs), HTML, JSON and for the terminal.

Rows belong to groups, and numbers are comparable within a group: the best of each group is bold, unless its lead is
within noise. A `Difference` is bold if its interval excludes zero. A row's note becomes a footnote. `--` marks what
cannot be answered or compared. `≤` marks a bound, which is never the best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from acgpt.display.table import escape_latex, latex_table, markdown_table, plain_markdown, terminal_table
from acgpt.errors import CONTROLS
from acgpt.evaluation.bootstrap import LEVEL, RESAMPLES, Difference, MeasuredPerplexity, paired_difference

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Item = TypeVar("Item")

NOTHING, INFINITE = "--", "∞"
# Characters that pdflatex shows without further packages: ASCII and most of Latin-1.
PDFLATEX = frozenset(map(chr, range(256))) - set("«»ÐÞðþ")
INTERVALS = (
    f"In brackets: the {100 * LEVEL:g} % interval (paired bootstrap, {RESAMPLES:,} resamples). Bold: the interval "
    "excludes zero. A difference has no interval, and is not bold, if no sums were kept on one side, or over other "
    "units than on the other (documents, texts)."
)
NO_CLEAR_BEST = (
    f"No value is bold if the {100 * LEVEL:g} % interval of its lead over another row includes zero (paired "
    "bootstrap, where sums per document or text were kept)."
)
LINES = 56  # of a table, rules included, that fit on a LaTeX page below the caption


@dataclass(frozen=True)
class Mean:
    """Mean over runs that differ only in their seed.

    Args:
        mean: Mean over the runs; infinite if one of them is.
        std: Sample standard deviation; `None` for a single run.
        runs: Number of runs, if known.
        bound: Whether it is only an upper bound.
        digits: Digits after the point, for a number that was printed elsewhere with so many.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    bound: bool = False
    digits: int | None = None

    @classmethod
    def of(cls, values: Iterable[float | None], bound: bool = False) -> Mean | None:
        """Return the mean and deviation of the numbers that are present; `None` if there are none.

        Its sums are exactly rounded, so the order of the runs does not change even the last digit.
        """
        present = [value for value in values if value is not None and not math.isnan(value)]
        if not present:
            return None
        finite = len(present) > 1 and all(map(math.isfinite, present))
        mean = math.fsum(present) / len(present)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in present) / (len(present) - 1)) if finite else None
        return cls(mean, std, len(present), bound)


Cell = str | float | Mean | Difference | None


def comparable(cell: Cell) -> float | None:
    """Return the number by which a cell is compared; `None` for text, missing or infinite numbers, and bounds."""
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
        key: Key in the cells of a row, in CSV and in JSON.
        title: Heading.
        form: Format specification of numbers; a trailing % is printed after the number. "" for a column of text.
        best: `min` or `max`: which number is bold.
        terminal: Whether it is useful in the terminal, where the paper's rows are not shown.
        spare: Whether the terminal shows it only if rows differ in it.
        spread: Whether CSV and JSON have the parts of its cells, which are `Mean`, or only their values.
        interval: Whether its cells are `Difference`. CSV has further columns for their intervals, JSON a further key.
    """

    key: str
    title: str
    form: str = ""
    best: Callable[..., Any] | None = None
    terminal: bool = True
    spare: bool = False
    spread: bool = False
    interval: bool = False

    def show(self, value: Cell) -> str:
        """Format a cell for people."""
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
        """Format a difference and its interval for people; "" if it has none."""
        spec = self.form.removesuffix("%")
        ends = [] if value.interval is None else [format(end, spec) for end in value.interval]
        return self.show(value.percent), f"({' to '.join(ends)})" if ends else ""

    def csv_values(self, cell: Cell) -> dict[str, Any]:
        """Return a cell with its parts, by column of the CSV file: numbers with all digits, `None` if missing."""
        key = self.key
        if self.interval:
            low, high = cell.interval if isinstance(cell, Difference) and cell.interval else (None, None)
            return {key: comparable(cell), f"{key}_low": low, f"{key}_high": high}
        if self.spread:
            mean, std, bound = (cell.mean, cell.std, int(cell.bound)) if isinstance(cell, Mean) else (None, None, None)
            return {key: mean, f"{key}_std": std, f"{key}_bound": bound}
        if isinstance(cell, Mean):
            return {key: cell.mean}
        return {key: cell.translate(CONTROLS) if isinstance(cell, str) else cell}

    def json_values(self, cell: Cell) -> dict[str, Any]:
        """Return a cell with its parts, by key in JSON."""
        if self.interval:
            interval = cell.interval if isinstance(cell, Difference) else None
            return {self.key: comparable(cell), f"{self.key}_interval": interval and list(interval)}
        if isinstance(cell, Mean):
            return {self.key: asdict(cell) if self.spread else cell.mean}
        return {self.key: cell}

    def equal_as_text(self, cell: Cell, value: float, other: float) -> bool:
        """Return whether two numbers look the same in this column, with the digits of the cell."""
        form = f".{cell.digits}f" if isinstance(cell, Mean) and cell.digits is not None else self.form
        formatter = replace(self, form=form)
        return formatter.show(value) == formatter.show(other)

    def parts(self, value: Mean) -> tuple[str, str]:
        """Format a mean and its deviation for people; "" if it has none."""
        form = self.form if value.digits is None else f".{value.digits}f"
        mean = INFINITE if math.isinf(value.mean) else format(value.mean, form)
        return mean, "" if value.std is None else format(value.std, form)


@dataclass(frozen=True)
class Row:
    """A row: its cells, the group within which it is comparable, and a footnote.

    Args:
        cells: Cells by key of their column.
        group: Any value; rows of a group stand together.
        note: Text of a footnote.
        paper: Whether it is a row of the paper.
        details: What it was evaluated on or compared with. The caption lists these once, for the rows in the table.
        measured: Perplexities by column, with the sums from which the intervals of leads are computed. Rows of a
            group were evaluated on the same dataset.
    """

    cells: Mapping[str, Cell]
    group: Hashable
    note: str | None = None
    paper: bool = False
    details: tuple[str, ...] = ()
    measured: Mapping[str, MeasuredPerplexity] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: Short title.
        caption: What a reader needs to know.
        columns: Columns, left to right.
        rows: Rows, top to bottom, those of a group together.
        mark: Key of the column whose cells carry the footnote marks.
        details_title: Title of the rows' `details` in the caption.
        paper_note: What a reader needs to know about the paper's rows, if there are any.
    """

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    mark: str
    details_title: str = ""
    paper_note: str = ""

    @cached_property
    def full_caption(self) -> str:
        """The caption with the details of the rows in the table and the note on the paper's rows."""
        details = "; ".join(dict.fromkeys(detail for row in self.rows for detail in row.details))
        paper_note = self.paper_note if any(row.paper for row in self.rows) else ""
        return " ".join(
            filter(None, [self.caption, f"{self.details_title}: {details}." if details else "", paper_note])
        )

    @cached_property
    def notes(self) -> dict[str, int]:
        """Footnotes and their numbers."""
        texts = dict.fromkeys(row.note for row in self.rows if row.note)
        return {text: number for number, text in enumerate(texts, start=1)}

    def text(self, row: Row, column: Column) -> str:
        """Format a cell for people."""
        return column.show(row.cells.get(column.key))

    @cached_property
    def best(self) -> set[tuple[int, str]]:
        """The cells, by `id` of the row and column, that are printed as the best of two or more in their group.

        There is no best if the interval of its lead over another row includes zero.
        """
        bold = set()
        for column, group in product(self.columns, self.grouped()):
            if column.best is not None:
                numbers = [(row, comparable(row.cells.get(column.key))) for row in group]
                present = [(row, number) for row, number in numbers if number is not None]
                if len(present) < 2:
                    continue
                first, winner = column.best(present, key=itemgetter(1))
                if not within_noise(column, first, [row for row, _ in present if row is not first]):
                    bold |= {
                        (id(row), column.key)
                        for row, number in present
                        if column.equal_as_text(row.cells[column.key], number, winner)
                    }
        return bold

    def is_bold(self, row: Row, column: Column) -> bool:
        """Return whether a cell is the best of two or more in its group, or a difference outside noise."""
        if column.best is not None:
            return (id(row), column.key) in self.best
        cell = row.cells.get(column.key)
        return isinstance(cell, Difference) and cell.clear

    def grouped(self) -> list[list[Row]]:
        """Return the rows, group by group."""
        return grouped(self.rows, lambda row: row.group)

    def pages(self) -> list[list[list[Row]]]:
        """Split the groups into LaTeX pages: a float that is longer than a page would be cut off."""
        pages: list[list[list[Row]]] = [[]]
        for group in self.grouped():
            if pages[-1] and sum(len(rows) + 1 for rows in pages[-1]) + len(group) > LINES:
                pages.append([])
            pages[-1].append(group)
        return pages

    def markdown(self) -> str:
        """Render the table as Markdown."""

        def cell(row: Row, column: Column) -> str:
            text = plain_markdown(self.text(row, column))
            text = f"**{text}**" if self.is_bold(row, column) else text
            return f"{text}<sup>{self.notes[row.note]}</sup>" if row.note and column.key == self.mark else text

        rows = [[cell(row, column) for column in self.columns] for row in self.rows]
        table = markdown_table([column.title for column in self.columns], rows, [*map(is_number, self.columns)])
        notes = [f"<sup>{number}</sup> {plain_markdown(text)}" for text, number in self.notes.items()]
        return "\n\n".join([table, *notes]) + "\n"

    def values(self, row: Row, values_of: Callable[[Column, Cell], dict[str, Any]]) -> dict[str, Any]:
        """Return the values of all cells of a row in a form that a method of `Column` gives them."""
        parts = [values_of(column, row.cells.get(column.key)) for column in self.columns]
        return {key: value for part in parts for key, value in part.items()}

    @cached_property
    def cells(self) -> pd.DataFrame:
        """All cells as objects: numbers with all digits, and `None` if missing.

        `source` is "run" or "paper". A column of means is followed by columns with their deviations and bounds, a
        column of differences by columns with the ends of their intervals.
        """
        records = [
            {"source": "paper" if row.paper else "run", **self.values(row, Column.csv_values), "note": row.note}
            for row in self.rows
        ]
        return pd.DataFrame(records, dtype=object)

    @property
    def frame(self) -> pd.DataFrame:
        """The table as a DataFrame with numeric dtypes; it has the contents of the CSV file."""
        frame = self.cells.infer_objects()
        empty = [key for key in frame if key != "note" and frame[key].isna().all()]
        return frame.astype(dict.fromkeys(empty, float))

    def as_csv(self) -> str:
        """Render the table as CSV: numbers with all digits, and empty cells for `--`."""
        return str(self.cells.to_csv(index=False, lineterminator="\n"))

    def latex(self, label: str) -> str:
        r"""Render the table as LaTeX: one or more floats with booktabs rules, after comments on how to compile it.

        Args:
            label: Name for `\ref`.
        """

        def cell(row: Row, column: Column) -> str:
            value, ends = row.cells.get(column.key), ""
            if isinstance(value, Difference):
                ends = re.sub(r"([+-][\d.]+)", r"$\1$", column.with_interval(value)[1])
                value, ends = value.percent, rf" {{\scriptsize {ends}}}" if ends else ""
            text = NOTHING if value is None else escape_latex(column.show(value))
            if isinstance(value, Mean):  # the paper's form
                text = re.sub(r" \$\\pm\$ (.*)", r" {\\scriptsize $\\pm$ \1}", text)
            if column.form.startswith("+") and isinstance(value, int | float):
                text = rf"$\mathbf{{{text}}}$" if self.is_bold(row, column) else f"${text}$"  # a minus, not a hyphen
            elif self.is_bold(row, column):
                text = rf"\textbf{{{text}}}"
            text += ends
            marked = row.note and column.key == self.mark
            return text + rf"\textsuperscript{{{self.notes[row.note or '']}}}" if marked else text

        def tabular(groups: Sequence[Sequence[Row]]) -> list[str]:
            headings = [latex_text(column.title) for column in self.columns]
            rows = [[[cell(row, column) for column in self.columns] for row in group] for group in groups]
            return latex_table(headings, rows, map(is_number, self.columns))

        notes = [rf"\textsuperscript{{{n}}}\,{escape_latex(text)}" for text, n in self.notes.items()]
        title = escape_latex(self.title)
        caption = latex_text(self.full_caption)
        begin, end = r"\begin{table}[ht]", [r"\end{center}", r"\end{table}"]
        first, *further = self.pages()
        parts = [begin, rf"\caption[{{{title}}}]{{\textbf{{{title}.}} {caption}}}", rf"\label{{{label}}}"]
        parts += [r"\begin{center}", *tabular(first)]
        for page in further:
            parts += [*end, begin, r"\begin{center}", rf"\tablename~\ref{{{label}}}, continued\\[3pt]", *tabular(page)]
        parts += [*([r"\\[3pt]", r"\footnotesize{" + r"\\ ".join(notes) + "}"] if notes else []), *end]
        odd = " ".join(sorted(set("".join(parts)) - PDFLATEX))
        font = [f"% lualatex or xelatex, and a font that has {odd}: pdflatex has not"] if odd else []
        return "\n".join([r"% \usepackage{booktabs,graphicx}", *font, *parts]) + "\n"

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the cells of each row with its note, for programs; the paper's rows are left out.

        The interval of a difference has its own key, `KEY_interval`.
        """
        return [{**self.values(row, Column.json_values), "note": row.note} for row in self.rows if not row.paper]

    def terminal(self) -> RichTable:
        """Render the table for the terminal, without the paper's rows; notes are numbered as in the other forms."""
        from rich.text import Text

        own = [row for row in self.rows if not row.paper]
        differing = {column.key for column in self.columns if len({self.text(row, column) for row in own}) > 1}
        columns = [
            column for column in self.columns if column.terminal and (not column.spare or column.key in differing)
        ]
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


def latex_text(text: str) -> str:
    """Escape a text for LaTeX, with r_max as a symbol."""
    return re.sub(r"\br\\_max\b", r"$r_{\\max}$", escape_latex(text))


def within_noise(column: Column, first: Row, others: Sequence[Row]) -> bool:
    """Return whether the best row's lead over another has an interval that includes zero, where it is known."""
    best, key = first.measured.get(column.key), column.key
    if best is None:
        return False
    leads = [paired_difference(best, row.measured[key]) for row in others if key in row.measured]
    return any(lead.interval is not None and not lead.clear for lead in leads)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by a key, in the order in which the keys first appear.

    >>> grouped(["bad", "air", "bee"], lambda word: word[0])
    [['bad', 'bee'], ['air']]
    """
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def known_first(items: Iterable[str], known: Collection[str]) -> list[str]:
    """Return items, each once: the known ones in their order, then the others."""
    present = dict.fromkeys(items)
    return [*(item for item in known if item in present), *(item for item in present if item not in known)]


def is_number(column: Column) -> bool:
    """Return whether a column holds numbers."""
    return bool(column.form)


def file_name(text: str) -> str:
    """Return a text as a safe file or folder name."""
    return re.sub(r"[^\w.-]", "_", text).lstrip(".") or "_"
