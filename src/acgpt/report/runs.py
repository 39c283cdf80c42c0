"""Finished runs: what was trained on what, and every evaluation in a run's folder.

    RUN/results.json     the run, and the evaluation at its end
    RUN/*.json           further evaluations, as `acgpt evaluate … -o RUN/test.json` writes them
    RUN/*.per-text.json  the sums per document of each evaluation (evaluation/per_text.py)

Nothing is computed here, and no model is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from acgpt.common.files import read_json_object
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import DOCUMENTS, PerText
from acgpt.evaluation.generations import has_record
from acgpt.evaluation.per_text import read_per_text
from acgpt.methods import method_of
from acgpt.query.conditioning import Conditioning, Empty
from acgpt.query.modes import MODES, distributions
from acgpt.report.tables import grouped
from acgpt.training.run_folder import CONFIG, RESULTS

DEFAULT_BASE = "SmolLM2-135M-Instruct"  # the model behind the base "default"
MEASUREMENTS = [  # the columns of `measurements`
    "run", "method", "model", "corpus", "texts", "tokens", "r_max", "seed",
    "split", "set", "set_texts", "set_r_max", "options", "mode", "perplexity", "bound", "chance",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class RunEvaluation:
    """One evaluation of a run.

    Args:
        split: Split of the corpus; the file's name if the evaluation dataset does not name one.
        content: The evaluation as it was written.
        per_text: Sums per document or text, if they were kept.
    """

    split: str
    content: Mapping[str, Any]
    per_text: PerText | None = None

    @property
    def dataset(self) -> Mapping[str, Any]:
        """Description of the evaluation dataset, from `EvaluationDataset.as_dict`."""
        dataset: Mapping[str, Any] = self.content["set"]
        return dataset

    @cached_property
    def modes(self) -> Mapping[str, float | None]:
        """Perplexity by mode, possibly infinite; `None` if the mode was not or cannot be answered."""

        def perplexity(answer: Mapping[str, Any] | None) -> float | None:
            if answer is None:
                return None
            return math.inf if answer["perplexity"] is None else float(answer["perplexity"])  # JSON has no infinity

        return {mode: perplexity(self.content["modes"].get(mode)) for mode in MODES}

    @property
    def chance(self) -> float | None:
        """Half of the widest 95 % interval of a mode, in percent of its perplexity; `None` without intervals."""
        answers = [answer for answer in self.content["modes"].values() if answer and answer.get("interval")]
        widths = [(high - low) / answer["perplexity"] for answer in answers for low, high in [answer["interval"]]]
        return 50 * max(widths) if widths else None

    @property
    def hash(self) -> str:
        """Hash of the evaluation dataset. Two evaluations are comparable if and only if their hashes are equal."""
        return str(self.dataset["hash"])

    @property
    def texts(self) -> int:
        """Number of texts in the evaluation dataset."""
        return int(self.dataset.get("texts") or 0)

    @property
    def intervals(self) -> str:
        """Over what the intervals of the evaluation are."""
        resampled = self.content.get("bootstrap") or {}
        return f"{resampled['units']} documents" if resampled.get("unit") == DOCUMENTS else "texts"

    @property
    def options(self) -> str:
        """Non-default options of the method, such as "order=random"; "" for the defaults."""
        return ", ".join(options_of(self.content))

    @property
    def completeness(self) -> tuple[int, bool]:
        """Number of answered modes, and whether sums per document or text were kept."""
        return sum(value is not None for value in self.modes.values()), self.per_text is not None

    @property
    def bound(self) -> bool:
        """Whether the perplexities are only upper bounds."""
        return bool(self.content.get("bound"))


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Args:
        name: Name of its folder, with as many parents as make it unique.
        folder: Folder, as the user named it.
        results: Contents of its `results.json`.
        evaluations: All of its evaluations, one for each evaluation dataset and options.
        notes: Which evaluations were left out, and why.
    """

    name: str
    folder: Path
    results: Mapping[str, Any]
    evaluations: tuple[RunEvaluation, ...]
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe, as it was written."""
        recipe: Mapping[str, Any] = self.results["recipe"]
        return recipe

    @property
    def base(self) -> str:
        """The pretrained model that was fine-tuned, as a normalized path; "" for a run from scratch."""
        base = str(self.recipe.get("base") or "")
        return os.path.normpath(base) if base else ""

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """The LoRA settings of the recipe; `None` if all weights were trained."""
        return self.recipe.get("lora")

    @property
    def adapter(self) -> str:
        """Name of the adapter, as the paper writes it."""
        if self.lora is None:
            return "Full FT"
        return f"LoRA r={self.lora['rank']}" if "rank" in self.lora else "LoRA"

    @property
    def causal(self) -> bool:
        """Whether the method does not read the future."""
        return not method_of(str(self.recipe["method"])).reads_future

    @property
    def method(self) -> str:
        """Name of the method in the paper's tables."""
        return "Baseline" if self.causal else method_of(str(self.recipe["method"])).title

    @property
    def size(self) -> str:
        """Name of the model size, or its layers and width, of a run from scratch; "" for a fine-tuned model."""
        model = "" if self.base else self.recipe["model"]
        return model if isinstance(model, str) else f"{model['layers']}x{model['width']}"

    @property
    def seed(self) -> int:
        """Seed of the weights, the order of the texts and the conditioning sets."""
        return int(self.recipe["seed"])

    @property
    def corpus(self) -> str:
        """Name of the corpus's folder."""
        return Path(self.recipe["corpus"]).name

    @property
    def budget(self) -> tuple[int, int]:
        """Number of texts and of tokens read in training."""
        return int(self.results["texts"]), int(self.results["tokens"])

    @cached_property
    def conditioning(self) -> Conditioning:
        """Distribution of conditioning sets in training."""
        return Conditioning((Empty(),)) if self.causal else Conditioning.from_dict(self.recipe["conditioning"])

    @property
    def r_max(self) -> float:
        """Largest share of a text that was given in training."""
        return self.conditioning.r_max

    @property
    def mix(self) -> float:
        """Autoregressive mixing: the share of training texts with nothing given. It is 0 for a causal run."""
        if self.causal:
            return 0.0
        weights = zip(self.conditioning.parts, self.conditioning.weights, strict=True)
        empty = sum(weight for part, weight in weights if isinstance(part, Empty))
        return round(empty / sum(self.conditioning.weights), 12)


