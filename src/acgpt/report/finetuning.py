"""Fine-tuning, as in the paper's section on it and the appendix: AC-GPT against its causal twin on one base.

A *causal twin* (method=gpt) has the same base, corpus and budget, and was asked the same evaluation set. The advantage
of a run over its twin, in percent of the twin's perplexity, positive where the run is better:

    unconditional    the run's unconditional perplexity        against the twin's unconditional
    infilling        the run's infilling, with the future      against the twin's infilling-no-future
    training         the run's training, with the future       against the twin's training-no-future

Where both evaluations kept the sums of each text, an advantage has a 95 % interval (the paired bootstrap over texts).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import Difference, paired_difference
from acgpt.report import pictures
from acgpt.report.left_out import listed, not_shown
from acgpt.report.part import Part
from acgpt.report.runs import (
    ADVANTAGES,
    Measured,
    Run,
    backbones,
    command_for,
    set_in_words,
    sets_in_words,
    without_intervals,
)
from acgpt.report.tables import INTERVALS, UNLESS, Cell, Column, Row, Table, file_name, numbered, rank
from acgpt.training.recipe import differences

PAPER = Path(__file__).parent / "paper" / "finetuning.json"

ABOUT = (
    Column("run", "run"),
    Column("backbone", "backbone"),
    Column("adapter", "adapter", spare=1),
    Column("corpus", "corpus", spare=1),
    Column("r_max", "r_max", r"$r_{\max}$", "g"),
    Column("mix", "mix", form="g"),
)
SET = Column("set", "set", spare=1)
PERPLEXITIES = (
    ABOUT[0],
    Column("method", "method", spare=2),
    *ABOUT[1:],
    Column("texts", "texts read", form=",", spare=1),
    Column("unconditional", "unconditional", form=".2f", best=min),
    Column("infilling", "infilling", form=".2f", best=min),
    Column("training", "training", form=".2f", best=min),
    Column("infilling-no-future", "infilling no future", form=".2f", best=min),
    Column("training-no-future", "training no future", form=".2f", best=min),
    SET,
)
ADVANTAGE_COLUMNS = (
    *ABOUT,
    Column("unconditional", "UC adv", form="+z.2f%", interval=True),
    Column("infilling", "Inf adv", form="+z.2f%", interval=True),
    Column("training", "TD adv", form="+z.2f%", interval=True),
    Column("twin", "over", spare=2),
    SET,
)
SWEEP = (
    *ABOUT,
    Column("training", "training", form=".2f"),
    Column("baseline", "baseline's training no future", form=".2f"),
    Column("advantage", "TD adv", form="+z.2f%", interval=True),
    SET,
)
CURVE = (
    Column("run", "run"),
    Column("twin", "twin"),
    Column("step", "step", form=","),
    Column("tokens", "tokens", form=","),
    Column("unconditional", "UC adv", form="+z.2f%"),
    Column("training", "TD adv", form="+z.2f%"),
)
WATCHED = {"unconditional": "unconditional", "training": "training-no-future"}  # in the log of a run, and of its twin
CAPTIONS = {
    "perplexities": "r_max 0 is the causal baseline; mix is the share of training texts of which nothing is given. "
    "Bold, in the paper's rows too: the best of those that read as much of the same text and were asked the same, "
    f"{UNLESS}.",
    "advantages": "In percent of the causal baseline's perplexity, positive where AC-GPT is better. UC: unconditional; "
    "Inf: infilling with the future, over the baseline's without it; TD: the training distribution, likewise. A "
    f"negative UC adv is what reading the future costs. {INTERVALS}",
    "sweep": "The training distribution with the future, over the causal baseline's without it, each at its own r_max. "
    f"{INTERVALS}",
    "curve": "Over the causal twin after as many steps. Logs keep no sums per text, so there are no intervals.",
}
FIGURES = {
    "modes": "Perplexities with the future and without it, beside the causal baseline's.",
    "advantages": "The advantage on the training distribution, in percent of the causal baseline's perplexity; grey is "
    "the paper's.",
    "sweep": "The advantage on the training distribution by r_max; dashed is the paper's.",
    "curve": "The advantages in the course of training.",
}


def advantage(ours: float | None, baseline: float | None) -> float | None:
    """By how many percent a perplexity is below the baseline's; `None` if one of them is missing or infinite."""
    if ours is None or baseline is None or not math.isfinite(ours) or not math.isfinite(baseline):
        return None
    return 100 * (1 - ours / baseline)


