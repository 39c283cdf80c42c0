"""The folder that the tables of bad input name `<tmp>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acgpt


@dataclass(frozen=True)
class Room:
    """A folder that cases name `<tmp>`."""

    folder: Path

    def real(self, text: str) -> str:
        """Return the text of a case with the folder in place of `<tmp>`."""
        return text.replace("<tmp>", str(self.folder))

    def told(self, text: str) -> str:
        """Return a message without what differs between machines: the folders and the version."""
        text = text.replace(str(self.folder), "<tmp>").replace(str(Path(acgpt.__file__).parent), "<acgpt>")
        text = text.replace(acgpt.__version__, "<version>")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def files(self) -> dict[str, bytes]:
        """Return the contents of all files and the names of all folders, but for what cases damage or write."""
        own = {self.folder / "changed.yaml", self.folder / "damaged"}
        paths = [path for path in sorted(self.folder.rglob("*")) if not own & {path, *path.parents}]
        return {str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else b"" for path in paths}

    def grid(self, **changes: Any) -> Path:
        """Write an experiment with these keys, and return its file."""
        base = {"recipe": str(self.folder / "recipe.yaml"), "output": str(self.folder / "grid")}
        path = self.folder / "changed.yaml"
        path.write_text(json.dumps(base | {"grid": {"seed": [0, 1]}} | changes))
        return path
