"""Generation, as in the paper's appendix on sampling: MAUVE by method and mode, other measures, and samples.

Scores (`scores`) are tables, and generations are shown side by side on their own page. Models that differ only in their
seed are one row. Several draws of one model are averaged first.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from acgpt.common.files import read_json_object
from acgpt.evaluation.generations import Generations
from acgpt.methods import METHODS
from acgpt.query.modes import MODES
from acgpt.report import from_scratch
from acgpt.report.entries import mode_columns, variant
from acgpt.report.from_scratch import method_order, size_title
from acgpt.report.part import Part
from acgpt.report.runs import Run, options_of
from acgpt.report.samples_page import PAGE, SampleColumn, samples_page
from acgpt.report.scores import UNKNOWN_RUNS, WHOLE, Scored, find_results, run_of, sampling_settings
from acgpt.report.tables import Cell, Column, Mean, Row, Table, file_name, grouped, known_first

PAPER = Path(__file__).parent / "paper" / "mauve.json"
SHARES = ("distinct_1", "distinct_2", "distinct_3", "repetition", "loops")
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
ORIGINAL = " The row original scores the real texts against the same reference: it is the level to reach."
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
    part = Part("generation", "Generation", {"sizes": {}, "paper": read_json_object(PAPER)["source"]}, {}, notes=notes)
    sizes = known_first((result.size for result in scored), from_scratch.paper()["sizes"])
    for size in sizes:
        of_size = [result for result in scored if result.size == size]
        suffix = f", {size_title(size)}"
        if size == UNKNOWN_RUNS:
            suffix = ", models whose runs are not in this report" if len(sizes) > 1 else ""
        tables = {"companions": companions_table(f"Other measures{suffix}", of_size)}
        with_mauve = [result for result in of_size if result.content["mauve"] is not None]
        if with_mauve:
            tables = {"mauve": mauve_table(f"MAUVE{suffix}", size, with_mauve), **tables}
        part.content["sizes"][size] = {name: table.as_dicts() for name, table in tables.items()}
        part.tables.update({f"{file_name(size)}/{name}": table for name, table in tables.items()})
    if generated:
        columns = [
            column_of(generations, run_of(generations.record, generations.path, runs)) for generations in generated
        ]
        part.pages[PAGE] = ("Samples, side by side", partial(samples_page, columns))
    else:
        part.notes.append(NO_SAMPLES)
    return part


def method_name(record: Mapping[str, Any]) -> str:
    """Return the name of a method with its non-default options."""
    method = str(record["method"])
    title = METHODS[method].title if method in METHODS else method
    return ", ".join([title, *options_of(record)])


def column_of(generated: Generations, run: Run | None) -> SampleColumn:
    """Describe generations as a column of the page of samples."""
    record, model = generated.record, str(generated.record["model"])
    size = "" if run is None else run.size or Path(run.base).name
    description = [size_title(size)] * bool(size) + [f"r_max {record.get('r_max')}", model if run is None else run.name]
    key = [options_of(record), sampling_settings(record), model if run is None else variant(run)]
    return SampleColumn(
        generated,
        method_name(record),
        ", ".join(description),
        method_order(str(record["method"])),
        0 if run is None else run.seed,
        json.dumps(key, sort_keys=True),
    )


def measures_of(draws: Sequence[Scored], side: str) -> dict[str, Cell]:
    """Return the other measures of one side, "generated" or "original": shares in percent, and perplexities."""
    shares, judges = (
        [draw.content["companions"][side] for draw in draws],
        [draw.content["judge"] or {} for draw in draws],
    )
    if side == "original":
        judges = [judge.get("original") or {} for judge in judges]
    measures = {
        key: over_seeds(draws, [None if each[key] is None else 100 * each[key] for each in shares]) for key in SHARES
    }
    own = [draw.content["perplexity"] if side == "generated" else None for draw in draws]
    judged = over_seeds(draws, [judge.get("perplexity") for judge in judges])
    if judged is not None:
        judged = replace(judged, bound=any(judge.get("bound") for judge in judges))
    return {**measures, "own": over_seeds(draws, own), "judged": judged}


def draws_by_model(scored: Sequence[Scored]) -> list[list[Scored]]:
    """Group results into the rows of a table: by model, whatever its seed, each file of generations once."""
    return [
        [draw for draw, *_ in grouped(same, lambda result: result.generation_key)]
        for same in grouped(scored, lambda result: result.identity)
    ]


def row_names(rows: Sequence[Sequence[Scored]]) -> list[str]:
    """Name each row of a group: the method, its options, and the model if two rows had the same name."""
    names = [method_name(first.record) for first, *_ in rows]
    return [
        f"{name}, {draws[0].record['model']}" if names.count(name) > 1 else name
        for name, draws in zip(names, rows, strict=True)
    ]


def seeds_of(draws: Sequence[Scored]) -> int:
    """Return the number of training seeds."""
    return len({draw.seed for draw in draws})


def over_seeds(draws: Sequence[Scored], values: Sequence[float | None]) -> Mean | None:
    """Return the mean over training seeds, each of which is the mean of its draws; `None` if a draw has no value."""
    means = []
    for same in grouped(zip(draws, values, strict=True), lambda pair: pair[0].seed):
        numbers = [value for _, value in same if value is not None]
        if len(numbers) < len(same):
            return None
        means.append(math.fsum(numbers) / len(numbers))
    return Mean.of(means)


def draws_note(draws: Sequence[Scored]) -> list[str]:
    """Return a note if a training seed has several draws."""
    most = max(map(len, grouped(draws, lambda draw: draw.seed)))
    return [f"Mean of up to {most} generations per model."] if most > 1 else []


def description(draws: Sequence[Scored]) -> dict[str, Cell]:
    """Return the cells that describe a row."""
    first = draws[0]
    cells: dict[str, Cell] = {"r_max": first.r_max, "mode": first.mode, "asked": first.texts}
    return cells | {"set": first.record["set"]["hash"][:8], "seeds": seeds_of(draws)}


def mauve_table(title: str, size: str, scored: Sequence[Scored]) -> Table:
    """Build the MAUVE table of one size, by r_max and by method in the paper's order, with the paper's rows."""
    rows: list[Row] = []
    groups = grouped(scored, lambda result: result.group)
    for group in sorted(groups, key=lambda results: (results[0].content["scored"] != WHOLE, -results[0].texts)):
        models = sorted(draws_by_model(group), key=lambda draws: method_order(draws[0].method))
        rows += [mauve_row(draws, name) for draws, name in zip(models, row_names(models), strict=True)]
        rows += original_rows(group)
    caption = CAPTION + (ORIGINAL if any(row.cells["method"] == "original" for row in rows) else "")
    r_maxes = {result.r_max for result in scored}
    rows += from_scratch.paper_rows(read_json_object(PAPER), "mauve", size, r_maxes, scored=WHOLE)
    rows.sort(key=lambda row: (row.cells["r_max"], row.paper))
    return Table(title, caption, MAUVE, tuple(rows), "method", "Scores", OTHERS)


def mauve_row(draws: Sequence[Scored], name: str) -> Row:
    """Return the row of a model: its scores by mode."""
    first, modes = draws[0], {same[0].mode: same for same in grouped(draws, lambda draw: draw.mode)}
    notes = notes_of(modes)
    cells = {**scores_description(draws), "method": name, "corpus": first.run.corpus if first.run else None}
    for mode, same in modes.items():
        cells[mode] = over_seeds(same, [draw.content["mauve"]["mean"] for draw in same])
        if seeds_of(same) < seeds_of(draws):
            notes.append(f"{mode}: {seeds_of(same)} of {seeds_of(draws)} seeds.")
    cells["noise"] = largest(draw.content["mauve"]["std"] for draw in draws)
    details = tuple(dict.fromkeys(describe_comparison(draw) for draw in draws))
    return Row(cells, first.group, " ".join(notes) or None, details=details)


def original_rows(scored: Sequence[Scored]) -> list[Row]:
    """Return the row with the scores of the original texts against the same reference, if they are known.

    It has a group of its own: it is a reference, not a method.
    """
    scores = {r.mode: r.content["original"] for r in scored if r.content.get("original") is not None}
    if not scores:
        return []
    cells: dict[str, Cell] = {mode: Mean(score["mean"]) for mode, score in scores.items()}
    cells["noise"] = largest(score["std"] for score in scores.values())
    cells |= {**scores_description(scored), "method": "original", "scored": WHOLE, "seeds": None}
    return [Row(cells, ("original", scored[0].group))]


def scores_description(draws: Sequence[Scored]) -> dict[str, Cell]:
    """Return the cells that describe a row of scores."""
    scored, features = draws[0].content["scored"], features_of(draws[0])
    return {"from": "here", **description(draws), "scored": scored, "features": features}


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


def describe_comparison(scored: Scored) -> str:
    """Describe what was compared with what, for a caption."""
    part, reference = scored.content["scored"], scored.content["reference"]
    corpus, split = Path(reference.get("corpus", "")).name, reference.get("split")
    if part == WHOLE:
        source = reference.get("file") or f"{corpus} ({split}, {reference.get('rule')})"
        against = f"{reference['texts']} texts of {source}"
    else:
        against = f"the original tokens in {reference['texts']} texts of {corpus} ({split})"
    return f"{part}, {scored.content['texts']} texts against {against}, features of {features_of(scored)}"


def features_of(scored: Scored) -> str:
    """Return the last part of the name of the model that computed the features."""
    return Path(str(scored.content["features"]["model"])).name


def companions_table(heading: str, scored: Sequence[Scored]) -> Table:
    """Build the table of the other measures, mode by mode, with the original text where known."""
    votes = Counter(result.judge for result in scored if result.judge is not None)
    judges = sorted(votes, key=lambda judge: (-votes[judge], judge))
    order = [*judges, None]  # if a file has several results, prefer the most common judge
    modes = [*MODES, *sorted({result.mode for result in scored} - set(MODES))]
    by_judge = sorted(scored, key=lambda result: order.index(result.judge))
    # Without given tokens, different datasets may have the same texts.
    same_texts = grouped(by_judge, lambda result: (result.generation_key, result.r_max, result.sampling_key))
    chosen = sorted(
        (first for first, *_ in same_texts),
        key=lambda result: (
            result.r_max,
            -result.texts,  # largest dataset first
            result.sampling_key,
            modes.index(result.mode),
            method_order(result.method),
        ),
    )
    rows = []
    for peers in grouped(chosen, lambda result: (result.r_max, result.sampling_key, result.mode)):
        models = draws_by_model(peers)
        group = peers[0].r_max, peers[0].sampling_key, peers[0].mode
        for name, draws in zip(row_names(models), models, strict=True):
            cells = {"method": name, **description(draws), **measures_of(draws, "generated")}
            note = " ".join([*(judge_note(draws) if cells["judged"] else []), *draws_note(draws)]) or None
            rows.append(Row(cells, group, note))
        originals = [result for result in peers if result.content["companions"]["original"]]
        if originals:
            first = min(originals, key=lambda result: order.index(result.judge))  # they differ only in their judge
            cells = {"method": "original", **description([first]), **measures_of([first], "original"), "seeds": None}
            rows.append(Row(cells, group, " ".join(judge_note([first])) or None))
    columns = tuple(
        column for column in COMPANIONS if column.key != "judged" or any(row.cells["judged"] for row in rows)
    )
    several = f" Judges: {', '.join(judges)}. The first one that judged a file is shown." if len(judges) > 1 else ""
    return Table(heading, MEASURED + several, columns, tuple(rows), "method")


def judge_note(draws: Sequence[Scored]) -> list[str]:
    """Note who judged, and what; empty if nobody did."""
    judges = [draw.content["judge"] for draw in draws]
    if judges[0] is None:
        return []
    cut = ", except for tokens beyond its last position" if any((judge or {}).get("cut") for judge in judges) else ""
    return [f"Judge: {judges[0]['model']}. It scores: {judges[0]['measures']}{cut}."]
