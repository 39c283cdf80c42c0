"""Score generated texts with MAUVE and other metrics: `acgpt.score_samples` and `acgpt mauve`.

For each NAME.jsonl of `acgpt.generate`, a result is written:

    NAME.KEY.mauve.json      KEY is a hash of what was scored, the features, reference, judge and limit

docs/how-to/score-generations.md describes the metrics.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from acgpt.evaluation.mauve import FEW, MIN_TEXTS, PAPER, check_counts, package, scores
from acgpt.evaluation.options import ScoringOptions, check_compatible
from acgpt.evaluation.reference import (
    COUNT,
    Reference,
    limit_generations,
    originals,
    reference_from_corpus,
    reference_from_file,
)
from acgpt.evaluation.text_metrics import check_judge, companions, first_samples, judge_samples, own_perplexity
from acgpt.methods import METHODS
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import is_default, load
from acgpt.models.metadata import tokenizer_hash, weights_hash

Progress = Callable[..., object]  # called with the number of processed texts and the total
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
    check_output(files, output)
    check_index(index, output)
    if not files and index is not None:
        write_index(index, {})
        return {}
    scoring = Scoring.load(files, reference, options, progress)
    results: dict[Path, dict[str, Any]] = {}
    for file in scoring.files:
        start = time.perf_counter()
        path = result_path(file, scoring.key(file), output)
        result = scoring.existing(file, path) if options.resume else None
        if result is None:
            result = scoring.result(file)
            seconds = round(time.perf_counter() - start, 3)
            result |= {"versions": versions(), "hardware": scoring.hardware, "seconds": seconds, **date_and_command()}
            write(path, result)
        results[path] = result
        done(path, result)
    if index is not None:
        write_index(index, results)
    return results


def check_output(files: Sequence[Generations], output: Path | None) -> None:
    """Check before scoring that results can be written, and would not overwrite unrelated files."""
    names = [file.name for file in files]
    if output is not None and output.suffix == ".json":
        if len(files) > 1:
            raise InputError(f"{output} is a file, but there are {len(files)} generations: `output` must be a folder.")
        if output.is_file() and object_of_kind(output, "mauve") is None:  # for example NAME.json beside NAME.jsonl
            raise InputError(f"{output} is not a result of acgpt mauve: move it, or choose another `output`.")
    elif output is not None and len(set(names)) < len(names):
        raise InputError(f"two generations have the same name, so both results would go to the same file in {output}.")
    for file in files:
        check_writable(result_path(file, (), output))


def check_index(path: Path | None, output: Path | None) -> None:
    """Refuse an index that cannot be written, or that would overwrite a result or an unrelated file."""
    check_writable(path)
    if path is None:
        return
    if path.name.endswith(ENDING) or (output is not None and path.resolve() == output.resolve()):
        raise InputError(f"{path} is the path of a result: choose another .json file with `index`.")
    if path.exists() and object_of_kind(path, INDEX) is None:
        raise InputError(f"{path} is not an index of scores: move it, or choose another `index`.")


def write_index(path: Path, results: Mapping[Path, Mapping[str, Any]]) -> None:
    """Write the file that lists all results."""
    entries = [
        {
            "generated": result["generated"],
            "mode": result["record"]["mode"],
            "scored": result["scored"],
            "result": str(file),
        }
        for file, result in results.items()
    ]
    write(path, {"kind": INDEX, "results": entries, **date_and_command()})


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with disk_errors(path):
        write_json(path, finite(result), indent=1, allow_nan=False)


def load_judge(name: str, device: str) -> LanguageModel:
    """Load the judge. The embedded model is loaded without its adapter, as a causal model."""
    try:
        return load(name, False if is_default(name) else None, device)
    except ModelError as error:
        raise ModelError(f"cannot load the judge: {error}") from error


def load_featurizer(name: str | None, device: str) -> Featurizer:
    """Load the model of features. Default: the paper's."""
    try:
        return Featurizer.load(name or PAPER, device)
    except ModelError as error:
        hint = " `features=default` uses the embedded model, without a download." if name is None else ""
        raise ModelError(f"{error}{hint}") from error


def result_path(file: Generations, key: Sequence[str | None], output: Path | None) -> Path:
    """Return the path of a result; results with different keys have different names."""
    if output is not None and output.suffix == ".json":
        return output
    short = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    return (output or file.path.parent) / f"{file.name}.{short}{ENDING}"


