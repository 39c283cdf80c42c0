"""Score generated texts with MAUVE and other metrics: `acgpt.score_samples` and `acgpt mauve`.

For each NAME.jsonl of `acgpt.generate`, a result is written:

    NAME.KEY.mauve.json      KEY is a hash of what was scored, the features, reference, judge and limit

docs/how-to/score-generations.md describes the metrics.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from acgpt.common.files import check_writable, disk_errors, finite, write_json
from acgpt.common.options import keywords
from acgpt.common.provenance import date_and_command, versions
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.features import LENGTH, Featurizer
from acgpt.evaluation.generations import Generation, Generations, find_generations, object_of_kind
from acgpt.evaluation.judge import Judge, Progress
from acgpt.evaluation.mauve import FEW, MIN_TEXTS, PAPER, check_counts, package, scores
from acgpt.evaluation.options import ScoringOptions, check_compatible
from acgpt.evaluation.perplexity import PartialEvaluation, partial_path
from acgpt.evaluation.reference import (
    COUNT,
    Reference,
    limit_generations,
    originals,
    reference_from_corpus,
    reference_from_file,
)
from acgpt.evaluation.text_metrics import companions, first_samples, own_perplexity
from acgpt.methods import METHODS

Bars = Callable[[str], AbstractContextManager[Progress]]  # returns a progress bar with a title, as a context manager
SEEDS = 5
INDEX = "scores"  # kind of the file that lists all results
ENDING = ".mauve.json"  # suffix of results
RECORD_KEYS = ("method", "options", "model", "adapter", "mode", "r_max", "set", "sampling", "samples", "tokenizer_hash")


@keywords(ScoringOptions)
def score_samples(
    generated: str | Path | Sequence[str | Path],
    reference: str | Path,
    *,
    progress: Bars = lambda work: nullcontext(lambda *_: None),
    done: Callable[[Path, Mapping[str, Any]], object] = lambda path, result: None,
    **keywords: Any,
) -> dict[Path, dict[str, Any]]:
    """Compare generated texts with real ones by MAUVE, and compute other metrics.

        results = acgpt.score_samples("samples/mine", "data/mine", split="test", features="default")
        for path, result in results.items():
            print(result["name"], result["mauve"]["mean"], result["companions"]["generated"]["repetition"])

    Args:
        generated: One or several NAME.jsonl that `acgpt.generate` has written, with NAME.json beside them, or folders
            of them.
        reference: Texts to compare with: a folder that `acgpt.prepare` has written, or a .jsonl or .txt file.
        **keywords: See `ScoringOptions`.
        progress: Returns, for a title, a context manager whose value is called as `Progress`.
        done: Called with the path and content of each result after it is written.

    Returns:
        The results by path, with the keys that `acgpt mauve --help` lists.

    Raises:
        InputError: The arguments or the files are wrong; the message says what to do.
        OutputError: A result cannot be written.
    """
    options, reference = ScoringOptions.of(score_samples, keywords), Path(reference)
    paths = [generated] if isinstance(generated, str | Path) else generated
    output, index = (None if path is None else Path(path) for path in (options.output, options.index))
    check_compatible(options, reference)
    files = list(find_generations([Path(path) for path in paths], allow_none=index is not None))
    check_outputs(files, output, index)
    if not files and index is not None:
        write_index(index, {})
        return {}
    scoring = Scoring(files, reference, options, progress)
    results: dict[Path, dict[str, Any]] = {}
    for file in scoring.files:
        plan = scoring.plan(file)
        path = result_path(file, key_of(plan), output)
        result = existing_result(path, plan) if options.resume else None
        if result is None:
            about = {"versions": versions(), "hardware": scoring.hardware}
            config = plan | about
            with PartialEvaluation(partial_path(path), config.copy) as unfinished:
                result = plan | scoring.result(file, unfinished)
            result |= about | {"seconds": round(unfinished.seconds, 3), **date_and_command()}
            write(path, result)
            unfinished.discard()
        results[path] = result
        done(path, result)
    if index is not None:
        write_index(index, results)
    return results


def check_outputs(files: Sequence[Generations], output: Path | None, index: Path | None) -> None:
    """Check before scoring that all files can be written, and that none overwrites another one or an unrelated one."""
    names = [file.name for file in files]
    if output is not None and output.suffix == ".json":
        if len(files) > 1:
            raise InputError(f"{output} is a file, but there are {len(files)} generations: `output` must be a folder.")
        if output.is_file() and object_of_kind(output, "mauve") is None:  # for example NAME.json beside NAME.jsonl
            raise InputError(f"{output} is not a result of acgpt mauve: move it, or choose another `output`.")
    elif output is not None and len(set(names)) < len(names):
        raise InputError(f"two generations have the same name, so both results would go to the same file in {output}.")
    for path in (*(result_path(file, (), output) for file in files), index):
        check_writable(path)
    if index is None:
        return
    if index.name.endswith(ENDING) or (output is not None and index.resolve() == output.resolve()):
        raise InputError(f"{index} is the path of a result: choose another .json file with `index`.")
    if index.exists() and object_of_kind(index, INDEX) is None:
        raise InputError(f"{index} is not an index of scores: move it, or choose another `index`.")


def write_index(path: Path, results: Mapping[Path, Mapping[str, Any]]) -> None:
    """Write the file that lists all results."""
    entries = [
        {
            "generated": result["generated"], "mode": result["record"]["mode"],
            "scored": result["scored"], "result": str(file),
        }
        for file, result in results.items()
    ]  # fmt: skip
    write(path, {"kind": INDEX, "results": entries, **date_and_command()})


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with disk_errors(path):
        write_json(path, finite(result), indent=1, allow_nan=False)


def result_path(file: Generations, key: Sequence[str | None], output: Path | None) -> Path:
    """Return the path of a result; results with different keys have different names."""
    if output is not None and output.suffix == ".json":
        return output
    short = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    return (output or file.path.parent) / f"{file.name}.{short}{ENDING}"


def key_of(result: Mapping[str, Any]) -> list[str | None]:
    """Return the key of a result: what was scored, hashes of features and reference, judge, limit."""
    hashes = [(result[part] or {}).get("hash") for part in ("features", "reference")]
    limit = [] if result.get("limit") is None else [f"first {result['limit']}"]
    return [result["scored"], *hashes, (result["judge"] or {}).get("model"), *limit]


def existing_result(path: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an existing result if it is the planned one: of the same samples, key, seeds and judge.

    The judge's hash is compared because its name, which is in the key, stays the same if it is trained again.
    """

    def identity(result: Mapping[str, Any]) -> list[Any]:
        return [
            result["hash"],
            *key_of(result),
            (result["mauve"] or {}).get("seeds"),
            (result["judge"] or {}).get("hash"),
        ]

    result = object_of_kind(path, "mauve")
    with suppress(KeyError, AttributeError):  # written by another version, or edited
        if result is not None and identity(result) == identity(plan):
            return result
    return None


