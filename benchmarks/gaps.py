"""Does knowing the future make better fills? Gaps in held-out text, filled with and without what follows them.

    python benchmarks/gaps.py data/mine                                      the embedded default and its adapter
    python benchmarks/gaps.py data/mine --adapter FOLDER --splits prose=test code=code --device cuda

A gap is 4 to 12 tokens, with 100 to 200 tokens on either side, from texts that do not overlap and are fixed by the
seed. The model fills each gap twice, at the same length and with the same seed: with copies of all that is given
(future), and left to right (past). The model without its adapter then judges both, as the causal model that it is:
whose whole text, given tokens and fill, has the greater log-probability wins; ties count half. Intervals (95 %) come
from resampling gaps. The control is the model without its adapter, asked in the same two ways. Such a judge may like a
plain fill better than the true one: the log-probability of the true text, and how many tokens of a fill are the true
ones, are shown as well.
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import numpy as np
from common import machine, report
from render import gap_rows

import acgpt
from acgpt.cli.demo_table import only_adapter
from acgpt.data.corpus import Corpus
from acgpt.models.adapters import Choice
from acgpt.models.metadata import tokenizer_hash

SIDES, GAP = (100, 200), (4, 12)  # tokens: least and most
RESAMPLES = 10_000
COMPARISONS = {  # who is the first, who is the second
    "adapted: future against past": ("adapted, future", "adapted, past"),
    "unadapted: future against past": ("unadapted, future", "unadapted, past"),
    "adapted, future, against unadapted, past": ("adapted, future", "unadapted, past"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="a folder that acgpt prepare has written, with the model's tokenizer")
    parser.add_argument("--splits", nargs="+", default=["prose=validation", "code=code"], metavar="KIND=SPLIT")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--adapter", help="default: the embedded model's own; for others, only the control is run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="sums in half precision depend on the batch")
    parser.add_argument("--gaps", type=int, default=200, help="of each kind")
    parser.add_argument("--ways", nargs="+", choices=["sampled", "greedy"], default=["sampled", "greedy"])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print the fills of so many gaps of each kind")
    args = parser.parse_args()
    lm = acgpt.load(args.model, args.adapter, args.device, args.dtype)
    kinds = {}
    for kind, _, split in (pair.partition("=") for pair in args.splits):
        kinds[kind] = held_out(args.corpus, split, lm, args.gaps, args.seed)
    ways = {"sampled": {"temperature": args.temperature, "top_p": args.top_p}, "greedy": {"temperature": 0.0}}
    ways = {way: ways[way] for way in args.ways}
    measured = {
        way: {kind: contest(lm, texts, args.seed, args.show, **how) for kind, texts in kinds.items()}
        for way, how in ways.items()
    }
    results = {
        way: {kind: summary(found, args.seed) for kind, found in with_all(by_kind).items()}
        for way, by_kind in measured.items()
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
    """Gaps in texts of a split, the same ones for the same seed; every query holds its true tokens."""
    corpus = Corpus.open(folder)
    if corpus.manifest["tokenizer_hash"] != tokenizer_hash(lm.tokenizer):
        raise SystemExit(f"{folder} was prepared with another tokenizer than the model's.")
    tokens = corpus.tokens(split)[:]
    ends = np.flatnonzero(tokens == corpus.manifest["eos_token_id"])
    longest = 2 * SIDES[1] + GAP[1]
    windows = [
        tokens[at : at + longest].tolist()
        for begin, end in itertools.pairwise([-1, *ends.tolist(), len(tokens)])
        for at in range(begin + 1, end - longest + 1, longest)
    ]
    if len(windows) < count:
        raise SystemExit(f"the split {split} of {folder} has room for {len(windows)} gaps only: --gaps {len(windows)}")
    rng = random.Random(seed)
    return [cut(window, rng) for window in rng.sample(windows, count)]


def cut(window: list[int], rng: random.Random) -> acgpt.Query:
    """A text with one gap in it."""
    left, gap, right = (rng.randint(*bounds) for bounds in (SIDES, GAP, SIDES))
    given = [True] * left + [False] * gap + [True] * right
    return acgpt.Query(window[: len(given)], given)


# ---- filling and judging --------------------------------------------------------------------------------------------


def contest(
    lm: acgpt.LanguageModel, texts: list[acgpt.Query], seed: int, show: int, **how: float
) -> dict[str, dict[str, list[float]]]:
    """For each contender, and "true" itself: the judged log-probability of each text, and its share of true tokens."""
    fills: dict[str, list[acgpt.Query]] = {"true": texts}
    blanks = [acgpt.Query([t if g else None for t, g in zip(q.tokens, q.given, strict=True)], q.given) for q in texts]
    models: dict[str, Choice] = {"unadapted": False} | ({"adapted": only_adapter(lm)} if lm.adapters else {})
    for name, adapter in models.items():
        for way, future in (("past", False), ("future", True)):
            drawn = lm.sample(blanks, seed=seed, future=future, adapter=adapter, **how)
            fills[f"{name}, {way}"] = [samples[0].query for samples in drawn]
    for number in range(show):
        print_fills(lm, {name: queries[number] for name, queries in fills.items()})
    judged = judge(lm, [query for queries in fills.values() for query in queries])
    return {
        name: {
            "log_prob": [judged[query.tokens] for query in queries],
            "right": [right(query, text) for query, text in zip(queries, texts, strict=True)],
        }
        for name, queries in fills.items()
    }


def judge(lm: acgpt.LanguageModel, texts: list[acgpt.Query]) -> dict[tuple[int | None, ...], float]:
    """log p of each whole text, by its tokens, read left to right by the model without an adapter."""
    tokens = list(dict.fromkeys(text.tokens for text in texts))  # each once: what is the same shall tie
    scores = lm.log_prob([acgpt.Query(t, given=[False] * len(t)) for t in tokens], future=False, adapter=False)
    return {t: score.log_prob for t, score in zip(tokens, scores, strict=True)}


def right(text: acgpt.Query, true: acgpt.Query) -> float:
    """The share of a fill's tokens that are those of the true text."""
    places = [p - 1 for p in true.asked_positions]
    return sum(text.tokens[p] == true.tokens[p] for p in places) / len(places)


