"""Training from scratch, as in the paper's ablation: every method in the five modes, by size and r_max.

Runs that differ only in their seed are one row: mean and standard deviation of their perplexities (`entries`). Besides
the advantages over GPT, the tables of differences have the gain of a method from the future, `infilling_gain` and
`training_gain`: over the same mode without the future.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from acgpt.query.modes import WITHOUT_FUTURE
from acgpt.report import pictures
from acgpt.report.entries import ADVANTAGE_COLUMNS, GAIN_COLUMNS, TWIN_KEYS, Entry, compare, entries_of, mode_columns
from acgpt.report.paper import method_order, paper, paper_entries, paper_rows, size_title, sizes
from acgpt.report.part import Part, name_hidden
from acgpt.report.runs import Run
from acgpt.report.tables import INTERVALS, NO_CLEAR_BEST, Cell, Column, Row, Table, comparable, grouped, known_first

R_MAX = 0.6  # of the paper's main results
MAX_PANELS = 8  # panels per size in one figure
CAUSAL = "gpt"  # the baseline of costs and advantages
# Recipe keys in which methods may differ, or the runs of an entry.
METHOD_KEYS = TWIN_KEYS | {"loss", "target_positions", "seed"}

COLUMNS = (
    Column("from", "from", terminal=False),
    Column("r_max", "r_max", form="g"),
    Column("asked", "asked", form=",", spare=True),
    Column("method", "method"),
    Column("corpus", "corpus", spare=True),
    Column("texts", "texts read", form=",", spare=True),
    *mode_columns(".2f", min, spread=True),
    Column("chance", "95 % ±", form=".1f%", terminal=False),
    Column("seeds", "seeds", form="d", spare=True),
    Column("set", "set", spare=True),
)
CAPTION = (
    "Perplexity; lower is better. Mean ± sample standard deviation over training seeds; a single seed has no "
    "deviation. r_max and asked, the number of texts, describe the evaluation dataset. 95 % ± is half the width of the "
    "widest 95 % interval in the row, in percent of the perplexity; differences between rows that were "
    "evaluated on the same texts vary less. Bold: the best exact value among rows with the same size, training corpus, "
    f"training budget and evaluation dataset. {NO_CLEAR_BEST} Rows with different evaluation datasets are not "
    "compared. ≤ marks an upper bound, which is not ranked. -- marks a mode that the method cannot answer."
)
DIFFERENCES = (*COLUMNS[1:6], *ADVANTAGE_COLUMNS, *GAIN_COLUMNS, *COLUMNS[-2:])
DIFFERENCES_CAPTION = (
    "Relative difference in perplexity, in percent; positive: lower perplexity. With several seeds, mean perplexities "
    "are compared. adv: advantage over GPT with the same size, training corpus, training budget and evaluation "
    "dataset. UC: unconditional; a negative value is the cost of reading the future. Inf, TD: infilling and the "
    "training distribution with the future, against GPT without it. gain: the method with the future, against itself "
    f"without it. {INTERVALS} Intervals do not cover the variation between training seeds, which may be larger."
)
OTHERS = (
    "The paper's rows have other texts, training budgets and evaluation datasets: compare the order of the methods, "
    "not the values. Bold follows the same rule, applied to the printed values."
)
MAIN = (
    "Perplexity of each method in the five modes ({panels}). Lower is better. Compare within a panel only. Hatched "
    "bars are upper bounds. The tables list the numbers."
)
FUTURE = (
    "Perplexity on the training distribution with the future (dark) and without it (light), and the relative change, "
    "for methods that answer both exactly. Methods with more than twice the best perplexity without the future are in "
    "the tables only. Compare within a panel only."
)
RANGES = (
    "Perplexity by r_max, on the training distribution and unconditional. Models were trained and evaluated at the "
    "same r_max. Each r_max has its own evaluation dataset. Dashed: the paper."
)


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(runs: Sequence[Run]) -> Part | None:
    """Build the part on training from scratch; `None` if there is no such run."""
    entries, notes = entries_of([run for run in runs if not run.base])
    if not entries:
        return None
    content = {"splits": {}, "differences": {}, "paper": paper("from_scratch")["source"]}
    part = Part("from-scratch", "Training from scratch", content, notes=notes)
    for of_split in grouped(entries, lambda entry: entry.evaluation.split):
        split, of_sizes = of_split[0].evaluation.split, by_size(of_split)
        folder = part.new_folder(split)
        for size, of_size in of_sizes.items():
            title, rows = f"{size_title(size)}, {split}", perplexity_rows(size, of_size)
            table = Table(title, CAPTION, COLUMNS, rows, paper_note=OTHERS)
            part.add_table((folder, size), table, "splits", split, size)
            if rows := difference_rows(of_size):
                table = Table(f"{title}: differences", DIFFERENCES_CAPTION, DIFFERENCES, rows)
                part.add_table((folder, f"{size}-differences"), table, "differences", split, size)
        add_pictures(part, folder, of_split, of_sizes)
    return part


def by_size(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the entries by size: those of the paper in its order, then others.

    Those of a size are sorted by r_max, by dataset with the largest first, then by method in the paper's order and by
    options.
    """
    groups = grouped(entries, lambda entry: entry.group)
    groups.sort(key=lambda group: (group[0].r_max, -group[0].evaluation.texts))
    ordered = [
        entry
        for group in groups
        for entry in sorted(group, key=lambda entry: (method_order(entry.method), entry.evaluation.options))
    ]
    names = known_first((entry.run.size for entry in entries), sizes())
    return {size: [entry for entry in ordered if entry.run.size == size] for size in names}


