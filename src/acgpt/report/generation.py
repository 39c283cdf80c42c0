"""Generation, as in the paper's appendix on sampling: MAUVE by method and mode, what else was measured, and samples.

    FOLDER/**/NAME.jsonl, NAME.json     what acgpt generate has drawn: shown side by side on a page of its own
    FOLDER/**/*.mauve.json              what acgpt mauve has found of it: the tables

Scores may be compared if they are of the same scored part, evaluation set, reference, features and way of drawing.
Models that differ in their seed only are one row; of several draws of one model, the mean is its.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from acgpt.errors import InputError
from acgpt.evaluation.generations import Generations, record_of
from acgpt.query.modes import MODES
from acgpt.report import from_scratch
from acgpt.report.from_scratch import place, variant
from acgpt.report.left_out import listed
from acgpt.report.part import Part
from acgpt.report.runs import Run, read_json
from acgpt.report.samples_page import Shown, samples_page
from acgpt.report.tables import Cell, Column, Mean, Row, Table, file_name

PAPER = Path(__file__).parent / "paper" / "mauve.json"
PAGE = "samples.html"
ENDING = ".mauve.json"
WHOLE = "whole text"
SHARES = ("distinct_1", "distinct_2", "distinct_3", "repetition", "loops")
MEASURES = (*SHARES, "own", "judged")
NO_SAMPLES = "there is no page of samples: scores are here, and what was drawn is not beside them."
HUGE = 1e100  # no number of a result is as large
ELSEWHERE = "models"  # the size, in file names and JSON, of models of whose training nothing is known

MAUVE = (
    Column("from", "from", terminal=False),
    Column("r_max", "r_max", r"$r_{\max}$", "g"),
    Column("asked", "texts", form=",", spare=1),
    Column("method", "method"),
    Column("corpus", "corpus", spare=1),
    Column("scored", "scored"),
    Column("features", "features", spare=1),
    *(Column(mode, mode.replace("-", " ", 1).replace("-", " "), form=".3f", best=max, spread=True) for mode in MODES),
    Column("noise", "k-means ±", form=".3f", spare=2),
    Column("seeds", "seeds", form="d", spare=1),
    Column("set", "set", spare=1),
)
COMPANIONS = (
    Column("r_max", "r_max", r"$r_{\max}$", "g"),
    Column("asked", "texts", form=",", spare=1),
    Column("mode", "mode"),
    Column("method", "method"),
    *(Column(f"distinct_{n}", f"distinct-{n} %", form=".1f", spread=True) for n in (1, 2, 3)),
    Column("repetition", "repeated %", form=".1f", spread=True),
    Column("loops", "loops %", form=".1f", spread=True),
    Column("own", "own ppl", form=",.2f", spread=True),
    Column("judged", "judge's ppl", form=",.2f", spread=True),
    Column("seeds", "seeds", form="d", spare=1),
    Column("set", "set", spare=1),
)
CAPTION = (
    "MAUVE, higher is better: mean ± standard deviation over training seeds (of a sample; none for a single one). "
    "k-means ± is the largest standard deviation of any of these scores over the seeds of its k-means: a smaller "
    "difference means nothing, and a larger one may be chance too, for other texts would move a score more. Bold: the "
    "best of those that can be compared: of the same texts (set), scored in the same way; -- is what a method cannot "
    "draw, or what was not scored. Of a whole text, what was given counts too, and is the same for all methods; the "
    "asked part is scored against what stood there originally."
)
ORIGINAL = " The row original is what the real texts have against the same reference: what could be reached."
OTHERS = (
    "The paper's rows are of other texts, references and budgets, with features of GPT-2 large, and of whole texts: "
    "compare the order of the methods, not the levels."
)
MEASURED = (
    "Of the tokens that were drawn: the share of different runs of one, two and three tokens; of runs of four that the "
    "text had before (repeated); of texts that end in a loop; their perplexity (ppl) under the model itself at "
    "temperature 1 (-- where it says only a bound), and under a judge. None is good or bad by itself: the original "
    "text, where it is known, is what to be near to."
)


# ---- what there is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scored:
    """One result of `acgpt mauve`.

    Args:
        path: Its file.
        found: What it holds.
        run: That trained the model, if it is among the runs.
    """

    path: Path
    found: Mapping[str, Any]
    run: Run | None

    @property
    def record(self) -> Mapping[str, Any]:
        """What generated it."""
        record: Mapping[str, Any] = self.found["record"]
        return record

    @property
    def size(self) -> str:
        """In which table it stands."""
        return ELSEWHERE if self.run is None else self.run.size or Path(self.run.base).name

    @property
    def r_max(self) -> float:
        """Of the evaluation set."""
        return float(self.record["r_max"])

    @property
    def texts(self) -> int:
        """In the evaluation set."""
        return int(self.record["set"].get("texts") or 0)

    @property
    def options(self) -> str:
        """How the method was asked, where it leaves a choice."""
        return ", ".join(f"{key}={value}" for key, value in (self.record.get("options") or {}).items())

    @cached_property
    def asked(self) -> str:
        """What was drawn, and how: the same for all that can be compared."""
        return json.dumps([self.record["set"]["hash"], how_drawn(self.record)], sort_keys=True)

    @cached_property
    def group(self) -> Hashable:
        """Rows that have the same may be compared. What stood there originally depends on the mode alone."""
        features, whole = self.found["features"] or {}, self.found["scored"] == WHOLE
        reference = self.found["reference"]["hash"] if whole else None
        trained = None if self.run is None else (self.run.results["corpus_hash"], self.run.budget)
        return self.size, self.r_max, self.found["scored"], self.asked, features.get("hash"), reference, trained

    @cached_property
    def identity(self) -> Hashable:
        """All of a row but its seeds: what has the same differs in the seed of its training only."""
        known = self.record["model"] if self.run is None else json.dumps(variant(self.run), sort_keys=True)
        return self.record["method"], self.options, self.record.get("adapter") if self.run is None else None, known

    @property
    def seed(self) -> Hashable:
        """Of the training."""
        return None if self.run is None else self.run.seed

    @property
    def judge(self) -> str | None:
        """Who judged it."""
        return None if self.found["judge"] is None else str(self.found["judge"]["model"])

    @property
    def drawn(self) -> Hashable:
        """Which file of generations it is of, wherever that lies."""
        return self.found["hash"], self.record["mode"], self.identity, self.seed


def how_drawn(record: Mapping[str, Any]) -> list[Any]:
    """How many samples of each text, and how a token is drawn, whatever the seed."""
    return [record.get("samples"), {key: x for key, x in (record.get("sampling") or {}).items() if key != "seed"}]


def find(folders: Sequence[Path], runs: Sequence[Run]) -> tuple[list[Generations], list[Scored], list[str]]:
    """All generations and all results in these folders, however deep, each once; and notes on what is left out."""
    generated: dict[Path, Generations] = {}
    scored: dict[Hashable, Scored] = {}
    notes = []
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            if record_of(path) is not None:
                generated.setdefault(path.resolve(), Generations.open(path))
        for path in sorted(folder.rglob(f"*{ENDING}")):
            each = read_scored(path, runs)
            beside = generated.get((path.parent / f"{each.found['name']}.jsonl").resolve())
            if beside is not None and beside.hash != each.found["hash"]:
                notes.append(f"{path} is of an earlier {beside.path.name}: left out. Score it again with acgpt mauve.")
                continue
            kept = scored.setdefault((each.drawn, each.group, each.judge), each)
            if means_of(kept) != means_of(each):
                notes.append(
                    f"{path} is left out: {kept.path} scores the same texts in the same way, to another result. Delete "
                    "the one that is not meant."
                )
    hashes = {each.hash for each in generated.values()}
    if generated and (bare := [str(each.path) for each in scored.values() if each.found["hash"] not in hashes]):
        notes.append(
            f"{PAGE} lacks the texts of {listed(bare)}: their .jsonl is in none of the folders. Name its folder too."
        )
    return list(generated.values()), list(scored.values()), notes


def means_of(scored: Scored) -> list[float | None]:
    """The scores by which two results can be told apart."""
    found = (scored.found["mauve"], scored.found["judge"])
    return [None if each is None else each[key] for each, key in zip(found, ("mean", "perplexity"), strict=True)]


def holds_generations(folder: Path) -> bool:
    """Is there anything here for this part?"""
    return any(record_of(path) for path in folder.rglob("*.jsonl")) or any(folder.rglob(f"*{ENDING}"))


def read_scored(path: Path, runs: Sequence[Run]) -> Scored:
    """A result of `acgpt mauve`, checked."""
    found = read_json(path)
    try:
        each = Scored(path, found, run_of(found["record"], path, runs))
        check(found)
        hash((each.group, each.identity, each.judge, each.texts))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is no result of acgpt mauve ({error!r}): score it again, or leave it out.") from error
    return each


def check(found: Mapping[str, Any]) -> None:
    """All that a report needs is read once here, so that it is found missing here.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: Something is missing, or is not what it should be.
    """
    record, reference, judge, measured = (found[key] for key in ("record", "reference", "judge", "companions"))
    words = [found["name"], found["hash"], found["scored"], record["method"], record["mode"], record["set"]["hash"]]
    words += [*(found.get("notes") or ()), *(reference.get(key) or "" for key in ("file", "corpus", "split", "rule"))]
    numbers = [found["texts"], reference["texts"], record["r_max"], measured["generated"]["loops"]]
    perhaps = [found["perplexity"]]
    for side in filter(None, (measured["generated"], measured["original"])):
        perhaps += [side[key] for key in SHARES]
    for score in filter(None, (found["mauve"], found.get("original"))):
        numbers.append(score["mean"])
        perhaps.append(score["std"])
        words += [found["features"]["model"], found["features"]["hash"]]
    for side in filter(None, (judge, judge and judge.get("original"))):
        words.append(side["measures"])
        perhaps.append(side["perplexity"])
        numbers += [side.get("cut", 0), int(side["bound"])]
    for word in words:
        if not isinstance(word, str) or "\0" in word:
            raise ValueError(f"{word!r:.40} is no text")
    for number in (*numbers, *(each for each in perhaps if each is not None)):
        if not isinstance(number, int | float) or isinstance(number, bool) or not abs(number) < HUGE:
            raise ValueError(f"{number!r:.40} is no number")


def run_of(record: Mapping[str, Any], path: Path, runs: Sequence[Run]) -> Run | None:
    """The run of a model: in whose folder the result lies, or the model."""
    model = Path(str(record.get("adapter") or record["model"]))
    for where in (path.resolve(), *([model.resolve()] if model.parts else [])):
        for run in runs:
            if run.folder.resolve() in where.parents:
                return run
    return None


# ---- tables ---------------------------------------------------------------------------------------------------------


def make(folders: Sequence[Path], runs: Sequence[Run]) -> Part | None:
    """The part on generation; `None` if there is nothing for it in these folders."""
    generated, scored, notes = find(folders, runs)
    if not generated and not scored:
        return None
    paper = json.loads(PAPER.read_text(encoding="utf-8"))
    described = from_scratch.read_paper()
    paper |= {key: described[key] for key in ("methods", "sizes")}
    part = Part("generation", "Generation", {"sizes": {}, "paper": paper["source"]}, {}, notes=notes)
    sizes = dict.fromkeys(each.size for each in scored)
    for size in (*(s for s in paper["sizes"] if s in sizes), *(s for s in sizes if s not in paper["sizes"])):
        own = [each for each in scored if each.size == size]
        suffix = f", {paper['sizes'].get(size, size)}"
        if size == ELSEWHERE:
            suffix = ", models whose runs are not in this report" if len(sizes) > 1 else ""
        tables = {"companions": companions_table(f"What was drawn{suffix}", own, paper)}
        with_mauve = [each for each in own if each.found["mauve"] is not None]
        if with_mauve:
            tables = {"mauve": mauve_table(f"MAUVE{suffix}", size, with_mauve, paper), **tables}
        part.content["sizes"][size] = {name: table.as_dicts() for name, table in tables.items()}
        part.tables.update({f"{file_name(size)}/{name}": table for name, table in tables.items()})
    if generated:
        shown = [column_of(each, run_of(each.record, each.path, runs), paper) for each in generated]
        part.pages[PAGE] = ("Samples, side by side", partial(samples_page, shown))
    else:
        part.notes.append(NO_SAMPLES)
    return part


def column_of(generated: Generations, run: Run | None, paper: Mapping[str, Any]) -> Shown:
    """Where the page of samples has these, and what it calls them."""
    method, model = str(generated.record["method"]), str(generated.record["model"])
    options = [f"{key}={value}" for key, value in (generated.record.get("options") or {}).items()]
    size = "" if run is None else run.size or Path(run.base).name
    about = [*([paper["sizes"].get(size, size)] if size else []), f"r_max {generated.record.get('r_max')}"]
    same = [options, how_drawn(generated.record), model if run is None else variant(run)]
    return Shown(
        generated,
        ", ".join([paper["methods"].get(method, method), *options]),
        ", ".join([*about, model if run is None else run.name]),
        place(method, paper),
        0 if run is None else run.seed,
        json.dumps(same, sort_keys=True),
    )


def frame_of(scored: Sequence[Scored]) -> pd.DataFrame:
    """Results as a tidy table, a row each: what they are grouped by, and all that was measured of what was drawn."""
    found = pd.DataFrame(
        {
            "scored": pd.Series(scored, dtype=object),
            "group": pd.Series([each.group for each in scored], dtype=object),
            "identity": pd.Series([each.identity for each in scored], dtype=object),
            "seed": pd.Series([each.seed for each in scored], dtype=object),
            "drawn": pd.Series([each.drawn for each in scored], dtype=object),
            "method": [str(each.record["method"]) for each in scored],
            "mode": [str(each.record["mode"]) for each in scored],
            "r_max": [each.r_max for each in scored],
            "asked": [each.asked for each in scored],
            "texts": [each.texts for each in scored],
            "mauve": [None if each.found["mauve"] is None else each.found["mauve"]["mean"] for each in scored],
        }
    )
    return found.join(pd.DataFrame([measured(each, "generated") for each in scored])).astype({"mauve": float})


def measured(scored: Scored, side: str) -> dict[str, float]:
    """What else was measured of one side, "generated" or "original": shares in percent, and perplexities."""
    shares, judge = scored.found["companions"][side], scored.found["judge"] or {}
    if side == "original":
        judge = judge.get("original") or {}
    found = {key: None if shares[key] is None else 100 * shares[key] for key in SHARES}
    found["own"] = scored.found["perplexity"] if side == "generated" else None
    found["judged"] = judge.get("perplexity")
    return {key: math.nan if value is None else float(value) for key, value in found.items()}


@dataclass(frozen=True, eq=False)
class Entry:
    """Results of one row of a table: of one model in several modes, by seed of its training and by draw.

    Args:
        draws: Some rows of `frame_of`, each file of generations once, ordered by mode and seed.
        mauve: The score in each mode.
    """

    draws: pd.DataFrame
    mauve: Mapping[str, Mean | None]

    @property
    def first(self) -> Scored:
        """Any of the results: what is asked of it here is the same for all."""
        first: Scored = self.draws["scored"].iloc[0]
        return first

    @property
    def seeds(self) -> int:
        """How many trainings there are."""
        return int(self.draws["seed"].nunique(dropna=False))

    @cached_property
    def modes(self) -> dict[str, pd.DataFrame]:
        """The results by mode."""
        return dict(iter(self.draws.groupby("mode", sort=False)))


def entries_of(scored: Sequence[Scored]) -> list[Entry]:
    """The rows that results come to."""
    once = frame_of(scored).drop_duplicates(["group", "identity", "drawn"])
    once = once.assign(row=once.groupby(["group", "identity"], sort=False).ngroup())
    means = over_seeds(once, ["row", "mode"], ["mauve"])
    entries = []
    for row, own in once.groupby("row"):
        places = own[["mode", "seed"]].apply(lambda column: column.factorize(use_na_sentinel=False)[0])
        draws = own.loc[places.sort_values(["mode", "seed"], kind="stable").index]
        entries.append(Entry(draws, {mode: means[row, mode]["mauve"] for mode in draws["mode"].unique()}))
    return entries


def over_seeds(draws: pd.DataFrame, by: list[str], columns: list[str]) -> dict[Hashable, dict[str, Mean | None]]:
    """The means over training seeds, of which each has the mean of its draws, by group.

    Where a draw has no value there is no mean.
    """
    means = draws.groupby([*by, "seed"], sort=False, dropna=False)[columns].agg(lambda x: math.fsum(x) / len(x))
    return {
        group: {key: None if found[key].isna().any() else Mean.of(found[key]) for key in columns}
        for group, found in means.groupby(level=by, sort=False)
    }


def draws_note(draws: pd.DataFrame) -> list[str]:
    """A word where a seed of the training has several draws."""
    most = draws.groupby("seed", dropna=False).size().max()
    return [f"of up to {most} draws of a model, the mean is taken."] if most > 1 else []


def names_of(entries: Sequence[Entry], titles: Mapping[str, str]) -> dict[Entry, str]:
    """The method, how it was asked, and where two of a group would be called the same, the model."""

    def name(entry: Entry) -> str:
        method = str(entry.first.record["method"])
        return ", ".join([titles.get(method, method), *([entry.first.options] if entry.first.options else [])])

    taken = [(entry.first.group, name(entry)) for entry in entries]
    return {
        entry: f"{name(entry)}, {entry.first.record['model']}" if taken.count(key) > 1 else name(entry)
        for entry, key in zip(entries, taken, strict=True)
    }


def mauve_table(title: str, size: str, scored: Sequence[Scored], paper: Mapping[str, Any]) -> Table:
    """One size's scores, by r_max, then by method as the paper orders them; after each r_max the paper's own rows."""
    entries = entries_of(scored)
    names, groups = names_of(entries, paper["methods"]), list(dict.fromkeys(each.first.group for each in entries))
    rows = []
    for entry in entries:
        each, notes = entry.first, notes_of(entry)
        cells: dict[str, Cell] = {"from": "here", "r_max": each.r_max, "asked": each.texts, "method": names[entry]}
        cells |= entry.mauve
        for mode, found in entry.modes.items():
            seeds = found["seed"].nunique(dropna=False)
            notes += [f"{mode}: {seeds} of {entry.seeds} seeds."] if seeds < entry.seeds else []
        deviations = [one.found["mauve"]["std"] for one in entry.draws["scored"]]
        noise = max((each for each in deviations if each is not None), default=None)
        cells |= {"scored": each.found["scored"], "features": features_of(each), "noise": noise, "seeds": entry.seeds}
        cells |= {"corpus": each.run.corpus if each.run else None, "set": each.record["set"]["hash"][:8]}
        about = tuple(dict.fromkeys(compared_in_words(one) for one in entry.draws["scored"]))
        rows.append(Row(cells, each.group, " ".join(notes) or None, about=about))
    order = {each.group: (-each.texts, groups.index(each.group)) for each in (entry.first for entry in entries)}
    methods = {names[entry]: place(str(entry.first.record["method"]), paper) for entry in entries}
    for group in groups:  # not of the group: it is what could be reached, and no method's
        if (original := original_row([entry for entry in entries if entry.first.group == group])) is not None:
            order[original.group] = order[group]
            rows.append(original)
    caption = CAPTION + (ORIGINAL if any(row.cells["method"] == "original" for row in rows) else "")
    methods["original"] = len(paper["methods"]) + 1
    rows.sort(
        key=lambda row: (
            row.cells["r_max"],
            row.cells["scored"] != WHOLE,
            order[row.group],
            methods[str(row.cells["method"])],
        )
    )
    theirs = paper_rows(paper, size, {each.r_max for each in scored})
    beside = sorted([*rows, *theirs], key=lambda row: (row.cells["r_max"], row.paper))
    return Table(title, caption, MAUVE, tuple(beside), "method", "Scored here", OTHERS)


def notes_of(entry: Entry) -> list[str]:
    """What `acgpt mauve` has noted of a row's results, with the modes where it is not all of them."""
    noted = entry.draws.assign(note=entry.draws["scored"].map(lambda each: list(each.found.get("notes") or ())))
    modes = noted.explode("note").dropna(subset="note").groupby("note", sort=False)["mode"].unique()
    said = [note if len(of) == len(entry.modes) else f"{', '.join(of)}: {note}" for note, of in modes.items()]
    return said + list(dict.fromkeys(note for found in entry.modes.values() for note in draws_note(found)))


