"""How good is p(length | context)? Ask for the lengths of gaps whose true text is known.

    python benchmarks/infilling_tasks.py --humaneval HumanEval-SingleLineInfilling.jsonl.gz -o humaneval.jsonl
    python benchmarks/infilling_tasks.py --prose test.jsonl --count 400 -o prose.jsonl
    python benchmarks/lengths.py humaneval.jsonl prose.jsonl --adapter FOLDER --device cuda --plot reliability.png
    python benchmarks/lengths.py humaneval.jsonl prose.jsonl --adapter before=default after=FOLDER --fill

The true length of a gap is the number of tokens between the kept ones in the tokenizer's own encoding of the whole text
(docs/how-to/fill-gaps.md, "Healing"). Left out are gaps that end a text, whose length is not predicted, and the few
whose kept tokens are not those of the whole text.

| predictor | what it is |
|---|---|
| LABEL | p(length \\| context) of an adapter: one pass, nothing is drawn |
| LABEL, filled | the length of the adapter's best fill (`--fill`), also of adapters that predict no lengths |
| lengths of the kind | how often other tasks of the same kind have each length; it knows the kind, and no context |
| lengths of all tasks | the same over all kinds |

The last two leave out the task that is asked, and add one to the count of each length from 0 to the longest one.

| measure | what it is |
|---|---|
| nats | mean -log p(true length) |
| top-1, top-5 | share of tasks whose true length is the most probable one, or among the five most probable ones |
| error | mean absolute difference of the most probable length and the true one, in tokens |
| ECE | expected calibration error over ten bins of the confidence, p(most probable length) |

The calibration error is the mean of |share of tasks with the most probable length - mean confidence| over bins of equal
width, weighted by their numbers of tasks.

The 95 % intervals resample tasks, the same ones for all predictors, so that differences are paired.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
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
from infilling_tasks import Task, read_tasks
from result_tables import length_differences, length_rows

import acgpt
from acgpt.errors import InputError
from acgpt.query.gaps import encode_gaps
from acgpt.query.template import parse
from acgpt.query.text import encode_text

BINS = 10
OF_KIND, OF_ALL = "lengths of the kind", "lengths of all tasks"


@dataclass(frozen=True)
class Prediction:
    """What a predictor says about one gap.

    Args:
        top: The most probable length.
        true: The true length.
        log_prob: Log-probability of the true length; `None` if the predictor gives no probabilities.
        rank: Rank of the true length by probability, from 1.
        confidence: Probability of the most probable length.
    """

    top: int
    true: int
    log_prob: float | None = None
    rank: int = 0
    confidence: float = 0.0

    @classmethod
    def of(cls, log_probs: Mapping[int, float], true: int) -> Prediction:
        """Return what a distribution says. Of equally probable lengths the first one counts as more probable."""
        order = sorted(log_probs, key=lambda length: -log_probs[length])
        return cls(order[0], true, log_probs[true], order.index(true) + 1, math.exp(log_probs[order[0]]))


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=Path, help="files of infilling_tasks.py")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument(
        "--adapter", nargs="+", metavar="[LABEL=]FOLDER", help="one or several; default: that of the embedded model"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, help="use the first tasks of each file only")
    parser.add_argument("--batch", type=int, default=64, help="tasks asked together")
    parser.add_argument("--fill", action="store_true", help="also fill the gaps, and measure the lengths of the fills")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a fill")
    parser.add_argument("--seed", type=int, default=0, help="of the fills")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a reliability diagram (needs matplotlib)")
    args = parser.parse_args()
    try:
        check_limit(args.limit)
        if args.batch < 1:
            raise InputError(f"--batch {args.batch} is too small: at least one task is asked at a time.")
        if args.plot and importlib.util.find_spec("matplotlib") is None:
            raise InputError("--plot needs matplotlib: pip install matplotlib")
        if args.plot and not args.plot.absolute().parent.is_dir():
            raise InputError(f"{args.plot.parent} is not a folder: create it, or draw elsewhere.")
        tasks = [task for path in args.tasks for task in read_tasks(path)[: args.limit]]
        record = measure(args, tasks)
    except (InputError, OSError) as error:
        parser.error(str(error))
    if args.plot:
        plot(args.plot, record)
    title = f"Lengths of gaps, {sum(record['left_out'].values())} tasks left out"
    report(title, *length_rows(record["kinds"]), record, length_differences(record["kinds"]))


def measure(args: argparse.Namespace, tasks: Sequence[Task]) -> dict[str, Any]:
    """Ask all adapters for the lengths of all gaps.

    Raises:
        InputError: No adapter predicts lengths, or no task can be asked.
    """
    adapters = by_label(args.adapter, "--adapter") if args.adapter else {args.model or "default": None}
    asked: dict[str, list[acgpt.Lengths]] = {}
    filled: dict[str, list[int]] = {}
    silent: list[str] = []
    lengths: list[int] = []
    reasons = Counter[str]()
    for label, adapter in adapters.items():
        lm = load_adapted(args.model, adapter, args.device, args.dtype)
        if not lengths:  # of the tokenizer, which all adapters share
            found = [true_length(lm, task) for task in tasks]
            reasons = Counter(length for length in found if isinstance(length, str))
            tasks = [task for task, length in zip(tasks, found, strict=True) if not isinstance(length, str)]
            lengths = [length for length in found if not isinstance(length, str)]
            if not tasks:
                raise InputError(f"no gap has a length to predict: {', '.join(reasons)}.")
        batches = [tasks[i : i + args.batch] for i in range(0, len(tasks), args.batch)]
        if predicts_lengths(lm):
            asked[label] = [answer for batch in batches for answer in lm.lengths([template(task) for task in batch])]
        else:
            silent.append(label)
        if args.fill:
            options = {"max_tokens": args.max_tokens, "seed": args.seed}
            fills = [fill for batch in batches for fill in lm.fill([template(task) for task in batch], 1, **options)]
            filled[label] = [fill[0].lengths[0] for fill in fills]
        if label in asked or label in filled:
            print(f"{label}: done", file=sys.stderr, flush=True)
    if not asked and not filled:
        raise InputError(f"{', '.join(silent)}: no lengths are predicted. Name another adapter, or pass --fill.")
    possible = [all(true in answers[i].log_probs for answers in asked.values()) for i, true in enumerate(lengths)]
    reasons["longer than a gap may be"] += possible.count(False)
    kept = [i for i, fits in enumerate(possible) if fits]
    if not kept:
        raise InputError("all gaps are longer than a gap may be.")
    true, kinds = [lengths[i] for i in kept], [tasks[i].kind for i in kept]
    predictors = {
        label: [Prediction.of(answers[i].log_probs, lengths[i]) for i in kept] for label, answers in asked.items()
    }
    predictors |= {
        f"{label}, filled": [Prediction(tops[i], lengths[i]) for i in kept] for label, tops in filled.items()
    }
    return {
        "benchmark": "lengths",
        "model": args.model or "default",
        "adapters": adapters,
        "predict_no_lengths": silent,
        "seed": args.seed,
        "bootstrap": BOOTSTRAP,
        **machine(lm.model.device.type),
        "left_out": dict(+reasons),
        "kinds": by_kind(predictors, true, kinds),
    }


def template(task: Task) -> str:
    """Return the template of a task."""
    return acgpt.escape(task.prefix, before_slot=True) + "{{_}}" + acgpt.escape(task.suffix)


def true_length(lm: acgpt.LanguageModel, task: Task) -> int | str:
    """Return the number of tokens of the true text between the kept tokens, or why it cannot be asked."""
    gapped = encode_gaps(parse(template(task)), lm.tokenizer)
    if gapped.open_ended:
        return "the gap ends the text"
    (region,), kept = gapped.regions, list(gapped.tokens)
    if region.at == len(kept):
        return "all that follows the gap is joined to it"
    whole = encode_text(task.prefix + task.fill + task.suffix, lm.tokenizer)
    behind = len(kept) - region.at
    length = len(whole) - len(kept)
    if length < 0 or whole[: region.at] != kept[: region.at] or whole[len(whole) - behind :] != kept[region.at :]:
        return "kept tokens are not those of the whole text"
    return length


def predicts_lengths(lm: acgpt.LanguageModel) -> bool:
    """Return whether a model, or its adapter, predicts lengths."""
    return bool(lm._executor.heads)


# ---- numbers --------------------------------------------------------------------------------------------------------


def left_one_out(lengths: Sequence[int]) -> list[Prediction]:
    """Predict each length by the counts of all others, plus one for each length from 0 to the longest one."""
    counts = np.bincount(lengths) + 1
    total = len(lengths) - 1 + len(counts)
    predictions = []
    for length in lengths:
        others = counts - (np.arange(len(counts)) == length)
        predictions.append(Prediction.of(dict(enumerate(np.log(others / total).tolist())), length))
    return predictions


def by_kind(
    predictors: Mapping[str, Sequence[Prediction]], true: Sequence[int], kinds: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the measures of all predictors and baselines for each kind of task, and for all tasks if it has several.

    Args:
        predictors: The predictions for each task.
        true: The true length of each task.
        kinds: The kind of each task.
    """
    groups = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}
    of_kind: dict[int, Prediction] = {}
    for members in groups.values():
        of_kind.update(zip(members, left_one_out([true[i] for i in members]), strict=True))
    predictors = {**predictors, OF_KIND: [of_kind[i] for i in range(len(true))]}
    if len(groups) > 1:
        predictors[OF_ALL] = left_one_out(true)
        groups["all"] = list(range(len(true)))
    return {
        kind: {
            "tasks": len(members),
            "mean_length": float(np.mean([true[i] for i in members])),
            **summary({name: [predictions[i] for i in members] for name, predictions in predictors.items()}),
        }
        for kind, members in groups.items()
    }


