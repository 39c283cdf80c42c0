"""What do unknown tokens cost? Perplexity of the same tokens while more and more of the others are unknown.

    python benchmarks/unknown_tokens.py data/mine --split test --device cuda
    python benchmarks/unknown_tokens.py test.jsonl --adapter before=default after=FOLDER --device cuda

A text has `--tokens` tokens. Blocks of it are given, up to 60 %, as the paper draws them. Of the rest, a share u is
unknown: neither given nor asked. What is unknown at one share is unknown at all larger ones, and the *measured* tokens
are those that are asked even at the largest share. So every row of the first table is about the same tokens, of which
the model has to predict each from fewer and fewer others: from all tokens before it (u = 0), or only from the given
ones and the few that are still asked.

| unknown tokens are | what the model reads |
|---|---|
| MASK | a MASK token in the place of each: what acgpt does with `{{?3}}` |
| left out | nothing: the text is closed up, as if they had never been there |

The perplexity with MASK should rise with u, because less is known, and stay below that of texts with tokens left out,
because MASK says where something is missing.

The second table asks whether MASK is worth what it should be. One token is unknown, the next one is asked, and all
before them are given, with the blocks. p(asked | given) is then a sum over all values of the unknown token, which the
same model can estimate: `--samples` values are drawn from p(value | given), and p(asked | given, value) is averaged. An
adapter that marginalises well gives the same number with MASK, in one pass: the difference is 0.

Nats are means of -log p(asked token). The 95 % intervals resample texts, the same ones for all numbers, so that
differences are paired.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    BOOTSTRAP,
    Parser,
    by_label,
    check_limit,
    load_adapted,
    machine,
    mean_with_interval,
    report,
    resampled,
)
from result_tables import marginal_rows, unknown_rows

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import Difference, MeasuredPerplexity, PerText, TextSums, paired_difference
from acgpt.models.metadata import tokenizer_hash
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Blocks, Conditioning, floor, generator
from acgpt.query.text import encode_text

SHARES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
R_MAX = 0.6
WAYS = ("MASK", "left out")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help='a corpus of acgpt prepare, or a .jsonl file of {"text": …}')
    parser.add_argument("--split", default="validation", help="of the corpus")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument(
        "--adapter", nargs="+", metavar="[LABEL=]FOLDER", help="one or several; default: that of the embedded model"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype", default="float32", help="default: float32, because sums in half precision depend on the batch"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--limit", type=int, default=200, help="number of texts")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of unknown tokens")
    parser.add_argument("--samples", type=int, default=64, help="values of an unknown token; 0: no second table")
    parser.add_argument("--seed", type=int, default=0, help="of texts, sets and samples")
    args = parser.parse_args()
    try:
        check_limit(args.limit)
        if args.tokens < 8:
            raise InputError(f"--tokens {args.tokens} is too small: a text has at least 8 tokens.")
        if args.samples < 0:
            raise InputError(f"--samples {args.samples} is too small: use 0 for no second table.")
        args.shares = sorted(set(args.shares))
        if not 0 <= args.shares[0] <= args.shares[-1] < 1:
            raise InputError("--shares are numbers from 0 to below 1.")
        record = measure(args)
    except (InputError, OSError) as error:
        parser.error(str(error))
    marginals = marginal_rows(record["marginals"]) if record["marginals"] else None
    title = f"Perplexity of the same tokens of {record['texts']} texts, by the share of unknown tokens"
    report(title, *unknown_rows(record["shares"]), record, marginals)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all adapters on the same texts."""
    adapters = by_label(args.adapter, "--adapter") if args.adapter else {args.model or "default": None}
    texts: list[list[int]] = []
    sets: list[Text] = []
    asked: dict[str, dict[str, TextSums]] = {}
    marginals: dict[str, dict[str, np.ndarray]] = {}
    for label, adapter in adapters.items():
        lm = load_adapted(args.model, adapter, args.device, args.dtype)
        if lm.mask is None:
            raise InputError(f"{label} has no MASK token: it was not trained with unknown tokens.")
        if not texts:  # all adapters share the tokenizer
            texts = choose(args, lm)
            sets = [make_text(ids, args.shares, args.seed, i) for i, ids in enumerate(texts)]
        asked[label] = {f"{share:g} {way}": score(lm, sets, share, way) for share in args.shares for way in WAYS}
        if args.samples:
            marginals[label] = marginal(lm, sets, args.samples, args.seed)
        print(f"{label}: done", file=sys.stderr, flush=True)
    name = hashlib.sha256(json.dumps([texts, args.shares, args.seed]).encode()).hexdigest()
    return {
        "benchmark": "unknown_tokens",
        "model": args.model or "default",
        "adapters": adapters,
        "texts": len(texts),
        "tokens": args.tokens,
        "measured_tokens": sum(len(text.measured) for text in sets),
        "set_hash": name,
        "r_max": R_MAX,
        "samples": args.samples,
        "seed": args.seed,
        "bootstrap": BOOTSTRAP,
        **machine(lm.model.device.type),
        "shares": summary({label: PerText(name, sums) for label, sums in asked.items()}, args.shares),
        "marginals": marginal_summary(marginals),
    }