def original_row(entries: Sequence[Entry]) -> Row | None:
    """The scores of the original texts against the same reference, where they are known."""
    found = {
        str(each.record["mode"]): each.found["original"]
        for entry in entries
        for each in entry.draws["scored"]
        if each.found.get("original") is not None
    }
    if not found:
        return None
    first = entries[0].first
    noise = max((each["std"] for each in found.values() if each["std"] is not None), default=None)
    cells: dict[str, Cell] = {
        "from": "here",
        "r_max": first.r_max,
        "asked": first.texts,
        "method": "original",
        "scored": WHOLE,
        "features": features_of(first),
        "noise": noise,
    }
    cells |= {mode: Mean(each["mean"]) for mode, each in found.items()}
    return Row({**cells, "set": first.record["set"]["hash"][:8]}, ("original", first.group))


def compared_in_words(scored: Scored) -> str:
    """What was compared with what, for a caption."""
    of = scored.found["reference"]
    where = of.get("file") or f"{Path(of.get('corpus', '')).name} ({of.get('split')}, {of.get('rule')})"
    sides = f"{scored.found['texts']} texts against {of['texts']} of {where}"
    return f"{scored.found['scored']}, {sides}, features of {features_of(scored)}"


def features_of(scored: Scored) -> str:
    """The last part of the name of the model that made the features."""
    return Path(str(scored.found["features"]["model"])).name


