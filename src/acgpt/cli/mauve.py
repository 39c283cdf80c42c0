"""`acgpt mauve`: how near generated texts are to real ones, and what else can be measured of them."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acgpt.cli.ui import NO_ANSWER, DeviceOption, bar, emit, finite, hush, option
from acgpt.common.files import check_writable
from acgpt.common.provenance import versions, when
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.mauve import PAPER

if TYPE_CHECKING:
    import numpy as np

    from acgpt.data.corpus import Corpus
    from acgpt.evaluation.features import Featurizer
    from acgpt.evaluation.generations import Generation, Generations
    from acgpt.evaluation.reference import Reference
    from acgpt.models.language_model import LanguageModel


COUNT, SEEDS = 1000, 5
INDEX = "scores"  # the kind of file that says what there is
ENDING = ".mauve.json"  # of results
KEPT = ("method", "options", "model", "adapter", "mode", "r_max", "set", "sampling", "samples", "tokenizer_hash")

HELP = {
    "generated": "A NAME.jsonl that acgpt generate has written, with its NAME.json; or a folder of them; or several.",
    "reference": "What they are compared with: a folder that acgpt prepare made, or a .jsonl or .txt of texts.",
    "split": "Of the corpus. Default: test if there is one, else validation.",
    "rule": "documents: those long enough, cut; windows: all of the split. Default: documents where it has them.",
    "length": "Tokens of a text of the corpus. Default: as many as the generated texts have, at most 2048.",
    "skip": "Leave out so many tokens of the split. Default: the region that the prompts are from.",
    "count": "At most so many texts of reference. Default: 1000.",
    "field": "Of each line of a .jsonl. Default: text.",
    "features": "The model whose hidden states are compared: a folder, a hub id, or default, the embedded one. "
    f"Default: {PAPER}.",
    "seeds": "So many times k-means, each from another seed, 0 and up. Default: 5.",
    "limit": "Score the first texts only, as if no more had been drawn: to compare with a file of fewer.",
    "asked": "Score what was drawn alone, against what stood there originally; the corpus is that of the prompts.",
    "judge": "A model that says how likely it finds the texts: as acgpt evaluate takes it, with the same tokenizer, or "
    "a causal one.",
    "no_mauve": "Everything but MAUVE, which needs mauve-text and a model of features.",
    "features_only": "Compute the features and keep them in the cache, for a machine that has mauve-text; no more.",
    "json": "For programs: one JSON object in a line for each of GENERATED, with the keys named above.",
    "output": "Where the result goes: a .json for one of GENERATED (.mauve.json, if acgpt report is to find it), a "
    "folder for several. Default: beside it.",
    "resume": "Leave as it is what is there already of the same files, scored in the same way by the same judge.",
    "index": "A .json that is written last and names all results; where nothing could be drawn, none, and no error.",
}


def mauve(
    generated: Annotated[list[Path], typer.Argument(metavar="GENERATED", show_default=False, help=HELP["generated"])],
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", show_default=False, help=HELP["reference"])],
    split: Annotated[str | None, option("--split", metavar="NAME", help=HELP["split"])] = None,
    rule: Annotated[str | None, option("--rule", metavar="NAME", help=HELP["rule"])] = None,
    length: Annotated[int | None, option("--length", metavar="T", min=1, help=HELP["length"])] = None,
    skip: Annotated[int | None, option("--skip", metavar="N", min=0, help=HELP["skip"])] = None,
    count: Annotated[int | None, option("--count", metavar="N", min=1, help=HELP["count"])] = None,
    field: Annotated[str | None, option("--field", metavar="NAME", help=HELP["field"])] = None,
    features: Annotated[str | None, option("--features", metavar="MODEL", help=HELP["features"])] = None,
    seeds: Annotated[int | None, option("--seeds", metavar="N", min=1, help=HELP["seeds"])] = None,
    limit: Annotated[int | None, option("--limit", metavar="N", min=1, help=HELP["limit"])] = None,
    asked_only: Annotated[bool, option("--asked-only", help=HELP["asked"])] = False,
    judge: Annotated[str | None, option("--judge", metavar="MODEL", help=HELP["judge"])] = None,
    no_mauve: Annotated[bool, option("--no-mauve", help=HELP["no_mauve"])] = False,
    features_only: Annotated[bool, option("--features-only", help=HELP["features_only"])] = False,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, option("--json", help=HELP["json"])] = False,
    output: Annotated[Path | None, option("--output", "-o", metavar="PATH", help=HELP["output"])] = None,
    resume: Annotated[bool, option("--resume", help=HELP["resume"])] = False,
    index: Annotated[Path | None, option("--index", metavar="FILE", help=HELP["index"])] = None,
) -> None:
    r"""How near generated texts are to real ones: MAUVE, and what else is measured.

    acgpt mauve samples/ac/training.jsonl data/wikitext-103 --split test
    acgpt mauve samples/ac data/wikitext-103 --features default     (offline)
    acgpt mauve samples/ac data/wikitext-103 --asked-only
    acgpt mauve samples/ac data/wikitext-103 --no-mauve --judge runs/ac/model

    The result is NAME.KEY.mauve.json beside each NAME.jsonl, where KEY stands for
    features, reference and judge, so that none replaces another; acgpt report
    reads it. MAUVE takes the package mauve-text, the extra "mauve". docs/mauve.md
    says what is measured.

    Keys of --json:
      kind, name, generated, hash (of the file), record (what generated it),
      scored ("whole text" or "asked part"), texts (the first sample of each),
      limit (null or how many of its first texts were scored), empty (texts left
      out),
      mauve: null or mean, std, scores, smoothed, seeds, clusters, settings,
             mauve_text (its version)
      original: null or likewise, of the original texts, where the corpus is that
                of the prompts: what could be reached
      features: null or model, hash, dimensions, length, products (fp32 or tf32:
                the precision of those that were used, of a CPU or a GPU)
      reference: hash, texts (with --no-mauve 0, where the corpus leaves none),
                 and corpus, corpus_hash, split, rule, length, skip,
                 overlaps_prompts, or file
      companions: generated and, where the corpus is that of the prompts,
                  original: distinct_1, distinct_2, distinct_3, repetition, loops
      perplexity (of what was drawn, under the model itself; null if that says
                  only a bound),
      judge: null or model, hash (of its weights, its tokenizer and how it is
             asked), measures, bound, perplexity, log_prob, tokens, cut (tokens
             that it had no positions for), and of the original text, where it is
             known: original
      notes, versions, hardware, seconds, date, command
    """
    reference_options = {"split": split, "rule": rule, "length": length, "skip": skip}
    if asked_only:
        refuse({**reference_options, "count": count, "field": field, "no-mauve": no_mauve}, "with --asked-only")
    if no_mauve:
        refuse({"features": features, "seeds": seeds, "features-only": features_only}, "with --no-mauve")
    if features_only:
        unused = {"seeds": seeds, "judge": judge, "json": as_json, "output": output, "resume": resume, "index": index}
        refuse(unused, "with --features-only")
    if reference.is_dir():
        refuse({"field": field}, "with a corpus")
    elif reference.is_file():
        refuse({**reference_options, "limit": limit}, "with a file of texts")
    from acgpt.evaluation.generations import find_generations

    found = list(find_generations(generated, allow_none=index is not None))
    check_output(found, output)
    check_index(index, output)
    if not found and index is not None:
        write_index(index, {})
        return
    hush()
    from acgpt.data.corpus import Corpus
    from acgpt.evaluation.features import LENGTH, Featurizer
    from acgpt.evaluation.mauve import package
    from acgpt.evaluation.reference import limited
    from acgpt.models.loading import cache_folder

    if not (no_mauve or features_only):
        package()
    if limit is not None:
        prompts = Corpus.open(reference)
        found = [limited(each, prompts, limit) for each in found]
    longest = min(LENGTH, max(each.record["set"]["length"] for each in found))
    corpus, shared = references(
        reference, found, split=split, rule=rule, length=length or longest, skip=skip, count=count or COUNT,
        field=field or "text", asked_only=asked_only, allow_none=no_mauve,
    )  # fmt: skip
    work = Work(corpus, shared, None if judge is None else load_judge(judge, device), judge, seeds or SEEDS)
    for each in found:  # what is wrong with any of them is found before hours are spent
        work.check(each, not no_mauve)
    if not no_mauve:
        try:
            work = replace(work, featurizer=Featurizer.load(features or PAPER, device))
        except ModelError as error:
            hint = " --features default takes the embedded model, with no download." if features is None else ""
            raise ModelError(f"{error}{hint}") from error
    results: dict[Path, Mapping[str, Any]] = {}
    for each in found:
        start = time.perf_counter()
        if features_only:
            work.keep_features(each)
            print(f"{each.path}: its features are kept in {cache_folder() / 'features'}", file=sys.stderr)
            continue
        path = place(each, work.way(each), output)
        result = work.there(each, path) if resume else None
        if result is None:
            result = work.result(each)
            result |= {
                "versions": versions(),
                "hardware": hardware(work),
                "seconds": round(time.perf_counter() - start, 3),
                **when(),
            }
            write(path, result)
        results[path] = result
        if as_json:
            emit(result)
        else:
            print_result(result, path)
    if index is not None:
        write_index(index, results)


def refuse(options: Mapping[str, object], where: str) -> None:
    """Refuse options that were given where they can do nothing."""
    given = [f"--{name}" for name, value in options.items() if value is not None and value is not False]
    if given:
        raise InputError(f"{', '.join(given)} can do nothing {where}: leave one or the other out.")


def check_output(found: Sequence[Generations], output: Path | None) -> None:
    """Find out before anything is scored that results cannot be written, or would take the place of something else."""
    from acgpt.evaluation.generations import object_of_kind

    names = [each.name for each in found]
    if output is not None and output.suffix == ".json":
        if len(found) > 1:
            raise InputError(f"{output} is one file, and there are {len(found)} generations: name a folder with -o.")
        if output.is_file() and object_of_kind(output, "mauve") is None:  # NAME.json beside NAME.jsonl, say
            raise InputError(f"{output} is no result of acgpt mauve: move it elsewhere, or name another with -o.")
    elif output is not None and len(set(names)) < len(names):
        raise InputError(f"two of the generations have the same name, and would both be written into {output}.")
    for each in found:
        check_writable(place(each, (), output))


def check_index(path: Path | None, output: Path | None) -> None:
    """Refuse what cannot be written, and to write over another's file or a result."""
    from acgpt.evaluation.generations import object_of_kind

    check_writable(path)
    if path is None:
        return
    if path.name.endswith(ENDING) or (output is not None and path.resolve() == output.resolve()):
        raise InputError(f"{path} is where a result would be: name another file with --index, which ends in .json.")
    if path.exists() and object_of_kind(path, INDEX) is None:
        raise InputError(f"{path} is no index of scores: move it elsewhere, or name another with --index.")


