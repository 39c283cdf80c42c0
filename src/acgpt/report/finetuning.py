"""Fine-tuning, as in the paper's section and appendix: AC-GPT against its causal twin on one base.

A *causal twin* (method=gpt) has the same base, corpus and budget, and was evaluated on the same dataset. Every run is
an entry of its own, whatever its seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from acgpt.errors import InputError
from acgpt.methods import METHODS
from acgpt.report import pictures
from acgpt.report.entries import ADVANTAGE_COLUMNS, Comparison, Entry, compare, difference_columns, mode_columns
from acgpt.report.paper import paper
from acgpt.report.part import Part, name_hidden
from acgpt.report.runs import Run, backbones
from acgpt.report.tables import INTERVALS, NO_CLEAR_BEST, Cell, Column, Row, Table, grouped

RUN_COLUMNS = (
    Column("run", "run"),
    Column("backbone", "backbone"),
    Column("adapter", "adapter", spare=True),
    Column("corpus", "corpus", spare=True),
    Column("r_max", "r_max", form="g"),
    Column("mix", "mix", form="g"),
)
SET = Column("set", "set", spare=True)
PERPLEXITIES = Table(
    "Perplexities",
    "Perplexity; lower is better. r_max 0 is the causal baseline. mix is the share of training texts with nothing "
    "given. Bold: the best value among rows with the same base, training corpus, training budget and evaluation "
    f"dataset; in the paper's rows, with the same backbone and corpus. {NO_CLEAR_BEST}",
    (
        RUN_COLUMNS[0],
        Column("method", "method", spare=True),
        *RUN_COLUMNS[1:],
        Column("texts", "texts read", form=",", spare=True),
        *mode_columns(".2f", min, spread=False),
        SET,
    ),
)
ADVANTAGES = Table(
    "Advantage over the causal baseline",
    "Advantage in percent of the causal baseline's perplexity; positive: AC-GPT is better. UC: unconditional; a "
    "negative value is the cost of reading the future. Inf, TD: infilling and the training distribution with the "
    f"future, against the baseline without it. {INTERVALS}",
    (*RUN_COLUMNS, *ADVANTAGE_COLUMNS, Column("twin", "over", spare=True), SET),
)
SWEEP = Table(
    "Advantage by r_max",
    "Training distribution with the future, against the causal baseline without it. Each run is evaluated at its own "
    f"r_max. {INTERVALS}",
    (
        *RUN_COLUMNS,
        Column("training", "training", form=".2f"),
        Column("baseline", "baseline's training no future", form=".2f"),
        *difference_columns(advantage="TD adv"),
        SET,
    ),
)


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
    names = backbones(tuned)
    entries = [Entry.of([evaluation], names[run.base]) for run in tuned for evaluation in run.evaluations]
    causal = [entry for entry in entries if entry.run.causal]
    part = Part("finetuning", "Fine-tuning", {"splits": {}, "paper": paper("finetuning")["source"]})
    for of_split in grouped(entries, lambda entry: entry.evaluation.split):
        split = of_split[0].evaluation.split
        folder = part.new_folder(split)
        compared = [compare(entry, causal) for entry in of_split if not entry.run.causal]
        sweeps = sweeps_of(compared)
        for name, table, rows in (
            ("perplexities", PERPLEXITIES, perplexity_rows(of_split)),
            ("advantages", ADVANTAGES, advantage_rows(compared)),
            ("sweep", SWEEP, sweep_rows(sweeps)),
        ):
            if rows:
                title, shown = f"{table.title}, {split}", (*rows, *paper_rows(name))
                table = replace(table, title=title, rows=shown, mark="backbone")
                part.add_table((folder, name), table, "splits", split, name)
        if sweeps:
            path = f"{folder}/sweep"
            on_curve = {comparison.entry.run for members in sweeps for comparison in members}
            hidden = name_hidden(each.entry.run.name for each in compared if each.entry.run not in on_curve)
            caption = "Advantage on the training distribution by r_max. Dashed: the paper." + hidden
            part.pictures[path] = partial(pictures.sweep, part.tables[path].grouped()), caption
    return part


def paper_rows(name: str) -> list[Row]:
    """Return the rows of a table of the paper, grouped as in the paper."""
    return [
        Row({"run": "paper", **cells}, ("paper", cells["backbone"], cells["corpus"]), cells.get("note"), paper=True)
        for cells in paper("finetuning")[name]
    ]


def description(entry: Entry) -> dict[str, Cell]:
    """Return the cells that identify a run."""
    run = entry.run
    method = "Baseline" if run.causal else METHODS[run.method].title
    model = {"run": run.name, "method": method, "backbone": entry.name, "adapter": run.adapter}
    return {**model, "corpus": run.corpus, "r_max": run.r_max, "mix": run.mix}


def perplexity_rows(entries: Sequence[Entry]) -> list[Row]:
    """Return the rows of the five modes, a row per run, baselines first."""
    groups = grouped(entries, lambda entry: entry.group)
    ordered = [entry for group in groups for entry in sorted(group, key=lambda entry: not entry.run.causal)]
    return [entry.row({**description(entry), **entry.modes, "texts": entry.run.budget[0]}) for entry in ordered]


def advantage_rows(compared: Sequence[Comparison]) -> list[Row]:
    """Return the rows of the advantages over causal twins."""
    rows = []
    for comparison in (each for group in grouped(compared, lambda each: each.entry.group) for each in group):
        cells = description(comparison.entry) | comparison.advantages
        twin = comparison.twin.run.name if comparison.twin else None
        rows.append(comparison.entry.row({**cells, "twin": twin}, comparison.note))
    return rows


def sweeps_of(compared: Sequence[Comparison]) -> list[list[Comparison]]:
    """Return lists of runs that differ only in r_max, each evaluated at its own; each list sorted by r_max."""

    def key(comparison: Comparison) -> str:
        run = comparison.entry.run
        parts = [part | {"r_max": None} for part in run.conditioning.as_dict()["parts"]]
        return json.dumps([run.base, run.lora, parts, run.results["corpus_hash"], run.budget], sort_keys=True)

    points = [each for each in compared if each.entry.at_training_r_max and "training" in each.advantages]
    sweeps = [sorted(same, key=lambda each: each.entry.r_max) for same in grouped(points, key)]
    return [members for members in sweeps if members[0].entry.r_max < members[-1].entry.r_max]


def sweep_rows(sweeps: Sequence[Sequence[Comparison]]) -> list[Row]:
    """Return the rows of the advantage on the training distribution by r_max, grouped by sweep."""
    rows = []
    for number, comparison in ((number, each) for number, members in enumerate(sweeps) for each in members):
        assert comparison.twin is not None
        cells = description(comparison.entry) | {
            "training": comparison.entry.modes["training"],
            "baseline": comparison.twin.modes["training-no-future"],
            "advantage": comparison.advantages["training"],
        }
        rows.append(replace(comparison.entry.row(cells, comparison.note), group=number))
    return rows
