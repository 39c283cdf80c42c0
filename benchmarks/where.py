"""Where in a gap does the future help? The gain of each asked token, by its distance to the next given token.

    acgpt evaluate runs/ac-gpt/model data/mine --records ac-gpt.safetensors
    acgpt evaluate runs/fim/model data/mine --records fim.safetensors
    python benchmarks/where.py ac-gpt.safetensors fim.safetensors

Every asked token with a given token after it was scored twice, with and without the future. The difference, in nats, is
averaged over tokens with the same distance to the next given one: 1 is the last token of a gap. The interval resamples
texts, as in `acgpt evaluate`; there is none if too few texts have such tokens.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, report
from result_tables import where_rows
from safetensors import SafetensorError, safe_open

from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import percentiles, resampled_means
from acgpt.query.conditioning import Conditioning
from acgpt.query.modes import WITHOUT_FUTURE

EDGES = (1, 2, 3, 5, 9, 17, 33, 65, 129)  # lower edges of the bins of distances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="files of acgpt evaluate --records")
    parser.add_argument("--mode", default="infilling", choices=list(WITHOUT_FUTURE))
    parser.add_argument("--seed", type=int, default=0, help="seed of the resampling for the intervals")
    args = parser.parse_args()
    gains_of_model, evaluated = {}, {}
    try:
        for path in args.records:
            metadata, columns = read(path, args.mode)
            name = f"{metadata['method']} ({path})" if len(args.records) > 1 else metadata["method"]
            gains_of_model[name] = gains(columns, metadata["set"]["length"], args.seed)
            evaluated[name] = metadata
        if len({entry["set"]["hash"] for entry in evaluated.values()}) > 1:
            raise InputError("the records use different evaluation datasets: evaluate all models on one.")
    except InputError as error:
        parser.error(str(error))
    record: dict[str, Any] = {"benchmark": "where", "mode": args.mode, "set": metadata["set"], **machine("cpu")}
    record["evaluated"] = {
        name: {key: entry.get(key) for key in ("model", "adapter", "device", "dtype", "versions")}
        for name, entry in evaluated.items()
    }
    record["gains"] = gains_of_model
    texts = f"{metadata['set']['texts']} texts of {metadata['set']['length']} tokens"
    report(f"Gain from the future in nats a token, {args.mode}, {texts}", *where_rows(record), record)


def read(path: Path, mode: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata of a file of records; and the text, position and gain of every token asked in a mode."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("acgpt_records", "null"))
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path} ({error}): name a file of acgpt evaluate --records.") from error
    if metadata is None:
        raise InputError(f"{path} has no records: name a file of acgpt evaluate --records.")
    without = WITHOUT_FUTURE[mode]
    if not {f"{mode}.log_prob", f"{without}.log_prob"} <= columns.keys():
        raise InputError(f"{path} does not answer both {mode} and {without}: name a method that does.")
    if mode == "training" and Conditioning.from_dict(metadata["set"]["conditioning"]).has_unknown:
        raise InputError(
            f"{path} uses a dataset with unknown tokens, which records do not distinguish from given ones."
        )
    gain = columns[f"{mode}.log_prob"] - columns[f"{without}.log_prob"]  # same tokens, same order
    return metadata, {"text": columns[f"{mode}.text"], "position": columns[f"{mode}.position"], "gain": gain}


def gains(columns: dict[str, np.ndarray], length: int, seed: int) -> dict[str, Any]:
    """Return the mean gain by distance, with its interval and the number of tokens."""
    text, position, gain = columns["text"], columns["position"], columns["gain"]
    asked = np.zeros((int(text.max()) + 1, length + 2), dtype=bool)
    asked[text, position] = True
    following = np.zeros(asked.shape, dtype=np.int64)  # next position that is not asked
    following[:, -1] = length + 1
    for index in range(length, 0, -1):
        following[:, index] = np.where(asked[:, index + 1], following[:, index + 1], index + 1)
    end = following[text, position]
    distance = np.where(end <= length, end - position, 0)  # 0 if no given token follows
    bins = {}
    for low, high in pairwise((*EDGES, length + 1)):
        if ((distance >= low) & (distance < high)).any():
            label = str(low) if high == low + 1 else f"{low}–{high - 1}" if high <= length else f"{low} or more"
            bins[label] = (distance >= low) & (distance < high)
    sums = {
        label: (
            np.bincount(text[selected], gain[selected], len(asked)),
            np.bincount(text[selected], minlength=len(asked)),
        )
        for label, selected in bins.items()
    }
    resampled = resampled_means(sums, seed)
    return {
        label: {
            "gain": float(gain[selected].mean()) if np.isfinite(gain[selected]).all() else None,
            "interval": percentiles(resampled[label], len(asked)),
            "tokens": int(selected.sum()),
        }
        for label, selected in bins.items()
    }


if __name__ == "__main__":
    main()
