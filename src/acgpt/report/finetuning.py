"""Fine-tuning, as in the paper's section and appendix: AC-GPT against its causal twin on one base.

A *causal twin* (method=gpt) has the same base, corpus and budget, and was evaluated on the same dataset. The advantage
of a run over its twin is in percent of the twin's perplexity, positive where the run is better:

    unconditional    the run's unconditional perplexity        against the twin's unconditional
    infilling        the run's infilling, with the future      against the twin's infilling-no-future
    training         the run's training, with the future       against the twin's training-no-future

If both evaluations kept sums per document, an advantage has a 95 % interval (paired bootstrap).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import Difference, paired_difference
from acgpt.report import pictures
from acgpt.report.left_out import name_hidden
from acgpt.report.part import Part
from acgpt.report.runs import (
    ADVANTAGES,
    SETS,
    Run,
    RunEvaluation,
    backbones,
    command_for,
    describe_set,
)
from acgpt.report.tables import INTERVALS, NO_CLEAR_BEST, Cell, Column, Row, Table, comparable, file_name, grouped
from acgpt.training.recipe import differences

PAPER = Path(__file__).parent / "paper" / "finetuning.json"

RUN_COLUMNS = (
    Column("run", "run"),
    Column("backbone", "backbone"),
    Column("adapter", "adapter", spare=True),
    Column("corpus", "corpus", spare=True),
    Column("r_max", "r_max", r"$r_{\max}$", "g"),
    Column("mix", "mix", form="g"),
)
SET = Column("set", "set", spare=True)
PERPLEXITIES = (
    RUN_COLUMNS[0],
    Column("method", "method", spare=True),
    *RUN_COLUMNS[1:],
    Column("texts", "texts read", form=",", spare=True),
    Column("unconditional", "unconditional", form=".2f", best=min),
    Column("infilling", "infilling", form=".2f", best=min),
    Column("training", "training", form=".2f", best=min),
    Column("infilling-no-future", "infilling no future", form=".2f", best=min),
    Column("training-no-future", "training no future", form=".2f", best=min),
    SET,
)
ADVANTAGE_COLUMNS = (
    *RUN_COLUMNS,
    Column("unconditional", "UC adv", form="+z.2f%", interval=True),
    Column("infilling", "Inf adv", form="+z.2f%", interval=True),
    Column("training", "TD adv", form="+z.2f%", interval=True),
    Column("twin", "over", spare=True),
    SET,
)
SWEEP = (
    *RUN_COLUMNS,
    Column("training", "training", form=".2f"),
    Column("baseline", "baseline's training no future", form=".2f"),
    Column("advantage", "TD adv", form="+z.2f%", interval=True),
    SET,
)
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
    """One evaluation of a run, and its causal twin's on the same dataset.

    Args:
        run: The run that reads the future.
        evaluation: Its evaluation.
        twin: The causal run to compare with, if there is one.
        note: Why there is none, or how the twin differs.
    """

    run: Run
    evaluation: RunEvaluation
    twin: Run | None
    note: str | None

    @property
    def baseline(self) -> RunEvaluation | None:
        """The twin's evaluation on the same dataset."""
        return None if self.twin is None else self.twin.evaluation_on(self.evaluation.hash)

    @property
    def advantages(self) -> dict[str, Difference | None]:
        """Advantages in percent with their intervals, by mode of the run."""
        results: dict[str, Difference | None] = {}
        for mode, other in ADVANTAGES.items():
            ours, theirs = self.evaluation.perplexity(mode), self.baseline and self.baseline.perplexity(other)
            results[mode] = paired_difference(ours, theirs) if ours and theirs else None
        return results


