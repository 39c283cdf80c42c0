"""The tables of result files, in Markdown: `render.py` writes them into docs/, and each benchmark prints its own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from acgpt.display.table import markdown_table


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with numbers in all columns but the first."""
    return markdown_table(columns, rows, [False, *[True] * (len(columns) - 1)])


Rows = tuple[list[str], list[list[str]]]  # the columns, and the rows


def provenance(record: dict[str, Any]) -> str:
    """Return the command and the machine of a record."""
    return f"`{record['command']}`, {machine(record)}."


def machine(record: dict[str, Any]) -> str:
    """Return the hardware, versions and date of a record."""
    return f"{record['hardware']}, torch {record['torch']}, transformers {record['transformers']}, {record['date']}"


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


def generation(record: dict[str, Any]) -> str:
    """Render the cost of `acgpt generate`."""
    keys = keys_table(record["generation"])
    tables = [markdown(*generation_table(record["generation"])), *([markdown(*keys)] if keys else [])]
    return "\n\n".join([*tables, *filter(None, [record.get("note")])])


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


def decode_kernel(record: dict[str, Any]) -> str:
    """Render the attention of a decoding step."""
    return "\n\n".join([markdown(*decode_kernel_rows(record["cases"])), *filter(None, [record.get("note")])])


def scoring(record: dict[str, Any]) -> str:
    """Render seconds, texts and tokens per second, and the ratio to one pass."""
    texts, tokens, ratio = record["texts_per_second"], record["asked_tokens_per_second"], record["over_one_pass"]
    rows = [
        [name, f"{s:.3f}", f"{texts[name]:,.1f}", f"{tokens[name]:,.0f}", f"{ratio[name]:.2f}"]
        for name, s in record["seconds"].items()
    ]
    columns = ["", "seconds", "texts/s", "asked tokens/s", "× the time of one pass"]
    return markdown(*with_before(record, columns, rows))


