"""Fine-tuning, as in the paper's section and appendix: AC-GPT against its causal twin on one base.

A *causal twin* (method=gpt) has the same base, corpus and budget, and was evaluated on the same dataset. Every run is
an entry of its own, whatever its seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from acgpt.common.files import read_json_object
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import Difference
from acgpt.report import pictures
from acgpt.report.entries import (
    ADVANTAGE_COLUMNS,
    ADVANTAGES,
    SETS,
    Entry,
    difference_column,
    differences,
    mode_columns,
)
from acgpt.report.left_out import name_hidden
from acgpt.report.part import Part
from acgpt.report.runs import Run, backbones, command_for
from acgpt.report.tables import INTERVALS, NO_CLEAR_BEST, Cell, Column, Row, Table, comparable, grouped
from acgpt.training import recipe

PAPER = Path(__file__).parent / "paper" / "finetuning.json"

RUN_COLUMNS = (
    Column("run", "run"),
    Column("backbone", "backbone"),
    Column("adapter", "adapter", spare=True),
    Column("corpus", "corpus", spare=True),
    Column("r_max", "r_max", form="g"),
    Column("mix", "mix", form="g"),
)
SET = Column("set", "set", spare=True)
PERPLEXITIES = (
    RUN_COLUMNS[0],
    Column("method", "method", spare=True),
    *RUN_COLUMNS[1:],
    Column("texts", "texts read", form=",", spare=True),
    *mode_columns(".2f", min, spread=False),
    SET,
)
ADVANTAGE_TABLE = (*RUN_COLUMNS, *ADVANTAGE_COLUMNS, Column("twin", "over", spare=True), SET)
SWEEP = (
    *RUN_COLUMNS,
    Column("training", "training", form=".2f"),
    Column("baseline", "baseline's training no future", form=".2f"),
    difference_column("advantage", "TD adv"),
    SET,
)
COLUMNS = {"perplexities": PERPLEXITIES, "advantages": ADVANTAGE_TABLE, "sweep": SWEEP}
TITLES = {
    "perplexities": "Perplexities",
    "advantages": "Advantage over the causal baseline",
    "sweep": "Advantage by r_max",
}
CAPTIONS = {
    "perplexities": "Perplexity; lower is better. r_max 0 is the causal baseline. mix is the share of training texts "
    "with nothing given. Bold: the best value among rows with the same base, training corpus, training budget and "
    f"evaluation dataset; in the paper's rows, with the same backbone and corpus. {NO_CLEAR_BEST}",
    "advantages": "Advantage in percent of the causal baseline's perplexity; positive: AC-GPT is better. UC: "
    "unconditional; a negative value is the cost of reading the future. Inf, TD: infilling and the training "
    f"distribution with the future, against the baseline without it. {INTERVALS}",
    "sweep": "Training distribution with the future, against the causal baseline without it. Each run is evaluated at "
    f"its own r_max. {INTERVALS}",
}


# ---- who is compared with whom --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Comparison:
    """An entry, and its causal twin.

    Args:
        entry: The entry of a run that reads the future.
        twin: The causal entry to compare with, on the same dataset, if there is one.
        note: Why there is none, or how the twin differs.
    """

    entry: Entry
    twin: Entry | None
    note: str | None

    @property
    def run(self) -> Run:
        """The run that reads the future."""
        return self.entry.first

    @cached_property
    def advantages(self) -> dict[str, Difference]:
        """Advantages in percent with their intervals, by mode of the run."""
        return {} if self.twin is None else differences(self.entry, self.twin, ADVANTAGES)


def compare(entry: Entry, causal: Sequence[Entry]) -> Comparison:
    """Compare an entry with its causal twin; the note says why there is none, or how it differs.

    Of several twins, one with the same adapter is preferred, then the one whose recipe differs least.
    """
    run, (texts, tokens) = entry.first, entry.first.budget
    conditions: dict[str, Callable[[Entry], bool]] = {
        "no causal run (method=gpt) has this base.": lambda other: other.first.base == run.base,
        "no causal run of this base was trained on the same corpus.": (
            lambda other: other.first.results["corpus_hash"] == run.results["corpus_hash"]
        ),
        f"no causal run of this base and corpus has the same budget: {texts:,} texts, {tokens:,} tokens.": (
            lambda other: other.first.budget == run.budget
        ),
        f"none of its causal twins is evaluated on this dataset. Run {command_for(entry.evaluation)} -o "
        "TWIN/NAME.json, with the same --conditioning if there was one.": (
            lambda other: other.evaluation.hash == entry.evaluation.hash and not other.evaluation.options
        ),
    }
    candidates = list(causal)
    for reason, holds in conditions.items():
        candidates = [other for other in candidates if holds(other)]
        if not candidates:
            return Comparison(entry, None, reason)
    twin = min(candidates, key=lambda other: (other.first.lora != run.lora, len(differing(run, other.first))))
    other, remarks = twin.first, []
    if other.lora != run.lora:
        same_name = other.adapter == run.adapter  # alpha, dropout or target modules differ
        adapters = [f"{one.adapter} {dict(one.lora or {})}" if same_name else one.adapter for one in (run, other)]
        remarks.append(
            f"No causal baseline has {adapters[0]}: compared with {adapters[1]} on the same base and corpus."
        )
    if keys := differing(run, other):
        remarks.append(f"The causal baseline differs in {', '.join(keys)}.")
    return Comparison(entry, twin, " ".join(remarks) or None)


def differing(run: Run, other: Run) -> list[str]:
    """Return the recipe keys in which training differed, besides those in which twins differ by definition."""
    expected = {"method", "conditioning", "lora", "base", "final_texts"}
    keys = recipe.differences(run.recipe, other.recipe)
    return [key for key in keys if key not in expected and not key.startswith("eval_")]


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(runs: Sequence[Run]) -> Part | None:
    """Build the part on fine-tuning; `None` if there is no such run.

    Raises:
        InputError: There are such runs, but all of them are causal.
    """
    tuned = [run for run in runs if run.base]
    if not tuned:
        return None
    if all(run.causal for run in tuned):
        raise InputError(
            f"nothing to compare: {', '.join(str(run.folder) for run in tuned)} are all causal (method=gpt). Add "
            "a run with method=ac-gpt on the same base."
        )
    paper = read_json_object(PAPER)
    paper_rows = {name: rows_of_paper(paper[name]) for name in ("perplexities", "advantages", "sweep")}
    names = backbones(tuned)
    entries = [Entry((run,), (evaluation,), names[run.base]) for run in tuned for evaluation in run.evaluations]
    causal = [entry for entry in entries if entry.first.causal]
    part = Part("finetuning", "Fine-tuning", {"splits": {}, "paper": paper["source"]}, {})
    for of_split in grouped(entries, lambda entry: entry.evaluation.split):
        split = of_split[0].evaluation.split
        compared = [compare(entry, causal) for entry in of_split if not entry.first.causal]
        sweeps = sweeps_of(compared)
        rows = {
            "perplexities": perplexity_rows(of_split),
            "advantages": advantage_rows(compared),
            "sweep": sweep_rows(sweeps),
        }
        tables = {
            name: Table(
                f"{TITLES[name]}, {split}", CAPTIONS[name], COLUMNS[name], (*own, *paper_rows[name]), "backbone", SETS
            )
            for name, own in rows.items()
            if own
        }
        part.content["splits"][split] = {name: table.as_dicts() for name, table in tables.items()}
        folder = part.new_folder(split)
        part.tables.update({f"{folder}/{name}": table for name, table in tables.items()})
        if sweeps:
            path = f"{folder}/sweep"
            part.pictures[path] = partial(pictures.sweep, sweep_curves(tables["sweep"]))
            on_curve = {comparison.run for members in sweeps for comparison in members}
            hidden = name_hidden(each.run.name for each in compared if each.run not in on_curve)
            part.captions[path] = "Advantage on the training distribution by r_max. Dashed: the paper." + hidden
    return part


def rows_of_paper(rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a table of the paper, grouped as in the paper."""
    return [
        Row({"run": "paper", **cells}, ("paper", cells["backbone"], cells["corpus"]), cells.get("note"), paper=True)
        for cells in rows
    ]


