"""Keep the results of finished runs: records, logs, evaluations and scores, in folders of the same layout.

    python benchmarks/keep_runs.py runs/ac runs/gpt --date 2026-11-15 -o benchmarks/results/NAME
    python benchmarks/keep_runs.py results/EXPERIMENT --date 2026-11-15 -o benchmarks/results/NAME
    acgpt report benchmarks/results/NAME -o report

A folder of runs stands for the finished runs in it. Kept is what a report reads: the run's records, its evaluations
with their sums per text, results of `acgpt mauve` from anywhere in its folder, and every tenth row of its log. Folders
of the original machine are renamed to short names: runs/ac, data/wiki.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acgpt.evaluation.generations import object_of_kind

FOLDERS = ("corpus", "output", "folder")  # keys whose values are folders
PATHS = ("model", "adapter", "path", "generated", "file", "result")  # keys whose values are paths in a folder
LOG_ROWS = 10  # one of so many rows of a log is kept, beside those with an evaluation


def rename_folders(value: Any, names: Mapping[str, str], key: str = "") -> Any:
    """Rename folders in a record, wherever a path or an argument of a command is one or lies in one.

    Args:
        value: The record, or a part of it.
        names: New name of each folder. Any other absolute path is reduced to its last part, by which a corpus is known.
        key: Key of the value.
    """
    if isinstance(value, dict):
        return {name: rename_folders(item, names, name) for name, item in value.items()}
    if isinstance(value, list):
        return [rename_folders(item, names, key) for item in value]
    if not isinstance(value, str):
        return value
    name, prefix, path = key, "", value
    if key == "command" and not value.startswith("/"):  # an argument: KEY=PATH, --KEY=PATH, or PATH
        name, equals, path = value.partition("=")
        name, prefix, path = (name, f"{name}=", path) if equals else ("", "", value)
        name = "" if name.startswith("-") else name
    if name in ("", "command", *FOLDERS, *PATHS):
        for folder, new_name in names.items():
            # A single word may be the name of a method.
            is_folder = name in FOLDERS or (name not in PATHS and "/" in folder)
            if (path == folder and is_folder) or path.startswith(f"{folder}/"):
                return prefix + new_name + path[len(folder) :]
        if path.startswith("/"):
            last = Path(path).name
            return prefix + (f"data/{last}" if f"data/{last}" in names.values() else last)
    return value


def finished_runs(folder: Path) -> list[Path]:
    """Return the run in a folder, or the finished runs in a folder of runs."""
    nested = [path.parent for path in sorted(folder.glob("*/results.json"))]
    runs = [folder] if (folder / "results.json").exists() else nested
    if not runs:
        raise SystemExit(f"there is no finished run in {folder}: name the folder of a run or of an experiment.")
    return runs


def folder_names(runs: Sequence[Path]) -> dict[str, str]:
    """Return new names for the folders of runs, where they were trained and where they are, and of their corpora."""
    names: dict[str, str] = {}
    for run in runs:
        recipe = json.loads((run / "results.json").read_text(encoding="utf-8"))["recipe"]
        corpus = recipe["corpus"].rstrip("/")
        for folder in (recipe["output"].rstrip("/"), str(run), str(run.resolve())):
            names.setdefault(folder, f"runs/{run.name}")
        names.setdefault(corpus, f"data/{Path(corpus).name}")
    # Longest first, so that nested folders match first.
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def records(run: Path) -> dict[Path, Any]:
    """Return the JSON files of a run, and results of `acgpt mauve` from its subfolders."""
    contents = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(run.glob("*.json"))}
    for path in sorted(run.rglob("*/*.json")):
        if (content := object_of_kind(path, "mauve")) is not None:
            contents[path] = content
    return contents


def thinned(log: str) -> str:
    """Return every tenth row of a log, its last one, and those with an evaluation, in the last three columns."""
    head, *rows = log.splitlines(keepends=True)
    kept = [row for i, row in enumerate(rows) if i % LOG_ROWS == 0 or i == len(rows) - 1 or not row.endswith(",,,\n")]
    return head + "".join(kept)


def small_files(run: Path, names: Mapping[str, str], date: str) -> dict[Path, str]:
    """Return the files to keep of one run, by path in the run's folder."""
    files = {path.relative_to(run): thinned(path.read_text(encoding="utf-8")) for path in run.glob("*.csv")}
    for path, record in records(run).items():
        content = rename_folders(record, names)
        for holder in (content, *content.get("sittings", ())):
            if "command" in holder:
                holder["command"] = ["acgpt", *holder["command"][1:]]
        if path == run / "results.json":
            content = {"date": date, **content}
        text = json.dumps(content, separators=(",", ":")) + "\n"
        absolute = re.findall(r'"(?:[\w.-]+=)?(/[^"]+)"', text)
        if absolute := absolute or [folder for folder in names if Path(folder).is_absolute() and folder in text]:
            raise SystemExit(f"{path} names {absolute[0]} in an unexpected place: nothing is kept.")
        files[path.relative_to(run)] = text
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders that contain runs")
    parser.add_argument("--date", required=True, help="date of the runs")
    parser.add_argument("-o", "--output", required=True, type=Path, help="a new folder")
    args = parser.parse_args()
    runs = [run for folder in args.runs for run in finished_runs(folder)]
    names = [run.name for run in runs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise SystemExit(f"two runs are called {repeated[0]}: rename one of them.")
    files_of_run = {  # a run's own names first: two runs may have been trained in one folder
        run.name: small_files(run, folder_names([run, *runs]), args.date) for run in runs
    }
    args.output.mkdir(parents=True)
    for name, files in files_of_run.items():
        for relative_path, content in files.items():
            path = args.output / name / relative_path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
