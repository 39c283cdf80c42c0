"""Training from scratch, as in the paper's ablation: every method in the five modes, by size and r_max.

Runs that differ only in their seed are one row: mean and standard deviation of their perplexities (`entries`). Besides
the advantages over GPT, the tables of differences have the gain of a method from the future, `infilling_gain` and
`training_gain`: over the same mode without the future.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from acgpt.common.files import read_json_object
from acgpt.methods import METHODS
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.report import pictures
from acgpt.report.entries import (
    ADVANTAGE_COLUMNS,
    ADVANTAGES,
    SETS,
    Entry,
    difference_column,
    differences,
    entries_of,
    mode_columns,
    variant,
)
from acgpt.report.left_out import name_hidden
from acgpt.report.part import Part
from acgpt.report.pictures import Curve, Panel
from acgpt.report.runs import Run
from acgpt.report.tables import (
    INTERVALS,
    NO_CLEAR_BEST,
    Cell,
    Column,
    Mean,
    Row,
    Table,
    comparable,
    file_name,
    grouped,
    known_first,
)

PAPER = Path(__file__).parent / "paper" / "from_scratch.json"
R_MAX = 0.6  # of the paper's main results
MAX_PANELS = 8  # panels per size in one figure
CAUSAL = "gpt"  # the baseline of costs and advantages
# Recipe keys in which methods may differ.
METHOD_KEYS = frozenset({"method", "conditioning", "loss", "target_positions"})

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
DIFFERENCES = (
    *(column for column in COLUMNS if column.key in ("r_max", "asked", "method", "corpus", "texts")),
    *ADVANTAGE_COLUMNS,
    difference_column("infilling_gain", "Inf gain"),
    difference_column("training_gain", "TD gain"),
    *(column for column in COLUMNS if column.key in ("seeds", "set")),
)
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


class PaperEntry(NamedTuple):
    """A row of the paper's tables, as an `Entry` in figures."""

    name: str
    method: str
    modes: Mapping[str, Mean | None]


Shown = TypeVar("Shown", Entry, PaperEntry)


@cache
def paper() -> dict[str, Any]:
    """Read the paper's numbers."""
    return read_json_object(PAPER)


def size_title(size: str) -> str:
    """Return the paper's name of a model size, or the size itself."""
    return str(paper()["sizes"].get(size, size))


def methods_in_order() -> list[str]:
    """Return all methods, those of the paper first and in the order of its tables."""
    return known_first(METHODS, paper()["methods"])


def method_order(method: str) -> int:
    """Return the index of a method in the paper's tables; unknown methods come last."""
    return [*methods_in_order(), method].index(method)


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(runs: Sequence[Run]) -> Part | None:
    """Build the part on training from scratch; `None` if there is no such run."""
    scratch = [run for run in runs if not run.base]
    if not scratch:
        return None
    entries, notes = entries_of(scratch)
    content: dict[str, Any] = {"splits": {}, "differences": {}, "paper": paper()["source"]}
    part = Part("from-scratch", "Training from scratch", content, {}, notes=notes)
    for of_split in grouped(entries, lambda entry: entry.evaluation.split):
        split = of_split[0].evaluation.split
        folder = part.new_folder(split)
        content["splits"][split] = {}
        for size in sizes_of(of_split):
            of_size = sort_entries([entry for entry in of_split if entry.first.size == size])
            title, stem = f"{size_title(size)}, {split}", f"{folder}/{file_name(size)}"
            part.tables[stem] = perplexity_table(title, size, of_size)
            content["splits"][split][size] = part.tables[stem].as_dicts()
            if rows := difference_rows(of_size):
                table = Table(f"{title}: differences", DIFFERENCES_CAPTION, DIFFERENCES, tuple(rows), "method", SETS)
                part.tables[f"{stem}-differences"] = table
                content["differences"].setdefault(split, {})[size] = table.as_dicts()
        add_pictures(part, folder, of_split)
    return part


def sort_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Sort entries by r_max, by dataset with the largest first, then by method in the paper's order."""
    groups = sorted(
        grouped(entries, lambda entry: entry.group), key=lambda group: (group[0].r_max, -group[0].evaluation.texts)
    )
    return [entry for group in groups for entry in by_method(group)]