def description(entry: Entry) -> dict[str, Cell]:
    """Return the cells that identify a run."""
    run = entry.first
    model = {"run": run.name, "method": run.method, "backbone": entry.name, "adapter": run.adapter}
    return {**model, "corpus": run.corpus, "r_max": run.r_max, "mix": run.mix}


def perplexity_rows(entries: Sequence[Entry]) -> list[Row]:
    """Return the rows of the five modes, a row per run, baselines first."""
    groups = grouped(entries, lambda entry: entry.group)
    ordered = [entry for group in groups for entry in sorted(group, key=lambda entry: not entry.first.causal)]
    return [entry.row({**description(entry), **entry.modes, "texts": entry.first.budget[0]}) for entry in ordered]


def advantage_rows(compared: Sequence[Comparison]) -> list[Row]:
    """Return the rows of the advantages over causal twins."""
    return [
        comparison.entry.row(
            {
                **description(comparison.entry),
                **comparison.advantages,
                "twin": comparison.twin.first.name if comparison.twin else None,
            },
            comparison.note,
        )
        for members in grouped(compared, lambda comparison: comparison.entry.group)
        for comparison in members
    ]


def sweeps_of(compared: Sequence[Comparison]) -> list[list[Comparison]]:
    """Return lists of runs that differ only in r_max, each evaluated at its own; each list sorted by r_max."""
    comparable_runs = [
        comparison
        for comparison in compared
        if comparison.entry.r_max == comparison.run.r_max and "training" in comparison.advantages
    ]
    return [
        sorted(members, key=lambda comparison: comparison.run.r_max)
        for members in grouped(comparable_runs, lambda comparison: sweep_key(comparison.run))
        if len({comparison.run.r_max for comparison in members}) > 1
    ]


def sweep_key(run: Run) -> str:
    """Return a key that is the same for runs that differ only in r_max."""
    parts = [part | {"r_max": None} for part in run.conditioning.as_dict()["parts"]]
    return json.dumps([run.base, run.lora, parts, run.results["corpus_hash"], run.budget], sort_keys=True)


def sweep_rows(sweeps: Sequence[Sequence[Comparison]]) -> list[Row]:
    """Return the rows of the advantage on the training distribution by r_max, grouped by sweep."""
    rows = []
    for number, comparison in ((number, comparison) for number, members in enumerate(sweeps) for comparison in members):
        assert comparison.twin is not None
        cells = {
            **description(comparison.entry),
            "training": comparison.entry.modes["training"],
            "baseline": comparison.twin.modes["training-no-future"],
            "advantage": comparison.advantages["training"],
        }
        rows.append(replace(comparison.entry.row(cells, comparison.note), group=number))
    return rows


# ---- pictures -------------------------------------------------------------------------------------------------------


def sweep_curves(table: Table) -> list[tuple[str, bool, list[tuple[Cell, float | None]]]]:
    """Return the curves of the sweep table, as `pictures.sweep` draws them."""
    curves = []
    for rows in table.grouped():
        paper, cells = rows[0].paper, rows[0].cells
        name = f"{'the paper: ' if paper else ''}{cells['backbone']}, {cells['adapter']}"
        curves.append((name, paper, [(row.cells["r_max"], comparable(row.cells["advantage"])) for row in rows]))
    return curves