def compare(run: Run, evaluation: RunEvaluation, causal: Sequence[Run]) -> Comparison:
    """Compare an evaluation with that of the run's causal twin; the note says why there is none, or how it differs.

    Of several twins, one with the same adapter is preferred, then the one whose recipe differs least.
    """
    texts, tokens = run.budget
    conditions: dict[str, Callable[[Run], bool]] = {
        "no causal run (method=gpt) has this base.": lambda other: other.base == run.base,
        "no causal run of this base was trained on the same corpus.": (
            lambda other: other.results["corpus_hash"] == run.results["corpus_hash"]
        ),
        f"no causal run of this base and corpus has the same budget: {texts:,} texts, {tokens:,} tokens.": (
            lambda other: other.budget == run.budget
        ),
        f"none of its causal twins is evaluated on this dataset. Run {command_for(evaluation)} -o TWIN/NAME.json, with "
        "the same --conditioning if there was one.": lambda other: other.evaluation_on(evaluation.hash) is not None,
    }
    candidates = list(causal)
    for reason, holds in conditions.items():
        candidates = [other for other in candidates if holds(other)]
        if not candidates:
            return Comparison(run, evaluation, None, reason)
    twin = min(candidates, key=lambda other: (other.lora != run.lora, len(differing(run, other))))
    remarks = []
    if twin.lora != run.lora:
        same_name = twin.adapter == run.adapter  # alpha, dropout or target modules differ
        adapters = [f"{one.adapter} {dict(one.lora or {})}" if same_name else one.adapter for one in (run, twin)]
        remarks.append(
            f"No causal baseline has {adapters[0]}: compared with {adapters[1]} on the same base and corpus."
        )
    if keys := differing(run, twin):
        remarks.append(f"The causal baseline differs in {', '.join(keys)}.")
    return Comparison(run, evaluation, twin, " ".join(remarks) or None)


def differing(run: Run, other: Run) -> list[str]:
    """Return the recipe keys in which training differed, besides those in which twins differ by definition."""
    expected = {"method", "conditioning", "lora", "base", "final_texts"}
    keys = differences(run.recipe, other.recipe)
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
    causal = [run for run in tuned if run.causal]
    if len(causal) == len(tuned):
        raise InputError(
            f"nothing to compare: {', '.join(str(run.folder) for run in tuned)} are all causal (method=gpt). Add "
            "a run with method=ac-gpt on the same base."
        )
    paper, names = json.loads(PAPER.read_text(encoding="utf-8")), backbones(tuned)
    compared = [compare(run, evaluation, causal) for run in tuned if not run.causal for evaluation in run.evaluations]
    splits = dict.fromkeys(evaluation.split for run in tuned for evaluation in run.evaluations)
    part = Part("finetuning", "Fine-tuning", {"splits": {}, "paper": paper["source"]}, {})
    for split in splits:
        of_split = [comparison for comparison in compared if comparison.evaluation.split == split]
        tables = {"perplexities": perplexity_table(tuned, split, names, paper)}
        if of_split:
            tables["advantages"] = advantage_table(of_split, names, paper)
        sweeps = sweep(of_split)
        if sweeps:
            tables["sweep"] = sweep_table(sweeps, names, paper)
        part.content["splits"][split] = {name: table.as_dicts() for name, table in tables.items()}
        folder = file_name(split)
        while f"{folder}/perplexities" in part.tables:  # another split with the same safe name
            folder += "_"
        part.tables.update({f"{folder}/{name}": table for name, table in tables.items()})
        if sweeps:
            path, table = f"{folder}/sweep", tables["sweep"]
            part.pictures[path] = partial(pictures.sweep, sweep_curves(table))
            on_curve = {comparison.run for members in sweeps for comparison in members}
            hidden = name_hidden(each.run.name for each in of_split if each.run not in on_curve)
            part.captions[path] = "Advantage on the training distribution by r_max. Dashed: the paper." + hidden
    return part


def run_description(run: Run, names: dict[str, str]) -> dict[str, Cell]:
    """Return the cells that identify a run."""
    model = {"run": run.name, "method": run.method, "backbone": names[run.base], "adapter": run.adapter}
    return {**model, "corpus": run.corpus, "r_max": run.r_max, "mix": run.mix}


def group(run: Run, evaluation: RunEvaluation) -> tuple[object, ...]:
    """Return the key of comparable evaluations: base, corpus, budget and evaluation dataset."""
    return (run.base, run.results["corpus_hash"], run.budget, evaluation.hash)


