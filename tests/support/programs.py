"""The programs under benchmarks/, run in the process of the test: in others, imports would take most of the time."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load_program(patch: pytest.MonkeyPatch, path: Path) -> ModuleType:
    """Import a program as a module, with what lies in its folder."""
    patch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


def program(name: str, *arguments: object, folder: Path = BENCHMARKS, **constants: object) -> CompletedProcess[str]:
    """Run `python FOLDER/NAME ARGUMENTS` with these constants and return what it printed and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        module = load_program(patch, folder / name)
        for constant, value in constants.items():
            patch.setattr(module, constant, value)
        try:
            code = module.main() or 0
        except SystemExit as end:
            code = 1 if isinstance(end.code, str) else end.code or 0
            err.write(end.code if isinstance(end.code, str) else "")
    return CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())
