"""The log of a run: `log.csv`, a progress bar on the terminal, TensorBoard, and the final plot of the loss."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from acgpt.common.files import write_atomically
from acgpt.training.run_folder import BOARD, CURVE, writing

DURING = ("unconditional", "training", "training-no-future")  # modes that are evaluated during training
COLUMNS = (
    "step", "loss", "learning_rate", "grad_norm", "texts", "tokens", "seconds", "tokens_per_second", "mfu", "wait",
    *DURING,
)  # fmt: skip

Row = dict[str, Any]


class Log:
    """The rows of `log.csv`, at most one per step.

    The columns are step, loss (mean since the previous row, in nats per token), learning_rate, grad_norm (before
    clipping), texts and tokens (read since the start), seconds (of training, without evaluations), tokens_per_second,
    mfu (operations that the model needs, as a share of those of a large matrix product on this machine), wait (share of
    the time spent waiting for data), and the perplexities of an evaluation after that step, always on the same texts.

    Args:
        path: The file.
        write: Whether this process writes the file; other processes only keep the rows in memory.
    """

    def __init__(self, path: Path, write: bool = True) -> None:
        self.path, self.write, self.rows = path, write, list[Row]()

    def start(self, step: int) -> None:
        """Continue the log of a run that resumes after `step`; drop later rows, which will be written again."""
        self.rows = [row for row in read_log(self.path) if row["step"] <= step] if step else []
        self.rewrite()

    def append(self, row: Row) -> None:
        """Append the row of a new step."""
        self.rows.append(row)
        if self.write:
            with writing(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)

    def rewrite(self) -> None:
        """Write all rows, atomically."""
        if self.write:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            with writing(self.path):
                write_atomically(self.path, text.getvalue())

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0

    @property
    def wait(self) -> float | None:
        """Share of the training time spent waiting for data."""
        ends = [0.0, *(row["seconds"] for row in self.rows)]
        waited = sum(row["wait"] * (end - start) for row, start, end in zip(self.rows, ends, ends[1:], strict=False))
        return waited / self.seconds if self.seconds else None


def read_log(path: Path) -> list[Row]:
    """Read the rows of a log, with numbers parsed. A last line without a line end, left by a crash, is ignored."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(whole, newline=""))
    return [{name: number(value) for name, value in row.items() if value} for row in rows]


def number(text: str) -> int | float:
    """Parse a number; it is an `int` if it consists of digits."""
    return int(text) if text.isdigit() else float(text)


def not_written() -> str:
    """Say which files a run will lack because a package is missing; "" if none."""
    packages = {"tensorboard": f"{BOARD}/ (pip install tensorboard)", "matplotlib": f"{CURVE} (pip install matplotlib)"}
    missing = [text for package, text in packages.items() if importlib.util.find_spec(package) is None]
    return f"not written, because their packages are missing: {', '.join(missing)}" if missing else ""


def board(folder: Path, step: int) -> Any:
    """Return TensorBoard's writer from `step` on; `None` if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


class ProgressLine:
    """Progress on standard error: a bar on a terminal, a line from time to time elsewhere.

    Args:
        quiet: Show nothing.
        bound: Whether perplexities are upper bounds, shown with "≤".
        texts: Name of the texts that are evaluated on.
    """

    EVERY = 15.0  # seconds between two lines

    def __init__(self, quiet: bool, bound: bool = False, texts: str = "") -> None:
        self.quiet, self.total, self.first_step, self.texts = quiet, 0, 0, texts
        self.sign = "≤ " if bound else ""  # before perplexities
        self.since, self.last_line = time.perf_counter(), -math.inf
        self.timed: list[tuple[int, float]] = []  # steps and seconds of the first two rows; a first step is slow
        self.bar: Any = None  # rich's progress bar, on a terminal

    def start(self, step: int, total: int) -> None:
        """Start at a step, of `total` steps."""
        self.first_step, self.total, self.since = step, total, time.perf_counter()
        if self.quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task("", total=total, completed=step)

    def advance(self, step: int) -> None:
        """Set the number of steps done so far."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of the log, with its perplexities in a separate line."""
        step, seconds = row["step"], time.perf_counter() - self.since
        left = timedelta(seconds=round(seconds / max(1, step - self.first_step) * (self.total - step)))
        text = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
        self.describe(text, f"step {step}/{self.total}: {text}, {left} left", last=step == self.total)
        if len(self.timed) < 2:
            self.timed.append((step, row["seconds"]))
            if len(self.timed) == 2 and step < self.total:
                (earlier, start), (_, end) = self.timed
                rest = timedelta(seconds=round((end - start) / (step - earlier) * (self.total - step)))
                self.note(f"expected: {rest} to step {self.total:,}, without evaluations")
        if perplexities := ", ".join(f"{mode} {self.sign}{row[mode]:.2f}" for mode in DURING if mode in row):
            self.note(f"step {step}: perplexity on {self.texts}: {perplexities}")

    def evaluated(self, done: int, total: int, *_: int) -> None:
        """Show the progress of an evaluation."""
        text = f"evaluated {done:,}/{total:,} tokens"
        self.describe(text, text)

    def describe(self, text: str, line: str, last: bool = False) -> None:
        """Show a text beside the bar; elsewhere a line, if it is the last or none was printed for a while."""
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        elif last or time.perf_counter() - self.last_line > self.EVERY:
            self.last_line = time.perf_counter()
            self.note(line)

    def note(self, text: str) -> None:
        """Print a permanent line."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def draw_curve(rows: Sequence[Row], path: Path) -> bool:
    """Plot the loss and the perplexities against tokens; return false if matplotlib is not installed."""
    try:
        import matplotlib.figure  # importing pyplot takes as long as a short run
    except ImportError:
        return False
    figure = matplotlib.figure.Figure(figsize=(7, 4))
    axes = figure.add_axes((0.09, 0.13, 0.89, 0.84))
    tokens = [row["tokens"] / 1e6 for row in rows]

    def plot(points: Sequence[tuple[float, float]], label: str, **style: Any) -> None:
        if len(points) == 1:  # a single point has no line and needs a marker
            style |= {"linestyle": "", "markersize": 6, "marker": style.get("marker", "o")}
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)

    plot(
        [(read, row["loss"]) for read, row in zip(tokens, rows, strict=True)], "training loss", color="0.6", linewidth=1
    )
    for mode, marker in zip(DURING, ("o", "s", "^"), strict=True):
        points = [(read, math.log(row[mode])) for read, row in zip(tokens, rows, strict=True) if mode in row]
        plot(points, f"{mode}, held out", marker=marker, markersize=3)
    axes.set_xlim(left=0)
    axes.set_xlabel("million tokens read")
    axes.set_ylabel("nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    hidden = path.with_name(f".{path.name}")
    with writing(path):
        figure.savefig(hidden, dpi=120)
        hidden.replace(path)
    return True