def columns_of(predictions: Sequence[Prediction]) -> dict[str, np.ndarray]:
    """Return (tasks,) arrays whose means are the measures."""
    columns = {
        "top_1": np.array([100.0 * (p.top == p.true) for p in predictions]),
        "error": np.array([float(abs(p.top - p.true)) for p in predictions]),
    }
    if all(p.log_prob is not None for p in predictions):
        columns["nats"] = np.array([-(p.log_prob or 0.0) for p in predictions])
        columns["top_5"] = np.array([100.0 * (p.rank <= 5) for p in predictions])
    return columns


def summary(predictors: Mapping[str, Sequence[Prediction]]) -> dict[str, Any]:
    """Return the measures of predictors on the same tasks, and their paired differences.

    Every predictor with probabilities is compared with the counts of the kind, and all are compared with the first one
    of their sort, with probabilities or filled.
    """
    columns = {name: columns_of(predictions) for name, predictions in predictors.items()}
    flat = {f"{name}\0{measure}": values for name, by in columns.items() for measure, values in by.items()}
    means, tasks = resampled(flat), len(next(iter(flat.values())))
    measures: dict[str, Any] = {}
    for name, by in columns.items():
        measures[name] = {
            measure: mean_with_interval(values.mean(), means[f"{name}\0{measure}"], tasks)
            for measure, values in by.items()
        }
        if "nats" in by:
            measures[name] |= calibration(predictors[name])
    own = [name for name in predictors if name not in (OF_KIND, OF_ALL)]
    pairs = [(name, OF_KIND) for name in own if "nats" in columns[name]]
    for probable in (True, False):
        first, *others = [name for name in own if ("nats" in columns[name]) == probable] or [""]
        pairs += [(name, first) for name in others]
    differences = {
        f"{ours} - {theirs}": {
            measure: mean_with_interval(
                columns[ours][measure].mean() - columns[theirs][measure].mean(),
                means[f"{ours}\0{measure}"] - means[f"{theirs}\0{measure}"],
                tasks,
            )
            for measure in columns[ours]
        }
        for ours, theirs in pairs
    }
    return {"predictors": measures, "differences": differences}


