"""Keep what finished runs have found: records, logs, evaluations and scores, as folders of the same form.

    python benchmarks/keep_runs.py runs/ac runs/gpt --date 2026-11-15 -o benchmarks/results/NAME
    python benchmarks/keep_runs.py results/EXPERIMENT --date 2026-11-15 -o benchmarks/results/NAME
    acgpt report benchmarks/results/NAME -o report

A folder of runs stands for those of them that are finished. Weights are left out, and so is what was drawn, unless
`--texts` keeps it in little room (kept_texts.py): of generations the records are kept, and what `acgpt mauve` has
found, wherever in the run's folder they lie. Folders of the machine on which they ran are named by their last part:
runs/ac, data/wiki.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acgpt.evaluation.generations import object_of_kind, record_of

FOLDERS = ("corpus", "output", "folder")  # whose values are folders
WITHIN = ("model", "adapter", "path", "generated", "file", "result")  # or lie in one
KINDS = ("generations", "index", "mauve", "scores")  # what acgpt generate and acgpt mauve write


def renamed(value: Any, places: Mapping[str, str], key: str = "") -> Any:
    """A record in which folders have other names, wherever a path or a word of a command is one or lies in one.

    Args:
        value: The record, or a part of it.
        places: The new name of each folder. Of any other absolute path the last part is left; a corpus is known by it.
        key: Under which the value stands.
    """
    if isinstance(value, dict):
        return {name: renamed(each, places, name) for name, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, places, key) for each in value]
    if not isinstance(value, str):
        return value
    name, before, path = key, "", value
    if key == "command" and not value.startswith("/"):  # a word of it: KEY=PATH, --KEY=PATH, or PATH
        name, equals, path = value.partition("=")
        name, before, path = (name, f"{name}=", path) if equals else ("", "", value)
        name = "" if name.startswith("-") else name
    if name in ("", "command", *FOLDERS, *WITHIN):
        for place, other in places.items():
            whole = name in FOLDERS or (name not in WITHIN and "/" in place)  # a word alone may be a method's name
            if (path == place and whole) or path.startswith(f"{place}/"):
                return before + other + path[len(place) :]
        if path.startswith("/"):
            last = Path(path).name
            return before + (f"data/{last}" if f"data/{last}" in places.values() else last)
    return value


def finished(place: Path) -> list[Path]:
    """The run in a folder, or those in a folder of runs."""
    runs = [place] if (place / "results.json").exists() else [p.parent for p in sorted(place.glob("*/results.json"))]
    if not runs:
        raise SystemExit(f"there is no finished run in {place}: name the folder of one, or of an experiment.")
    return runs


def places_of(runs: Sequence[Path]) -> dict[str, str]:
    """What the folders of runs are called, where they were trained and where they lie, and those of their corpora."""
    places: dict[str, str] = {}
    for run in runs:
        recipe = json.loads((run / "results.json").read_text(encoding="utf-8"))["recipe"]
        corpus = recipe["corpus"].rstrip("/")
        for place in (recipe["output"].rstrip("/"), str(run), str(run.resolve())):
            places.setdefault(place, f"runs/{run.name}")
        places.setdefault(corpus, f"data/{Path(corpus).name}")
    return dict(sorted(places.items(), key=lambda item: -len(item[0])))  # what lies in another comes first


def records(run: Path) -> dict[Path, Any]:
    """The records of a run: those in its folder, and of generations and their scores those in any folder of it."""
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(run.glob("*.json"))}
    for path in sorted(run.rglob("*/*.json")):
        if (content := object_of_kind(path, *KINDS)) is not None:
            found[path] = content
    return found


def small_files(run: Path, places: Mapping[str, str], date: str) -> dict[Path, str]:
    """What is kept of one run, by its place in the run's folder."""
    kept = {path.relative_to(run): path.read_text(encoding="utf-8") for path in run.glob("*.csv")}
    for path, found in records(run).items():
        content = renamed(found, places)
        for holder in (content, *content.get("sittings", ())):
            if "command" in holder:
                holder["command"] = ["acgpt", *holder["command"][1:]]
        if path == run / "results.json":
            content = {"date": date, **content}
        text = json.dumps(content, separators=(",", ":")) + "\n"
        left = re.findall(r'"(?:[\w.-]+=)?(/[^"]+)"', text)
        if left := left or [place for place in places if Path(place).is_absolute() and place in text]:
            raise SystemExit(f"{path} names {left[0]} where it is not expected: nothing is kept.")
        kept[path.relative_to(run)] = text
    return kept


def texts(run: Path) -> dict[Path, bytes]:
    """What a run has drawn, by its place in the run's folder."""
    from kept_texts import END, pack

    drawn = [path for path in sorted(run.rglob("*.jsonl")) if record_of(path) is not None]
    return {path.relative_to(run).with_suffix(END): pack(path) for path in drawn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or of folders of runs")
    parser.add_argument("--texts", action="store_true", help="keep what was drawn, too")
    parser.add_argument("--date", required=True, help="on which they were made")
    parser.add_argument("-o", "--output", required=True, type=Path, help="a folder that is not there yet")
    args = parser.parse_args()
    runs = [run for place in args.runs for run in finished(place)]
    names = [run.name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SystemExit(f"two runs are called {twice[0]}, and would be one folder: rename one of them.")
    kept = {  # of two that were trained in one place, its own
        run.name: {
            **{path: text.encode() for path, text in small_files(run, places_of([run, *runs]), args.date).items()},
            **(texts(run) if args.texts else {}),
        }
        for run in runs
    }
    args.output.mkdir(parents=True)
    for name, files in kept.items():
        for place, content in files.items():
            path = args.output / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    main()
