"""Does the best fill satisfy a new user? Fill the gaps of 60 short queries, and grade the fills by accepted answers.

    python benchmarks/cloze.py --limit 10                                    the embedded default, ten queries
    python benchmarks/cloze.py --model FOLDER --adapter FOLDER --device cuda --fills fills.json
    python benchmarks/cloze.py --from-fills fills.json                       grade saved fills, without a model

The queries (cloze.jsonl) are facts, grammar, quotations, dialogue, e-mails, lists, arithmetic, code, SQL and sentences
in five languages. Each line is an object:

| key | meaning |
|---|---|
| `id`, `kind`, `language` | a unique name, the row of the table, the language of the text |
| `template` | a text with gaps `{{_}}` |
| `answers` | accepted fills; for several gaps, one list for each |
| `match` | `exact`; `prefix` and `contains`: up to word boundaries; `regex`: a full match with one of the answers |
| `ignore_case` | whether upper and lower case are the same; default: false |
| `needs_future` | whether the text after a gap decides the answer; default: false |
| `tokens` | the same template with blanks of the answer's number of tokens, if that is one for most tokenizers |
| `examples`, `wrong` | fills that are accepted and refused, for `regex`; read by the tests only |

White space around a fill is ignored. A query with several gaps is right if all of them are.

| condition | what is asked |
|---|---|
| future | `lm.fill(template)`: the model reads the text before and after the gap |
| past | `lm.fill(template, future=False)`: it reads the text before the gap; the score that ranks fills reads on |
| known length | `lm.sample(tokens, temperature=0)`: as future, with the number of tokens; only where `tokens` is set |

Top-1 is the share of queries whose best fill is accepted, top-5 that of queries with an accepted one among five. MRR is
the mean of 1 / rank of the first accepted fill, and 0 without one. The 95 % intervals are Wilson's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Parser, load_adapted, machine, report
from result_tables import cloze_rows

from acgpt.errors import InputError
from acgpt.query.template import Slot, parse

QUERIES = Path(__file__).with_name("cloze.jsonl")
CONDITIONS = ("future", "past", "known length")
MATCHES = ("exact", "prefix", "contains", "regex")
FILLS = 5  # per query
Z = 1.959964  # 97.5 % quantile of the normal distribution


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=Path, default=QUERIES, help="default: cloze.jsonl, next to this program")
    parser.add_argument("--model", default="default", help="default: the embedded model")
    parser.add_argument("--adapter", help="a folder, or none; default: that of the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, help="use the first queries only")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="use queries of these kinds only")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--batch", type=int, default=1, help="queries filled together; more are faster on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the fills of a gap that ends the text")
    parser.add_argument("--fills", type=Path, help="write all fills to this file")
    parser.add_argument("--from-fills", type=Path, help="read the fills from this file instead of running a model")
    args = parser.parse_args()
    try:
        queries = select(read_queries(args.queries), args.kinds, args.limit)
        if args.batch < 1:
            raise InputError(f"--batch {args.batch} is too small: at least one query is filled at a time.")
        if args.fills and not args.fills.absolute().parent.is_dir():
            raise InputError(f"{args.fills.parent} is not a folder: create it, or write the fills elsewhere.")
        record = read_fills(args.from_fills) if args.from_fills else fill_all(args, queries)
        if args.fills:
            args.fills.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
        graded = grade(queries, {c: record["fills"][c] for c in args.conditions if c in record["fills"]})
    except (InputError, OSError) as error:
        parser.error(str(error))
    del record["fills"]
    record |= {"queries": graded, "results": {name: summary(group) for name, group in groups(graded).items()}}
    record["comparison"] = comparison(graded)
    name = f"{record['model']}, {record['adapter']}" if record["adapter"] else record["model"]
    report(f"Accepted fills of {len(queries)} queries: {name}", *cloze_rows(record["results"]), record)


# ---- queries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """A query and its accepted answers.

    Args:
        answers: For each gap, the accepted fills, or regular expressions for them.
        tokens: The template with blanks instead of gaps; `None` if the number of tokens depends on the tokenizer.
    """

    id: str
    kind: str
    language: str
    template: str
    answers: tuple[tuple[str, ...], ...]
    match: str
    ignore_case: bool = False
    needs_future: bool = False
    tokens: str | None = None
    examples: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def position(self) -> str:
        """Where the gap is: "start", "middle", "end", or "several" for more than one gap."""
        gaps = [isinstance(part, Slot) for part in parse(self.template)]
        if sum(gaps) > 1:
            return "several"
        return "start" if gaps[0] else "end" if gaps[-1] else "middle"

    def accepts(self, fills: Sequence[str]) -> bool:
        """Tell whether all gaps are filled as they should be."""
        return len(fills) == len(self.answers) and all(map(self._accepts_gap, fills, self.answers))

    def _accepts_gap(self, fill: str, answers: Iterable[str]) -> bool:
        flags = re.IGNORECASE if self.ignore_case else 0
        return any(re.fullmatch(pattern(answer, self.match), fill.strip(), flags) for answer in answers)


def pattern(answer: str, match: str) -> str:
    """Return a regular expression for the fills that an answer stands for."""
    text = re.escape(answer)
    return {
        "exact": text,
        "prefix": rf"{text}(?!\w)(?s:.*)",
        "contains": rf"(?s:.*)(?<!\w){text}(?!\w)(?s:.*)",
        "regex": answer,
    }[match]


def read_queries(path: Path) -> list[Query]:
    """Read and check the queries of a file.

    Raises:
        InputError: A line is no query. The message names the line.
    """
    queries: list[Query] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            queries.append(make_query(json.loads(line)))
        except (TypeError, KeyError, ValueError, re.error) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{path}, line {number}, is no query: {reason}") from error
        if any(query.id == queries[-1].id for query in queries[:-1]):
            raise InputError(f"{path}, line {number}: the id {queries[-1].id} is used twice.")
    return queries


def make_query(entry: Mapping[str, Any]) -> Query:
    """Check an entry of the file and return its query."""
    answers = entry["answers"]
    by_gap = [answers] if answers and isinstance(answers[0], str) else answers
    lists = {key: tuple(entry.get(key, ())) for key in ("examples", "wrong")}
    query = Query(**{**entry, "answers": tuple(map(tuple, by_gap)), **lists})
    slots = [part for part in parse(query.template) if isinstance(part, Slot)]
    if not slots or any(slot.gap is None for slot in slots):
        raise ValueError("its template needs gaps {{_}}, and no other slots.")
    if len(slots) != len(query.answers) or not all(query.answers):
        raise ValueError(f"it has {len(slots)} gaps, and needs a list of answers for each.")
    if query.match not in MATCHES:
        raise ValueError(f"match is {query.match!r}, and must be one of {', '.join(MATCHES)}.")
    for answer in (answer for answers in query.answers for answer in answers):
        re.compile(pattern(answer, query.match))
    if query.tokens is not None and not any(isinstance(p, Slot) and p.blank for p in parse(query.tokens)):
        raise ValueError("tokens needs a blank, such as {{_1}}.")
    return query


def select(queries: Sequence[Query], kinds: Sequence[str] | None, limit: int | None) -> list[Query]:
    """Return the first queries of these kinds.

    Raises:
        InputError: No query has one of the kinds, or none is left.
    """
    known = dict.fromkeys(query.kind for query in queries)
    for kind in kinds or ():
        if kind not in known:
            raise InputError(f"there is no kind {kind!r}: choose from {', '.join(known)}.")
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit} leaves no query: use a number from 1 on.")
    chosen = [query for query in queries if not kinds or query.kind in kinds][:limit]
    if not chosen:
        raise InputError("the file of queries is empty.")
    return chosen


# ---- fills ----------------------------------------------------------------------------------------------------------


def fill_all(args: argparse.Namespace, queries: Sequence[Query]) -> dict[str, Any]:
    """Fill all queries in all conditions; return the fills with what is needed to repeat them."""
    lm = load_adapted(args.model, args.adapter, args.device)
    ask: dict[str, Callable[[list[Query]], list[Any]]] = {
        "future": lambda group: lm.fill([q.template for q in group], FILLS, seed=args.seed),
        "past": lambda group: lm.fill([q.template for q in group], FILLS, seed=args.seed, future=False),
        "known length": lambda group: lm.sample([q.tokens for q in group if q.tokens], temperature=0),
    }
    fills: dict[str, dict[str, list[list[str]]]] = {}
    seconds = {}
    for condition in args.conditions:
        asked = [query for query in queries if query.tokens or condition != "known length"]
        fills[condition], start = {}, time.perf_counter()
        for begin in range(0, len(asked), args.batch):
            group = asked[begin : begin + args.batch]
            for query, answers in zip(group, ask[condition](group), strict=True):
                fills[condition][query.id] = [list(answer.fills) for answer in answers]
                best = " … ".join(repr(text) for text in fills[condition][query.id][0])
                print(f"{condition}, {query.id}: {best}", file=sys.stderr, flush=True)
        seconds[condition] = time.perf_counter() - start
    return {
        "benchmark": "cloze",
        "fills_command": shlex.join(["python", *sys.argv]),
        "model": args.model,
        "adapter": args.adapter,
        "seed": args.seed,
        **machine(lm.model.device.type),
        "seconds": seconds,
        "fills": fills,
    }


def read_fills(path: Path) -> dict[str, Any]:
    """Read the fills that `--fills` wrote.

    Raises:
        InputError: The file is something else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        complete = record["benchmark"] == "cloze" and {"model", "adapter", "fills"} <= record.keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InputError(f"{path} has no fills: name a file that --fills wrote.")
    return record