def write_index(path: Path, results: Mapping[Path, Mapping[str, Any]]) -> None:
    """What there is, once all of it is there."""
    found = [
        {"generated": each["generated"], "mode": each["record"]["mode"], "scored": each["scored"], "result": str(file)}
        for file, each in results.items()
    ]
    write(path, {"kind": INDEX, "results": found, **when()})


def load_judge(name: str, device: str) -> LanguageModel:
    """The judge; the embedded model is one without its adapter, a causal one."""
    from acgpt.models.loading import is_default, load

    try:
        return load(name, False if is_default(name) else None, device)
    except ModelError as error:
        raise ModelError(f"the judge cannot be loaded: {error}") from error


def place(each: Generations, way: Sequence[str | None], output: Path | None) -> Path:
    """Where a result goes: what was measured in another way has another name."""
    if output is not None and output.suffix == ".json":
        return output
    key = hashlib.sha256(json.dumps(way).encode()).hexdigest()[:8]
    return (output or each.path.parent) / f"{each.name}.{key}{ENDING}"


def way_of(result: Mapping[str, Any]) -> list[str | None]:
    """What was scored, by which features, against what, and who judged it."""
    hashes = [(result[part] or {}).get("hash") for part in ("features", "reference")]
    return [result["scored"], *hashes, (result["judge"] or {}).get("model"), *first(result.get("limit"))]