# ---- texts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text and what is asked of it.

    Args:
        ids: (T,) tokens.
        roles: For each share of unknown tokens, (T,) roles.
        measured: Indices of the tokens that are asked at all shares.
        pair: Index of the token that is unknown in the second table; the next one is asked. `None` if there is none.
    """

    ids: np.ndarray
    roles: dict[float, np.ndarray]
    measured: np.ndarray
    pair: int | None


def choose(args: argparse.Namespace, lm: acgpt.LanguageModel) -> list[list[int]]:
    """Return parts of documents with `--tokens` tokens that do not overlap, chosen by the seed.

    Raises:
        InputError: There are none, the corpus has another tokenizer, or the texts are longer than the model can read.
    """
    if args.tokens >= lm.positions:
        raise InputError(f"--tokens {args.tokens} is too large: the model reads {lm.positions - 1} tokens.")
    documents: list[list[int]]
    if args.texts.is_dir():
        corpus = Corpus.open(args.texts)
        if corpus.manifest["tokenizer_hash"] != tokenizer_hash(lm.tokenizer):
            raise InputError(f"{args.texts} was prepared with another tokenizer than the model's: prepare it again.")
        tokens = corpus.tokens(args.split)[:]
        ends = np.flatnonzero(tokens == corpus.manifest["eos_token_id"]).tolist()
        documents = [tokens[a + 1 : b].tolist() for a, b in itertools.pairwise([-1, *ends, len(tokens)])]
    else:
        documents = [encode_text(text, lm.tokenizer) for text in read_texts(args.texts)]
    size = args.tokens
    parts = [ids[i : i + size] for ids in documents for i in range(0, len(ids) - size + 1, size)]
    if not parts:
        raise InputError(f"{args.texts} has no text of {size} tokens: lower --tokens.")
    return random.Random(args.seed).sample(parts, min(args.limit, len(parts)))


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file with lines of {"text": …}.

    Raises:
        InputError: A line is something else.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            texts += [str(json.loads(line)["text"])] if line else []
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'{path}, line {number}, is not {{"text": …}}: {error}') from error
    return texts


def make_text(ids: Sequence[int], shares: Sequence[float], seed: int, item: int) -> Text:
    """Draw the given tokens of a text, and those that are unknown at each share; the unknown sets are nested."""
    rng = generator(seed, 0, item)
    given = Conditioning((Blocks(r_max=R_MAX),)).roles(len(ids), rng) == GIVEN
    order = rng.permutation(np.flatnonzero(~given))
    roles: dict[float, np.ndarray] = {}
    for share in shares:
        roles[share] = np.where(given, GIVEN, ASKED)
        roles[share][order[: min(floor(share * len(order)), len(order) - 1)]] = UNKNOWN
    pairs = np.flatnonzero(~given[:-1] & ~given[1:])
    pair = int(rng.choice(pairs)) if len(pairs) else None
    return Text(np.array(ids), roles, np.flatnonzero(roles[max(shares)] == ASKED), pair)


# ---- many unknown tokens --------------------------------------------------------------------------------------------


def question(ids: np.ndarray, roles: np.ndarray, way: str) -> tuple[acgpt.Query, np.ndarray]:
    """Return the query of a text, and the position of each of its tokens, 0 for those that are left out."""
    kept = roles != UNKNOWN if way == "left out" else np.ones(len(ids), dtype=bool)
    tokens = [None if role == UNKNOWN else int(id) for id, role in zip(ids[kept], roles[kept], strict=True)]
    query = acgpt.Query(tokens, (roles[kept] == GIVEN).tolist(), (roles[kept] == ASKED).tolist())
    return query, np.where(kept, kept.cumsum(), 0)


def score(lm: acgpt.LanguageModel, texts: Sequence[Text], share: float, way: str) -> TextSums:
    """Return the sums of -log p of the measured tokens of each text."""
    questions = [question(text.ids, text.roles[share], way) for text in texts]
    scores = lm.log_prob([query for query, _ in questions], future=True)
    nats = []
    for text, (_, positions), answer in zip(texts, questions, scores, strict=True):
        by_position = {token.position: token.log_prob for token in answer.tokens}
        nats.append(-sum(by_position[position] for position in positions[text.measured].tolist()))
    return TextSums(np.array(nats), np.array([float(len(text.measured)) for text in texts]))


def summary(runs: dict[str, PerText], shares: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return perplexities and paired differences for each share of unknown tokens.

    Returns:
        By share and adapter: the perplexities, by how many percent the one with MASK is below the one with tokens left
        out, and below that of the first adapter.
    """
    first = next(iter(runs))

    def of(label: str, share: float, way: str) -> MeasuredPerplexity:
        return MeasuredPerplexity.of([runs[label]], f"{share:g} {way}")

    result: dict[str, dict[str, Any]] = {}
    for share in shares:
        entries: dict[str, dict[str, Any]] = {}
        for label in runs:
            masked = of(label, share, "MASK")
            entries[label] = {way: of(label, share, way).value for way in WAYS}
            if share:
                entries[label]["below_left_out"] = as_dict(paired_difference(masked, of(label, share, "left out")))
            if label != first:
                entries[label]["below_first"] = as_dict(paired_difference(masked, of(first, share, "MASK")))
        result[f"{share:g}"] = entries
    return result