def calibration(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the expected calibration error in percent, and its bins; empty bins have no shares."""
    confidence = np.array([p.confidence for p in predictions])
    right = np.array([p.top == p.true for p in predictions])
    numbers = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for number in range(BINS):
        members = numbers == number
        entry: dict[str, Any] = {"from": number / BINS, "to": (number + 1) / BINS, "tasks": int(members.sum())}
        if members.any():
            entry |= {"confidence": float(confidence[members].mean()), "right": float(right[members].mean())}
            error += members.mean() * abs(entry["right"] - entry["confidence"])
        bins.append(entry)
    return {"ece": 100 * float(error), "bins": bins}


def plot(path: Path, record: Mapping[str, Any]) -> None:
    """Draw the share of right lengths over the confidence of adapters; circles grow with the number of tasks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(record["kinds"]), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (kind, entry) in enumerate(record["kinds"].items(), 1):
        axes = figure.add_subplot(1, len(record["kinds"]), number)
        axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1)
        for name, measures in entry["predictors"].items():
            if "bins" in measures and name not in (OF_KIND, OF_ALL):
                bins = [b for b in measures["bins"] if b["tasks"]]
                x, y = [b["confidence"] for b in bins], [b["right"] for b in bins]
                (line,) = axes.plot(x, y, label=f"{name} (ECE {measures['ece']:.1f} %)")
                sizes = [20 + 200 * b["tasks"] / entry["tasks"] for b in bins]
                axes.scatter(x, y, s=sizes, color=line.get_color(), alpha=0.6)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"{entry['tasks']} {kind}")
        axes.set(xlabel="p(most probable length)", ylabel="share of tasks with this length")
        axes.legend(fontsize="small", loc="upper left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