def paper_rows(paper: Mapping[str, Any], size: str, r_maxes: set[float]) -> list[Row]:
    """The paper's own rows of a size."""
    rows = []
    for found in paper["mauve"]:
        if found["model"] == size and found["r_max"] in r_maxes:
            cells: dict[str, Cell] = {"from": "paper", "r_max": found["r_max"], "corpus": found["corpus"]}
            cells |= {"method": paper["methods"][found["method"]], "scored": WHOLE, "seeds": paper["seeds"]}
            for mode in MODES:
                pair = found[mode]
                cells[mode] = Mean(pair[0], pair[1], digits=paper["digits"]) if pair else None
            rows.append(Row(cells, ("paper", found["corpus"], found["r_max"]), paper=True))
    return rows


def companions_table(heading: str, scored: Sequence[Scored], paper: Mapping[str, Any]) -> Table:
    """What else was measured, mode by mode; the original text beside it where that is known."""
    votes = Counter(each.judge for each in scored if each.judge is not None)
    judges = sorted(votes, key=lambda judge: (-votes[judge], judge))
    order = [*judges, None]  # of several results of one file, that of the judge that most have
    modes = [*MODES, *sorted({str(each.record["mode"]) for each in scored} - set(MODES))]
    found = frame_of(scored)
    found["judge"] = [order.index(each.judge) for each in scored]
    found["place"] = [place(method, paper) for method in found["method"]]
    found["mode_place"] = found["mode"].map(modes.index)
    found["fewer"] = -found["texts"]  # the largest set comes first
    # With nothing given, sets may have the same texts.
    best = found.sort_values("judge", kind="stable").drop_duplicates(["drawn", "r_max", "asked"])
    best = best.sort_values(["r_max", "fewer", "asked", "mode_place", "place"], kind="stable")
    best["row"] = best.groupby(["r_max", "asked", "mode", "identity"], sort=False).ngroup()
    means = over_seeds(best, ["row"], list(MEASURES))
    rows = []
    for group, peers in best.groupby(["r_max", "asked", "mode"], sort=False):
        models = [draws for _, draws in peers.groupby("row", sort=False)]
        firsts = [draws["scored"].iloc[0] for draws in models]
        labels = [", ".join(filter(None, [title(first, paper), first.options])) for first in firsts]
        for label, first, draws in zip(labels, firsts, models, strict=True):
            named = f"{label}, {first.record['model']}" if labels.count(label) > 1 else label
            cells = {**about(draws), **means[(draws["row"].iloc[0],)]}
            cells["judged"] = bounded(cells["judged"], [each.found["judge"] for each in draws["scored"]])
            note = " ".join([*(judge_note(draws) if cells["judged"] else []), *draws_note(draws)]) or None
            rows.append(Row({"method": named, **cells}, group, note))
        originals = peers[peers["scored"].map(lambda each: bool(each.found["companions"]["original"]))]
        if len(originals):
            original = originals.sort_values("judge", kind="stable").head(1)  # they differ in who judged them only
            first = original["scored"].iloc[0]
            cells = {**about(original), "seeds": None}
            cells |= {key: Mean.of([value]) for key, value in measured(first, "original").items()}
            cells["judged"] = bounded(cells["judged"], [(first.found["judge"] or {}).get("original")])
            rows.append(Row({"method": "original", **cells}, group, " ".join(judge_note(original)) or None))
    shown = tuple(each for each in COMPANIONS if each.key != "judged" or any(row.cells["judged"] for row in rows))
    several = f" Of several judges ({', '.join(judges)}), a file's first is shown." if len(judges) > 1 else ""
    return Table(heading, MEASURED + several, shown, tuple(rows), "method")


