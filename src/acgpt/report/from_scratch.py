"""Training from scratch, as in the paper's ablation: every method in the five modes, by size and r_max.

Runs that differ only in their seed are one row: mean and standard deviation of their perplexities. Rows are comparable
if they have the same size, training texts, budget and evaluation dataset.

Differences are in percent, with 95 % intervals (paired bootstrap) where sums per document or text were kept:

    unconditional, infilling, training    advantage over GPT, as in `finetuning`
    infilling_gain, training_gain         gain of a method from the future, over the same mode without the future
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from acgpt.evaluation.bootstrap import Difference, MeasuredPerplexity, paired_difference
from acgpt.methods import METHODS
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.report import pictures
from acgpt.report.left_out import name_hidden
from acgpt.report.part import Part
from acgpt.report.pictures import Curve, Panel
from acgpt.report.runs import (
    ADVANTAGES,
    SETS,
    Run,
    RunEvaluation,
    describe_set,
)
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
from acgpt.training.recipe import FREE, Recipe

PAPER = Path(__file__).parent / "paper" / "from_scratch.json"
R_MAX = 0.6  # of the paper's main results
MAX_PANELS = 8  # panels per size in one figure
CAUSAL = "gpt"  # the baseline of costs and advantages
# Recipe keys in which methods may differ.
METHOD_KEYS = frozenset({"method", "conditioning", "loss", "target_positions"})

COLUMNS = (
    Column("from", "from", terminal=False),
    Column("r_max", "r_max", r"$r_{\max}$", "g"),
    Column("asked", "asked", form=",", spare=True),
    Column("method", "method"),
    Column("corpus", "corpus", spare=True),
    Column("texts", "texts read", form=",", spare=True),
    Column("unconditional", "unconditional", form=".2f", best=min, spread=True),
    Column("infilling", "infilling", form=".2f", best=min, spread=True),
    Column("training", "training", form=".2f", best=min, spread=True),
    Column("infilling-no-future", "infilling no future", form=".2f", best=min, spread=True),
    Column("training-no-future", "training no future", form=".2f", best=min, spread=True),
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
    Column("unconditional", "UC adv", form="+z.2f%", interval=True),
    Column("infilling", "Inf adv", form="+z.2f%", interval=True),
    Column("training", "TD adv", form="+z.2f%", interval=True),
    Column("infilling_gain", "Inf gain", form="+z.2f%", interval=True),
    Column("training_gain", "TD gain", form="+z.2f%", interval=True),
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


@dataclass(frozen=True, eq=False)
class Entry:
    """Runs that differ only in their seed, with their evaluations on one dataset.

    Args:
        runs: One run per seed.
        evaluations: The evaluation of each run, on the same dataset with the same options.
        modes: Mean perplexity of the runs, by mode.
        chance: Half-width of the 95 % interval in percent, the largest of any seed.
    """

    runs: tuple[Run, ...]
    evaluations: tuple[RunEvaluation, ...]
    modes: Mapping[str, Mean | None]
    chance: float | None

    @property
    def first(self) -> Run:
        """One of the runs, for properties that all of them share."""
        return self.runs[0]

    @property
    def evaluation(self) -> RunEvaluation:
        """One of the evaluations, for properties that all of them share."""
        return self.evaluations[0]

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.first.recipe["method"])

    @property
    def r_max(self) -> float:
        """r_max of the evaluation dataset."""
        return float(self.evaluation.dataset.get("r_max") or 0.0)

    def perplexity(self, mode: str) -> MeasuredPerplexity | None:
        """Return the mean perplexity with the sums of each run; `None` unless it is exact and finite."""
        value = comparable(self.modes.get(mode))
        if value is None:
            return None
        answered = [evaluation for evaluation in self.evaluations if evaluation.modes[mode] is not None]
        return MeasuredPerplexity(value, mode, tuple(evaluation.per_text for evaluation in answered))

    @property
    def at_training_r_max(self) -> bool:
        """Whether the evaluation has the r_max of training; always true for methods without one."""
        return self.first.causal or self.first.r_max == self.r_max

    @property
    def group(self) -> tuple[object, ...]:
        """Key of comparable entries: size, corpus, budget and evaluation dataset."""
        return self.first.size, self.first.results["corpus_hash"], self.first.budget, self.evaluation.hash

    @property
    def note(self) -> str | None:
        """Text of the footnote, if the row needs one."""
        remarks = []
        if not self.at_training_r_max:
            remarks.append(f"trained with r_max {self.first.r_max:g}")
        for mode, mean in self.modes.items():
            if mean is not None and mean.runs != len(self.runs):
                remarks.append(f"{mode}: {mean.runs} of {len(self.runs)} seeds")
        return "; ".join(remarks) + "." if remarks else None


def variant(run: Run) -> dict[str, Any]:
    """Return everything that decides what a run learns, except its seed."""
    ignored = FREE | {"seed", "final_texts"} | ({"conditioning"} if run.causal else set())
    recipe = {key.name: key.default for key in fields(Recipe) if key.default is not MISSING} | dict(run.recipe)
    decisive = {key: value for key, value in recipe.items() if key not in ignored and not key.startswith("eval_")}
    return {**decisive, "corpus": run.results["corpus_hash"], "budget": run.budget}


def identity(run: Run) -> str:
    """Return a key that is the same for runs that differ only in their seed."""
    return json.dumps(variant(run), sort_keys=True)


def entries_of(runs: Sequence[Run]) -> tuple[list[Entry], list[str]]:
    """Group runs into rows, in the order of the runs; return also notes on runs that repeat another."""
    pairs = [(run, evaluation) for run in runs for evaluation in run.evaluations]
    entries, notes = [], {}
    for same in grouped(pairs, lambda pair: (identity(pair[0]), pair[1].hash, pair[1].options)):
        by_seed: dict[int, tuple[Run, RunEvaluation]] = {}
        for run, evaluation in same:
            first, _ = by_seed.setdefault(run.seed, (run, evaluation))
            if first is not run:
                notes[run.name] = f"{run.name} repeats {first.name} with the same seed {run.seed}: left out."
        evaluations = tuple(evaluation for _, evaluation in by_seed.values())
        bound, chances = evaluations[0].bound, [each.chance for each in evaluations if each.chance is not None]
        modes = {mode: Mean.of((each.modes[mode] for each in evaluations), bound) for mode in MODES}
        entries.append(Entry(tuple(run for run, _ in by_seed.values()), evaluations, modes, max(chances, default=None)))
    return entries, list(notes.values())


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(runs: Sequence[Run]) -> Part | None:
    """Build the part on training from scratch; `None` if there is no such run."""
    scratch = [run for run in runs if not run.base]
    if not scratch:
        return None
    paper = read_paper()
    entries, notes = entries_of(scratch)
    part = Part(
        "from-scratch",
        "Training from scratch",
        {"splits": {}, "differences": {}, "paper": paper["source"]},
        {},
        notes=notes,
    )
    for split in dict.fromkeys(entry.evaluation.split for entry in entries):
        of_split = [entry for entry in entries if entry.evaluation.split == split]
        names = row_names(of_split, paper["methods"])
        folder = file_name(split)
        while any(stem.startswith(f"{folder}/") for stem in part.tables):  # another split with the same safe name
            folder += "_"
        content = {}
        for size in sizes_of(of_split, paper):
            of_size = [entry for entry in of_split if entry.first.size == size]
            table = ablation(split, size, of_size, names, paper)
            part.tables[f"{folder}/{file_name(size)}"] = table
            content[size] = table.as_dicts()
            difference_table = differences(split, size, of_size, names, paper)
            if difference_table is not None:
                part.tables[f"{folder}/{file_name(size)}-differences"] = difference_table
                part.content["differences"].setdefault(split, {})[size] = difference_table.as_dicts()
        part.content["splits"][split] = content
        add_pictures(part, folder, of_split, names, paper)
    return part


def read_paper() -> dict[str, Any]:
    """Read the paper's numbers; `methods` has the titles of all methods, those of the paper first and in its order."""
    paper: dict[str, Any] = json.loads(PAPER.read_text(encoding="utf-8"))
    titles = {name: method.title for name, method in METHODS.items()}
    return paper | {"methods": {name: titles[name] for name in paper["methods"]} | titles}


