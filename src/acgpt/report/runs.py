"""Finished runs as a report needs them: what was trained on what, and every evaluation in the run's folder.

    RUN/results.json     the run, and the evaluation at its end
    RUN/*.json           further ones, as `acgpt evaluate … -o RUN/test.json` writes them
    RUN/*.per-text.json  of each of these, the sums of each text (evaluation/per_text.py); earlier versions kept none
    RUN/log.csv          perplexities while it was trained

Nothing is computed here, and no model is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from acgpt.common.files import read_object
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import MeasuredPerplexity, PerText
from acgpt.evaluation.generations import has_record
from acgpt.evaluation.per_text import ENDING, read_per_text
from acgpt.methods import method_of
from acgpt.query.conditioning import Conditioning, Empty
from acgpt.query.modes import MODES, WITHOUT_FUTURE
from acgpt.report.left_out import listed
from acgpt.training.log import Row, read_log
from acgpt.training.run_folder import CONFIG, LOG, RESULTS

EMBEDDED = "SmolLM2-135M-Instruct"  # what the base "default" is
SETS = "Evaluation sets"
ADVANTAGES = {"unconditional": "unconditional", **WITHOUT_FUTURE}  # a run's mode, and its causal twin's
MEASUREMENTS = [  # the columns of `measurements`
    "run", "name", "method", "model", "corpus", "texts", "tokens", "r_max", "seed",
    "measured", "split", "set", "set_texts", "set_r_max", "options", "mode", "perplexity", "bound", "chance",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Measured:
    """One evaluation of a run.

    Args:
        split: Of the corpus; the file's name where the evaluation set does not say.
        set: What describes the evaluation set, `EvaluationSet.as_dict`.
        modes: The perplexity in each mode, infinity included; `None` for what was not or cannot be answered.
        chance: How far other texts might take a perplexity, in percent of it: half of the widest interval of a mode.
        found: The evaluation as it was written.
        per_text: What was found of each text, if that was kept.
    """

    split: str
    set: Mapping[str, Any]
    modes: Mapping[str, float | None]
    chance: float | None
    found: Mapping[str, Any]
    per_text: PerText | None = None

    @property
    def hash(self) -> str:
        """Of the evaluation set: two evaluations may be compared if and only if theirs are the same."""
        return str(self.set["hash"])

    @property
    def texts(self) -> int:
        """In the evaluation set."""
        return int(self.set.get("texts") or 0)

    @property
    def options(self) -> str:
        """How the method was asked, where it leaves a choice: "order=random"; "" is its own way."""
        return ", ".join(f"{key}={value}" for key, value in (self.found.get("options") or {}).items())

    def perplexity(self, mode: str) -> MeasuredPerplexity | None:
        """The perplexity in a mode with what is known of each text; `None` if it is missing or infinite."""
        value = self.modes[mode]
        if value is None or not math.isfinite(value):
            return None
        return MeasuredPerplexity(value, mode, (self.per_text,))

    def resampled(self) -> dict[str, np.ndarray]:
        """By mode, (resamples,) the perplexity on resampled texts, where the sums of each text were kept."""
        found = {mode: each.resampled for mode in self.modes if (each := self.perplexity(mode)) is not None}
        return {mode: values for mode, values in found.items() if values is not None}

    @property
    def bound(self) -> bool:
        """Are the perplexities only bounds, above the exact ones?"""
        return bool(self.found.get("bound"))


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Args:
        name: Its folder's name, with as much of the path as tells it from the others.
        folder: As it was named.
        results: The contents of its `results.json`.
        evaluations: All of its evaluations, each set once.
        notes: Which evaluations were left out, and why.
    """

    name: str
    folder: Path
    results: Mapping[str, Any]
    evaluations: tuple[Measured, ...]
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Its recipe, as it was written."""
        recipe: Mapping[str, Any] = self.results["recipe"]
        return recipe

    @property
    def base(self) -> str:
        """The pretrained model that was tuned, a path without detours; "" for a run from scratch."""
        base = str(self.recipe.get("base") or "")
        return os.path.normpath(base) if base else ""

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """The adapter as the recipe describes it; `None` if all weights were trained."""
        return self.recipe.get("lora")

    @property
    def adapter(self) -> str:
        """The adapter as the paper writes it."""
        if self.lora is None:
            return "Full FT"
        return f"LoRA r={self.lora['rank']}" if "rank" in self.lora else "LoRA"

    @property
    def causal(self) -> bool:
        """Does it read no future?"""
        return not method_of(str(self.recipe["method"])).reads_future

    @property
    def method(self) -> str:
        """The method as the paper's tables name it."""
        return "Baseline" if self.causal else method_of(str(self.recipe["method"])).title

    @property
    def size(self) -> str:
        """What a network that was made anew is called, or its layers and width; "" for one that was tuned."""
        model = "" if self.base else self.recipe["model"]
        return model if isinstance(model, str) else f"{model['layers']}x{model['width']}"

    @property
    def seed(self) -> int:
        """Of its weights, texts and conditioning sets."""
        return int(self.recipe["seed"])

    @property
    def corpus(self) -> str:
        """The name of the corpus's folder."""
        return Path(self.recipe["corpus"]).name

    @property
    def budget(self) -> tuple[int, int]:
        """Texts and tokens that it read."""
        return int(self.results["texts"]), int(self.results["tokens"])

    @cached_property
    def conditioning(self) -> Conditioning:
        """What it was given in training."""
        return Conditioning((Empty(),)) if self.causal else Conditioning.from_dict(self.recipe["conditioning"])

    @property
    def r_max(self) -> float:
        """The largest share of a text that was given in training."""
        return self.conditioning.r_max

    @property
    def mix(self) -> float:
        """Autoregressive mixing: the share of texts of which nothing was given. The causal twin counts as 0."""
        if self.causal:
            return 0.0
        weights = zip(self.conditioning.parts, self.conditioning.weights, strict=True)
        empty = sum(weight for part, weight in weights if isinstance(part, Empty))
        return round(empty / sum(self.conditioning.weights), 12)

    @property
    def watched(self) -> str | None:
        """The hash of the evaluation set that the log's perplexities are of."""
        during = (self.results.get("evaluation_sets") or {}).get("during") or {}
        return during.get("hash")

    def log(self) -> list[Row]:
        """The rows of its log."""
        return read_log(self.folder / LOG)

    def on(self, set_hash: str) -> Measured | None:
        """Its evaluation on a set, asked in the method's own way."""
        return next((each for each in self.evaluations if each.hash == set_hash and not each.options), None)


