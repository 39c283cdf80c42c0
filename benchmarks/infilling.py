"""Fill gaps whose true text is known: with and without the future, with the length known and unknown.

    python benchmarks/infilling_tasks.py --humaneval HumanEval-SingleLineInfilling.jsonl.gz -o humaneval.jsonl
    python benchmarks/infilling_tasks.py --prose test.jsonl --count 400 -o prose.jsonl
    python benchmarks/infilling.py humaneval.jsonl prose.jsonl --device cuda
    python benchmarks/infilling.py humaneval.jsonl prose.jsonl --device cuda --fills before.json
    python benchmarks/infilling.py humaneval.jsonl prose.jsonl --device cuda --adapter FOLDER --fills after.json
    python benchmarks/infilling.py humaneval.jsonl prose.jsonl --from-fills after.json --against before.json

| condition | what the model reads and is told |
|---|---|
| past, line | the text before the gap; a line of code ends at the first newline (prose: the true number of tokens) |
| past, known | the text before the gap, and the true number of tokens |
| future, known | the text before and after the gap, and the true number of tokens |
| future, unknown | the text before and after the gap: `lm.fill` of `{{_}}` |

All of them heal the tokens at the borders of the gap (docs/how-to/fill-gaps.md), and take the likeliest token at each
step. A fill is an exact match if it is the true text to the letter. HumanEval's programs are run with their tests
(pass@1; an empty line passes some of them). *Calls* counts what the model is asked to compute: one for each token
drawn, one for each text scored, which a known length does not need, and one for each question for a length; *passes*
are forward passes, which serve many tasks at once here. The 95 % intervals resample tasks, the same ones for both files
of fills, so that differences to those of `--against` are paired. Similarity of meaning is measured by similarity.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Parser, check_limit, load_adapted, machine, mean_with_interval, report, resampled

sys.path.append(str(Path(__file__).resolve().parent.parent / "default-model"))
from infilling_tasks import Task, by_kind, read_tasks
from result_tables import infilling_costs, infilling_differences, infilling_rows
from sandbox import passes_all

import acgpt
from acgpt.errors import InputError
from acgpt.models.fill import PATIENCE
from acgpt.query.gaps import encode_gaps
from acgpt.query.template import parse

CONDITIONS = ("past, line", "past, known", "future, known", "future, unknown")
RESAMPLES = 2000


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=Path, help="files of infilling_tasks.py")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--adapter", help="a folder, or none; default: that of the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, help="use the first tasks of each file only")
    parser.add_argument("--batch", type=int, default=64, help="tasks filled together")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--patience", type=int, default=PATIENCE, help="of the search for unknown lengths")
    parser.add_argument("--fills", type=Path, help="write the fills to this file, and run no program")
    parser.add_argument("--from-fills", type=Path, help="read the fills from this file; their programs are run here")
    parser.add_argument("--against", type=Path, help="compare with the fills in this file, of another model or adapter")
    parser.add_argument("--workers", type=int, default=2, help="programs run at a time")
    args = parser.parse_args()
    try:
        check_limit(args.limit)
        tasks = [task for path in args.tasks for task in read_tasks(path)[: args.limit]]
        record = read_fills(args.from_fills, tasks) if args.from_fills else fill_all(args, tasks)
        if args.fills:
            args.fills.write_text(json.dumps(record), encoding="utf-8")
            return
        against = read_fills(args.against, tasks) if args.against else None
    except (InputError, OSError) as error:
        parser.error(str(error))
    hits = grade(tasks, record["fills"], args.workers)
    record["kinds"] = summary(tasks, record["lengths"], hits)
    if against:
        record["against"] = {key: against.get(key) for key in ("fills_command", "model", "adapter")}
        record["differences"] = differences(tasks, hits, grade(tasks, against["fills"], args.workers))
    for name in ("lengths", "fills", "names"):
        record.pop(name, None)
    columns, rows = infilling_rows(record["kinds"])
    more = infilling_differences(record["differences"]) if against else infilling_costs(record["costs"])
    report("Fills of gaps", columns, rows, record, more)


def fill_all(args: argparse.Namespace, tasks: Sequence[Task]) -> dict[str, Any]:
    """Fill all tasks in all conditions."""
    lm = load_adapted(args.model, args.adapter, args.device, args.dtype)
    lengths = [true_length(lm, task) for task in tasks]
    fills: dict[str, list[str]] = {}
    costs: dict[str, dict[str, float]] = {}
    for condition in args.conditions:
        fills[condition], costs[condition] = run(lm, tasks, lengths, condition, args)
        print(f"{condition}: {costs[condition]['seconds']:.0f} s", file=sys.stderr, flush=True)
    if known := costs.get("future, known"):
        for cost in costs.values():
            scored = 0 if cost is known else cost["scored"]  # a known length needs no scores
            cost["calls_ratio"] = (cost["drawn"] + scored + cost["asked_lengths"]) / known["drawn"]
            cost["seconds_ratio"] = cost["seconds"] / known["seconds"]
    command = {"benchmark": "infilling", "fills_command": shlex.join(["python", *sys.argv]), "patience": args.patience}
    command |= {"model": args.model or "default", "adapter": args.adapter, "seed": 0}
    answers = {"lengths": lengths, "names": [task.name for task in tasks], "fills": fills}
    return command | machine(lm.model.device.type) | {"costs": costs} | answers


def read_fills(path: Path, tasks: Sequence[Task]) -> dict[str, Any]:
    """Read the fills that `--fills` wrote.

    Raises:
        InputError: The file is something else, or its fills are those of other tasks.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counts = {len(texts) for texts in record["fills"].values()}
        complete = record["benchmark"] == "infilling"
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InputError(f"{path} has no fills: name a file that infilling.py --fills wrote.")
    if counts != {len(tasks)} or record.get("names", [task.name for task in tasks]) != [task.name for task in tasks]:
        raise InputError(f"{path} has the fills of other tasks: name the task files and --limit of its command.")
    return record


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
    drawn, scored, asked = 0, 0, 0
    score, ask = lm._executor.log_probs, lm._executor.lengths

    def count_drawn(tokens: int) -> None:
        nonlocal drawn
        drawn += tokens

    def count_scored(queries: Sequence[Any], *arguments: Any) -> list[list[Any]]:
        nonlocal scored
        scored += len(queries)
        return score(queries, *arguments)

    def count_asked(requests: Mapping[int, Any]) -> dict[int, np.ndarray]:
        nonlocal asked
        asked += sum(len(request.questions) for request in requests.values())
        return ask(requests)

    lm._executor.log_probs = count_scored  # type: ignore[method-assign]
    lm._executor.lengths = count_asked  # type: ignore[method-assign]
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
    lm._executor.log_probs, lm._executor.lengths = score, ask  # type: ignore[method-assign]
    seconds, calls = time.perf_counter() - start, lm._executor.engine.meter.calls - passes
    return fills, {"seconds": seconds, "drawn": drawn, "scored": scored, "asked_lengths": asked, "passes": calls}


