"""Gaps out of domain: does the future improve fills? Fill gaps in held-out text with and without what follows them.

    python benchmarks/out_of_domain.py data/mine                                  the embedded default and its adapter
    python benchmarks/out_of_domain.py data/mine --adapter FOLDER --splits prose=test code=code

A gap is 4 to 12 tokens, with 100 to 200 tokens on either side, from texts that do not overlap and are fixed by a seed.
The model fills each gap twice, with the same length and seed: with copies of all given tokens (future), and left to
right (past). The causal model without the adapter then judges both: the fill wins whose whole text has the higher
log-probability; ties count half. The 95 % intervals resample gaps.

| column | |
|---|---|
| wins_over_own_past | future against past, % |
| wins_over_bare | future against the past of the model without its adapter, % |
| wins_of_control | the model without its adapter, asked in the same two ways, % |
| true_tokens, true_tokens_bare | true tokens in a fill (future; past without the adapter), % |
| nats, nats_bare | log-probability of a text that was so filled, less that of the true text |

Such a judge may prefer a bland fill to the true one.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
from common import Parser, mean_with_interval, print_record

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.models.ask import Choice
from acgpt.models.metadata import tokenizer_hash

SIDES, GAP = (100, 200), (4, 12)  # tokens: least and most
GAPS = 200  # of each kind of text
SEED = 0
DECODINGS: dict[str, dict[str, float]] = {"sampled": {"temperature": 0.8, "top_p": 0.95}, "greedy": {"temperature": 0}}
COMPARISONS = {  # column: first, second
    "wins_over_own_past": ("adapted, future", "adapted, past"),
    "wins_over_bare": ("adapted, future", "unadapted, past"),
    "wins_of_control": ("unadapted, future", "unadapted, past"),
}
SUFFIXES = {"": "adapted, future", "_bare": "unadapted, past"}  # of the other columns
Scores = dict[str, dict[str, np.ndarray]]  # by contender: the log-probability and the share of true tokens of each text


def main() -> None:
    parser = Parser(__doc__)
    parser.add_device()
    parser.add_argument("corpus", help="a corpus of acgpt prepare, with the model's tokenizer")
    parser.add_argument("--splits", nargs="+", default=["prose=validation", "code=code"], metavar="KIND=SPLIT")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--adapter", help="default: that of the embedded model; other models run only the control")
    args = parser.parse_args()
    lm = acgpt.load(args.model, args.adapter, args.device, "float32")  # sums in half precision depend on the batch
    pairs = (pair.partition("=") for pair in args.splits)
    kinds = {kind: held_out(args.corpus, split, lm, GAPS) for kind, _, split in pairs}
    rows = []
    for decoding, sampling in DECODINGS.items():
        measured = {kind: contest(lm, texts, **sampling) for kind, texts in kinds.items()}
        if len(measured) > 1:
            measured["all"] = pooled(list(measured.values()))
        rows += [{"row": f"{decoding}, {kind}", **summary(scores)} for kind, scores in measured.items()]
    case = f"gaps of {GAP[0]} to {GAP[1]} tokens, {args.adapter or args.model or 'default model'}"
    print_record("out_of_domain", case, rows, lm.model.device.type, sampling=DECODINGS["sampled"], seed=SEED)


def held_out(folder: str, split: str, lm: acgpt.LanguageModel, count: int, seed: int = SEED) -> list[acgpt.Query]:
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
        raise SystemExit(f"the split {split} of {folder} has only {len(windows)} gaps of {count}: use a longer text.")
    rng, queries = random.Random(seed), []
    for window in rng.sample(windows, count):
        left, gap, right = (rng.randint(*bounds) for bounds in (SIDES, GAP, SIDES))
        given = [True] * left + [False] * gap + [True] * right
        queries.append(acgpt.Query(window[: len(given)], given))
    return queries


def contest(lm: acgpt.LanguageModel, texts: list[acgpt.Query], **sampling: float) -> Scores:
    """Fill every gap and judge the fills, and the true texts ("true")."""
    fills: dict[str, list[acgpt.Query]] = {"true": texts}
    blanks = [acgpt.Query([t if g else None for t, g in zip(q.tokens, q.given, strict=True)], q.given) for q in texts]
    models: dict[str, Choice] = {"unadapted": False} | ({"adapted": next(iter(lm.adapters))} if lm.adapters else {})
    for name, adapter in models.items():
        for direction, future in (("past", False), ("future", True)):
            samples = lm.sample(blanks, seed=SEED, future=future, adapter=adapter, **sampling)
            fills[f"{name}, {direction}"] = [sample[0].query for sample in samples]
    judged = judge(lm, [query for queries in fills.values() for query in queries])
    return {
        name: {
            "log_prob": np.array([judged[query.tokens] for query in queries]),
            "true": np.array([token_accuracy(query, text) for query, text in zip(queries, texts, strict=True)]),
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


def pooled(kinds: list[Scores]) -> Scores:
    """Return the scores of all kinds of text together."""
    return {
        name: {key: np.concatenate([scores[name][key] for scores in kinds]) for key in by_key}
        for name, by_key in kinds[0].items()
    }


def summary(scores: Scores) -> dict[str, Any]:
    """Return the entries of a row."""
    row: dict[str, Any] = {"gaps": len(scores["true"]["true"])}
    for column, (ours, theirs) in COMPARISONS.items():
        if ours in scores:
            row |= mean_with_interval(column, wins(scores[ours]["log_prob"] - scores[theirs]["log_prob"]))
    for suffix, name in SUFFIXES.items():
        if name in scores:
            row[f"true_tokens{suffix}"] = 100 * scores[name]["true"].mean()
            row[f"nats{suffix}"] = (scores[name]["log_prob"] - scores["true"]["log_prob"]).mean()
    return row


def wins(differences: np.ndarray) -> np.ndarray:
    """Return 100 for each positive difference, 50 for a tie, and 0 for a negative one."""
    return 50 * (np.sign(differences) + 1)


if __name__ == "__main__":
    main()