def open_reference(
    path: Path, files: Sequence[Generations], options: ScoringOptions
) -> tuple[Corpus | None, Reference | None]:
    """Return the corpus, if the path is one, and the common reference of all files; `None` if each has its own."""
    if path.is_dir():
        corpus = Corpus.open(path)
        if options.asked_only:
            return corpus, None
        longest = min(LENGTH, max(file.record["set"]["length"] for file in files))
        return corpus, reference_from_corpus(
            corpus, options.split, length=options.length or longest, generated=files, rule=options.rule,
            skip=options.skip, count=options.count or COUNT, allow_none=options.no_mauve,
        )  # fmt: skip
    if options.asked_only:
        raise InputError(f"`asked_only` compares with the original text: pass the corpus of the prompts, not {path}.")
    return None, reference_from_file(path, options.field or "text", options.count or COUNT)


@dataclass(frozen=True)
class Comparison:
    """The samples of one file, and what they are compared with.

    Args:
        samples: All samples.
        original: The queries with the corpus's own tokens; `None` if the prompts are from another corpus.
        texts: The part of the first sample of each text that MAUVE reads; none is empty.
        empty: Number of empty texts, which are excluded.
        reference: The reference texts.
    """

    samples: list[Generation]
    original: list[Generation] | None
    texts: list[str]
    empty: int
    reference: Reference