# ---- who is compared with whom --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Comparison:
    """One evaluation of a run, and its causal twin's on the same set.

    Args:
        run: The run that reads the future.
        measured: Its evaluation.
        twin: The causal run, if there is one to compare with.
        note: Why there is none, or in what the twin differs.
    """

    run: Run
    measured: Measured
    twin: Run | None
    note: str | None

    @property
    def baseline(self) -> Measured | None:
        """The twin's evaluation on the same set."""
        return None if self.twin is None else self.twin.on(self.measured.hash)

    @property
    def advantages(self) -> dict[str, Difference | None]:
        """By the run's mode, in percent, with its interval over texts."""
        found: dict[str, Difference | None] = {}
        for mode, other in ADVANTAGES.items():
            ours, theirs = self.measured.perplexity(mode), self.baseline and self.baseline.perplexity(other)
            found[mode] = paired_difference(ours, theirs) if ours and theirs else None
        return found


def compare(run: Run, measured: Measured, causal: Sequence[Run]) -> Comparison:
    """An evaluation beside that of the run's causal twin, if it has one."""
    remedy = (
        f"none of its causal twins is evaluated on this set: {command_for(measured)} -o TWIN/NAME.json, with the same "
        "--conditioning if there was one."
    )
    twin, note = find_twin(run, causal, lambda other: other.on(measured.hash) is not None, remedy)
    return Comparison(run, measured, twin, note)


def find_twin(
    run: Run, causal: Sequence[Run], same_set: Callable[[Run], bool], remedy: str
) -> tuple[Run | None, str | None]:
    """The causal twin of a run, and what a footnote has to say about it; or none, and why.

    Of several, one with the same adapter goes before others, then the one whose recipe differs least.

    Args:
        run: The run.
        causal: The causal runs.
        same_set: Has this one been asked what the run was asked?
        remedy: What to say if none has.
    """
    texts, tokens = run.budget
    conditions: dict[str, Callable[[Run], bool]] = {
        "no causal run (method=gpt) has this base.": lambda other: other.base == run.base,
        "no causal run of this base was trained on the same corpus.": (
            lambda other: other.results["corpus_hash"] == run.results["corpus_hash"]
        ),
        f"no causal run of this base and corpus has read as much: {texts:,} texts, {tokens:,} tokens.": (
            lambda other: other.budget == run.budget
        ),
        remedy: same_set,
    }
    found = list(causal)
    for reason, holds in conditions.items():
        found = [other for other in found if holds(other)]
        if not found:
            return None, reason
    twin = min(found, key=lambda other: (other.lora != run.lora, len(differing(run, other))))
    words = []
    if twin.lora != run.lora:
        same_name = twin.adapter == run.adapter  # then it is another alpha, dropout or target
        kinds = [f"{each.adapter} {dict(each.lora or {})}" if same_name else each.adapter for each in (run, twin)]
        words.append(f"no causal baseline has {kinds[0]}: compared with that of {kinds[1]} on the same base and corpus")
    if keys := differing(run, twin):
        words.append(f"the causal baseline differs in {', '.join(keys)}")
    return twin, "; ".join(words) + "." if words else None


def differing(run: Run, other: Run) -> list[str]:
    """The keys of the recipe, beyond those that make a twin, in which training differed."""
    expected = {"method", "conditioning", "lora", "base", "final_texts"}
    keys = differences(run.recipe, other.recipe)
    return [key for key in keys if key not in expected and not key.startswith("eval_")]


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(runs: Sequence[Run]) -> Part | None:
    """The part on fine-tuning; `None` if no run is one.

    Raises:
        InputError: There are such runs, but all of them are causal.
    """
    tuned = [run for run in runs if run.base]
    if not tuned:
        return None
    causal = [run for run in tuned if run.causal]
    if len(causal) == len(tuned):
        raise InputError(
            f"nothing to compare: {', '.join(str(run.folder) for run in tuned)} are causal baselines (method=gpt). Add "
            "a run with method=ac-gpt on the same base."
        )
    paper, names = json.loads(PAPER.read_text(encoding="utf-8")), backbones(tuned)
    compared = [compare(run, each, causal) for run in tuned if not run.causal for each in run.evaluations]
    splits = dict.fromkeys(each.split for run in tuned for each in run.evaluations)
    part = Part("finetuning", "Fine-tuning", {"splits": {}, "paper": paper["source"]}, {})
    for split in splits:
        own = [each for each in compared if each.measured.split == split]
        tables = {"perplexities": perplexity_table(tuned, split, names, paper)}
        if own:
            tables["advantages"] = advantage_table(own, names, paper)
        swept = sweep(own)
        if swept:
            tables["sweep"] = sweep_table(swept, names, paper)
        part.content["splits"][split] = {name: table.as_dicts() for name, table in tables.items()}
        folder = file_name(split)
        while f"{folder}/perplexities" in part.tables:  # another split, whose name differs in odd characters only
            folder += "_"
        part.tables.update({f"{folder}/{name}": table for name, table in tables.items()})
        part.notes.extend(hidden_baselines(tuned, split))
        part.notes.extend(without_intervals(split, unpaired(own)))
        add_pictures(part, folder, own, tables)
        if own:
            part.left_out.update(left_out(folder, own, swept, [run for run in causal if asked_in(run, split)]))
    add_curve(part, [run for run in tuned if not run.causal], causal, names)
    part.captions.update({stem: FIGURES[stem.rpartition("/")[2]] for stem in part.pictures})
    return part


