"""Trained models: collect runs and their evaluations into one result file, a table of curves and a figure.

    acgpt train wikitext103-small-fast corpus=DATA output=runs/ac-gpt
    acgpt train wikitext103-small-fast corpus=DATA output=runs/gpt method=gpt
    acgpt evaluate runs/ac-gpt/model DATA --split test -o runs/ac-gpt/test.json
    acgpt evaluate runs/gpt/model    DATA --split test -o runs/gpt/test.json
    python benchmarks/from_scratch.py runs/ac-gpt runs/gpt --text "what it was trained on" --date 2026-11-15 -o NAME

Writes benchmarks/results/NAME.json, NAME.csv (the learning curves) and docs/NAME.png. Every SPLIT.json in a run's
folder is the evaluation of that split; the run's results.json has the one on its validation split. If both runs kept
sums per document (SPLIT.per-text.json), AC-GPT over GPT has a 95 % interval.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acgpt.evaluation.bootstrap import LEVEL, RESAMPLES, SEED, MeasuredPerplexity, PerText, paired_difference
from acgpt.evaluation.per_text import ENDING, read_per_text

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"ac-gpt": "AC-GPT", "gpt": "GPT"}


def evaluations(run: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the evaluations of a run by split, each with its file."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    splits = {results["recipe"]["eval_split"]: (run / "results.json", results["evaluation"])}
    for path in sorted(run.glob("*.json")):
        if path.stem not in ("results", "config") and not path.name.endswith(ENDING):
            splits[path.stem] = path, json.loads(path.read_text(encoding="utf-8"))
    return {split: entry for split, entry in splits.items() if entry[1] is not None}


def over(ours: Path, theirs: Path) -> dict[str, Any]:
    """Return by split and mode by how many percent one run's perplexity is above another's, with the interval."""

    def measured(entry: tuple[Path, Mapping[str, Any]], per_text: PerText | None, mode: str) -> MeasuredPerplexity:
        return MeasuredPerplexity(entry[1]["modes"][mode]["perplexity"], mode, (per_text,))

    differences: dict[str, Any] = {}
    units = set()
    others = evaluations(theirs)
    for split, own in evaluations(ours).items():
        other = others.get(split)
        if other is None or other[1]["set"]["hash"] != own[1]["set"]["hash"]:
            continue
        per_text = [read_per_text(*entry) for entry in (own, other)]
        units |= {(own[1].get("bootstrap") or {}).get("unit", "texts")}
        both = [mode for mode, answer in own[1]["modes"].items() if answer and other[1]["modes"].get(mode)]
        differences[split] = {}
        for mode in both:
            difference = paired_difference(measured(own, per_text[0], mode), measured(other, per_text[1], mode))
            interval = None if difference.interval is None else [-difference.interval[1], -difference.interval[0]]
            differences[split][mode] = {"percent": -difference.percent, "interval": interval}
    bootstrap = {"resamples": RESAMPLES, "level": LEVEL, "seed": SEED, "unit": " or ".join(sorted(units))}
    return {"bootstrap": bootstrap, "splits": differences}


def collect(run: Path) -> dict[str, Any]:
    """Return what is kept of one run."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    keys = ("steps", "texts", "tokens", "parameters", "loss", "seconds", "tokens_per_second", "wait", "memory_gib")
    names = {results["recipe"]["corpus"]: "DATA", results["recipe"]["output"]: run.name}
    arguments = [
        "=".join(names.get(part, part) for part in argument.split("=")) if "=" in argument else argument
        for argument in results["command"][1:]
    ]
    return {
        "command": shlex.join(["acgpt", *arguments]),
        **{key: results[key] for key in keys},
        "recipe": results["recipe"] | {"corpus": "DATA", "output": run.name},
        "versions": results["versions"],
        "hardware": results["hardware"],
        "splits": {
            name: {
                "set": evaluation["set"]["hash"],
                "texts": evaluation["set"].get("texts"),
                "modes": evaluation["modes"],
                "gains": evaluation["gains"],
            }
            for name, (_, evaluation) in evaluations(run).items()
        },
    }


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Draw loss and held-out perplexity of the methods against tokens read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    colours = {"AC-GPT": "#1b7f5c", "GPT": "#b5651d"}
    for method in dict.fromkeys(row["method"] for row in rows):
        rows_of_method = [row for row in rows if row["method"] == method]
        # Old logs ended with another, larger dataset.
        watched = [row for row in rows_of_method if not row.get("infilling-no-future")]
        points = [
            (float(row["tokens"]) / 1e6, float(row["loss"])) for row in rows_of_method if row["loss"] and row["tokens"]
        ]
        left.plot(*zip(*points, strict=True), color=colours.get(method), linewidth=1, label=method)
        for mode, style in (("unconditional", "-"), ("training", "--"), ("training-no-future", ":")):
            points = [(float(row["tokens"]) / 1e6, float(row[mode])) for row in watched if row[mode] and row["tokens"]]
            if points:
                right.plot(
                    *zip(*points, strict=True), style, color=colours.get(method), marker="o", markersize=3,
                    label=f"{method}, {mode}",
                )  # fmt: skip
    # Cut off the first steps, which would hide the rest.
    highest = min(6.0, max(float(row["loss"]) for row in rows if row["loss"]))
    left.set(xlabel="million tokens read", ylabel="nats per asked token", title="Training loss", ylim=(2.5, highest))
    right.set(
        xlabel="million tokens read", ylabel="perplexity", title="Held-out part of the training text", yscale="log"
    )
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("{x:g}")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--text", required=True, help="what the models were trained on, in a few words")
    parser.add_argument("--date", required=True)
    parser.add_argument("-o", "--output", required=True, help="name of the result")
    args = parser.parse_args()
    runs = {NAMES[json.loads((run / "config.json").read_text())["recipe"]["method"]]: run for run in args.runs}
    records = {name: collect(run) for name, run in runs.items()}
    first = next(iter(records.values()))
    rows: list[dict[str, str]] = []
    for name, run in runs.items():
        with (run / "log.csv").open(newline="", encoding="utf-8") as file:
            rows += [{"method": name, **row} for row in csv.DictReader(file)]
    keep = [row for i, row in enumerate(rows) if i % 5 == 0 or row["unconditional"]]
    results = ROOT / "benchmarks" / "results"
    with (results / f"{args.output}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keep[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(keep)
    draw(rows, ROOT / "docs" / f"{args.output}.png")
    record = {
        "benchmark": "from_scratch",
        "command": "; ".join(record.pop("command") for record in records.values()),
        "text": args.text,
        "hardware": first["hardware"],
        "torch": first["versions"]["torch"],
        "transformers": first["versions"]["transformers"],
        "date": args.date,
        "runs": records,
        **({"over": over(runs["AC-GPT"], runs["GPT"])} if len(runs) == len(NAMES) else {}),
    }
    (results / f"{args.output}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