Hits = dict[str, dict[str, np.ndarray]]  # by condition and measure: (tasks,) 1 for a hit, 0 for none, nan for no test


def grade(tasks: Sequence[Task], fills: dict[str, list[str]], workers: int) -> Hits:
    """Return which fills are exact matches, and which pass the tests of their task."""
    runnable = [i for i, task in enumerate(tasks) if task.test]
    hits: Hits = {}
    for condition, texts in fills.items():
        passed = np.full(len(tasks), np.nan)
        passed[runnable] = passes_all([tasks[i].program(texts[i]) for i in runnable], workers) if runnable else []
        exact = np.array([float(text == task.fill) for text, task in zip(texts, tasks, strict=True)])
        hits[condition] = {"exact": exact, "pass": passed}
    return hits


def members(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Return the numbers of the tasks of each kind, and of all if there are several kinds."""
    groups = {kind: [i for i, task in enumerate(tasks) if task.kind == kind] for kind in by_kind(tasks)}
    return groups if len(groups) == 1 else {**groups, "all": list(range(len(tasks)))}


def summary(tasks: Sequence[Task], lengths: Sequence[int], hits: Hits) -> dict[str, Any]:
    """Return exact matches and passed tests by kind of task."""
    kinds: dict[str, Any] = {}
    for kind, numbers in members(tasks).items():
        kinds[kind] = {"tasks": len(numbers), "mean_tokens": float(np.mean([lengths[i] for i in numbers]))}
        for condition, by_measure in hits.items():
            kinds[kind][condition] = {
                measure: share(values[numbers])
                for measure, values in by_measure.items()
                if not np.isnan(values[numbers]).any()
            }
    return kinds


def differences(tasks: Sequence[Task], ours: Hits, theirs: Hits) -> dict[str, Any]:
    """Return by how many points more fills of ours are hits, by kind, condition and measure, with paired intervals."""
    result: dict[str, Any] = {}
    for kind, numbers in members(tasks).items():
        result[kind] = {}
        for condition in (condition for condition in ours if condition in theirs):
            pairs = {name: 100 * (ours[condition][name] - theirs[condition][name])[numbers] for name in ours[condition]}
            pairs = {name: values for name, values in pairs.items() if not np.isnan(values).any()}
            means = resampled(pairs)
            result[kind][condition] = {
                name: mean_with_interval(values.mean(), means[name], len(numbers)) for name, values in pairs.items()
            }
    return result


def share(hits: np.ndarray) -> dict[str, Any]:
    """Return a share in percent, with its 95 % interval."""
    rng = np.random.default_rng(0)
    means = 100 * hits[rng.integers(0, len(hits), (RESAMPLES, len(hits)))].mean(1)
    return {"percent": 100 * float(hits.mean()), "interval": np.quantile(means, [0.025, 0.975]).tolist()}


if __name__ == "__main__":
    main()
