"""Finished runs: what was trained on what, and every evaluation in a run's folder.

    RUN/results.json     the run, and the evaluation at its end
    RUN/*.json           further evaluations, as `acgpt evaluate … -o RUN/test.json` writes them
    RUN/*.per-text.json  the sums per document of each evaluation (evaluation/per_text.py)

`measurements` has them as a tidy table. Nothing is computed here, and no model is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
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
from acgpt.training.recipe import FREE, Recipe
from acgpt.training.run_folder import CONFIG, RESULTS

DEFAULT_BASE = "SmolLM2-135M-Instruct"  # the model behind the base "default"
DEFAULTS = json.loads(json.dumps({key.name: key.default for key in fields(Recipe) if key.default is not MISSING}))
MEASUREMENTS = (  # the columns of `measurements`
    "run", "method", "model", "corpus", "texts", "tokens", "r_max", "seed",
    "split", "set", "set_texts", "set_r_max", "options", "mode", "perplexity", "bound", "chance",
)  # fmt: skip


class Run:
    """A finished run.

    Attributes:
        name: Name of its folder, with as many parents as make it unique.
        folder: Folder, as the user named it.
        results: Contents of its `results.json`.
        recipe: The recipe; a key that an earlier version did not have has its default.
        method: Name of the method.
        causal: Whether the method does not read the future.
        base: The pretrained model that was fine-tuned, as a normalized path; "" for a run from scratch.
        size: Name of the model size, or its layers and width, of a run from scratch; "" for a fine-tuned model.
        lora: The LoRA settings of the recipe; `None` if all weights were trained.
        adapter: Name of the adapter, as the paper writes it.
        seed: Seed of the weights, the order of the texts and the conditioning sets.
        corpus: Name of the corpus's folder.
        budget: Number of texts and of tokens read in training.
        conditioning: Distribution of conditioning sets in training.
        r_max: Largest share of a text that was given in training.
        mix: Autoregressive mixing: the share of training texts with nothing given. It is 0 for a causal run.
        variant: Everything that decides what the run learns, except its seed, as JSON can hold it.
        identity: Key that is the same for runs that differ only in their seed.
        evaluations: All of its evaluations, one for each evaluation dataset and options.
        notes: Which evaluations were left out, and why.
    """

    def __init__(self, name: str, folder: Path, results: Mapping[str, Any]) -> None:
        self.name, self.folder, self.results = name, folder, results
        self.recipe: dict[str, Any] = DEFAULTS | results["recipe"]
        self.method = str(self.recipe["method"])
        self.causal = not method_of(self.method).reads_future
        base = str(self.recipe.get("base") or "")
        self.base = os.path.normpath(base) if base else ""
        model = "" if base else self.recipe["model"]
        self.size: str = model if isinstance(model, str) else f"{model['layers']}x{model['width']}"
        self.lora: Mapping[str, Any] | None = self.recipe.get("lora")
        rank = "" if self.lora is None or "rank" not in self.lora else f" r={self.lora['rank']}"
        self.adapter = "Full FT" if self.lora is None else f"LoRA{rank}"
        self.seed = int(self.recipe["seed"])
        self.corpus = Path(self.recipe["corpus"]).name
        self.budget = int(results["texts"]), int(results["tokens"])
        causal = Conditioning((Empty(),))
        self.conditioning = causal if self.causal else Conditioning.from_dict(self.recipe["conditioning"])
        self.r_max = self.conditioning.r_max
        weights = list(zip(self.conditioning.parts, self.conditioning.weights, strict=True))
        empty = sum(weight for part, weight in weights if isinstance(part, Empty)) / sum(self.conditioning.weights)
        self.mix = 0.0 if self.causal else round(empty, 12)
        ignored = FREE | {"seed", "final_texts"} | ({"conditioning"} if self.causal else set())
        decisive = [key for key in self.recipe if key not in ignored and not key.startswith("eval_")]
        self.variant = {key: self.recipe[key] for key in decisive}
        self.variant |= {"corpus": results["corpus_hash"], "budget": self.budget}
        self.identity = json.dumps(self.variant, sort_keys=True)
        self.evaluations: list[RunEvaluation] = []
        self.notes: list[str] = []


class RunEvaluation:
    """One evaluation of a run.

    Attributes:
        run: The run.
        content: The evaluation as it was written.
        dataset: Description of the evaluation dataset, from `EvaluationDataset.as_dict`.
        hash: Hash of the evaluation dataset. Two evaluations are comparable if and only if their hashes are equal.
        split: Split of the corpus; the file's name if the evaluation dataset does not name one.
        texts: Number of texts in the evaluation dataset.
        r_max: r_max of the evaluation dataset.
        options: Non-default options of the method, such as "order=random"; "" for the defaults.
        modes: Perplexity by mode, possibly infinite, of the modes that were answered.
        bound: Whether the perplexities are only upper bounds.
        chance: Half of the widest 95 % interval of a mode, in percent of its perplexity; `None` without intervals.
        per_text: Sums per document or text, if they were kept.
    """

    def __init__(self, run: Run, name: str, content: Mapping[str, Any], per_text: PerText | None = None) -> None:
        self.run, self.content, self.per_text = run, content, per_text
        self.dataset: Mapping[str, Any] = content["set"]
        self.hash, self.split = str(self.dataset["hash"]), str(self.dataset.get("split") or name)
        self.texts, self.r_max = int(self.dataset.get("texts") or 0), float(self.dataset.get("r_max") or 0.0)
        if self.texts < 0:
            raise ValueError(f"{self.texts} texts")
        self.options, self.bound = ", ".join(options_of(content)), bool(content.get("bound"))
        answers = {mode: answer for mode, answer in content["modes"].items() if answer is not None}
        values = {mode: answers[mode]["perplexity"] for mode in MODES if mode in answers}  # JSON has no infinity
        self.modes = {mode: math.inf if value is None else float(value) for mode, value in values.items()}
        spans = [(*answer["interval"], answer["perplexity"]) for answer in answers.values() if answer.get("interval")]
        self.chance = max((50 * ((high - low) / perplexity) for low, high, perplexity in spans), default=None)


def measurements(runs: Sequence[Run]) -> pd.DataFrame:
    """Return all perplexities of some runs as a tidy table: one row per run, evaluation dataset and mode.

    `texts` and `tokens` are what the run has read, and `r_max` is that of its training. `set`, `set_texts` and
    `set_r_max` describe the evaluation dataset. `perplexity` is missing where the method cannot answer.
    """
    records = [
        (
            run.name, run.method, run.base or run.size, run.corpus, *run.budget, run.r_max, run.seed,
            each.split, each.hash, each.texts, each.dataset.get("r_max"), each.options,
            mode, each.modes.get(mode), each.bound, each.chance,
        )
        for run in runs for each in run.evaluations for mode in MODES
    ]  # fmt: skip
    return pd.DataFrame(records, columns=list(MEASUREMENTS)).astype({"perplexity": float, "chance": float})


# ---- reading --------------------------------------------------------------------------------------------------------


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
    """Read one finished run with its evaluations."""
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
        run = Run(name, folder, results)
        add_evaluations(run)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / RESULTS} is damaged ({error!r}): train the run again.") from error
    if not run.evaluations:
        raise InputError(f"the run in {folder} has no evaluation: run acgpt evaluate … -o {folder / 'test.json'}")
    return run


def add_evaluations(run: Run) -> None:
    """Read the evaluation at the end of a run, then the ones that were added to its folder.

    Of two evaluations with the same dataset and options, the one with more modes is kept; of equals, one with sums per
    text, then the first. Notes name those that were left out although they answer otherwise than the one that was
    kept, and sums that do not belong to their evaluation.
    """
    candidates = {}
    if run.results["evaluation"] is not None:
        candidates[run.folder / RESULTS] = (run.recipe["eval_split"], run.results["evaluation"])
    for path in sorted(run.folder.glob("*.json")):
        if path.name not in (RESULTS, CONFIG):
            content = read_json(path)
            if "modes" in content and "set" in content and "kind" not in content:  # other files are not evaluations
                candidates[path] = (path.stem, content)
    records = [(path, read_evaluation(run, path, *candidate)) for path, candidate in candidates.items()]
    for same in grouped(records, lambda record: (record[1].hash, record[1].options)):
        kept_path, kept = max(same, key=lambda record: (len(record[1].modes), record[1].per_text is not None))
        run.evaluations.append(kept)
        for path, dropped in same:
            pairs = [(value, kept.modes.get(mode, math.nan)) for mode, value in dropped.modes.items()]
            if not all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs):  # the same up to rounding needs no note
                how = f"{kept_path} evaluates the same dataset in as many modes or more. Delete one of them."
                run.notes.append(f"{path} is left out: {how}")


def read_evaluation(run: Run, path: Path, name: str, content: Mapping[str, Any]) -> RunEvaluation:
    """Check an evaluation in the folder of a run, and read the sums per text that belong to it."""
    try:
        evaluation = RunEvaluation(run, name, content)
        try:
            evaluation.per_text = read_per_text(path, content)
        except InputError as error:
            run.notes.append(str(error))
        method, model = content["method"], content.get("adapter") or content.get("model")
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{path} is not an evaluation of acgpt ({error!r}): evaluate again.") from error
    if model is not None and Path(run.recipe["output"]).name not in Path(model).parts:
        raise InputError(f"{path} is an evaluation of {model}, not of this run: move it elsewhere.")
    if method != run.method:
        raise InputError(
            f"{path} was evaluated as {method}, but the run was trained as {run.method}: evaluate it without a method."
        )
    return evaluation


def options_of(record: Mapping[str, Any]) -> list[str]:
    """Return the non-default options of the method in a result, such as "order=random"."""
    return [f"{key}={value}" for key, value in (record.get("options") or {}).items()]


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} ({error}): repair it or leave it out.") from error


# ---- words ----------------------------------------------------------------------------------------------------------


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
    """Describe the evaluation dataset: its hash, texts, r_max, other parameters than the paper's, unit of intervals."""
    texts, length, r_max = (evaluation.dataset.get(key) for key in ("texts", "length", "r_max"))
    description = [f"{texts} texts of {length} tokens", f"r_max {r_max}"]
    for part in Conditioning.from_dict(evaluation.dataset.get("conditioning") or {}).parts:
        usual = vars(type(part)()) | {"r_max": r_max}
        description += [f"{key} {value}" for key, value in vars(part).items() if value != usual[key]]
    if evaluation.per_text is not None or evaluation.chance is not None:
        resampled = evaluation.content.get("bootstrap") or {}
        unit = f"{resampled['units']} documents" if resampled.get("unit") == DOCUMENTS else "texts"
        description.append(f"intervals over {unit}")
    return f"{evaluation.hash[:8]} ({', '.join(dict.fromkeys(description))})"
