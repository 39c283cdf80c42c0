"""Keep what finished runs have found: records, logs and evaluations, no weights, as folders of the same form.

    python benchmarks/keep_runs.py runs/ac runs/gpt --date 2026-11-15 -o benchmarks/results/NAME
    acgpt report benchmarks/results/NAME -o report

Folders of the machine on which they ran are named by their last part: runs/ac, data/wiki.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def keep(run: Path, date: str, output: Path) -> None:
    """Copy the small files of one run."""
    recipe = json.loads((run / "results.json").read_text(encoding="utf-8"))["recipe"]
    corpus = recipe["corpus"].rstrip("/")
    places = {recipe["output"].rstrip("/"): f"runs/{run.name}", corpus: f"data/{Path(corpus).name}"}
    folder = output / run.name
    folder.mkdir(parents=True)
    for path in sorted([*run.glob("*.json"), *run.glob("*.csv")]):
        text = path.read_text(encoding="utf-8")
        for place, name in places.items():
            text = text.replace(place, name)
        if path.suffix == ".json":
            content = {"date": date, **json.loads(text)} if path.name == "results.json" else json.loads(text)
            for holder in (content, *content.get("sittings", ())):
                if "command" in holder:
                    holder["command"] = ["acgpt", *holder["command"][1:]]
            text = json.dumps(content, separators=(",", ":")) + "\n"
        (folder / path.name).write_text(text, encoding="utf-8")


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