def print_fills(lm: acgpt.LanguageModel, fills: dict[str, acgpt.Query]) -> None:
    """A gap, some of the text around it, and what was put into it."""
    (first, last), tokens = fills["true"].blanks[0], fills["true"].tokens
    before, after = (lm.tokenizer.decode(part) for part in (tokens[first - 21 : first - 1], tokens[last : last + 20]))
    print(f"{before!r} … {after!r}")
    for name, query in fills.items():
        print(f"  {name:16} {lm.tokenizer.decode(query.tokens[first - 1 : last])!r}")


# ---- the figures ----------------------------------------------------------------------------------------------------


def with_all(kinds: dict[str, Any]) -> dict[str, Any]:
    """The kinds, and if there are several, all of them together."""
    if len(kinds) < 2:
        return kinds
    names = next(iter(kinds.values()))
    pooled = {
        name: {key: [x for found in kinds.values() for x in found[name][key]] for key in ("log_prob", "right")}
        for name in names
    }
    return {**kinds, "all": pooled}


def summary(found: dict[str, dict[str, list[float]]], seed: int) -> dict[str, Any]:
    """Means for each contender, and who wins how often and by how much."""
    means = {name: {key: float(np.mean(values)) for key, values in by.items()} for name, by in found.items()}
    comparisons = {}
    for name, (ours, theirs) in COMPARISONS.items():
        if ours in found and theirs in found:
            comparisons[name] = compared(np.subtract(found[ours]["log_prob"], found[theirs]["log_prob"]), seed)
    return {"means": means, "comparisons": comparisons}


def compared(differences: np.ndarray, seed: int) -> dict[str, Any]:
    """Win rate (ties count half) and mean difference in nats, with 95 % intervals from resampling gaps."""
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
