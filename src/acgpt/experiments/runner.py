"""Running the cells of an experiment, one after the other, each by the commands that it consists of.

A cell's commands are processes of their own: what one of them does wrong, or to the memory, concerns no other cell. On
Linux they are forked from one process that has imported torch and transformers (`command_server`), which is started for
the first of them; elsewhere, and where that process fails, each is started anew. The runner holds the cell's lock,
passes signals on, and reads from the run's folder how far it has come.

    waiting ──► training ──► evaluating ──► generating ──► scoring ──► done
                   │              │              │            │
                   └──────┬───────┴──────────────┴────────────┘
               failed, or stopped (by a signal, or because time is up)        elsewhere: another runner has the cell
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
from typing import Any

from acgpt.common.files import try_lock
from acgpt.common.options import keywords
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError, OutputError
from acgpt.evaluation.dataset import chunks
from acgpt.evaluation.features import LENGTH, Featurizer
from acgpt.evaluation.generations import Generations
from acgpt.evaluation.mauve import FEWEST, PAPER, check_counts, package
from acgpt.evaluation.reference import lack, of_corpus
from acgpt.experiments.command_server import SUPPORTED, CommandServer, ServedCommand
from acgpt.experiments.experiment import Cell, Experiment, opened
from acgpt.experiments.options import ExperimentOptions
from acgpt.training.log import read_log
from acgpt.training.run_folder import CONFIG, LOG, RESULTS, check_same

PROGRAM = (sys.executable, "-m", "acgpt")
PRELOADED = (sys.executable, "-m", "acgpt.cli.preloaded")  # forks into PROGRAM
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# Seconds that torchrun (from torch 2.12 on) leaves its processes to save a checkpoint after a signal: else 30.
PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
LONGEST_START = 300.0  # seconds that the imports of the server may take
STOPPED = 3  # the exit code of a training run that was asked to stop
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # all mean: stop, so that it can go on later
# What a cell is at, by its command.
WORK = {"train": "training", "evaluate": "evaluating", "generate": "generating", "mauve": "scoring"}
ALL = ("waiting", *WORK.values(), "done", "failed", "stopped", "elsewhere")


@dataclass(frozen=True)
class State:
    """How far a cell has come.

    Args:
        state: One of `ALL`.
        step: The last that its log has, or from which it would go on.
        steps: Of how many; `None` if it has not begun.
        loss: The last.
        seconds: That it has trained.
        left: Seconds of training to go, at the rate so far.
        evaluated: How many of its evaluations are there.
        evaluations: Of how many.
        generated: How many of its folders of generations are complete.
        generations: Of how many.
        scored: How many of its scorings are complete: of each folder, one for each way.
        scores: Of how many.
        error: Why it failed.
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


Show = Callable[[Cell, State], object]  # called with a cell and how far it has come