def by_method(entries: Sequence[Entry]) -> list[Entry]:
    """Sort entries by method in the paper's order, then by options."""
    return sorted(entries, key=lambda entry: (method_order(entry.method), entry.evaluation.options))


def perplexity_table(title: str, size: str, entries: Sequence[Entry]) -> Table:
    """Build the table of one size, with the paper's rows after each r_max."""
    rows = [
        entry.row({"from": "here", **description(entry), **entry.modes, "chance": entry.chance}, note(entry))
        for entry in entries
    ]
    rows += paper_rows(paper(), "perplexities", size, {entry.r_max for entry in entries})
    rows.sort(key=lambda row: (row.cells["r_max"], row.paper))
    return Table(title, CAPTION, COLUMNS, tuple(rows), "method", SETS, OTHERS)


def description(entry: Entry) -> dict[str, Cell]:
    """Return the cells that identify a row."""
    run, texts = entry.first, entry.evaluation.texts
    cells: dict[str, Cell] = {"r_max": entry.r_max, "asked": texts, "method": entry.name, "corpus": run.corpus}
    return cells | {"texts": run.budget[0], "seeds": len(entry.runs)}


def note(entry: Entry) -> str | None:
    """Return the footnote on the runs of a row, if it needs one."""
    remarks = [] if entry.at_training_r_max else [f"trained with r_max {entry.first.r_max:g}"]
    for mode, mean in entry.modes.items():
        if mean is not None and mean.runs != len(entry.runs):
            remarks.append(f"{mode}: {mean.runs} of {len(entry.runs)} seeds")
    return "; ".join(remarks) + "." if remarks else None


def difference_rows(entries: Sequence[Entry]) -> list[Row]:
    """Return the rows of gains and losses of one size, of the entries that have any."""
    rows = []
    for entry in entries:
        gains: dict[str, Cell] = {
            f"{mode}_gain": gain for mode, gain in differences(entry, entry, WITHOUT_FUTURE).items()
        }
        twin, twin_note = causal_twin(entry, entries), None
        if twin is not None:
            gains |= differences(entry, twin, ADVANTAGES)
            keys = differing_keys(entry, twin)
            twin_note = f"GPT differs in {', '.join(keys)}." if keys else None
        if gains:
            rows.append(entry.row({**description(entry), **gains}, note(entry), twin_note))
    return rows


