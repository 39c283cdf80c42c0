"""What the tables of bad inputs are asked of: small models, adapters, a corpus and recipes, in one folder."""

from __future__ import annotations

import json

import pytest
from checkpoints import write_adapter, write_model
from generations import write_generations
from models import tiny_tokenizer
from room import Room
from runs import SMALL, SPECIAL, write_corpus


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    """A folder with a model, an adapter, a corpus, recipes and files that are none of these."""
    folder = tmp_path_factory.mktemp("room")
    write_model(folder / "model", tiny_tokenizer(**SPECIAL))
    write_adapter(folder / "adapter", folder / "model")
    write_corpus(folder / "corpus")
    write_corpus(folder / "no-validation", splits=("train",))
    other = write_corpus(folder / "other") / "corpus.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"tokenizer_hash": "another"}))
    for name in ("drawn", "drawn-again"):
        write_generations(folder / name, folder / "corpus")
    (folder / "mixed").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (folder / "mixed" / name).write_text('{"text": "The cat sat on the mat."}\n')
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
