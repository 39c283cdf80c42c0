"""Run the cells of an experiment one after the other, by running the commands of each cell.

Each command is a process of its own, so its errors and its memory do not affect other cells. The runner holds the lock
of the cell, forwards signals, and reads the progress from the folder of the run.

    waiting ──► training ──► evaluating ──► generating ──► scoring ──► done
                   │              │              │            │
                   └──────┬───────┴──────────────┴────────────┘
               failed, or stopped (by a signal or the time limit)        elsewhere: another runner has the cell
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from acgpt.common.files import disk_errors, locked
from acgpt.common.options import keywords
from acgpt.common.signals import handling
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.features import Featurizer
from acgpt.evaluation.mauve import PAPER, package
from acgpt.experiments.experiment import Cell, Experiment, load_experiment
from acgpt.experiments.options import ExperimentOptions
from acgpt.training.log import read_log
from acgpt.training.recipe import NO_CORPUS
from acgpt.training.run_folder import CONFIG, LOG, RESULTS, check_same

SCORE_LATER = "with `no_scoring=True` the cells generate now and can be scored later"
PROGRAM = (sys.executable, "-m", "acgpt")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# Seconds that torchrun (from torch 2.12 on) gives its processes to save a checkpoint after a signal; its default is 30.
TORCHRUN_ENVIRONMENT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
STOPPED = 3  # exit code of a training run that was stopped on request
# By command: the state of a cell while it runs.
WORK = {"train": "training", "evaluate": "evaluating", "generate": "generating", "mauve": "scoring"}
# By command: the names of the numbers of its results, the finished ones and all.
COUNTS = {
    "evaluate": ("evaluated", "evaluations"),
    "generate": ("generated", "generations"),
    "mauve": ("scored", "scores"),
}


@dataclass(frozen=True)
class State:
    """The progress of a cell.

    Args:
        state: "waiting", one of `WORK`, "done", "failed", "stopped" or "elsewhere".
        counts: Numbers of evaluations, folders of generations and scorings: the finished ones and all, see `COUNTS`.
        step: Last step in the log.
        steps: Number of steps of the run; `None` if it has not started.
        loss: Last loss in the log.
        seconds: Seconds of training so far.
        left: Remaining seconds of training, at the speed so far.
        error: Why the cell failed.
    """

    state: str
    counts: Mapping[str, int]
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    seconds: float | None = None
    left: float | None = None
    error: str | None = None


Show = Callable[[Cell, State], object]  # called with a cell and its state


def show_nothing(cell: Cell, state: State) -> None:
    """Show no progress."""


def state_of(cell: Cell) -> State:
    """Read the state of a cell from its folder: waiting, done, stopped, or failed if the folder holds another run."""
    counts = dict[str, int]()
    for command, (finished, number) in COUNTS.items():
        paths = cell.outputs_of(command)
        counts |= {finished: sum(path.exists() for path in paths), number: len(paths)}
    if not (cell.folder / CONFIG).exists():
        return State("waiting", counts)
    try:
        check_same(cell.folder, cell.recipe)
        steps = int(json.loads((cell.folder / CONFIG).read_text(encoding="utf-8"))["steps"])
        last = next(reversed(read_log(cell.folder / LOG)), {})
    except (InputError, OSError, ValueError, KeyError) as error:
        return State("failed", counts, error=str(error))
    state = "done" if all(path.exists() for path in cell.outputs) else "stopped"
    step, seconds = int(last.get("step", 0)), float(last.get("seconds", 0))
    left = seconds / step * (steps - step) if step else None
    left = 0.0 if (cell.folder / RESULTS).exists() else left
    return State(state, counts, step, steps, last.get("loss"), seconds, left)


@keywords(ExperimentOptions)
def run_experiment(
    experiment: Experiment | str | Path, changes: Sequence[str] = (), *, show: Show = show_nothing, **keywords: Any
) -> dict[str, State]:
    """Train and evaluate all cells of an experiment that are not done, and generate and score their samples.

        states = run_experiment("mine.yaml", ["steps=500"], only=["ac-gpt-*"])
        states["ac-gpt-r_max0.6-seed0"].state

    Args:
        experiment: A YAML file, the name of an experiment that comes with acgpt, or an `Experiment`.
        changes: Recipe keys overridden in every cell, each as `key=value`.
        **keywords: See `ExperimentOptions`.
        show: Called with a cell and its state whenever the state may have changed, about once a second.

    Returns:
        The final state of each cell, by its name.

    Raises:
        InputError: The experiment, an option or a corpus is wrong. Errors within a cell are in its state.
    """
    options = ExperimentOptions.of(run_experiment, keywords)
    loaded = load_experiment(experiment, changes, options.output)
    cells = loaded.chosen(options.only, scoring=not options.no_scoring)
    check_inputs(loaded, cells)
    return Runner(cells, processes=options.processes, minutes=options.minutes, show=show).run()


def check_inputs(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """Check, before hours of training, that the corpora, their splits and what scores the generations are there.

    Raises:
        InputError: A corpus, a split or the feature model is missing, or mauve-text is not installed.
    """
    mauve = experiment.mauve
    if all(path.exists() for cell in cells for path in cell.outputs_of("mauve")):
        mauve = None
    asking = (experiment.evaluate, experiment.generate)
    splits = [split for section in asking if section is not None for split in section.splits]
    splits += [mauve.split] if mauve is not None and mauve.split is not None else []
    for path in dict.fromkeys(cell.recipe.corpus for cell in cells):
        if not path:
            raise InputError(NO_CORPUS)
        corpus = Corpus.open(path)
        for split in splits:
            corpus.tokens(split)
    if mauve is None or mauve.no_mauve:
        return
    package(f"mauve: {{no_mauve: true}} computes the other metrics; {SCORE_LATER}.")
    try:
        Featurizer.check(mauve.features or PAPER)
    except ModelError as error:
        raise InputError(f"mauve.features: {error} Or {SCORE_LATER}.") from error


@contextlib.contextmanager
def held(cell: Cell) -> Iterator[int | None]:
    """Lock a cell, and yield the file descriptor for its processes to inherit; `None` if another process has the lock.

    The system releases the lock when the last process that holds it ends, even by a crash.
    """
    with contextlib.ExitStack() as stack:
        with disk_errors(cell.lock):
            cell.lock.parent.mkdir(parents=True, exist_ok=True)
            cell.lock.touch()  # on Windows another file is locked
            lock = stack.enter_context(locked(cell.lock))
        yield lock


def is_locked(cell: Cell) -> bool:
    """Return whether a runner works on the cell."""
    if not cell.lock.exists():
        return False
    with held(cell) as descriptor:
        return descriptor is None


class Runner:
    """A runner of cells.

    Args:
        cells: Cells to run, in this order.
        processes: Number of processes that train a cell together, started by torchrun; 1 trains without torchrun.
        minutes: Time limit, after which it stops as on a signal.
        show: As in `run_experiment`.
    """

    def __init__(
        self, cells: Sequence[Cell], *, processes: int = 1, minutes: float | None = None, show: Show = show_nothing
    ) -> None:
        self.cells, self.processes, self.show = cells, processes, show
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.stop_requests = 0  # number of signals so far
        self.child: subprocess.Popen[bytes] | None = None

    def should_stop(self) -> bool:
        """Return whether a signal has arrived or the time limit has passed."""
        return self.stop_requests > 0 or time.monotonic() >= self.end

    def run(self) -> dict[str, State]:
        """Run all cells that are not done, and return the final state of each cell by its name.

        A cell that fails does not prevent the others from running. Ctrl-C, SIGTERM and SIGHUP stop the running cell
        with a checkpoint and skip the rest; a second Ctrl-C does not wait for the checkpoint.
        """
        states = {}
        with handling(self.forward, "SIGINT", "SIGTERM", "SIGHUP"):
            for cell in self.cells:
                states[cell.name] = state = self.run_cell(cell)
                self.show(cell, state)
        return states

    def run_cell(self, cell: Cell) -> State:
        """Run one cell, unless it is done or failed, the runner should stop, or another runner has it."""
        before, error = state_of(cell), None
        if before.state in ("done", "failed") or self.should_stop():
            return before
        with held(cell) as lock:
            if lock is None:
                return replace(before, state="elsewhere")
            for path, words in cell.outputs.items():
                if error is None and not path.exists() and not self.should_stop():
                    error = self.execute(cell, words, lock)
            state = state_of(cell)
            if self.should_stop():
                return state if state.state == "done" else replace(state, state="stopped")
            return replace(state, state="failed", error=error) if error else state

    def execute(self, cell: Cell, words: Sequence[str], lock: int) -> str | None:
        """Run one command of a cell.

        Args:
            cell: The cell.
            words: Arguments of `acgpt`.
            lock: File descriptor of the cell's lock, for the command to inherit.

        Returns:
            Why the command failed; `None` if it succeeded.
        """
        trains = words[0] == "train"
        distributed = trains and self.processes > 1
        program = (*TORCHRUN, str(self.processes), "-m", "acgpt") if distributed else PROGRAM
        if trains and self.end < math.inf:
            words = (*words, "--minutes", f"{max(0.01, (self.end - time.monotonic()) / 60):.2f}")
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        with cell.log.open("ab") as log:
            begin = log.tell()
            log.write(f"$ {shlex.join([*(program if distributed else ('acgpt',)), *words])}\n".encode())
            log.flush()
            self.child = start([*program, *words], log, lock)
            if self.stop_requests:  # a signal may have arrived while the command started
                self.child.terminate()
            while self.child.poll() is None:
                self.show(cell, replace(state_of(cell), state=WORK[words[0]], error=None))
                if not trains and self.should_stop():  # training stops by itself, with a checkpoint
                    self.child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(1 if not self.stop_requests else 0.1)
            code, self.child = self.child.returncode, None
        if code == 0:
            return None
        if code == STOPPED and trains:
            self.end = min(self.end, time.monotonic())  # another process has stopped it: stop the runner as well
        printed = cell.log.read_bytes()[begin:].decode(errors="replace")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])
        return f"acgpt {words[0]} ended with code {code}: {last[:500]}"

    def forward(self, number: int, frame: Any) -> None:
        """Count a signal and forward it to the running command."""
        self.stop_requests += 1
        if (child := self.child) is None or child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.stop_requests > 1 and number == signal.SIGINT and os.name == "posix":
                os.killpg(child.pid, signal.SIGKILL)  # do not wait for the checkpoint
            else:
                child.terminate()


def start(words: Sequence[str], output: BinaryIO, lock: int) -> subprocess.Popen[bytes]:
    """Start a command that inherits a lock. In a new session, Ctrl-C reaches only the runner, which forwards it."""
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=TORCHRUN_ENVIRONMENT | os.environ,
        start_new_session=True, pass_fds=(lock,) if os.name == "posix" else (),
    )  # fmt: skip