def description(entry: Entry) -> dict[str, Cell]:
    """Return the cells that identify a row."""
    run, texts = entry.run, entry.evaluation.texts
    cells: dict[str, Cell] = {"r_max": entry.r_max, "asked": texts, "method": entry.name, "corpus": run.corpus}
    return cells | {"texts": run.budget[0], "seeds": len(entry.evaluations)}


def note(entry: Entry) -> str | None:
    """Return the footnote on the runs of a row, if it needs one."""
    seeds = len(entry.evaluations)
    remarks = [] if entry.at_training_r_max else [f"trained with r_max {entry.run.r_max:g}"]
    for mode, mean in entry.modes.items():
        remarks += [f"{mode}: {mean.runs} of {seeds} seeds"] if mean and mean.runs != seeds else []
    return "; ".join(remarks) + "." if remarks else None


def perplexity_rows(size: str, entries: Sequence[Entry]) -> tuple[Row, ...]:
    """Return the rows of the five modes, with the paper's rows after each r_max."""
    rows = []
    for entry in entries:
        chance = max((each.chance for each in entry.evaluations if each.chance is not None), default=None)
        rows.append(entry.row({"from": "here", **description(entry), **entry.modes, "chance": chance}, note(entry)))
    rows += paper_rows("from_scratch", "perplexities", size, {entry.r_max for entry in entries})
    return tuple(sorted(rows, key=lambda row: (row.cells["r_max"], row.paper)))


def difference_rows(entries: Sequence[Entry]) -> tuple[Row, ...]:
    """Return the rows of gains and losses of one size, of the entries that have any."""
    rows, causal = [], [entry for entry in entries if entry.method == CAUSAL]
    for entry in entries:
        compared = compare(entry, causal if entry.method != CAUSAL else [], "GPT", METHOD_KEYS)
        if cells := entry.gains | compared.advantages:
            twin_note = compared.note if compared.twin else None
            rows.append(entry.row({**description(entry), **cells}, note(entry), twin_note))
    return tuple(rows)


# ---- pictures -------------------------------------------------------------------------------------------------------


def add_pictures(part: Part, folder: str, entries: Sequence[Entry], of_sizes: Mapping[str, list[Entry]]) -> None:
    """Add the figures of one split, with captions that name what they do not show."""

    def not_shown(shown: Iterable[Entry]) -> str:
        runs = {each.run for entry in shown for each in entry.evaluations}
        return name_hidden(each.run.name for entry in entries for each in entry.evaluations if each.run not in runs)

    panels = main_panels(of_sizes)
    if not panels:
        part.notes.append(f"no figure of {folder}: no run was evaluated at the r_max of its training.")
        return
    caption = MAIN.format(panels="; ".join(title for title, _ in panels))
    hidden = not_shown(entry for _, members in panels for entry in members)
    part.pictures[f"{folder}/main"] = partial(pictures.methods, panels), caption + hidden
    panels = main_panels(of_sizes, only_competitive=True)
    if any(entry.evaluations for _, members in panels for entry in members):
        part.pictures[f"{folder}/future"] = partial(pictures.with_and_without, panels), FUTURE
    curves = [(size_title(size), found) for size, of_size in of_sizes.items() if (found := sweep(size, of_size))]
    if curves:
        hidden = not_shown(entry for _, found in curves for curve in found for entry in curve)
        part.pictures[f"{folder}/r_max"] = partial(pictures.ranges, curves), RANGES + hidden


