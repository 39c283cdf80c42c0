"""Does token healing give back enough, and how much? Kept tokens next to random gaps, against those of the whole text.

    python benchmarks/healing.py --tokenizer gpt2 --tokenizer default --text prose.txt
    python benchmarks/healing.py --tokenizer FOLDER --spans 10000

Each text is a random part of a file, with a random span. The text in the span stays, or is replaced by a random part of
any file. The kept tokens before and after the span must be the first and the last tokens of the whole text. Without
`--text`, the files are modules of Python's standard library.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import shlex
import statistics
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import machine, report
from transformers import PreTrainedTokenizerBase

from acgpt.data.tokenizer import named
from acgpt.query.healing import encode_inside, stable_end, stable_start
from acgpt.query.text import encode_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="append", help="a name or a folder; default: gpt2 and default")
    parser.add_argument("--text", type=Path, action="append", help="a text file; may be given several times")
    parser.add_argument("--spans", type=int, default=2000, help="number of spans per tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.text:
        files = {path.name: path.read_bytes().decode(errors="ignore") for path in args.text}  # keeps CR LF
    else:
        files = {module.__name__: inspect.getsource(module) for module in (argparse, inspect, json, shlex, textwrap)}
    results = {
        name: measure(named(name), files, args.spans, random.Random(args.seed))
        for name in args.tokenizer or ["gpt2", "default"]
    }
    rows, exceptions = [], []
    for name, result in results.items():
        before, after = result["given_back"]
        rows.append(
            [
                Path(name).name,
                f"{result['share']:.3%}",
                f"{before:.2f}",
                f"{after:.2f}",
                f"{result['milliseconds']:.1f}",
            ]
        )
        exceptions += [[Path(name).name, *map(str, entry.values())] for entry in result["exceptions"]]
    columns = ["tokenizer", "right", "tokens given back before", "after", "ms per border"]
    record = {"benchmark": "healing", "spans": args.spans, **machine("cpu"), "results": results}
    more = (["tokenizer", "exception", "spans", "example"], exceptions) if exceptions else None
    report(f"{args.spans} spans in {len(files)} files", columns, rows, record, more)


def measure(
    tokenizer: PreTrainedTokenizerBase, files: dict[str, str], spans: int, generator: random.Random
) -> dict[str, Any]:
    """Try random spans. Return the share of right ones, means, and the exceptions by kind with an example each."""
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    given_back: tuple[list[int], list[int]] = [], []
    seconds = 0.0
    stable_end("", tokenizer)  # builds the vocabulary
    for _ in range(spans):
        name = generator.choice(list(files))
        before, span, after = cut(files[name], generator)
        if generator.random() < 0.5:
            _, span, _ = cut(files[generator.choice(list(files))], generator)
        begun = time.perf_counter()
        end, start = stable_end(before, tokenizer), stable_start(after, tokenizer)
        seconds += time.perf_counter() - begun
        first, last = encode_text(before[:end], tokenizer), encode_inside(after[start:], tokenizer)
        given_back[0].append(len(encode_text(before, tokenizer)) - len(first))
        given_back[1].append(len(encode_inside(after, tokenizer)) - len(last))
        whole = encode_text(before + span + after, tokenizer)
        wrong = [
            side
            for side, right in (
                ("before", whole[: len(first)] == first),
                ("after", whole[len(whole) - len(last) :] == last),
                ("overlap", len(first) + len(last) <= len(whole)),
            )
            if not right
        ]
        if wrong:
            kind = f"{name}: {', '.join(wrong)}"
            kinds[kind] += 1
            excerpt = f"{before[:end][-12:]!r} {before[end:]!r} {span[:12]!r}…{span[-12:]!r} {after[:start]!r} "
            examples.setdefault(kind, excerpt + repr(after[start:][:12]))
    return {
        "share": 1 - kinds.total() / spans,
        "given_back": [statistics.fmean(counts) for counts in given_back],
        "milliseconds": 1000 * seconds / spans / 2,
        "exceptions": [{"kind": k, "spans": n, "example": examples[k]} for k, n in kinds.most_common()],
    }


def cut(text: str, generator: random.Random) -> tuple[str, str, str]:
    """Return a random part of a text: what is before a span, the span, and what is after it."""
    sizes = [
        generator.choice([0, 3, 20, 100, 1000]),
        generator.choice([0, 1, 4, 30]),
        generator.choice([0, 3, 20, 100, 1000]),
    ]
    sizes = [generator.randint(size // 2, size) for size in sizes]
    begin = generator.randrange(max(1, len(text) - sum(sizes)))
    a, b, c = begin + sizes[0], begin + sizes[0] + sizes[1], begin + sum(sizes)
    return text[begin:a], text[a:b], text[b:c]


if __name__ == "__main__":
    main()
