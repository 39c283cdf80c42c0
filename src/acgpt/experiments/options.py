"""Options of experiments.

This module imports neither torch, transformers nor numpy, so that `acgpt COMMAND --help` is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acgpt.common.options import Options, declared, documented, option
from acgpt.training.options import RunOptions


@documented
@dataclass(frozen=True)
class ExperimentOptions(Options):
    """Options of `run_experiment` and `acgpt experiment`."""

    output: Path | str | None = option(
        "Folder of the experiment. Default: that of the file.", metavar="FOLDER", flags=("--output", "-o")
    )
    only: Sequence[str] = option(
        "Cells to run: a number, a name or a pattern such as 'ac-gpt-*'.",
        (),
        shell="May be repeated.",
        metavar="CELL",
        form="list",
    )
    processes: int = option(
        "Train each cell with N processes (torchrun).", 1, metavar="N", minimum=1, flags=("--nproc-per-node",)
    )
    no_scoring: bool = option(
        "Skip scoring. The same command without this option scores later, on a machine with mauve-text.", False
    )
    minutes: float | None = declared(
        RunOptions, "minutes", help="Stop with a checkpoint after N minutes; the same command resumes."
    )
