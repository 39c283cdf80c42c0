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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from acgpt.common.files import disk_errors, locked
from acgpt.common.options import keywords
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.features import Featurizer
from acgpt.evaluation.mauve import PAPER, package
from acgpt.experiments.experiment import Cell, Experiment, opened
from acgpt.experiments.options import ExperimentOptions
from acgpt.training.log import read_log
from acgpt.training.run_folder import CONFIG, LOG, RESULTS, check_same

SCORE_LATER = "with `no_scoring=True` the cells generate now and can be scored later"
PROGRAM = (sys.executable, "-m", "acgpt")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# Seconds that torchrun (from torch 2.12 on) gives its processes to save a checkpoint after a signal; its default is 30.
TORCHRUN_ENVIRONMENT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
STOPPED = 3  # exit code of a training run that was stopped on request
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # each stops the runner so that it can be resumed
# State of a cell while a command runs, by the name of the command.
WORK = {"train": "training", "evaluate": "evaluating", "generate": "generating", "mauve": "scoring"}


@dataclass(frozen=True)
class State:
    """The progress of a cell.

    Args:
        state: "waiting", one of `WORK`, "done", "failed", "stopped" or "elsewhere".
        step: Last step in the log.
        steps: Number of steps of the run; `None` if it has not started.
        loss: Last loss in the log.
        seconds: Seconds of training so far.
        left: Remaining seconds of training, at the speed so far.
        evaluated: Number of finished evaluations.
        evaluations: Number of evaluations.
        generated: Number of finished folders of generations.
        generations: Number of folders of generations.
        scored: Number of finished scorings.
        scores: Number of scorings: one or more for each folder of generations.
        error: Why the cell failed.
    """

    state: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    seconds: float | None = None
    left: float | None = None
    evaluated: int = 0
    evaluations: int = 0
    generated: int = 0
    generations: int = 0
    scored: int = 0
    scores: int = 0
    error: str | None = None


Show = Callable[[Cell, State], object]  # called with a cell and its state


def state_of(cell: Cell) -> State:
    """Read the state of a cell from its folder: waiting, done, stopped, or failed if the folder holds another run."""
    outputs = (cell.evaluations, cell.generations, cell.scores)
    existing, total = [sum(path.exists() for path in paths) for paths in outputs], [len(paths) for paths in outputs]
    state = State(
        "waiting",
        evaluated=existing[0], generated=existing[1], scored=existing[2],
        evaluations=total[0], generations=total[1], scores=total[2],
    )  # fmt: skip
    if not (cell.folder / CONFIG).exists():
        return state
    try:
        check_same(cell.folder, cell.recipe)
        config = json.loads((cell.folder / CONFIG).read_text(encoding="utf-8"))
        steps, rows = int(config["steps"]), read_log(cell.folder / LOG)
    except (InputError, OSError, ValueError, KeyError) as error:
        return replace(state, state="failed", error=str(error))
    last = rows[-1] if rows else {}
    trained = (cell.folder / RESULTS).exists()
    step, seconds = int(last.get("step", 0)), float(last.get("seconds", 0))
    return replace(
        state,
        state="done" if trained and existing == total else "stopped",
        step=step,
        steps=steps,
        loss=last.get("loss"),
        seconds=seconds,
        left=0.0 if trained else seconds / step * (steps - step) if step else None,
    )


@keywords(ExperimentOptions)
def run_experiment(
    experiment: Experiment | str | Path,
    changes: Sequence[str] = (),
    *,
    watch: Callable[[Sequence[Cell]], AbstractContextManager[Show]] = lambda cells: nullcontext(
        lambda cell, state: None
    ),
    **keywords: Any,
) -> dict[str, State]:
    """Train and evaluate all cells of an experiment that are not done, and generate and score their samples.

        states = run_experiment("mine.yaml", ["steps=500"], only=["ac-gpt-*"])
        states["ac-gpt-r_max0.6-seed0"].state

    Args:
        experiment: A YAML file, the name of an experiment that comes with acgpt, or an `Experiment`.
        changes: Recipe keys overridden in every cell, each as `key=value`.
        **keywords: See `ExperimentOptions`.
        watch: Takes the selected cells and returns a context manager of the function that is called with a cell and its
            state whenever the state may have changed.

    Returns:
        The final state of each cell, by its name.

    Raises:
        InputError: The experiment, an option or a corpus is wrong. Errors within a cell are in its state.
    """
    options = ExperimentOptions.of(run_experiment, keywords)
    loaded = opened(experiment, changes, options)
    cells = loaded.chosen(options.only)
    check_corpora(cells)
    check_scoring(loaded, cells)
    with watch(cells) as show:
        return Runner(cells, processes=options.processes, minutes=options.minutes, show=show).run()