def scaling_rows(points: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a row per case: its sizes, the measured and the predicted seconds, their ratio, and the peak memory."""
    rows, seen = [], set()
    for point in points:
        case = point["case"]
        if (key := (point["kind"], *case.values())) in seen:  # on several axes
            continue
        seen.add(key)
        memory = "--" if point["memory"] is None else f"{point['memory'] / 2**30:.1f} GiB"
        row = [point["kind"], f"{case['length']:,}", f"{case['share']:.0%}", str(case["batch"])]
        row += [f"{point['seconds']:.3f}", f"{point['floor']:.3f}", f"{point['seconds'] / point['floor']:.1f}"]
        rows.append([*row, f"{point['tokens'] / point['seconds']:,.0f}", memory])
    return ["", "tokens", "given", "texts", "s", "floor s", "s / floor", "asked tokens/s", "peak memory"], rows


def scaling(record: dict[str, Any]) -> str:
    """Render how cost grows."""
    rates = f"{record['operations'] / 1e12:.3g} TFLOP/s and {record['bandwidth'] / 1e12:.3g} TB/s"
    note = f"{record['size']} in {record['dtype']}. The floor is at {rates}, measured in the same run."
    return markdown(*scaling_rows(record["points"])) + "\n\n" + note


def bos(record: dict[str, Any]) -> str:
    """Render perplexity by the token at position 0."""
    table = record["perplexity"]
    kinds = list(next(iter(table.values())))
    rows = [[f"`{token}`", *(f"{row[kind]:.2f}" for kind in kinds)] for token, row in table.items()]
    return markdown(["token at position 0", *(f"perplexity, {kind}" for kind in kinds)], rows)


def copies(record: dict[str, Any]) -> str:
    """Render perplexity from the past alone and with copies."""
    rows = [[kind, *(f"{value:.2f}" for value in row.values())] for kind, row in record["perplexity"].items()]
    return markdown(["perplexity", "past only", "with copies"], rows)


def attention(record: dict[str, Any]) -> str:
    """Render the relative error of the logits, by architecture."""
    table = record["relative_error"]
    columns = list(next(iter(table.values())))
    rows = [[name, *(f"{row[column]:.2e}" for column in columns)] for name, row in table.items()]
    return markdown(["", *columns], rows)


def training(record: dict[str, Any]) -> str:
    """Render the cost of a training step of each method."""
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
    """Render time and rate of the kernels, forward and backward."""
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
    """Render perplexities in the five modes on each split, and the cost of the runs."""
    parts = []
    for split in next(iter(record["runs"].values()))["splits"]:
        rows = []
        for name, run in record["runs"].items():
            modes = run["splits"][split]["modes"]
            cells = ["--" if answer is None else f"{answer['perplexity']:.2f}" for answer in modes.values()]
            rows.append([name, *cells])
        ours, causal = (record["runs"].get(name) for name in ("AC-GPT", "GPT"))
        if ours and causal:
            pairs = zip(*(run["splits"][split]["modes"].values() for run in (ours, causal)), strict=True)
            relative = [f"{a['perplexity'] / b['perplexity'] - 1:+.1%}" if a and b else "--" for a, b in pairs]
            intervals = record.get("over", {}).get("splits", {}).get(split, {})
            relative = [with_interval(text, intervals.get(mode)) for text, mode in zip(relative, modes, strict=True)]
            rows.append(["AC-GPT over GPT", *relative])
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
    note = f"Trained on: {record['text']}."
    differences = [
        difference for modes in record.get("over", {}).get("splits", {}).values() for difference in modes.values()
    ]
    if any(difference["interval"] for difference in differences):
        resamples = record["over"]["bootstrap"]["resamples"]
        unit = record["over"]["bootstrap"].get("unit", "texts")
        note += f" In brackets: the 95 % interval over {unit} (paired bootstrap, {resamples:,} resamples). Bold: the "
        note += "interval excludes zero."
    return "\n\n".join([*parts, note])


def with_interval(text: str, difference: Mapping[str, Any] | None) -> str:
    """Append the interval to a relative difference, and make it bold if the interval excludes zero."""
    if not difference or not difference["interval"]:
        return text
    low, high = difference["interval"]
    text = f"{text} ({low:+.1f} to {high:+.1f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def finetuning_rates(record: dict[str, Any]) -> str:
    """Render perplexities after equal steps with different optimizers and learning rates."""
    steps = [key for key in record["rows"][0] if key.startswith("step ")]
    modes = list(record["rows"][0][steps[0]])
    columns = ["", *(f"{mode.replace('-', ' ')}, {step}" for step in steps for mode in modes)]
    return markdown(
        columns,
        [[row["what"], *(f"{row[step][mode]:.2f}" for step in steps for mode in modes)] for row in record["rows"]],
    )


def target_positions(record: dict[str, Any]) -> str:
    """Render perplexities in the five modes, a row per run."""
    rows = [
        [
            row["what"],
            f"`{row['keys']}`" if row["keys"] else "–",
            *(f"{perplexity:.2f}" for perplexity in row["perplexity"].values()),
        ]
        for row in record["rows"]
    ]
    columns = ["", "KEYS", *(mode.replace("-", " ") for mode in record["rows"][0]["perplexity"])]
    return markdown(columns, rows) + f"\n\nTrained on {record['text']}."


def resume(record: dict[str, Any]) -> str:
    """Render rate and wait of a run before it was stopped and after it was resumed."""
    rows, stop = [], record["stopped_after"]
    log = [row for row in record["log"] if row["step"] != 1]  # the first includes compilation
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
    """Render the perplexities of the embedded model's adapter during training and after it."""
    modes = ("unconditional", "training", "training-no-future")
    rows = [
        [f"{row['step']:,}", f"{row['tokens'] / 1e6:.0f} M", *(f"{row[mode]:.2f}" for mode in modes)]
        for row in record["watched"]
    ]
    columns = ["step", "tokens", "unconditional", "training", "training no future"]
    evaluation = record["evaluation"]
    modes = evaluation["modes"].items()
    after = markdown(
        [f"{evaluation['texts']} texts of test", *(mode for mode, _ in modes)],
        [
            ["perplexity", *(f"{answer['perplexity']:.2f}" for _, answer in modes)],
            ["95 %", *("{:.2f} to {:.2f}".format(*answer["interval"]) for _, answer in modes)],
        ],
    )
    command = f"`{evaluation['command']}`, {evaluation['hardware']}, torch {evaluation['torch']}"
    return f"{markdown(columns, rows)}\n\n{record['note']}\n\n{after}\n\n{command}. The training:"


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


def gaps(record: dict[str, Any]) -> str:
    """Render the fills with and without the future, judged."""
    return markdown(*gap_rows(record["results"]))


def adapter_gap_rows(results: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return how well each of several adapters fills gaps with the future, a row per decoding, measure and adapter."""
    comparisons = {
        "wins over its own past": "adapted: future against past",
        "wins over the model without adapter": "adapted, future, against unadapted, past",
    }
    rows: list[list[str]] = []
    kinds: list[str] = []
    for decoding in next(iter(results.values())):
        by_adapter = {adapter: measured[decoding] for adapter, measured in results.items()}
        kinds = list(next(iter(by_adapter.values())))
        for label, name in comparisons.items():
            for adapter, entries in by_adapter.items():
                found = [entries[kind]["comparisons"][name] for kind in kinds]
                cells = [
                    "{:.1f} % [{:.1f}, {:.1f}]".format(*(100 * x for x in (c["win_rate"], *c["win_rate_interval"])))
                    for c in found
                ]
                rows.append([f"{decoding}; {label}: {adapter}", *cells])
        for adapter, entries in by_adapter.items():
            right = [entries[kind]["means"]["adapted, future"]["right"] for kind in kinds]
            rows.append([f"{decoding}; true tokens: {adapter}", *(f"{100 * share:.1f} %" for share in right)])
    return ["", *kinds], rows


def adapter_gaps(record: dict[str, Any]) -> str:
    """Render how well several adapters fill the same gaps."""
    return markdown(*adapter_gap_rows(record["results"]))


def mode_rows(record: Mapping[str, Any]) -> Rows:
    """Return the perplexities of two adapters in all modes, a row for each text and mode."""
    rows = []
    for text, entry in record["texts"].items():
        for mode, measured in entry["modes"].items():
            perplexities = [f"{measured['perplexity'][name]:.2f}" for name in record["adapters"]]
            below = measured["below"]
            interval = "" if below["interval"] is None else " [{:+.1f}, {:+.1f}]".format(*below["interval"])
            rows.append([text, mode, *perplexities, f"{below['percent']:+.1f} %{interval}"])
    return ["text", "mode", *record["adapters"], "lower by"], rows


def modes(record: dict[str, Any]) -> str:
    """Render the perplexities of two adapters and their paired differences."""
    sizes = [
        f"{text}: {entry['set']['texts']:,} texts of {entry['set']['length']:,} tokens"
        for text, entry in record["texts"].items()
    ]
    columns, rows = mode_rows(record)
    table = markdown_table(columns, rows, [False, False, True, True, True])
    units = sorted({entry["set"].get("unit", "texts") for entry in record["texts"].values()})
    note = f"{'; '.join(sizes)}. In brackets: 95 % intervals over {' or '.join(units)} (paired bootstrap)."
    commands = [f"`{command}`" for command in record.get("evaluations", [])]
    then = [f"{', '.join(commands)}, for each adapter; then:"] if commands else []
    return "\n\n".join([table, note, *filter(None, [record.get("note")]), *then])


def healing_rows(results: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return how often the kept tokens are those of the whole text, a row per tokenizer."""
    rows = []
    for name, result in results.items():
        numbers = [*(f"{number:.2f}" for number in result["given_back"]), f"{result['milliseconds']:.1f}"]
        rows.append([name, f"{result['share']:.3%}", *numbers])
    return ["tokenizer", "right", "tokens given back before", "after", "ms per border"], rows


def healing(record: dict[str, Any]) -> str:
    """Render the borders of gaps with several tokenizers."""
    return markdown(*healing_rows(record["results"]))


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


def infilling(record: dict[str, Any]) -> str:
    """Render the fills of gaps whose true text is known."""
    tables = [markdown(*infilling_rows(record["kinds"])), markdown(*infilling_costs(record["costs"]))]
    tables += [markdown(*infilling_differences(record["differences"]))] if "differences" in record else []
    return "\n\n".join([*tables, f"`{record['fills_command']}`, then `--from-fills`; patience {record['patience']}."])


def cloze_rows(results: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return how many short queries get an accepted fill; the last row has the intervals of all queries."""
    conditions = [name for name in results["all"] if name != "queries"]
    measures = [
        (condition, measure, heading)
        for condition in conditions
        for measure, heading in (("top_1", "top-1"), ("top_5", "top-5"), ("mrr", "MRR"))
        if condition != "known length" or measure == "top_1"
    ]

    def cell(entry: Mapping[str, Any], condition: str, measure: str) -> str:
        if condition not in entry:
            return ""
        value = entry[condition][measure]
        return f"{value:.2f}" if measure == "mrr" else f"{value['accepted']} ({value['percent']:.0f} %)"

    rows = [
        [name, str(entry["queries"]), *(cell(entry, condition, measure) for condition, measure, _ in measures)]
        for name, entry in results.items()
    ]
    intervals = ["95 % interval", ""]
    for condition, measure, _ in measures:
        value = results["all"].get(condition, {}).get(measure)
        bounds = value["interval"] if isinstance(value, dict) else None
        intervals.append(f"{bounds[0]:.0f} to {bounds[1]:.0f} %" if bounds else "")
    return ["", "queries", *(f"{condition}: {heading}" for condition, _, heading in measures)], [*rows, intervals]


def cloze(record: dict[str, Any]) -> str:
    """Render the short queries with accepted answers."""
    return f"{markdown(*cloze_rows(record['results']))}\n\n`{record['fills_command']}`, then:"


def adapter_cloze_rows(results: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return how many short queries each of several adapters fills with an accepted text."""
    first = next(iter(results.values()))
    columns = [(adapter, "future") for adapter in results] + [(next(iter(results)), "past")]

    def cell(value: Mapping[str, Any]) -> str:
        return f"{value['accepted']} ({value['percent']:.0f} %)"

    rows = []
    for name, entry in first.items():
        cells = [
            cell(results[adapter][name][condition][measure])
            for adapter, condition in columns
            for measure in ("top_1", "top_5")
        ]
        rows.append([name, str(entry["queries"]), *cells])
    intervals = [
        "{:.0f} to {:.0f} %".format(*results[adapter]["all"][condition][measure]["interval"])
        for adapter, condition in columns
        for measure in ("top_1", "top_5")
    ]
    headings = [
        f"{adapter if condition == 'future' else condition}: {measure}"
        for adapter, condition in columns
        for measure in ("top-1", "top-5")
    ]
    return ["", "queries", *headings], [*rows, ["95 % interval", "", *intervals]]


def adapter_cloze(record: dict[str, Any]) -> str:
    """Render the short queries of several adapters."""
    return markdown(*adapter_cloze_rows(record["results"]))


LENGTH_MEASURES = {"nats": "nats", "top_1": "top-1, %", "top_5": "top-5, %", "error": "error, tokens"}
LENGTH_FORMATS = {"nats": ".2f", "top_1": ".1f", "top_5": ".1f", "error": ".2f"}


def length_rows(kinds: Mapping[str, Any]) -> Rows:
    """Return how good predicted lengths are, a row for each kind of task and predictor."""
    rows = []
    for kind, entry in kinds.items():
        for name, measures in entry["predictors"].items():
            cells = [mean_cell(measures.get(measure), LENGTH_FORMATS[measure]) for measure in LENGTH_MEASURES]
            ece = f"{measures['ece']:.1f}" if "ece" in measures else "--"
            rows.append([f"{entry['tasks']:,} {kind}, mean {entry['mean_length']:.1f}", name, *cells, ece])
    return ["tasks", "predictor", *LENGTH_MEASURES.values(), "ECE, %"], rows


def length_differences(kinds: Mapping[str, Any]) -> Rows | None:
    """Return the paired differences between predictors of lengths; `None` if there are none."""
    rows = [
        [
            f"{entry['tasks']:,} {kind}",
            name,
            *(mean_cell(by.get(measure), f"+{LENGTH_FORMATS[measure]}") for measure in LENGTH_MEASURES),
        ]
        for kind, entry in kinds.items()
        for name, by in entry["differences"].items()
    ]
    return (["tasks", "difference", *LENGTH_MEASURES.values()], rows) if rows else None


def lengths(record: dict[str, Any]) -> str:
    """Render how good p(length | context) is."""
    more = length_differences(record["kinds"])
    return "\n\n".join([markdown(*length_rows(record["kinds"])), *([markdown(*more)] if more else [])])


def unknown_rows(shares: Mapping[str, Any]) -> Rows:
    """Return perplexities by the share of unknown tokens, a row for each share and adapter."""
    rows, previous = [], None
    for share, by_label in shares.items():
        for label, entry in by_label.items():
            left_out = f"{entry['left out']:.2f}" if "below_left_out" in entry else "--"
            below = [mean_cell(entry.get(key), ".1f") for key in ("below_left_out", "below_first")]
            shown = f"{float(share):.0%}" if share != previous else ""
            rows.append([shown, label, f"{entry['MASK']:.2f}", left_out, *below])
            previous = share
    headings = ["unknown", "adapter", "MASK", "left out", "MASK below left out, %", "MASK below the first adapter's, %"]
    return headings, rows


def marginal_rows(marginals: Mapping[str, Any]) -> Rows:
    """Return nats of a token after an unknown one, a row for each adapter."""
    names = {
        "known": "it is known",
        "summed": "sum over its values",
        "MASK": "MASK",
        "left out": "left out",
        "MASK - summed": "MASK - sum",
        "|MASK - summed|": "absolute",
        "left out - summed": "left out - sum",
    }
    rows = [
        [label, *(mean_cell(entry[key], "+.3f" if " - summed" in key else ".3f") for key in names)]
        for label, entry in marginals.items()
    ]
    return ["nats of a token after one unknown token", *names.values()], rows


def unknown_tokens(record: dict[str, Any]) -> str:
    """Render what unknown tokens cost."""
    tables = [markdown(*unknown_rows(record["shares"]))]
    tables += [markdown(*marginal_rows(record["marginals"]))] if record["marginals"] else []
    return "\n\n".join(tables)


def similarity_rows(kinds: Mapping[str, Any]) -> Rows:
    """Return similarities to the true sentence, a row for each kind of task, condition and file of fills."""
    rows = [
        [
            f"{group['tasks']:,} {kind}",
            entry["condition"],
            entry["label"],
            mean_cell(entry["similarity"], ".3f"),
            mean_cell(entry.get("difference"), "+.3f"),
        ]
        for kind, group in kinds.items()
        for entry in sorted(group["entries"], key=lambda entry: entry["condition"])
    ]
    return ["tasks", "condition", "fills", "similarity", "difference to the first"], rows


def similarity(record: dict[str, Any]) -> str:
    """Render the similarity of fills to the true text."""
    return markdown(*similarity_rows(record["kinds"]))


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


def serving(record: dict[str, Any]) -> str:
    """Return the section of serving.py."""
    return markdown(*serving_rows(record["loads"]))


def startup_rows(results: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return the time of commands until their answer, a row per command; the first is the floor."""
    rows = []
    for name, result in results.items():
        beyond = "" if result["beyond_floor"] <= 0 else f"{result['beyond_floor']:.1f}"
        rows.append(
            [name, f"{result['seconds']:.1f}", f"{result['cpu_seconds']:.1f}", beyond, f"{result['ratio_seconds']:.2f}"]
        )
    return ["command", "s", "CPU s", "s beyond the floor", "time / floor"], rows


def startup(record: dict[str, Any]) -> str:
    """Render the time of commands until their answer."""
    note = (
        f"Medians of {record['rounds']} rounds of fresh processes; load {record['load'][0]} on {record['cores']} cores."
    )
    return f"{markdown(*startup_rows(record['results']))}\n\n{note} The floor: `{record['floor']}`."


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


def cpu(record: dict[str, Any]) -> str:
    """Render the speed of drawing a blank on a CPU, and the accuracy of what makes it fast."""
    note = f"Medians of {record['rounds']} rounds; load {record['load'][0]}. CPU: the ratio of CPU times."
    tables = markdown(*cpu_rows(record["results"])), markdown(*cpu_accuracy_rows(record["accuracy"]))
    return "\n\n".join([tables[0], note, tables[1]])


def worth_rows(worth: dict[str, Any]) -> Rows:
    """Return perplexity with and without the future, a row per model."""
    rows = []
    for model, kinds in worth.items():
        cells = [
            (f"{result['past']:.2f}", f"{result['future']:.2f}", f"{result['future'] / result['past'] - 1:+.1%}")
            for result in kinds.values()
        ]
        rows.append([model, *(cell for triple in cells for cell in triple)])
    return [
        "perplexity",
        *(column for kind in kinds for column in (f"{kind}, past only", f"{kind}, with future", "change")),
    ], rows


def with_future(record: dict[str, Any]) -> str:
    """Render the gain from the future."""
    return markdown(*worth_rows(record["worth"]))


def distance_rows(record: Mapping[str, Any]) -> Rows:
    """Return what the future takes off the perplexity, predicted and measured, a row per distribution."""
    texts, rows = record["texts"], []
    for name in next(iter(texts.values()))["gains"]:
        cells = []
        for text in texts.values():
            entry = text["gains"][name]
            predicted = entry["predicted"]
            interval = "" if entry["interval"] is None else " [{:.1f}, {:.1f}]".format(*entry["interval"])
            cells.append("--" if predicted is None else f"{-100 * math.expm1(-predicted):.1f} %")
            cells.append(f"{entry['percent']:.1f} %{interval}")
        rows.append([name, *cells])
    return ["given tokens", *(f"{text}, {kind}" for text in texts for kind in ("predicted", "measured"))], rows


def curve_rows(record: Mapping[str, Any]) -> Rows:
    """Return the gain in nats by distance on the paper's blocks, a column per text."""
    name = f"gaps {record['curve']:g}"
    curves = {text: entry["gains"][name]["by_distance"] for text, entry in record["texts"].items()}
    labels = dict.fromkeys(label for curve in curves.values() for label in curve)
    rows = []
    for label in labels:
        cells = []
        for curve in curves.values():
            entry = curve.get(label)
            interval = entry and entry["interval"]
            cells.append("--" if entry is None else f"{entry['gain']:.2f}")
            cells[-1] += "" if not interval else " [{:.2f}, {:.2f}]".format(*interval)
        rows.append([label, *cells])
    return ["next given token", *curves], rows


def distances(record: dict[str, Any]) -> str:
    """Render what the future is worth by distance, and what that predicts."""
    sets = {text: entry["set"] for text, entry in record["texts"].items()}
    described = "; ".join(
        f"{text}: {entry['texts']:,} texts of {entry['length']:,} tokens, {entry['documents']} documents"
        for text, entry in sets.items()
    )
    windows = [text for text, entry in sets.items() if entry["unit"] == "texts"]
    by_windows = f" ({', '.join(windows)}: by windows)" if windows else ""
    note = (
        f"First: gain in nats a token, on the paper's blocks at r_max {record['curve']:g}. Second: what the future "
        "takes off the perplexity, predicted from the first table and the number of tokens at each distance, and "
        "measured; a row names the placement and r_max of the given tokens. In brackets: 95 % intervals over "
        f"documents{by_windows}. {described}."
    )
    return "\n\n".join([markdown(*curve_rows(record)), markdown(*distance_rows(record)), note])


TABLES = {
    "adapter_cloze": adapter_cloze,
    "adapter_gaps": adapter_gaps,
    "attention": attention,
    "attention_kernel": attention_kernel,
    "bos": bos,
    "copies": copies,
    "cpu": cpu,
    "decoding": decoding,
    "decode_kernel": decode_kernel,
    "default_adapter": default_adapter,
    "finetuning_rates": finetuning_rates,
    "from_scratch": from_scratch,
    "gaps": gaps,
    "healing": healing,
    "cloze": cloze,
    "distances": distances,
    "infilling": infilling,
    "lengths": lengths,
    "modes": modes,
    "generation": generation,
    "resume": resume,
    "scaling": scaling,
    "scoring": scoring,
    "serving": serving,
    "startup": startup,
    "similarity": similarity,
    "target_positions": target_positions,
    "training": training,
    "unknown_tokens": unknown_tokens,
    "with_future": with_future,
}
