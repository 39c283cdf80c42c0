"""What the tables of bad inputs are asked of: small models, adapters, a corpus and recipes, in one folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_adapter, write_model
from models import tiny_tokenizer
from runs import SMALL, SPECIAL, write_corpus

import acgpt


@dataclass(frozen=True)
class Room:
    """A folder that cases name `<tmp>`."""

    folder: Path

    def real(self, text: str) -> str:
        """Return the text of a case with the folder in place of `<tmp>`."""
        return text.replace("<tmp>", str(self.folder))

    def told(self, text: str) -> str:
        """Return a message without what differs between machines: the folder and the version."""
        text = text.replace(str(self.folder), "<tmp>").replace(acgpt.__version__, "<version>")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def grid(self, **changes: Any) -> Path:
        """Write an experiment with these keys, and return its file."""
        base = {"recipe": str(self.folder / "recipe.yaml"), "output": str(self.folder / "grid")}
        path = self.folder / "changed.yaml"
        path.write_text(json.dumps(base | {"grid": {"seed": [0, 1]}} | changes))
        return path


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    """A folder with a model, an adapter, a corpus, recipes and files that are none of these."""
    folder = tmp_path_factory.mktemp("room")
    write_model(folder / "model", tiny_tokenizer(**SPECIAL))
    write_adapter(folder / "adapter", folder / "model")
    write_corpus(folder / "corpus")
    write_corpus(folder / "no-validation", splits=("train",))
    (folder / "notes.txt").write_text("The cat sat on the mat.\n")
    (folder / "blank.txt").write_text("\n\n")
    (folder / "latin1.txt").write_bytes("The {{café}} sat.\n".encode("latin1"))
    (folder / "binary.xyz").write_bytes(b"\x00\x01")
    (folder / "empty").mkdir()
    recipe = SMALL | {"corpus": str(folder / "corpus"), "output": str(folder / "run")}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.json").write_text(json.dumps({"recipe": recipe}))
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "typo.yaml").write_text(json.dumps(recipe | {"stepz": 3}))
    room = Room(folder)
    room.grid().rename(folder / "grid.yaml")
    room.grid(gird={}).rename(folder / "grid-typo.yaml")
    room.grid(grid={"seed": 0}).rename(folder / "grid-scalar.yaml")
    return room