def key_of(result: Mapping[str, Any]) -> list[str | None]:
    """Return the key of a result: what was scored, hashes of features and reference, judge, limit."""
    hashes = [(result[part] or {}).get("hash") for part in ("features", "reference")]
    return [result["scored"], *hashes, (result["judge"] or {}).get("model"), *limit_key(result.get("limit"))]


def limit_key(limit: int | None) -> list[str]:
    """Return the part of a key for a limit; empty without one."""
    return [] if limit is None else [f"first {limit}"]


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
            corpus,
            options.split,
            length=options.length or longest,
            generated=files,
            rule=options.rule,
            skip=options.skip,
            count=options.count or COUNT,
            allow_none=options.no_mauve,
        )
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


@dataclass(frozen=True)
class Scoring:
    """The models and references that all files of generations are scored with.

    Args:
        files: The generations, limited to their first texts if the user asked for that.
        corpus: The corpus, if the reference is one.
        shared: The common reference; `None` if asked parts are compared with the original ones.
        lm: The judge, if any.
        judge: Name of the judge.
        seeds: Number of seeds of k-means.
        progress: See `score_samples`.
        featurizer: The model of features, if MAUVE is computed.
        cached: The comparison of the file that was read last; those of all files would not fit into memory.
    """

    files: Sequence[Generations]
    corpus: Corpus | None
    shared: Reference | None
    lm: LanguageModel | None
    judge: str | None
    seeds: int
    progress: Bars
    featurizer: Featurizer | None = None
    cached: dict[Path, Comparison] = field(default_factory=dict)

    @classmethod
    def load(cls, files: Sequence[Generations], reference: Path, options: ScoringOptions, progress: Bars) -> Scoring:
        """Open the reference, load the models, and check every file before the first is scored."""
        if not options.no_mauve:
            package()
        if options.limit is not None:
            prompts = Corpus.open(reference)
            files = [limit_generations(file, prompts, options.limit) for file in files]
        corpus, shared = open_reference(reference, files, options)
        lm = None if options.judge is None else load_judge(options.judge, options.device)
        scoring = cls(files, corpus, shared, lm, options.judge, options.seeds or SEEDS, progress)
        for file in files:
            scoring.check(file, not options.no_mauve)
        if options.no_mauve:
            return scoring
        return replace(scoring, featurizer=load_featurizer(options.features, options.device))

    def comparison(self, file: Generations) -> Comparison:
        """Return the samples of a file and what they are compared with. The last one is cached."""
        if file.path not in self.cached:
            comparison = self.read(file)
            self.cached.clear()
            self.cached[file.path] = comparison
        return self.cached[file.path]

    def read(self, file: Generations) -> Comparison:
        """Return the comparison of a file, without the cache."""
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

    @property
    def scored(self) -> str:
        """The part of each text that MAUVE reads."""
        return "asked part" if self.shared is None else "whole text"

    def key(self, file: Generations) -> list[str | None]:
        """Return the key that the result of a file will have, see `key_of`."""
        features = None if self.featurizer is None else self.featurizer.hash
        return [self.scored, features, self.comparison(file).reference.hash, self.judge, *limit_key(file.limit)]

    @cached_property
    def judge_hash(self) -> str | None:
        """Hash of everything that determines the judge's scores; `None` without a judge."""
        if self.lm is None:
            return None
        method = None if self.lm.metadata is None else self.lm.metadata.method
        content = [weights_hash(self.lm.model), tokenizer_hash(self.lm.tokenizer), method, self.lm.bos, self.lm.mask]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def existing(self, file: Generations, path: Path) -> dict[str, Any] | None:
        """Return an existing result if it has the same samples, key, seeds and judge.

        The judge's hash is compared because its name, which is in the key, stays the same if it is trained again.
        """
        seeds = None if self.featurizer is None else list(range(self.seeds))
        if (result := object_of_kind(path, "mauve")) is None:
            return None
        try:
            seeds_and_judge = [(result["mauve"] or {}).get("seeds"), (result["judge"] or {}).get("hash")]
            key = [result["hash"], *key_of(result), *seeds_and_judge]
        except (KeyError, AttributeError):  # written by another version, or edited
            return None
        return result if key == [file.hash, *self.key(file), seeds, self.judge_hash] else None

    def check(self, file: Generations, mauve: bool) -> None:
        """Check that a file can be scored: enough texts for MAUVE, a suitable judge.

        Raises:
            InputError: It cannot; the message starts with the path of the file.
        """
        comparison = self.comparison(file)
        try:
            if mauve:
                check_counts(len(comparison.texts), len(comparison.reference.texts))
            if self.lm is not None:
                check_judge(self.lm, self.same_tokens(file), max(len(sample.tokens) for sample in comparison.samples))
        except InputError as error:
            raise InputError(f"{file.path}: {error}") from error

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

    def result(self, file: Generations) -> dict[str, Any]:
        """Return the result of a file: MAUVE, the other metrics, the judge's scores, and notes."""
        comparison, method = self.comparison(file), METHODS.get(file.record["method"])
        samples, original = comparison.samples, comparison.original
        texts, reference = comparison.texts, comparison.reference
        mauve, original_mauve, features, truncated = None, None, None, 0
        if self.featurizer is not None:
            reference_features = self.features(file, "reference", reference.texts)
            generated_features = self.features(file, "generated", texts)
            mauve = scores(generated_features, reference_features, range(self.seeds))
            if original is not None and self.shared is not None and len(original) >= MIN_TEXTS:
                original_features = self.features(file, "original", [sample.text for sample in original])
                original_mauve = scores(original_features, reference_features, range(self.seeds))
            features = self.featurizer.describe()
            truncated = self.featurizer.count_truncated([*texts, *reference.texts])
        judge = None if self.lm is None else self.judge_file(file, comparison)
        notes = []
        if mauve is not None and min(len(texts), len(reference.texts)) < FEW:
            by_document = len(reference.texts) < FEW and reference.about.get("rule") == "documents"
            remedy = " The rule windows may find more reference texts." if by_document else ""
            notes.append(f"fewer than {FEW} texts on one side: MAUVE is mostly noise.{remedy}")
        if mauve is not None and len(texts) + comparison.empty < len(samples):
            notes.append("there are several samples per text: MAUVE uses the first of each.")
        if reference.about.get("overlaps_prompts"):
            notes.append("the reference contains texts that prompts were taken from.")
        if features is not None and truncated:
            notes.append(f"texts truncated to {features['length']:,} tokens: {truncated}.")
        if comparison.empty:
            notes.append(f"empty texts, excluded from MAUVE: {comparison.empty}.")
        if judge is not None and judge["cut"]:
            notes.append(f"the judge has too few positions: the last {judge['cut']:,} tokens of texts are not judged.")
        return {
            "kind": "mauve",
            "name": file.name,
            "generated": str(file.path),
            "hash": file.hash,
            "record": {key: file.record.get(key) for key in RECORD_KEYS},
            "scored": self.scored,
            "texts": len(texts),
            "limit": file.limit,
            "empty": comparison.empty,
            "mauve": mauve,
            "original": original_mauve,
            "features": features,
            "reference": reference.as_dict(),
            "companions": {
                "generated": companions(samples),
                "original": None if original is None else companions(original),
            },
            "perplexity": None if method is not None and method.bound else own_perplexity(samples),
            "judge": judge,
            "notes": notes,
        }

    def same_tokens(self, file: Generations) -> bool:
        """Return whether the judge has the tokenizer of the samples."""
        assert self.lm is not None
        return tokenizer_hash(self.lm.tokenizer) == str(file.record["tokenizer_hash"])

    def judge_file(self, file: Generations, comparison: Comparison) -> dict[str, Any]:
        """Return the judge's scores of the samples and, if they are known, of the original texts."""
        assert self.lm is not None
        same, original = self.same_tokens(file), None
        if comparison.original is not None and same:
            with self.progress(f"{file.name}, original texts judged") as progress:
                original = judge_samples(self.lm, comparison.original, same, progress)
        judge = {"model": self.judge, "hash": self.judge_hash}
        with self.progress(f"{file.name}, generated texts judged") as progress:
            return {**judge, **judge_samples(self.lm, comparison.samples, same, progress), "original": original}

    @property
    def hardware(self) -> str:
        """Name of the GPU, or the CPU architecture."""
        networks = (self.featurizer and self.featurizer.network, self.lm and self.lm.model)
        on_gpu = any(network.device.type == "cuda" for network in networks if network)
        return torch.cuda.get_device_name() if on_gpu else platform.machine()
