"""Scoring: every asked token of a text in one forward pass, against one forward pass per token.

    python benchmarks/scoring.py --size 124M --texts 64 --tokens 1024
    python benchmarks/scoring.py --device cpu --size tiny --texts 4 --tokens 128

Each text has 30 % of its tokens given, at random positions; all others are asked. "One pass a token" is the cost of
methods without a single-pass likelihood, such as masked language models: a forward pass over the text for each asked
token, batched over texts, with the same layout. It is timed on a sample of the tokens.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from common import BOS, SIZES, VOCABULARY, Parser, build_model, clock, print_record

from acgpt import Query
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import choose_backend, possible_backends
from acgpt.engine.engine import Engine


def main() -> None:
    parser = Parser(__doc__)
    parser.add_device()
    parser.add_argument("--size", default="124M", choices=SIZES)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    model = build_model(args.size, args.device)
    check_model(model)
    length, rng = args.tokens - 1, random.Random(0)
    queries = []
    for _ in range(args.texts):
        given = set(rng.sample(range(length), int(0.3 * length)))
        queries.append(Query([rng.randrange(VOCABULARY) for _ in range(length)], [t in given for t in range(length)]))
    per_text = len(queries[0].asked_positions)

    @torch.inference_mode()
    def score(questions: list[Query], name: str, future: bool = True) -> None:
        Engine(model, bos=BOS, backend=name, budget=2**30 // VOCABULARY).log_probs(questions, future=future)

    def one_token_each(rank: int) -> list[Query]:
        single = []
        for query in queries:
            position = query.asked_positions[rank]
            asked_here = [p == position for p in range(1, length + 1)]
            given = [g or (a and not here) for g, a, here in zip(query.given, query.asked, asked_here, strict=True)]
            single.append(Query(query.tokens, given, asked_here))
        return single

    fast = choose_backend(model)
    seconds = {f"one pass, {fast}": clock(lambda: score(queries, fast))}
    for name in possible_backends(model)[1:]:
        seconds[f"one pass, {name}"] = clock(partial(score, queries, name))
    seconds["one pass, past only"] = clock(lambda: score(queries, fast, future=False))
    times = [clock(partial(score, one_token_each(int(i * (per_text - 1) / 4)), fast), 1) for i in range(5)]
    seconds["one pass a token"] = sum(times) / len(times) * per_text
    rows = [
        {
            "row": name,
            "seconds": s,
            "texts_per_second": args.texts / s,
            "asked_tokens_per_second": args.texts * per_text / s,
            "relative_time": s / seconds[f"one pass, {fast}"],
        }
        for name, s in seconds.items()
    ]
    print_record("scoring", f"{args.size}, {args.texts} texts", rows, args.device, tokens=args.tokens)


if __name__ == "__main__":
    main()
