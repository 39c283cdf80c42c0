"""Which token should be at position 0? Perplexity for each candidate, for models whose tokenizer leaves it open.

    python benchmarks/bos.py prose.txt                  the embedded default, on paragraphs of a text file and on code
    python benchmarks/bos.py --model FOLDER prose.txt

The code is the source of modules of Python's standard library. Each text is cut to 256 tokens and scored left to right.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import textwrap
from pathlib import Path

from common import machine, paragraphs, perplexity, report

import acgpt
from acgpt.query.text import encode_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "prose", type=Path, nargs="*", help="text files; only paragraphs of over 300 characters are used"
    )
    parser.add_argument("--model")
    parser.add_argument("--paragraphs", type=int, default=100)
    args = parser.parse_args()
    lm = acgpt.load(args.model, adapter=False)
    kinds = {
        "prose": paragraphs(args.prose, args.paragraphs),
        "code": [inspect.getsource(module) for module in (argparse, inspect, json, shlex, textwrap)],
    }
    vocabulary = lm.tokenizer.get_vocab()
    newline = encode_text("\n", lm.tokenizer)[-1]
    candidates = sorted(
        {*lm.tokenizer.all_special_ids, *([vocabulary["<|endoftext|>"]] if "<|endoftext|>" in vocabulary else [])}
    )
    table: dict[str, dict[str, float]] = {}
    for bos in [*candidates, newline]:
        model = acgpt.LanguageModel(lm.model, lm.tokenizer, bos=bos)
        table[lm.tokenizer.convert_ids_to_tokens(bos)] = {
            kind: perplexity(model.log_prob(questions(lm, texts))) for kind, texts in kinds.items() if texts
        }
    record = {"benchmark": "bos", "model": args.model or "default", **machine("cpu"), "perplexity": table}
    rows = [[repr(token), *(f"{value:.2f}" for value in row.values())] for token, row in table.items()]
    columns = ["token at position 0", *(f"perplexity, {kind}" for kind in next(iter(table.values())))]
    report(
        f"{args.model or 'the embedded default'}: {len(kinds['prose'])} paragraphs, {len(kinds['code'])} modules",
        columns,
        rows,
        record,
    )


def questions(lm: acgpt.LanguageModel, texts: list[str]) -> list[acgpt.Query]:
    """Return a query per text with all tokens asked."""
    ids = [encode_text(text, lm.tokenizer)[:256] for text in texts]
    return [acgpt.Query(i, given=[False] * len(i)) for i in ids]


if __name__ == "__main__":
    main()