def first(limit: int | None) -> list[str]:
    """A limit, where there is one."""
    return [] if limit is None else [f"first {limit}"]


def references(
    place: Path, found: Sequence[Generations], *, split: str | None, rule: str | None, length: int, skip: int | None,
    count: int, field: str, asked_only: bool, allow_none: bool,
) -> tuple[Corpus | None, Reference | None]:  # fmt: skip
    """The corpus, if one was named, and the texts that all are compared with; none if each has its own."""
    from acgpt.data.corpus import Corpus
    from acgpt.evaluation.reference import of_corpus, of_file

    if place.is_dir():
        corpus = Corpus.open(place)
        if asked_only:
            return corpus, None
        how: dict[str, Any] = {"length": length, "generated": found, "rule": rule, "skip": skip, "count": count}
        return corpus, of_corpus(corpus, split, **how, allow_none=allow_none)
    if asked_only:
        raise InputError(f"--asked-only compares with what stood there: name the corpus of the prompts, not {place}.")
    return None, of_file(place, field, count)


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
class Work:
    """What every one of the generations is measured with.

    Args:
        corpus: Of the reference, if it is one.
        shared: The texts of reference; `None`: what was asked is compared with what stood there.
        lm: The judge, if there is one.
        judge: Its name.
        seeds: How many of k-means.
        featurizer: For MAUVE, if it is wanted.
        kept: The sides of the file that was read last: of all files they would be too much for memory.
    """

    corpus: Corpus | None
    shared: Reference | None
    lm: LanguageModel | None
    judge: str | None
    seeds: int
    featurizer: Featurizer | None = None
    kept: dict[tuple[Path, int | None], Sides] = field(default_factory=dict)

    def sides(self, each: Generations) -> Sides:
        """The samples of one file, and what they are compared with; read once, if no other is asked for in between."""
        key = (each.path, each.limit)
        if key not in self.kept:
            found = self.read(each)
            self.kept.clear()
            self.kept[key] = found
        return self.kept[key]

    def read(self, each: Generations) -> Sides:
        """As `sides`, from the file."""
        from acgpt.evaluation.reference import Reference, originals
        from acgpt.evaluation.text_metrics import firsts

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

    def way(self, each: Generations) -> list[str | None]:
        """As `way_of` a result, before there is one."""
        features = None if self.featurizer is None else self.featurizer.hash
        return [self.scored, features, self.sides(each).reference.hash, self.judge, *first(each.limit)]

    @cached_property
    def judge_hash(self) -> str | None:
        """Of all that decides what the judge says, if there is one."""
        from acgpt.models.metadata import tokenizer_hash, weights_hash

        if self.lm is None:
            return None
        method = None if self.lm.metadata is None else self.lm.metadata.method
        content = [weights_hash(self.lm.model), tokenizer_hash(self.lm.tokenizer), method, self.lm.bos, self.lm.mask]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def there(self, each: Generations, path: Path) -> dict[str, Any] | None:
        """The result that is there, if it is of these very samples, scored in this way by as many seeds and this judge.

        A judge's name, as it is part of a result's, does not say whether it has been trained again since.
        """
        from acgpt.evaluation.generations import object_of_kind

        seeds = None if self.featurizer is None else list(range(self.seeds))
        if (found := object_of_kind(path, "mauve")) is None:
            return None
        try:
            seeds_and_judge = [(found["mauve"] or {}).get("seeds"), (found["judge"] or {}).get("hash")]
            own = [found["hash"], *way_of(found), *seeds_and_judge]
        except (KeyError, AttributeError):  # of another version, or somebody has changed it
            return None
        return found if own == [each.hash, *self.way(each), seeds, self.judge_hash] else None

    def check(self, each: Generations, mauve: bool) -> None:
        """Can all be measured?"""
        from acgpt.evaluation.mauve import check_counts
        from acgpt.evaluation.text_metrics import check_judge

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
        with bar(f"{each.name}, features of the {side} texts") as progress:
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
        from acgpt.evaluation.mauve import FEW, FEWEST, scores
        from acgpt.evaluation.text_metrics import companions, own_perplexity
        from acgpt.methods import METHODS

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
            remedy = " --rule windows may find more to compare with." if by_document else ""
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
        from acgpt.models.metadata import tokenizer_hash

        assert self.lm is not None
        return tokenizer_hash(self.lm.tokenizer) == str(each.record["tokenizer_hash"])

    def judgement(self, each: Generations, sides: Sides) -> dict[str, Any]:
        """What the judge says of the samples, and of the original text where that is known."""
        from acgpt.evaluation.text_metrics import judged

        assert self.lm is not None
        same, real = self.same_tokens(each), None
        if sides.original is not None and same:
            with bar(f"{each.name}, original texts judged") as progress:
                real = judged(self.lm, sides.original, same, progress)
        about = {"model": self.judge, "hash": self.judge_hash}
        with bar(f"{each.name}, generated texts judged") as progress:
            return {**about, **judged(self.lm, sides.samples, same, progress), "original": real}


