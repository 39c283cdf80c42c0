"""What one row of a table is about: a run, or runs that differ only in their seed, evaluated on one dataset.

Entries are comparable if they have the same base or size, training texts, budget and evaluation dataset. Differences
between them are in percent, with 95 % intervals (paired bootstrap) where sums per document or text were kept. The
advantage of an entry over its causal twin (method=gpt, comparable) is positive where the entry is better:

    unconditional    its unconditional perplexity        against the causal unconditional
    infilling        its infilling, with the future      against the causal infilling-no-future
    training         its training, with the future       against the causal training-no-future
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from acgpt.evaluation.bootstrap import Difference, MeasuredPerplexity, paired_difference
from acgpt.methods import METHODS
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.report.runs import Run, RunEvaluation, command_for, describe_set
from acgpt.report.tables import Cell, Column, Mean, Row, comparable, grouped
from acgpt.training import recipe

ADVANTAGES = {"unconditional": "unconditional", **WITHOUT_FUTURE}  # mode of an entry: mode of its causal twin
# Recipe keys in which an entry differs from its twin by definition.
TWIN_KEYS = frozenset({"method", "conditioning", "lora", "base", "final_texts"})


def mode_columns(form: str, best: Callable[..., Any], spread: bool) -> tuple[Column, ...]:
    """Return a column for each mode."""
    return tuple(Column(mode, mode.replace("-", " "), form=form, best=best, spread=spread) for mode in MODES)


def difference_columns(**titles: str) -> tuple[Column, ...]:
    """Return columns of differences in percent, from their keys and titles."""
    return tuple(Column(key, title, form="+z.2f%", interval=True) for key, title in titles.items())


GAIN_COLUMNS = difference_columns(infilling_gain="Inf gain", training_gain="TD gain")
ADVANTAGE_COLUMNS = difference_columns(unconditional="UC adv", infilling="Inf adv", training="TD adv")


@dataclass(frozen=True, eq=False)
class Entry:
    """Runs that differ only in their seed with their evaluations on one dataset, or a row of the paper.

    Args:
        name: The method, and what distinguishes the entry from others of the method, on any dataset.
        method: Name of the method.
        r_max: r_max of the evaluation dataset.
        modes: Mean perplexity, by mode.
        evaluations: The evaluation of each run, on the same dataset with the same options; none in the paper.
    """

    name: str
    method: str
    r_max: float
    modes: Mapping[str, Mean | None]
    evaluations: tuple[RunEvaluation, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, evaluations: Sequence[RunEvaluation], name: str = "") -> Entry:
        """Return the entry of these evaluations."""
        first = evaluations[0]
        modes = {mode: Mean.of((each.modes.get(mode) for each in evaluations), first.bound) for mode in MODES}
        return cls(name, first.run.method, first.r_max, modes, tuple(evaluations))

    @property
    def evaluation(self) -> RunEvaluation:
        """One of the evaluations, for properties that all of them share."""
        return self.evaluations[0]

    @property
    def run(self) -> Run:
        """One of the runs, for properties that all of them share."""
        return self.evaluation.run

    def perplexity(self, mode: str) -> MeasuredPerplexity | None:
        """Return the mean perplexity with the sums of each run; `None` unless it is exact and finite."""
        value = comparable(self.modes[mode])
        sums = tuple(evaluation.per_text for evaluation in self.evaluations if mode in evaluation.modes)
        return None if value is None else MeasuredPerplexity(value, mode, sums)

    @property
    def at_training_r_max(self) -> bool:
        """Whether the evaluation has the r_max of training; always true for methods without one."""
        return self.run.causal or self.run.r_max == self.r_max

    @cached_property
    def group(self) -> tuple[object, ...]:
        """Key of comparable entries: base, size, corpus, budget and evaluation dataset."""
        run = self.run
        return run.base, run.size, run.results["corpus_hash"], run.budget, self.evaluation.hash

    @property
    def gains(self) -> dict[str, Difference]:
        """What the future gains in the modes that read it: their advantage over the same mode without it."""
        return {f"{mode}_gain": gain for mode, gain in differences(self, self, WITHOUT_FUTURE).items()}

    def row(self, cells: Mapping[str, Cell], *notes: str | None) -> Row:
        """Return the row of a table with these cells and remarks."""
        measured = {mode: value for mode in MODES if (value := self.perplexity(mode)) is not None}
        note = " ".join(filter(None, notes)) or None
        cells = {**cells, "set": self.evaluation.hash[:8]}
        return Row(cells, self.group, note, details=(describe_set(self.evaluation),), measured=measured)


def differences(ours: Entry, theirs: Entry, modes: Mapping[str, str]) -> dict[str, Difference]:
    """Return by how many percent a perplexity of ours is below one of theirs, where both are exact and finite.

    Args:
        ours: An entry.
        theirs: The entry to compare it with, on the same dataset.
        modes: For each mode of ours, the mode of theirs.
    """
    pairs = {mode: (ours.perplexity(mode), theirs.perplexity(other)) for mode, other in modes.items()}
    return {mode: paired_difference(one, other) for mode, (one, other) in pairs.items() if one and other}


@dataclass(frozen=True)
class Comparison:
    """An entry and its causal twin.

    Args:
        entry: The entry.
        twin: The causal entry to compare with, on the same dataset, if there is one.
        note: Why there is none, or how the twin differs.
    """

    entry: Entry
    twin: Entry | None
    note: str

    @cached_property
    def advantages(self) -> dict[str, Difference]:
        """Advantages in percent with their intervals, by mode of the entry."""
        return {} if self.twin is None else differences(self.entry, self.twin, ADVANTAGES)


def compare(
    entry: Entry, causal: Sequence[Entry], name: str = "The causal baseline", ignored: Collection[str] = TWIN_KEYS
) -> Comparison:
    """Compare an entry with its causal twin: one with the same adapter if there is one, then the least different one.

    Args:
        entry: The entry.
        causal: Causal entries.
        name: Name of the twin in notes.
        ignored: Recipe keys in which a twin may differ.
    """

    def differing(twin: Entry) -> list[str]:
        keys = recipe.differences(run.recipe, twin.run.recipe)
        return [key for key in keys if key not in ignored and not key.startswith("eval_")]

    run, (texts, tokens) = entry.run, entry.run.budget
    reasons = {  # why there is no twin, and how much of the groups is equal in a twin
        "no causal run (method=gpt) has this base.": 2,
        "no causal run of this base was trained on the same corpus.": 3,
        f"no causal run of this base and corpus has the same budget: {texts:,} texts, {tokens:,} tokens.": 4,
        f"none of its causal twins is evaluated on this dataset. Run {command_for(entry.evaluation)} -o "
        "TWIN/NAME.json, with the same --conditioning if there was one.": 5,
    }
    twins = [twin for twin in causal if not twin.evaluation.options]
    for reason, size in reasons.items():
        twins = [twin for twin in twins if twin.group[:size] == entry.group[:size]]
        if not twins:
            return Comparison(entry, None, reason)
    twin = min(twins, key=lambda twin: (twin.run.lora != run.lora, len(differing(twin))))
    remarks = []
    if twin.run.lora != run.lora:
        same_name = twin.run.adapter == run.adapter  # alpha, dropout or target modules differ
        own, other = (f"{one.adapter} {dict(one.lora or {})}" if same_name else one.adapter for one in (run, twin.run))
        remarks.append(f"No causal baseline has {own}: compared with {other} on the same base and corpus.")
    if keys := differing(twin):
        remarks.append(f"{name} differs in {', '.join(keys)}.")
    return Comparison(entry, twin, " ".join(remarks))


def entries_of(runs: Sequence[Run]) -> tuple[list[Entry], list[str]]:
    """Group runs into entries, in the order of the runs; return also notes on runs that repeat another."""
    evaluations = [evaluation for run in runs for evaluation in run.evaluations]
    entries, notes = [], {}
    for same in grouped(evaluations, lambda each: (each.run.identity, each.hash, each.options)):
        by_seed: dict[int, RunEvaluation] = {}
        for each in same:
            first = by_seed.setdefault(each.run.seed, each)
            if first is not each:
                name, seed = each.run.name, each.run.seed
                notes[name] = f"{name} repeats {first.run.name} with the same seed {seed}: left out."
        entries.append(Entry.of(list(by_seed.values())))
    names = entry_names(entries)
    return [replace(entry, name=names[entry]) for entry in entries], list(notes.values())


def entry_names(entries: Sequence[Entry]) -> dict[Entry, str]:
    """Name each entry: the method, and what distinguishes it from others of the method, on any dataset of a split."""
    names = {}
    for peers in grouped(
        entries, lambda e: (e.evaluation.split, e.method, *e.group[:-1], e.r_max, e.at_training_r_max)
    ):
        for entry in peers:
            variant, options = entry.run.variant, entry.evaluation.options
            differing = [key for key in variant if any(each.run.variant.get(key) != variant[key] for each in peers)]
            values = [f"{key} {json.dumps(variant[key]).strip(chr(34))}" for key in differing]
            names[entry] = ", ".join([METHODS[entry.method].title, *filter(None, [options]), *values])
    return names
