"""The options of running an experiment, each declared once.

This module does not import torch, transformers or numpy, so that the command line lists the options without delay.
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
        "Folder of the experiment. Default: that of the file.", metavar="FOLDER", flags=("--output", "-o")
    )
    only: Sequence[str] = option(
        "Run only some cells: a number, a name or a pattern such as 'ac-gpt-*'.",
        (),
        shell="May be repeated.",
        metavar="CELL",
        form="list",
    )
    processes: int = option(
        "Train each cell with N processes, started by torchrun.", 1, metavar="N", minimum=1, flags=("--nproc-per-node",)
    )
    no_scoring: bool = option(
        "Do not score now: the same command without this option scores later, for example on a machine with "
        "mauve-text.",
        False,
    )
    minutes: float | None = declared(
        RunOptions, "minutes", help="Stop with a checkpoint after N minutes; the same command resumes."
    )
