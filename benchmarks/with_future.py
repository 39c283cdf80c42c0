"""Gain from the future: perplexity of gaps with and without the future, with and without the adapter.

    python benchmarks/with_future.py                    the embedded default and its adapter, on the texts of the demo
    python benchmarks/with_future.py data/mine          on gaps in held-out text, as in benchmarks/gaps.py

The same tokens are scored twice: left to right (past only), and with copies of all given tokens (with future). See
benchmarks/copies.py for other conditioning sets, and `acgpt evaluate` for the paper's five modes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from common import machine, report
from gaps import held_out
from result_tables import worth_rows

import acgpt
from acgpt.cli.demo_table import demo_texts, worth
from acgpt.models.language_model import Question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", help="a corpus of acgpt prepare; default: the texts of the demo")
    parser.add_argument("--splits", nargs="+", default=["prose=validation", "code=code"], metavar="KIND=SPLIT")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--adapter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--gaps", type=int, default=200, help="number of gaps of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lm = acgpt.load(args.model, args.adapter, args.device, args.dtype)
    texts: Mapping[str, Sequence[Question]] = demo_texts()
    if args.corpus:
        pairs = (pair.partition("=") for pair in args.splits)
        texts = {kind: held_out(args.corpus, split, lm, args.gaps, args.seed) for kind, _, split in pairs}
    results = worth(lm, texts)
    name = args.adapter or args.model or "the embedded default"
    record: dict[str, Any] = {"benchmark": "with_future", "model": args.model or "default", "adapter": args.adapter}
    record |= {"texts": {kind: len(queries) for kind, queries in texts.items()}, **machine(lm.model.device.type)}
    record["worth"] = {
        model: {kind: asdict(result) for kind, result in kinds.items()} for model, kinds in results.items()
    }
    report(f"{name}, on {args.corpus or 'the texts of the demo'}", *worth_rows(record["worth"]), record)


if __name__ == "__main__":
    main()
