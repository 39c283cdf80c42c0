"""What one row of a table is about: a run, or runs that differ only in their seed, evaluated on one dataset.

Entries are comparable if they have the same base or size, training texts, budget and evaluation dataset. Differences
between them are in percent, with 95 % intervals (paired bootstrap) where sums per document or text were kept. The
advantage of an entry over a causal one (method=gpt) is positive where the entry is better:

    unconditional    its unconditional perplexity        against the causal unconditional
    infilling        its infilling, with the future      against the causal infilling-no-future
    training         its training, with the future       against the causal training-no-future
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any

from acgpt.evaluation.bootstrap import Difference, MeasuredPerplexity, paired_difference
from acgpt.methods import METHODS
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.report.runs import Run, RunEvaluation, describe_set
from acgpt.report.tables import Cell, Column, Mean, Row, comparable, grouped
from acgpt.training.recipe import FREE, Recipe

SETS = "Evaluation datasets"  # title of what the rows of a table were evaluated on
ADVANTAGES = {"unconditional": "unconditional", **WITHOUT_FUTURE}  # mode of an entry: mode of a causal one


def mode_columns(form: str, best: Callable[..., Any], spread: bool) -> tuple[Column, ...]:
    """Return a column for each mode."""
    return tuple(Column(mode, mode.replace("-", " "), form=form, best=best, spread=spread) for mode in MODES)


def difference_column(key: str, title: str) -> Column:
    """Return a column of differences in percent."""
    return Column(key, title, form="+z.2f%", interval=True)


ADVANTAGE_COLUMNS = (
    difference_column("unconditional", "UC adv"),
    difference_column("infilling", "Inf adv"),
    difference_column("training", "TD adv"),
)


@dataclass(frozen=True, eq=False)
class Entry:
    """Runs that differ only in their seed, with their evaluations on one dataset.

    Args:
        runs: One run per seed.
        evaluations: The evaluation of each run, on the same dataset with the same options.
        name: The method, and what distinguishes the entry from others of the method, on any dataset.
    """

    runs: tuple[Run, ...]
    evaluations: tuple[RunEvaluation, ...]
    name: str = ""

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

    @cached_property
    def modes(self) -> Mapping[str, Mean | None]:
        """Mean perplexity of the runs, by mode."""
        bound = self.evaluation.bound
        return {mode: Mean.of((each.modes[mode] for each in self.evaluations), bound) for mode in MODES}

    @property
    def chance(self) -> float | None:
        """Half-width of the 95 % interval in percent, the largest of any seed."""
        return max((each.chance for each in self.evaluations if each.chance is not None), default=None)

    def perplexity(self, mode: str) -> MeasuredPerplexity | None:
        """Return the mean perplexity with the sums of each run; `None` unless it is exact and finite."""
        value = comparable(self.modes[mode])
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
        """Key of comparable entries: base, size, corpus, budget and evaluation dataset."""
        run = self.first
        return run.base, run.size, run.results["corpus_hash"], run.budget, self.evaluation.hash

    def row(self, cells: Mapping[str, Cell], *notes: str | None) -> Row:
        """Return the row of a table with these cells and remarks."""
        measured = {mode: value for mode in MODES if (value := self.perplexity(mode)) is not None}
        return Row(
            {**cells, "set": self.evaluation.hash[:8]},
            self.group,
            " ".join(filter(None, notes)) or None,
            details=(describe_set(self.evaluation),),
            measured=measured,
        )


def differences(ours: Entry, theirs: Entry, modes: Mapping[str, str]) -> dict[str, Difference]:
    """Return by how many percent a perplexity of ours is below one of theirs, where both are exact and finite.

    Args:
        ours: An entry.
        theirs: The entry to compare it with, on the same dataset.
        modes: For each mode of ours, the mode of theirs.
    """
    pairs = {mode: (ours.perplexity(mode), theirs.perplexity(other)) for mode, other in modes.items()}
    return {mode: paired_difference(one, other) for mode, (one, other) in pairs.items() if one and other}


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
    """Group runs into entries, in the order of the runs; return also notes on runs that repeat another."""
    pairs = [(run, evaluation) for run in runs for evaluation in run.evaluations]
    entries, notes = [], {}
    for same in grouped(pairs, lambda pair: (identity(pair[0]), pair[1].hash, pair[1].options)):
        by_seed: dict[int, tuple[Run, RunEvaluation]] = {}
        for run, evaluation in same:
            first, _ = by_seed.setdefault(run.seed, (run, evaluation))
            if first is not run:
                notes[run.name] = f"{run.name} repeats {first.name} with the same seed {run.seed}: left out."
        seeds = by_seed.values()
        entries.append(Entry(tuple(run for run, _ in seeds), tuple(evaluation for _, evaluation in seeds)))
    names = entry_names(entries)
    return [replace(entry, name=names[entry]) for entry in entries], list(notes.values())


def entry_names(entries: Sequence[Entry]) -> dict[Entry, str]:
    """Name each entry: the method, and what distinguishes it from others of the method, on any dataset of a split."""
    names = {}
    for peers in grouped(
        entries, lambda e: (e.evaluation.split, e.method, *e.group[:-1], e.r_max, e.at_training_r_max)
    ):
        variants = {entry: variant(entry.first) for entry in peers}
        for entry, recipe in variants.items():
            differing = [key for key in recipe if any(peer.get(key) != recipe[key] for peer in variants.values())]
            values = [f"{key} {json.dumps(recipe[key]).strip(chr(34))}" for key in differing]
            options = [entry.evaluation.options] if entry.evaluation.options else []
            names[entry] = ", ".join([METHODS[entry.method].title, *options, *values])
    return names
