"""Commands in a process of their own, to see what they import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from subprocess import CompletedProcess

import acgpt


def run_commands(commands: Iterable[list[str]], watched: tuple[str, ...], **env: str) -> CompletedProcess[str]:
    """Run commands one after the other in a new process.

    Returns:
        The process. It prints a line `code N` after each command that exits, and `imported […]`, the names of those of
        the watched modules that were imported, at the end.
    """
    code = f"""
import sys
from acgpt.cli.main import main
for sys.argv[1:] in {[*commands]}:
    try:
        main()
    except SystemExit as end:
        print("code", end.code)
print("imported", [name for name in {watched} if name in sys.modules])
"""
    env = os.environ | {"PYTHONPATH": str(Path(acgpt.__file__).parents[1]), "PYTHONUTF8": "1", "COLUMNS": "100", **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", timeout=120)
