"""The tables of result files, in Markdown: `render.py` writes them into docs/, and each benchmark prints its own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from acgpt.display.table import markdown_table


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with numbers in all columns but the first."""
    return markdown_table(columns, rows, [False, *[True] * (len(columns) - 1)])


Rows = tuple[list[str], list[list[str]]]  # the columns, and the rows


def decoding(record: dict[str, Any]) -> str:
    """Render seconds, tokens per second, and the ratio to `generate` or, where that was not timed, to our first row."""
    base = "generate" if "over generate" in record else "acgpt, left to right"
    rate, ratio = record["tokens_per_second"], record[f"over {base}"]
    rows = [[name, f"{s:.2f}", f"{rate[name]:,.0f}", f"{ratio[name]:.2f}"] for name, s in record["seconds"].items()]
    share, bandwidth = record["bandwidth_share"], record["copy_bandwidth"] / 1e12
    note = f"Left to right uses {share:.0%} of the {bandwidth:.3g} TB/s that a large copy reaches on this machine."
    return markdown(*with_before(record, ["", "seconds", "tokens/s", f"× {base}"], rows)) + "\n\n" + note


def with_before(record: Mapping[str, Any], columns: list[str], rows: list[list[str]]) -> Rows:
    """Add a column with the ratio of the seconds of an earlier version, if these were measured on the same machine."""
    if not (before := record.get("before")):
        return columns, rows
    ratios = [f"{before[row[0]] / record['seconds'][row[0]]:.2f}" if row[0] in before else "--" for row in rows]
    return [*columns, "× before"], [[*row, ratio] for row, ratio in zip(rows, ratios, strict=True)]


