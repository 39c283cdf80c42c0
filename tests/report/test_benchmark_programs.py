"""Every program under benchmarks/ for people can be started: what it imports is there."""

from __future__ import annotations

import pytest
from programs import BENCHMARKS, program

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in sorted(BENCHMARKS.glob("*.py"))}
PROGRAMS = [name for name, text in SOURCES.items() if "__main__" in text and "Parser(" in text]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_used(name):
    answer = program(name, "--help")
    assert answer.returncode == 0 and answer.stdout.startswith("usage:"), answer.stderr
