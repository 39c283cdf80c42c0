"""Tables, built once and rendered as Markdown, CSV, LaTeX (booktabs), HTML, JSON and for the terminal.

Rows belong to groups, and numbers are comparable within a group: the best of each group is bold, unless its lead is
within noise. A `Difference` is bold if its interval excludes zero. A row's note becomes a footnote. `--` marks what
cannot be answered or compared. `≤` marks a bound, which is never the best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
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

    def texts(self, cell: Cell) -> tuple[str, str]:
        """Format a cell for people: its value, and its deviation or interval; "" if it has none."""
        form, unit = self.form.removesuffix("%"), "%" * self.form.endswith("%")
        if isinstance(cell, Mean):
            form = form if cell.digits is None else f".{cell.digits}f"
            mean = INFINITE if math.isinf(cell.mean) else format(cell.mean, form)
            return "≤ " * cell.bound + mean, "" if cell.std is None else f"± {cell.std:{form}}"
        if isinstance(cell, Difference):
            ends = [format(end, form) for end in cell.interval or ()]
            return self.texts(cell.percent)[0], f"({' to '.join(ends)})" if ends else ""
        if cell is None:
            return NOTHING, ""
        if isinstance(cell, str):
            return cell.translate(CONTROLS), ""
        return INFINITE if math.isinf(cell) else format(cell, form) + unit, ""

    def show(self, cell: Cell) -> str:
        """Format a cell for people, in one text."""
        return " ".join(filter(None, self.texts(cell)))

    def values(self, cell: Cell, csv: bool) -> dict[str, Any]:
        """Return a cell with its parts by key in JSON, or by column of a CSV file: numbers with all digits."""
        key = self.key
        if self.interval:
            ends = cell.interval if isinstance(cell, Difference) else None
            low, high = ends or (None, None)
            parts = {f"{key}_low": low, f"{key}_high": high} if csv else {f"{key}_interval": ends and [low, high]}
            return {key: comparable(cell), **parts}
        if self.spread and csv:
            mean, std, bound = (cell.mean, cell.std, int(cell.bound)) if isinstance(cell, Mean) else (None, None, None)
            return {key: mean, f"{key}_std": std, f"{key}_bound": bound}
        if isinstance(cell, Mean):
            return {key: asdict(cell) if self.spread else cell.mean}
        return {key: cell.translate(CONTROLS) if csv and isinstance(cell, str) else cell}


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
    rows: tuple[Row, ...] = ()
    mark: str = "method"
    details_title: str = "Evaluation datasets"
    paper_note: str = ""

    @cached_property
    def full_caption(self) -> str:
        """The caption with the details of the rows in the table and the note on the paper's rows."""
        details = "; ".join(dict.fromkeys(detail for row in self.rows for detail in row.details))
        paper_note = self.paper_note if any(row.paper for row in self.rows) else ""
        return " ".join(filter(None, [self.caption, f"{self.details_title}: {details}." * bool(details), paper_note]))

    @cached_property
    def notes(self) -> dict[str, int]:
        """Footnotes and their numbers."""
        texts = dict.fromkeys(row.note for row in self.rows if row.note)
        return {text: number for number, text in enumerate(texts, start=1)}

    def mark_of(self, row: Row, column: Column) -> int | None:
        """Return the number of the footnote that a cell refers to, if it does."""
        return self.notes[row.note] if row.note and column.key == self.mark else None

    @cached_property
    def best(self) -> set[tuple[int, str]]:
        """The cells, by `id` of the row and column, that are printed as the best of two or more in their group.

        There is no best if the interval of its lead over another row includes zero.
        """
        bold = set()
        for column in self.columns:
            for group in self.grouped() if column.best else ():
                cells = [(row, row.cells.get(column.key)) for row in group]
                present = [(row, number) for row, cell in cells if (number := comparable(cell)) is not None]
                if column.best is None or len(present) < 2:
                    continue
                first, _ = column.best(present, key=itemgetter(1))
                winner = column.texts(first.cells[column.key])[0]
                if not within_noise(column.key, first, [row for row, _ in present if row is not first]):
                    alike = (row for row, _ in present if column.texts(row.cells[column.key])[0] == winner)
                    bold |= {(id(row), column.key) for row in alike}
        return bold

    def is_bold(self, row: Row, column: Column) -> bool:
        """Return whether a cell is the best of two or more in its group, or a difference outside noise."""
        cell = row.cells.get(column.key)
        return (id(row), column.key) in self.best or (isinstance(cell, Difference) and cell.clear)

    def grouped(self) -> list[list[Row]]:
        """Return the rows, group by group."""
        return grouped(self.rows, lambda row: row.group)

    def text(self, row: Row, column: Column) -> str:
        """Format a cell for people."""
        return column.show(row.cells.get(column.key))

    def markdown(self) -> str:
        """Render the table as Markdown."""

        def cell(row: Row, column: Column) -> str:
            text, mark = plain_markdown(self.text(row, column)), self.mark_of(row, column)
            text = f"**{text}**" if self.is_bold(row, column) else text
            return f"{text}<sup>{mark}</sup>" if mark else text

        rows = [[cell(row, column) for column in self.columns] for row in self.rows]
        headings, numbers = [column.title for column in self.columns], [bool(column.form) for column in self.columns]
        notes = [f"<sup>{number}</sup> {plain_markdown(text)}" for text, number in self.notes.items()]
        return "\n\n".join([markdown_table(headings, rows, numbers), *notes]) + "\n"

    def values(self, row: Row, csv: bool = False) -> dict[str, Any]:
        """Return the values of all cells of a row as `Column.values` gives them, and its note."""
        parts = [column.values(row.cells.get(column.key), csv) for column in self.columns]
        return {key: value for part in parts for key, value in part.items()} | {"note": row.note}

    @cached_property
    def cells(self) -> pd.DataFrame:
        """All cells as objects, the contents of the CSV file: numbers with all digits, and `None` if missing.

        `source` is "run" or "paper". A column of means is followed by columns with their deviations and bounds, a
        column of differences by columns with the ends of their intervals.
        """
        records = [{"source": "paper" if row.paper else "run", **self.values(row, csv=True)} for row in self.rows]
        return pd.DataFrame(records, dtype=object)

    @property
    def frame(self) -> pd.DataFrame:
        """The table as a DataFrame with numeric dtypes; it has the contents of the CSV file."""
        frame = self.cells.infer_objects()
        empty = [key for key in frame if key != "note" and frame[key].isna().all()]
        return frame.astype(dict.fromkeys(empty, float))

    def latex(self, label: str) -> str:
        r"""Render the table as LaTeX: one or more floats with booktabs rules, after comments on how to compile it.

        Args:
            label: Name for `\ref`.
        """

        def cell(row: Row, column: Column) -> str:
            value, bold, mark = row.cells.get(column.key), self.is_bold(row, column), self.mark_of(row, column)
            shown, spread = column.texts(value)
            text = shown if value is None else escape_latex(shown)
            if isinstance(value, Mean):  # the paper's form
                text += rf" {{\scriptsize {escape_latex(spread)}}}" if spread else ""
            if column.form.startswith("+") and isinstance(value, int | float | Difference):
                text = rf"$\mathbf{{{text}}}$" if bold else f"${text}$"  # a minus, not a hyphen
                text += " {\\scriptsize " + re.sub(r"([+-][\d.]+)", r"$\1$", spread) + "}" if spread else ""
            elif bold:
                text = rf"\textbf{{{text}}}"
            return text + rf"\textsuperscript{{{mark}}}" if mark else text

        def tabular(groups: Sequence[Sequence[Row]]) -> list[str]:
            headings = [latex_text(column.title) for column in self.columns]
            rows = [[[cell(row, column) for column in self.columns] for row in group] for group in groups]
            return latex_table(headings, rows, [bool(column.form) for column in self.columns])

        pages: list[list[list[Row]]] = [[]]  # a float that is longer than a page would be cut off
        for group in self.grouped():
            if pages[-1] and sum(len(rows) + 1 for rows in pages[-1]) + len(group) > LINES:
                pages.append([])
            pages[-1].append(group)
        notes = [rf"\textsuperscript{{{n}}}\,{escape_latex(text)}" for text, n in self.notes.items()]
        title = escape_latex(self.title)
        begin, end = r"\begin{table}[ht]", [r"\end{center}", r"\end{table}"]
        parts = [begin, rf"\caption[{{{title}}}]{{\textbf{{{title}.}} {latex_text(self.full_caption)}}}"]
        parts += [rf"\label{{{label}}}", r"\begin{center}", *tabular(pages[0])]
        for page in pages[1:]:
            parts += [*end, begin, r"\begin{center}", rf"\tablename~\ref{{{label}}}, continued\\[3pt]", *tabular(page)]
        parts += [*([r"\\[3pt]", r"\footnotesize{" + r"\\ ".join(notes) + "}"] if notes else []), *end]
        odd = " ".join(sorted(set("".join(parts)) - PDFLATEX))
        font = [f"% lualatex or xelatex, and a font that has {odd}: pdflatex has not"] if odd else []
        return "\n".join([r"% \usepackage{booktabs,graphicx}", *font, *parts]) + "\n"

    def terminal(self) -> RichTable:
        """Render the table for the terminal, without the paper's rows; notes are numbered as in the other forms."""
        from rich.text import Text

        def cell(row: Row, column: Column) -> Text:
            mark = self.mark_of(row, column)
            text = self.text(row, column) + (f" [{mark}]" if mark else "")
            return Text(text, "bold" if self.is_bold(row, column) else "")

        own = [row for row in self.rows if not row.paper]
        differing = {column.key for column in self.columns if len({self.text(row, column) for row in own}) > 1}
        columns = [each for each in self.columns if each.terminal and (not each.spare or each.key in differing)]
        table = terminal_table([column.title for column in columns], [bool(column.form) for column in columns])
        for number, group in enumerate(grouped(own, lambda row: row.group)):
            if number:
                table.add_row()
            for row in group:
                table.add_row(*(cell(row, column) for column in columns))
        return table


def latex_text(text: str) -> str:
    """Escape a text for LaTeX, with r_max as a symbol."""
    return re.sub(r"\br\\_max\b", r"$r_{\\max}$", escape_latex(text))


def within_noise(key: str, first: Row, others: Sequence[Row]) -> bool:
    """Return whether the best row's lead over another has an interval that includes zero, where it is known."""
    best = first.measured.get(key)
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


def file_name(text: str) -> str:
    """Return a text as a safe file or folder name."""
    return re.sub(r"[^\w.-]", "_", text).lstrip(".") or "_"
