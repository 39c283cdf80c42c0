"""Scores of generations, and the generations that they are of, in the folders of a report.

    FOLDER/**/NAME.jsonl, NAME.json     generations of acgpt generate
    FOLDER/**/*.mauve.json              scores of acgpt mauve

Scores are comparable if they have the same scored part, evaluation dataset, reference, features and sampling settings.
Nothing is computed here, and no model is read.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from acgpt.errors import InputError
from acgpt.evaluation.generations import Generations, record_of
from acgpt.report.entries import identity
from acgpt.report.left_out import join_names
from acgpt.report.runs import Run, options_of, read_json
from acgpt.report.samples_page import PAGE

ENDING = ".mauve.json"
WHOLE = "whole text"
NEEDED = {  # keys of a result, and of its parts, that are read without a default
    "": ("name", "hash", "scored", "texts", "mauve", "features", "judge", "perplexity"),
    "record": ("method", "mode", "model", "r_max", "set"),
    "reference": ("texts",),
    "companions": ("generated", "original"),
}
UNKNOWN_RUNS = "models"  # stands for the size, in file names and JSON, of models whose runs are unknown


@dataclass(frozen=True, eq=False)
class Scored:
    """One result of `acgpt mauve`.

    Args:
        path: Its file.
        content: Contents of the file.
        run: The run that trained the model, if it is among the runs.
    """

    path: Path
    content: Mapping[str, Any]
    run: Run | None

    @property
    def record(self) -> Mapping[str, Any]:
        """Record of the generation that was scored."""
        record: Mapping[str, Any] = self.content["record"]
        return record

    @property
    def size(self) -> str:
        """Size of the model, which decides the table."""
        return UNKNOWN_RUNS if self.run is None else self.run.size or Path(self.run.base).name

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.record["method"])

    @property
    def mode(self) -> str:
        """Mode of the generation."""
        return str(self.record["mode"])

    @property
    def r_max(self) -> float:
        """r_max of the evaluation dataset."""
        return float(self.record["r_max"])

    @property
    def texts(self) -> int:
        """Number of texts in the evaluation dataset."""
        return int(self.record["set"].get("texts") or 0)

    @cached_property
    def sampling_key(self) -> str:
        """Key of the evaluation dataset and the sampling settings: the same for comparable results."""
        return json.dumps([self.record["set"]["hash"], sampling_settings(self.record)], sort_keys=True)

    @cached_property
    def group(self) -> Hashable:
        """Key of comparable rows. The reference of an asked part depends only on the mode, so it is not in the key."""
        features, whole = self.content["features"] or {}, self.content["scored"] == WHOLE
        reference = self.content["reference"]["hash"] if whole else None
        trained = None if self.run is None else (self.run.results["corpus_hash"], self.run.budget)
        scores = self.content["scored"], features.get("hash"), reference
        return self.size, self.r_max, scores, self.sampling_key, trained

    @cached_property
    def identity(self) -> Hashable:
        """Key of a row: the same for results that differ only in the seed of training."""
        model = self.record["model"] if self.run is None else identity(self.run)
        adapter = self.record.get("adapter") if self.run is None else None
        return self.record["method"], tuple(options_of(self.record)), adapter, model

    @property
    def seed(self) -> Hashable:
        """Seed of training."""
        return None if self.run is None else self.run.seed

    @property
    def judge(self) -> str | None:
        """Name of the judge."""
        return None if self.content["judge"] is None else str(self.content["judge"]["model"])

    @property
    def generation_key(self) -> Hashable:
        """Key of the scored file of generations, wherever it is stored."""
        return self.content["hash"], self.record["mode"], self.identity, self.seed


def sampling_settings(record: Mapping[str, Any]) -> list[Any]:
    """Return the number of samples per text and the sampling settings, without the seed."""
    return [
        record.get("samples"),
        {key: value for key, value in (record.get("sampling") or {}).items() if key != "seed"},
    ]


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
            generation = generated.get((path.parent / f"{result.content['name']}.jsonl").resolve())
            if generation is not None and generation.hash != result.content["hash"]:
                notes.append(
                    f"{path} scores an earlier {generation.path.name}: left out. Score it again with acgpt mauve."
                )
                continue
            existing = scored.setdefault((result.generation_key, result.group, result.judge), result)
            if key_scores(existing) != key_scores(result):
                notes.append(
                    f"{path} is left out: {existing.path} scores the same texts in the same way, with another result. "
                    "Delete one of them."
                )
    hashes = {generation.hash for generation in generated.values()}
    if generated and (
        unmatched := [str(result.path) for result in scored.values() if result.content["hash"] not in hashes]
    ):
        notes.append(
            f"{PAGE} lacks the texts of {join_names(unmatched)}: "
            "their .jsonl files are in none of the folders. Name their folders too."
        )
    return list(generated.values()), list(scored.values()), notes


def key_scores(scored: Scored) -> list[float | None]:
    """Return the scores that tell two results apart."""
    scores = (scored.content["mauve"], scored.content["judge"])
    return [None if score is None else score[key] for score, key in zip(scores, ("mean", "perplexity"), strict=True)]


def read_result(path: Path, runs: Sequence[Run]) -> Scored:
    """Read and check a result of `acgpt mauve`."""
    content = read_json(path)
    try:
        for part, keys in NEEDED.items():
            if missing := [key for key in keys if key not in (content[part] if part else content)]:
                raise ValueError(f"it lacks {', '.join(missing)}")
        scored = Scored(path, content, run_of(content["record"], path, runs))
        hash((scored.group, scored.identity, scored.judge, scored.texts))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is not a result of acgpt mauve ({error!r}): score it again or leave it out."
        ) from error
    return scored


def run_of(record: Mapping[str, Any], path: Path, runs: Sequence[Run]) -> Run | None:
    """Return the run whose folder contains the result, or else the model."""
    model = Path(str(record.get("adapter") or record["model"]))
    for location in (path.resolve(), *([model.resolve()] if model.parts else [])):
        for run in runs:
            if run.folder.resolve() in location.parents:
                return run
    return None
