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
RESUMABLE = (
    "Free some space, or choose another folder. Nothing is lost: the same command resumes where this one stopped."
)
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
    folder = Path(folder)
    check_options(options)
    limit, train_tokenizer, mask_token = options.limit, options.train_tokenizer, options.mask_token
    with disk_errors(folder, RESUMABLE):
        revisions = known_revisions(read_previous(folder))
    parts = resolve([os.fspath(name) for name in names], revisions, limit)
    requested = Recipe(options.convention or "", options.validation or 0.0, options.field, options.seed, limit=limit)
    recipe = choose(parts, requested, options.validation is None)
    loaded = None if train_tokenizer else corpus_tokenizer.load(options.tokenizer or "gpt2", mask_token)
    watch(Progress("sources"))
    identity: dict[str, Any] = {
        "tokenizer": f"trained, {train_tokenizer} tokens" if loaded is None else corpus_tokenizer.hash_of(loaded),
        "mask_token": mask_token,
        **{key: value for key, value in asdict(recipe).items() if value is not None},
        "shard_bytes": options.shard_bytes,
        "sources": [part.describe() for part in parts],
    }
    with disk_errors(folder, RESUMABLE), alone(folder):
        previous = read_previous(folder)
        if previous is not None and not options.overwrite:
            finished = (folder / MANIFEST).exists()
            if differing := differences(previous["recipe"], identity):
                if finished or any(split["shards"] for split in previous["splits"].values()):
                    raise other_request(folder, finished, differing)
                previous = None  # no shard was completed: start again, for example after correcting an option
            elif finished:
                corpus = reuse(folder, options.skip_bad)
                watch(Progress("reused"))
                return corpus
        if previous is None or options.overwrite or previous["position"] == [0, 0]:
            previous = begin(folder, identity)
            if loaded is None:
                watch(Progress("tokenizer"))
                texts = training_texts(parts, recipe, options.skip_bad)
                loaded = corpus_tokenizer.train(texts, train_tokenizer or 0, mask_token)
            corpus_tokenizer.save(loaded, folder)
        vocabulary = corpus_tokenizer.vocabulary_in(folder, None if train_tokenizer else identity["tokenizer"])
        work = Preparation(folder, parts, recipe, identity, vocabulary, options.skip_bad, watch)
        work.restore(previous)
        with closing(work):
            work.run(options.workers or default_workers(parts))
            corpus = work.finish()
        watch(Progress("prepared"))
        return corpus


# ---- options --------------------------------------------------------------------------------------------------------


def check_options(options: PreparationOptions) -> None:
    """Check the options before anything is read."""
    if options.tokenizer is not None and options.train_tokenizer is not None:
        raise InputError(
            "`tokenizer` and `train_tokenizer` exclude each other: leave out `tokenizer` or `train_tokenizer`."
        )
    if options.shard_bytes < 1024:
        raise InputError(f"a shard must have at least 1,024 bytes, not {options.shard_bytes}.")


def choose(parts: Sequence[Part], requested: Recipe, default: bool) -> Recipe:
    """Check the requested recipe against the parts, and fill in what was left open.

    Args:
        parts: Parts to read.
        requested: Requested recipe; its `convention` may be empty.
        default: Whether the share to hold out was left open too.
    """
    named = [part for part in parts if isinstance(part, HubSplit)]
    by_lines = [part.title for part in named if part.hub.convention == "lines"]
    convention = requested.convention or ("lines" if by_lines else "documents")
    if by_lines and convention != "lines":
        raise InputError(f"{by_lines[0]} is a dataset of lines, not of documents: use `convention='lines'`.")
    splits, share = {part.split for part in parts}, requested.validation
    if default:
        share = 0.0 if "validation" in splits else max([part.hub.validation for part in named], default=0.0)
    if share and "validation" in splits:
        raise InputError("the sources already have a validation split: leave `validation` out, or that source.")
    if share and "train" not in splits:
        raise InputError("there is no train split to hold documents out of: leave `validation` out.")
    recipe = replace(requested, convention=convention, validation=share)
    train = [(number, part) for number, part in enumerate(parts) if part.split == "train"][: requested.limit]
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


def other_request(folder: Path, finished: bool, differing: Sequence[str]) -> InputError:
    """Return the error for a folder that was made by another request."""
    what, remedy = (
        "a corpus of other sources or settings",
        "Choose another folder, or replace it with `overwrite=True`.",
    )
    if not finished:
        what = "an unfinished corpus of another command"
        remedy = "Repeat that command to finish it, choose another folder, or start again with `overwrite=True`."
    return InputError(f"{folder} holds {what}. Differences: {', '.join(differing)}. {remedy}")


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
    train = [(number, part) for number, part in enumerate(parts) if part.split == "train"]
    for number, split, batch in read(train, recipe):
        for name, document in recipe.documents(batch, split, number):
            if isinstance(document, Bad):
                if not skip_bad:
                    raise unusable(parts[number], document)
            elif name == "train":
                yield from recipe.texts(document)
                size += len(document.text.encode())
        if size >= TRAINED_ON:
            return


