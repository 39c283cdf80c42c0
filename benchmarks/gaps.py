"""Filling gaps whose true text is known: with and without the future, with the length known and unknown.

    python default-model/infilling_tasks.py --humaneval HumanEval-SingleLineInfilling.jsonl.gz -o humaneval.jsonl
    python default-model/infilling_tasks.py --prose test.jsonl --count 400 -o prose.jsonl
    python benchmarks/gaps.py humaneval.jsonl
    python benchmarks/gaps.py prose.jsonl --adapter FOLDER

| condition | what the model reads and is told |
|---|---|
| past, line | the text before the gap; a line of code ends at the first newline (prose: the true number of tokens) |
| past, known | the text before the gap, and the true number of tokens |
| future, known | the text before and after the gap, and the true number of tokens |
| future, unknown | the text before and after the gap: `lm.fill` of `{{_}}` |

All of them heal the tokens at the borders of the gap (docs/how-to/fill-gaps.md), and take the likeliest token at each
step. A fill is an exact match if it is the true text to the letter. HumanEval's programs are run with their tests
("pass_rate"; an empty line passes some of them): see sandbox.py for what limits them. *Calls* counts what the
model is asked to compute: one for each token drawn, one for each text scored, which a known length does not need, and
one for each question for a length; "relative_calls" is their number over that of the tokens drawn at a known length.
The 95 % intervals resample tasks.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from common import Parser, mean_with_interval, print_record
from sandbox import passes_all

import acgpt
from acgpt.errors import InputError
from acgpt.models.executor import LengthRequest, Scores
from acgpt.query.gaps import encode_gaps
from acgpt.query.template import parse

sys.path.append(str(Path(__file__).resolve().parent.parent / "default-model"))
from infilling_tasks import Task, by_kind, read_tasks

CONDITIONS = ("past, line", "past, known", "future, known", "future, unknown")
KNOWN = "future, known"
BATCH = 64  # tasks filled together
MAX_TOKENS = 48  # of a gap of unknown length


def main() -> None:
    parser = Parser(__doc__)
    parser.add_device()
    parser.add_argument("tasks", nargs="+", type=Path, help="files of infilling_tasks.py")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--adapter", help="default: that of the embedded model")
    args = parser.parse_args()
    try:
        tasks = [task for path in args.tasks for task in read_tasks(path)]
        # As with the embedded adapter, the model itself answers what needs no future.
        lm = acgpt.load(args.model, args.adapter, args.device, router=True if args.adapter else None)
    except (InputError, OSError) as error:
        parser.error(str(error))
    fills, drawn, other_calls = {}, {}, {}
    for condition in CONDITIONS:
        start = time.perf_counter()
        fills[condition], drawn[condition], other_calls[condition] = fill(lm, tasks, condition)
        print(f"{condition}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    runnable = [i for i, task in enumerate(tasks) if task.test]
    passed = {
        condition: dict(zip(runnable, passes_all([tasks[i].program(texts[i]) for i in runnable]), strict=True))
        for condition, texts in fills.items()
    }
    groups = {kind: [i for i, task in enumerate(tasks) if task.kind == kind] for kind in by_kind(tasks)}
    whole = "all" if len(groups) > 1 else next(iter(groups))
    groups[whole] = list(range(len(tasks)))
    rows = []
    for kind, numbers in groups.items():
        for condition, texts in fills.items():
            row = {"row": condition if len(groups) == 1 else f"{kind}; {condition}", "tasks": len(numbers)}
            exact = np.array([100.0 * (texts[i] == tasks[i].fill) for i in numbers])
            row |= mean_with_interval("exact_match", exact)
            if all(i in passed[condition] for i in numbers):
                passes = np.array([100.0 * passed[condition][i] for i in numbers])
                row |= mean_with_interval("pass_rate", passes)
            if kind == whole:
                row["relative_calls"] = (drawn[condition] + other_calls[condition]) / drawn[KNOWN]
            rows.append(row)
    case = f"{', '.join(path.stem for path in args.tasks)}, {args.adapter or args.model or 'default model'}"
    print_record("gaps", case, rows, lm.model.device.type)


def fill(lm: acgpt.LanguageModel, tasks: Sequence[Task], condition: str) -> tuple[list[str], int, int]:
    """Fill all tasks in one condition; return the fills, the number of tokens drawn, and that of other calls."""
    drawn: list[int] = []
    fills = [""] * len(tasks)
    reads, _, told = condition.partition(", ")
    groups: dict[bool, list[int]] = {False: [], True: []}  # whether the fill ends at a newline
    for i in sorted(range(len(tasks)), key=lambda i: len(tasks[i].prefix) + len(tasks[i].suffix)):
        code, ends_text = tasks[i].fill.endswith("\n"), not tasks[i].suffix
        groups[code and (told == "line" or (ends_text and told == "unknown"))].append(i)
    batches = [
        (to_newline, members[start : start + BATCH])
        for to_newline, members in groups.items()
        for start in range(0, len(members), BATCH)
    ]
    executor = lm._executor
    with patch.object(executor, "answers", wraps=executor.answers) as passes:
        for to_newline, batch in batches:
            bound = MAX_TOKENS if to_newline or told == "unknown" else None
            future, stop = None if reads == "future" else False, "\n" if to_newline else ()
            templates = [template_of(lm, tasks[i], told, to_newline) for i in batch]
            answers = lm.fill(templates, 1, max_tokens=bound, stop=stop, future=future, notice=drawn.append, seed=0)
            for i, answer in zip(batch, answers, strict=True):
                fills[i] = answer[0].fills[0] + ("\n" if to_newline else "")
    requests = Counter(type(task.request) for call in passes.call_args_list for task in call.args[0])
    scored = requests[Scores] if condition != KNOWN else 0
    return fills, sum(drawn), requests[LengthRequest] + scored


def template_of(lm: acgpt.LanguageModel, task: Task, told: str, to_newline: bool) -> str:
    """Return the template of a task: the true number of tokens is named unless the fill ends at a newline."""
    before, after = acgpt.escape(task.prefix, before_slot=True), acgpt.escape(task.suffix)
    if told == "line" and to_newline:
        return before + "{{_}}"
    if told == "unknown":
        return f"{before}{{{{_}}}}{after}"
    kept = encode_gaps(parse(f"{before}{{{{_}}}}{after}"), lm.tokenizer).tokens
    whole = lm.tokenizer(task.prefix + task.fill + task.suffix, add_special_tokens=False, split_special_tokens=True)
    length = len(whole["input_ids"]) - len(kept)
    return f"{before}{{{{_{length}-{length}}}}}{after}"


if __name__ == "__main__":
    main()
