"""The paths of `paths.py` enter no more files than they did when they were last counted."""

from __future__ import annotations

import pytest
from paths import draw

# Files of src/acgpt on each path, with tiny models. Lower a bound when a path gets shorter.
MOST = {"log_prob": 15, "completion request": 24, "training step": 13}
# A path that does not enter these was not drawn.
PARTS = {
    "log_prob": {"models", "query", "methods", "engine"},
    "completion request": {"serving", "models", "engine"},
    "training step": {"training", "methods", "engine"},
}


@pytest.mark.usefixtures("without_curves")
def test_paths_enter_no_more_files_than_recorded():
    walks = draw()
    assert walks.keys() == MOST.keys()
    for name, walk in walks.items():
        numbers = walk.numbers()
        assert numbers["files"] <= MOST[name], f"{name} enters {numbers['files']} files:\n{walk.table()}"
        assert set(numbers["by_package"]) >= PARTS[name], name
