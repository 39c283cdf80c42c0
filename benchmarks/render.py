"""Write the tables of the pages in docs/ from the result files in benchmarks/results.

python benchmarks/render.py            rewrite what stands between <!-- table NAME --> (a result file) or
                                       <!-- report FOLDER WHAT … --> (kept runs) and <!-- end -->
python benchmarks/render.py --check    only say whether the page is up to date (exit code 1 if not)

WHAT is a table or a figure of `acgpt report`, named as its file is within its part, or how the runs were made:

    <!-- report NAME test/small r_max=0.6 asked=276 -->              rows with these cells, as they are written
    <!-- report NAME small/mauve 'scored=whole text' paper -->       all but the paper's
    <!-- report NAME test/advantages gptlow -->                      without this run
    <!-- report NAME test/small -corpus -caption -->                 without a column and most of the caption
    <!-- report NAME figure test/main -->                            drawn into docs/NAME-test-main.png
    <!-- report NAME commands -->                                    what each run was, and how long it took
    <!-- report NAME rates -->                                       the same with tokens/s, where it says something
    <!-- report NAME draws -->                                       what drawing texts took, all modes together
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.display.table import markdown_table

if TYPE_CHECKING:
    from acgpt.report.runs import Run

SHOWS = "Shows"  # the keyword under which a figure has the fingerprint of what it shows
ROOT = Path(__file__).resolve().parent.parent
NAMES = ("benchmarks", "explanation/architectures", "explanation/methods", "how-to/adapt", "results")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, with numbers in all columns but the first."""
    return markdown_table(columns, rows, [False, *[True] * (len(columns) - 1)])


Rows = tuple[list[str], list[list[str]]]  # the columns, and the rows


def provenance(record: dict[str, Any]) -> str:
    """Where the figures come from."""
    return f"`{record['command']}`, {machine(record)}."


def machine(record: dict[str, Any]) -> str:
    """On what something was done, and when."""
    return f"{record['hardware']}, torch {record['torch']}, transformers {record['transformers']}, {record['date']}"


def decoding(record: dict[str, Any]) -> str:
    """Seconds, tokens a second and the ratio to `generate`."""
    rate, ratio = record["tokens_per_second"], record["over generate"]
    rows = [[name, f"{s:.2f}", f"{rate[name]:,.0f}", f"{ratio[name]:.2f}"] for name, s in record["seconds"].items()]
    share, bandwidth = record["bandwidth_share"], record["copy_bandwidth"] / 1e12
    note = f"Left to right uses {share:.0%} of the {bandwidth:.3g} TB/s that a large copy reaches on this machine."
    return markdown(["", "seconds", "tokens/s", "× generate"], rows) + "\n\n" + note


def generation_table(records: Mapping[str, Mapping[str, Any]]) -> Rows:
    """A row a method and mode; beside GPT in that mode, or in the same without its future, which GPT cannot see."""
    of_some = ("prefill", "keys", "reading")  # of methods that are compared so closely
    extra = [key for key in of_some if any(r.get(key) for r in records.values())]
    turns = {"s longer": "times", "in the model": "model_times"}  # what was timed several times
    turns = {name: key for name, key in turns.items() if all(len(r.get(key, [])) > 1 for r in records.values())}
    rows = []
    for name, r in records.items():
        gpt = gpt_beside(name, records)
        ratio = f"{r['tokens_per_second'] / gpt['tokens_per_second']:.2f}" if gpt else "--"
        seconds = f"{r['seconds']:.2f}{between(r.get('times', []))}"
        row = [name, f"{r['tokens']:,}", f"{r['calls']:,}", seconds]
        row += [f"{r[key]:.2f}" if r.get(key) else "" for key in extra]
        row += [f"{r['tokens_per_second']:,.0f}", ratio]
        row += [longer(r, gpt, key) if gpt and r is not gpt else "" for key in turns.values()]
        rows.append([*row, f"{r['outside']:.0%}"])
    columns = [
        "",
        "tokens",
        "calls",
        "seconds",
        *extra,
        "tokens/s",
        "× GPT",
        *turns,
        "outside the model",
    ]
    return columns, rows


