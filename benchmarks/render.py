"""Write the tables of the pages in docs/ from the result files in benchmarks/results.

python benchmarks/render.py            rewrite everything between <!-- table NAME --> (a result file) or
                                       <!-- report FOLDER WHAT … --> (kept runs) and <!-- end -->
python benchmarks/render.py --check    only check that the pages are up to date (exit code 1 if not)

WHAT is a table or a figure of `acgpt report`, by its file name within its part, or how the runs were made:

    <!-- report NAME test/small r_max=0.6 asked=276 -->              only rows with these cells, as they are printed
    <!-- report NAME small/mauve 'scored=whole text' paper -->       without the paper's rows
    <!-- report NAME test/advantages gptlow -->                      without this run
    <!-- report NAME test/small -corpus -caption -->                 without a column, and with a short caption
    <!-- report NAME figure test/main -->                            draws docs/NAME-test-main.png
    <!-- report NAME commands -->                                    commands and training times of the runs
    <!-- report NAME rates -->                                       the same with tokens/s
    <!-- report NAME draws -->                                       cost of sampling, all modes together

<!-- figure NAME ALT --> and <!-- end --> enclose the figure of a result file, drawn into docs/NAME.png.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import figures
from result_tables import TABLES, machine, markdown, provenance

if TYPE_CHECKING:
    from acgpt.report.runs import Run

FINGERPRINT = "Shows"  # PNG keyword for the fingerprint of the data that a figure shows
ROOT = Path(__file__).resolve().parent.parent
NAMES = ("benchmarks", "log", "results")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]


def report_block(request: Sequence[str], check: bool) -> str:
    """Render what `acgpt report` makes of kept runs (keep_runs.py): a table, a figure, or how they were made.

    Args:
        request: A folder of benchmarks/results; the table, figure or summary; then what to leave out (runs, "paper",
            "-COLUMN", or "-caption" for all of it but the details of the rows) and which rows to keep, COLUMN=VALUE.
        check: Only check that a figure is up to date.
    """
    from acgpt.report.runs import find_runs, read_runs

    name, what, *choices = request
    stem = choices.pop(0) if what == "figure" else what
    dropped = [choice for choice in choices if "=" not in choice]
    all_folders = find_runs([ROOT / "benchmarks" / "results" / name])[0]
    folders = [folder for folder in all_folders if folder.name not in dropped]
    run_names = dict.fromkeys(folder.name for folder in all_folders)
    if what in ("commands", "rates", "draws", "figure"):
        for choice in choices:
            lookup(choice, run_names, name)
    if what in ("commands", "rates"):
        return commands(read_runs(folders), what == "rates")
    if what == "draws":
        return draws(read_runs(folders)) or sys.exit(f"{name} has no generations: see benchmarks/results/{name}.")
    newest = max(path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*"))
    parts = report_parts(tuple(folders), newest)
    if what == "figure":
        figures = {path: (draw, part.captions.get(path, "")) for part in parts for path, draw in part.pictures.items()}
        draw, caption = lookup(stem, figures, name)
        figure = figure_name(draw, ROOT / "docs" / f"{name}-{stem.replace('/', '-')}.png", check)
        return f"![{stem}]({figure})" + f"\n\n{caption}" * bool(caption)
    table = lookup(stem, {path: table for part in parts for path, table in part.tables.items()}, name)
    columns = {f"-{column.key}": column for column in table.columns}
    values: dict[str, list[str]] = {}
    for column, _, value in (choice.partition("=") for choice in choices if "=" in choice):
        lookup(f"-{column}", columns, f"{stem} of {name}")
        values.setdefault(column, []).append(value)
    for choice in dropped:
        lookup(choice, {**columns, "-caption": None, "paper": None, **run_names}, name)
    rows = [row for row in table.select(**values).rows if not (row.paper and "paper" in dropped)]
    if not rows:
        sys.exit(f"{stem} of {name} has no row with {' '.join(choices)}: see benchmarks/results/{name}.")
    shown = tuple(column for key, column in columns.items() if key not in dropped)
    caption = "" if "-caption" in dropped else table.caption
    table = replace(table, rows=tuple(rows), columns=shown, caption=caption)
    return f"{table.markdown()}\n{table.full_caption}"


@functools.cache
def report_parts(folders: tuple[Path, ...], newest: int) -> list[Any]:
    """Return the parts of the report of these runs, cached until a file changes: tables of a page share them."""
    from acgpt.report.write import make_report

    return make_report(folders).parts


def lookup(key: str, available: dict[str, Any], name: str) -> Any:
    """Return the entry of this name, or exit with the names that exist."""
    if key not in available:
        sys.exit(f"{name} has no {key}: it has {', '.join(available)}.")
    return available[key]


def without_time_limit(command: Sequence[str]) -> list[str]:
    """Remove --minutes from a command: a run that was stopped and resumed is the same run."""
    limits = {index for i, word in enumerate(command) if word == "--minutes" for index in (i, i + 1)}
    return [word for i, word in enumerate(command) if i not in limits]


def commands(runs: Sequence[Run], rates: bool) -> str:
    """Render how runs were made: what their commands share once, then their own keys and cost."""
    words = [
        [word for word in without_time_limit(run.results["command"]) if not word.startswith("output=")] for run in runs
    ]
    common = [word for word in words[0] if all(word in arguments for arguments in words)]
    rows = []
    for run, arguments in zip(runs, words, strict=True):
        keys, results = " ".join(f"`{word}`" for word in arguments if word not in common), run.results
        rate = [f"{results['tokens_per_second'] / 1000:,.3g} k"] if rates else []
        rows.append([run.name, keys, f"{results['seconds']:.0f} s", *rate])
    machines = dict.fromkeys(machine({**run.results["versions"], **run.results}) for run in runs)
    command = shlex.join([*common, "output=runs/RUN", "KEYS"])
    columns = ["run", "keys", "time", *(["tokens/s"] if rates else [])]
    return f"{markdown(columns, rows)}\n\n`{command}`, {'; '.join(machines)}."


def draws(runs: Sequence[Run]) -> str:
    """Render the cost of `acgpt generate`, a row per run and dataset; then its command, with dots for what differs."""
    rows, words, machines = [], [], {}
    for run in runs:
        for index in sorted((run.folder / "generations").glob("*/index.json")):
            content = json.loads(index.read_text(encoding="utf-8"))
            modes = [mode for mode in content["modes"].values() if mode]
            tokens, calls, seconds = (sum(mode[key] for mode in modes) for key in ("tokens", "calls", "seconds"))
            for mode in modes:
                record = json.loads((index.parent / mode["file"]).with_suffix(".json").read_text(encoding="utf-8"))
                machines[machine({**record["versions"], **record, "date": record["date"][:10]})] = None
                words.append(
                    [re.sub(rf"^runs/{re.escape(run.name)}/", "runs/RUN/", word) for word in record["command"]]
                )
            if modes:
                cost = [f"{tokens:,}", f"{calls:,}", f"{seconds:,.0f} s", f"{tokens / seconds:,.0f}"]
                rows.append([run.name, f"{content['set']['r_max']:g}", f"{modes[0]['texts']} × {len(modes)}", *cost])
    if not rows:
        return ""
    shown = [word if all(word in command for command in words) else "…" for word in words[0]]
    columns = ["run", "r_max", "texts × modes", "tokens drawn", "calls of the model", "time", "tokens/s"]
    return f"{markdown(columns, rows)}\n\n`{' '.join(shown)}`, {'; '.join(machines)}."


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


def rendered(page: str, check: bool = False) -> str:
    """Return the page with every table rewritten, and draw its figures, or only check them."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        body = TABLES[record["benchmark"]](record)
        return f"<!-- table {name} -->\n{body}\n\n{provenance(record)}\n<!-- end -->"

    def report(match: re.Match[str]) -> str:
        return f"<!-- report {match[1]} -->\n{report_block(shlex.split(match[1]), check)}\n<!-- end -->"

    def figure(match: re.Match[str]) -> str:
        name, alternative = match[1], match[2]
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        function, part = figures.DRAWN[record["benchmark"]]
        draw = functools.partial(function, json.dumps(record if part is None else record[part]))
        path = figure_name(draw, ROOT / "docs" / f"{name}.png", check)
        return f"<!-- figure {name} {alternative} -->\n![{alternative}]({path})\n<!-- end -->"

    page = re.sub(r"<!-- figure (\S+) (.+?) -->.*?<!-- end -->", figure, page, flags=re.DOTALL)
    page = re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)
    return re.sub(r"<!-- report (.+?) -->.*?<!-- end -->", report, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = rendered(before, check)
        if not check:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{page.name} is out of date: run python benchmarks/render.py")


if __name__ == "__main__":
    main()