def paper_rows(paper: dict[str, Any], table: str) -> list[Row]:
    """Return the rows of a table of the paper, grouped as in the paper."""
    return [
        Row({"run": "paper", **cells}, ("paper", cells["backbone"], cells["corpus"]), cells.get("note"), paper=True)
        for cells in paper[table]
    ]


def perplexity_table(runs: Sequence[Run], split: str, names: dict[str, str], paper: dict[str, Any]) -> Table:
    """Build the table of the five modes, a row per run, baselines first."""
    pairs = [(run, evaluation) for run in runs for evaluation in run.evaluations if evaluation.split == split]
    groups = list(dict.fromkeys(group(*pair) for pair in pairs))  # in the order of the runs
    rows = []
    for run, evaluation in sorted(pairs, key=lambda pair: (groups.index(group(*pair)), not pair[0].causal)):
        cells = {**run_description(run, names), "texts": run.budget[0], **evaluation.modes, "set": evaluation.hash[:8]}
        details = (describe_set(evaluation),)
        key = group(run, evaluation)
        measured = {mode: value for mode in evaluation.modes if (value := evaluation.perplexity(mode))}
        rows.append(Row(cells, key, None, False, details, measured))
    rows += paper_rows(paper, "perplexities")
    return Table(f"Perplexities, {split}", CAPTIONS["perplexities"], PERPLEXITIES, tuple(rows), "backbone", SETS)


def advantage_table(compared: Sequence[Comparison], names: dict[str, str], paper: dict[str, Any]) -> Table:
    """Build the table of the advantages over causal twins."""
    rows = []
    for members in grouped(compared, lambda comparison: group(comparison.run, comparison.evaluation)):
        for comparison in members:
            run, evaluation = comparison.run, comparison.evaluation
            cells = {**run_description(run, names), **comparison.advantages, "set": evaluation.hash[:8]}
            cells["twin"] = comparison.twin.name if comparison.twin else None
            rows.append(Row(cells, group(run, evaluation), comparison.note, details=(describe_set(evaluation),)))
    rows += paper_rows(paper, "advantages")
    title = f"Advantage over the causal baseline, {compared[0].evaluation.split}"
    return Table(title, CAPTIONS["advantages"], ADVANTAGE_COLUMNS, tuple(rows), "backbone", SETS)


def sweep(compared: Sequence[Comparison]) -> list[list[Comparison]]:
    """Return lists of runs that differ only in r_max, each evaluated at its own; each list sorted by r_max."""
    comparable_runs = [
        comparison
        for comparison in compared
        if comparison.evaluation.dataset.get("r_max") == comparison.run.r_max
        and comparison.advantages["training"] is not None
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


def sweep_table(sweeps: Sequence[Sequence[Comparison]], names: dict[str, str], paper: dict[str, Any]) -> Table:
    """Build the table of the advantage on the training distribution by r_max."""
    rows = []
    for number, comparison in ((number, comparison) for number, group in enumerate(sweeps) for comparison in group):
        assert comparison.baseline is not None
        cells = {
            **run_description(comparison.run, names),
            "training": comparison.evaluation.modes["training"],
            "set": comparison.evaluation.hash[:8],
        }
        cells |= {
            "baseline": comparison.baseline.modes["training-no-future"],
            "advantage": comparison.advantages["training"],
        }
        rows.append(Row(cells, number, comparison.note, details=(describe_set(comparison.evaluation),)))
    title = f"Advantage by r_max, {sweeps[0][0].evaluation.split}"
    return Table(title, CAPTIONS["sweep"], SWEEP, (*rows, *paper_rows(paper, "sweep")), "backbone", SETS)


# ---- pictures -------------------------------------------------------------------------------------------------------


def sweep_curves(table: Table) -> list[tuple[str, bool, list[tuple[Cell, float | None]]]]:
    """Return the curves of the sweep table, as `pictures.sweep` draws them."""
    curves = []
    for rows in table.grouped():
        paper, cells = rows[0].paper, rows[0].cells
        name = f"{'the paper: ' if paper else ''}{cells['backbone']}, {cells['adapter']}"
        curves.append((name, paper, [(row.cells["r_max"], comparable(row.cells["advantage"])) for row in rows]))
    return curves
