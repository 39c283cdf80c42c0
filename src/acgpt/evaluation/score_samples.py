"""Scores of generated texts: MAUVE, and what else is measured of them. `acgpt.score_samples` and `acgpt mauve` do this.

For each NAME.jsonl of `acgpt.generate` a result is written:

    NAME.KEY.mauve.json      KEY stands for what was scored, features, reference, judge and limit

docs/how-to/score-generations.md says what is measured.
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
from acgpt.common.provenance import versions, when
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.features import LENGTH, Featurizer
from acgpt.evaluation.generations import Generation, Generations, find_generations, object_of_kind
from acgpt.evaluation.mauve import FEW, FEWEST, PAPER, check_counts, package, scores
from acgpt.evaluation.options import ScoringOptions, check_together
from acgpt.evaluation.reference import COUNT, Reference, limited, of_corpus, of_file, originals
from acgpt.evaluation.text_metrics import check_judge, companions, firsts, judged, own_perplexity
from acgpt.methods import METHODS
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import cache_folder, is_default, load
from acgpt.models.metadata import tokenizer_hash, weights_hash

Progress = Callable[..., object]  # called with how many texts are done, of how many
Bars = Callable[
    [str], AbstractContextManager[Progress]
]  # makes, for some work, a context in which `Progress` is called

SEEDS = 5
INDEX = "scores"  # the kind of file that names all results
ENDING = ".mauve.json"  # of results
KEPT = ("method", "options", "model", "adapter", "mode", "r_max", "set", "sampling", "samples", "tokenizer_hash")


@keywords(ScoringOptions)
def score_samples(
    generated: str | Path | Sequence[str | Path],
    reference: str | Path,
    *,
    progress: Bars = lambda work: nullcontext(lambda *_: None),
    note: Callable[[str], object] = lambda text: None,
    done: Callable[[Path, Mapping[str, Any]], object] = lambda path, result: None,
    **keywords: Any,
) -> dict[Path, dict[str, Any]]:
    """Measure how near generated texts are to real ones: MAUVE, and what else can be measured.

        results = acgpt.score_samples("samples/mine", "data/mine", split="test", features="default")
        for path, result in results.items():
            print(result["name"], result["mauve"]["mean"], result["companions"]["generated"]["repetition"])

    Args:
        generated: A NAME.jsonl that `acgpt.generate` has written, with its NAME.json; or a folder of them; or several.
        reference: What they are compared with: a folder that `acgpt.prepare` made, or a .jsonl or .txt of texts.
        **keywords: See `ScoringOptions`.
        progress: Makes, for some work, a context in which `Progress` is called.
        note: Called with where features are kept, if `features_only`.
        done: Called with each result and its path, once it is written.

    Returns:
        The result of each file by the path that it was written to, with the keys that `acgpt mauve --help` lists.
        None with `features_only`.

    Raises:
        InputError: Something that the user can mend.
        OutputError: A result cannot be written.
    """
    options, reference = ScoringOptions(**keywords), Path(reference)
    places = [generated] if isinstance(generated, str | Path) else generated
    output, index = (None if path is None else Path(path) for path in (options.output, options.index))
    check_together(options, reference)
    found = list(find_generations([Path(place) for place in places], allow_none=index is not None))
    check_output(found, output)
    check_index(index, output)
    if not found and index is not None:
        write_index(index, {})
        return {}
    scoring = Scoring.of(found, reference, options, progress)
    results: dict[Path, dict[str, Any]] = {}
    for file in scoring.files:
        start = time.perf_counter()
        if options.features_only:
            scoring.keep_features(file)
            note(f"{file.path}: its features are kept in {cache_folder() / 'features'}")
            continue
        path = result_path(file, scoring.key(file), output)
        result = scoring.existing(file, path) if options.resume else None
        if result is None:
            result = scoring.result(file)
            seconds = round(time.perf_counter() - start, 3)
            result |= {"versions": versions(), "hardware": scoring.hardware, "seconds": seconds, **when()}
            write(path, result)
        results[path] = result
        done(path, result)
    if index is not None:
        write_index(index, results)
    return results


def check_output(found: Sequence[Generations], output: Path | None) -> None:
    """Find out before anything is scored that results cannot be written, or would take the place of something else."""
    names = [each.name for each in found]
    if output is not None and output.suffix == ".json":
        if len(found) > 1:
            raise InputError(
                f"{output} is one file, and there are {len(found)} generations: name a folder with `output`."
            )
        if output.is_file() and object_of_kind(output, "mauve") is None:  # NAME.json beside NAME.jsonl, say
            raise InputError(f"{output} is no result of acgpt mauve: move it elsewhere, or name another with `output`.")
    elif output is not None and len(set(names)) < len(names):
        raise InputError(f"two of the generations have the same name, and would both be written into {output}.")
    for each in found:
        check_writable(result_path(each, (), output))


def check_index(path: Path | None, output: Path | None) -> None:
    """Refuse an index that cannot be written, or would take the place of a result or of another's file."""
    check_writable(path)
    if path is None:
        return
    if path.name.endswith(ENDING) or (output is not None and path.resolve() == output.resolve()):
        raise InputError(f"{path} is where a result would be: name another file with `index`, which ends in .json.")
    if path.exists() and object_of_kind(path, INDEX) is None:
        raise InputError(f"{path} is no index of scores: move it elsewhere, or name another with `index`.")


