"""Tables on terminals of any width: no cell is cut, and no line is too long."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from acgpt.display.table import print_table
from acgpt.query.modes import MODES
from acgpt.report.from_scratch import COLUMNS
from acgpt.report.tables import Mean, Row
from acgpt.report.tables import Table as ReportTable

HEADINGS = ("mode", "perplexity", "95 % interval", "gain from the future", "set")
ROWS = [
    ("unconditional and a very long name of it", "1,234.56", "1,200.00–1,300.00", "", "13165da0"),
    ("infilling", "≤ 12.30", "12.00–12.60", "23.4 % (20.1 to 26.7)", "9f2b0c11"),
    ("日本語のモデル", "--", "--", "--", "9f2b0c11"),
]


class Terminal(io.StringIO):
    """A file object that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def example() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for row in ROWS:
        table.add_row(Text(row[0], "bold"), *row[1:])
    return table


def printed(width: int, terminal: bool = True) -> list[str]:
    file = Terminal() if terminal else io.StringIO()
    print_table(Console(file=file, width=width, color_system=None), example())
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 30])
def test_no_cell_is_cut_at_any_width(width):
    lines = printed(width)
    text = "\n".join(lines)
    for row in ROWS:
        for cell in row[1:]:
            assert cell in text
    for cell in (row[0] for row in ROWS):  # what may be folded: all its letters, in order
        assert re.search(".*?".join(map(re.escape, re.sub(r"\s", "", cell))), text, re.DOTALL)
    assert "…" not in text and max(map(cell_len, lines)) <= max(width, 45)  # a line of a block wraps by itself


def test_every_line_of_a_table_fits_the_terminal():
    for width in range(70, 130):
        assert max(map(cell_len, printed(width))) <= width


def test_a_pipe_has_the_whole_table_in_a_line_a_row_whatever_its_width():
    lines = printed(20, terminal=False)
    assert len(lines) == 1 + len(ROWS)
    for line, row in zip(lines, [HEADINGS, *ROWS], strict=True):
        assert [cell for cell in row if cell] == re.split(r"\s{2,}", line.strip())


def test_headings_are_folded_before_there_is_a_block_for_each_row():
    whole = max(map(cell_len, printed(200)))
    assert any(re.fullmatch(r".*13165da0", line) for line in printed(whole - 1))


def test_a_block_for_each_row_has_every_column():
    lines = printed(30)
    assert [line for line in lines if line and not line.startswith(" ")] == [f"mode {row[0]}" for row in ROWS]
    assert lines[1].split() == ["perplexity", "1,234.56"]
    assert [line.split() for line in lines if line.startswith("  set")] == [["set", row[-1]] for row in ROWS]


def test_groups_of_rows_stay_apart_and_an_empty_table_prints():
    table = example()
    table.add_row()
    table.add_row(*ROWS[1])
    for width in (200, 30):
        file = Terminal()
        print_table(Console(file=file, width=width, color_system=None), table)
        assert file.getvalue().count("9f2b0c11") == 3
    empty = Table(box=None)
    empty.add_column("mode")
    print_table(Console(file=Terminal(), width=30), empty)


# ---- reports --------------------------------------------------------------------------------------------------------


def report_table(read: tuple[int, int]) -> Any:
    """A table of a report with two rows that differ in the texts read."""
    runs = [{"r_max": 0.6, "asked": 4, "method": "AC-GPT", "corpus": "wiki", "texts": n, "seeds": 1} for n in read]
    modes = {key: Mean(20.0) for key in MODES}
    rows = tuple(Row({**run, **modes, "chance": 1.0 + number}, number) for number, run in enumerate(runs))
    return ReportTable("Title", "Caption.", COLUMNS, rows, "method")


def on_terminal(table: Any, width: int) -> str:
    file = Terminal()
    print_table(Console(file=file, width=width, color_system=None), table.terminal())
    return file.getvalue()


def test_a_report_on_a_terminal_has_the_spare_columns_that_tell_its_rows_apart():
    told = on_terminal(report_table((800, 1600)), 110)
    assert "1,600" in told and "read" in told and "95 % ±" not in told
    assert "read" not in on_terminal(report_table((800, 800)), 110)
