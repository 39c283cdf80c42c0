"""Reports of tables alone, unless a test asks for figures; a corpus to draw from."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_corpus

from acgpt.report import write


@pytest.fixture(autouse=True)
def only_tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take a second, so they are drawn only in tests that ask for `figures`."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(write, "find_spec", lambda name: None)


@pytest.fixture
def figures() -> None:
    """Draw figures in this test."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("drawn") / "corpus")
