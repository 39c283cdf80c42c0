"""`acgpt report`: compare runs in the tables and figures of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.ui import ObjectOption, emit, option
from acgpt.common.files import check_writable

if TYPE_CHECKING:
    from acgpt.report.write import Report

HELP = {
    "runs": "Folders of finished runs, of experiments, or of generations.",
    "output": "Folder of the report. An earlier report in it is replaced.",
}


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", show_default=False, help=HELP["runs"])],
    output: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["output"])],
    as_json: ObjectOption = False,
) -> None:
    r"""Compare runs in the tables and figures of the paper.

    acgpt report results/mine -o report                      (an experiment)
    acgpt evaluate … --split test -o runs/ac/test.json       (further splits)
    acgpt report runs/ac runs/gpt -o report
    acgpt report runs/* -o report --json

    For each split that was evaluated:
      from scratch   perplexity by method, mode, size and r_max (mean and
                     deviation over seeds); advantage over GPT; gain from the
                     future
      fine-tuned     perplexity; advantage over the causal twin (method=gpt with
                     the same base, corpus, number of texts and evaluation
                     dataset); sweep over r_max
      generations    MAUVE by method and mode, other metrics of acgpt mauve, and
                     a page of samples

    Differences have 95 % intervals, and are bold if the interval
    excludes zero. Writes one HTML page, and Markdown, CSV and LaTeX tables with
    the rows of the paper; figures need matplotlib. See docs/how-to/report.md.

    Keys of --json:
      folder, acgpt (version),
      from-scratch: splits: for each, by size, a list of rows (each mode null or
      mean, std, runs, bound); differences: likewise, rows of advantages over GPT
      and gains from the future (percent, and KEY_interval: null or the 95 %
      interval); paper: where its rows are from,
      finetuning: splits: for each, perplexities, advantages (percent, and
      KEY_interval) and, if there is one, sweep: lists of rows; paper: where its
      rows are from,
      generation: sizes: for each, mauve (each mode null or mean, std, runs) and
      companions: lists of rows; paper: where its rows are from,
      runs: name, steps, texts, tokens, seconds, hardware, versions, command,
            corpus_hash, recipe, evaluations
      notes, files
    """
    check_writable(output / "report.html")
    from acgpt.report.compare import compare

    made = compare(runs, output)
    if as_json:
        emit({"folder": str(output), **made.content})
    else:
        print_report(made, output)


def print_report(made: Report, output: Path) -> None:
    """Print the tables. The rows of the paper are in the files only."""
    from acgpt.display.show import Page, printable

    page = Page()
    for part in made.parts:
        for table in part.tables.values():
            page.note(printable(table.title), "bold")
            page.table(table.terminal())
            own = {row.note for row in table.rows if not row.paper}
            for text, number in table.notes.items():
                if text in own:
                    page.note(printable(f"[{number}] {text}"))
            page.print()
    for note in made.notes:
        page.note(printable(f"note: {note}"))
    paper = any(row.paper for part in made.parts for table in part.tables.values() for row in table.rows)
    more = "; report.html has the rows of the paper too" if paper else ""
    page.note(printable(f"{output}: {len(made.content['files'])} files{more}"))
