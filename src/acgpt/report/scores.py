"""Scores of generations, and the generations that they are of, in the folders of a report.

    FOLDER/**/NAME.jsonl, NAME.json     generations of acgpt generate
    FOLDER/**/*.mauve.json              scores of acgpt mauve

Scores are comparable if they have the same scored part, evaluation dataset, reference, features and sampling settings.
Nothing is computed here, and no model is read.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from acgpt.errors import InputError
from acgpt.evaluation.generations import Generations, record_of
from acgpt.methods import METHODS
from acgpt.report.part import join_names
from acgpt.report.runs import Run, options_of, read_json

PAGE, ENDING = "samples.html", ".mauve.json"
WHOLE = "whole text"
SHARES = ("distinct_1", "distinct_2", "distinct_3", "repetition", "loops")
UNKNOWN_RUNS = "models"  # stands for the size, in file names and JSON, of models whose runs are unknown


class Scored:
    """One result of `acgpt mauve`.

    Attributes:
        path: Its file.
        generated: The file of generations that was scored, if it was kept.
        content: Contents of the file.
        record: Record of the generation that was scored.
        run: The run that trained the model, if it is among the runs.
        seed: Seed of its training, if it is known.
        size: Size of the model, which decides the table.
        method: Name of the method.
        mode: Mode of the generation.
        r_max: r_max of the evaluation dataset.
        texts: Number of texts in the evaluation dataset.
        judge: Name of the judge, if there was one.
        values: Scores of the generations by metric, shares in percent; `None` where not known.
        original: The same with the values of the original texts, if they are known.
        sampling_key: Key of the evaluation dataset and the sampling settings: the same for comparable results.
        group: Key of comparable rows.
        identity: Key of a row: the same for results that differ only in the seed of training.
        features: Name of the model that computed the features of MAUVE, if it was.
        comparison: What was compared with what, for a caption.
        generation_key: Key of the scored file of generations, wherever it is stored.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], run: Run | None) -> None:
        self.path, self.content, self.run = path, content, run
        self.generated = path.with_name(f"{content['name']}.jsonl").resolve()
        self.record: Mapping[str, Any] = content["record"]
        self.seed = None if run is None else run.seed
        self.size = UNKNOWN_RUNS if run is None else run.size or Path(run.base).name
        self.method, self.mode = str(self.record["method"]), str(self.record["mode"])
        self.r_max, self.texts = float(self.record["r_max"]), int(self.record["set"].get("texts") or 0)
        judge, companions = content["judge"] or {}, content["companions"]
        self.judge = str(judge["model"]) if judge else None
        self.values = measures(companions["generated"], judge) | {"own": content["perplexity"]}
        if content["mauve"] is not None:
            self.values |= {"mauve": content["mauve"]["mean"], "noise": content["mauve"]["std"]}
        self.sampling_key = json.dumps([self.record["set"]["hash"], sampling_settings(self.record)], sort_keys=True)
        part, features, reference = content["scored"], content["features"] or {}, content["reference"]
        corpus, split = Path(reference.get("corpus", "")).name, reference.get("split")
        if part == WHOLE:
            source = reference.get("file") or f"{corpus} ({split}, {reference.get('rule')})"
            against = f"{reference['texts']} texts of {source}"
        else:
            against = f"the original tokens in {reference['texts']} texts of {corpus} ({split})"
        self.features = Path(str(features["model"])).name if features else None
        self.comparison = f"{part}, {content['texts']} texts against {against}, features of {self.features}"
        # The reference of an asked part depends only on the mode, so it is not in the key.
        scored = part, features.get("hash"), reference["hash"] if part == WHOLE else None
        trained = None if run is None else (run.results["corpus_hash"], run.budget)
        self.group: Hashable = (self.size, self.r_max, scored, self.sampling_key, trained)
        model = (self.record["model"], self.record.get("adapter")) if run is None else run.identity
        self.identity: Hashable = (self.method, tuple(options_of(self.record)), model)
        self.generation_key: Hashable = (content["hash"], self.mode, self.identity, self.seed)
        hash((self.group, self.generation_key))  # values that are no keys are damage
        self.original = copy(self) if companions["original"] else None
        if self.original is not None:
            self.original.values = measures(companions["original"], judge.get("original") or {})


def measures(shares: Mapping[str, float | None], judge: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the measures of texts, besides MAUVE: shares in percent, and perplexities."""
    percent = {key: None if (share := shares[key]) is None else 100 * share for key in SHARES}
    return percent | {"own": None, "judged": judge.get("perplexity"), "bound": judge.get("bound")}


def method_name(record: Mapping[str, Any]) -> str:
    """Return the name of a method with its non-default options."""
    method = str(record["method"])
    title = METHODS[method].title if method in METHODS else method
    return ", ".join([title, *options_of(record)])


def sampling_settings(record: Mapping[str, Any]) -> list[Any]:
    """Return the number of samples per text and the sampling settings, without the seed."""
    settings = {key: value for key, value in (record.get("sampling") or {}).items() if key != "seed"}
    return [record.get("samples"), settings]


def find_results(folders: Sequence[Path], runs: Sequence[Run]) -> tuple[list[Generations], list[Scored], list[str]]:
    """Find all generations and results in these folders and their subfolders, each once.

    Returns:
        The generations, the results, and notes on what is left out.
    """
    generated: dict[Path, Generations] = {}
    scored: dict[Hashable, Scored] = {}
    notes = []
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            if record_of(path) is not None:
                generated.setdefault(path.resolve(), Generations.open(path))
        for path in sorted(folder.rglob(f"*{ENDING}")):
            result = read_result(path, runs)
            generation = generated.get(result.generated)
            if generation is not None and generation.hash != result.content["hash"]:
                notes.append(
                    f"{path} scores an earlier {generation.path.name}: left out. Score it again with acgpt mauve."
                )
                continue
            existing = scored.setdefault((result.generation_key, result.group, result.judge), result)
            if any(existing.values.get(key) != result.values.get(key) for key in ("mauve", "judged")):
                notes.append(
                    f"{path} is left out: {existing.path} scores the same texts in the same way, with another result. "
                    "Delete one of them."
                )
    hashes = {generation.hash for generation in generated.values()}
    unmatched = [str(result.path) for result in scored.values() if result.content["hash"] not in hashes]
    if generated and unmatched:
        notes.append(
            f"{PAGE} lacks the texts of {join_names(unmatched)}: "
            "their .jsonl files are in none of the folders. Name their folders too."
        )
    return list(generated.values()), list(scored.values()), notes


def read_result(path: Path, runs: Sequence[Run]) -> Scored:
    """Read and check a result of `acgpt mauve`."""
    content = read_json(path)
    try:
        return Scored(path, content, run_of(content["record"], path, runs))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is not a result of acgpt mauve ({error!r}): score it again or leave it out."
        ) from error


def run_of(record: Mapping[str, Any], path: Path, runs: Sequence[Run]) -> Run | None:
    """Return the run whose folder contains the result, or else the model."""
    model = Path(str(record.get("adapter") or record["model"]))
    for location in (path.resolve(), *([model.resolve()] if model.parts else [])):
        for run in runs:
            if run.folder.resolve() in location.parents:
                return run
    return None