def causal_twin(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """Return the comparable runs of GPT; if there are several, those whose recipe differs least."""
    if entry.method == CAUSAL:
        return None
    twins = [other for other in entries if other.method == CAUSAL and other.group == entry.group]
    return min(twins, key=lambda twin: len(differing_keys(entry, twin)), default=None)


def differing_keys(entry: Entry, twin: Entry) -> list[str]:
    """Return the recipe keys, besides those of the method, in which training differed from GPT's."""
    ours, theirs = variant(entry.first), variant(twin.first)
    return [key for key in theirs if key not in METHOD_KEYS and ours.get(key) != theirs[key]]


def paper_rows(numbers: Mapping[str, Any], table: str, size: str, r_maxes: set[float], **more: Cell) -> list[Row]:
    """Return the rows of a size in one of the paper's tables, with `more` cells."""
    rows = []
    for row in numbers[table]:
        corpus, r_max = row["corpus"], row["r_max"]
        if row["model"] == size and r_max in r_maxes:
            cells: dict[str, Cell] = {"from": "paper", "r_max": r_max, "corpus": corpus, **more}
            cells |= {"method": METHODS[row["method"]].title, "seeds": numbers["seeds"].get(corpus)}
            rows.append(Row(cells | paper_modes(numbers, row), ("paper", corpus, r_max), paper=True))
    return rows


def paper_modes(numbers: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Mean | None]:
    """Return a row of the paper as a `Mean` per mode."""
    digits = numbers["digits"][row["corpus"]]
    pairs = {mode: row[mode] for mode in MODES}
    return {mode: Mean(pair[0], pair[1], digits=digits) if pair else None for mode, pair in pairs.items()}


# ---- pictures -------------------------------------------------------------------------------------------------------


def add_pictures(part: Part, folder: str, entries: Sequence[Entry]) -> None:
    """Add the figures of one split, and what they do not show."""
    panels, shown = main_panels(entries)
    if not panels:
        part.notes.append(f"no figure of {folder}: no run was evaluated at the r_max of its training.")
        return
    colours = {name: METHODS[name].colour for name in methods_in_order()}
    figures = {
        "main": (
            partial(pictures.methods, panels, colours),
            f"Perplexity of each method in the five modes ({'; '.join(panel.title for panel in panels)}). Lower is "
            "better. Compare within a panel only. Hatched bars are upper bounds. The tables list the numbers."
            + not_shown(entries, shown),
        )
    }
    future_panels, shown = main_panels(entries, only_competitive=True)
    if shown:
        figures["future"] = (
            partial(pictures.with_and_without, future_panels),
            "Perplexity on the training distribution with the future (dark) and without it (light), and the relative "
            "change, for methods that answer both exactly. Methods with more than twice the best perplexity without "
            "the future are in the tables only. Compare within a panel only.",
        )
    curves = [(size, in_size) for size in sizes_of(entries) if (in_size := sweep(size, entries))]
    if curves:
        titled = [(size_title(size), [curve for curve, _ in in_size]) for size, in_size in curves]
        figures["r_max"] = (
            partial(pictures.ranges, titled, colours),
            "Perplexity by r_max, on the training distribution and unconditional. Models were trained and evaluated at "
            "the same r_max. Each r_max has its own evaluation dataset. Dashed: the paper."
            + not_shown(entries, [entry for _, in_size in curves for _, points in in_size for entry in points]),
        )
    for stem, (draw, caption) in figures.items():
        part.pictures[f"{folder}/{stem}"], part.captions[f"{folder}/{stem}"] = draw, caption


def not_shown(entries: Sequence[Entry], shown: Sequence[Entry]) -> str:
    """Return the end of a caption: the runs of `entries` that are not `shown`, if there are any."""
    runs = {run for entry in shown for run in entry.runs}
    return name_hidden(run.name for entry in entries for run in entry.runs if run not in runs)


def sizes_of(entries: Sequence[Entry]) -> list[str]:
    """Return the sizes: those of the paper in its order, then others."""
    return known_first((entry.first.size for entry in entries), paper()["sizes"])


def main_panels(entries: Sequence[Entry], only_competitive: bool = False) -> tuple[list[Panel], list[Entry]]:
    """Choose for each size the methods at the r_max of the paper's main results, and add the paper's numbers.

    The first panel of a size is of the evaluation dataset and training budget with most methods. Runs that it does not
    have get further panels. Another r_max is used if no method reads the future at the paper's. Runs that were
    evaluated with several options are shown with the default ones.

    Args:
        entries: Entries of one split.
        only_competitive: Whether a panel has only its `competitive` entries.

    Returns:
        The panels, and the entries in them.
    """
    panels: list[Panel] = []
    shown: list[Entry] = []
    default = asked_by_default(entries)
    for size in sizes_of(entries):
        of_size = [entry for entry in default if entry.first.size == size and entry.at_training_r_max]
        groups = [by_method(group) for group in grouped(of_size, lambda entry: entry.group)]
        if only_competitive:
            groups = [members for members in map(competitive, groups) if members]
        if not groups:
            continue
        groups.sort(key=rating, reverse=True)
        title, r_max, runs, most = size_title(size), groups[0][0].r_max, set[Run](), len(panels) + MAX_PANELS
        for members in groups:
            own = {run for entry in members for run in entry.runs}
            if members[0].r_max == r_max and not own <= runs and len(panels) < most:  # some run is in no earlier panel
                runs |= own
                shown += members
                panels.append(panel(panel_title(title, members[0]), members))
        from_paper = [row for row in paper()["perplexities"] if (row["model"], row["r_max"]) == (size, r_max)]
        for rows in grouped(from_paper, lambda row: row["corpus"]):
            printed = [
                PaperEntry(METHODS[row["method"]].title, row["method"], paper_modes(paper(), row)) for row in rows
            ]
            if printed := competitive(printed) if only_competitive else printed:
                panels.append(
                    panel(f"the paper: {title}, r_max {r_max:g}, {rows[0]['corpus']}", printed, from_paper=True)
                )
    return panels, shown


def panel(title: str, entries: Sequence[Shown], from_paper: bool = False) -> Panel:
    """Return a panel of these entries."""
    return Panel(title, tuple((entry.name, entry.method, entry.modes) for entry in entries), from_paper)


def panel_title(size: str, entry: Entry) -> str:
    """Return the title of the panel of an entry: what is common to the entries of its group."""
    evaluation, (texts, tokens) = entry.evaluation, entry.first.budget
    dataset = f"r_max {entry.r_max:g}, {evaluation.texts:,} texts, set {evaluation.hash[:8]}"
    return f"{size}, {dataset}, trained on {texts:,} texts ({tokens:,} tokens) of {entry.first.corpus}"


def asked_by_default(entries: Sequence[Entry]) -> list[Entry]:
    """Drop entries with options if the same dataset was also evaluated with the defaults."""
    default = {(entry.first, entry.group) for entry in entries if not entry.evaluation.options}
    return [entry for entry in entries if not entry.evaluation.options or (entry.first, entry.group) not in default]


def rating(entries: Sequence[Entry]) -> tuple[bool, bool, int, int]:
    """Rate the entries of a panel: the higher, the more it shows."""
    future = any(entry.modes["training"] for entry in entries)
    methods = {entry.method for entry in entries}
    return future, entries[0].r_max == R_MAX, len(methods), entries[0].evaluation.texts


def competitive(entries: Sequence[Shown]) -> list[Shown]:
    """Keep only the methods that answer the training distribution exactly, with and without the future.

    Like the paper's figure, it shows only competitive methods: perplexities without the future of more than twice the
    best are dropped.
    """
    without_future = [comparable(entry.modes[WITHOUT_FUTURE["training"]]) for entry in entries]
    limit = 2 * min((value for value in without_future if value is not None), default=0.0)
    return [
        entry for entry, value in zip(entries, without_future, strict=True)
        if comparable(entry.modes["training"]) is not None and value is not None and value <= limit
    ]  # fmt: skip


def sweep(size: str, entries: Sequence[Entry]) -> list[tuple[Curve, list[Entry]]]:
    """Return the curves of a size over r_max with their entries, then the paper's; none if there is only one r_max.

    If an r_max was evaluated on datasets of several sizes, the curve uses the size with the most points, then the
    largest.
    """
    points = [
        entry
        for entry in entries
        if entry.first.size == size and entry.at_training_r_max and not entry.evaluation.bound
    ]
    points.sort(key=lambda entry: entry.r_max)
    curves = []
    for candidates in grouped(points, curve_key):
        by_texts = grouped(candidates, lambda entry: entry.evaluation.texts)
        r_maxes, _, members = max(
            (len({entry.r_max for entry in members}), members[0].evaluation.texts, members) for members in by_texts
        )
        if r_maxes > 1:
            curve = tuple((entry.r_max, entry.modes) for entry in members)
            curves.append((Curve(members[0].name, members[0].method, curve), members))
    curves.sort(key=lambda curve: method_order(curve[0].method))
    for method in dict.fromkeys(curve.method for curve, _ in curves):
        rows = [row for row in paper()["perplexities"] if (row["model"], row["method"]) == (size, method)]
        from_paper = tuple((row["r_max"], paper_modes(paper(), row)) for row in rows if row["corpus"] == "WikiText-103")
        if from_paper:
            curves.append((Curve(f"{METHODS[method].title}, the paper", method, from_paper, paper=True), []))
    return curves


def curve_key(entry: Entry) -> str:
    """Return the key of entries on one curve: equal but for r_max in training, and r_max and texts in evaluation."""
    recipe = variant(entry.first)
    if "conditioning" in recipe:
        recipe["conditioning"] = {key: value for key, value in recipe["conditioning"].items() if key != "r_max"}
    dataset = [entry.evaluation.dataset.get(key) for key in ("length", "seed", "corpus_hash")]
    return json.dumps([recipe, entry.evaluation.options, dataset], sort_keys=True)