def measurements(runs: Sequence[Run]) -> pd.DataFrame:
    """Return all perplexities of some runs as a tidy table: one row per run, evaluation dataset and mode.

    `texts` and `tokens` are what the run has read, and `r_max` is that of its training. `set`, `set_texts` and
    `set_r_max` describe the evaluation dataset. `perplexity` is missing where the method cannot answer.
    """
    records = [
        {
            "run": run.name,
            "method": run.recipe["method"],
            "model": run.base or run.size,
            "corpus": run.corpus,
            "texts": run.budget[0],
            "tokens": run.budget[1],
            "r_max": run.r_max,
            "seed": run.seed,
            "split": evaluation.split,
            "set": evaluation.hash,
            "set_texts": evaluation.texts,
            "set_r_max": evaluation.dataset.get("r_max"),
            "options": evaluation.options,
            "mode": mode,
            "perplexity": perplexity,
            "bound": evaluation.bound,
            "chance": evaluation.chance,
        }
        for run in runs
        for evaluation in run.evaluations
        for mode, perplexity in evaluation.modes.items()
    ]
    return pd.DataFrame(records, columns=MEASUREMENTS).astype({"perplexity": float, "chance": float})


def find_runs(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Find the folders of runs; a folder that is named may also contain runs, like that of an experiment.

    Returns:
        The folders that were named as runs and the finished runs inside other folders; and the unfinished ones there.
    """
    run_folders, unfinished = [], []
    for folder in folders:
        nested = [] if (folder / CONFIG).exists() else sorted(config.parent for config in folder.glob(f"*/{CONFIG}"))
        unfinished += [path for path in nested if not (path / RESULTS).exists()]
        run_folders += [path for path in nested if (path / RESULTS).exists()] if nested else [folder]
    return run_folders, unfinished


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders, in order, each once.

    Raises:
        InputError: A folder is no finished run, has no evaluation, or cannot be read.
    """
    as_named = {folder.resolve(): folder for folder in reversed(folders)}
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    return [read_run(as_named[path], name) for path, name in zip(paths, short_names(paths), strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many parts as make it unique."""
    names = []
    for path in paths:
        sizes = range(1, len(path.parts) + 1)
        others = [other for other in paths if other != path]
        size = next(n for n in sizes if all(other.parts[-n:] != path.parts[-n:] for other in others))
        names.append(Path(*path.parts[-size:]).as_posix())
    return names


def read_run(folder: Path, name: str) -> Run:
    """Read one finished run."""
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.is_file() else f"there is no folder {folder}"
        raise InputError(f"{problem}: name the folder of a run (output=… in its recipe).")
    if not (folder / RESULTS).exists():
        if (folder / CONFIG).exists() and "recipe" in read_json(folder / CONFIG):
            raise InputError(f"the run in {folder} is not finished: resume it, or leave it out.")
        for path in folder.glob("*.jsonl"):
            has_record(path)  # raises if the generations in this folder are damaged
        is_subfolder = (folder.parent / RESULTS).exists()
        hint = f"name {folder.parent}" if is_subfolder else "name a folder written by acgpt train or acgpt generate"
        raise InputError(f"{folder} is not a run, because it has no {RESULTS}: {hint}.")
    results = read_json(folder / RESULTS)
    try:
        run = Run(name, folder, results, *evaluations_of(folder, results))
        # Read everything that a report needs, so that a missing value is reported here.
        run.budget, run.r_max, run.mix, run.corpus, run.adapter, run.size, run.seed, results["corpus_hash"]
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / RESULTS} is damaged ({error!r}): train the run again.") from error
    if not run.evaluations:
        raise InputError(f"the run in {folder} has no evaluation: run acgpt evaluate … -o {folder / 'test.json'}")
    return run


def evaluations_of(folder: Path, results: Mapping[str, Any]) -> tuple[tuple[RunEvaluation, ...], tuple[str, ...]]:
    """Read the evaluation at the end of a run, then the ones that were added to its folder.

    Of two evaluations with the same dataset and options, the one with more modes is kept; of equals, one with sums per
    text, then the first.

    Returns:
        The evaluations; and notes on those that were left out although they answer otherwise than the one that was
        kept, and on sums that do not belong to their evaluation.
    """
    method, candidates = results["recipe"]["method"], {}
    if results["evaluation"] is not None:
        candidates[folder / RESULTS] = (results["recipe"]["eval_split"], results["evaluation"])
    for path in sorted(folder.glob("*.json")):
        if path.name not in (RESULTS, CONFIG):
            content = read_json(path)
            if "modes" in content and "set" in content and "kind" not in content:  # other files are not evaluations
                candidates[path] = (path.stem, content)
    records, foreign_notes = [], []
    for path, (name, content) in candidates.items():
        try:
            evaluation = RunEvaluation(content["set"].get("split") or name, content)
            evaluation.modes, evaluation.chance  # noqa: B018  (reading them checks them)
            try:
                evaluation = replace(evaluation, per_text=read_per_text(path, content))
            except InputError as error:
                foreign_notes.append(str(error))
            method_used, model = content["method"], content.get("adapter") or content.get("model")
            if evaluation.texts < 0:
                raise ValueError(f"{evaluation.texts} texts")
            records.append((path, evaluation))
            evaluation.hash, evaluation.options  # noqa: B018  (reading them checks them)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InputError(f"{path} is not an evaluation of acgpt ({error!r}): evaluate again.") from error
        if model is not None and Path(results["recipe"]["output"]).name not in Path(model).parts:
            raise InputError(f"{path} is an evaluation of {model}, not of this run: move it elsewhere.")
        if method_used != method:
            raise InputError(
                f"{path} was evaluated as {method_used}, but the run was trained as {method}: evaluate it without "
                "a method."
            )
    evaluations, notes = [], foreign_notes
    for same in grouped(records, lambda record: (record[1].hash, record[1].options)):
        kept_path, kept = max(same, key=lambda record: record[1].completeness)  # the first of equals
        evaluations.append(kept)
        notes += [
            f"{path} is left out: {kept_path} evaluates the same dataset in as many modes or more. Delete one of them."
            for path, dropped in same
            if not same_answers(dropped, kept)
        ]
    return tuple(evaluations), tuple(notes)


def same_answers(dropped: RunEvaluation, kept: RunEvaluation) -> bool:
    """Return whether every answer of the dropped evaluation is also in the kept one, up to rounding."""
    return all(
        value is None or (other is not None and math.isclose(value, other, rel_tol=1e-3))
        for value, other in ((value, kept.modes[mode]) for mode, value in dropped.modes.items())
    )


def options_of(record: Mapping[str, Any]) -> list[str]:
    """Return the non-default options of the method in a result, such as "order=random"."""
    return [f"{key}={value}" for key, value in (record.get("options") or {}).items()]


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} ({error}): repair it or leave it out.") from error


def backbones(runs: Sequence[Run]) -> dict[str, str]:
    """Return the name of each base in tables: the last part of its path or hub id, or all of it if ambiguous."""
    bases = dict.fromkeys(run.base for run in runs)
    short = {base: DEFAULT_BASE if base == "default" else Path(base).name or base for base in bases}
    names = list(short.values())
    return {base: base if names.count(name) > 1 else name for base, name in short.items()}


def command_for(evaluation: RunEvaluation) -> str:
    """Return the command that evaluates another run on the same dataset; model and corpus are left open."""
    dataset = evaluation.dataset
    r_max, length, texts = (dataset.get(key) for key in ("r_max", "length", "texts"))
    arguments = [f"--split {evaluation.split} --r-max {r_max} --length {length} --limit {texts}"]
    conditioning = dataset.get("conditioning")
    if conditioning and Conditioning.from_dict(conditioning) != distributions(float(dataset["r_max"]))["training"]:
        arguments.append(f"--conditioning '{json.dumps(conditioning)}'")
    return " ".join(["acgpt evaluate …", *arguments, f"--seed {dataset.get('seed', 0)}"])


def describe_set(evaluation: RunEvaluation) -> str:
    """Describe the evaluation dataset: its hash, texts, r_max and other parameters, and the unit of intervals."""
    texts, length, r_max = (evaluation.dataset.get(key) for key in ("texts", "length", "r_max"))
    description = [f"{texts} texts of {length} tokens", f"r_max {r_max}", *unusual_parameters(evaluation)]
    if evaluation.per_text is not None or evaluation.chance is not None:
        description.append(f"intervals over {evaluation.intervals}")
    return f"{evaluation.hash[:8]} ({', '.join(description)})"


def unusual_parameters(evaluation: RunEvaluation) -> list[str]:
    """Return the parameters of the evaluation's training distribution that are not the paper's, r_max apart."""
    parameters = []
    for part in Conditioning.from_dict(evaluation.dataset.get("conditioning") or {}).parts:
        usual = vars(type(part)()) | {"r_max": evaluation.dataset.get("r_max")}
        parameters += [f"{key} {value}" for key, value in vars(part).items() if value != usual[key]]
    return list(dict.fromkeys(parameters))
