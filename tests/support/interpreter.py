"""Kernels without a GPU: a test file, run as a program under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def run_interpreted(file: str) -> Any:
    """Run a test file as a program, in a process of its own, and return what its last line says, which is JSON.

    The interpreter must be chosen before Triton is imported.
    """
    pytest.importorskip("triton", reason="builds of torch for CPUs come without Triton")
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this version of Triton does not work with this version of numpy")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