def measurements(runs: Sequence[Run]) -> pd.DataFrame:
    """All perplexities of some runs as a tidy table: one row for each run, evaluation set and mode.

    The columns `run` and `measured` hold the objects that the others are taken from. `texts` and `tokens` are what the
    run has read, `r_max` is that of its training. `perplexity` is missing where the method cannot answer.
    """
    records = [
        {
            "run": run,
            "name": run.name,
            "method": run.recipe["method"],
            "model": run.base or run.size,
            "corpus": run.corpus,
            "texts": run.budget[0],
            "tokens": run.budget[1],
            "r_max": run.r_max,
            "seed": run.seed,
            "measured": measured,
            "split": measured.split,
            "set": measured.hash,
            "set_texts": measured.texts,
            "set_r_max": measured.set.get("r_max"),
            "options": measured.options,
            "mode": mode,
            "perplexity": value,
            "bound": measured.bound,
            "chance": measured.chance,
        }
        for run in runs
        for measured in run.evaluations
        for mode, value in measured.modes.items()
    ]
    return pd.DataFrame(records, columns=MEASUREMENTS).astype({"perplexity": float, "chance": float})


def find_runs(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The folders of runs, where some of those named may be folders of runs, as an experiment's is.

    Returns:
        Those that were named, or are finished; and of those in a folder that was named, the ones that are not.
    """
    found, unfinished = [], []
    for folder in folders:
        inside = [] if (folder / CONFIG).exists() else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        unfinished += [run for run in inside if not (run / RESULTS).exists()]
        found += [run for run in inside if (run / RESULTS).exists()] if inside else [folder]
    return found, unfinished


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, in order, each once.

    Raises:
        InputError: One of them is no finished run, has no evaluation, or cannot be read.
    """
    once = {folder.resolve(): folder for folder in reversed(folders)}
    places = [place for place in dict.fromkeys(folder.resolve() for folder in folders)]
    return [read_run(once[place], name) for place, name in zip(places, short_names(places), strict=True)]


def short_names(places: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many as tell it from all others."""
    names = []
    for place in places:
        sizes = range(1, len(place.parts) + 1)
        others = [other for other in places if other != place]
        size = next(n for n in sizes if all(other.parts[-n:] != place.parts[-n:] for other in others))
        names.append(Path(*place.parts[-size:]).as_posix())
    return names


def read_run(folder: Path, name: str) -> Run:
    """One finished run."""
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.is_file() else f"there is no folder {folder}"
        raise InputError(f"{what}: name the folder of a run, its recipe's output=….")
    if not (folder / RESULTS).exists():
        if (folder / CONFIG).exists() and "recipe" in read_json(folder / CONFIG):
            raise InputError(f"the run in {folder} is not finished: resume it, or leave it out.")
        for path in folder.glob("*.jsonl"):
            has_record(path)  # or it says what is wrong with what was generated there
        inside = (folder.parent / RESULTS).exists()
        hint = f"name {folder.parent}" if inside else "name one of acgpt train, or of generations"
        raise InputError(f"{folder} is no run's folder, for it has no {RESULTS}: {hint}.")
    results = read_json(folder / RESULTS)
    try:
        run = Run(name, folder, results, *evaluations_of(folder, results))
        # All that a report needs is read once here, so that it is found missing here.
        run.budget, run.r_max, run.mix, run.corpus, run.adapter, run.watched, run.size, run.seed, results["corpus_hash"]
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / RESULTS} is not what a run writes ({error!r}): train it again.") from error
    if not run.evaluations:
        raise InputError(
            f"the run in {folder} has no evaluation: make one with acgpt evaluate … -o {folder / 'test.json'}."
        )
    return run


def evaluations_of(folder: Path, results: Mapping[str, Any]) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """The evaluation at the end of a run, then those that were added.

    Of two that ask the same, that of more modes is kept; of as many, one with the sums of each text.

    Returns:
        The evaluations; and a note on each that was left out, unless the one that was kept says the same, and on sums
        of texts that do not belong to their evaluation.
    """
    method, found = results["recipe"]["method"], {}
    if results["evaluation"] is not None:
        found[folder / RESULTS] = (results["recipe"]["eval_split"], results["evaluation"])
    for path in sorted(folder.glob("*.json")):
        if path.name not in (RESULTS, CONFIG):
            content = read_json(path)
            if "modes" in content and "set" in content and "kind" not in content:  # any other is somebody else's
                found[path] = (path.stem, content)
    records, foreign = [], []
    for path, (name, content) in found.items():
        try:
            split = content["set"].get("split") or name
            each = Measured(split, content["set"], perplexities(content), chance(content), content)
            try:
                each = replace(each, per_text=read_per_text(path, content))
            except InputError as error:
                foreign.append(str(error))
            asked_as, asked = content["method"], content.get("adapter") or content.get("model")
            if each.texts < 0:
                raise ValueError(f"{each.texts} texts")
            answered = sum(value is not None for value in each.modes.values())
            records.append((path, each, each.hash, each.options, answered + 0.5 * (each.per_text is not None)))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InputError(f"{path} is no evaluation that acgpt writes ({error!r}): evaluate again.") from error
        if asked is not None and Path(results["recipe"]["output"]).name not in Path(asked).parts:
            raise InputError(
                f"{path} is an evaluation of {asked}, not of what this run has trained: move it elsewhere."
            )
        if asked_as != method:
            raise InputError(
                f"{path} asks the model as one of {asked_as}, and the run is one of {method}: evaluate it without "
                "a method."
            )
    rivals = pd.DataFrame(records, columns=["path", "measured", "set", "options", "answered"])
    by_question = rivals.groupby(["set", "options"], sort=False)["answered"]
    fullest = rivals.loc[by_question.idxmax()]  # of equals, the first
    winners = rivals.loc[by_question.transform("idxmax")]
    notes = [
        f"{path} is left out: {kept} is an evaluation on the same set, of as many modes or more. Delete the one that "
        "is not meant."
        for path, dropped, kept, better in zip(
            rivals["path"], rivals["measured"], winners["path"], winners["measured"], strict=True
        )
        if not same_answers(dropped, better)
    ]
    return tuple(fullest["measured"]), (*foreign, *notes)


def same_answers(dropped: Measured, kept: Measured) -> bool:
    """Does one evaluation say nothing that the other does not, but for rounding?"""
    return all(
        value is None or (other is not None and math.isclose(value, other, rel_tol=1e-3))
        for value, other in ((value, kept.modes[mode]) for mode, value in dropped.modes.items())
    )


def perplexities(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    """The perplexity in each of the five modes; JSON writes an infinite one as null."""

    def number(answer: Mapping[str, Any] | None) -> float | None:
        if answer is None:
            return None
        return math.inf if answer["perplexity"] is None else float(answer["perplexity"])

    return {mode: number(evaluation["modes"].get(mode)) for mode in MODES}


def chance(evaluation: Mapping[str, Any]) -> float | None:
    """Half of the widest interval, in percent of its perplexity; `None` where no mode has one."""
    answers = [answer for answer in evaluation["modes"].values() if answer and answer.get("interval")]
    widths = [(high - low) / each["perplexity"] for each in answers for low, high in [each["interval"]]]
    return 50 * max(widths) if widths else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} ({error}): mend it, or leave it out.") from error


def backbones(runs: Sequence[Run]) -> dict[str, str]:
    """How each base is named in tables: the last part of its path or hub id, unless two would look the same."""
    bases = dict.fromkeys(run.base for run in runs)
    short = {base: EMBEDDED if base == "default" else Path(base).name or base for base in bases}
    names = list(short.values())
    return {base: base if names.count(name) > 1 else name for base, name in short.items()}


def command_for(measured: Measured) -> str:
    """The command that asks another run what this evaluation has asked; the model and the corpus are left open."""
    of = measured.set
    named = {"split": measured.split} | {key: of.get(key) for key in ("r_max", "length")} | {"limit": of.get("texts")}
    words = [f"--{key.replace('_', '-')} {value}" for key, value in named.items()]
    return " ".join(["acgpt evaluate …", *words, f"--seed {of.get('seed', 0)}"])


def sets_in_words(measured: Sequence[Measured]) -> str:
    """A description of every evaluation set that these were asked, once."""
    return f"{SETS}: {'; '.join(dict.fromkeys(set_in_words(each) for each in measured))}."


def set_in_words(measured: Measured) -> str:
    """The evaluation set that was asked."""
    of = measured.set
    return f"{measured.hash[:8]} ({of.get('texts')} texts of {of.get('length')} tokens, r_max {of.get('r_max')})"


def without_intervals(split: str, evaluations: Sequence[tuple[Run, Measured]]) -> list[str]:
    """A note on evaluations whose differences have no intervals, for they kept no sums per text."""
    names = listed(run.name for run, _ in evaluations)
    return [
        f"{split}: no interval for differences with {names}: no sums per text were kept (*{ENDING}). Evaluate again: "
        f"{command_for(evaluations[0][1])} -o RUN/NAME.json"
    ] if evaluations else []  # fmt: skip
