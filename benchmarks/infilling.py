"""Fill gaps whose true text is known: with and without the future, with the length known and unknown.

    python benchmarks/infilling_tasks.py --humaneval HumanEval-SingleLineInfilling.jsonl.gz -o humaneval.jsonl
    python benchmarks/infilling_tasks.py --prose test.jsonl --count 400 -o prose.jsonl
    python benchmarks/infilling.py humaneval.jsonl prose.jsonl --device cuda

| condition | what the model reads and is told |
|---|---|
| past, line | the text before the gap; a line of code ends at the first newline (prose: the true number of tokens) |
| past, known | the text before the gap, and the true number of tokens |
| future, known | the text before and after the gap, and the true number of tokens |
| future, unknown | the text before and after the gap: `lm.fill` of `{{_}}` |

All of them heal the tokens at the borders of the gap (docs/how-to/fill-gaps.md), and take the likeliest token at each
step. A fill is an exact match if it is the true text to the letter. HumanEval's programs are run with their tests
(pass@1; an empty line passes some of them). *Calls* counts what the model is asked to compute: one for each token
drawn, and one for each text scored, which a known length does not need; *passes* are forward passes, which serve many
tasks at once here. The 95 % intervals resample tasks.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, report
from infilling_tasks import Task, by_kind, read_tasks
from render import infilling_costs, infilling_rows
from sandbox import passes_all

import acgpt
from acgpt.models.fill import PATIENCE
from acgpt.query.gaps import encode_gaps
from acgpt.query.template import parse

CONDITIONS = ("past, line", "past, known", "future, known", "future, unknown")
RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=Path, help="files of infilling_tasks.py")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--adapter", help="default: that of the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, help="use the first tasks of each file only")
    parser.add_argument("--batch", type=int, default=64, help="tasks filled together")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--patience", type=int, default=PATIENCE, help="of the search for unknown lengths")
    parser.add_argument("--fills", type=Path, help="write the fills to this file, and run no program")
    parser.add_argument("--from-fills", type=Path, help="read the fills from this file; their programs are run here")
    parser.add_argument("--workers", type=int, default=2, help="programs run at a time")
    args = parser.parse_args()
    tasks = [task for path in args.tasks for task in read_tasks(path)[: args.limit]]
    record = json.loads(args.from_fills.read_text(encoding="utf-8")) if args.from_fills else fill_all(args, tasks)
    if args.fills:
        args.fills.write_text(json.dumps(record), encoding="utf-8")
        return
    record["kinds"] = summary(tasks, record["lengths"], record["fills"], args.workers)
    for name in ("lengths", "fills"):
        del record[name]
    columns, rows = infilling_rows(record["kinds"])
    report("Fills of gaps", columns, rows, record, infilling_costs(record["costs"]))


def fill_all(args: argparse.Namespace, tasks: Sequence[Task]) -> dict[str, Any]:
    """Fill all tasks in all conditions."""
    lm = acgpt.load(args.model, args.adapter, args.device, args.dtype)
    lengths = [true_length(lm, task) for task in tasks]
    fills: dict[str, list[str]] = {}
    costs: dict[str, dict[str, float]] = {}
    for condition in args.conditions:
        fills[condition], costs[condition] = run(lm, tasks, lengths, condition, args)
        print(f"{condition}: {costs[condition]['seconds']:.0f} s", file=sys.stderr, flush=True)
    if known := costs.get("future, known"):
        for cost in costs.values():
            scored = 0 if cost is known else cost["scored"]  # a known length needs no scores
            cost["calls_ratio"] = (cost["drawn"] + scored) / known["drawn"]
            cost["seconds_ratio"] = cost["seconds"] / known["seconds"]
    command = {"benchmark": "infilling", "fills_command": shlex.join(["python", *sys.argv]), "patience": args.patience}
    return command | machine(lm.model.device.type) | {"costs": costs, "lengths": lengths, "fills": fills}


def true_length(lm: acgpt.LanguageModel, task: Task) -> int:
    """Return the number of tokens of the true text between the tokens that are kept."""
    gapped = encode_gaps(parse(template(task)), lm.tokenizer)
    whole = lm.tokenizer(task.prefix + task.fill + task.suffix, add_special_tokens=False, split_special_tokens=True)
    return len(whole["input_ids"]) - len(gapped.tokens)


def template(task: Task, gap: str = "{{_}}") -> str:
    """Return the template of a task."""
    return acgpt.escape(task.prefix, before_slot=True) + gap + acgpt.escape(task.suffix)


def run(
    lm: acgpt.LanguageModel, tasks: Sequence[Task], lengths: Sequence[int], condition: str, args: argparse.Namespace
) -> tuple[list[str], dict[str, float]]:
    """Fill all tasks in one condition; return the fills, and what they cost."""
    drawn, scored = 0, 0
    score = lm._executor.sums

    def count_drawn(tokens: int) -> None:
        nonlocal drawn
        drawn += tokens

    def count_scored(queries: Sequence[Any]) -> list[float]:
        nonlocal scored
        scored += len(queries)
        return score(queries)

    lm._executor.sums = count_scored  # type: ignore[method-assign]
    passes, start, fills = lm._executor.engine.meter.calls, time.perf_counter(), [""] * len(tasks)
    order = sorted(range(len(tasks)), key=lambda i: len(tasks[i].prefix) + len(tasks[i].suffix))
    reads, _, told = condition.partition(", ")
    groups: dict[bool, list[int]] = {False: [], True: []}  # whether the fill ends at a newline
    for i in order:
        code, ends_text = tasks[i].fill.endswith("\n"), not tasks[i].suffix
        groups[code and (told == "line" or (ends_text and told == "unknown"))].append(i)
    for to_newline, members in groups.items():
        for begin in range(0, len(members), args.batch):
            group = members[begin : begin + args.batch]
            texts = []
            for i in group:
                if told == "line" and to_newline:
                    texts.append(acgpt.escape(tasks[i].prefix, before_slot=True) + "{{_}}")
                elif told == "unknown":
                    texts.append(template(tasks[i]))
                else:
                    texts.append(template(tasks[i], f"{{{{_{lengths[i]}-{lengths[i]}}}}}"))
            bound = args.max_tokens if to_newline or told == "unknown" else None
            future, stop = None if reads == "future" else False, "\n" if to_newline else ()
            answers = lm.fill(
                texts, 1, max_tokens=bound, stop=stop, future=future, notice=count_drawn, patience=args.patience, seed=0
            )
            for i, answer in zip(group, answers, strict=True):
                fills[i] = answer[0].fills[0] + ("\n" if to_newline else "")
    lm._executor.sums = score  # type: ignore[method-assign]
    seconds, calls = time.perf_counter() - start, lm._executor.engine.meter.calls - passes
    return fills, {"seconds": seconds, "drawn": drawn, "scored": scored, "passes": calls}


def summary(tasks: Sequence[Task], lengths: Sequence[int], fills: dict[str, list[str]], workers: int) -> dict[str, Any]:
    """Return exact matches and passed tests by kind of task."""
    runnable = [i for i, task in enumerate(tasks) if task.test]
    passed: dict[str, dict[int, bool]] = {}
    for condition, texts in fills.items():
        verdicts = passes_all([tasks[i].program(texts[i]) for i in runnable], workers) if runnable else []
        passed[condition] = dict(zip(runnable, verdicts, strict=True))
    kinds: dict[str, Any] = {}
    groups = by_kind(tasks)
    for kind, members in (groups if len(groups) == 1 else {**groups, "all": list(tasks)}).items():
        numbers = [i for i, task in enumerate(tasks) if kind == "all" or task.kind == kind]
        kinds[kind] = {"tasks": len(members), "mean_tokens": float(np.mean([lengths[i] for i in numbers]))}
        for condition, texts in fills.items():
            entry = {"exact": share(np.array([texts[i] == tasks[i].fill for i in numbers]))}
            if all(i in passed[condition] for i in numbers):
                entry["pass"] = share(np.array([passed[condition][i] for i in numbers]))
            kinds[kind][condition] = entry
    return kinds


def share(hits: np.ndarray) -> dict[str, Any]:
    """Return a share in percent, with its 95 % interval."""
    rng = np.random.default_rng(0)
    means = 100 * hits[rng.integers(0, len(hits), (RESAMPLES, len(hits)))].mean(1)
    return {"percent": 100 * float(hits.mean()), "interval": np.quantile(means, [0.025, 0.975]).tolist()}


if __name__ == "__main__":
    main()
