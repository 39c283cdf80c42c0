"""Scoring: every asked token of a text in one forward pass, against one forward pass per token.

    python benchmarks/scoring.py --device cuda --size 124M --texts 64 --tokens 1024
    python benchmarks/scoring.py --device cpu --size tiny --texts 4 --tokens 128

Each text has 30 % of its tokens given, at random positions; all others are asked. "One pass a token" is the cost of
methods without a single-pass likelihood, such as masked language models: a forward pass over the text for each asked
token, batched over texts, with the same layout. It is timed on a sample of the tokens.
"""

from __future__ import annotations

import argparse
import random
from functools import partial

import torch
from common import VOCABULARY, build_model, clock, machine, report

from acgpt import Query
from acgpt.engine.attention import check_model, choose_backend, possible_backends
from acgpt.engine.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="124M")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = build_model(args.size, args.device, dtype)
    check_model(model)
    length, rng = args.tokens - 1, random.Random(0)
    queries = []
    for _ in range(args.texts):
        given = set(rng.sample(range(length), int(0.3 * length)))
        queries.append(Query([rng.randrange(VOCABULARY) for _ in range(length)], [t in given for t in range(length)]))
    asked = sum(len(query.asked_positions) for query in queries)
    budget = 2**32 // (4 * VOCABULARY)

    @torch.inference_mode()
    def score(questions: list[Query], name: str, future: bool = True) -> None:
        Engine(model, bos=50256, backend=name, budget=budget).log_probs(questions, future=future)

    def one_token_each(rank: int) -> list[Query]:
        single = []
        for query in queries:
            position = query.asked_positions[rank]
            asked_here = [p == position for p in range(1, length + 1)]
            given = [g or (a and not here) for g, a, here in zip(query.given, query.asked, asked_here, strict=True)]
            single.append(Query(query.tokens, given, asked_here))
        return single

    fast = choose_backend(model)
    seconds = {f"one pass, {fast}": clock(lambda: score(queries, fast), repeats=args.repeats)}
    for name in possible_backends(model)[1:]:
        seconds[f"one pass, {name}"] = clock(partial(score, queries, name), repeats=args.repeats)
    seconds["one pass, past only"] = clock(lambda: score(queries, fast, future=False), repeats=args.repeats)
    ranks = [int(i * (len(queries[0].asked_positions) - 1) / 4) for i in range(5)]
    times = [clock(partial(score, one_token_each(rank), fast), repeats=1) for rank in ranks]
    seconds["one pass a token"] = sum(times) / len(times) * len(queries[0].asked_positions)

    best = seconds[f"one pass, {fast}"]
    rows = [
        [name, f"{s:.3f}", f"{args.texts / s:,.1f}", f"{asked / s:,.0f}", f"{s / best:.2f}"]
        for name, s in seconds.items()
    ]
    record = {
        "benchmark": "scoring",
        **vars(args),
        **machine(args.device),
        "seconds": seconds,
        "texts_per_second": {name: args.texts / s for name, s in seconds.items()},
        "asked_tokens_per_second": {name: asked / s for name, s in seconds.items()},
        "over_one_pass": {name: s / best for name, s in seconds.items()},
    }
    title = f"Scoring {args.texts} texts of {args.tokens} tokens, 30 % given, {args.size}, {dtype}, "
    columns = ["", "seconds", "texts/s", "asked tokens/s", "× the time of one pass"]
    report(title + machine(args.device)["hardware"], columns, rows, record)


if __name__ == "__main__":
    main()