class Scoring:
    """The models and references that all files are scored with. Every file is checked before the first is scored.

    Args:
        files: The generations.
        reference: See `score_samples`.
        options: See `score_samples`.
        progress: See `score_samples`.

    Raises:
        InputError: A file cannot be scored: it has too few texts for MAUVE, or its judge is not suitable.
    """

    def __init__(self, files: Sequence[Generations], reference: Path, options: ScoringOptions, progress: Bars) -> None:
        if not options.no_mauve:
            package()
        if options.limit is not None:
            prompts = Corpus.open(reference)
            files = [limit_generations(file, prompts, options.limit) for file in files]
        self.files, self.progress = files, progress
        self.corpus, self.shared = open_reference(reference, files, options)
        self.judge = None if options.judge is None else Judge.load(options.judge, options.device)
        self.seeds = range(options.seeds or SEEDS)
        self.comparison = lru_cache(maxsize=1)(self.read)  # those of all files would not fit into memory
        for file in files:
            comparison = self.comparison(file)
            try:
                if not options.no_mauve:
                    check_counts(len(comparison.texts), len(comparison.reference.texts))
                if self.judge is not None:
                    self.judge.check(comparison.samples, str(file.record["tokenizer_hash"]))
            except InputError as error:
                raise InputError(f"{file.path}: {error}") from error
        self.featurizer = None if options.no_mauve else load_featurizer(options.features, options.device)

    def read(self, file: Generations) -> Comparison:
        """Return the samples of a file and what they are compared with; `comparison` caches the last one."""
        samples, original, dataset = file.samples, None, file.record["set"]
        if self.corpus is not None and (self.shared is None or dataset.get("corpus_hash") == self.corpus.hash):
            original = originals(file, self.corpus)
        first = first_samples(samples)
        if self.shared is not None:
            generated, reference = [sample.text for sample in first], self.shared
        else:
            assert self.corpus is not None and original is not None
            generated = ["\n".join(sample.fills) for sample in first]
            real = ["\n".join(sample.fills) for sample in original]
            origin = {"corpus": str(self.corpus.folder), "corpus_hash": self.corpus.hash, "split": dataset["split"]}
            reference = Reference([text for text in real if text], {**origin, "rule": "what stood where it was asked"})
        texts = [text for text in generated if text]
        return Comparison(samples, original, texts, len(generated) - len(texts), reference)

    def plan(self, file: Generations) -> dict[str, Any]:
        """Return the entries of the result of a file that are known before anything is computed."""
        comparison, judge = self.comparison(file), self.judge
        return {
            "kind": "mauve",
            "name": file.name,
            "generated": str(file.path),
            "hash": file.hash,
            "record": {key: file.record.get(key) for key in RECORD_KEYS},
            "scored": "asked part" if self.shared is None else "whole text",
            "texts": len(comparison.texts),
            "limit": file.limit,
            "empty": comparison.empty,
            "mauve": None if self.featurizer is None else {"seeds": list(self.seeds)},
            "original": None,
            "features": None if self.featurizer is None else self.featurizer.describe(),
            "reference": comparison.reference.as_dict(),
            "companions": None,
            "perplexity": None,
            "judge": None if judge is None else {"model": judge.name, "hash": judge.hash},
            "notes": [],
        }

    def features(self, file: Generations, side: str, texts: Sequence[str]) -> np.ndarray:
        """Return the features of one side of a comparison, with a progress bar.

        Args:
            file: The generations, for the title of the bar.
            side: Name of the side, for the title of the bar.
            texts: The texts.
        """
        assert self.featurizer is not None
        with self.progress(f"{file.name}, features of the {side} texts") as progress:
            return self.featurizer.features(texts, progress)

    def judged(
        self, file: Generations, side: str, samples: Sequence[Generation], unfinished: PartialEvaluation
    ) -> dict[str, Any]:
        """Return the judge's scores of one side, with a progress bar; see `features`."""
        assert self.judge is not None
        with self.progress(f"{file.name}, {side} texts judged") as progress:
            return self.judge.scores(samples, file.record["tokenizer_hash"], progress, unfinished, side)

    def result(self, file: Generations, unfinished: PartialEvaluation) -> dict[str, Any]:
        """Return the entries that `plan` lacks: MAUVE, the other metrics, the judge's scores, and notes.

        Args:
            file: The generations.
            unfinished: The judge's scores so far.
        """
        comparison, method = self.comparison(file), METHODS.get(file.record["method"])
        samples, original = comparison.samples, comparison.original
        texts, reference = comparison.texts, comparison.reference
        results: dict[str, Any] = {}
        notes = []
        if self.featurizer is not None:
            reference_features = self.features(file, "reference", reference.texts)
            results["mauve"] = scores(self.features(file, "generated", texts), reference_features, self.seeds)
            if original is not None and self.shared is not None and len(original) >= MIN_TEXTS:
                original_features = self.features(file, "original", [sample.text for sample in original])
                results["original"] = scores(original_features, reference_features, self.seeds)
            if min(len(texts), len(reference.texts)) < FEW:
                by_document = len(reference.texts) < FEW and reference.about.get("rule") == "documents"
                remedy = " The rule windows may find more reference texts." if by_document else ""
                notes.append(f"fewer than {FEW} texts on one side: MAUVE is mostly noise.{remedy}")
            if len(texts) + comparison.empty < len(samples):
                notes.append("there are several samples per text: MAUVE uses the first of each.")
        if reference.about.get("overlaps_prompts"):
            notes.append("the reference contains texts that prompts were taken from.")
        if self.featurizer is not None and (count := self.featurizer.count_truncated([*texts, *reference.texts])):
            notes.append(f"texts truncated to {self.featurizer.length():,} tokens: {count}.")
        if comparison.empty:
            notes.append(f"empty texts, excluded from MAUVE: {comparison.empty}.")
        if self.judge is not None:
            original_scores = None
            if original is not None and self.judge.same_tokens(file.record["tokenizer_hash"]):
                original_scores = self.judged(file, "original", original, unfinished)
            judged = self.judged(file, "generated", samples, unfinished)
            results["judge"] = {
                "model": self.judge.name,
                "hash": self.judge.hash,
                **judged,
                "original": original_scores,
            }
            if judged["cut"]:
                notes.append(
                    f"the judge has too few positions: the last {judged['cut']:,} tokens of texts are not judged."
                )
        of_original = None if original is None else companions(original)
        results["companions"] = {"generated": companions(samples), "original": of_original}
        results["perplexity"] = None if method is not None and method.bound else own_perplexity(samples)
        return results | {"notes": notes}

    @property
    def hardware(self) -> str:
        """Name of the GPU, or the CPU architecture."""
        networks = (self.featurizer and self.featurizer.network, self.judge and self.judge.lm.model)
        on_gpu = any(network.device.type == "cuda" for network in networks if network)
        return torch.cuda.get_device_name() if on_gpu else platform.machine()


def load_featurizer(name: str | None, device: str) -> Featurizer:
    """Load the model of features. Default: the paper's."""
    try:
        return Featurizer.load(name or PAPER, device)
    except ModelError as error:
        hint = " `features=default` uses the embedded model, without a download." if name is None else ""
        raise ModelError(f"{error}{hint}") from error