def main_panels(of_sizes: Mapping[str, list[Entry]], only_competitive: bool = False) -> list[pictures.Panel]:
    """Choose for each size the methods at the r_max of the paper's main results, and add the paper's numbers.

    The first panel of a size is of the evaluation dataset and training budget with most methods. Runs that it does not
    have get further panels. Another r_max is used if no method reads the future at the paper's. Runs that were
    evaluated with several options are shown with the default ones.

    Args:
        of_sizes: Entries of one split by size.
        only_competitive: Whether a panel has only its `competitive` entries.
    """
    choose = competitive if only_competitive else list[Entry]
    panels: list[pictures.Panel] = []
    for size, entries in of_sizes.items():
        default = {(entry.run, entry.group) for entry in entries if not entry.evaluation.options}
        own = [e for e in entries if e.at_training_r_max]
        own = [e for e in own if not e.evaluation.options or (e.run, e.group) not in default]
        groups = [chosen for group in grouped(own, lambda entry: entry.group) if (chosen := choose(group))]
        if not groups:
            continue
        groups.sort(key=rating, reverse=True)
        title, r_max, runs, most = size_title(size), groups[0][0].r_max, set[Run](), len(panels) + MAX_PANELS
        for group in groups:
            of_group = {each.run for entry in group for each in entry.evaluations}
            if group[0].r_max == r_max and not of_group <= runs and len(panels) < most:  # some run is in no earlier one
                runs |= of_group
                panels.append((panel_title(title, group[0]), group))
        for corpus in paper("from_scratch")["digits"]:
            if printed := choose(paper_entries(model=size, r_max=r_max, corpus=corpus)):
                panels.append((f"the paper: {title}, r_max {r_max:g}, {corpus}", printed))
    return panels


def panel_title(size: str, entry: Entry) -> str:
    """Return the title of the panel of an entry: what is common to the entries of its group."""
    evaluation, (texts, tokens) = entry.evaluation, entry.run.budget
    dataset = f"r_max {entry.r_max:g}, {evaluation.texts:,} texts, set {evaluation.hash[:8]}"
    return f"{size}, {dataset}, trained on {texts:,} texts ({tokens:,} tokens) of {entry.run.corpus}"


def rating(entries: Sequence[Entry]) -> tuple[bool, bool, int, int]:
    """Rate the entries of a panel: the higher, the more it shows."""
    future = any(entry.modes["training"] for entry in entries)
    methods = {entry.method for entry in entries}
    return future, entries[0].r_max == R_MAX, len(methods), entries[0].evaluation.texts


def competitive(entries: Sequence[Entry]) -> list[Entry]:
    """Keep only the methods that answer the training distribution exactly, with and without the future.

    Like the paper's figure, it shows only competitive methods: perplexities without the future of more than twice the
    best are dropped.
    """
    values = {entry: comparable(entry.modes[WITHOUT_FUTURE["training"]]) for entry in entries}
    limit = 2 * min((value for value in values.values() if value is not None), default=0.0)
    exact = [entry for entry in entries if comparable(entry.modes["training"]) is not None]
    return [entry for entry in exact if (value := values[entry]) is not None and value <= limit]


def sweep(size: str, entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the curves of a size over r_max, then the paper's; none if there is only one r_max.

    If an r_max was evaluated on datasets of several sizes, the curve uses the size with the most points, then the
    largest.
    """
    points = [entry for entry in entries if entry.at_training_r_max and not entry.evaluation.bound]
    curves = []
    for candidates in grouped(points, curve_key):
        of_texts = grouped(candidates, lambda entry: entry.evaluation.texts)
        curve = max(of_texts, key=lambda same: (len({entry.r_max for entry in same}), same[0].evaluation.texts))
        if len({entry.r_max for entry in curve}) > 1:
            curves.append(curve)
    curves.sort(key=lambda curve: method_order(curve[0].method))
    methods = dict.fromkeys(curve[0].method for curve in curves)
    printed = [paper_entries(model=size, method=method, corpus="WikiText-103") for method in methods]
    return [*curves, *filter(None, printed)]


def curve_key(entry: Entry) -> str:
    """Return the key of entries on one curve: equal but for r_max in training, and r_max and texts in evaluation."""
    recipe = dict(entry.run.variant)
    if "conditioning" in recipe:
        recipe["conditioning"] = {key: value for key, value in recipe["conditioning"].items() if key != "r_max"}
    dataset = [entry.evaluation.dataset.get(key) for key in ("length", "seed", "corpus_hash")]
    return json.dumps([recipe, entry.evaluation.options, dataset], sort_keys=True)