def row_names(entries: Sequence[Entry], titles: Mapping[str, str]) -> dict[Entry, str]:
    """Name each row: the method, and what distinguishes it from other rows of the method, on any dataset."""
    names = {}
    for peers in grouped(entries, lambda e: (e.method, *e.group[:-1], e.r_max, e.at_training_r_max)):
        variants = {entry: variant(entry.first) for entry in peers}
        for entry, recipe in variants.items():
            differing = [key for key in recipe if any(peer.get(key) != recipe[key] for peer in variants.values())]
            values = [f"{key} {json.dumps(recipe[key]).strip(chr(34))}" for key in differing]
            options = [entry.evaluation.options] if entry.evaluation.options else []
            names[entry] = ", ".join([titles.get(entry.method, entry.method), *options, *values])
    return names


def ablation(
    split: str, size: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> Table:
    """Build the table of one size, with the paper's rows after each r_max."""
    rows = []
    for entry in sort_entries(entries, paper):
        description: dict[str, Cell] = {"from": "here", **row_description(entry, names)}
        cells = {
            **description,
            **entry.modes,
            "chance": entry.chance,
            "seeds": len(entry.runs),
            "set": entry.evaluation.hash[:8],
        }
        details = (describe_set(entry.evaluation),)
        measured = {mode: value for mode in entry.modes if (value := entry.perplexity(mode))}
        rows.append(Row(cells, entry.group, entry.note, False, details, measured))
    from_paper = paper_rows(paper, "perplexities", size, {entry.r_max for entry in entries})
    title = f"{paper['sizes'].get(size, size)}, {split}"
    all_rows = sorted([*rows, *from_paper], key=lambda row: (row.cells["r_max"], row.paper))
    return Table(title, CAPTION, COLUMNS, tuple(all_rows), "method", SETS, OTHERS)


def row_description(entry: Entry, names: Mapping[Entry, str]) -> dict[str, Cell]:
    """Return the cells that identify a row."""
    dataset: dict[str, Cell] = {"r_max": entry.r_max, "asked": entry.evaluation.texts}
    return dataset | {"method": names[entry], "corpus": entry.first.corpus, "texts": entry.first.budget[0]}


def sort_entries(entries: Sequence[Entry], paper: Mapping[str, Any]) -> list[Entry]:
    """Sort entries by r_max, by dataset with the largest first, then by method in the paper's order."""
    ordered = sorted(entries, key=lambda entry: (method_order(entry.method, paper), entry.evaluation.options))
    groups = list(dict.fromkeys(entry.group for entry in entries))
    ordered.sort(key=lambda entry: (entry.r_max, -entry.evaluation.texts, groups.index(entry.group)))
    return ordered


def differences(
    split: str, size: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> Table | None:
    """Build the table of gains and losses of one size; `None` if nothing can be compared."""
    rows = []
    for entry in sort_entries(entries, paper):
        twin = causal_twin(entry, entries)
        if gains := differences_of(entry, twin):
            cells = {
                **row_description(entry, names),
                **gains,
                "seeds": len(entry.runs),
                "set": entry.evaluation.hash[:8],
            }
            note = entry.note if twin is None else note_with_twin(entry, twin)
            rows.append(Row(cells, entry.group, note, details=(describe_set(entry.evaluation),)))
    title = f"{paper['sizes'].get(size, size)}, {split}: differences"
    return Table(title, DIFFERENCES_CAPTION, DIFFERENCES, tuple(rows), "method", SETS) if rows else None


def differences_of(entry: Entry, twin: Entry | None) -> dict[str, Difference]:
    """Return the differences of an entry that can be computed, by key of their column."""
    perplexity = entry.perplexity
    pairs = {f"{mode}_gain": (perplexity(mode), perplexity(without)) for mode, without in WITHOUT_FUTURE.items()}
    if twin is not None:
        pairs |= {mode: (perplexity(mode), twin.perplexity(other)) for mode, other in ADVANTAGES.items()}
    return {key: paired_difference(ours, theirs) for key, (ours, theirs) in pairs.items() if ours and theirs}


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


def note_with_twin(entry: Entry, twin: Entry) -> str | None:
    """Return the footnote of an entry that is compared with its causal twin."""
    keys = differing_keys(entry, twin)
    remarks = [*([entry.note] if entry.note else []), *([f"GPT differs in {', '.join(keys)}."] if keys else [])]
    return " ".join(remarks) or None


def method_order(method: str, paper: Mapping[str, Any]) -> int:
    """Return the index of a method in the paper's tables; unknown methods come last."""
    return [*paper["methods"], method].index(method)


def paper_rows(
    paper: Mapping[str, Any], table: str, size: str, r_maxes: set[float], more: Mapping[str, Cell] | None = None
) -> list[Row]:
    """Return the rows of a size in one of the paper's tables, with `more` cells."""
    rows = []
    for numbers in paper[table]:
        corpus, r_max, method = numbers["corpus"], numbers["r_max"], paper["methods"][numbers["method"]]
        if numbers["model"] == size and r_max in r_maxes:
            cells: dict[str, Cell] = {"from": "paper", "r_max": r_max, "corpus": corpus, "method": method}
            cells |= {"seeds": paper["seeds"].get(corpus), **(more or {}), **paper_modes(paper, numbers)}
            rows.append(Row(cells, ("paper", corpus, r_max), paper=True))
    return rows


def paper_modes(paper: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Mean | None]:
    """Return a row of the paper as a `Mean` per mode."""
    digits = paper["digits"][numbers["corpus"]]
    pairs = {mode: numbers[mode] for mode in MODES}
    return {mode: Mean(pair[0], pair[1], digits=digits) if pair else None for mode, pair in pairs.items()}


# ---- pictures -------------------------------------------------------------------------------------------------------


def add_pictures(
    part: Part, folder: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> None:
    """Add the figures of one split, and what they do not show."""
    panels, shown = main_panels(entries, names, paper)
    if not panels:
        part.notes.append(f"no figure of {folder}: no run was evaluated at the r_max of its training.")
        return
    colours = {name: METHODS[name].colour for name in paper["methods"]}
    figures = {
        "main": (
            partial(pictures.methods, panels, colours),
            f"Perplexity of each method in the five modes ({'; '.join(panel.title for panel in panels)}). Lower is "
            "better. Compare within a panel only. Hatched bars are upper bounds. The tables list the numbers."
            + not_shown(entries, shown),
        )
    }
    future_panels, shown = main_panels(entries, names, paper, competitive_rows)
    if shown:
        figures["future"] = (
            partial(pictures.with_and_without, future_panels),
            "Perplexity on the training distribution with the future (dark) and without it (light), and the relative "
            "change, for methods that answer both exactly. Methods with more than twice the best perplexity without "
            "the future are in the tables only. Compare within a panel only.",
        )
    curves = [(size, in_size) for size in sizes_of(entries, paper) if (in_size := sweep(size, entries, names, paper))]
    if curves:
        titled = [(paper["sizes"].get(size, size), [curve for curve, _ in in_size]) for size, in_size in curves]
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


def sizes_of(entries: Sequence[Entry], paper: Mapping[str, Any]) -> list[str]:
    """Return the sizes: those of the paper in its order, then others."""
    return known_first((entry.first.size for entry in entries), paper["sizes"])


def main_panels(
    entries: Sequence[Entry],
    names: Mapping[Entry, str],
    paper: Mapping[str, Any],
    select: Callable[[Panel], Panel] = lambda panel: panel,
) -> tuple[list[Panel], list[Entry]]:
    """Choose for each size the methods at the r_max of the paper's main results, and add the paper's numbers.

    The first panel of a size is of the evaluation dataset and training budget with most methods after `select`. Runs
    that it does not have get further panels. Another r_max is used if no method reads the future at the paper's. Runs
    that were evaluated with several options are shown with the default ones.

    Returns:
        The panels, and the entries in them.
    """
    panels: list[Panel] = []
    shown: list[Entry] = []
    default = asked_by_default(entries)
    for size in sizes_of(entries, paper):
        of_size = [entry for entry in default if entry.first.size == size and entry.at_training_r_max]
        name, candidates = paper["sizes"].get(size, size), []
        for comparable_entries in grouped(of_size, lambda entry: entry.group):
            group = sorted(
                comparable_entries, key=lambda entry: (method_order(entry.method, paper), entry.evaluation.options)
            )
            rows = {entry: (names[entry], entry.method, entry.modes) for entry in group}
            panel = select(Panel(panel_title(name, group[0]), tuple(rows.values())))
            members = [entry for entry, row in rows.items() if any(row is selected for selected in panel.rows)]
            if members:
                candidates.append((members, panel))
        if not candidates:
            continue
        candidates.sort(key=lambda candidate: rating(*candidate), reverse=True)
        r_max, runs, most = candidates[0][0][0].r_max, set[Run](), len(panels) + MAX_PANELS
        for members, panel in candidates:
            own = {run for entry in members for run in entry.runs}
            if members[0].r_max == r_max and not own <= runs and len(panels) < most:  # some run is in no earlier panel
                runs |= own
                shown += members
                panels.append(panel)
        from_paper = [row for row in paper["perplexities"] if (row["model"], row["r_max"]) == (size, r_max)]
        for corpus in dict.fromkeys(row["corpus"] for row in from_paper):
            paper_panel_rows = tuple(
                (paper["methods"][row["method"]], row["method"], paper_modes(paper, row))
                for row in from_paper
                if row["corpus"] == corpus
            )
            panel = select(Panel(f"the paper: {name}, r_max {r_max:g}, {corpus}", paper_panel_rows, paper=True))
            panels += [panel] if panel.rows else []
    return panels, shown


def panel_title(size: str, entry: Entry) -> str:
    """Return the title of the panel of an entry: what is common to the entries of its group."""
    evaluation, (texts, tokens) = entry.evaluation, entry.first.budget
    dataset = f"r_max {entry.r_max:g}, {evaluation.texts:,} texts, set {evaluation.hash[:8]}"
    return f"{size}, {dataset}, trained on {texts:,} texts ({tokens:,} tokens) of {entry.first.corpus}"


def asked_by_default(entries: Sequence[Entry]) -> list[Entry]:
    """Drop entries with options if the same dataset was also evaluated with the defaults."""
    default = {(entry.first, entry.group) for entry in entries if not entry.evaluation.options}
    return [entry for entry in entries if not entry.evaluation.options or (entry.first, entry.group) not in default]


def rating(entries: Sequence[Entry], panel: Panel) -> tuple[bool, bool, int, int]:
    """Rate a panel: the higher, the more it shows."""
    future = any(modes["training"] for _, _, modes in panel.rows)
    methods = {method for _, method, _ in panel.rows}
    return future, entries[0].r_max == R_MAX, len(methods), entries[0].evaluation.texts


def competitive_rows(panel: Panel) -> Panel:
    """Keep only the methods that answer the training distribution exactly, with and without the future.

    Like the paper's figure, it shows only competitive methods: perplexities without the future of more than twice the
    best are dropped.
    """
    without_future = [comparable(modes[WITHOUT_FUTURE["training"]]) for _, _, modes in panel.rows]
    best = min((value for value in without_future if value is not None), default=0.0)
    rows = [
        row for row, value in zip(panel.rows, without_future, strict=True)
        if comparable(row[2]["training"]) is not None and value is not None and value <= 2 * best
    ]  # fmt: skip
    return replace(panel, rows=tuple(rows))


def sweep(
    size: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> list[tuple[Curve, list[Entry]]]:
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
            curves.append((Curve(names[members[0]], members[0].method, curve), members))
    curves.sort(key=lambda curve: method_order(curve[0].method, paper))
    for method in dict.fromkeys(curve.method for curve, _ in curves):
        rows = [row for row in paper["perplexities"] if (row["model"], row["method"]) == (size, method)]
        from_paper = tuple((row["r_max"], paper_modes(paper, row)) for row in rows if row["corpus"] == "WikiText-103")
        if from_paper:
            curves.append((Curve(f"{paper['methods'][method]}, the paper", method, from_paper, paper=True), []))
    return curves


def curve_key(entry: Entry) -> str:
    """Return the key of entries on one curve: equal but for r_max in training, and r_max and texts in evaluation."""
    recipe = variant(entry.first)
    if "conditioning" in recipe:
        recipe["conditioning"] = {key: value for key, value in recipe["conditioning"].items() if key != "r_max"}
    dataset = [entry.evaluation.dataset.get(key) for key in ("length", "seed", "corpus_hash")]
    return json.dumps([recipe, entry.evaluation.options, dataset], sort_keys=True)