def hardware(work: Work) -> str:
    """What it was computed on."""
    import torch

    devices = [each.device for each in (work.featurizer and work.featurizer.network, work.lm and work.lm.model) if each]
    on_gpu = any(device.type == "cuda" for device in devices)
    return torch.cuda.get_device_name() if on_gpu else platform.machine()


def write(path: Path, result: Mapping[str, Any]) -> None:
    """The result as a file, whole or not at all."""
    from acgpt.common.files import disk_errors, write_whole

    with disk_errors(path):
        write_whole(path, json.dumps(finite(result), indent=1, allow_nan=False) + "\n")


def print_result(result: Mapping[str, Any], path: Path) -> None:
    """The table for people."""
    from rich.table import Table

    from acgpt.display.show import Page, printable

    page, record, found = Page(), result["record"], result["mauve"]
    page.note(printable(result["generated"]), "bold")
    page.note(
        printable(f"method {record['method']}, mode {record['mode']}; {result['texts']} texts, {result['scored']}")
    )
    if found is not None:
        spread = "" if found["std"] is None else f" ± {found['std']:.3f}"
        page.print(f"MAUVE {found['mean']:.3f}{spread}", style="bold")
        if result["original"] is not None:
            page.note(f"the original texts have {result['original']['mean']:.3f}")
        page.note(
            printable(
                f"over {len(found['seeds'])} seeds of k-means, {found['clusters']} clusters; against "
                f"{result['reference']['texts']} texts; features of {result['features']['model']}"
            )
        )
    own, original, judge = result["companions"]["generated"], result["companions"]["original"], result["judge"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("", "generated", "original"):
        table.add_column(title, justify="left" if not title else "right")
    for key, title in {
        "distinct_1": "distinct-1", "distinct_2": "distinct-2", "distinct_3": "distinct-3",
        "repetition": "repeated 4-grams", "loops": "end in a loop",
    }.items():  # fmt: skip
        shown = [NO_ANSWER if side is None or side[key] is None else f"{side[key]:.1%}" for side in (own, original)]
        table.add_row(title, *shown)
    own_perplexity = NO_ANSWER if result["perplexity"] is None else f"{result['perplexity']:,.2f}"
    table.add_row("perplexity, its own", own_perplexity, NO_ANSWER)
    if judge is not None:
        sign = "≤ " if judge["bound"] else ""
        sides = judge, judge["original"]
        shown = [NO_ANSWER if side is None else f"{sign}{side['perplexity']:,.2f}" for side in sides]
        table.add_row(f"perplexity, judge's ({judge['measures']})", *shown)
    page.table(table)
    for note in result["notes"]:
        page.note(printable(f"note: {note}"))
    page.note(printable(f"{path}\n"))