def write_index(path: Path, results: Mapping[Path, Mapping[str, Any]]) -> None:
    """Write the file that names all results."""
    found = [
        {"generated": each["generated"], "mode": each["record"]["mode"], "scored": each["scored"], "result": str(file)}
        for file, each in results.items()
    ]
    write(path, {"kind": INDEX, "results": found, **when()})


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all."""
    with disk_errors(path):
        write_json(path, finite(result), indent=1, allow_nan=False)


def load_judge(name: str, device: str) -> LanguageModel:
    """Load the judge; the embedded model is one without its adapter, a causal one."""
    try:
        return load(name, False if is_default(name) else None, device)
    except ModelError as error:
        raise ModelError(f"the judge cannot be loaded: {error}") from error


def load_featurizer(name: str | None, device: str) -> Featurizer:
    """Load the model of features, the paper's by default."""
    try:
        return Featurizer.load(name or PAPER, device)
    except ModelError as error:
        hint = " `features=default` takes the embedded model, with no download." if name is None else ""
        raise ModelError(f"{error}{hint}") from error


def result_path(file: Generations, key: Sequence[str | None], output: Path | None) -> Path:
    """Where a result goes: what was measured in another way has another name."""
    if output is not None and output.suffix == ".json":
        return output
    short = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    return (output or file.path.parent) / f"{file.name}.{short}{ENDING}"


def key_of(result: Mapping[str, Any]) -> list[str | None]:
    """What was scored, by which features, against what, and who judged it."""
    hashes = [(result[part] or {}).get("hash") for part in ("features", "reference")]
    return [result["scored"], *hashes, (result["judge"] or {}).get("model"), *limit_key(result.get("limit"))]


def limit_key(limit: int | None) -> list[str]:
    """The part of a key that names a limit; none without one."""
    return [] if limit is None else [f"first {limit}"]


def open_reference(
    path: Path, found: Sequence[Generations], options: ScoringOptions
) -> tuple[Corpus | None, Reference | None]:
    """The corpus, if one was named, and the texts that all are compared with; none if each file has its own."""
    if path.is_dir():
        corpus = Corpus.open(path)
        if options.asked_only:
            return corpus, None
        longest = min(LENGTH, max(each.record["set"]["length"] for each in found))
        return corpus, of_corpus(
            corpus,
            options.split,
            length=options.length or longest,
            generated=found,
            rule=options.rule,
            skip=options.skip,
            count=options.count or COUNT,
            allow_none=options.no_mauve,
        )
    if options.asked_only:
        raise InputError(f"`asked_only` compares with what stood there: name the corpus of the prompts, not {path}.")
    return None, of_file(path, options.field or "text", options.count or COUNT)


@dataclass(frozen=True)
class Sides:
    """What one file is measured by.

    Args:
        samples: All of them.
        original: What stood in the corpus where something was drawn; `None` if it is another corpus.
        texts: What MAUVE reads of the first sample of each text, none of them empty.
        empty: How many are.
        reference: What they are compared with.
    """

    samples: list[Generation]
    original: list[Generation] | None
    texts: list[str]
    empty: int
    reference: Reference