def about(run: Run, names: dict[str, str]) -> dict[str, Cell]:
    """The cells that say which run it is."""
    described = {"run": run.name, "method": run.method, "backbone": names[run.base], "adapter": run.adapter}
    return {**described, "corpus": run.corpus, "r_max": run.r_max, "mix": run.mix}


def group(run: Run, measured: Measured) -> tuple[object, ...]:
    """Runs on as much of the same text, asked the same, can be compared."""
    return (run.base, run.results["corpus_hash"], run.budget, measured.hash)


def paper_rows(paper: dict[str, Any], table: str) -> list[Row]:
    """The paper's own rows, grouped as there."""
    return [
        Row({"run": "paper", **cells}, ("paper", cells["backbone"], cells["corpus"]), cells.get("note"), paper=True)
        for cells in paper[table]
    ]


def captioned(name: str, measured: Sequence[Measured]) -> str:
    """The caption of a table, with a description of each evaluation set in it."""
    return f"{CAPTIONS[name]} {sets_in_words(measured)}"


Evaluations = list[tuple[Run, Measured]]


def evaluations_in(runs: Sequence[Run], split: str) -> tuple[Evaluations, Evaluations]:
    """The evaluations of a split that stand in its table, and those that do not.

    A baseline may have been asked more than any run was: where it is beside one, it need not stand alone as well.
    """
    found = [(run, each) for run in runs for each in run.evaluations if each.split == split]
    compared = {group(run, each) for run, each in found if not run.causal}
    beside = {run for run, each in found if group(run, each) in compared}
    alone = [(run, each) for run, each in found if group(run, each) not in compared and run in beside]
    return [pair for pair in found if pair not in alone], alone


def hidden_baselines(runs: Sequence[Run], split: str) -> list[str]:
    """A note on each evaluation of a baseline that the table of a split leaves out."""
    return [
        f"{run.name}, {split}: its evaluation on set {set_in_words(each)} is left out, for no run that reads the "
        f"future was asked it. To compare: {command_for(each)} -o RUN/NAME.json"
        for run, each in evaluations_in(runs, split)[1]
    ]


def perplexity_table(runs: Sequence[Run], split: str, names: dict[str, str], paper: dict[str, Any]) -> Table:
    """The five modes, run by run, baselines first."""
    found, _ = evaluations_in(runs, split)
    frame = pd.DataFrame(
        {
            "group": numbered(group(*pair) for pair in found),  # as the runs were named
            "future": [not run.causal for run, _ in found],
        }
    )
    rows = []
    for run, each in (found[i] for i in frame.sort_values(["group", "future"], kind="stable").index):
        cells = {**about(run, names), "texts": run.budget[0], **each.modes, "set": each.hash[:8]}
        rows.append(Row(cells, group(run, each), resampled=each.resampled(), texts=each.texts))
    rows += paper_rows(paper, "perplexities")
    caption = captioned("perplexities", [each for _, each in found])
    return Table(f"Perplexities, {split}", caption, PERPLEXITIES, tuple(rows), "backbone")


