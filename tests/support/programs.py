"""The programs under benchmarks/, run in the process of the test: in others, imports would take most of the time."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def program(name: str, *arguments: object, folder: Path = BENCHMARKS) -> CompletedProcess[str]:
    """Run `python FOLDER/NAME ARGUMENTS` and return what it printed and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.syspath_prepend(folder)
        try:
            runpy.run_path(str(folder / name), run_name="__main__")
        except SystemExit as end:
            code = 1 if isinstance(end.code, str) else end.code or 0
            err.write(end.code if isinstance(end.code, str) else "")
    return CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())
