"""Training from scratch, as in the paper's ablation: every method in the five modes, by size and r_max.

Runs that differ in their seed only are one row: the mean of their perplexities and its standard deviation. Rows may be
compared if they are of one size, have read as much of the same text, and were asked the same evaluation set.

Differences, in percent, each with its 95 % interval over texts (the paired bootstrap) where the sums were kept:

    unconditional, infilling, training    advantage over GPT, as in the part on fine-tuning
    infilling_gain, training_gain         what the future is worth to the method: with it, over the same without it
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from acgpt.evaluation.bootstrap import Difference, MeasuredPerplexity, paired_difference
from acgpt.methods import METHODS, method_of
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.report import pictures
from acgpt.report.left_out import listed, not_shown
from acgpt.report.part import Part
from acgpt.report.pictures import Curve, Panel
from acgpt.report.runs import (
    ADVANTAGES,
    SETS,
    Measured,
    Run,
    command_for,
    measurements,
    set_in_words,
    without_intervals,
)
from acgpt.report.tables import INTERVALS, UNLESS, Cell, Column, Mean, Row, Table, file_name, numbered, rank
from acgpt.training.recipe import FREE, Recipe

PAPER = Path(__file__).parent / "paper" / "from_scratch.json"
R_MAX = 0.6  # of the paper's main results
MOST_PANELS = 8  # of a size in one picture
CAUSAL = "gpt"  # what costs and advantages are over
OF_A_METHOD = frozenset({"method", "conditioning", "loss", "target_positions"})  # keys in which methods may differ

COLUMNS = (
    Column("from", "from", terminal=False),
    Column("r_max", "r_max", r"$r_{\max}$", "g"),
    Column("asked", "asked", form=",", spare=1),
    Column("method", "method"),
    Column("corpus", "corpus", spare=1),
    Column("texts", "texts read", form=",", spare=1),
    Column("unconditional", "unconditional", form=".2f", best=min, spread=True),
    Column("infilling", "infilling", form=".2f", best=min, spread=True),
    Column("training", "training", form=".2f", best=min, spread=True),
    Column("infilling-no-future", "infilling no future", form=".2f", best=min, spread=True),
    Column("training-no-future", "training no future", form=".2f", best=min, spread=True),
    Column("chance", "95 % ±", form=".1f%", spare=2),
    Column("seeds", "seeds", form="d", spare=1),
    Column("set", "set", spare=1),
)
CAPTION = (
    "Perplexity, lower is better: mean ± standard deviation over seeds (of a sample; none for a single seed). r_max "
    "and the number of asked texts are those of the evaluation set. 95 % ±: half of the widest 95 % interval over "
    "texts in a row, in percent of the perplexity (differences between rows that were asked the same texts vary less). "
    "Bold: the best of the exact numbers of one size that have read as much of the same text and were asked the same "
    f"set, {UNLESS}; across sets nothing is compared. ≤ is a bound and is not ranked; -- is what a method cannot "
    "answer."
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
    "In percent, positive where the perplexity is lower; of several seeds, between mean perplexities. adv: over GPT of "
    "the same size that has read as much of the same text and was asked the same (UC: unconditional, negative where "
    "reading the future costs something; Inf, TD: infilling and the training distribution with the future, over GPT's "
    f"without it). gain: with the future, over the same method's without it. {INTERVALS} Other seeds may move a "
    "difference further than its interval says."
)
OTHERS = (
    "The paper's rows are of other texts, budgets and evaluation sets: compare the order of the methods, not the "
    "levels. They are bold by the same rule, as they are printed."
)


@dataclass(frozen=True, eq=False)
class Entry:
    """Runs that differ in their seed only, on one evaluation set.

    Args:
        runs: One a seed.
        measured: The evaluation of each, on the same set, asked in the same way.
        modes: The perplexity in each mode, over the runs.
        chance: How far other texts might take it, in percent: the most of any seed.
    """

    runs: tuple[Run, ...]
    measured: tuple[Measured, ...]
    modes: Mapping[str, Mean | None]
    chance: float | None

    @property
    def first(self) -> Run:
        """Any of the runs: what is asked of it here is the same for all."""
        return self.runs[0]

    @property
    def asked(self) -> Measured:
        """Any of the evaluations, likewise."""
        return self.measured[0]

    @property
    def method(self) -> str:
        """Its name."""
        return str(self.first.recipe["method"])

    @property
    def r_max(self) -> float:
        """Of the evaluation set."""
        return float(self.asked.set.get("r_max") or 0.0)

    def perplexity(self, mode: str) -> MeasuredPerplexity | None:
        """The mean perplexity over the runs with what is known of each text; `None` unless it is exact and finite."""
        value = rank(self.modes.get(mode))
        if value is None:
            return None
        return MeasuredPerplexity(value, mode, tuple(m.per_text for m in self.measured if m.modes[mode] is not None))

    @cached_property
    def resampled(self) -> dict[str, np.ndarray]:
        """By mode, (resamples,) the mean perplexity on resampled texts, where the sums of each text were kept."""
        found = {mode: each.resampled for mode in self.modes if (each := self.perplexity(mode)) is not None}
        return {mode: values for mode, values in found.items() if values is not None}

    @property
    def own(self) -> bool:
        """Was it asked at the r_max that it was trained with? What has no r_max is at home everywhere."""
        return self.first.causal or self.first.r_max == self.r_max

    @property
    def group(self) -> tuple[object, ...]:
        """What has the same may be compared."""
        return self.first.size, self.first.results["corpus_hash"], self.first.budget, self.asked.hash

    @cached_property
    def identity(self) -> str:
        """All that decides what its runs have learnt, but for their seeds."""
        return identity(self.first)

    @property
    def note(self) -> str | None:
        """What a footnote has to say."""
        words = []
        if not self.own:
            words.append(f"trained with r_max {self.first.r_max:g}")
        for mode, mean in self.modes.items():
            if mean is not None and mean.runs != len(self.runs):
                words.append(f"{mode}: {mean.runs} of {len(self.runs)} seeds")
        return "; ".join(words) + "." if words else None


def variant(run: Run) -> dict[str, Any]:
    """All that decides what a run has learnt, but for its seed."""
    left_out = FREE | {"seed", "final_texts"} | ({"conditioning"} if run.causal else set())
    recipe = {each.name: each.default for each in fields(Recipe) if each.default is not MISSING} | dict(run.recipe)
    kept = {key: value for key, value in recipe.items() if key not in left_out and not key.startswith("eval_")}
    return {**kept, "corpus": run.results["corpus_hash"], "budget": run.budget}


def identity(run: Run) -> str:
    """The same for runs that differ in their seed only."""
    return json.dumps(variant(run), sort_keys=True)


def entries_of(runs: Sequence[Run]) -> tuple[list[Entry], list[str]]:
    """The rows that runs come to, in the order of the runs; and notes on runs that repeat another."""
    found = measurements(runs)
    found["variant"] = found["run"].map({run: identity(run) for run in runs})
    same, once = ["variant", "set", "options"], ["variant", "set", "options", "mode", "seed"]
    repeats = found.duplicated(once)
    first = found.groupby(once)["name"].transform("first")
    notes = {
        name: f"{name} repeats {other}, seed {seed} included: left out."
        for name, other, seed in zip(found["name"][repeats], first[repeats], found["seed"][repeats], strict=True)
    }
    entries = []
    for _, group in found[~repeats].groupby(same, sort=False):
        each = group.drop_duplicates("seed")
        bound = bool(group["bound"].iloc[0])
        modes = {mode: Mean.of(values, bound) for mode, values in group.groupby("mode", sort=False)["perplexity"]}
        chance = None if each["chance"].isna().all() else float(each["chance"].max())
        entries.append(Entry(tuple(each["run"]), tuple(each["measured"]), modes, chance))
    return entries, list(notes.values())


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(runs: Sequence[Run]) -> Part | None:
    """The part on training from scratch; `None` if no run is one."""
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
    for split in dict.fromkeys(entry.asked.split for entry in entries):
        own = [entry for entry in entries if entry.asked.split == split]
        names = in_words(own, paper["methods"])
        folder = file_name(split)
        while any(stem.startswith(f"{folder}/") for stem in part.tables):  # a name that differs in odd characters only
            folder += "_"
        content = {}
        for size in sizes_of(own, paper):
            of_size = [entry for entry in own if entry.first.size == size]
            table = ablation(split, size, of_size, names, paper)
            part.tables[f"{folder}/{file_name(size)}"] = table
            content[size] = table.as_dicts()
            beside = differences(split, size, of_size, names, paper)
            if beside is not None:
                part.tables[f"{folder}/{file_name(size)}-differences"] = beside
                part.content["differences"].setdefault(split, {})[size] = beside.as_dicts()
        part.content["splits"][split] = content
        part.notes.extend(without_intervals(split, unpaired(own)))
        add_pictures(part, folder, own, names, paper)
    return part


def read_paper() -> dict[str, Any]:
    """The paper's numbers; `methods` are the titles of all methods: those of the paper in its order, then others."""
    paper: dict[str, Any] = json.loads(PAPER.read_text(encoding="utf-8"))
    titles = {name: method.title for name, method in METHODS.items()}
    return paper | {"methods": {name: titles[name] for name in paper["methods"]} | titles}