def as_dict(difference: Difference) -> dict[str, Any]:
    """Return a difference in percent and its interval, for the record."""
    return {"mean": difference.percent, "interval": None if difference.interval is None else list(difference.interval)}


# ---- one unknown token ----------------------------------------------------------------------------------------------


def marginal(lm: acgpt.LanguageModel, texts: Sequence[Text], samples: int, seed: int) -> dict[str, np.ndarray]:
    """Return -log p of the token after an unknown one, for each text with two neighbours that are not given.

    All tokens before the two are given, and so are the blocks. The tokens behind them that are not given are unknown
    in all queries. They have no copies, so that no prediction reads them.
    """
    texts = [text for text in texts if text.pair is not None]
    if not texts:
        return {}
    bases = []
    for text in texts:
        roles = np.where(text.roles[min(text.roles)] == GIVEN, GIVEN, UNKNOWN)
        roles[: text.pair] = GIVEN
        bases.append(roles)

    def asking(number: int, unknown: int, asked: int, value: int | None = None, way: str = "MASK") -> acgpt.Query:
        """Return a query with these roles of the two tokens, and possibly another value of the first one."""
        text, roles, ids = texts[number], bases[number].copy(), texts[number].ids.copy()
        assert text.pair is not None
        roles[text.pair], roles[text.pair + 1] = unknown, asked
        ids[text.pair] = ids[text.pair] if value is None else value
        if way == "left out":
            ids, roles = np.delete(ids, text.pair), np.delete(roles, text.pair)
        return question(ids, roles, "MASK")[0]

    def last(queries: list[acgpt.Query]) -> np.ndarray:
        """Return the log-probability of the last asked token of each query."""
        return np.array([answer.tokens[-1].log_prob for answer in lm.log_prob(queries, future=True)])

    numbers = range(len(texts))
    drawn = lm.sample([asking(i, ASKED, UNKNOWN) for i in numbers], samples, seed=seed, future=True)
    values = [np.unique([sample.tokens[0].id for sample in each], return_counts=True) for each in drawn]
    answers = last([asking(i, ASKED, ASKED, int(value)) for i in numbers for value in values[i][0]])
    parts = np.split(np.exp(answers), np.cumsum([len(ids) for ids, _ in values])[:-1])
    summed = [float(np.dot(part, counts) / samples) for part, (_, counts) in zip(parts, values, strict=True)]
    return {
        "known": -last([asking(i, ASKED, ASKED) for i in numbers]),
        "summed": -np.log(summed),
        "MASK": -last([asking(i, UNKNOWN, ASKED) for i in numbers]),
        "left out": -last([asking(i, UNKNOWN, ASKED, way="left out") for i in numbers]),
    }


def marginal_summary(marginals: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return mean nats for each adapter and way to treat the unknown token, and differences to the sum over values."""
    result: dict[str, Any] = {}
    for label, nats in marginals.items():
        if not nats:
            continue
        columns = nats | {f"{way} - summed": nats[way] - nats["summed"] for way in ("MASK", "left out")}
        columns["|MASK - summed|"] = abs(columns["MASK - summed"])
        means = resampled(columns)
        result[label] = {
            "texts": len(nats["known"]),
            **{name: mean_with_interval(v.mean(), means[name], len(v)) for name, v in columns.items()},
        }
    return result


if __name__ == "__main__":
    main()
