"""`acgpt.compare`: the public function behind `acgpt report`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from acgpt.errors import InputError

if TYPE_CHECKING:
    from acgpt.report.write import Report

EXTRA = ("jinja2", "pandas")  # the packages of the extra `report`


def compare(folders: str | Path | Sequence[str | Path], output: str | Path | None = None) -> Report:
    """Compare finished runs as the paper does, like `acgpt report`.

        report = acgpt.compare(["runs/ac", "runs/gpt"])
        report.tables["from-scratch/validation/small"]       # a pandas DataFrame; list(report.tables) names them all
        report.measurements                                  # every perplexity: a row per run, dataset and mode
        acgpt.compare("results/mine", "report")              # writes tables, figures and pages too

    Args:
        folders: Folders of finished runs, folders of such folders, or folders of generations.
        output: Folder for the report; an earlier report in it is replaced. `None` writes nothing.

    Returns:
        The report: `tables`, `measurements`, `notes`, and `content`, which `acgpt report --json` prints.

    Raises:
        InputError: A package of the extra `report` is missing, a folder is not a finished run, there is nothing to
            compare, or `output` has other contents.
        OutputError: The report cannot be written; an earlier one is kept.
    """
    for package in EXTRA:
        try:
            import_module(package)
        except ImportError as error:
            raise InputError(f"a report needs {package}: pip install 'acgpt[report]'") from error
    from acgpt.report.write import make_report

    paths = [folders] if isinstance(folders, str | Path) else list(folders)
    if not paths:
        raise InputError("nothing to compare: name the folder of at least one run.")
    return make_report(paths, output)
