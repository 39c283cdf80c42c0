"""`acgpt experiment`: train, evaluate and sample from a grid of runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.train import ChangesArgument, print_recipes
from acgpt.cli.ui import PAUSE, ObjectOption, QuietOption, emit, option, with_options
from acgpt.experiments.options import ExperimentOptions

if TYPE_CHECKING:
    from rich.table import Table

    from acgpt.experiments.experiment import Cell
    from acgpt.experiments.runner import State

HELP = {
    "file": "YAML file, or name of a built-in experiment (see --list).",
    "list": "List the cells and their states; without FILE, the built-in experiments.",
    "print": "Print a command for each unfinished cell, for a scheduler; run nothing.",
}
COLOURS = {"done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim", "elsewhere": "dim"}


@with_options(ExperimentOptions)
def experiment(
    file: Annotated[str | None, typer.Argument(metavar="FILE", show_default=False, help=HELP["file"])] = None,
    changes: ChangesArgument = None,
    list_cells: Annotated[bool, option("--list", help=HELP["list"])] = False,
    print_commands: Annotated[bool, option("--print-commands", help=HELP["print"])] = False,
    *,
    options: ExperimentOptions,
    quiet: QuietOption = False,
    as_json: ObjectOption = False,
) -> None:
    r"""Train and evaluate every cell of a grid: methods, r_max, sizes, seeds.

    acgpt experiment --list
    acgpt experiment tiny-cpu corpus=data/mine -o results/mine
    acgpt experiment mine.yaml --list
    acgpt experiment mine.yaml --only 'ac-gpt-*' --only gpt-seed0
    acgpt experiment mine.yaml --print-commands > commands.txt
    acgpt report results/mine -o report

    For each cell: acgpt train, acgpt evaluate, acgpt generate and acgpt mauve, as
    the file says. Finished steps are skipped; steps that were stopped by Ctrl-C,
    a signal, --minutes or a crash are resumed. A failed cell does not stop the
    others. Several runners can work on one experiment at the same time.
    KEY=VALUE changes the recipe of all cells. See docs/reference/experiments.md
    for the file.

    Exit code: 0 if all cells are done, 1 if one failed, 3 if some are left.

    Keys of --json:
      output, done, failed, left (numbers of cells),
      cells: number, cell (its name), folder, state (waiting, training,
             evaluating, generating, scoring, done, failed, stopped,
             elsewhere), step, steps, loss, seconds, left (seconds), evaluated,
             evaluations, generated, generations, scored, scores (numbers),
             error, commands
    """
    from acgpt.experiments.experiment import BUILT_IN, arguments, load_experiment
    from acgpt.training.recipe import built_in

    if file is None:
        if not list_cells:
            raise typer.BadParameter("choose a FILE: a YAML file, or a name from --list.")
        print_recipes(built_in(BUILT_IN), as_json)
        return
    loaded = load_experiment(file, changes or (), options.output)
    cells = loaded.chosen(options.only, scoring=not options.no_scoring)
    from acgpt.experiments.runner import is_locked, run_experiment, state_of

    if print_commands or list_cells:
        states = {cell.name: state_of(cell) for cell in cells}
        left = [cell for cell in cells if states[cell.name].state != "done"]
        if print_commands:
            words = {"output": options.output, "no_scoring": options.no_scoring, "minutes": options.minutes}
            words |= {"nproc_per_node": options.processes if options.processes > 1 else None}
            for cell in left:
                command = ["acgpt", "experiment", file, *(changes or ()), *arguments(words | {"only": cell.name})]
                print(shlex.join(command))
            return
        states |= {cell.name: replace(states[cell.name], state="elsewhere") for cell in left if is_locked(cell)}
        show_all(loaded.output, cells, states, as_json)
        return
    with progress(cells, quiet) as show:
        states = run_experiment(loaded, show=show, **vars(options))
    totals = show_all(loaded.output, cells, states, as_json)
    if totals["failed"]:
        raise typer.Exit(1)
    if totals["left"]:
        print("not all cells are done: the same command resumes.", file=sys.stderr)
        raise typer.Exit(3)


def show_all(output: str, cells: Sequence[Cell], states: Mapping[str, State], as_json: bool) -> dict[str, int]:
    """Print all cells, as a table or as JSON, and return how many are done, failed and left."""
    from acgpt.display.show import Page, printable

    counts = [state.state for state in states.values()]
    done, failed = counts.count("done"), counts.count("failed")
    totals = {"done": done, "failed": failed, "left": len(cells) - done - failed}
    if as_json:
        entries = []
        for cell in cells:
            entry = {"number": cell.number, "cell": cell.name, "folder": str(cell.folder)}
            state = asdict(states[cell.name])
            entries.append({**entry, **state.pop("counts"), **state, "commands": cell.commands})
        emit({"output": output, **totals, "cells": entries})
        return totals
    page = Page()
    page.table(table_of(cells, states))
    for cell in cells:
        if error := states[cell.name].error:
            page.note(printable(f"\n{cell.name}: {error}\n  {cell.log}"), "red")
    page.note(printable(f"\n{output}: {done} of {len(cells)} cells done" + (f", {failed} failed" if failed else "")))
    return totals


def table_of(cells: Sequence[Cell], states: Mapping[str, State]) -> Table:
    """Return a table with one row per cell."""
    from rich.text import Text

    from acgpt.display.table import terminal_table
    from acgpt.experiments.runner import COUNTS

    rows = [(cell, states[cell.name]) for cell in cells]
    counts = [(done, of) for done, of in COUNTS.values() if any(state.counts[of] for _, state in rows)]
    headings = ("", "cell", "state", "step", "loss", *(done for done, _ in counts), "trained", "left")
    table = terminal_table(headings, [heading not in ("cell", "state") for heading in headings])
    for cell, state in rows:
        table.add_row(
            str(cell.number),
            Text(cell.name),
            Text(state.state, COLOURS.get(state.state, "bold")),
            "" if state.steps is None else f"{state.step:,}/{state.steps:,}",
            "" if state.loss is None else f"{state.loss:.3f}",
            *(f"{state.counts[done]}/{state.counts[of]}" if state.counts[of] else "" for done, of in counts),
            clock(state.seconds),
            clock(state.left) if state.state != "done" else "",
        )
    return table


def clock(seconds: float | None) -> str:
    """Format seconds as hours, minutes and seconds."""
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


@contextmanager
def progress(cells: Sequence[Cell], quiet: bool) -> Iterator[Callable[[Cell, State], None]]:
    """Yield a function that shows the state of a cell on stderr: in a live table on a terminal, else as a line."""
    from rich.console import Console

    from acgpt.experiments.runner import show_nothing, state_of

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield show_nothing if quiet else Lines().show
        return
    from rich.live import Live

    states = {cell.name: state_of(cell) for cell in cells}
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(cell: Cell, state: State) -> None:
            states[cell.name] = state
            live.update(table_of(window(cells, cell, console.height - 3), states), refresh=True)

        yield show


def window(cells: Sequence[Cell], cell: Cell, size: int) -> Sequence[Cell]:
    """Return the cells around this one that fit on the terminal, at least three."""
    size = max(3, size)
    index = [near.number for near in cells].index(cell.number)
    start = max(0, min(index - size // 2, len(cells) - size))
    return cells[start : start + size]


class Lines:
    """Progress as a line whenever a state changes, and every `PAUSE` seconds."""

    def __init__(self) -> None:
        self.last, self.time = "", 0.0

    def show(self, cell: Cell, state: State) -> None:
        """Print the state of a cell, unless it was printed a moment ago."""
        from acgpt.experiments.runner import COUNTS, WORK

        news = f"[{cell.number}] {cell.name}: {state.error or state.state}"
        if news == self.last and time.monotonic() - self.time < PAUSE:
            return
        self.last, self.time = news, time.monotonic()
        if state.state == "training" and state.step:
            news += f", step {state.step}/{state.steps}, loss {state.loss:.3f}, {clock(state.left)} left"
        for command, (done, of) in COUNTS.items():
            if state.state == WORK[command]:
                news += f", {state.counts[done]}/{state.counts[of]}"
        print(news, file=sys.stderr, flush=True)