def generation_table(records: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return a row per method and mode, compared with GPT in that mode, or in the same mode without the future."""
    optional = ("prefill", "keys", "reading")  # measured for some methods only
    extra = [key for key in optional if any(record.get(key) for record in records.values())]
    repeated = {"s longer": "times", "in the model": "model_times"}  # only if timed several times
    repeated = {
        name: key for name, key in repeated.items() if all(len(record.get(key, [])) > 1 for record in records.values())
    }
    rows = []
    for name, record in records.items():
        gpt = gpt_record(name, records)
        ratio = f"{record['tokens_per_second'] / gpt['tokens_per_second']:.2f}" if gpt else "--"
        seconds = f"{record['seconds']:.2f}{time_range(record.get('times', []))}"
        row = [name, f"{record['tokens']:,}", f"{record['calls']:,}", seconds]
        row += [f"{record[key]:.2f}" if record.get(key) else "" for key in extra]
        row += [f"{record['tokens_per_second']:,.0f}", ratio]
        row += [extra_time(record, gpt, key) if gpt and record is not gpt else "" for key in repeated.values()]
        rows.append([*row, f"{record['outside']:.0%}"])
    columns = [
        "",
        "tokens",
        "calls",
        "seconds",
        *extra,
        "tokens/s",
        "× GPT",
        *repeated,
        "outside the model",
    ]
    return columns, rows


def gpt_record(name: str, records: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return GPT's record in the mode of this row, or in the same mode without the future; `None` if not timed."""
    mode = name.split(", ")[1]
    return records.get(f"gpt, {mode}") or records.get(f"gpt, {mode}-no-future")


def keys_table(records: Mapping[str, Mapping[str, Any]]) -> Rows | None:
    """Compare rows that read more keys than GPT with GPT; `None` if there are none.

    The table shows how much slower they are, and how much slower reading the keys alone would make them.
    """
    columns: dict[str, list[str]] = {}
    for name, record in records.items():
        gpt = gpt_record(name, records)
        timed = [len(one.get(key, [])) for one in (record, gpt or {}) for key in ("times", "model_times")]
        if not (gpt and record.get("keys") and min(timed) > 1):
            continue
        mean, mean_gpt = statistics.mean(record["times"]), statistics.mean(gpt["times"])
        differences = [a - b for a, b in zip(record["times"], gpt["times"], strict=True)]
        in_model = [a - b for a, b in zip(record["model_times"], gpt["model_times"], strict=True)]
        first, middle, last = statistics.quantiles(differences, n=4, method="inclusive")
        columns[name] = [
            f"{record['tokens_per_second'] / gpt['tokens_per_second']:.4f}",
            f"{gpt['seconds'] / (gpt['seconds'] + record['keys']):.4f}",
            f"{gpt['seconds'] / (gpt['seconds'] + record['reading']):.4f}" if record["reading"] else "--",
            f"{mean_gpt / mean:.4f}",
            f"{mean_gpt / (mean_gpt + record['keys']):.4f}",
            f"{record['seconds'] - gpt['seconds']:.3f}",
            f"{middle:.3f} ({first:.3f} to {last:.3f})",
            f"{statistics.mean(differences):.3f}",
            f"{statistics.median(in_model):.3f}",
            f"{record['keys']:.3f}",
            f"{record['reading']:.3f}" if record["reading"] else "--",
        ]
    headings = (
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
    rows = [[heading, *cells] for heading, *cells in zip(headings, *columns.values(), strict=True)]
    return (["", *columns], rows) if columns else None


def extra_time(record: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    """Format by how much longer a record took than another, turn by turn: median, least and most."""
    times = [a - b for a, b in zip(record[key], other[key], strict=True)]
    median, least, most = (f"{round(t, 2) + 0.0:+.2f}" for t in (statistics.median(times), min(times), max(times)))
    return f"{median} ({least} to {most})"


def time_range(times: Sequence[float]) -> str:
    """Format the shortest and the longest of several times."""
    return f" ({min(times):.2f}–{max(times):.2f})" if len(times) > 1 else ""


def decode_kernel_rows(cases: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return the attention of a decoding step, by our kernel and under a mask."""
    rows = [
        [
            f"{name}, {path}",
            f"{result['us']:.1f}",
            f"{result['rate']:.0%}",
            f"{result['error']:.1e}",
            f"{result['us'] / paths['mask']['us']:.2f}",
        ]
        for name, paths in cases.items()
        for path, result in paths.items()
    ]
    return ["", "µs a layer", "of a copy's rate", "error", "× the mask's time"], rows


def gap_rows(results: dict[str, Any]) -> Rows:
    """Return which model fills gaps better, how often and by how much; then the judge's score of each fill."""

    def spread(comparison: dict[str, Any], key: str, spec: str) -> str:
        low, high = comparison[f"{key}_interval"]
        return f"{comparison[key]:{spec}} [{low:{spec}}, {high:{spec}}]"

    wins, means = [], []
    true: list[list[str]] = []
    for decoding, kinds in results.items():
        first = next(iter(kinds.values()))
        for name in first["comparisons"]:
            comparisons = [kind["comparisons"][name] for kind in kinds.values()]
            wins.append(
                [f"{decoding}; {name}: wins", *(spread(comparison, "win_rate", ".1%") for comparison in comparisons)]
            )
            wins.append(
                [
                    f"{decoding}; {name}: by, in nats",
                    *(spread(comparison, "difference", "+.2f") for comparison in comparisons),
                ]
            )
        for name in first["means"]:
            judged = [kind["means"][name] for kind in kinds.values()]
            cells = [f"{mean['log_prob']:.2f}; {mean['right']:.1%}" for mean in judged]
            if name == "true":
                true = [["log p of the text; true tokens: the true text", *cells]]
            else:
                means.append([f"{decoding}; {name}", *cells])
    return ["", *kinds], wins + true + means


def mean_cell(value: Mapping[str, Any] | None, spec: str) -> str:
    """Return a mean and its interval as text."""
    if value is None:
        return "--"
    interval = "" if value["interval"] is None else " [{:{spec}}, {:{spec}}]".format(*value["interval"], spec=spec)
    return f"{value['mean']:{spec}}{interval}"


def infilling_rows(kinds: Mapping[str, Any]) -> Rows:
    """Return exact matches and passed programs, a row for each kind of task and condition."""

    def share(value: Mapping[str, Any] | None) -> str:
        if value is None:
            return "--"
        low, high = value["interval"]
        return f"{value['percent']:.1f} % [{low:.1f}, {high:.1f}]"

    rows = [
        [f"{entry['tasks']:,} {kind}", condition, share(result["exact"]), share(result.get("pass"))]
        for kind, entry in kinds.items()
        for condition, result in entry.items()
        if isinstance(result, dict)
    ]
    return ["tasks", "condition", "exact match", "pass@1"], rows


def infilling_differences(kinds: Mapping[str, Any]) -> Rows:
    """Return how many points more fills are hits than those of another model, a row for each kind and condition."""
    rows = [
        [kind, condition, *(mean_cell(entry.get(measure), "+.1f") for measure in ("exact", "pass"))]
        for kind, conditions in kinds.items()
        for condition, entry in conditions.items()
    ]
    return ["difference in points", "condition", "exact match", "pass@1"], rows


def infilling_costs(costs: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return what the fills cost, a row per condition."""
    headings = ["condition", "tokens drawn", "texts scored", "passes", "seconds", "calls / known", "seconds / known"]
    rows = []
    for condition, cost in costs.items():
        counts = [f"{cost[key]:,}" for key in ("drawn", "scored", "passes")]
        seconds = f"{cost['seconds']:.0f}" if "seconds" in cost else "--"
        ratios = [f"{cost[key]:.2f}" if key in cost else "--" for key in ("calls_ratio", "seconds_ratio")]
        rows.append([condition, *counts, seconds, *ratios])
    return headings, rows


def serving_rows(loads: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the table of serving.py."""
    columns = ["loop", "clients", "requests", "requests/s", "/ 1 client", "first text s", "p50 s", "p95 s", "p99 s"]
    rows = [
        [row["loop"] + (f", {row['share']:.0%}" if "share" in row else ""), str(row["clients"] or "--")]
        + [str(row["requests"]), f"{row['requests_per_second']:.2f}", f"{row['ratio']:.2f}"]
        + ["--" if row[name] is None else f"{row[name]:.2f}" for name in ("first_text", "p50", "p95", "p99")]
        for row in loads
    ]
    return columns, rows


def startup_rows(results: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return the time of commands until their answer, a row per command; the first is the floor."""
    rows = []
    for name, result in results.items():
        beyond = "" if result["beyond_floor"] <= 0 else f"{result['beyond_floor']:.1f}"
        rows.append(
            [name, f"{result['seconds']:.1f}", f"{result['cpu_seconds']:.1f}", beyond, f"{result['ratio_seconds']:.2f}"]
        )
    return ["command", "s", "CPU s", "s beyond the floor", "time / floor"], rows


def cpu_rows(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Rows:
    """Return the speed of drawing a blank on a CPU, a row per number of threads and program."""
    rows = []
    for threads, programs in results.items():
        for name, result in programs.items():
            cells = []
            for part in ("decoding", "whole"):
                ratios = [result.get(f"{part}{kind}_ratio") for kind in ("", "_cpu")]
                cells += [f"{result[part]:.1f}", *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]
            rows.append([name, threads, *cells])
    columns = [
        f"{name}{column}" for name in ("decoding", "whole call") for column in (", tokens/s", ", × llama.cpp", ", CPU")
    ]
    return ["", "threads", *columns], rows


def cpu_accuracy_rows(accuracy: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return how far the small copies of a network are from it, a row per kind of query."""
    rows = [
        [
            name,
            f"{result['tokens']:,}",
            f"{result['perplexity']:.3f}",
            f"{result['perplexity_small']:.3f}",
            f"{result['change']:+.2%}",
            *(f"{result[key]:.3f}" for key in ("median", "rms", "largest")),
        ]
        for name, result in accuracy.items()
    ]
    columns = ["", "tokens", "perplexity, float32", "small copy", "change"]
    return [*columns, "median difference, nats", "root mean square", "largest"], rows
