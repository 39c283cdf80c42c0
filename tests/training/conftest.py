"""A corpus to train on, which tests must not change."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))