@dataclass(frozen=True)
class Scoring:
    """What every file of generations is measured with.

    Args:
        files: The files, limited to their first texts if that was asked for.
        corpus: Of the reference, if it is one.
        shared: The texts of reference; `None`: what was asked is compared with what stood there.
        lm: The judge, if there is one.
        judge: Its name.
        seeds: How many of k-means.
        progress: As in `score_samples`.
        featurizer: For MAUVE, if it is wanted.
        cached: The sides of the file that was read last: of all files they would be too much for memory.
    """

    files: Sequence[Generations]
    corpus: Corpus | None
    shared: Reference | None
    lm: LanguageModel | None
    judge: str | None
    seeds: int
    progress: Bars
    featurizer: Featurizer | None = None
    cached: dict[tuple[Path, int | None], Sides] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Sequence[Generations], reference: Path, options: ScoringOptions, progress: Bars) -> Scoring:
        """Open the reference and load the models; what is wrong with any file is found before hours are spent."""
        if not (options.no_mauve or options.features_only):
            package()
        if options.limit is not None:
            prompts = Corpus.open(reference)
            found = [limited(each, prompts, options.limit) for each in found]
        corpus, shared = open_reference(reference, found, options)
        lm = None if options.judge is None else load_judge(options.judge, options.device)
        scoring = cls(found, corpus, shared, lm, options.judge, options.seeds or SEEDS, progress)
        for each in found:
            scoring.check(each, not options.no_mauve)
        if options.no_mauve:
            return scoring
        return replace(scoring, featurizer=load_featurizer(options.features, options.device))

    def sides(self, each: Generations) -> Sides:
        """The samples of one file, and what they are compared with; read once, if no other is asked for in between."""
        key = (each.path, each.limit)
        if key not in self.cached:
            found = self.read(each)
            self.cached.clear()
            self.cached[key] = found
        return self.cached[key]

    def read(self, each: Generations) -> Sides:
        """As `sides`, from the file."""
        samples, original, of = each.samples, None, each.record["set"]
        if self.corpus is not None and (self.shared is None or of.get("corpus_hash") == self.corpus.hash):
            original = originals(each, self.corpus)
        first = firsts(samples)
        if self.shared is not None:
            written, reference = [sample.text for sample in first], self.shared
        else:
            assert self.corpus is not None and original is not None
            written = ["\n".join(sample.fills) for sample in first]
            real = ["\n".join(sample.fills) for sample in original]
            about = {"corpus": str(self.corpus.folder), "corpus_hash": self.corpus.hash, "split": of["split"]}
            reference = Reference([text for text in real if text], {**about, "rule": "what stood where it was asked"})
        texts = [text for text in written if text]
        return Sides(samples, original, texts, len(written) - len(texts), reference)

    @property
    def scored(self) -> str:
        """Of each text, what MAUVE reads."""
        return "asked part" if self.shared is None else "whole text"

    def key(self, each: Generations) -> list[str | None]:
        """As `key_of` a result, before there is one."""
        features = None if self.featurizer is None else self.featurizer.hash
        return [self.scored, features, self.sides(each).reference.hash, self.judge, *limit_key(each.limit)]

    @cached_property
    def judge_hash(self) -> str | None:
        """Of all that decides what the judge says, if there is one."""
        if self.lm is None:
            return None
        method = None if self.lm.metadata is None else self.lm.metadata.method
        content = [weights_hash(self.lm.model), tokenizer_hash(self.lm.tokenizer), method, self.lm.bos, self.lm.mask]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def existing(self, each: Generations, path: Path) -> dict[str, Any] | None:
        """The result that is there, if it is of these very samples, scored in this way by as many seeds and this judge.

        A judge's name, as it is part of a result's, does not say whether it has been trained again since.
        """
        seeds = None if self.featurizer is None else list(range(self.seeds))
        if (found := object_of_kind(path, "mauve")) is None:
            return None
        try:
            seeds_and_judge = [(found["mauve"] or {}).get("seeds"), (found["judge"] or {}).get("hash")]
            own = [found["hash"], *key_of(found), *seeds_and_judge]
        except (KeyError, AttributeError):  # of another version, or somebody has changed it
            return None
        return found if own == [each.hash, *self.key(each), seeds, self.judge_hash] else None

    def check(self, each: Generations, mauve: bool) -> None:
        """Can all be measured?"""
        sides = self.sides(each)
        try:
            if mauve:
                check_counts(len(sides.texts), len(sides.reference.texts))
            if self.lm is not None:
                check_judge(self.lm, self.same_tokens(each), max(len(sample.tokens) for sample in sides.samples))
        except InputError as error:
            raise InputError(f"{each.path}: {error}") from error

    def features(self, each: Generations, side: str, texts: Sequence[str], longer: Sequence[str] = ()) -> np.ndarray:
        """The features of one side of a comparison, with a progress bar that says which; `longer` as in `features`."""
        assert self.featurizer is not None
        with self.progress(f"{each.name}, features of the {side} texts") as progress:
            return self.featurizer.features(texts, progress, longer=longer)

    def keep_features(self, each: Generations) -> None:
        """Have the features in the cache."""
        sides = self.sides(each)
        original = sides.original if self.shared is not None else None
        texts = {"generated": sides.texts, "reference": sides.reference.texts}
        for side, found in (texts | {"original": [sample.text for sample in original or ()]}).items():
            if found:
                self.features(each, side, found)

    def result(self, each: Generations) -> dict[str, Any]:
        """All that is measured of one file."""
        sides, method = self.sides(each), METHODS.get(each.record["method"])
        samples, original, texts, reference = sides.samples, sides.original, sides.texts, sides.reference
        found, real, features, cut = None, None, None, 0
        if self.featurizer is not None:
            self.featurizer.used.clear()
            whole = sides if each.limit is None else self.sides(replace(each, limit=None))  # may be in the cache
            theirs = self.features(each, "reference", reference.texts, whole.reference.texts)
            found = scores(self.features(each, "generated", texts, whole.texts), theirs, range(self.seeds))
            if original is not None and self.shared is not None and len(original) >= FEWEST:
                real_texts, more = ([sample.text for sample in side.original or ()] for side in (sides, whole))
                real = scores(self.features(each, "original", real_texts, more), theirs, range(self.seeds))
            features = {**self.featurizer.about(), "products": ", ".join(sorted(self.featurizer.used))}
            cut = self.featurizer.cut([*sides.texts, *sides.reference.texts])
        judge = None if self.lm is None else self.judgement(each, sides)
        notes = []
        if found is not None and min(len(texts), len(reference.texts)) < FEW:
            by_document = len(reference.texts) < FEW and reference.about.get("rule") == "documents"
            remedy = " The rule windows may find more to compare with." if by_document else ""
            notes.append(f"fewer than {FEW} texts on one side: MAUVE is mostly chance.{remedy}")
        if found is not None and len(texts) + sides.empty < len(samples):
            notes.append("there are several samples of a text: MAUVE is of the first of each.")
        if reference.about.get("overlaps_prompts"):
            notes.append("the reference holds texts that prompts were taken from.")
        if features is not None and cut:
            notes.append(f"texts of which no more than the first {features['length']:,} tokens are read: {cut}.")
        if sides.empty:
            notes.append(f"texts that are empty, and left out of MAUVE: {sides.empty}.")
        if judge is not None and judge["cut"]:
            notes.append(f"the judge has too few positions: the last {judge['cut']:,} tokens of texts are not judged.")
        return {
            "kind": "mauve",
            "name": each.name,
            "generated": str(each.path),
            "hash": each.hash,
            "record": {key: each.record.get(key) for key in KEPT},
            "scored": self.scored,
            "texts": len(texts),
            "limit": each.limit,
            "empty": sides.empty,
            "mauve": found,
            "original": real,
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

    def same_tokens(self, each: Generations) -> bool:
        """Has the judge the tokenizer of the samples?"""
        assert self.lm is not None
        return tokenizer_hash(self.lm.tokenizer) == str(each.record["tokenizer_hash"])

    def judgement(self, each: Generations, sides: Sides) -> dict[str, Any]:
        """What the judge says of the samples, and of the original text where that is known."""
        assert self.lm is not None
        same, real = self.same_tokens(each), None
        if sides.original is not None and same:
            with self.progress(f"{each.name}, original texts judged") as progress:
                real = judged(self.lm, sides.original, same, progress)
        about = {"model": self.judge, "hash": self.judge_hash}
        with self.progress(f"{each.name}, generated texts judged") as progress:
            return {**about, **judged(self.lm, sides.samples, same, progress), "original": real}

    @property
    def hardware(self) -> str:
        """What it was computed on."""
        networks = (self.featurizer and self.featurizer.network, self.lm and self.lm.model)
        on_gpu = any(network.device.type == "cuda" for network in networks if network)
        return torch.cuda.get_device_name() if on_gpu else platform.machine()
