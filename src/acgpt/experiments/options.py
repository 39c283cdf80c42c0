"""The options of running an experiment, each declared once.

This module imports neither torch, transformers nor numpy, so that the command line can list the options at once.
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
    """The options of `run_experiment` and of `acgpt experiment`."""

    output: Path | str | None = option(
        "The folder of the experiment. Default: what the file says.", metavar="FOLDER", flags=("--output", "-o")
    )
    only: Sequence[str] = option(
        "Some cells only: a number, a name or a pattern, 'ac-gpt-*'.",
        (),
        shell="May be repeated.",
        metavar="CELL",
        form="list",
    )
    processes: int = option(
        "Train each cell with N processes, by torchrun.", 1, metavar="N", minimum=1, flags=("--nproc-per-node",)
    )
    no_scoring: bool = option(
        "Leave scoring for later, or for a machine with mauve-text: the same command without this scores.", False
    )
    minutes: float | None = declared(
        RunOptions, "minutes", help="Stop with a checkpoint after so many minutes; the same command goes on."
    )