def state_of(cell: Cell) -> State:
    """How far a cell has come, from its folder: done, stopped, failed if the folder is another run's, or waiting."""
    asked = (cell.evaluations, cell.generations, cell.scores)
    there, wanted = [sum(path.exists() for path in paths) for paths in asked], [len(paths) for paths in asked]
    state = State(
        "waiting",
        evaluated=there[0], generated=there[1], scored=there[2],
        evaluations=wanted[0], generations=wanted[1], scores=wanted[2],
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
        state="done" if trained and there == wanted else "stopped",
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
    """Train, evaluate and sample from all cells of an experiment that are not done.

        states = run_experiment("mine.yaml", ["steps=500"], only=["ac-gpt-*"])
        states["ac-gpt-r_max0.6-seed0"].state

    Args:
        experiment: A YAML file, the name of an experiment that comes with acgpt, or an `Experiment`.
        changes: `key=value` each, keys of the recipe that are otherwise in all cells.
        **keywords: See `ExperimentOptions`.
        watch: Makes, for the cells that were chosen, a context in which `Show` is called.

    Returns:
        What became of each cell, by its name.

    Raises:
        InputError: Something that the user can mend. Errors within a cell are in its state.
    """
    options = ExperimentOptions(**keywords)
    loaded = opened(experiment, changes, options)
    cells = loaded.chosen(options.only)
    check_corpora(cells)
    check_scoring(loaded, cells)
    with watch(cells) as show:
        return Runner(cells, processes=options.processes, minutes=options.minutes, show=show).run()


def check_corpora(cells: Sequence[Cell]) -> None:
    """Find out before hours of training that a corpus, or a split that is to be asked, is not there.

    Raises:
        InputError: So it is.
    """
    for place in dict.fromkeys(cell.recipe.corpus for cell in cells):
        if not place:
            raise InputError("the recipe names no corpus: add corpus=FOLDER.")
        corpus = Corpus.open(place)
        for cell in cells:
            asked = {**cell.evaluations, **cell.generations} if cell.recipe.corpus == place else {}
            for words in asked.values():
                corpus.tokens(words[words.index("--split") + 1])


def check_scoring(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """Find out before hours of training that what will be drawn could not be scored.

    Raises:
        InputError: mauve-text is not installed, there is no model of features, or the corpus has too few texts to draw
            or to compare with.
    """
    drawn, wanted = experiment.generate, experiment.mauve
    left = [cell for cell in cells if not all(path.exists() for path in cell.scores)]
    if drawn is None or wanted is None or not left:
        return
    if not wanted.no_mauve:
        package(
            "mauve: {no_mauve: true} measures the rest; with `no_scoring=True` the cells draw, and are scored later."
        )
    for place, length in dict.fromkeys((cell.recipe.corpus, cell.recipe.length) for cell in left):
        corpus = Corpus.open(place)
        for split in drawn.splits:
            texts = chunks(corpus.tokens(split), length, drawn.limit, f"{split} of {corpus.folder}")
            about = {"corpus_hash": corpus.hash, "split": split, "texts": texts, "length": length}
            try:
                found = of_corpus(
                    corpus, wanted.split, length=wanted.length or min(LENGTH, length), rule=wanted.rule,
                    generated=[Generations(Path(), {"set": about})], skip=wanted.skip, count=FEWEST,
                    allow_none=True,
                )  # fmt: skip
                if wanted.no_mauve:
                    continue
                if not found.texts:
                    raise InputError(f"{lack(found.about)}.")
                check_counts(texts, len(found.texts))
            except InputError as error:
                raise InputError(
                    f"mauve, of the first {texts} texts of {split}: {error} generate.splits and generate.limit decide "
                    "what is drawn, mauve.split, mauve.length and mauve.skip the reference; with `no_scoring=True` the "
                    "cells draw, and are scored later."
                ) from error
    if not wanted.no_mauve:
        try:
            Featurizer.check(wanted.features or PAPER)
        except ModelError as error:
            raise InputError(
                f"mauve.features: {error} With `no_scoring=True` the cells draw, and are scored later."
            ) from error


@contextlib.contextmanager
def held(cell: Cell) -> Iterator[int | None]:
    """The lock of a cell, as a descriptor that its processes inherit; `None` if somebody else has it (Unix only).

    The system lets go of it when the last process that has it ends, however it ends.
    """
    try:
        cell.lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cell.lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OutputError(
            f"cannot write {cell.lock}: {error.strerror}. Make room there, or name another `output`."
        ) from error
    try:
        yield descriptor if try_lock(descriptor) else None
    finally:
        os.close(descriptor)


def is_held(cell: Cell) -> bool:
    """Does somebody work on it?"""
    if not cell.lock.exists():
        return False
    with held(cell) as descriptor:
        return descriptor is None


class Runner:
    """Runs cells.

    Args:
        cells: Those to run, in this order.
        processes: That train one together, by torchrun; 1 is without it.
        minutes: After so many it stops, as it does when it is asked to.
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
        if minutes is not None and not minutes > 0:
            raise InputError(f"the minutes that an experiment may take must be above 0, not {minutes}.")
        if processes < 1:
            raise InputError(f"a cell is trained by at least one process, not by {processes}.")
        self.cells, self.processes, self.show = cells, processes, show
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.asked = 0  # how often somebody has asked to stop
        self.child: subprocess.Popen[bytes] | ServedCommand | None = None
        self.server: CommandServer | None = None
        self.serves = SUPPORTED

    def stops(self) -> bool:
        """Is it time to stop?"""
        return self.asked > 0 or time.monotonic() >= self.end

    def run(self) -> dict[str, State]:
        """Run all of them that are not done; what became of each, by name.

        A cell that fails does not keep the others from running. Ctrl-C, SIGTERM and SIGHUP stop the cell that runs,
        with a checkpoint, and leave the rest; a second Ctrl-C does not wait for the checkpoint.
        """
        states = {}
        with self.listening():
            try:
                for cell in self.cells:
                    states[cell.name] = state = self.take(cell)
                    self.show(cell, state)
            finally:
                self.close_server()
        return states

    def take(self, cell: Cell) -> State:
        """Run one cell, unless it is done, time is up, or somebody else has it."""
        before = state_of(cell)
        if before.state in ("done", "failed") or self.stops():
            return before
        with held(cell) as lock:
            if lock is None:
                return replace(before, state="elsewhere")
            asked = {**cell.evaluations, **cell.generations, **cell.scores}
            for path, words in ((None, cell.train), *asked.items()):
                if (path or cell.folder / RESULTS).exists():
                    continue
                if self.stops():
                    return stopped(cell)
                if error := self.execute(cell, words, lock):
                    return replace(state_of(cell), state="failed", error=error) if not self.stops() else stopped(cell)
            return state_of(cell)

    def execute(self, cell: Cell, words: Sequence[str], lock: int) -> str | None:
        """One command of a cell; why it failed, if it did."""
        trains = words[0] == "train"
        together = trains and self.processes > 1
        program = (*TORCHRUN, str(self.processes), "-m", "acgpt") if together else PROGRAM
        server = None if together else self.warm(cell, words[0])
        if self.stops():  # while the server started
            return "stopped"
        if trains and self.end < math.inf:
            words = (*words, "--minutes", f"{max(0.01, (self.end - time.monotonic()) / 60):.2f}")
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        with cell.log.open("ab") as log:
            log.write(f"$ {shlex.join([*(program if together else ('acgpt',)), *words])}\n".encode())
            log.flush()
            self.child = None if server is None else self.fork(server, words, log.fileno(), lock)
            # A session of its own: Ctrl-C comes to the runner, which passes it on.
            self.child = self.child or subprocess.Popen(
                [*program, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=PATIENCE | os.environ, start_new_session=True, pass_fds=(lock,) if os.name == "posix" else (),
            )  # fmt: skip
            if self.asked:  # while it was started
                self.child.terminate()
            while self.child.poll() is None:
                self.show_work(cell, words[0])
                if not trains and self.stops():  # training stops by itself, with a checkpoint
                    self.child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(1 if not self.asked else 0.1)
            code, self.child = self.child.returncode, None
        if code == 0:
            return None
        if code == STOPPED and trains:
            self.end = min(self.end, time.monotonic())  # somebody else has asked it to stop: so do we
        return f"acgpt {words[0]} ended with code {code}: {last_line(cell.log)}"

    def show_work(self, cell: Cell, command: str) -> None:
        """Show a cell whose command runs, or is about to."""
        self.show(cell, replace(state_of(cell), state=WORK[command], error=None))

    def warm(self, cell: Cell, command: str) -> CommandServer | None:
        """Return the server once its imports are done; `None` if there is none, or it is time to stop."""
        end = time.monotonic() + LONGEST_START
        while self.serves and not self.stops():
            self.show_work(cell, command)
            try:
                if time.monotonic() > end:
                    raise TimeoutError("the imports have not ended.")
                if self.server is None:
                    self.server = CommandServer(PRELOADED, PATIENCE | os.environ)
                if self.server.ready(1):
                    return self.server
            except OSError:
                self.serves = False  # the command, started anew, says in the log what is wrong
                self.close_server()
        return None

    def fork(self, server: CommandServer, words: Sequence[str], *descriptors: int) -> ServedCommand | None:
        """Start a command from the server; `None` if that has ended meanwhile."""
        try:
            return server.start(words, *descriptors)
        except OSError:
            self.close_server()
            return None

    def close_server(self) -> None:
        """End the server, if there is one; the next command starts another."""
        if self.server is not None:
            self.server.close()
            self.server = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, signals that ask to stop are passed on to the command that runs."""

        def handle(number: int, where: Any) -> None:
            self.asked += 1
            if (child := self.child) is None or child.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                if self.asked > 1 and number == signal.SIGINT and os.name == "posix":
                    os.killpg(child.pid, signal.SIGKILL)  # the user will not wait
                else:
                    child.terminate()

        main = threading.current_thread() is threading.main_thread()  # only there can signals be handled
        numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        heard = [each for each in numbers if main and signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, handle) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def stopped(cell: Cell) -> State:
    """A cell that was asked to stop: where it will go on."""
    state = state_of(cell)
    return state if state.state == "done" else replace(state, state="stopped")


def last_line(log: Path) -> str:
    """What a command said last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    found = [line for line in lines if line]
    return next((line for line in reversed(found) if line.startswith("error:")), found[-1])[:500]


def as_dict(cell: Cell, state: State) -> dict[str, Any]:
    """A cell and its state for programs."""
    return {"number": cell.number, "cell": cell.name, "folder": str(cell.folder), **asdict(state)}
