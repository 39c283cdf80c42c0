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


def renamed(value: Any, places: Mapping[str, str]) -> Any:
    """A record in which folders have other names: as whole values, as the beginning of a path, or after "key="."""
    if isinstance(value, dict):
        return {key: renamed(each, places) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, places) for each in value]
    if not isinstance(value, str):
        return value
    key, equals, path = value.rpartition("=")
    for place, name in places.items():
        if path == place or path.startswith(f"{place}/"):
            return f"{key}{equals}{name}{path[len(place) :]}"
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
        (folder / path.name).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
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