def gpt_beside(name: str, records: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What GPT took in the mode of this row, or in the same without its future; `None` if it was not timed."""
    mode = name.split(", ")[1]
    return records.get(f"gpt, {mode}") or records.get(f"gpt, {mode}-no-future")


def keys_table(records: Mapping[str, Mapping[str, Any]]) -> Rows | None:
    """How far from GPT the rows are that read more keys, and how far these alone would set them; `None` without any."""
    columns: dict[str, list[str]] = {}
    for name, r in records.items():
        gpt = gpt_beside(name, records)
        timed = [len(each.get(key, [])) for each in (r, gpt or {}) for key in ("times", "model_times")]
        if not (gpt and r.get("keys") and min(timed) > 1):
            continue
        mean, mean_gpt = statistics.mean(r["times"]), statistics.mean(gpt["times"])
        turns = [a - b for a, b in zip(r["times"], gpt["times"], strict=True)]
        in_model = [a - b for a, b in zip(r["model_times"], gpt["model_times"], strict=True)]
        first, middle, last = statistics.quantiles(turns, n=4, method="inclusive")
        columns[name] = [
            f"{r['tokens_per_second'] / gpt['tokens_per_second']:.4f}",
            f"{gpt['seconds'] / (gpt['seconds'] + r['keys']):.4f}",
            f"{gpt['seconds'] / (gpt['seconds'] + r['reading']):.4f}" if r["reading"] else "--",
            f"{mean_gpt / mean:.4f}",
            f"{mean_gpt / (mean_gpt + r['keys']):.4f}",
            f"{r['seconds'] - gpt['seconds']:.3f}",
            f"{middle:.3f} ({first:.3f} to {last:.3f})",
            f"{statistics.mean(turns):.3f}",
            f"{statistics.median(in_model):.3f}",
            f"{r['keys']:.3f}",
            f"{r['reading']:.3f}" if r["reading"] else "--",
        ]
    heads = (
        "tokens/s over GPT's, medians",
        "… what the keys leave of it, at the rate of a copy",
        "… what they leave as the kernel reads them",
        "tokens/s over GPT's, means",
        "… what the keys leave of that, at the rate of a copy",
        "s longer than GPT, medians",
        "… turn by turn, median (the middle half)",
        "… turn by turn, mean",
        "… in the model, turn by turn, median",
        "what the keys take, at the rate of a copy, s",
        "… what they add to the time of the kernel",
    )
    rows = [[head, *cells] for head, *cells in zip(heads, *columns.values(), strict=True)]
    return (["", *columns], rows) if columns else None


def longer(record: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    """By how much it took longer than another, turn by turn: the median, the least and the most."""
    times = [a - b for a, b in zip(record[key], other[key], strict=True)]
    median, least, most = (f"{round(t, 2) + 0.0:+.2f}" for t in (statistics.median(times), min(times), max(times)))
    return f"{median} ({least} to {most})"


def between(times: Sequence[float]) -> str:
    """The shortest and the longest of several times."""
    return f" ({min(times):.2f}–{max(times):.2f})" if len(times) > 1 else ""


def generation(record: dict[str, Any]) -> str:
    """What drawing takes."""
    beside = keys_table(record["generation"])
    tables = [markdown(*generation_table(record["generation"])), *([markdown(*beside)] if beside else [])]
    return "\n\n".join([*tables, *filter(None, [record.get("note")])])


def decode_kernel_rows(cases: Mapping[str, Mapping[str, Any]]) -> Rows:
    """A step's attention, by our kernel and under a mask."""
    rows = [
        [
            f"{name}, {path}",
            f"{r['us']:.1f}",
            f"{r['rate']:.0%}",
            f"{r['error']:.1e}",
            f"{r['us'] / paths['mask']['us']:.2f}",
        ]
        for name, paths in cases.items()
        for path, r in paths.items()
    ]
    return ["", "µs a layer", "of a copy's rate", "error", "× the mask's time"], rows


def decode_kernel(record: dict[str, Any]) -> str:
    """Attention of a step of decoding."""
    return "\n\n".join([markdown(*decode_kernel_rows(record["cases"])), *filter(None, [record.get("note")])])


def scoring(record: dict[str, Any]) -> str:
    """Seconds, texts and tokens a second, and the ratio to one pass."""
    texts, tokens, ratio = record["texts_per_second"], record["asked_tokens_per_second"], record["over_one_pass"]
    rows = [
        [name, f"{s:.3f}", f"{texts[name]:,.1f}", f"{tokens[name]:,.0f}", f"{ratio[name]:.2f}"]
        for name, s in record["seconds"].items()
    ]
    return markdown(["", "seconds", "texts/s", "asked tokens/s", "× the time of one pass"], rows)


def bos(record: dict[str, Any]) -> str:
    """Perplexity by the token at position 0."""
    table = record["perplexity"]
    kinds = list(next(iter(table.values())))
    rows = [[f"`{token}`", *(f"{row[kind]:.2f}" for kind in kinds)] for token, row in table.items()]
    return markdown(["token at position 0", *(f"perplexity, {kind}" for kind in kinds)], rows)


def copies(record: dict[str, Any]) -> str:
    """Perplexity from the past alone and with copies."""
    rows = [[kind, *(f"{value:.2f}" for value in row.values())] for kind, row in record["perplexity"].items()]
    return markdown(["perplexity", "past only", "with copies"], rows)


def attention(record: dict[str, Any]) -> str:
    """Relative error of the logits, by architecture."""
    table = record["relative_error"]
    columns = list(next(iter(table.values())))
    rows = [[name, *(f"{row[column]:.2e}" for column in columns)] for name, row in table.items()]
    return markdown(["", *columns], rows)


def training(record: dict[str, Any]) -> str:
    """A step of each method."""
    rows = []
    for name, method in record["methods"].items():
        memory = "–" if method["memory_gib"] is None else f"{method['memory_gib']:.1f} GiB"
        rows.append(
            [
                name, f"{method['step_ms']:.1f} ms", f"{method['ratio']:.3f} ×", f"{method['floor']:.3f} ×",
                f"{method['tokens_per_second'] / 1000:,.0f} k", f"{method['mfu']:.1%}", memory, f"{method['wait']:.2%}",
            ]
        )  # fmt: skip
    peak = (
        f"MFU is of the {record['matmul_tflops']:.0f} TFLOP/s that a large bf16 matrix product reached in the same run."
    )
    columns = ["", "step", "over GPT", "floor", "tokens/s", "MFU", "memory", "waiting for data"]
    return markdown(columns, rows) + "\n\n" + peak


def attention_kernel(record: dict[str, Any]) -> str:
    """Time and rate of the kernels, forward and backward."""
    rows = [
        [
            f"{case}, {path}", f"{t['forward_ms']:.2f} ms", f"{t['forward_tflops']:.0f}", f"{t['backward_ms']:.2f} ms",
            f"{t['backward_tflops']:.0f}",
        ]
        for case, paths in record["timing"].items()
        for path, t in paths.items()
    ]  # fmt: skip
    return markdown(["", "forward", "TFLOP/s", "backward", "TFLOP/s"], rows)


def from_scratch(record: dict[str, Any]) -> str:
    """Perplexities in the five modes on each split, and what the runs took."""
    parts = []
    for split in next(iter(record["runs"].values()))["splits"]:
        rows = []
        for name, run in record["runs"].items():
            modes = run["splits"][split]["modes"]
            cells = ["--" if m is None else f"{m['perplexity']:.2f}" for m in modes.values()]
            rows.append([name, *cells])
        ours, causal = (record["runs"].get(name) for name in ("AC-GPT", "GPT"))
        if ours and causal:
            pairs = zip(*(run["splits"][split]["modes"].values() for run in (ours, causal)), strict=True)
            over = [f"{a['perplexity'] / b['perplexity'] - 1:+.1%}" if a and b else "--" for a, b in pairs]
            intervals = record.get("over", {}).get("splits", {}).get(split, {})
            over = [over_others(text, intervals.get(mode)) for text, mode in zip(over, modes, strict=True)]
            rows.append(["AC-GPT over GPT", *over])
        columns = [f"{split} split", *(mode.replace("-", " ") for mode in modes)]
        parts.append(markdown(columns, rows))
    rows = [
        [
            name, f"{run['steps']:,}", f"{run['texts']:,}", f"{run['tokens'] / 1e6:.0f} M", f"{run['seconds']:.0f} s",
            f"{run['tokens_per_second'] / 1000:,.0f} k", f"{run['wait']:.2%}",
        ]
        for name, run in record["runs"].items()
    ]  # fmt: skip
    columns = ["", "steps", "sequences", "tokens", "training time", "tokens/s", "waiting for data"]
    parts.append(markdown(columns, rows))
    about = f"Trained on: {record['text']}."
    differences = [found for modes in record.get("over", {}).get("splits", {}).values() for found in modes.values()]
    if any(found["interval"] for found in differences):
        resamples = record["over"]["bootstrap"]["resamples"]
        about += f" In brackets: the 95 % interval over texts (paired bootstrap, {resamples:,} resamples). Bold: it "
        about += "excludes zero."
    return "\n\n".join([*parts, about])


def over_others(text: str, found: Mapping[str, Any] | None) -> str:
    """A relative difference with its interval, bold where that excludes zero; without one, as it is."""
    if not found or not found["interval"]:
        return text
    low, high = found["interval"]
    text = f"{text} ({low:+.1f} to {high:+.1f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def finetuning_rates(record: dict[str, Any]) -> str:
    """Perplexities after as many steps with different optimizers and rates."""
    steps = [key for key in record["rows"][0] if key.startswith("step ")]
    modes = list(record["rows"][0][steps[0]])
    columns = ["", *(f"{mode.replace('-', ' ')}, {step}" for step in steps for mode in modes)]
    return markdown(columns, [[r["what"], *(f"{r[s][m]:.2f}" for s in steps for m in modes)] for r in record["rows"]])


def target_positions(record: dict[str, Any]) -> str:
    """Perplexities in the five modes, a row a run."""
    rows = [
        [r["what"], f"`{r['keys']}`" if r["keys"] else "–", *(f"{p:.2f}" for p in r["perplexity"].values())]
        for r in record["rows"]
    ]
    columns = ["", "KEYS", *(mode.replace("-", " ") for mode in record["rows"][0]["perplexity"])]
    return markdown(columns, rows) + f"\n\nTrained on {record['text']}."


def resume(record: dict[str, Any]) -> str:
    """Rate and wait of a run before it was stopped and after it was resumed."""
    rows, stop = [], record["stopped_after"]
    log = [row for row in record["log"] if row["step"] != 1]  # the first has compilation in it
    first = min(row["step"] for row in log if row["step"] > stop)
    for name, part in (
        (f"before it was stopped, to step {stop}", [row for row in log if row["step"] <= stop]),
        (f"the first {first - stop:.0f} steps after", [row for row in log if row["step"] == first]),
        ("the others", [row for row in log if row["step"] > first]),
    ):
        rate, wait = (statistics.median(row[key] for row in part) for key in ("tokens_per_second", "wait"))
        rows.append([name, f"{rate / 1000:,.0f} k", f"{wait:.1%}"])
    return markdown(["", "tokens/s, median", "waiting for data, median"], rows)


def default_adapter(record: dict[str, Any]) -> str:
    """The embedded default's adapter in the course of its training."""
    modes = ("unconditional", "training", "training-no-future")
    rows = [
        [f"{row['step']:,}", f"{row['tokens'] / 1e6:.0f} M", *(f"{row[mode]:.2f}" for mode in modes)]
        for row in record["watched"]
    ]
    columns = ["step", "tokens", "unconditional", "training", "training no future"]
    asked = record["evaluation"]
    modes = asked["modes"].items()
    after = markdown(
        [f"{asked['texts']} texts of test", *(mode for mode, _ in modes)],
        [
            ["perplexity", *(f"{found['perplexity']:.2f}" for _, found in modes)],
            ["95 %", *("{:.2f} to {:.2f}".format(*found["interval"]) for _, found in modes)],
        ],
    )
    said = f"`{asked['command']}`, {asked['hardware']}, torch {asked['torch']}"
    return f"{markdown(columns, rows)}\n\n{record['note']}\n\n{after}\n\n{said}. The training:"


def gap_rows(results: dict[str, Any]) -> Rows:
    """Who fills gaps better, how often and by how much; then what the judge says of each fill."""

    def spread(found: dict[str, Any], key: str, form: str) -> str:
        low, high = found[f"{key}_interval"]
        return f"{found[key]:{form}} [{low:{form}}, {high:{form}}]"

    wins, means = [], []
    true: list[list[str]] = []
    for way, kinds in results.items():
        one = next(iter(kinds.values()))
        for name in one["comparisons"]:
            found = [kind["comparisons"][name] for kind in kinds.values()]
            wins.append([f"{way}; {name}: wins", *(spread(f, "win_rate", ".1%") for f in found)])
            wins.append([f"{way}; {name}: by, in nats", *(spread(f, "difference", "+.2f") for f in found)])
        for name in one["means"]:
            judged = [kind["means"][name] for kind in kinds.values()]
            cells = [f"{mean['log_prob']:.2f}; {mean['right']:.1%}" for mean in judged]
            if name == "true":
                true = [["log p of the text; true tokens: the true text", *cells]]
            else:
                means.append([f"{way}; {name}", *cells])
    return ["", *kinds], wins + true + means


def gaps(record: dict[str, Any]) -> str:
    """Fills with and without the future, judged."""
    return markdown(*gap_rows(record["results"]))


def worth_rows(worth: dict[str, Any]) -> Rows:
    """Perplexity with and without the future, a row a model."""
    rows = []
    for model, kinds in worth.items():
        cells = [
            (f"{w['past']:.2f}", f"{w['future']:.2f}", f"{w['future'] / w['past'] - 1:+.1%}") for w in kinds.values()
        ]
        rows.append([model, *(cell for three in cells for cell in three)])
    return [
        "perplexity",
        *(c for kind in kinds for c in (f"{kind}, past only", f"{kind}, with future", "change")),
    ], rows


def with_future(record: dict[str, Any]) -> str:
    """What the future is worth."""
    return markdown(*worth_rows(record["worth"]))


def where_rows(record: Mapping[str, Any]) -> Rows:
    """The gain from the future by the distance to what is given next, a column a model."""
    gains, rows = record["gains"], []
    for label, first in next(iter(gains.values())).items():  # the same for all: they are asked the same
        cells = [found[label] for found in gains.values()]
        shown = ["--" if cell["gain"] is None else f"{cell['gain']:+.3f}{span(cell['interval'])}" for cell in cells]
        rows.append([label, f"{first['tokens']:,}", *shown])
    return ["tokens up to the next given one", "tokens", *gains], rows


def span(interval: Sequence[float] | None) -> str:
    """An interval, in brackets."""
    return "" if interval is None else " ({:+.3f} to {:+.3f})".format(*interval)


def where(record: dict[str, Any]) -> str:
    """Where in a gap the future is worth something."""
    of = record["set"]
    about = (
        f"In nats a token; 95 % intervals over texts; {record['mode']}, {of['texts']} texts of {of['length']} tokens."
    )
    return "\n\n".join([markdown(*where_rows(record)), about, *filter(None, [record.get("note")])])


def architecture_rows(record: dict[str, Any]) -> Rows:
    """What became of each model type, and by how many nats it differs at most from the oracle, in any way of asking."""
    rows = []
    for r in record["rows"]:
        measured = [f"{max(r['differences'].values()):.0e}", f"{r['effect']:.2f}"] if r["differences"] else ["–", "–"]
        reason = r["reason"].removeprefix(f"{r['class']} ").removeprefix("cannot be put through acgpt's attention: ")
        rows.append([r["type"], r["class"], r["setting"], r["verdict"], *measured, reason])
    return ["model type", "class", "setting", "verdict", "difference", "copies matter by", "reason"], rows


def architectures(record: dict[str, Any]) -> str:
    """Causal models of transformers under acgpt: a table for each verdict, with the columns that it fills."""
    columns, rows = architecture_rows(record)
    parts = []
    for verdict in sorted({row[3] for row in rows}, key=lambda verdict: (verdict == "not built", verdict)):
        chosen = [row for row in rows if row[3] == verdict]
        shown = [i for i in range(len(columns)) if i != 3 and any(row[i] not in ("", "–") for row in chosen)]
        cells = [[row[i].replace("|", "\\|").replace("<", "&lt;") for i in shown] for row in chosen]
        kinds = len({row[0] for row in chosen})
        table = markdown_table([columns[i] for i in shown], cells, [False] * len(shown))  # mostly words
        parts += [f"**{verdict.capitalize()}**: {kinds} model types", table]
    return "\n\n".join(parts)


TABLES = {
    "architectures": architectures,
    "attention": attention,
    "attention_kernel": attention_kernel,
    "bos": bos,
    "copies": copies,
    "decoding": decoding,
    "decode_kernel": decode_kernel,
    "default_adapter": default_adapter,
    "finetuning_rates": finetuning_rates,
    "from_scratch": from_scratch,
    "gaps": gaps,
    "generation": generation,
    "resume": resume,
    "scoring": scoring,
    "target_positions": target_positions,
    "training": training,
    "where": where,
    "with_future": with_future,
}


def reported(kept: Sequence[str], check: bool) -> str:
    """What `acgpt report` makes of kept runs (keep_runs.py): a table, a figure, or how they were made.

    Args:
        kept: A folder of benchmarks/results; what is wanted of it; then what is left out, runs, the "paper",
            "-COLUMN" or "-caption" (but for what it says of the rows); and which rows alone are wanted, COLUMN=VALUE.
        check: Is a figure only looked at?
    """
    from acgpt.report.runs import find_runs, read_runs

    name, what, *choices = kept
    stem = choices.pop(0) if what == "figure" else what
    without = [choice for choice in choices if "=" not in choice]
    places = find_runs([ROOT / "benchmarks" / "results" / name])[0]
    folders = [folder for folder in places if folder.name not in without]
    runs, named = read_runs(folders), dict.fromkeys(folder.name for folder in places)
    if what in ("commands", "rates", "draws", "figure"):
        for choice in choices:
            known(choice, named, name)
    if what in ("commands", "rates"):
        return commands(runs, what == "rates")
    if what == "draws":
        return draws(runs) or sys.exit(f"{name} has no generations: see benchmarks/results/{name}.")
    newest = max(path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*"))
    parts = parts_of(tuple(folders), newest)
    if what == "figure":
        figures = {each: (draw, part.captions.get(each, "")) for part in parts for each, draw in part.pictures.items()}
        draw, words = known(stem, figures, name)
        figure = drawn(draw, ROOT / "docs" / f"{name}-{stem.replace('/', '-')}.png", check)
        return f"![{stem}]({figure})" + f"\n\n{words}" * bool(words)
    table = known(stem, {each: table for part in parts for each, table in part.tables.items()}, name)
    columns = {f"-{column.key}": column for column in table.columns}
    values: dict[str, list[str]] = {}
    for column, _, value in (choice.partition("=") for choice in choices if "=" in choice):
        known(f"-{column}", columns, f"{stem} of {name}")
        values.setdefault(column, []).append(value)
    for choice in without:
        known(choice, {**columns, "-caption": None, "paper": None, **named}, name)
    rows = [row for row in table.select(**values).rows if not (row.paper and "paper" in without)]
    if not rows:
        sys.exit(f"{stem} of {name} has no row with {' '.join(choices)}: see benchmarks/results/{name}.")
    shown = tuple(column for key, column in columns.items() if key not in without)
    caption = "" if "-caption" in without else table.caption
    table = replace(table, rows=tuple(rows), columns=shown, caption=caption)
    return f"{table.markdown()}\n{table.full_caption}"


@functools.cache
def parts_of(folders: tuple[Path, ...], newest: int) -> list[Any]:
    """The parts of the report of these runs, until a file changes; several tables of a page are of the same."""
    from acgpt.report.write import make_report

    return make_report(folders).parts


def known(key: str, there: dict[str, Any], name: str) -> Any:
    """What has this name; or an end that says what there is."""
    if key not in there:
        sys.exit(f"{name} has no {key}: it has {', '.join(there)}.")
    return there[key]


def timeless(command: Sequence[str]) -> list[str]:
    """A command without the time that it was given: a run that was stopped and went on is the same."""
    limits = {each for i, word in enumerate(command) if word == "--minutes" for each in (i, i + 1)}
    return [word for i, word in enumerate(command) if i not in limits]


def commands(runs: Sequence[Run], rates: bool) -> str:
    """How runs were made: what their commands have in common once, then what each has of its own, and what it took."""
    words = [[word for word in timeless(run.results["command"]) if not word.startswith("output=")] for run in runs]
    common = [word for word in words[0] if all(word in own for own in words)]
    rows = []
    for run, own in zip(runs, words, strict=True):
        keys, took = " ".join(f"`{word}`" for word in own if word not in common), run.results
        rate = [f"{took['tokens_per_second'] / 1000:,.3g} k"] if rates else []
        rows.append([run.name, keys, f"{took['seconds']:.0f} s", *rate])
    machines = dict.fromkeys(machine({**run.results["versions"], **run.results}) for run in runs)
    command = shlex.join([*common, "output=runs/RUN", "KEYS"])
    columns = ["run", "keys", "time", *(["tokens/s"] if rates else [])]
    return f"{markdown(columns, rows)}\n\n`{command}`, {'; '.join(machines)}."


def draws(runs: Sequence[Run]) -> str:
    """What `acgpt generate` took, a row a run and set; then its command, with dots for what differs."""
    rows, words, machines = [], [], {}
    for run in runs:
        for index in sorted((run.folder / "generations").glob("*/index.json")):
            found = json.loads(index.read_text(encoding="utf-8"))
            modes = [mode for mode in found["modes"].values() if mode]
            tokens, calls, seconds = (sum(mode[key] for mode in modes) for key in ("tokens", "calls", "seconds"))
            for mode in modes:
                record = json.loads((index.parent / mode["file"]).with_suffix(".json").read_text(encoding="utf-8"))
                machines[machine({**record["versions"], **record, "date": record["date"][:10]})] = None
                words.append(
                    [re.sub(rf"^runs/{re.escape(run.name)}/", "runs/RUN/", word) for word in record["command"]]
                )
            if modes:
                took = [f"{tokens:,}", f"{calls:,}", f"{seconds:,.0f} s", f"{tokens / seconds:,.0f}"]
                rows.append([run.name, f"{found['set']['r_max']:g}", f"{modes[0]['texts']} × {len(modes)}", *took])
    if not rows:
        return ""
    shown = [word if all(word in own for own in words) else "…" for word in words[0]]
    columns = ["run", "r_max", "texts × modes", "tokens drawn", "calls of the model", "time", "tokens/s"]
    return f"{markdown(columns, rows)}\n\n`{' '.join(shown)}`, {'; '.join(machines)}."


def drawn(draw: Any, path: Path, check: bool) -> str:
    """The name of a figure of the report that lies in docs/, drawn anew unless it is only checked.

    Other versions of matplotlib draw other bytes: the figure carries a fingerprint of what it shows.
    """
    shown = hashlib.sha256(repr((draw.func.__name__, draw.args)).encode()).hexdigest()
    there = path.exists() and f"{SHOWS}\0{shown}".encode() in path.read_bytes()
    if check and not there:
        sys.exit(f"{path.name} does not show what the result files say: run python benchmarks/render.py")
    if not there:
        from acgpt.report import pictures

        path.write_bytes(pictures.render_figure(draw, {SHOWS: shown})["png"])
    return path.name


def rendered(page: str, check: bool = False) -> str:
    """The page with every table written anew, and its figures drawn, unless they are only checked."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        body = TABLES[record["benchmark"]](record)
        return f"<!-- table {name} -->\n{body}\n\n{provenance(record)}\n<!-- end -->"

    def report(match: re.Match[str]) -> str:
        return f"<!-- report {match[1]} -->\n{reported(shlex.split(match[1]), check)}\n<!-- end -->"

    page = re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)
    return re.sub(r"<!-- report (.+?) -->.*?<!-- end -->", report, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not what it should be")
    check = parser.parse_args().check
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = rendered(before, check)
        if not check:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{page.name} is not what the result files say: run python benchmarks/render.py")


if __name__ == "__main__":
    main()
