"""Keep what finished runs have found: records, logs and evaluations, no weights, as folders of the same form.

    python benchmarks/keep_runs.py runs/ac runs/gpt --date 2026-11-15 -o benchmarks/results/NAME
    acgpt report benchmarks/results/NAME -o report

Folders of the machine on which they ran are named by their last part: runs/ac, data/wiki.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDERS, WITHIN = ("corpus", "output", "folder"), ("model", "adapter", "path")  # whose values are folders, or in one


def renamed(value: Any, places: Mapping[str, str], key: str = "") -> Any:
    """A record in which folders have other names, wherever a path or a word of a command is one or lies in one."""
    if isinstance(value, dict):
        return {name: renamed(each, places, name) for name, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, places, key) for each in value]
    name, equals, path = value.partition("=") if key == "command" else (key, "", value)
    if name in (*FOLDERS, *WITHIN):
        for place, other in places.items():
            if (path == place and name in FOLDERS) or str(path).startswith(f"{place}/"):
                return f"{name}{equals}" * bool(equals) + other + path[len(place) :]
    return value


def keep(run: Path, date: str, output: Path) -> None:
    """Copy the small files of one run."""
    recipe = json.loads((run / "results.json").read_text(encoding="utf-8"))["recipe"]
    trained, corpus = recipe["output"].rstrip("/"), recipe["corpus"].rstrip("/")
    places = {trained: f"runs/{run.name}", corpus: f"data/{Path(corpus).name}"}
    folder = output / run.name
    folder.mkdir(parents=True)
    for path in sorted(run.glob("*.json")):
        content = renamed(json.loads(path.read_text(encoding="utf-8")), places)
        for holder in (content, *content.get("sittings", ())):
            if "command" in holder:
                holder["command"] = ["acgpt", *holder["command"][1:]]
        if path.name == "results.json":
            content = {"date": date, **content}
        text = json.dumps(content, separators=(",", ":")) + "\n"
        if left := [place for place in places if Path(place).is_absolute() and place in text]:
            raise SystemExit(f"{path} names {left[0]} where it is not expected: nothing is kept of it.")
        (folder / path.name).write_text(text, encoding="utf-8")
    for path in run.glob("*.csv"):
        shutil.copy(path, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--date", required=True, help="on which they were made")
    parser.add_argument("-o", "--output", required=True, type=Path, help="a folder that is not there yet")
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    for run in args.runs:
        keep(run, args.date, args.output)


if __name__ == "__main__":
    main()