def in_words(entries: Sequence[Entry], titles: Mapping[str, str]) -> dict[Entry, str]:
    """What each row is called: the method, and what tells it from others of the method, whichever texts were asked."""
    found = pd.DataFrame({"entry": entries, "kind": [(e.method, *e.group[:-1], e.r_max, e.own) for e in entries]})
    names = {}
    for _, peers in found.groupby("kind", sort=False)["entry"]:
        variants = {entry: variant(entry.first) for entry in peers}
        for entry, mine in variants.items():
            differing = [key for key in mine if any(peer.get(key) != mine[key] for peer in variants.values())]
            words = [f"{key} {json.dumps(mine[key]).strip(chr(34))}" for key in differing]
            options = [entry.asked.options] if entry.asked.options else []
            names[entry] = ", ".join([titles.get(entry.method, entry.method), *options, *words])
    return names


def ablation(
    split: str, size: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> Table:
    """One size's table, with the paper's own rows after each r_max."""
    rows = []
    for entry in in_order(entries, paper):
        about: dict[str, Cell] = {"from": "here", **described(entry, names)}
        cells = {**about, **entry.modes, "chance": entry.chance, "seeds": len(entry.runs), "set": entry.asked.hash[:8]}
        about_set = (set_in_words(entry.asked),)
        rows.append(
            Row(cells, entry.group, entry.note, about=about_set, resampled=entry.resampled, texts=entry.asked.texts)
        )
    theirs = paper_rows(paper, size, {entry.r_max for entry in entries})
    title = f"{paper['sizes'].get(size, size)}, {split}"
    beside = sorted([*rows, *theirs], key=lambda row: (row.cells["r_max"], row.paper))
    return Table(title, CAPTION, COLUMNS, tuple(beside), "method", SETS, OTHERS)


def described(entry: Entry, names: Mapping[Entry, str]) -> dict[str, Cell]:
    """The cells that say which row it is."""
    asked: dict[str, Cell] = {"r_max": entry.r_max, "asked": entry.asked.texts}
    return asked | {"method": names[entry], "corpus": entry.first.corpus, "texts": entry.first.budget[0]}


def in_order(entries: Sequence[Entry], paper: Mapping[str, Any]) -> list[Entry]:
    """The entries by r_max, by set with the largest first, then by method as the paper orders them."""
    found = pd.DataFrame(
        {
            "entry": entries,
            "r_max": [entry.r_max for entry in entries],
            "fewer": [-entry.asked.texts for entry in entries],
            "group": numbered(entry.group for entry in entries),
            "place": [place(entry.method, paper) for entry in entries],
            "options": [entry.asked.options for entry in entries],
        }
    )
    return list(found.sort_values(["r_max", "fewer", "group", "place", "options"], kind="stable")["entry"])


def differences(
    split: str, size: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> Table | None:
    """What the methods of one size gain and lose; `None` where nothing can be compared."""
    rows = []
    for entry in in_order(entries, paper):
        twin = causal_twin(entry, entries)
        if found := differences_of(entry, twin):
            cells = {**described(entry, names), **found, "seeds": len(entry.runs), "set": entry.asked.hash[:8]}
            note = entry.note if twin is None else against(entry, twin)
            rows.append(Row(cells, entry.group, note, about=(set_in_words(entry.asked),)))
    title = f"{paper['sizes'].get(size, size)}, {split}: differences"
    return Table(title, DIFFERENCES_CAPTION, DIFFERENCES, tuple(rows), "method", SETS) if rows else None


def differences_of(entry: Entry, twin: Entry | None) -> dict[str, Difference]:
    """The differences of an entry that there are, by the key of their column."""
    found: dict[str, Difference | None] = {f"{mode}_gain": gain(entry, mode) for mode in WITHOUT_FUTURE}
    for mode, other in ADVANTAGES.items():
        ours, theirs = entry.perplexity(mode), twin and twin.perplexity(other)
        found[mode] = paired_difference(ours, theirs) if ours and theirs else None
    return {key: each for key, each in found.items() if each is not None}


def causal_twin(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The runs of GPT that an entry may be compared with; of several, those whose recipe differs least."""
    if entry.method == CAUSAL:
        return None
    twins = [other for other in entries if other.method == CAUSAL and other.group == entry.group]
    return min(twins, key=lambda twin: len(otherwise(entry, twin)), default=None)


def otherwise(entry: Entry, twin: Entry) -> list[str]:
    """The keys of the recipe, beyond those of its method, in which training differed from GPT's."""
    ours, theirs = variant(entry.first), variant(twin.first)
    return [key for key in theirs if key not in OF_A_METHOD and ours.get(key) != theirs[key]]


def against(entry: Entry, twin: Entry) -> str | None:
    """What a footnote has to say of an entry beside its causal twin."""
    keys = otherwise(entry, twin)
    words = [*([entry.note] if entry.note else []), *([f"GPT differs in {', '.join(keys)}."] if keys else [])]
    return " ".join(words) or None


def gain(entry: Entry, mode: str) -> Difference | None:
    """What the future is worth to a method in a mode. A single run has recorded the interval of it."""
    ours, without = entry.perplexity(mode), entry.perplexity(WITHOUT_FUTURE[mode])
    if ours is None or without is None:
        return None
    found = paired_difference(ours, without)
    recorded = (entry.asked.found.get("gains") or {}).get(mode) or {}
    if found.interval is None and len(entry.runs) == 1 and recorded.get("interval"):
        low, high = recorded["interval"]
        return replace(found, interval=(float(low), float(high)))
    return found


def unpaired(entries: Sequence[Entry]) -> list[tuple[Run, Measured]]:
    """The evaluations for which differences have no interval, for they kept no sums per text."""
    found = []
    for entry in entries:
        twin = causal_twin(entry, entries)
        if any(each.interval is None for each in differences_of(entry, twin).values()):
            for each in filter(None, (entry, twin)):
                found += [pair for pair in zip(each.runs, each.measured, strict=True) if pair[1].per_text is None]
    return found


def place(method: str, paper: Mapping[str, Any]) -> int:
    """Where the paper's tables have a method; what they have not comes last."""
    return [*paper["methods"], method].index(method)


def paper_rows(paper: Mapping[str, Any], size: str, r_maxes: set[float]) -> list[Row]:
    """The paper's own rows of a size."""
    rows = []
    for found in paper["perplexities"]:
        if found["model"] == size and found["r_max"] in r_maxes:
            about: dict[str, Cell] = {"from": "paper", "r_max": found["r_max"], "corpus": found["corpus"]}
            about |= {"method": paper["methods"][found["method"]], "seeds": paper["seeds"].get(found["corpus"])}
            group = ("paper", found["corpus"], found["r_max"])
            rows.append(Row({**about, **paper_modes(paper, found)}, group, paper=True))
    return rows


def paper_modes(paper: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Mean | None]:
    """A row of the paper in each mode."""
    digits = paper["digits"][found["corpus"]]
    pairs = {mode: found[mode] for mode in MODES}
    return {mode: Mean(pair[0], pair[1], digits=digits) if pair else None for mode, pair in pairs.items()}


# ---- pictures -------------------------------------------------------------------------------------------------------


def add_pictures(
    part: Part, folder: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> None:
    """The pictures of one split, and what they do not show."""
    panels, shown = main_panels(entries, names, paper)
    if not panels:
        reasons = {run.name: why_left_out(run, entries, ()) for entry in entries for run in entry.runs}
        part.notes.extend(f"no figure of {folder}: {words}" for words in not_shown(reasons))
        return
    colours = {name: METHODS[name].colour for name in paper["methods"]}
    drawn = {
        "main": (
            partial(pictures.methods, panels, colours),
            f"Perplexity of each method in the five modes ({'; '.join(panel.title for panel in panels)}). Lower is "
            "better; hatched bars are bounds. The tables have the numbers.",
            [
                *several(shown),
                *not_shown(absent(entries, shown)),
                *without_bars([panel for panel in panels if not panel.paper]),
                *asked_otherwise(entries, names),
            ],
        )
    }
    both, shown = main_panels(entries, names, paper, with_and_without)
    if shown:
        drawn["future"] = (
            partial(pictures.with_and_without, both),
            "Perplexity on the training distribution with the future (dark) and without it (light), and by how much "
            "the future lowers it, for the methods that answer both exactly. What is over twice as bad as the best is "
            "in the tables only.",
            [*several(shown), *not_shown(absent(entries, shown, both_ways=True))],
        )
    curves = [(size, found) for size in sizes_of(entries, paper) if (found := sweep(size, entries, names, paper))]
    if curves:
        titled = [(paper["sizes"].get(size, size), [curve for curve, _ in found]) for size, found in curves]
        drawn["r_max"] = (
            partial(pictures.ranges, titled, colours),
            "Perplexity by r_max, on the training distribution and with nothing given, of models that were trained and "
            "asked at the same r_max; each r_max has an evaluation set of its own. Dashed: the paper's.",
            not_shown(off_curve(entries, [entry for _, found in curves for _, own in found for entry in own])),
        )
    for stem, (draw, words, left_out) in drawn.items():
        path = f"{folder}/{stem}"
        part.pictures[path], part.captions[path], part.left_out[path] = draw, words, left_out


def sizes_of(entries: Sequence[Entry], paper: Mapping[str, Any]) -> list[str]:
    """The sizes: those of the paper in its order, then others."""
    found = dict.fromkeys(entry.first.size for entry in entries)
    return [
        *(size for size in paper["sizes"] if size in found),
        *(size for size in found if size not in paper["sizes"]),
    ]


def main_panels(
    entries: Sequence[Entry],
    names: Mapping[Entry, str],
    paper: Mapping[str, Any],
    shown: Callable[[Panel], Panel] = lambda panel: panel,
) -> tuple[list[Panel], list[Entry]]:
    """Of each size the methods at the r_max of the paper's main results, or that of most; beside it the paper's.

    The first panel of a size is of an evaluation set that says something of the future, at the paper's r_max, of the
    most methods that are `shown`; of as many, one with a method that reads copies, then of the most rows, then of the
    most texts.
    Runs that cannot stand in it, for they have read more or less or were asked another set of this r_max, have panels
    of their own. What was asked in several ways is there as it is asked by default.

    Returns:
        The panels, and the entries in them.
    """
    panels, drawn = [], []
    default = asked_by_default(entries)
    for size in sizes_of(entries, paper):
        own_size = pd.Series([entry for entry in default if entry.first.size == size and entry.own], dtype=object)
        name, found = paper["sizes"].get(size, size), []
        for _, members in own_size.groupby(own_size.map(lambda entry: entry.group), sort=False):
            group = sorted(members, key=lambda entry: (place(entry.method, paper), entry.asked.options))
            rows = {entry: (names[entry], entry.method, entry.modes) for entry in group}
            title = f"{name}, r_max {group[0].r_max:g}, {group[0].asked.texts:,} texts"
            panel = shown(Panel(title, tuple(rows.values())))
            own = [entry for entry, row in rows.items() if any(row is kept for kept in panel.rows)]
            if own:
                found.append((own, panel))
        if not found:
            continue
        chosen = cover(sorted(found, key=lambda each: rating(*each), reverse=True))
        drawn += [entry for own, _ in chosen for entry in own]
        r_max, titles = chosen[0][0][0].r_max, told_apart([(panel.title, own[0]) for own, panel in chosen])
        panels += [replace(panel, title=title) for (_, panel), title in zip(chosen, titles, strict=True)]
        theirs = [row for row in paper["perplexities"] if (row["model"], row["r_max"]) == (size, r_max)]
        for corpus in dict.fromkeys(row["corpus"] for row in theirs):
            beside = tuple(
                (paper["methods"][row["method"]], row["method"], paper_modes(paper, row))
                for row in theirs
                if row["corpus"] == corpus
            )
            panel = shown(Panel(f"the paper: {name}, r_max {r_max:g}, {corpus}", beside, paper=True))
            panels += [panel] if panel.rows else []
    return panels, drawn


def asked_by_default(entries: Sequence[Entry]) -> list[Entry]:
    """The entries without those that were asked the same set by default too."""
    default = {(entry.first, entry.group) for entry in entries if not entry.asked.options}
    return [entry for entry in entries if not entry.asked.options or (entry.first, entry.group) not in default]


def rating(entries: Sequence[Entry], panel: Panel) -> tuple[Any, ...]:
    """The higher, the more a panel says."""
    future = any(modes["training"] for _, _, modes in panel.rows)
    methods = {method for _, method, _ in panel.rows}
    first = entries[0]
    copies = any(method_of(method).reads_copies for method in methods)
    return future, first.r_max == R_MAX, len(methods), copies, len(panel.rows), first.asked.texts


def cover(found: Sequence[tuple[list[Entry], Panel]]) -> list[tuple[list[Entry], Panel]]:
    """The first panel, and those after it that have a run which none before has, at the same r_max.

    A run counts as shown if another seed of it is.
    """
    chosen: list[tuple[list[Entry], Panel]] = []
    shown: set[str] = set()
    for own, panel in found:
        here = {entry.identity for entry in own}
        alike = not chosen or own[0].r_max == chosen[0][0][0].r_max
        if alike and not here <= shown and len(chosen) < MOST_PANELS:
            chosen.append((own, panel))
            shown |= here
    return chosen


def told_apart(panels: Sequence[tuple[str, Entry]]) -> list[str]:
    """The titles of the panels of a size, given with one of their entries, and in what they differ."""

    def words(entry: Entry) -> list[str]:
        texts, tokens = entry.first.budget
        asked = entry.asked.set
        corpus = f"trained on {entry.first.corpus}"
        return [
            f"{texts:,} texts read", f"{tokens:,} tokens read", f"of {asked.get('length')} tokens", corpus,
            f"{corpus} {entry.first.results['corpus_hash'][:8]}", f"set {entry.asked.hash[:8]}",
        ]  # fmt: skip

    titles = [title for title, _ in panels]
    for number, column in enumerate(zip(*(words(entry) for _, entry in panels), strict=True)):
        further = number in (1, 4, 5)  # said only where nothing else tells two panels apart
        if len(set(column)) > 1 and (not further or len(set(titles)) < len(titles)):
            titles = [f"{title}, {word}" for title, word in zip(titles, column, strict=True)]
    return titles


# ---- what pictures do not show --------------------------------------------------------------------------------------


def several(shown: Sequence[Entry]) -> list[str]:
    """A warning where a size has panels of other budgets or sets."""
    warning = "panels of one size differ in what was read or asked: compare rows within a panel only."
    return [warning] if len({entry.group for entry in shown}) > len({entry.first.size for entry in shown}) else []


def absent(entries: Sequence[Entry], shown: Sequence[Entry], both_ways: bool = False) -> dict[str, str]:
    """Why runs are not in the panels of a picture, by their names.

    Args:
        entries: Of the split.
        shown: Those in the panels.
        both_ways: Is the picture of those that answer with the future and without it? The others are not missed.
    """
    runs, groups = {run for entry in shown for run in entry.runs}, {entry.group for entry in shown}
    reasons = {}
    for entry in entries:
        for run in entry.runs:
            if run in runs or (both_ways and not exact_both_ways(entry.modes)):
                continue
            if both_ways and entry.own and entry.group in groups:
                reasons[run.name] = "over twice as bad as the best without the future. See the tables."
            else:
                reasons.setdefault(run.name, why_left_out(run, entries, shown))
    return reasons


def why_left_out(run: Run, entries: Sequence[Entry], shown: Sequence[Entry]) -> str:
    """Why a run is not among the panels of the main picture, or on no curve; and what to do.

    Args:
        run: The run.
        entries: Of the split.
        shown: Those in the panels.
    """
    mine = [entry for entry in entries if run in entry.runs]
    own = {entry.r_max for entry in mine if entry.own}
    if not own:
        asked = ", ".join(f"{x:g}" for x in sorted({entry.r_max for entry in mine}))
        return (
            f"trained with r_max {run.r_max:g}, and asked at {asked} only. Evaluate it as it was trained: acgpt "
            f"evaluate … --conditioning model --split {mine[0].asked.split} -o {run.folder / 'own.json'}"
        )
    if seeds := [each for entry in shown if entry.identity == mine[0].identity for each in entry.runs]:
        same = listed(each.name for each in seeds)
        return f"asked another set than {same}, from which it differs in the seed at most. See the tables."
    peers = [entry for entry in shown if entry.first.size == run.size]
    if peers and peers[0].r_max not in own:
        reason = f"asked at another r_max than {peers[0].r_max:g}, which the figure is of."
        if run.causal:
            return f"{reason} Ask it the same: {command_for(peers[0].asked)} -o {run.folder / 'same.json'}"
        return f"{reason} See the tables."
    return f"a figure has at most {MOST_PANELS} panels of a size. See the tables, or report fewer runs at a time."


def asked_otherwise(entries: Sequence[Entry], names: Mapping[Entry, str]) -> list[str]:
    """Which ways of asking are left out, for the same was asked by default."""
    default = asked_by_default(entries)
    others = [names[entry] for entry in entries if entry not in default]
    return [f"not shown: {listed(others)}: shown as asked by default. See the tables."] if others else []


def without_bars(panels: Sequence[Panel]) -> list[str]:
    """Which perplexities are infinite, and so have no bar."""
    infinite = [
        f"{name} ({mode})"
        for panel in panels
        for name, _, modes in panel.rows
        for mode, mean in modes.items()
        if mean is not None and not math.isfinite(mean.mean)
    ]
    return [f"no bar: {listed(infinite)}: infinite."] if infinite else []


def off_curve(entries: Sequence[Entry], shown: Sequence[Entry]) -> dict[str, str]:
    """Why runs are on no curve over r_max, by their names."""
    runs = {run for entry in shown for run in entry.runs}
    reasons = {}
    for entry in entries:
        for run in entry.runs:
            mine = [each for each in entries if run in each.runs]
            if run in runs:
                continue
            if all(each.asked.bound for each in mine):
                reason = "only a bound. See the tables."
            elif not any(each.own for each in mine):
                reason = why_left_out(run, entries, ())
            else:
                reason = "no run like it was asked at another r_max, on as many texts. See the tables."
            reasons[run.name] = reason
    return reasons


def with_and_without(panel: Panel) -> Panel:
    """The panel with those methods alone that answer the training distribution with the future and without, exactly.

    Like the paper's, it is on those that compete: what is over twice as bad as the best without the future is left out.
    """
    pasts = [rank(modes[WITHOUT_FUTURE["training"]]) for _, _, modes in panel.rows]
    best = min((past for past in pasts if past is not None), default=0.0)
    kept = [
        row for row, past in zip(panel.rows, pasts, strict=True)
        if exact_both_ways(row[2]) and past is not None and past <= 2 * best
    ]  # fmt: skip
    return replace(panel, rows=tuple(kept))


def exact_both_ways(modes: Mapping[str, Mean | None]) -> bool:
    """Is the training distribution answered with the future and without it, and exactly?"""
    return rank(modes["training"]) is not None and rank(modes[WITHOUT_FUTURE["training"]]) is not None


def sweep(
    size: str, entries: Sequence[Entry], names: Mapping[Entry, str], paper: Mapping[str, Any]
) -> list[tuple[Curve, list[Entry]]]:
    """The curves of a size over r_max, each with its entries, the paper's beside them; none if there is but one r_max.

    What was asked at each r_max on more and on fewer texts has one curve, of the most points, then of the most texts.
    """
    points = [entry for entry in entries if entry.first.size == size and entry.own and not entry.asked.bound]
    found = pd.DataFrame(
        {
            "entry": pd.Series(points, dtype=object),
            "alike": [but_for_r_max(entry) for entry in points],
            "texts": [entry.asked.texts for entry in points],
            "r_max": [entry.r_max for entry in points],
        }
    ).sort_values("r_max", kind="stable")
    curves = []
    for _, alike in found.groupby("alike", sort=False):
        counts = alike.groupby("texts")["r_max"].nunique()
        texts = max(counts.index, key=lambda texts: (counts[texts], texts))
        if counts[texts] > 1:
            own = list(alike["entry"][alike["texts"] == texts])
            curve = tuple((entry.r_max, entry.modes) for entry in own)
            curves.append((Curve(names[own[0]], own[0].method, curve), own))
    curves.sort(key=lambda curve: place(curve[0].method, paper))
    for method in dict.fromkeys(curve.method for curve, _ in curves):
        rows = [row for row in paper["perplexities"] if (row["model"], row["method"]) == (size, method)]
        theirs = tuple((row["r_max"], paper_modes(paper, row)) for row in rows if row["corpus"] == "WikiText-103")
        if theirs:
            curves.append((Curve(f"{paper['methods'][method]}, the paper", method, theirs, paper=True), []))
    return curves


def but_for_r_max(entry: Entry) -> str:
    """The same for entries of one curve: trained alike but for r_max, and asked alike but for r_max and more texts."""
    same = variant(entry.first)
    if "conditioning" in same:
        same["conditioning"] = {key: value for key, value in same["conditioning"].items() if key != "r_max"}
    asked = [entry.asked.set.get(key) for key in ("length", "seed", "corpus_hash")]
    return json.dumps([same, entry.asked.options, asked], sort_keys=True)
