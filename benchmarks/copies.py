"""Does the future help a model? Perplexity of the same tokens from the past alone, and with copies of given tokens.

    python benchmarks/copies.py prose.txt                      the embedded default
    python benchmarks/copies.py --model FOLDER prose.txt

Paragraphs are cut to 256 tokens. "Scattered" gives 30 % of the tokens, at random positions; "infilling" gives the first
and the last third and asks for the middle.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from common import machine, paragraphs, perplexity, report

import acgpt
from acgpt.query.text import encode_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "prose", type=Path, nargs="+", help="text files; only paragraphs of over 300 characters are used"
    )
    parser.add_argument("--model")
    parser.add_argument("--adapter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--paragraphs", type=int, default=100)
    args = parser.parse_args()
    lm = acgpt.load(args.model, args.adapter or False, args.device)
    texts = [encode_text(text, lm.tokenizer)[:256] for text in paragraphs(args.prose, args.paragraphs)]
    rng = random.Random(0)
    kinds = {
        "scattered": [acgpt.Query(ids, [rng.random() < 0.3 for _ in ids]) for ids in texts],
        "infilling": [
            acgpt.Query(ids, [not len(ids) // 3 <= i < 2 * len(ids) // 3 for i in range(len(ids))]) for ids in texts
        ],
    }
    table = {
        kind: {
            name: perplexity(lm.log_prob(queries, future=future))
            for name, future in (("past only", False), ("copies", True))
        }
        for kind, queries in kinds.items()
    }
    rows = [[kind, *(f"{value:.2f}" for value in row.values())] for kind, row in table.items()]
    name = args.adapter or args.model or "the embedded default"
    record = {"benchmark": "copies", "model": name, "paragraphs": len(texts), **machine(lm.model.device.type)}
    record["perplexity"] = table
    report(f"{name}, {len(texts)} paragraphs", ["", "past only", "with copies"], rows, record)


if __name__ == "__main__":
    main()