def title(scored: Scored, paper: Mapping[str, Any]) -> str:
    """The method as the paper names it."""
    method = str(scored.record["method"])
    return str(paper["methods"].get(method, method))


def about(draws: pd.DataFrame) -> dict[str, Cell]:
    """The cells that say what a row is of."""
    first: Scored = draws["scored"].iloc[0]
    cells: dict[str, Cell] = {"r_max": first.r_max, "mode": str(first.record["mode"]), "asked": first.texts}
    return cells | {"set": first.record["set"]["hash"][:8], "seeds": int(draws["seed"].nunique(dropna=False))}


def bounded(cell: Cell, judges: Sequence[Mapping[str, Any] | None]) -> Cell:
    """A judge's perplexity, marked if it is only a bound."""
    bound = any((judge or {}).get("bound") for judge in judges)
    return replace(cell, bound=bound) if isinstance(cell, Mean) else cell


def judge_note(draws: pd.DataFrame) -> list[str]:
    """Who judged, and what; nothing where nobody did."""
    judges = [each.found["judge"] for each in draws["scored"]]
    if judges[0] is None:
        return []
    cut = ", but for what it has no positions for" if any((each or {}).get("cut") for each in judges) else ""
    return [f"judge: {judges[0]['model']}; it measures {judges[0]['measures']}{cut}."]
