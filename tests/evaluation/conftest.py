"""A corpus with three splits, and a cache of features."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("mauve") / "corpus", splits=("train", "validation", "test"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached features."""
    monkeypatch.setenv("ACGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"
