"""Does the future improve fills? Fill gaps in held-out text with and without the text that follows them.

    python benchmarks/gaps.py data/mine                                      the embedded default and its adapter
    python benchmarks/gaps.py data/mine --adapter FOLDER --splits prose=test code=code --device cuda

A gap is 4 to 12 tokens, with 100 to 200 tokens on either side, from texts that do not overlap and are fixed by the
seed. The model fills each gap twice, with the same length and seed: with copies of all given tokens (future), and left
to right (past). The causal model without the adapter then judges both: the fill wins whose whole text has the higher
log-probability; ties count half. The 95 % intervals resample gaps. The control is the model without its adapter, asked
in the same two ways. Such a judge may prefer a bland fill to the true one, so the log-probability of the true text and
the share of true tokens in a fill are shown as well.
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import numpy as np
from common import machine, report
from result_tables import gap_rows

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.models.adapters import Choice
from acgpt.models.metadata import tokenizer_hash

SIDES, GAP = (100, 200), (4, 12)  # tokens: least and most
RESAMPLES = 10_000
COMPARISONS = {  # name: first, second
    "adapted: future against past": ("adapted, future", "adapted, past"),
    "unadapted: future against past": ("unadapted, future", "unadapted, past"),
    "adapted, future, against unadapted, past": ("adapted, future", "unadapted, past"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="a corpus of acgpt prepare, with the model's tokenizer")
    parser.add_argument("--splits", nargs="+", default=["prose=validation", "code=code"], metavar="KIND=SPLIT")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--adapter", help="default: that of the embedded model; other models run only the control")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype", default="float32", help="default: float32, because sums in half precision depend on the batch"
    )
    parser.add_argument("--gaps", type=int, default=200, help="number of gaps of each kind")
    parser.add_argument("--ways", nargs="+", choices=["sampled", "greedy"], default=["sampled", "greedy"])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="number of gaps of each kind whose fills are printed")
    args = parser.parse_args()
    lm = acgpt.load(args.model, args.adapter, args.device, args.dtype)
    kinds = {}
    for kind, _, split in (pair.partition("=") for pair in args.splits):
        kinds[kind] = held_out(args.corpus, split, lm, args.gaps, args.seed)
    decodings = {"sampled": {"temperature": args.temperature, "top_p": args.top_p}, "greedy": {"temperature": 0.0}}
    decodings = {decoding: decodings[decoding] for decoding in args.ways}
    measured = {
        decoding: {kind: contest(lm, texts, args.seed, args.show, **sampling) for kind, texts in kinds.items()}
        for decoding, sampling in decodings.items()
    }
    results = {
        decoding: {kind: summary(scores, args.seed) for kind, scores in with_pooled(by_kind).items()}
        for decoding, by_kind in measured.items()
    }
    record = {
        "benchmark": "gaps",
        "model": args.model or "default",
        "adapter": args.adapter,
        "gaps": {kind: len(texts) for kind, texts in kinds.items()},
        "sampling": {"temperature": args.temperature, "top_p": args.top_p, "seed": args.seed},
        **machine(lm.model.device.type),
        "results": results,
    }
    name = args.adapter or args.model or "the embedded default"
    report(f"{name}, {args.gaps} gaps of each kind", *gap_rows(results), record)


# ---- the gaps -------------------------------------------------------------------------------------------------------


def held_out(folder: str, split: str, lm: acgpt.LanguageModel, count: int, seed: int) -> list[acgpt.Query]:
    """Return gaps in texts of a split, fixed by the seed; every query has its true tokens."""
    corpus = Corpus.open(folder)
    if corpus.manifest["tokenizer_hash"] != tokenizer_hash(lm.tokenizer):
        raise SystemExit(f"{folder} was prepared with another tokenizer than the model's: prepare it again.")
    tokens = corpus.tokens(split)[:]
    ends = np.flatnonzero(tokens == corpus.manifest["eos_token_id"])
    longest = 2 * SIDES[1] + GAP[1]
    windows = [
        tokens[start : start + longest].tolist()
        for last_end, end in itertools.pairwise([-1, *ends.tolist(), len(tokens)])
        for start in range(last_end + 1, end - longest + 1, longest)
    ]
    if len(windows) < count:
        raise SystemExit(f"the split {split} of {folder} has only {len(windows)} gaps: use --gaps {len(windows)}")
    rng = random.Random(seed)
    return [make_query(window, rng) for window in rng.sample(windows, count)]


def make_query(window: list[int], rng: random.Random) -> acgpt.Query:
    """Return a text with one gap."""
    left, gap, right = (rng.randint(*bounds) for bounds in (SIDES, GAP, SIDES))
    given = [True] * left + [False] * gap + [True] * right
    return acgpt.Query(window[: len(given)], given)


# ---- filling and judging --------------------------------------------------------------------------------------------


def contest(
    lm: acgpt.LanguageModel, texts: list[acgpt.Query], seed: int, show: int, **sampling: float
) -> dict[str, dict[str, list[float]]]:
    """Fill every gap and judge the fills.

    Returns:
        By contender, and for the "true" text: the log-probability of each text, and its share of true tokens.
    """
    fills: dict[str, list[acgpt.Query]] = {"true": texts}
    blanks = [acgpt.Query([t if g else None for t, g in zip(q.tokens, q.given, strict=True)], q.given) for q in texts]
    models: dict[str, Choice] = {"unadapted": False} | ({"adapted": next(iter(lm.adapters))} if lm.adapters else {})
    for name, adapter in models.items():
        for direction, future in (("past", False), ("future", True)):
            samples = lm.sample(blanks, seed=seed, future=future, adapter=adapter, **sampling)
            fills[f"{name}, {direction}"] = [sample[0].query for sample in samples]
    for number in range(show):
        print_fills(lm, {name: queries[number] for name, queries in fills.items()})
    judged = judge(lm, [query for queries in fills.values() for query in queries])
    return {
        name: {
            "log_prob": [judged[query.tokens] for query in queries],
            "right": [token_accuracy(query, text) for query, text in zip(queries, texts, strict=True)],
        }
        for name, queries in fills.items()
    }


def judge(lm: acgpt.LanguageModel, texts: list[acgpt.Query]) -> dict[tuple[int | None, ...], float]:
    """Return log p of each whole text, by its tokens, read left to right by the model without an adapter."""
    tokens = list(dict.fromkeys(text.tokens for text in texts))  # each once, so that equal texts tie
    scores = lm.log_prob([acgpt.Query(t, given=[False] * len(t)) for t in tokens], future=False, adapter=False)
    return {t: score.log_prob for t, score in zip(tokens, scores, strict=True)}


def token_accuracy(text: acgpt.Query, true: acgpt.Query) -> float:
    """Return the share of a fill's tokens that equal the true text's."""
    indices = [p - 1 for p in true.asked_positions]
    return sum(text.tokens[p] == true.tokens[p] for p in indices) / len(indices)


def print_fills(lm: acgpt.LanguageModel, fills: dict[str, acgpt.Query]) -> None:
    """Print a gap, some of the text around it, and its fills."""
    (first, last), tokens = fills["true"].blanks[0], fills["true"].tokens
    before, after = (lm.tokenizer.decode(part) for part in (tokens[first - 21 : first - 1], tokens[last : last + 20]))
    print(f"{before!r} … {after!r}")
    for name, query in fills.items():
        print(f"  {name:16} {lm.tokenizer.decode(query.tokens[first - 1 : last])!r}")


# ---- the numbers ----------------------------------------------------------------------------------------------------


def with_pooled(kinds: dict[str, Any]) -> dict[str, Any]:
    """Add all kinds together, if there are several."""
    if len(kinds) < 2:
        return kinds
    names = next(iter(kinds.values()))
    pooled = {
        name: {key: [x for scores in kinds.values() for x in scores[name][key]] for key in ("log_prob", "right")}
        for name in names
    }
    return {**kinds, "all": pooled}


def summary(scores: dict[str, dict[str, list[float]]], seed: int) -> dict[str, Any]:
    """Return means for each contender, and who wins how often and by how much."""
    means = {name: {key: float(np.mean(values)) for key, values in by_key.items()} for name, by_key in scores.items()}
    comparisons = {}
    for name, (ours, theirs) in COMPARISONS.items():
        if ours in scores and theirs in scores:
            comparisons[name] = summarize_comparison(
                np.subtract(scores[ours]["log_prob"], scores[theirs]["log_prob"]), seed
            )
    return {"means": means, "comparisons": comparisons}


def summarize_comparison(differences: np.ndarray, seed: int) -> dict[str, Any]:
    """Return win rate (ties count half) and mean difference in nats, with 95 % intervals from resampled gaps."""
    wins = (np.sign(differences) + 1) / 2
    picks = np.random.default_rng(seed).integers(len(wins), size=(RESAMPLES, len(wins)))

    def interval(values: np.ndarray) -> list[float]:
        return np.quantile(values[picks].mean(1), [0.025, 0.975]).tolist()

    return {
        "gaps": len(wins),
        "ties": int((differences == 0).sum()),
        "win_rate": float(wins.mean()),
        "win_rate_interval": interval(wins),
        "difference": float(differences.mean()),
        "difference_interval": interval(differences),
    }


if __name__ == "__main__":
    main()
