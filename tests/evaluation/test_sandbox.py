"""The sandbox of the infilling benchmark: what passes, what fails, and that nothing hangs, escapes or stays behind."""

from __future__ import annotations

import importlib
import tempfile

import programs
import pytest

GOOD = "def add(a, b):\n    return a + b\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n\n\ncheck(add)\n"


@pytest.fixture
def sandbox(monkeypatch):
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module("sandbox")


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder in which the sandbox makes its folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_right_program_passes(sandbox):
    assert sandbox.passes(GOOD)


def test_the_standard_library_and_the_working_directory_can_be_used(sandbox, temporary):
    write = "import pathlib, tempfile\npathlib.Path('a').write_text('x' * 9)\npathlib.Path('a').rename('b')\n"
    assert sandbox.passes("import math, random, re, hashlib, collections\n" + write + "tempfile.mkdtemp()\n" + GOOD)
    assert list(temporary.iterdir()) == []


FAILING = {
    "wrong": GOOD.replace("a + b", "a - b"),
    "not Python": GOOD.replace("return", "return return"),
    "no such name": GOOD.replace("check(add)", "check(sub)"),
    "reads its input": "input()\n" + GOOD,
    "early exit": "import sys\nsys.exit(0)\n" + GOOD,
    "early exit within the function": GOOD.replace("return a + b", "raise SystemExit"),
    "immediate exit": "import os\nos._exit(0)\n" + GOOD,
    "writes to the pipe and exits": "import os\nos.write(3, b'x' * 32)\nos._exit(0)\n",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + GOOD,
    "memory bomb": "x = 'x' * 2**31\n" + GOOD,
    "fork": "import os\nos.fork()\n" + GOOD,
    "subprocess": "import subprocess\nsubprocess.run(['true'])\n" + GOOD,
    "packages": "import rich\n" + GOOD,
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))\n" + GOOD,
    "large file": "open('a', 'w').write('x' * 2**22)\n" + GOOD,
}


@pytest.mark.parametrize("kind", FAILING)
def test_other_programs_fail(sandbox, temporary, kind):
    assert not sandbox.passes(FAILING[kind])
    assert list(temporary.iterdir()) == []


ENDLESS = {
    "loop": "while True: pass\n",
    "loop that ignores signals": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass\n",
    "sleep": "import time\ntime.sleep(1000)\n",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "flood": "import os\nwhile True:\n    try: os.write(3, b'x' * 9999)\n    except OSError: pass\n",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_programs_are_stopped(sandbox, temporary, kind):
    assert not sandbox.passes(ENDLESS[kind], timeout=1)
    assert list(temporary.iterdir()) == []


OUTSIDE = [
    "open({!r}, 'a')",
    "import os; os.open({!r}, os.O_RDWR)",
    "import os; os.remove({!r})",
    "import os; os.rename({!r}, 'x')",
]


@pytest.mark.parametrize("statement", OUTSIDE)
def test_files_outside_the_working_directory_cannot_be_changed(sandbox, tmp_path, statement):
    path = tmp_path / "precious"
    path.write_text("kept")
    assert not sandbox.passes(statement.format(str(path)) + "\n" + GOOD)
    assert path.read_text() == "kept"


def test_many_programs_are_answered_in_order(sandbox):
    many = [GOOD, FAILING["wrong"], FAILING["early exit"], GOOD]
    assert sandbox.passes_all(many) == [True, False, False, True]
