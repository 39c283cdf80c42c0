"""Generation, as in the paper's appendix on sampling: MAUVE by method and mode, other measures, and samples.

Scores (`scores`) are tables, and generations are shown side by side on their own page. Models that differ only in their
seed are one row. Several draws of one model are averaged first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from acgpt.query.modes import MODES
from acgpt.report.entries import mode_columns
from acgpt.report.paper import method_order, paper, paper_rows, size_title, sizes
from acgpt.report.part import Part
from acgpt.report.runs import Run
from acgpt.report.samples_page import SampleColumn, samples_page
from acgpt.report.scores import PAGE, SHARES, UNKNOWN_RUNS, WHOLE, Scored, find_results, method_name, run_of
from acgpt.report.tables import Cell, Column, Mean, Row, Table, grouped, known_first

ORIGINAL = "original"  # name of the rows of the original texts
NO_SAMPLES = "there is no page of samples: the folders have scores, but not the generations themselves."

MAUVE = (
    Column("from", "from", terminal=False),
    Column("r_max", "r_max", form="g"),
    Column("asked", "texts", form=",", spare=True),
    Column("method", "method"),
    Column("corpus", "corpus", spare=True),
    Column("scored", "scored"),
    Column("features", "features", spare=True),
    *mode_columns(".3f", max, spread=True),
    Column("noise", "k-means ±", form=".3f", terminal=False),
    Column("seeds", "seeds", form="d", spare=True),
    Column("set", "set", spare=True),
)
COMPANIONS = (
    Column("r_max", "r_max", form="g"),
    Column("asked", "texts", form=",", spare=True),
    Column("mode", "mode"),
    Column("method", "method"),
    *(Column(f"distinct_{n}", f"distinct-{n} %", form=".1f", spread=True) for n in (1, 2, 3)),
    Column("repetition", "repeated %", form=".1f", spread=True),
    Column("loops", "loops %", form=".1f", spread=True),
    Column("own", "own ppl", form=",.2f", spread=True),
    Column("judged", "judge's ppl", form=",.2f", spread=True),
    Column("seeds", "seeds", form="d", spare=True),
    Column("set", "set", spare=True),
)
CAPTION = (
    "MAUVE; higher is better. Mean ± sample standard deviation over training seeds; a single seed has no deviation. "
    "k-means ± is the largest standard deviation over k-means seeds of any score in the row. Smaller differences are "
    "noise. Larger ones may be noise too, because other texts would change a score more. Bold: the best of comparable "
    "scores, which have the same texts and scoring settings. -- marks a mode that the method cannot sample, or that "
    "was not scored. The score of a whole text includes the given tokens, which all methods share. The asked part is "
    "scored against the original tokens."
)
LEVEL = " The row original scores the real texts against the same reference: it is the level to reach."
OTHERS = (
    "The paper's rows have other texts, references and training budgets, use features of GPT-2 large, and score whole "
    "texts: compare the order of the methods, not the values."
)
MEASURED = (
    "Measures of the sampled tokens. distinct-n: share of distinct n-grams. repeated: share of 4-grams that occurred "
    "earlier in the text. loops: share of texts that end in a loop. own ppl: perplexity under the model itself at "
    "temperature 1; -- if the model has only a bound. judge's ppl: perplexity under the judge. No value is good or bad "
    "by itself: compare with the original text, where it is known."
)


def make(folders: Sequence[Path], runs: Sequence[Run]) -> Part | None:
    """Build the part on generation; `None` if the folders have nothing for it."""
    generated, scored, notes = find_results(folders, runs)
    if not generated and not scored:
        return None
    part = Part("generation", "Generation", {"sizes": {}, "paper": paper("mauve")["source"]}, notes=notes)
    of_sizes = known_first((result.size for result in scored), sizes())
    for size in of_sizes:
        of_size = [result for result in scored if result.size == size]
        suffix = f", {size_title(size)}"
        if size == UNKNOWN_RUNS:
            suffix = ", models whose runs are not in this report" if len(of_sizes) > 1 else ""
        tables = {"companions": companions_table(f"Other measures{suffix}", of_size)}
        if with_mauve := [result for result in of_size if "mauve" in result.values]:
            tables = {"mauve": mauve_table(f"MAUVE{suffix}", size, with_mauve), **tables}
        for name, table in tables.items():
            part.add_table((size, name), table, "sizes", size, name)
    if generated:
        columns = [SampleColumn(each, run_of(each.record, each.path, runs)) for each in generated]
        part.pages[PAGE] = ("Samples, side by side", partial(samples_page, columns))
    else:
        part.notes.append(NO_SAMPLES)
    return part


# ---- rows -----------------------------------------------------------------------------------------------------------


def models_of(scored: Sequence[Scored]) -> list[tuple[str, list[Scored]]]:
    """Group comparable results by model, whatever its seed, in the paper's order, each file of generations once.

    Returns:
        The name of each model, which is its method and options, and its address if two had the same name; its results.
    """
    models = [
        [draw for draw, *_ in grouped(same, lambda result: result.generation_key)]
        for same in grouped(scored, lambda result: result.identity)
    ]
    models.sort(key=lambda draws: method_order(draws[0].method))
    names = [method_name(first.record) for first, *_ in models]
    return [
        (f"{name}, {draws[0].record['model']}" if names.count(name) > 1 else name, draws)
        for name, draws in zip(names, models, strict=True)
    ]


def over_seeds(draws: Sequence[Scored], metric: str) -> Mean | None:
    """Return the mean over training seeds, each of which is the mean of its draws; `None` if a draw has no value."""
    means = []
    for same in grouped(draws, lambda draw: draw.seed):
        numbers = [number for draw in same if (number := draw.values[metric]) is not None]
        if len(numbers) < len(same):
            return None
        means.append(math.fsum(numbers) / len(numbers))
    return Mean.of(means, bound=metric == "judged" and any(draw.values["bound"] for draw in draws))


def seeds_of(draws: Sequence[Scored]) -> int:
    """Return the number of training seeds."""
    return len({draw.seed for draw in draws})


def draws_note(draws: Sequence[Scored]) -> list[str]:
    """Return a note if a training seed has several draws."""
    most = max(map(len, grouped(draws, lambda draw: draw.seed)))
    return [f"Mean of up to {most} generations per model."] if most > 1 else []


def description(draws: Sequence[Scored], method: str) -> dict[str, Cell]:
    """Return the cells that describe a row."""
    first, seeds = draws[0], None if method == ORIGINAL else seeds_of(draws)
    cells: dict[str, Cell] = {"r_max": first.r_max, "mode": first.mode, "asked": first.texts, "method": method}
    cells |= {"from": "here", "scored": first.content["scored"], "features": first.features}
    return cells | {"set": first.record["set"]["hash"][:8], "seeds": seeds}


# ---- MAUVE ----------------------------------------------------------------------------------------------------------


def mauve_table(title: str, size: str, scored: Sequence[Scored]) -> Table:
    """Build the MAUVE table of one size, by r_max and by method in the paper's order, with the paper's rows."""
    rows, caption = list[Row](), CAPTION
    groups = grouped(scored, lambda result: result.group)
    for group in sorted(groups, key=lambda results: (results[0].content["scored"] != WHOLE, -results[0].texts)):
        rows += [mauve_row(draws, name) for name, draws in models_of(group)]
        originals = {each.mode: each.content["original"] for each in group if each.content.get("original") is not None}
        if originals:  # a group of its own: it is a reference, not a method
            caption = CAPTION + LEVEL
            means = {mode: Mean(score["mean"]) for mode, score in originals.items()}
            noise = largest(score["std"] for score in originals.values())
            cells = {**description(group, ORIGINAL), **means, "noise": noise}
            rows.append(Row(cells, (ORIGINAL, group[0].group)))
    rows += paper_rows("mauve", "mauve", size, {result.r_max for result in scored}, scored=WHOLE)
    rows.sort(key=lambda row: (row.cells["r_max"], row.paper))
    return Table(title, caption, MAUVE, tuple(rows), details_title="Scores", paper_note=OTHERS)


def mauve_row(draws: Sequence[Scored], name: str) -> Row:
    """Return the row of a model: its scores by mode."""
    first, seeds = draws[0], seeds_of(draws)
    modes = {same[0].mode: same for same in grouped(draws, lambda draw: draw.mode)}
    scores = {mode: over_seeds(same, "mauve") for mode, same in modes.items()}
    noise = largest(draw.values["noise"] for draw in draws)
    corpus = {"corpus": first.run.corpus if first.run else None}
    notes = notes_of(modes)
    notes += [f"{mode}: {seeds_of(same)} of {seeds} seeds." for mode, same in modes.items() if seeds_of(same) < seeds]
    details = tuple(dict.fromkeys(draw.comparison for draw in draws))
    cells = {**description(draws, name), **corpus, **scores, "noise": noise}
    return Row(cells, first.group, " ".join(notes) or None, details=details)


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of the values that are known; `None` if there is none."""
    return max((value for value in values if value is not None), default=None)