# ---- grades ---------------------------------------------------------------------------------------------------------


def grade(
    queries: Sequence[Query], fills: Mapping[str, Mapping[str, Sequence[Sequence[str]]]]
) -> dict[str, dict[str, Any]]:
    """Grade the fills of each query.

    Returns:
        By id: what the query is, and by condition the rank of the first accepted fill (from 1; `None` without one) and
        the text of the best fill.

    Raises:
        InputError: A query has no fills.
    """
    graded = {}
    for query in queries:
        conditions = {}
        for condition, by_id in fills.items():
            if condition == "known length" and not query.tokens:
                continue
            if query.id not in by_id:
                raise InputError(f"the file has no fills of {query.id} ({condition}): fill all queries again.")
            accepted = (rank for rank, texts in enumerate(by_id[query.id], 1) if query.accepts(texts))
            best = list(by_id[query.id][0]) if by_id[query.id] else []
            conditions[condition] = {"rank": next(accepted, None), "best": best}
        graded[query.id] = {
            "kind": query.kind,
            "position": query.position,
            "needs_future": query.needs_future,
            "tokens": query.tokens is not None,
            **conditions,
        }
    return graded


def groups(graded: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of the table: by kind, by position, by what decides the answer, of one token, and all."""
    entries = list(graded.values())
    rows = {kind: [e for e in entries if e["kind"] == kind] for kind in dict.fromkeys(e["kind"] for e in entries)}
    positions = {"start": "gap at the start", "middle": "gap in the middle", "end": "gap at the end"}
    for position, name in {**positions, "several": "several gaps"}.items():
        rows[name] = [e for e in entries if e["position"] == position]
    rows["future decides"] = [e for e in entries if e["needs_future"]]
    rows["past is enough"] = [e for e in entries if not e["needs_future"]]
    rows["one token"] = [e for e in entries if e["tokens"]]
    rows["all"] = entries
    return {name: members for name, members in rows.items() if members}


def summary(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the shares of accepted fills in each condition that all of these queries have."""
    result: dict[str, Any] = {"queries": len(entries)}
    for condition in CONDITIONS:
        if all(condition in entry for entry in entries):
            ranks = [entry[condition]["rank"] for entry in entries]
            result[condition] = {"top_1": share(sum(rank == 1 for rank in ranks), len(ranks))}
            if condition != "known length":  # it has one fill
                result[condition]["top_5"] = share(sum(rank is not None for rank in ranks), len(ranks))
                result[condition]["mrr"] = sum(1 / rank for rank in ranks if rank) / len(ranks)
    return result


def share(accepted: int, total: int) -> dict[str, Any]:
    """Return a share in percent with Wilson's 95 % interval, which holds for few queries, too."""
    p, correction = accepted / total, Z**2 / total
    middle = (p + correction / 2) / (1 + correction)
    half = Z / (1 + correction) * math.sqrt(p * (1 - p) / total + correction / total / 4)
    return {
        "accepted": accepted,
        "percent": 100 * p,
        "interval": [100 * max(0.0, middle - half), 100 * min(1.0, middle + half)],
    }


def comparison(graded: Mapping[str, Mapping[str, Any]]) -> dict[str, int] | None:
    """Count the queries whose best fill is accepted with the future, the past, both or neither; `None` if not asked."""
    entries = list(graded.values())
    if not all("future" in entry and "past" in entry for entry in entries):
        return None
    right = [(entry["future"]["rank"] == 1, entry["past"]["rank"] == 1) for entry in entries]
    names = {"both": (True, True), "only_future": (True, False), "only_past": (False, True), "neither": (False, False)}
    return {name: right.count(outcome) for name, outcome in names.items()}


if __name__ == "__main__":
    main()