def advantage_table(compared: Sequence[Comparison], names: dict[str, str], paper: dict[str, Any]) -> Table:
    """What AC-GPT gains over its causal twins."""
    keys = [group(each.run, each.measured) for each in compared]
    rows = []
    for i in numbered(keys).sort_values(kind="stable").index:  # those of a group together
        each = compared[i]
        cells = {**about(each.run, names), **each.advantages, "set": each.measured.hash[:8]}
        rows.append(Row({**cells, "twin": each.twin.name if each.twin else None}, keys[i], each.note))
    rows += paper_rows(paper, "advantages")
    caption = captioned("advantages", [each.measured for each in compared])
    title = f"Advantage over the causal baseline, {compared[0].measured.split}"
    return Table(title, caption, ADVANTAGE_COLUMNS, tuple(rows), "backbone")


def unpaired(compared: Sequence[Comparison]) -> list[tuple[Run, Measured]]:
    """The evaluations, of runs and of their twins, that kept no sums per text."""
    both = [(each.run, each.measured) for each in compared if each.twin is not None]
    both += [(each.twin, each.baseline) for each in compared if each.twin is not None and each.baseline is not None]
    return [(run, each) for run, each in both if each.per_text is None]


def sweep(compared: Sequence[Comparison]) -> list[list[Comparison]]:
    """Runs that differ in nothing but r_max, each evaluated at its own: a list a sweep, by r_max."""
    own = [
        each
        for each in compared
        if each.measured.set.get("r_max") == each.run.r_max and each.advantages["training"] is not None
    ]
    found = pd.DataFrame(
        {
            "comparison": pd.Series(own, dtype=object),
            "alike": [but_for_r_max(each.run) for each in own],
            "r_max": [each.run.r_max for each in own],
        }
    )
    return [
        list(alike.sort_values("r_max", kind="stable")["comparison"])
        for _, alike in found.groupby("alike", sort=False)
        if alike["r_max"].nunique() > 1
    ]


def but_for_r_max(run: Run) -> str:
    """The same for runs that differ in nothing but r_max."""
    parts = [part | {"r_max": None} for part in run.conditioning.as_dict()["parts"]]
    return json.dumps([run.base, run.lora, parts, run.results["corpus_hash"], run.budget], sort_keys=True)


def sweep_table(swept: Sequence[Sequence[Comparison]], names: dict[str, str], paper: dict[str, Any]) -> Table:
    """The advantage on the training distribution by r_max."""
    rows = []
    for number, each in ((number, each) for number, group in enumerate(swept) for each in group):
        assert each.baseline is not None
        cells = {**about(each.run, names), "training": each.measured.modes["training"], "set": each.measured.hash[:8]}
        cells |= {"baseline": each.baseline.modes["training-no-future"], "advantage": each.advantages["training"]}
        rows.append(Row(cells, number, each.note))
    caption = captioned("sweep", [each.measured for group in swept for each in group])
    title = f"The range of conditioning, {swept[0][0].measured.split}"
    return Table(title, caption, SWEEP, (*rows, *paper_rows(paper, "sweep")), "backbone")


# ---- pictures -------------------------------------------------------------------------------------------------------


def label(row: Row, rows: Sequence[Row]) -> str:
    """A row in one line, told from the others."""
    cells = row.cells
    words = [f"{cells['backbone']}, {cells['adapter']}, {cells['corpus']}", f"r_max {cells['r_max']:g}"]
    words += [f"mix {cells['mix']:g}"] if cells["mix"] else []
    if not row.paper and [other.cells["run"] for other in rows].count(cells["run"]) > 1:
        words.append(f"set {cells['set']}")
    return f"{'the paper' if row.paper else cells['run']}: {', '.join(words)}"


def add_pictures(part: Part, folder: str, compared: Sequence[Comparison], tables: dict[str, Table]) -> None:
    """The pictures of one split."""
    if not compared:
        return
    rows = tables["advantages"].rows
    titles = {(row.cells["run"], row.cells.get("set")): label(row, rows) for row in rows}
    panels = [
        (
            titles[each.run.name, each.measured.hash[:8]],
            each.measured.modes,
            each.baseline.modes if each.baseline else None,
        )
        for each in compared
    ]
    part.pictures[f"{folder}/modes"] = partial(pictures.modes, panels)
    gains = [(row, rank(row.cells["training"])) for row in rows]
    bars = [(label(row, rows), gain, row.paper) for row, gain in gains if gain is not None]
    if any(not paper for *_, paper in bars):
        part.pictures[f"{folder}/advantages"] = partial(pictures.bars, bars)
    if "sweep" in tables:
        curves = []
        for own in tables["sweep"].grouped():
            paper, cells = own[0].paper, own[0].cells
            name = f"{'the paper: ' if paper else ''}{cells['backbone']}, {cells['adapter']}"
            curves.append((name, paper, [(row.cells["r_max"], rank(row.cells["advantage"])) for row in own]))
        part.pictures[f"{folder}/sweep"] = partial(pictures.sweep, curves)