def notes_of(modes: Mapping[str, Sequence[Scored]]) -> list[str]:
    """Return the notes of `acgpt mauve` on a row's results, with the modes if a note does not hold for all."""
    modes_of: dict[str, list[str]] = {}
    for mode, draws in modes.items():
        for note in dict.fromkeys(note for draw in draws for note in draw.content.get("notes") or ()):
            modes_of.setdefault(note, []).append(mode)
    notes = [
        note if len(present) == len(modes) else f"{', '.join(present)}: {note}" for note, present in modes_of.items()
    ]
    return notes + list(dict.fromkeys(note for draws in modes.values() for note in draws_note(draws)))


# ---- other measures -------------------------------------------------------------------------------------------------


def companions_table(heading: str, scored: Sequence[Scored]) -> Table:
    """Build the table of the other measures, mode by mode, with the original text where known."""
    votes = Counter(result.judge for result in scored if result.judge is not None)
    judges = sorted(votes, key=lambda judge: (-votes[judge], judge))
    order = [*judges, None]  # if a file has several results, prefer the most common judge
    modes = known_first(sorted({result.mode for result in scored}), MODES)
    by_judge = sorted(scored, key=lambda result: order.index(result.judge))
    by_judge.sort(key=lambda r: (r.r_max, -r.texts, r.sampling_key, modes.index(r.mode)))  # largest dataset first
    rows = []
    for peers in grouped(by_judge, lambda result: (result.r_max, result.sampling_key, result.mode)):
        originals = [result.original for result in peers if result.original is not None]
        for name, draws in [*models_of(peers), *((ORIGINAL, [each]) for each in originals[:1])]:
            measured = {key: over_seeds(draws, key) for key in (*SHARES, "own", "judged")}
            notes = [*([judge_note(draws)] if measured["judged"] else []), *draws_note(draws)]
            group = draws[0].r_max, draws[0].sampling_key, draws[0].mode
            rows.append(Row(description(draws, name) | measured, group, " ".join(notes) or None))
    judged = any(row.cells["judged"] for row in rows)
    columns = tuple(column for column in COMPANIONS if column.key != "judged" or judged)
    several = f" Judges: {', '.join(judges)}. The first one that judged a file is shown." if len(judges) > 1 else ""
    return Table(heading, MEASURED + several, columns, tuple(rows))


def judge_note(draws: Sequence[Scored]) -> str:
    """Note who judged, and what."""
    judges = [draw.content["judge"] for draw in draws]
    cut = ", except for tokens beyond its last position" if any(judge.get("cut") for judge in judges) else ""
    return f"Judge: {judges[0]['model']}. It scores: {judges[0]['measures']}{cut}."