@dataclass
class Preparation:
    """A running preparation. After every batch it knows its position in the sources, so it can be resumed.

    Args:
        folder: Folder of the corpus.
        parts: Parts to read.
        recipe: Convention, held-out share and limit.
        identity: The request, as the journal and the manifest store it.
        vocabulary: The tokenizer.
        skip_bad: Skip unusable rows instead of raising an error.
        watch: Called with the `Progress` after every batch.
    """

    folder: Path
    parts: Sequence[Part]
    recipe: Recipe
    identity: dict[str, Any]
    vocabulary: Vocabulary
    skip_bad: bool
    watch: Callable[[Progress], None]

    def restore(self, journal: dict[str, Any]) -> None:
        """Go back to the state of a journal."""
        self.part, self.row = journal["position"]
        self.skipped: list[int] = journal["skipped"]
        self.damaged: list[str | None] = journal.get("damaged") or [None] * len(self.parts)
        self.taken: int = journal.get("taken", 0)  # documents of train so far, for the limit
        dtype = self.vocabulary.dtype
        capacity = self.identity["shard_bytes"] // np.dtype(dtype).itemsize
        names = dict.fromkeys([part.split for part in self.parts] + ["validation"] * bool(self.recipe.validation))
        self.writers = {name: Writer(self.folder, name, dtype, capacity) for name in names}
        for name, state in journal["splits"].items():
            self.writers[name].restore(state)

    def checkpoint(self) -> None:
        """Write all tokens to disk, then write the journal."""
        for writer in self.writers.values():
            writer.sync()
        splits = {name: writer.state() for name, writer in self.writers.items()}
        position = {"position": [self.part, self.row], "taken": self.taken}
        position |= {"skipped": self.skipped, "damaged": self.damaged}
        journal = {"recipe": self.identity, **position, "splits": splits}
        write_json(self.folder / JOURNAL, journal, ensure_ascii=False, locked=True)

    def close(self) -> None:
        """Close the files."""
        for writer in self.writers.values():
            writer.close()

    def batches(self) -> Iterator[tuple[int, str, Batch]]:
        """Yield the remaining batches, with the number and the split of their part."""
        # The position is read now, because reading runs ahead of writing.
        return read(list(enumerate(self.parts))[self.part :], self.recipe, self.row, self.taken)

    def run(self, workers: int) -> None:
        """Read, tokenise and write all remaining batches."""
        sizes = [part.size for part in self.parts]
        total = sum(sizes) if all(sizes) and self.recipe.limit is None else 0
        writers = self.writers.values()
        shards, text = 0, 0  # number of shards and bytes of text at the last checkpoint
        for encoded in in_order(partial(encode, self.recipe, self.vocabulary), self.batches(), workers):
            if encoded.bad and not self.skip_bad:
                self.checkpoint()
                raise unusable(self.parts[encoded.part], encoded.bad[0])
            for split, share in encoded.shares.items():
                self.writers[split].write(share)
            self.skipped[encoded.part] += sum(bad.rows for bad in encoded.bad)
            for bad in encoded.bad:
                if bad.lost:
                    self.damaged[encoded.part] = f"{bad.where}: {bad.why}; {bad.lost} is left out"
            self.taken += encoded.count if self.parts[encoded.part].split == "train" else 0
            self.part, self.row = encoded.part, encoded.next
            progress = Progress(
                "tokens",
                done=sum(sizes[: self.part]) + encoded.done * sizes[self.part],
                total=total,
                documents=sum(writer.documents for writer in writers),
                tokens=sum(writer.tokens for writer in writers),
                text=sum(writer.bytes for writer in writers),
            )
            if progress.text - text >= CHECKPOINT or sum(len(writer.shards) for writer in writers) > shards:
                self.checkpoint()
                shards, text = sum(len(writer.shards) for writer in writers), progress.text
            self.watch(progress)

    def finish(self) -> Corpus:
        """Complete the last shards, write the manifest, and open the corpus."""
        self.checkpoint()
        if not any(writer.tokens for writer in self.writers.values()):
            raise InputError("the sources contain no text: every document is blank.")
        splits: dict[str, dict[str, Any]] = {}
        for name, writer in self.writers.items():
            writer.finish()
            shards = [asdict(shard) for shard in writer.shards]
            counts = {"documents": writer.documents, "tokens": writer.tokens, "bytes": writer.bytes}
            splits[name] = {**counts, "shards": shards}
        unit = "piece of the text files" if self.recipe.piece else "document"
        for name, amount in {"validation": "no", "train": "every"}.items():
            if self.recipe.validation and not splits[name]["documents"]:
                warnings.warn(
                    f"{amount} {unit} was held out, because there are too few for "
                    f"`validation={self.recipe.validation}`. Choose another share or `seed`, or add a source for "
                    "the split: validation=PATH.",
                    stacklevel=3,
                )
        vocabulary = {key: value for key, value in asdict(self.vocabulary).items() if key != "folder"}
        outcome = [
            {"skipped": skipped, "damaged": lost} for skipped, lost in zip(self.skipped, self.damaged, strict=True)
        ]
        manifest = {
            "format_version": FORMAT_VERSION,
            "acgpt_version": __version__,
            **vocabulary,
            "dtype": self.vocabulary.dtype,
            "convention": self.recipe.convention,
            "limit": self.recipe.limit,
            **{key: sum(split[key] for split in splits.values()) for key in ("documents", "tokens", "bytes")},
            "skipped": sum(self.skipped),
            "damaged": sum(lost is not None for lost in self.damaged),
            "sources": [{**source, **result} for source, result in zip(self.identity["sources"], outcome, strict=True)],
            "splits": splits,
            "recipe": self.identity,
        }
        write_json(self.folder / MANIFEST, manifest, ensure_ascii=False, locked=True)
        (self.folder / JOURNAL).unlink()
        return Corpus.open(self.folder)