def check_corpora(cells: Sequence[Cell]) -> None:
    """Check, before hours of training, that the corpora exist and have the splits that are evaluated.

    Raises:
        InputError: A corpus or a split is missing.
    """
    for path in dict.fromkeys(cell.recipe.corpus for cell in cells):
        if not path:
            raise InputError("the recipe names no corpus: add corpus=FOLDER.")
        corpus = Corpus.open(path)
        for cell in cells:
            commands = {**cell.evaluations, **cell.generations} if cell.recipe.corpus == path else {}
            for arguments in commands.values():
                corpus.tokens(arguments[arguments.index("--split") + 1])


def check_scoring(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """Check, before hours of training, that what scores the generations is there.

    Raises:
        InputError: mauve-text is not installed, or the feature model or the split is missing.
    """
    mauve = experiment.mauve
    if mauve is None or all(path.exists() for cell in cells for path in cell.scores):
        return
    for path in dict.fromkeys(cell.recipe.corpus for cell in cells if mauve.split is not None):
        Corpus.open(path).tokens(str(mauve.split))
    if mauve.no_mauve:
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
        with disk_errors(cell.lock, "Free some space, or choose another `output`."):
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
        show: Called with a cell and its state whenever the state may have changed, about once a second.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        processes: int = 1,
        minutes: float | None = None,
        show: Show = lambda cell, state: None,
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
        with self.forwarding_signals():
            for cell in self.cells:
                states[cell.name] = state = self.run_cell(cell)
                self.show(cell, state)
        return states

    def run_cell(self, cell: Cell) -> State:
        """Run one cell, unless it is done or failed, the runner should stop, or another runner has it."""
        before = state_of(cell)
        if before.state in ("done", "failed") or self.should_stop():
            return before
        with held(cell) as lock:
            if lock is None:
                return replace(before, state="elsewhere")
            for path, arguments in {cell.folder / RESULTS: cell.train, **cell.after_training}.items():
                if path.exists():
                    continue
                if self.should_stop():
                    return stopped(cell)
                if error := self.execute(cell, arguments, lock):
                    return (
                        replace(state_of(cell), state="failed", error=error)
                        if not self.should_stop()
                        else stopped(cell)
                    )
            return state_of(cell)

    def execute(self, cell: Cell, arguments: Sequence[str], lock: int) -> str | None:
        """Run one command of a cell.

        Args:
            cell: The cell.
            arguments: Arguments of `acgpt`.
            lock: File descriptor of the cell's lock, for the command to inherit.

        Returns:
            Why the command failed; `None` if it succeeded.
        """
        trains = arguments[0] == "train"
        distributed = trains and self.processes > 1
        program = (*TORCHRUN, str(self.processes), "-m", "acgpt") if distributed else PROGRAM
        if trains and self.end < math.inf:
            arguments = (*arguments, "--minutes", f"{max(0.01, (self.end - time.monotonic()) / 60):.2f}")
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        with cell.log.open("ab") as log:
            log.write(f"$ {shlex.join([*(program if distributed else ('acgpt',)), *arguments])}\n".encode())
            log.flush()
            self.child = start([*program, *arguments], log, lock)
            if self.stop_requests:  # a signal may have arrived while the command started
                self.child.terminate()
            while self.child.poll() is None:
                self.show(cell, replace(state_of(cell), state=WORK[arguments[0]], error=None))
                if not trains and self.should_stop():  # training stops by itself, with a checkpoint
                    self.child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(1 if not self.stop_requests else 0.1)
            code, self.child = self.child.returncode, None
        if code == 0:
            return None
        if code == STOPPED and trains:
            self.end = min(self.end, time.monotonic())  # another process has stopped it: stop the runner as well
        return f"acgpt {arguments[0]} ended with code {code}: {last_line(cell.log)}"

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Count the signals in `SIGNALS` and forward them to the running command."""

        def handle(number: int, frame: Any) -> None:
            self.stop_requests += 1
            if (child := self.child) is None or child.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                if self.stop_requests > 1 and number == signal.SIGINT and os.name == "posix":
                    os.killpg(child.pid, signal.SIGKILL)  # do not wait for the checkpoint
                else:
                    child.terminate()

        main = threading.current_thread() is threading.main_thread()  # only there can signals be handled
        numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        handled = [number for number in numbers if main and signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def start(words: Sequence[str], output: BinaryIO, lock: int) -> subprocess.Popen[bytes]:
    """Start a command that inherits a lock. In a new session, Ctrl-C reaches only the runner, which forwards it."""
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=TORCHRUN_ENVIRONMENT | os.environ,
        start_new_session=True, pass_fds=(lock,) if os.name == "posix" else (),
    )  # fmt: skip


def stopped(cell: Cell) -> State:
    """Return the state of a cell that was stopped on request."""
    state = state_of(cell)
    return state if state.state == "done" else replace(state, state="stopped")


def last_line(log: Path) -> str:
    """Return the last error in a log, or its last line if there is no error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])[:500]


def as_dict(cell: Cell, state: State) -> dict[str, Any]:
    """Return a cell and its state for JSON."""
    return {"number": cell.number, "cell": cell.name, "folder": str(cell.folder), **asdict(state)}
