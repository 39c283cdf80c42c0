"""Write the tables and figures of the pages in docs/ from results.jsonl and from kept runs.

    python benchmarks/render.py            rewrite what stands between these markers and <!-- end -->
    python benchmarks/render.py --check    only check that the pages are up to date (exit code 1 if not)

Two kinds of markers, written as on a command line (quotes around what has spaces):

    <!-- table BENCHMARK CASE[|CASE…] COLUMN… [rows=LABEL|LABEL…] [without=command] -->
    <!-- report RUNS TABLE [COLUMN=VALUE…] [RUN…] [paper] [-COLUMN…] [-caption] [-notes] [-command] -->
    <!-- report RUNS figure NAME [RUN…] -->

*table* shows records of results.jsonl: the output of a benchmark program, one line a run of it. COLUMN is a key of its
rows, KEY[:FORMAT[=HEADING]]; where the row has KEY_interval, that is added in brackets. Without `rows` all rows are
shown; the command and the machine follow, unless `without=command` is there.

    <!-- table sampling '124M, batch 64' seconds:.2f 'tokens_per_second:,.0f=tokens/s' rows='acgpt|generate' -->

*report* shows what `acgpt report` makes of the runs in benchmarks/results/RUNS (keep_runs.py). TABLE and NAME are file
names within a part of the report. COLUMN=VALUE keeps the rows with these cells, as they are printed; a name of a run
leaves it out, `paper` the paper's rows, -COLUMN a column, -caption the caption, -notes what is said of single rows, and
-command how the runs were made. A figure is drawn into docs/.

    <!-- report methods-h200 test/small r_max=0.6 asked=276 -corpus -caption -->
    <!-- report methods-h200 figure test/main -->
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.display.table import markdown_table

if TYPE_CHECKING:
    from acgpt.report.runs import Run

FINGERPRINT = "Shows"  # PNG keyword for the fingerprint of the data that a figure shows
ROOT = Path(__file__).resolve().parent.parent
# Markers that begin with acgpt. are docs/option_tables.py's.
MARKER = re.compile(r"<!-- (table|report) (?!acgpt\.)(.+?) -->\n.*?<!-- end -->", re.DOTALL)


# ---- records of results.jsonl ---------------------------------------------------------------------------------------


def records() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the records of results.jsonl by benchmark and case."""
    lines = (ROOT / "benchmarks" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in map(json.loads, lines):
        key = record["benchmark"], record["case"]
        if key in found:
            sys.exit(f"results.jsonl has two records of {', '.join(key)}: remove the older one.")
        found[key] = record
    return found


def table_block(words: Sequence[str]) -> str:
    """Render a table of records."""
    benchmark, cases, *columns = words
    options = {word.partition("=")[0]: word.partition("=")[2] for word in columns if re.match("(rows|without)=", word)}
    columns = [word for word in columns if word.partition("=")[0] not in options]
    available = {case: record for (name, case), record in records().items() if name == benchmark}
    chosen = [lookup(case, available, f"benchmark {benchmark}") for case in cases.split("|")]
    rows = [
        [f"{record['case']}: {row['row']}" if len(chosen) > 1 else row["row"], *(cell(row, word) for word in columns)]
        for record in chosen
        for row in chosen_rows(record, options.get("rows"))
    ]
    for word in columns:
        key = re.split("[:=]", word)[0]
        lookup(key, {key: None for record in chosen for row in record["rows"] for key in row}, cases)
    headings = [re.sub(r".*=", "", word) if "=" in word else word.partition(":")[0] for word in columns]
    table = markdown_table(["", *headings], rows, [False, *[True] * len(columns)])
    if options.get("without") == "command":
        return table
    return table + "\n\n" + "; ".join(dict.fromkeys(f"`{r['command']}`, {machine(r)}" for r in chosen)) + "."


def chosen_rows(record: Mapping[str, Any], labels: str | None) -> list[Mapping[str, Any]]:
    """Return the rows of a record with these labels, in this order, or all rows."""
    if labels is None:
        return list(record["rows"])
    rows = {row["row"]: row for row in record["rows"]}
    return [lookup(label, rows, record["case"]) for label in labels.split("|")]


def cell(row: Mapping[str, Any], column: str) -> str:
    """Return the cell of a column KEY[:FORMAT[=HEADING]] in a row, with the interval of its value."""
    key, _, form = column.partition("=")[0].partition(":")
    value, interval = row.get(key), row.get(f"{key}_interval")
    if value is None or isinstance(value, str):
        return value or "--"
    return format(value, form) + (f" [{', '.join(format(end, form) for end in interval)}]" if interval else "")


def machine(record: Mapping[str, Any]) -> str:
    """Return the hardware, versions and date of a record."""
    libraries = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return f"{record['hardware']}, {libraries}, {record['date'][:10]}"


# ---- kept runs ------------------------------------------------------------------------------------------------------


def report_block(words: Sequence[str], check: bool) -> str:
    """Render what `acgpt report` makes of kept runs: a table, or a figure that is drawn or, if `check`, checked."""
    from acgpt.report.runs import find_runs, read_runs

    name, what, *choices = words
    stem = choices.pop(0) if what == "figure" else what
    dropped = [choice for choice in choices if "=" not in choice]
    all_folders = find_runs([ROOT / "benchmarks" / "results" / name])[0]
    folders = [folder for folder in all_folders if folder.name not in dropped]
    run_names = dict.fromkeys(folder.name for folder in all_folders)
    newest = max(path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*"))
    parts = report_parts(tuple(folders), newest)
    if what == "figure":
        for choice in choices:
            lookup(choice, run_names, name)
        draw, caption = lookup(stem, {path: picture for part in parts for path, picture in part.pictures.items()}, name)
        figure = figure_name(draw, ROOT / "docs" / f"{name}-{stem.replace('/', '-')}.png", check)
        return f"![{stem}]({figure})\n\n{caption}"
    table = lookup(stem, {path: table for part in parts for path, table in part.tables.items()}, name)
    columns = {f"-{column.key}": column for column in table.columns}
    values: dict[str, list[str]] = {}
    for column, _, value in (choice.partition("=") for choice in choices if "=" in choice):
        lookup(f"-{column}", columns, f"{stem} of {name}")
        values.setdefault(column, []).append(value)
    for choice in dropped:
        lookup(
            choice, {**columns, "-caption": None, "-notes": None, "-command": None, "paper": None, **run_names}, name
        )

    def fits(row: Any, key: str) -> bool:
        """Return whether a cell is among the chosen values. A row of the paper may lack the cell."""
        cell = row.cells.get(key)
        return (row.paper and cell is None) or columns[f"-{key}"].show(cell) in values[key]

    rows = [row for row in table.rows if all(fits(row, key) for key in values)]
    rows = [row for row in rows if not (row.paper and "paper" in dropped)]
    if not rows:
        sys.exit(f"{stem} of {name} has no row with {' '.join(choices)}: see benchmarks/results/{name}.")
    if "-notes" in dropped:
        rows = [replace(row, note="") for row in rows]
    shown = tuple(column for key, column in columns.items() if key not in dropped)
    caption = "" if "-caption" in dropped else table.caption
    table = replace(table, rows=tuple(rows), columns=shown, caption=caption)
    below = [
        "" if "-notes" in dropped else table.full_caption.strip(),
        "" if "-command" in dropped else how_made(read_runs(folders)),
    ]
    return "\n\n".join([table.markdown().strip(), *filter(None, below)])


@functools.cache
def report_parts(folders: tuple[Path, ...], newest: int) -> list[Any]:
    """Return the parts of the report of these runs, cached until a file changes: tables of a page share them."""
    from acgpt.report.write import make_report

    return make_report(folders).parts


def how_made(runs: Iterable[Run]) -> str:
    """Render the commands of runs, with KEYS for what differs, and their machines."""
    commands = [without_time_limit(run.results["command"]) for run in runs]
    common = [word for word in commands[0] if all(word in command for command in commands)]
    own = any(len(command) > len(common) for command in commands)
    machines = dict.fromkeys(machine(run.results) for run in runs)
    return f"`{shlex.join([*common, 'output=runs/RUN', *(['KEYS'] if own else [])])}`, {'; '.join(machines)}."


def without_time_limit(command: Sequence[str]) -> list[str]:
    """Remove --minutes and output=… from a command: a run that was stopped and resumed is the same run."""
    limits = {index for i, word in enumerate(command) if word == "--minutes" for index in (i, i + 1)}
    return [word for i, word in enumerate(command) if i not in limits and not word.startswith("output=")]


def figure_name(draw: Any, path: Path, check: bool) -> str:
    """Return the name of a figure in docs/, after drawing it if it is out of date; if `check`, exit instead.

    Other versions of matplotlib draw other bytes, so the file has a fingerprint of the data that it shows.
    """
    fingerprint = hashlib.sha256(repr((draw.func.__name__, draw.args)).encode()).hexdigest()
    current = path.exists() and f"{FINGERPRINT}\0{fingerprint}".encode() in path.read_bytes()
    if check and not current:
        sys.exit(f"{path.name} is out of date: run python benchmarks/render.py")
    if not current:
        from acgpt.report import pictures

        path.write_bytes(pictures.render_figure(draw, {FINGERPRINT: fingerprint})["png"])
    return path.name


# ---- pages ----------------------------------------------------------------------------------------------------------


def lookup(key: str, available: Mapping[str, Any], name: str) -> Any:
    """Return the entry of this name, or exit with the names that exist."""
    if key not in available:
        sys.exit(f"{name} has no {key}: it has {', '.join(available)}.")
    return available[key]


def rendered(page: str, check: bool = False) -> str:
    """Return the page with every table rewritten, and draw its figures, or only check them."""

    def block(match: re.Match[str]) -> str:
        words = shlex.split(match[2])
        body = table_block(words) if match[1] == "table" else report_block(words, check)
        return f"<!-- {match[1]} {match[2]} -->\n{body}\n<!-- end -->"

    return MARKER.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = rendered(before, check)
        if check and before != after:
            sys.exit(f"{page.name} is out of date: run python benchmarks/render.py")
        if before != after:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
