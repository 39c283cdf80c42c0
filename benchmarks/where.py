"""Where in a gap is the future worth something? The gain of each asked token, by its distance to what is given next.

    acgpt evaluate runs/ac-gpt/model data/mine --records ac-gpt.safetensors
    acgpt evaluate runs/fim/model data/mine --records fim.safetensors
    python benchmarks/where.py ac-gpt.safetensors fim.safetensors

Every asked token that something given follows was scored twice, with the future and without it. The difference, in
nats, is averaged over the tokens that are as far from the next given one: 1 is the last token of a gap. The interval
resamples texts, as `acgpt evaluate` does; where too few texts have such tokens, there is none.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, report
from render import where_rows
from safetensors import SafetensorError, safe_open

from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import percentiles, resampled_means
from acgpt.query.conditioning import Conditioning
from acgpt.query.modes import WITHOUT_FUTURE

EDGES = (1, 2, 3, 5, 9, 17, 33, 65, 129)  # distances from each of these up to the next one are a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="what acgpt evaluate --records has written")
    parser.add_argument("--mode", default="infilling", choices=list(WITHOUT_FUTURE))
    parser.add_argument("--seed", type=int, default=0, help="of the resampling behind the intervals")
    args = parser.parse_args()
    found, evaluated = {}, {}
    try:
        for path in args.records:
            about, columns = read(path, args.mode)
            name = f"{about['method']} ({path})" if len(args.records) > 1 else about["method"]
            found[name] = gains(columns, about["set"]["length"], args.seed)
            evaluated[name] = about
        if len({each["set"]["hash"] for each in evaluated.values()}) > 1:
            raise InputError("the records are of several evaluation sets: evaluate all models on one.")
    except InputError as error:
        parser.error(str(error))
    record: dict[str, Any] = {"benchmark": "where", "mode": args.mode, "set": about["set"], **machine("cpu")}
    record["evaluated"] = {
        name: {key: each.get(key) for key in ("model", "adapter", "device", "dtype", "versions")}
        for name, each in evaluated.items()
    }
    record["gains"] = found
    texts = f"{about['set']['texts']} texts of {about['set']['length']} tokens"
    report(f"Gain from the future in nats a token, {args.mode}, {texts}", *where_rows(record), record)


def read(path: Path, mode: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a file of records is about; and of every token asked in a mode its text, position, and what it gained."""
    try:
        with safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {}).get("acgpt_records", "null"))
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path} ({error}): name what acgpt evaluate --records has written.") from error
    if about is None:
        raise InputError(f"{path} has no records: name what acgpt evaluate --records has written.")
    without = WITHOUT_FUTURE[mode]
    if not {f"{mode}.log_prob", f"{without}.log_prob"} <= columns.keys():
        raise InputError(f"{path} does not answer both {mode} and {without}: name a method that does.")
    if mode == "training" and Conditioning.from_dict(about["set"]["conditioning"]).hides:
        raise InputError(f"{path} is of a set with unknown tokens: records do not tell them from those that are given.")
    gain = columns[f"{mode}.log_prob"] - columns[f"{without}.log_prob"]  # of the same tokens in the same order
    return about, {"text": columns[f"{mode}.text"], "position": columns[f"{mode}.position"], "gain": gain}


def gains(columns: dict[str, np.ndarray], length: int, seed: int) -> dict[str, Any]:
    """The mean gain by distance, with its interval and the number of tokens."""
    text, position, gain = columns["text"], columns["position"], columns["gain"]
    asked = np.zeros((int(text.max()) + 1, length + 2), dtype=bool)
    asked[text, position] = True
    following = np.zeros(asked.shape, dtype=np.int64)  # the next position that is not asked
    following[:, -1] = length + 1
    for place in range(length, 0, -1):
        following[:, place] = np.where(asked[:, place + 1], following[:, place + 1], place + 1)
    end = following[text, position]
    distance = np.where(end <= length, end - position, 0)  # 0 where nothing is given up to the end of the text
    chosen = {}
    for low, high in pairwise((*EDGES, length + 1)):
        if ((distance >= low) & (distance < high)).any():
            label = str(low) if high == low + 1 else f"{low}–{high - 1}" if high <= length else f"{low} or more"
            chosen[label] = (distance >= low) & (distance < high)
    sums = {
        label: (np.bincount(text[those], gain[those], len(asked)), np.bincount(text[those], minlength=len(asked)))
        for label, those in chosen.items()
    }
    resampled = resampled_means(sums, seed)
    return {
        label: {
            "gain": float(gain[those].mean()) if np.isfinite(gain[those]).all() else None,
            "interval": percentiles(resampled[label]) if len(asked) > 1 else None,
            "tokens": int(those.sum()),
        }
        for label, those in chosen.items()
    }


if __name__ == "__main__":
    main()
