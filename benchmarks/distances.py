"""What is the future worth by distance, and does that predict its worth elsewhere? For one model, on some texts.

    python benchmarks/distances.py default data/eval --texts test:1023 reviews:255 abstracts:255 code:255 --device cuda

On each text the model is asked with both placements of blocks and in infilling, at several r_max. The gain by distance
to the next given token on one distribution (the paper's blocks at --curve) and the number of tokens at each distance in
another one predict the gain there, which is measured, too. Intervals resample documents, see `acgpt evaluate`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from typing import Any

from common import BOOTSTRAP, Parser, check_limit, load_adapted, machine, report
from result_tables import distance_rows

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation.distance import BinnedGain, predicted_gain

KEPT = ("hash", "texts", "length", "documents", "r_max", "split")  # of a dataset, for the record


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as in `acgpt evaluate`")
    parser.add_argument("corpus", help="a corpus of acgpt prepare, with the model's tokenizer")
    parser.add_argument("--texts", nargs="+", required=True, metavar="SPLIT:LENGTH", help="splits, and tokens per text")
    parser.add_argument("--r-max", nargs="+", type=float, default=[0.2, 0.6, 1.0], metavar="R")
    parser.add_argument("--curve", type=float, default=0.6, metavar="R", help="r_max of the curve that predicts")
    parser.add_argument("--limit", type=int, help="use the first texts only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    try:
        check_limit(args.limit)
        if args.curve not in args.r_max:
            raise InputError(f"--curve {args.curve:g} is not one of --r-max {' '.join(map(str, args.r_max))}.")
        corpus = Corpus.open(args.corpus)
        splits = [text_of(text) for text in args.texts]
        if len({split for split, _ in splits}) < len(splits):
            raise InputError(f"--texts {' '.join(args.texts)}: name every split once.")
        lm = load_adapted(args.model, None, args.device, args.dtype)
        texts = {split: measure(lm, corpus, split, length, args) for split, length in splits}
    except InputError as error:
        parser.error(str(error))
    device = lm.model.device.type
    record = {
        "benchmark": "distances",
        "model": args.model,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "curve": args.curve,
        "bootstrap": BOOTSTRAP,
        **machine(device),
        "texts": texts,
    }
    report("Gain from the future, predicted from distances and measured", *distance_rows(record), rounded(record))


def text_of(text: str) -> tuple[str, int]:
    """Return the split and the length in SPLIT:LENGTH."""
    split, _, length = text.partition(":")
    if not split or not length.isdigit() or int(length) < 1:
        raise InputError(f"--texts {text}: write SPLIT:LENGTH, as in test:1023.")
    return split, int(length)


def measure(
    lm: acgpt.LanguageModel, corpus: Corpus, split: str, length: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the gains on one split by distribution, with what the first curve predicts."""
    gains: dict[str, Any] = {}
    dataset: dict[str, Any] = {}
    for r_max in [args.curve, *(other for other in args.r_max if other != args.curve)]:
        for placement in ("gaps", "stretches"):
            modes = ["training", "training-no-future"]
            modes += ["infilling", "infilling-no-future"] if placement == "gaps" else []
            print(f"{split}, r_max {r_max:g}, {placement}", file=sys.stderr, flush=True)
            result = acgpt.evaluate(
                lm,
                corpus,
                split=split,
                length=length,
                r_max=r_max,
                limit=args.limit,
                modes=modes,
                conditioning=None if placement == "gaps" else {"placement": placement},
            )
            dataset = dataset or {key: result["set"][key] for key in KEPT} | {"unit": result["bootstrap"]["unit"]}
            for mode, name in (("training", placement), ("infilling", "infilling")):
                if mode in modes:
                    gains[f"{name} {r_max:g}"] = gain_in(result, mode)
    first = gains[f"gaps {args.curve:g}"]["by_distance"]
    curve = {label: BinnedGain(**entry) for label, entry in first.items() if entry["gain"] is not None}
    for entry in gains.values():
        try:
            counts = {label: part["tokens"] for label, part in entry["by_distance"].items()}
            entry["predicted"] = predicted_gain(curve, counts)
        except InputError:  # a bin has no token on the curve
            entry["predicted"] = None
    return {"set": dataset, "gains": gains}


def gain_in(result: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the gain of a mode in nats and in percent, and by distance."""
    nats = {name: result["modes"][name]["mean_nll"] for name in (mode, f"{mode}-no-future")}
    bins = result["by_distance"][mode]
    percent = result["gains"][mode]
    return {
        "perplexity": [math.exp(value) for value in nats.values()],
        "measured": nats[f"{mode}-no-future"] - nats[mode],
        "percent": percent["percent"],
        "interval": percent["interval"],
        "by_distance": bins["distance"],
    }


def rounded(value: Any) -> Any:
    """Return a record with its numbers to five decimals, which keeps the file small."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
