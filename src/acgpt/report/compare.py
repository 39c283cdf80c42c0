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


def compare(folders: Sequence[str | Path], output: str | Path) -> Report:
    """Compare finished runs, and write the report into a folder: see `acgpt.report.write.make_report`.

    Raises:
        InputError: A package of the extra `report` is missing, or as `make_report` says.
    """
    check_installed()
    from acgpt.report.write import make_report

    return make_report(folders, output)


def check_installed() -> None:
    """Refuse to go on without the packages of the extra `report`."""
    for package in EXTRA:
        try:
            import_module(package)
        except ImportError as error:
            raise InputError(f"a report needs {package}: pip install 'acgpt[report]'") from error
