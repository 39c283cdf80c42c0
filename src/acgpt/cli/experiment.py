"""`acgpt experiment`: train, evaluate and sample from a grid of runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acgpt.cli.train import ChangesArgument, print_recipes
from acgpt.cli.ui import PAUSE, ObjectOption, QuietOption, emit, option, with_options
from acgpt.experiments.options import ExperimentOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from acgpt.experiments.experiment import Cell
    from acgpt.experiments.runner import State

HELP = {
    "file": "YAML file, or name of a built-in experiment (see --list).",
    "list": "List the cells and their states; without FILE, the built-in experiments.",
    "print": "Print a command for each unfinished cell, for a scheduler; run nothing.",
}
COLOURS = {
    "done": "green",
    "failed": "red",
    "training": "bold",
    "evaluating": "bold",
    "generating": "bold",
    "scoring": "bold",
    "stopped": "yellow",
}
# Fields of `State`: counts of finished and of all items, by heading of the table; and the state that counts each.
PARTS = {"evaluated": "evaluations", "generated": "generations", "scored": "scores"}
ASKING = {"evaluating": "evaluated", "generating": "generated", "scoring": "scored"}


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
    from acgpt.experiments.experiment import BUILT_IN, opened
    from acgpt.training.recipe import built_in

    if file is None:
        if not list_cells:
            raise typer.BadParameter("choose a FILE: a YAML file, or a name from --list.")
        print_recipes(built_in(BUILT_IN), as_json)
        return
    loaded = opened(file, changes or (), options)
    cells = loaded.chosen(options.only)
    from acgpt.experiments.runner import is_locked, run_experiment, state_of

    if print_commands:
        words = ["acgpt", "experiment", file, *(changes or ())]
        words += ["-o", str(options.output)] if options.output else []
        words += ["--nproc-per-node", str(options.processes)] if options.processes > 1 else []
        words += ["--no-scoring"] if options.no_scoring else []
        for cell in cells:
            if state_of(cell).state != "done":
                print(shlex.join([*words, "--only", cell.name]))
        return
    if list_cells:
        states = {cell.name: state_of(cell) for cell in cells}
        held = {cell.name for cell in cells if states[cell.name].state != "done" and is_locked(cell)}
        show_all(loaded.output, cells, states, held, as_json)
        return
    states = run_experiment(loaded, watch=lambda cells: Display(cells, quiet), **vars(options))
    show_all(loaded.output, cells, states, set(), as_json)
    counts = [state.state for state in states.values()]
    if "failed" in counts:
        raise typer.Exit(1)
    if counts.count("done") < len(counts):
        print("not all cells are done: the same command resumes.", file=sys.stderr)
        raise typer.Exit(3)


def show_all(output: str, cells: Sequence[Cell], states: Mapping[str, State], held: set[str], as_json: bool) -> None:
    """Print all cells, as a table or as JSON. Cells in `held` are run by another process."""
    from acgpt.display.show import Page, printable
    from acgpt.experiments.runner import as_dict

    states = {name: replace(state, state="elsewhere") if name in held else state for name, state in states.items()}
    counts = [state.state for state in states.values()]
    done, failed = counts.count("done"), counts.count("failed")
    if as_json:
        entries = [{**as_dict(cell, states[cell.name]), "commands": cell.commands} for cell in cells]
        totals = {"done": done, "failed": failed, "left": len(cells) - done - failed}
        emit({"output": output, **totals, "cells": entries})
        return
    page = Page()
    page.table(table_of([(cell, states[cell.name]) for cell in cells]))
    for cell in cells:
        if error := states[cell.name].error:
            page.note(printable(f"\n{cell.name}: {error}\n  {cell.log}"), "red")
    page.note(printable(f"\n{output}: {done} of {len(cells)} cells done" + (f", {failed} failed" if failed else "")))


def table_of(rows: Sequence[tuple[Cell, State]]) -> Table:
    """Return a table with one row per cell."""
    from rich.text import Text

    from acgpt.display.table import terminal_table

    parts = {part: of for part, of in PARTS.items() if part == "evaluated" or any(getattr(s, of) for _, s in rows)}
    headings = ("", "cell", "state", "step", "loss", *parts, "trained", "left")
    table = terminal_table(headings, [heading not in ("cell", "state") for heading in headings])
    for cell, state in rows:
        table.add_row(
            str(cell.number),
            Text(cell.name),
            Text(state.state, COLOURS.get(state.state, "dim")),
            "" if state.steps is None else f"{state.step:,}/{state.steps:,}",
            "" if state.loss is None else f"{state.loss:.3f}",
            *(
                f"{getattr(state, part)}/{getattr(state, of)}" if getattr(state, of) else ""
                for part, of in parts.items()
            ),
            clock(state.seconds),
            clock(state.left) if state.state != "done" else "",
        )
    return table


def clock(seconds: float | None) -> str:
    """Format seconds as hours, minutes and seconds."""
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


class Display:
    """Progress of the cells, on stderr: a live table on a terminal, else a line now and then.

    Args:
        cells: The cells to run.
        quiet: Show nothing.
    """

    def __init__(self, cells: Sequence[Cell], quiet: bool) -> None:
        from rich.console import Console

        from acgpt.experiments.runner import state_of

        self.cells, self.quiet = cells, quiet
        self.states = {cell.name: state_of(cell) for cell in cells}
        self.console: Console = Console(stderr=True)
        self.live: Any = None
        self.last_line, self.last_time = "", 0.0

    def __enter__(self) -> Callable[[Cell, State], None]:
        if self.console.is_terminal and not self.quiet:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, cell: Cell, state: State) -> None:
        """Show the state of a cell."""
        self.states[cell.name] = state
        if self.live is not None:
            self.live.update(table_of(self.window(cell)), refresh=True)
        elif not self.quiet:
            self.print_line(cell, state)

    def window(self, cell: Cell) -> list[tuple[Cell, State]]:
        """Return the cells around this one that fit on the terminal."""
        size = max(3, self.console.height - 3)
        start = max(0, min(self.cells.index(cell) - size // 2, len(self.cells) - size))
        return [(near, self.states[near.name]) for near in self.cells[start : start + size]]

    def print_line(self, cell: Cell, state: State) -> None:
        """Print a line if the state has changed, or if the last line is older than `PAUSE` seconds."""
        now, news = time.monotonic(), f"{cell.name} {state.state} {state.evaluated} {state.generated} {state.scored}"
        part = ASKING.get(state.state)
        done, of = (getattr(state, part), getattr(state, PARTS[part])) if part else (0, 1)
        ends = done == of  # another state follows
        if ends or (news == self.last_line and now - self.last_time < PAUSE):
            return
        self.last_line, self.last_time = news, now
        parts = [state.error or state.state]
        if state.state == "training" and state.step:
            parts.append(f"step {state.step}/{state.steps}, loss {state.loss:.3f}, {clock(state.left)} left")
        if part:
            parts.append(f"{done}/{of}")
        print(f"[{cell.number}] {cell.name}: {', '.join(parts)}", file=sys.stderr, flush=True)