def asked_in(run: Run, split: str) -> bool:
    """Has the run an evaluation on this split?"""
    return any(each.split == split for each in run.evaluations)


def left_out(
    folder: str, compared: Sequence[Comparison], swept: Sequence[Sequence[Comparison]], causal: Sequence[Run]
) -> dict[str, list[str]]:
    """What the pictures of a split do not show, by their names.

    Args:
        folder: Of the split.
        compared: All comparisons on it.
        swept: Those in the sweep over r_max.
        causal: The causal runs that were evaluated on it.
    """
    twins = {each.twin for each in compared}
    alone = "the causal twin of no run here. See the footnotes of the advantages."
    modes = not_shown({run.name: alone for run in causal if run not in twins})
    modes += [f"no causal baseline: {each.run.name}: {each.note}" for each in compared if each.twin is None]
    modes += without_bars(compared)
    missing = {each.run.name: each.note for each in compared if each.advantages["training"] is None}
    nothing = "one of the two perplexities is missing or infinite. See the tables."
    advantages = not_shown({name: note or nothing for name, note in missing.items()})
    on_curve = {each.run for found in swept for each in found}
    single = "no run like it, asked at its own r_max and with a causal twin, has another r_max. See the tables."
    sweep = not_shown({each.run.name: single for each in compared if each.run not in on_curve})
    found = {"modes": modes, "advantages": advantages, "sweep": sweep}
    return {f"{folder}/{stem}": words for stem, words in found.items()}


def without_bars(compared: Sequence[Comparison]) -> list[str]:
    """Which perplexities are infinite, and so have no bar."""
    both = [(each.run, each.measured) for each in compared]
    both += [(each.twin, each.baseline) for each in compared if each.twin is not None and each.baseline is not None]
    infinite = [f"{run.name} ({mode})" for run, each in both for mode, x in each.modes.items() if x == math.inf]
    return [f"no bar: {listed(infinite)}: infinite."] if infinite else []


def add_curve(part: Part, runs: Sequence[Run], causal: Sequence[Run], names: dict[str, str]) -> None:
    """The advantage in the course of training, from the logs of runs and twins that were asked the same."""
    rows, curves = [], []
    for run in runs:
        reason = f"{run.name} has no curve: its log and its causal twin's are not of the same evaluation set."
        twin, said = find_twin(run, causal, partial(watched_alike, run), reason)
        if twin is None and said == reason:  # for want of a twin at all its row has a note already
            part.notes.append(reason)
        own = [] if twin is None else curve_rows(run, twin)
        if twin is not None and not own:
            part.notes.append(
                f"{run.name} has no curve: its log and that of {twin.name} have no evaluation after the same step."
            )
        if own:
            rows += own
            curves.append((f"{run.name}: {names[run.base]}, {run.adapter}", [row.cells for row in own]))
    if rows:
        table = Table("Advantage in the course of training", CAPTIONS["curve"], CURVE, tuple(rows), "run")
        part.data["curve"], part.content["curve"] = table, table.as_dicts()
        if any(len(own) > 1 for _, own in curves):
            part.pictures["curve"] = partial(pictures.curve, curves)


def watched_alike(run: Run, other: Run) -> bool:
    """Are the perplexities in their logs of the same evaluation set?"""
    return run.watched is not None and run.watched == other.watched


def curve_rows(run: Run, twin: Run) -> list[Row]:
    """The advantages of a run after each step that both logs have perplexities of."""
    ours, theirs = (pd.DataFrame([row for row in each.log() if "unconditional" in row]) for each in (run, twin))
    if ours.empty or theirs.empty:
        return []
    theirs = theirs.drop_duplicates("step", keep="last").add_prefix("twin's ")
    both = ours.merge(theirs, left_on="step", right_on="twin's step")
    rows = []
    for row in both.to_dict("records"):
        cells = {"run": run.name, "twin": twin.name, "step": row["step"], "tokens": row["tokens"]}
        cells |= {mine: advantage(row.get(mine), row.get(f"twin's {its}")) for mine, its in WATCHED.items()}
        rows.append(Row(cells, run.name))
    return rows
