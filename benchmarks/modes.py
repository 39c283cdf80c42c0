"""Is one adapter better than another? Perplexities of both in all modes, on several texts, with paired differences.

    acgpt evaluate default data/eval --adapter FOLDER --split test --length 1023 --device cuda -o default.test.json
    python benchmarks/modes.py --before test=previous.test.json --after test=default.test.json

The files are those of `acgpt evaluate -o`, of the same evaluation datasets, with the sums per document beside them
(FILE.per-text.json). A difference is by how many percent the perplexity of the second adapter is below that of the
first. Its 95 % interval resamples documents (or texts, see `acgpt evaluate`), the same ones for both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import BOOTSTRAP, Parser, by_label, report
from result_tables import mode_rows

from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import MeasuredPerplexity, PerText, paired_difference
from acgpt.evaluation.per_text import read_per_text


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", nargs="+", required=True, metavar="TEXT=FILE", help="results of the first adapter")
    parser.add_argument("--after", nargs="+", required=True, metavar="TEXT=FILE", help="results of the second one")
    parser.add_argument("--names", nargs=2, default=["previous", "default"], help="names of the adapters")
    parser.add_argument("--hardware", default="unknown", help="what the evaluations ran on, for the record")
    args = parser.parse_args()
    try:
        before, after = by_label(args.before, "--before"), by_label(args.after, "--after")
        if set(before) != set(after):
            raise InputError("--before and --after must name the same texts.")
        texts = {text: compare(Path(before[text]), Path(after[text]), args.names) for text in before}
        first = read(Path(next(iter(after.values()))))[0]
    except InputError as error:
        parser.error(str(error))
    record = {
        "benchmark": "modes",
        "adapters": args.names,
        "bootstrap": BOOTSTRAP,
        "hardware": args.hardware,
        **{name: first["versions"][name] for name in ("torch", "transformers", "python")},
        "date": first["date"][:10],
        "texts": texts,
    }
    report("perplexity", *mode_rows(record), record)


def read(path: Path) -> tuple[dict[str, Any], PerText]:
    """Read the results of an evaluation and its sums per document.

    Raises:
        InputError: A file is missing, or is something else.
    """
    try:
        evaluation = json.loads(path.read_text(encoding="utf-8"))
        per_text = read_per_text(path, evaluation)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if per_text is None:
        raise InputError(f"{path} has no sums per document beside it: run `acgpt evaluate` with -o again.")
    return evaluation, per_text


def compare(before: Path, after: Path, names: list[str]) -> dict[str, Any]:
    """Return the perplexities of two evaluations, how far the second are below the first, and the gains of each."""
    (first, theirs), (second, ours) = read(before), read(after)
    modes = {}
    for mode in second["modes"]:
        if mode not in theirs.modes or mode not in ours.modes:
            continue
        difference = paired_difference(MeasuredPerplexity.of([ours], mode), MeasuredPerplexity.of([theirs], mode))
        perplexities = dict(zip(names, (entry["modes"][mode]["perplexity"] for entry in (first, second)), strict=True))
        below = {"percent": difference.percent, "interval": difference.interval and list(difference.interval)}
        modes[mode] = {"perplexity": perplexities, "below": below, "tokens": second["modes"][mode]["tokens"]}
    dataset = {key: second["set"][key] for key in ("hash", "texts", "length", "r_max", "split")}
    dataset["unit"] = ours.unit
    gains = {name: entry["gains"] for name, entry in zip(names, (first, second), strict=True)}
    return {"set": dataset, "modes": modes, "gains": gains}


if __name__ == "__main__":
    main()
