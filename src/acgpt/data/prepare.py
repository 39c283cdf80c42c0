"""Prepare a corpus: read the sources, tokenise in parallel, write shards. It can be interrupted and resumed.

    parts ──► batches ──► encode, in worker processes ──► one writer per split ──► shards
              (in order)  (a bounded number in flight)    (in order)

Memory is bounded by the batches in flight, whatever the size of the corpus. Results are used in the order of the
sources, so the shards do not depend on the number of workers. `acgpt.data.sources` reads, `acgpt.data.encode`
tokenises, `acgpt.data.shards` writes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from acgpt.common.files import disk_errors, write_json
from acgpt.common.options import keywords
from acgpt.data import tokenizer as corpus_tokenizer
from acgpt.data.corpus import FORMAT_VERSION, JOURNAL, MANIFEST, Corpus
from acgpt.data.encode import Recipe, encode, in_order
from acgpt.data.options import PreparationOptions
from acgpt.data.rows import Bad, Batch
from acgpt.data.shards import Writer, alone, begin, read_previous
from acgpt.data.sources import File, HubSplit, Part, resolve
from acgpt.data.tokenizer import Vocabulary
from acgpt.errors import InputError
from acgpt.version import __version__

CHECKPOINT = 64 << 20  # bytes of text after which the journal is written, if no shard was completed before
TRAINED_ON = 512 << 20  # maximum number of bytes of text to train a tokenizer on
PIECE = 1 << 12  # bytes per piece, if pieces of text files are held out
RESUMABLE = "Nothing is lost: the same command resumes where this one stopped."
WORTH_A_WORKER = 8 << 20  # bytes of source per additional worker process


@dataclass(frozen=True)
class Progress:
    """The progress of a preparation.

    Args:
        phase: "sources" (checking them), "tokenizer" (training it), "tokens" (tokenising), and at the end "prepared",
            or "reused" if the corpus existed.
        done: Bytes of the sources read so far.
        total: Bytes of the sources; 0 if unknown.
        documents: Documents written so far, by this run and those that it resumes.
        tokens: Tokens written so far, likewise.
        text: Bytes of text written so far, likewise.
    """

    phase: str
    done: float = 0.0
    total: int = 0
    documents: int = 0
    tokens: int = 0
    text: int = 0


@keywords(PreparationOptions)
def prepare(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    watch: Callable[[Progress], None] | None = None,
    **keywords: Any,
) -> Corpus:
    """Prepare a corpus of token shards from sources. The same call resumes an interrupted preparation.

    In a script, call it under `if __name__ == "__main__":`, because it starts processes.

    Args:
        sources: Files, folders or globs (`.txt`, `.jsonl`, `.parquet`; see `acgpt.data.sources`), or named datasets
            ("wikitext-103", "fineweb"). A prefix `SPLIT=` names the split, if it is not train: `"test=heldout.txt"`.
        folder: Folder of the corpus: new, empty, or one that the same call has started.
        **keywords: See `PreparationOptions`.
        watch: Called with the `Progress` from time to time.

    Raises:
        InputError: A source, an option or the folder is wrong; the error says what to do.
        OutputError: The folder cannot be written. Its contents are kept, and the same call resumes.
    """
    options = PreparationOptions.of(prepare, keywords)
    watch = watch or (lambda progress: None)
    names = [sources] if isinstance(sources, str | os.PathLike) else sources
    folder, size, mask_token = Path(folder), options.train_tokenizer, options.mask_token
    if options.tokenizer is not None and size is not None:
        raise InputError(
            "`tokenizer` and `train_tokenizer` exclude each other: leave out `tokenizer` or `train_tokenizer`."
        )
    if options.shard_bytes < 1024:
        raise InputError(f"a shard must have at least 1,024 bytes, not {options.shard_bytes}.")
    with disk_errors(folder, RESUMABLE):
        revisions = known_revisions(read_previous(folder))
    parts = resolve([os.fspath(name) for name in names], revisions, options.limit)
    recipe = choose(parts, options)
    tokenizer = None if size else corpus_tokenizer.load(options.tokenizer or "gpt2", mask_token)
    watch(Progress("sources"))
    from acgpt.models.metadata import tokenizer_hash  # imports torch, which no error above should wait for

    identity: dict[str, Any] = {
        "tokenizer": f"trained, {size} tokens" if tokenizer is None else tokenizer_hash(tokenizer),
        "mask_token": mask_token,
        **{key: value for key, value in asdict(recipe).items() if value is not None},
        "shard_bytes": options.shard_bytes,
        "sources": [part.describe() for part in parts],
    }
    with disk_errors(folder, RESUMABLE), alone(folder):
        journal = None if options.overwrite else resumable(folder, identity)
        if (folder / MANIFEST).exists() and not options.overwrite:
            corpus = reuse(folder, options.skip_bad)
            watch(Progress("reused"))
            return corpus
        if journal is None or journal["position"] == [0, 0]:
            journal = begin(folder, identity)
            if tokenizer is None:
                watch(Progress("tokenizer"))
                texts = training_texts(parts, recipe, options.skip_bad)
                tokenizer = corpus_tokenizer.train(texts, size or 0, mask_token)
            corpus_tokenizer.save(tokenizer, folder)
        vocabulary = corpus_tokenizer.vocabulary_in(folder, None if size else identity["tokenizer"])
        with closing(Preparation(folder, parts, recipe, journal, vocabulary)) as work:
            work.run(options.workers or default_workers(parts), options.skip_bad, watch)
            corpus = work.finish()
        watch(Progress("prepared"))
        return corpus


# ---- the request ----------------------------------------------------------------------------------------------------


def choose(parts: Sequence[Part], options: PreparationOptions) -> Recipe:
    """Check the options against the parts, and choose what they leave open."""
    named = [part for part in parts if isinstance(part, HubSplit)]
    by_lines = [part.title for part in named if part.convention == "lines"]
    convention = options.convention or ("lines" if by_lines else "documents")
    if by_lines and convention != "lines":
        raise InputError(f"{by_lines[0]} is a dataset of lines, not of documents: use `convention='lines'`.")
    splits, share = {part.split for part in parts}, options.validation or 0.0
    if options.validation is None and "validation" not in splits:
        share = max([part.validation for part in named], default=0.0)
    if share and "validation" in splits:
        raise InputError("the sources already have a validation split: leave `validation` out, or that source.")
    if share and "train" not in splits:
        raise InputError("there is no train split to hold documents out of: leave `validation` out.")
    recipe = Recipe(convention, share, options.field, options.seed, limit=options.limit)
    train = [(number, part) for number, part in enumerate(parts) if part.split == "train"][: options.limit]
    text_only = all(isinstance(part, File) and part.format == "txt" for _, part in train)
    too_few = len(train) * share < 1 or len({recipe.split_of("train", number, 0) for number, _ in train}) < 2
    return replace(recipe, piece=PIECE) if share and text_only and too_few else recipe


def default_workers(parts: Sequence[Part]) -> int:
    """Return the default number of workers: one per core, but fewer if the sources are small."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = [part.size for part in parts]
    return cores if not all(sizes) else min(cores, 1 + sum(sizes) // WORTH_A_WORKER)


# ---- an existing folder ---------------------------------------------------------------------------------------------


def known_revisions(previous: dict[str, Any] | None) -> dict[str, str]:
    """Return the revisions of hub datasets that an earlier run has used, by their path."""
    sources = previous["recipe"]["sources"] if previous else []
    return {source["path"]: source["revision"] for source in sources if source["format"] == "hub"}


def resumable(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest or the journal in a folder, if it was made by the same request; `None` to start again.

    Raises:
        InputError: It was made by another request, and at least one shard is complete.
    """
    previous = read_previous(folder)
    if previous is None or not (differing := differences(previous["recipe"], identity)):
        return previous
    if (folder / MANIFEST).exists():
        what = "a corpus of other sources or settings"
        remedy = "Choose another folder, or replace it with `overwrite=True`."
    elif any(split["shards"] for split in previous["splits"].values()):
        what = "an unfinished corpus of another command"
        remedy = "Repeat that command to finish it, choose another folder, or start again with `overwrite=True`."
    else:  # for example after an option was corrected
        return None
    raise InputError(f"{folder} holds {what}. Differences: {', '.join(differing)}. {remedy}")


def differences(existing: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    """Return the keys in which a request differs from the one that an existing folder was made with, with values."""

    def contents(recipe: dict[str, Any]) -> list[dict[str, Any]]:
        return [{key: value for key, value in source.items() if key != "name"} for source in recipe["sources"]]

    differing = [
        key if key == "tokenizer" else f"{key} (was {existing.get(key)!r}, now {requested.get(key)!r})"
        for key in {**requested, **existing}
        if key != "sources" and existing.get(key) != requested.get(key)
    ]
    return differing + ["sources"] * (contents(existing) != contents(requested))


def reuse(folder: Path, skip_bad: bool) -> Corpus:
    """Check the finished corpus in a folder and return it."""
    corpus = Corpus.open(folder)
    corpus.verify()
    corpus_tokenizer.vocabulary_in(folder, corpus.manifest["tokenizer_hash"])
    if corpus.manifest["skipped"] and not skip_bad:
        lost = f" and the rest of {count} damaged files" if (count := corpus.manifest.get("damaged")) else ""
        skipped = corpus.manifest["skipped"]
        raise InputError(
            f"the corpus in {folder} lacks {skipped} unusable rows{lost}: accept that with `skip_bad=True`."
        )
    (folder / JOURNAL).unlink(missing_ok=True)
    return corpus


# ---- the work -------------------------------------------------------------------------------------------------------


def unusable(part: Part, bad: Bad) -> InputError:
    """Return the error for an unusable row."""
    skipped = bad.lost or "such rows"
    return InputError(f"{part.name}, {bad.where}: {bad.why}. Correct it, or skip {skipped} with `skip_bad=True`.")


def read(
    parts: Sequence[tuple[int, Part]], recipe: Recipe, start: int = 0, taken: int = 0
) -> Iterator[tuple[int, str, Batch]]:
    """Read parts, and yield the number of the part, its split and a batch at a time.

    Args:
        parts: Parts to read, with their numbers.
        recipe: Its limit, if any, applies to the documents of train.
        start: Row of the first part to start at.
        taken: Number of documents of train before that row.
    """
    for number, part in parts:
        remaining = recipe.limit - taken if recipe.limit is not None and part.split == "train" else None
        for batch in part.batches(start, recipe.field, recipe.convention) if remaining != 0 else ():
            if remaining is not None:
                batch = batch.head(remaining)
                remaining, taken = remaining - batch.count, taken + batch.count
            yield number, part.split, batch
            if remaining == 0:
                break
        start = 0


def training_texts(parts: Sequence[Part], recipe: Recipe, skip_bad: bool) -> Iterator[str]:
    """Yield texts from the beginning of the train split, to train a tokenizer on."""
    size = 0
    for number, split, batch in read([item for item in enumerate(parts) if item[1].split == "train"], recipe):
        for document in recipe.documents(number, split, batch):
            if isinstance(document, Bad):
                if not skip_bad:
                    raise unusable(parts[number], document)
            elif document.split == "train":
                yield from recipe.texts(document)
                size += len(document.text.encode())
        if size >= TRAINED_ON:
            return


class Preparation:
    """A running preparation, which goes on from a journal.

    Args:
        folder: Folder of the corpus.
        parts: Parts to read.
        recipe: Convention, held-out share and limit.
        journal: The journal, which is kept up to date: after every batch it has the position in the sources.
        vocabulary: The tokenizer.
    """

    def __init__(
        self, folder: Path, parts: Sequence[Part], recipe: Recipe, journal: dict[str, Any], vocabulary: Vocabulary
    ) -> None:
        self.folder, self.parts, self.recipe = folder, parts, recipe
        self.journal, self.vocabulary = journal, vocabulary
        capacity = journal["recipe"]["shard_bytes"] // np.dtype(vocabulary.dtype).itemsize
        names = dict.fromkeys([part.split for part in parts] + ["validation"] * bool(recipe.validation))
        self.splits: dict[str, dict[str, Any]] = journal["splits"]
        for name in names:
            self.splits.setdefault(name, {"documents": 0, "tokens": 0, "bytes": 0, "shards": []})
        self.writers = {name: Writer(folder, name, vocabulary.dtype, capacity, self.splits[name]) for name in names}

    def checkpoint(self) -> None:
        """Write all tokens to disk, then write the journal."""
        for writer in self.writers.values():
            writer.sync()
        write_json(self.folder / JOURNAL, self.journal, ensure_ascii=False, locked=True)

    def close(self) -> None:
        """Close the files."""
        for writer in self.writers.values():
            writer.close()

    def run(self, workers: int, skip_bad: bool, watch: Callable[[Progress], None]) -> None:
        """Read, tokenise and write all remaining batches."""
        part, row = self.journal["position"]
        sizes = [part.size for part in self.parts]
        total = sum(sizes) if all(sizes) and self.recipe.limit is None else 0
        batches = read(list(enumerate(self.parts))[part:], self.recipe, row, self.journal["taken"])
        shards, text = 0, 0  # number of shards and bytes of text at the last checkpoint
        for encoded in in_order(partial(encode, self.recipe, self.vocabulary), batches, workers):
            batch, part, outcome = encoded.batch, encoded.part, self.journal["outcomes"][encoded.part]
            if encoded.bad and not skip_bad:
                self.checkpoint()
                raise unusable(self.parts[part], encoded.bad[0])
            for split, share in encoded.shares.items():
                self.writers[split].write(share)
            for bad in encoded.bad:
                outcome["skipped"] += bad.rows
                outcome["damaged"] = (
                    f"{bad.where}: {bad.why}; {bad.lost} is left out" if bad.lost else outcome["damaged"]
                )
            self.journal["taken"] += batch.count if self.parts[part].split == "train" else 0
            self.journal["position"] = [part, batch.next]
            progress = Progress(
                "tokens",
                done=sum(sizes[:part]) + batch.done * sizes[part],
                total=total,
                documents=self.sum_of("documents"),
                tokens=self.sum_of("tokens"),
                text=self.sum_of("bytes"),
            )
            completed = sum(len(split["shards"]) for split in self.splits.values())
            if progress.text - text >= CHECKPOINT or completed > shards:
                self.checkpoint()
                shards, text = completed, progress.text
            watch(progress)

    def sum_of(self, key: str) -> int:
        """Return the number of documents, tokens or bytes in all splits."""
        return sum(split[key] for split in self.splits.values())

    def finish(self) -> Corpus:
        """Complete the last shards, write the manifest, and open the corpus."""
        self.checkpoint()
        if not self.sum_of("tokens"):
            raise InputError("the sources contain no text: every document is blank.")
        for writer in self.writers.values():
            writer.finish()
        unit = "piece of the text files" if self.recipe.piece else "document"
        for name, amount in {"validation": "no", "train": "every"}.items():
            if self.recipe.validation and not self.splits[name]["documents"]:
                warnings.warn(
                    f"{amount} {unit} was held out, because there are too few for "
                    f"`validation={self.recipe.validation}`. Choose another share or `seed`, or add a source for "
                    "the split: validation=PATH.",
                    stacklevel=3,
                )
        identity, outcomes = self.journal["recipe"], self.journal["outcomes"]
        manifest = {
            "format_version": FORMAT_VERSION,
            "acgpt_version": __version__,
            **{key: value for key, value in asdict(self.vocabulary).items() if key != "folder"},
            "dtype": self.vocabulary.dtype,
            "convention": self.recipe.convention,
            "limit": self.recipe.limit,
            **{key: self.sum_of(key) for key in ("documents", "tokens", "bytes")},
            "skipped": sum(outcome["skipped"] for outcome in outcomes),
            "damaged": sum(outcome["damaged"] is not None for outcome in outcomes),
            "sources": [{**source, **outcome} for source, outcome in zip(identity["sources"], outcomes, strict=True)],
            "splits": self.splits,
            "recipe": identity,
        }
        write_json(self.folder / MANIFEST, manifest, ensure_ascii=False, locked=True)
        (self.folder / JOURNAL).unlink()
        return Corpus.open(self.folder)
